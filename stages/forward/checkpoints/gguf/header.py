"""What a GGUF file says of itself: metadata and tensors, through the format's own package.

Border: the one place that asks `gguf` what a file holds. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .....store.errors import ConfigError, WeightsError
from .....store.files import stamp
from ....extras import require

__all__ = ["SUFFIX", "Header", "StoredTensor", "header_of", "parts_of"]

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PLAIN = {"F64": "F64", "F32": "F32", "F16": "F16"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. shape: of the numbers, as torch has it. kind: its type in the format ("Q4_K").
    data: mapped, quantised rows as bytes."""

    shape: tuple[int, ...]
    kind: str
    data: npt.NDArray[Any]

    @property
    def dtype(self) -> str:
        """Of the plain numbers, by its code in safetensors."""
        return _PLAIN.get(self.kind, "F32")

    def plain(self, first: int | None = None) -> npt.NDArray[Any]:
        """The numbers, in memory of their own; first: of one index along the first axis alone."""
        import gguf

        data = self.data if first is None else self.data[first]
        if self.kind in _PLAIN:
            return np.array(data)
        shape = self.shape if first is None else self.shape[1:]
        numbers: npt.NDArray[Any] = gguf.dequantize(
            np.ascontiguousarray(data), gguf.GGMLQuantizationType[self.kind]
        )
        return np.asarray(numbers, np.float32).reshape(shape)


@dataclass(frozen=True)
class Header:
    """Metadata of a checkpoint's first file, and the tensors of all of them by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @cached_property
    def architecture(self) -> str:
        """What the format calls the kind of model."""
        return str(self._value("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of this kind of model ("block_count"); the default where there is none."""
        name = f"{self.architecture}.{key}"
        return self._value(name) if name in self.fields else default

    def require(self, key: str) -> Any:
        """As `get`. Raises ConfigError where there is none."""
        return self._value(f"{self.architecture}.{key}")

    def told(self, name: str) -> Any:
        """Metadata by its full name ("tokenizer.ggml.model"); None where there is none."""
        return self.fields[name].contents() if name in self.fields else None

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise ConfigError(
                f"expected {name} in the metadata of {self.path}, found none; fetch the file again"
            )
        return self.fields[name].contents()


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that is split as llama.cpp splits them, given any of them. Raises
    WeightsError naming the one that is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    parts = tuple(path.with_name(f"{stem}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1))
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WeightsError(
            f"{path.name} is one of {int(count)} files, found no {missing[0]} beside it; fetch it again"
        )
    return parts


def header_of(paths: Sequence[Path]) -> Header:
    """What the files of a checkpoint hold. Raises WeightsError for a file that is damaged, MissingExtra."""
    return _header_of(tuple(paths), tuple(stamp(path.stat()) for path in paths))


@lru_cache(maxsize=2)
def _header_of(paths: tuple[Path, ...], stamps: tuple[Any, ...]) -> Header:
    require("gguf", "A GGUF file")
    import gguf

    tensors: dict[str, StoredTensor] = {}
    fields: dict[str, Any] = {}
    for path in paths:
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise WeightsError(
                f"expected a GGUF file at {path}, found one that cannot be read ({error}); fetch it again"
            ) from error
        fields = fields or dict(reader.fields)
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise WeightsError(
                    f"expected {tensor.name!r} in one file, found it in {path.name} and another"
                )
            shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
            tensors[tensor.name] = StoredTensor(shape, tensor.tensor_type.name, tensor.data)
    return Header(paths[0], fields, tensors)
