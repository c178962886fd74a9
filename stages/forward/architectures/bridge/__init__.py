"""Architectures of models that transformers computes (bridge), as measured by running them."""
