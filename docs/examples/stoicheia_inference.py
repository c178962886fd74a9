"""A network of AlgZoo on numbers drawn at random, whole and without one neuron.

Prints:

    0.976
    0.376
"""

import numpy as np

import mizarr
from mizarr.stages.algzoo.model import load_model

rnn = load_model("specimen-2nd-argmax-3")
x = np.random.default_rng(0).standard_normal((1000, 3))
silenced = mizarr.HookSpec().intervene("rnn.hook_hidden.*", mizarr.Zero(neurons=(2,)))
for hooks in (None, silenced):
    said = rnn.forward(x, hooks).logits.numpy().argmax(1)
    print(f"{(said == rnn.task.targets(x)).mean():.3f}")
