"""How logits come about: lenses, directions, contributions of components."""
