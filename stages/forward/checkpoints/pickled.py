"""Files written by torch.save (pytorch_model.bin) as a source of tensors.

Even listing the tensors needs torch; `torch_files.py` reads them without running pickled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import WeightsError
from ...torch_files import ADVICE, load_pickled
from .source import Take, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PickledFiles"]


@dataclass(frozen=True)
class PickledFiles:
    """Tensors of one or several files (shards) written by torch.save."""

    files: tuple[Path, ...]
    """Paths of the checkpoint file, or of all its shards."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """See `TensorSource.entries`; imports torch.

        Raises:
            WeightsError: for a file with anything but named tensors, or a tensor that is in two files.
        """
        entries: dict[str, TensorEntry] = {}
        for path in self.files:
            for name, tensor in _tensors(path).items():
                if name in entries:
                    raise WeightsError(
                        f"expected {name!r} in one file, found it in {path.name} and another; remove the one "
                        "that does not belong to this checkpoint"
                    )
                entries[name] = TensorEntry(tuple(tensor.shape), _code(name, tensor))
        return entries

    def mapped(self, name: str) -> None:
        """See `TensorSource.mapped`: None, as the format is read through torch."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource.opened`."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            tensors |= _tensors(path)
        # A copy: the loaded tensors map the file, which another process may overwrite.
        yield lambda name: tensors[name].clone()


def _tensors(path: Path) -> dict[str, Tensor]:
    """Named tensors of one file."""
    loaded = load_pickled(path, WeightsError)
    unexpected = _unexpected(loaded)
    if unexpected:
        raise WeightsError(f"expected tensors by name in {path}, found {unexpected}; {ADVICE}")
    tensors: dict[str, Tensor] = dict(loaded)
    return tensors


def _unexpected(loaded: Any) -> str:
    """Description of the first entry that is no strided tensor; empty string if all are."""
    import torch

    if not isinstance(loaded, dict):
        return type(loaded).__name__
    for name, value in loaded.items():
        if (
            not isinstance(name, str)
            or not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
            or value.is_meta
        ):
            return f"{type(value).__name__} under {name!r}"
    return ""


def _code(name: str, tensor: Tensor) -> str:
    """Safetensors code of a float dtype; torch's own name for any other, which readers refuse as a weight."""
    codes = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return codes.get(dtype, dtype)
