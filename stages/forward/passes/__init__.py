"""Drivers of the one loop over layers: whole prompts, sequences that grow, branches of many runs.

Axes: B prompts, S positions, token = a place among the tokens a pass computes, H query heads, Hk key heads,
dh width of a head, D hidden, V vocabulary.
"""
