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
        """Where each tensor is stored: name -> (file, header entry, offset of the file's data section).

        Raises:
            WeightsError: for a truncated file, or a tensor that is in two files.
        """
        locations: dict[str, tuple[Path, Mapping[str, Any], int]] = {}
        for path in self.files:
            header, start = read_header(path)
            for name, entry in header.items():
                if name in locations:
                    raise WeightsError(
                        f"expected tensor {name!r} in one file, found it in {locations[name][0]} and "
                        f"{path.name}; remove the file that does not belong to this checkpoint"
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
        """A memory-mapped array of a tensor; this format stores every tensor in its final form."""
        path, entry, start = self.locations[name]
        return mapped_tensor(path, entry, start, name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name.

        Raises:
            WeightsError: for a tensor of an unknown dtype, or a file that was cut short.
        """
        with ExitStack() as stack:
            # Unbuffered: reads go straight into tensors (reading.py).
            files = {path: stack.enter_context(FileIO(path)) for path in self.files}

            def take(name: str) -> Tensor:
                path, entry, start = self.locations[name]
                return _read_tensor(files[path], entry, start, name)

            yield take


def _read_tensor(file: FileIO, entry: Mapping[str, Any], start: int, name: str) -> Tensor:
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
            f"expected tensor {name!r} in {file.name} of dtype {', '.join(dtypes)}, found {entry['dtype']}; "
            "convert the file to one of these dtypes"
        )
    tensor = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
    first, end = entry["data_offsets"]
    # Checked before reading: a wrong range would read bytes of another tensor.
    if end - first != tensor.nbytes:
        raise WeightsError(
            f"expected {tensor.nbytes} bytes of tensor {name!r} in {file.name}, according to its shape, "
            f"found {end - first}; fetch the file again"
        )
    # Another process may truncate the file after its header was checked.
    if fill(tensor, file, start + first) < tensor.nbytes:
        raise WeightsError(
            f"expected {tensor.nbytes} bytes of tensor {name!r} in {file.name}, found the end of the file, "
            "which was cut short meanwhile; fetch the file again"
        )
    return tensor
