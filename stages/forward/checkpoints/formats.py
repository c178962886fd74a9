"""Checkpoint file formats: safetensors, torch pickles (.bin) and GGUF, chosen by file suffix."""

from __future__ import annotations

from pathlib import Path

from .gguf.header import SUFFIX
from .gguf.source import GgufFiles
from .pickled import PickledFiles
from .safetensors import SafetensorsFiles
from .source import TensorSource

__all__ = ["is_pickled", "stored_in"]

_FORMATS: dict[str, type[SafetensorsFiles] | type[PickledFiles] | type[GgufFiles]] = {
    ".bin": PickledFiles,
    SUFFIX: GgufFiles,
}
"""Ending of a file -> its format; any other ending is read as safetensors."""


def stored_in(files: tuple[Path, ...]) -> TensorSource:
    """The tensors of weight files, which all have the same format.

    Arguments:
        files: files in safetensors, torch.save's or GGUF format; the ending of the first one decides.
    """
    return _format_of(files)(files)


def is_pickled(files: tuple[Path, ...]) -> bool:
    """Whether weight files are torch's pickles, whose tensors cannot be listed without torch."""
    return _format_of(files) is PickledFiles


def _format_of(files: tuple[Path, ...]) -> type[SafetensorsFiles] | type[PickledFiles] | type[GgufFiles]:
    # By the first file: `ModelFiles` lists files of one format only.
    return _FORMATS.get(files[0].suffix if files else "", SafetensorsFiles)
