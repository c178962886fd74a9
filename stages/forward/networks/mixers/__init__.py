"""Mixers and channel mixers of hybrids: one file for each, over a shape (architectures/mixers.py)."""
