"""What each layer would say next.

Prints:

    0 'z' 0.10 52
    1 "'" 0.04 17
    2 'se' 0.09 4
    3 ' French' 0.10 1
    4 ' French' 0.52 1
    5 ' French' 0.98 1
"""

import mizarr

prompt = "The mother tongue of Danielle Darrieux is"
lens = mizarr.compute("logit_lens", store="activations", prompts=[prompt], answers=["French"])
for layer in lens.to_json()["results"][0]["layers"]:
    best = layer["predictions"][0]
    print(layer["layer"], repr(best["token"]), f"{best['probability']:.2f}", layer["answer_rank"])
