"""Version of mizarr, defined in the lowest package, so that all others can import it."""

__version__ = "0.1.0"
