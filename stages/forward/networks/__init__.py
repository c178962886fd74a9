"""Torch side of an architecture: the loop over layers, and the computation of each layer kind."""
