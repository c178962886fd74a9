"""Families whose layers all attend: a function each, `config.json` -> `ComposedArchitecture`, in the file of
its lineage. What they share is in builders.py."""
