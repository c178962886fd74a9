"""Norms of a model's matrices, layer by layer.

Prints:

    3,049,920 parameters
    model.embed_tokens.weight [2048, 192] norm 70.9
"""

import mizarr

asked = mizarr.compute("inspect_weights", store="activations")
told = asked.to_json()
print(f"{told['parameters']:,} parameters")
embedding = told["embedding"]
print(embedding["name"], embedding["shape"], f"norm {embedding['norm']:.1f}")
