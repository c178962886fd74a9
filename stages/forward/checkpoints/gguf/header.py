"""Header: metadata and tensor list of the GGUF files of a checkpoint; the bytes are read in parsing.py.

Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .....store.errors import ConfigError, WeightsError
from .....store.exchange.outside import require_content
from .....store.files import stamp
from ....extras import require
from .parsing import StoredTensor, read_gguf

__all__ = ["SUFFIX", "Header", "header_of", "parts_of"]

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, eq=False)
class Header:
    """Metadata and tensor list of the GGUF files of one checkpoint. Compared by identity."""

    path: Path
    """First file of the checkpoint, which has the metadata."""
    fields: Mapping[str, Any]
    """Metadata by full name, as `read_gguf` returns them."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of all files, by their llama.cpp names."""

    @cached_property
    def architecture(self) -> str:
        """Value of general.architecture, e.g. "llama"."""
        return str(self._value("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value whose name begins with the architecture, e.g. llama.block_count.

        Arguments:
            key: name without the architecture, e.g. "block_count".
            default: returned if the file has no such value.

        Raises:
            ConfigError: for an array with a value per layer, which no supported architecture has.
        """
        name = f"{self.architecture}.{key}"
        return self._value(name) if name in self.fields else default

    def require(self, key: str) -> Any:
        """A metadata value whose name begins with the architecture, e.g. llama.block_count.

        Arguments:
            key: name without the architecture, e.g. "block_count".

        Raises:
            ConfigError: if the file has no such value, or an array with a value per layer.
        """
        return self._value(f"{self.architecture}.{key}")

    def metadata(self, name: str) -> Any:
        """A metadata value by its full name, e.g. "tokenizer.ggml.model"; None if the file has none."""
        return self.fields.get(name)

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise ConfigError(
                f"expected {name} in the metadata of the GGUF file {self.path}, found none; fetch the file "
                "again"
            )
        value = self.fields[name]
        # llama.cpp writes an array where layers differ, which no supported architecture does.
        if isinstance(value, list | np.ndarray):
            raise ConfigError(
                f"{self.path}: expected one {name} for all layers, found an array of {len(value)}; load the "
                "checkpoint from which the file was converted"
            )
        return value


def parts_of(path: Path) -> tuple[Path, ...]:
    """All files of a checkpoint that llama.cpp's tool has split into several.

    Arguments:
        path: any one of the files.

    Raises:
        WeightsError: for a missing file.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    parts = tuple(path.with_name(f"{stem}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1))
    if missing := [part.name for part in parts if not require_content(part, WeightsError)]:
        raise WeightsError(
            f"expected all {int(count)} files of the checkpoint of {path.name} in one folder, found no "
            f"{missing[0]}; fetch the missing files"
        )
    return parts


def header_of(paths: Sequence[Path]) -> Header:
    """Read metadata and tensor list of the GGUF files of a checkpoint; cached until a file changes.

    Raises:
        WeightsError: for a missing or damaged file.
        MissingExtra: without the gguf package.
    """
    for path in paths:
        if not require_content(path, WeightsError):
            raise WeightsError(f"expected a GGUF file at {path}, found none; fetch it again")
    # The stamp is part of the cache key, so that a replaced file is read again.
    return _header_of(tuple(paths), tuple(stamp(path.stat()) for path in paths))


@lru_cache(maxsize=2)
def _header_of(paths: tuple[Path, ...], stamps: tuple[Any, ...]) -> Header:
    require("gguf", "A GGUF file")
    tensors: dict[str, StoredTensor] = {}
    fields: dict[str, Any] = {}
    for path in paths:
        try:
            metadata, stored = read_gguf(path)
        except (ValueError, KeyError, OSError) as error:
            raise WeightsError(
                f"expected a GGUF file at {path}, found one that cannot be read ({error}); fetch it again"
            ) from error
        fields = fields or metadata
        for name, tensor in stored.items():
            if name in tensors:
                raise WeightsError(
                    f"expected tensor {name!r} in one GGUF file, found it in {path.name} and another; fetch "
                    "the files again"
                )
            tensors[name] = tensor
    return Header(paths[0], fields, tensors)
