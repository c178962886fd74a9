"""Captures: activations of a corpus, written into a store segment by segment."""
