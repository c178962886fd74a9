"""Rows of an attribution graph: from a prompt to direct effects on features and logits."""
