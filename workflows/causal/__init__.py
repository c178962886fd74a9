"""Workflows that patch, ablate or knock out parts of a model and measure the change of its next-token
prediction."""
