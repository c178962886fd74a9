"""Training dictionaries - autoencoders, transcoders, cross-layer transcoders - from stored activations.

settings     what is trained, on what, for how long: plain values, checked
statistics   mean, scale and variance of each hook point
models       parameters, encode and decode; losses: sparsity, dead features
trainer      the loop over batches of stages/training_data; checkpoint: what it leaves behind to go on from
evaluate     L0, FVU, dead features, densities; replacement: loss of a model that reads what was reconstructed

Border: reads stored activations and writes dictionary files; which prompts, and which model made them, is the
caller's. Importing this package does not import torch. Why it is built so: DESIGN.md.
"""
