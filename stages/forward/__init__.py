"""Hooked models: the only room with model code. Its rooms, lowest first, and why they are so: DESIGN.md.

architectures   what a model is without its weights: points, sizes, families, checkpoint tensors; no torch
checkpoints     tensors by name, however files hold them
hooks           specs, interventions, and the taps that apply them inside a pass
networks        the torch side of an architecture, and the one loop over layers
passes          drivers of the loop, and the planner that makes a tree of many runs
edges           layers taken apart by who reads whom
text, models    tokenizers and prompts; files, identity, loading, `Model`
runs, capture   runs as users give them, experiments; activations of a corpus into a store
generation      texts that go on
"""
