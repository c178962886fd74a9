"""Layers taken apart by who reads whom: what each node of a model adds to the stream, and what each reads of
it."""
