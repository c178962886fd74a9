"""Runs (forward passes as values) and experiments (stored measurements of runs)."""
