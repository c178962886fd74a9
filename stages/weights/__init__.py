"""Weight analysis: circuits, composition, copying and singular directions computed from a model's
matrices.
"""
