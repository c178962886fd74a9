"""Where the last token looks, head by head of one layer.

Prints:

    head 0 looks at position 9 with 0.50
    head 1 looks at position 9 with 0.53
    head 2 looks at position 0 with 0.67
    head 3 looks at position 8 with 0.26
    head 4 looks at position 2 with 0.88
    head 5 looks at position 8 with 0.65
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
point = mizarr.HookPoint.pattern(1)
pattern = model.forward("The mother tongue of Raimu is", mizarr.HookSpec().capture(point))[point][0]
for head, row in enumerate(pattern[:, -1]):
    print(f"head {head} looks at position {int(row.argmax())} with {row.max():.2f}")
