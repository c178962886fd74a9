"""Lenses fitted to a model: linear maps that carry a residual stream to the last layer, and what is read,
changed and decomposed with them."""
