"""What the GGUF files of a checkpoint say of themselves: metadata and tensors.

Border: files in, named values and tensors out; how the bytes are read is parsing.py. Never imports torch.
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
    """Metadata of a checkpoint's first file, and the tensors of all of them by name. Equal only to itself."""

    path: Path
    """The first file."""
    fields: Mapping[str, Any]
    """Metadata by full name, as `read_gguf` gives them."""
    tensors: Mapping[str, StoredTensor]
    """Tensors by the names llama.cpp has for them."""

    @cached_property
    def architecture(self) -> str:
        """What the format calls the kind of model."""
        return str(self._value("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """One value of the metadata of this kind of model ("block_count"); the default where there is none.
        Raises ConfigError for an array: a value for each layer, which no model here has.
        """
        name = f"{self.architecture}.{key}"
        return self._value(name) if name in self.fields else default

    def require(self, key: str) -> Any:
        """As `get`. Raises ConfigError where there is none."""
        return self._value(f"{self.architecture}.{key}")

    def told(self, name: str) -> Any:
        """Metadata by its full name ("tokenizer.ggml.model"); None where there is none."""
        return self.fields.get(name)

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise ConfigError(
                f"expected {name} in the metadata of {self.path}, found none; fetch the file again"
            )
        value = self.fields[name]
        if isinstance(value, list | np.ndarray):
            raise ConfigError(
                f"{self.path}: expected one {name} for all layers, found an array of {len(value)}; use the "
                "checkpoint it was made of"
            )
        return value


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that is split as llama.cpp splits them, given any of them. Raises
    WeightsError naming the one that is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    parts = tuple(path.with_name(f"{stem}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1))
    if missing := [part.name for part in parts if not require_content(part, WeightsError)]:
        raise WeightsError(
            f"{path.name} is one of {int(count)} files, found no {missing[0]} beside it; fetch it again"
        )
    return parts


def header_of(paths: Sequence[Path]) -> Header:
    """What the files of a checkpoint hold. Raises WeightsError for a file that is missing or damaged,
    MissingExtra.
    """
    for path in paths:
        if not require_content(path, WeightsError):
            raise WeightsError(f"expected a GGUF file at {path}, found none; fetch it again")
    return _header_of(tuple(paths), tuple(stamp(path.stat()) for path in paths))


@lru_cache(maxsize=2)
def _header_of(paths: tuple[Path, ...], stamps: tuple[Any, ...]) -> Header:
    require("gguf", "A GGUF file")
    tensors: dict[str, StoredTensor] = {}
    fields: dict[str, Any] = {}
    for path in paths:
        try:
            own, stored = read_gguf(path)
        except (ValueError, KeyError, OSError) as error:
            raise WeightsError(
                f"expected a GGUF file at {path}, found one that cannot be read ({error}); fetch it again"
            ) from error
        fields = fields or own
        for name, tensor in stored.items():
            if name in tensors:
                raise WeightsError(f"expected {name!r} in one file, found it in {path.name} and another")
            tensors[name] = tensor
    return Header(paths[0], fields, tensors)
