"""Families whose layers all attend: one function `config.json` -> `ComposedArchitecture` per family.

Files group families by developer or origin; shared code is in builders.py.
"""
