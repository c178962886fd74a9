"""Questions about a model's matrices, answered off its weights alone."""
