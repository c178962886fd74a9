"""Questions about what a model writes, token by token or mask by mask."""
