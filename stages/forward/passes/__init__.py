"""Drivers of the one loop over layers: for whole prompts, growing sequences and branches of many runs.

Axes: B prompts, S positions, token = an index in the row of tokens that a pass computes, H query heads, Hk
key heads, dh width of a head, D hidden, V vocabulary.
"""
