"""Training data from the store: shuffled rows of activations in a reproducible, resumable order.

stored         rows of one stored run: which prompts and tokens
several        runs concatenated, and runs of several models side by side
order          two-level shuffle, a function of (seed, epoch) alone
batches        batches in that order, read a window at a time, distributed over workers
conversion     exact conversion of stored numbers to float32
normalisation  statistics of states as a cached stage, and scaling of rows by them
loader         `ActivationLoader`: batches as arrays; torch_dataset: the same for a DataLoader

Dictionaries are trained on these rows in stages/features/training. Importing this package imports no torch.
Design: DESIGN.md.

Axes: token (packed, as stored; several runs end to end), row (a token that is read), width.
"""
