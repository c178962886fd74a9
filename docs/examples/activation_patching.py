"""From which layer on the state of one prompt brings its answer into another.

Prints:

    blocks.0.hook_resid_post ' Eng'
    blocks.1.hook_resid_post ' Eng'
    blocks.2.hook_resid_post ' Eng'
    blocks.3.hook_resid_post ' French'
    blocks.4.hook_resid_post ' R'
    blocks.5.hook_resid_post ' French'
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
clean, corrupted = (
    "The mother tongue of Danielle Darrieux is",
    "The mother tongue of Antonietta Di Martino is",
)
states = model.forward(clean, mizarr.HookSpec().capture("blocks.*.hook_resid_post"), want=None)
runs = [
    mizarr.Run(
        corrupted, mizarr.HookSpec().intervene(point, mizarr.Replace(states[point][0, -1], positions=(-1,)))
    )
    for point in states
]
for point, cache in zip(states, mizarr.run(model, runs), strict=True):
    print(point, repr(model.tokenizer.decode([int(cache.logits[0, -1].argmax())])))
