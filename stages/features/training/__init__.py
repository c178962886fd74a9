"""Training of dictionaries - autoencoders, transcoders, cross-layer transcoders - on stored activations.

settings     settings of a training as plain values, checked
statistics   mean, scale and variance of each hook point
models       parameters, encode and decode
losses       reconstruction, sparsity, dead features
trainer      the loop over batches of stages/training_data
checkpoint   files from which a training resumes
evaluate     L0, FVU, dead features, densities
replacement  loss of a model that reads reconstructions in place of its activations

Border: reads stored activations and writes dictionary files; the caller chooses prompts and model. Importing
this package does not import torch. The order of batches: stages/training_data/DESIGN.md.
"""
