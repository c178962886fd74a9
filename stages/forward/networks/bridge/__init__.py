"""Models that transformers computes: how one is loaded, what is found of it by running it, and its network."""
