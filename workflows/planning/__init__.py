"""Workflows on planning: whether the last word of a text is decided at an earlier token."""
