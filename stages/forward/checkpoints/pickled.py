"""Files that torch.save wrote (pytorch_model.bin) as a source of tensors.

What there is can only be told by torch; how the files are read is torch_files.py.
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
    """Tensors of files that torch.save wrote; of several, each holds tensors of its own."""

    files: tuple[Path, ...]

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """As `TensorSource.entries`; imports torch. Raises WeightsError for a file that holds more than
        tensors by name, and for a tensor that two files hold."""
        entries: dict[str, TensorEntry] = {}
        for path in self.files:
            for name, tensor in _tensors(path).items():
                if name in entries:
                    raise WeightsError(
                        f"expected {name!r} in one file, found it in {path.name} and another; remove the one "
                        "that is not of this checkpoint"
                    )
                entries[name] = TensorEntry(tuple(tensor.shape), _code(name, tensor))
        return entries

    def mapped(self, name: str) -> None:
        """As `TensorSource.mapped`: never."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """As `TensorSource.opened`."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            tensors |= _tensors(path)
        # A copy: the tensors are a mapping of a file, and may be written by whoever saves there again.
        yield lambda name: tensors[name].clone()


def _tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name."""
    loaded = load_pickled(path, WeightsError)
    strange = _strange(loaded)
    if strange:
        raise WeightsError(f"expected tensors by name in {path}, found {strange}; {ADVICE}")
    tensors: dict[str, Tensor] = dict(loaded)
    return tensors


def _strange(loaded: Any) -> str:
    """What is no tensor by a name; empty where there is nothing of the kind."""
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
    """The dtype by its code in safetensors; any other by its own name, which nobody takes for a float."""
    codes = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return codes.get(dtype, dtype)
