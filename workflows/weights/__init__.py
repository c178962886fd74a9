"""Questions about a model's matrices, answered off its weights alone; and what a checkpoint holds."""
