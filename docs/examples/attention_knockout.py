"""What is no longer said when the last token may not read the one before it, in the first layer.

Prints:

    ' French' 0.985
    'ian' 0.187
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
last = len(model.tokenize([prompt])[0]) - 1
cut = mizarr.HookSpec().intervene("blocks.0.attn.hook_scores", mizarr.Knockout(edges=[(last, last - 1)]))
for hooks in (None, cut):
    probability = model.forward(prompt, hooks).logits[0, -1].softmax(-1)
    print(f"{model.tokenizer.decode([int(probability.argmax())])!r} {probability.max():.3f}")
