"""How the answer follows the weight of one attention edge; all doses in one planned list of runs.

Prints:

     0.0 0.977
     0.5 0.982
     1.0 0.985
     2.0 0.987
     8.0 0.989
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
ids = model.tokenize([prompt])[0]
french = model.tokenize([f"{prompt} French"])[0][len(ids)]
edge = (len(ids) - 1, len(ids) - 2)
doses = [0.0, 0.5, 1.0, 2.0, 8.0]
runs = [
    mizarr.Run(
        prompt, mizarr.HookSpec().intervene("blocks.1.attn.hook_pattern", mizarr.Steer([edge], factor))
    )
    for factor in doses
]
for factor, cache in zip(doses, mizarr.run(model, runs), strict=True):
    print(f"{factor:4} {cache.logits[0, -1].softmax(-1)[french]:.3f}")
