"""What each layer would say next.

Prints:

    0 ' is' 0.54 94
    1 ' is' 0.37 26
    2 ' is' 0.27 11
    3 ' L' 0.13 6
    4 ' French' 0.58 1
    5 ' French' 0.99 1
"""

import mizarr

prompt = "The mother tongue of Danielle Darrieux is"
lens = mizarr.compute("logit_lens", store="activations", prompts=[prompt], answers=["French"])
for layer in lens.to_json()["results"][0]["layers"]:
    best = layer["predictions"][0]
    print(layer["layer"], repr(best["token"]), f"{best['probability']:.2f}", layer["answer_rank"])
