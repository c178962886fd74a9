"""A text that goes on: greedy, and with a part of the model silenced.

Prints:

    ' French.'
    ' a che'
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
quiet = mizarr.HookSpec().intervene("blocks.1.hook_attn_out", mizarr.Zero())
print(repr(mizarr.generate(model, prompt, max_tokens=2).texts[0]))
print(repr(mizarr.generate(model, prompt, max_tokens=2, hooks=quiet).texts[0]))
