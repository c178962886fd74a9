"""Workflows on weights alone: composition, OV and QK circuits, norms, and the tensors of a checkpoint."""
