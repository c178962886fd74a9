"""Text that a model goes on with, token by token."""
