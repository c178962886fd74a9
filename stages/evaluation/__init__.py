"""How well a model does, and how well it still does when something inside it is changed."""
