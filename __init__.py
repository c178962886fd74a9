"""Mechanistic interpretability as a dataflow pipeline of cached, content-addressed stages."""
