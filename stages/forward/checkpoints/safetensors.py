"""Safetensors files as a source of tensors.

Tensors are read into memory of their own, one by one. They are not mapped: a training loop that saves into
the same folder writes into the same file, and a mapping would become the new weights under the old identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.arrays import Array
from ....store.errors import WeightsError
from ....store.exchange.tensors import mapped_tensor, read_header
from .reading import fill
from .source import Take, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SafetensorsFiles"]


@dataclass(frozen=True)
class SafetensorsFiles:
    """Tensors of safetensors files; of several, each holds tensors of its own."""

    files: tuple[Path, ...]

    @cached_property
    def held(self) -> dict[str, tuple[Path, Mapping[str, Any], int]]:
        """Name -> (file, its entry, where the file's data begin). Raises WeightsError for a file that is not
        whole, and for a tensor that two files hold."""
        held: dict[str, tuple[Path, Mapping[str, Any], int]] = {}
        for path in self.files:
            header, start = read_header(path)
            for name, entry in header.items():
                if name in held:
                    raise WeightsError(
                        f"expected {name!r} in one file, found it in {held[name][0]} and {path.name}; remove "
                        "the one that is not of this checkpoint"
                    )
                held[name] = path, entry, start
        return held

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """From the headers alone; never imports torch."""
        return {name: TensorEntry(tuple(it["shape"]), it["dtype"]) for name, (_, it, _) in self.held.items()}

    def mapped(self, name: str) -> Array:
        """As `TensorSource.mapped`: files of this format hold every tensor as it is."""
        path, entry, start = self.held[name]
        return mapped_tensor(path, entry, start, name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """As `TensorSource.opened`. Raises WeightsError for a file that is cut short meanwhile."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(FileIO(path)) for path in self.files}

            def take(name: str) -> Tensor:
                path, entry, start = self.held[name]
                return _read(files[path], entry, start, name)

            yield take


def _read(file: FileIO, entry: Mapping[str, Any], start: int, name: str) -> Tensor:
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "BOOL": torch.bool,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    if entry["dtype"] not in dtypes:
        raise WeightsError(
            f"expected {name!r} as one of {', '.join(dtypes)}, found {entry['dtype']}; convert the file"
        )
    tensor = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
    first, end = entry["data_offsets"]
    if end - first != tensor.nbytes:
        raise WeightsError(
            f"expected {tensor.nbytes} bytes of {name!r} in {file.name} as its shape says, found "
            f"{end - first}; fetch it again"
        )
    if fill(tensor, file, start + first) < tensor.nbytes:
        raise WeightsError(f"{file.name} was cut short while {name!r} was read; fetch it again")
    return tensor
