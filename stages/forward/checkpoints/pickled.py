"""Files that torch.save wrote (pytorch_model.bin) as a source of tensors, by torch's weights-only loader.

A pickle is a program. The loader runs none but what makes tensors, and whatever else stands in a file is an
error here; nothing in a setting turns that off. What there is can only be told by torch.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import WeightsError
from .source import Take, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PickledFiles"]

ADVICE = "load it where you trust it, and save it as safetensors"


@dataclass(frozen=True)
class PickledFiles:
    """Tensors of files that torch.save wrote; of several, each holds tensors of its own."""

    files: tuple[Path, ...]

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """As `TensorSource.entries`; imports torch. Raises WeightsError for a file that holds more than
        tensors by name, and for a tensor that two files hold."""
        found: dict[str, TensorEntry] = {}
        for path in self.files:
            for name, tensor in _tensors(path).items():
                if name in found:
                    raise WeightsError(
                        f"expected {name!r} in one file, found it in {path.name} and another; remove the one "
                        "that is not of this checkpoint"
                    )
                found[name] = TensorEntry(tuple(tensor.shape), _code(name, tensor))
        return found

    def mapped(self, name: str) -> None:
        """As `TensorSource.mapped`: never."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """As `TensorSource.opened`."""
        held: dict[str, Tensor] = {}
        for path in self.files:
            held |= _tensors(path)
        # A copy: what is held is a mapping of a file, and may be written by whoever saves there again.
        yield lambda name: held[name].clone()


def _tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, mapped where the file is a zip (torch 1.6 and later)."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"expected nothing but tensors in {path}, found a pickle that does more ({_reason(error)}); "
            f"{ADVICE}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise WeightsError(
            f"expected a file that torch.save wrote at {path}, found one that cannot be read "
            f"({_reason(error)}); fetch it again"
        ) from error
    strange = _strange(found)
    if strange:
        raise WeightsError(f"expected tensors by name in {path}, found {strange}; {ADVICE}")
    tensors: dict[str, Tensor] = dict(found)
    return tensors


def _strange(found: Any) -> str:
    """What is no tensor by a name; empty where there is nothing of the kind."""
    import torch

    if not isinstance(found, dict):
        return type(found).__name__
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return f"{type(value).__name__} under {name!r}"
    return ""


def _code(name: str, tensor: Tensor) -> str:
    """The dtype by its code in safetensors; any other by its own name, which nobody takes for a float."""
    codes = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return codes.get(dtype, dtype)


def _reason(error: BaseException) -> str:
    """The one sentence of torch's advice that says what was found."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line or "not an allowed" in line), "")
    return (told or next(iter(lines), type(error).__name__)).split(". ")[0][:200]
