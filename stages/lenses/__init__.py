"""Lenses fitted to a model: linear and affine maps that carry a residual stream to the last layer, and what
is read, changed and decomposed with them."""
