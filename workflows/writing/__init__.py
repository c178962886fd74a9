"""Questions about text: which tokens it is, and what a model writes, token by token or mask by mask."""
