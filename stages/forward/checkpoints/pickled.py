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
from ...torch_files import load_pickled
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
        """Shape and dtype of every tensor, by name; imports torch.

        Raises:
            WeightsError: for a file with anything but named tensors, or a tensor that is in two files.
        """
        entries: dict[str, TensorEntry] = {}
        for path in self.files:
            for name, tensor in _named_tensors(path).items():
                if name in entries:
                    raise WeightsError(
                        f"expected tensor {name!r} in one file, found it in {path.name} and another; remove "
                        "the file that does not belong to this checkpoint"
                    )
                entries[name] = TensorEntry(tuple(tensor.shape), _safetensors_code(tensor))
        return entries

    def mapped(self, name: str) -> None:
        """None: tensors of this format are only read through torch."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            tensors |= _named_tensors(path)
        # A copy: the loaded tensors map the file, which another process may overwrite.
        yield lambda name: tensors[name].clone()


def _named_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one file by name; WeightsError for a file with anything else."""
    loaded = load_pickled(path, WeightsError)
    unexpected = _first_other_value(loaded)
    if unexpected:
        raise WeightsError(
            f"expected a dict of tensors by name in {path}, found {unexpected}; save only the state_dict of "
            "the model, as safetensors"
        )
    tensors: dict[str, Tensor] = dict(loaded)
    return tensors


def _first_other_value(loaded: Any) -> str:
    """Description of the first value that is no dense tensor with a name; empty if all are."""
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


def _safetensors_code(tensor: Tensor) -> str:
    """Dtype as safetensors writes it, e.g. "BF16"; torch's name for other dtypes than floats."""
    codes = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return codes.get(dtype, dtype)
