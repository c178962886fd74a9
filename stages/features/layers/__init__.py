"""Parts of a dictionary: files, layout, per-layer features, activation functions, input scaling."""
