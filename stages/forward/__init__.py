"""Hooked models: the only room with model code.

points, hooks, interventions   what can be read and changed, as data                 (torch-free to import)
config, families, autoconfig   what a family is; files, weights, tokens: how a model is found and loaded
layout_check                   what a family no row names must pass: agreement with transformers
transformer/                   the forward pass, hook points told to `taps`
model                          Model.from_pretrained, forward; cache: what it gave
capture, harvest, batches      prompts through a model into a store
"""
