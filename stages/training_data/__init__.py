"""Training data out of the store: rows of activations, shuffled, in an order that can be taken up anywhere.

stored         rows of one stored run: which prompts, which tokens of them
several        runs end to end, and runs of several models side by side
order          which rows in which order: two-level shuffle, a function of (seed, epoch) alone
batches        batches in that order, read a window at a time, shared out over workers
conversion     stored numbers as float32
normalisation  statistics of states as a cached stage, and what is done to rows by them
loader         `ActivationLoader`: batches as arrays; torch_dataset: the same for a DataLoader

Border: reads stored activations; what is learnt from them is stages/features/training's. Importing this
package imports no torch. Why it is built so: DESIGN.md.

Axes: token (packed, as stored; several runs end to end), row (a token that is read), width.
"""
