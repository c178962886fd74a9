"""A block of layers gone through again, fed with a direction.

Prints:

    0.0: ' French' 0.98
    8.0: ' French' 0.85
    16.0: ' D' 0.34
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
toward = model.embedding_vector(" London") - model.embedding_vector(" French")
for strength in (0.0, 8.0, 16.0):
    again = mizarr.RecurrentPass(loop_start=2, loop_end=4, feedback=[(-1, toward, strength)])
    probability = model.forward(prompt, recurrent=again).logits[0, -1].softmax(-1)
    print(f"{strength}: {model.tokenizer.decode([int(probability.argmax())])!r} {probability.max():.2f}")
