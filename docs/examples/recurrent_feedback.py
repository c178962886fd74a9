"""A block of layers gone through again, fed with a direction.

Prints:

    0.0: ' French' 0.99
    2.0: ' French' 0.99
    8.0: ' English' 1.00
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
toward = model.embedding_vector(" English") - model.embedding_vector(" French")
for strength in (0.0, 2.0, 8.0):
    again = mizarr.RecurrentPass(loop_start=2, loop_end=4, feedback=[(-1, toward, strength)])
    probability = model.forward(prompt, recurrent=again).logits[0, -1].softmax(-1)
    print(f"{strength}: {model.tokenizer.decode([int(probability.argmax())])!r} {probability.max():.2f}")
