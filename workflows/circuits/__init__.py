"""Workflows for circuits: which edges of the model's graph a task needs, and how faithful circuits are."""
