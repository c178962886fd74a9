"""Table of the encoder-decoder families: importing the modules of this folder registers them."""

from . import bart, t5  # noqa: F401 - their decorators `@family` fill PAIRS
from .builders import PAIRS

__all__ = ["PAIRS"]
