"""Circuits: which edges of a model's graph a behaviour needs, found by gradients and by exact runs, and
tested."""
