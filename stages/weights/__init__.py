"""Weight analysis: circuits, composition, copying and singular directions, from a model's matrices alone."""
