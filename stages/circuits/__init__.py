"""Circuits: the edges that a behaviour needs, found by gradients and by exact runs, and their evaluation."""
