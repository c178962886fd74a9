"""Activations of a run on disk: shards, labels, claims, what is committed."""
