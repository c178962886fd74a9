"""What a recurrent model no longer says when one token leaves no trace in its state.

Prints:

    position 1: KL 0.025 nats
    position 16: KL 0.007 nats
"""

import mizarr
from mizarr.stages.forward.hooks.writes import StateKnockoutSpec

model = mizarr.Model.from_pretrained("specimen-rwkv")
prompt = "The mother tongue of Danielle Darrieux is"
length = len(model.tokenize([prompt])[0])
clean = model.forward(prompt).logits[0, -1].log_softmax(-1)
for position in (1, length - 3):
    without = StateKnockoutSpec().position(position).hooks(model.config, length)
    changed = model.forward(prompt, without).logits[0, -1].log_softmax(-1)
    print(f"position {position}: KL {float((clean.exp() * (clean - changed)).sum()):.3f} nats")
