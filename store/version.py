"""The version of mizarr, at the bottom of the house, so that every room can tell it."""

__version__ = "0.1.0"
