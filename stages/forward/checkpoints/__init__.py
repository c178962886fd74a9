"""Checkpoints: tensors by name, however files hold them; as plain numbers, with an adapter merged in."""
