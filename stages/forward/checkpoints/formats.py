"""Which format files are of, by their names.

Border: the one place that lists the formats of whole checkpoints.
"""

from __future__ import annotations

from pathlib import Path

from .gguf.header import SUFFIX
from .gguf.source import GgufFiles
from .pickled import PickledFiles
from .safetensors import SafetensorsFiles
from .source import TensorSource

__all__ = ["stored_in"]

_FORMATS: dict[str, type[SafetensorsFiles] | type[PickledFiles] | type[GgufFiles]] = {
    ".bin": PickledFiles,
    SUFFIX: GgufFiles,
}
"""Ending -> format; safetensors for every other."""


def stored_in(files: tuple[Path, ...]) -> TensorSource:
    """The tensors of files of one format."""
    return _FORMATS.get(files[0].suffix if files else "", SafetensorsFiles)(files)
