"""The likeliest next tokens of a prompt.

Prints:

    ' French' 0.985
    ' D' 0.003
    ' po' 0.002
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
probability = model.forward("The mother tongue of Danielle Darrieux is").logits[0, -1].softmax(-1)
for p, token in zip(*probability.topk(3), strict=True):
    print(f"{model.tokenizer.decode([int(token)])!r} {p:.3f}")
