"""Mixers and channel mixers of hybrids: one file for each, over a spec (architectures/mixers.py)."""
