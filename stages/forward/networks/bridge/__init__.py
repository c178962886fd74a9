"""Models that transformers computes: how one is loaded, what running it shows, and its network."""
