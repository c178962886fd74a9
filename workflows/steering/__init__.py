"""Workflows on steering: effects of scaled attention edges and of vectors added to the residual stream."""
