"""Safetensors files as a source of tensors.

Tensors are read into newly allocated memory, one by one, and not mapped: a training loop that saves into the
same folder overwrites the file, and a mapping would show its new weights under the old identity.
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
    """Tensors of one or several safetensors files (shards)."""

    files: tuple[Path, ...]
    """Paths of the checkpoint file, or of all its shards."""

    @cached_property
    def locations(self) -> dict[str, tuple[Path, Mapping[str, Any], int]]:
        """Name -> (file, header entry, offset of the file's data section).

        Raises:
            WeightsError: for a truncated file, or a tensor that is in two files.
        """
        locations: dict[str, tuple[Path, Mapping[str, Any], int]] = {}
        for path in self.files:
            header, start = read_header(path)
            for name, entry in header.items():
                if name in locations:
                    raise WeightsError(
                        f"expected {name!r} in one file, found it in {locations[name][0]} and {path.name}; "
                        "remove the one that does not belong to this checkpoint"
                    )
                locations[name] = path, entry, start
        return locations

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Shape and dtype of every tensor, from the headers; never imports torch."""
        return {
            name: TensorEntry(tuple(entry["shape"]), entry["dtype"])
            for name, (_, entry, _) in self.locations.items()
        }

    def mapped(self, name: str) -> Array:
        """See `TensorSource.mapped`: this format stores every tensor in its final form."""
        path, entry, start = self.locations[name]
        return mapped_tensor(path, entry, start, name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource.opened`. Raises WeightsError for a file that is truncated meanwhile."""
        with ExitStack() as stack:
            # Unbuffered: reads go straight into tensors (reading.py).
            files = {path: stack.enter_context(FileIO(path)) for path in self.files}

            def take(name: str) -> Tensor:
                path, entry, start = self.locations[name]
                return _read(files[path], entry, start, name)

            yield take


def _read(file: FileIO, entry: Mapping[str, Any], start: int, name: str) -> Tensor:
    import torch

    # Inside the function, so that headers are listed without importing torch.
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
    # Checked before reading: a wrong range would read bytes of another tensor.
    if end - first != tensor.nbytes:
        raise WeightsError(
            f"expected {tensor.nbytes} bytes of {name!r} in {file.name} as its shape says, found "
            f"{end - first}; fetch it again"
        )
    # Another process may truncate the file after its header was checked.
    if fill(tensor, file, start + first) < tensor.nbytes:
        raise WeightsError(f"{file.name} was cut short while {name!r} was read; fetch it again")
    return tensor
