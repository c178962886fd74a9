"""Models that transformers computes, as values: what was found of them by running them."""
