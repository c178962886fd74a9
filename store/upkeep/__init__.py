"""Upkeep: is every byte what was committed, what may go, where did a result come from.

There are no reference counts: after a crash they would be wrong, and marking reads a few small files.
"""
