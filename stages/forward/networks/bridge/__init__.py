"""The bridge: models that transformers computes, how they are loaded and probed, and their network."""
