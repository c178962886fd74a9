"""How well a model does, and what a change costs it."""
