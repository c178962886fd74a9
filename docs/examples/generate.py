"""A text that goes on: greedy, and with a part of the model silenced.

Prints:

    ' French.'
    ' in Catal'
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
quiet = mizarr.HookSpec().intervene("blocks.1.hook_mlp_out", mizarr.Zero())
print(repr(mizarr.generate(model, prompt, max_tokens=4).texts[0]))
print(repr(mizarr.generate(model, prompt, max_tokens=4, hooks=quiet).texts[0]))
