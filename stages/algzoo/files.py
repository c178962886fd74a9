"""AlgZoo files: tensors from `.safetensors` or `.pth`, and the metadata in file names.

A `.pth` is a pickle, which can contain code: only tensors are loaded (../torch_files.py), and a file with
anything else is refused. A name such as `2nd_argmax_16_10_1073741824_3.pth` gives task, width, length,
training sequences and seed; a name that contradicts the shapes of the tensors is refused.

Border: paths, names and numpy arrays; networks.py recognises the network. Imports torch only for a `.pth`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...store.arrays import Array
from ...store.errors import ModelNotFound, WeightsError
from ...store.exchange.tensors import read_safetensors
from ..torch_files import load_pickled
from .tasks import TASKS

__all__ = ["FORMATS", "ZooMetadata", "read_tensors", "metadata_of_name", "write_tensors"]

FORMATS = (".safetensors", ".pth")
"""Endings of files with weights."""
# \d{1,18}: a longer number is no size, and would not fit into 64 bits.
_ZOO = re.compile(
    r"_(?P<hidden>\d{1,18})_(?P<sequence>\d{1,18})(?:_(?P<trained>\d{1,18})_(?P<seed>\d{1,18}))?$"
)
_SIZES = re.compile(r"_h(?P<hidden>\d{1,18})_n(?P<sequence>\d{1,18})$")


@dataclass(frozen=True)
class ZooMetadata:
    """Metadata of a network's file, from its header or name; None where unknown."""

    task: str | None = None
    """Name of the task."""
    hidden: int | None = None
    """Width of the state or stream."""
    sequence: int | None = None
    """Time steps per input."""
    trained: int | None = None
    """Sequences it was trained on."""
    seed: int | None = None
    """Seed of its training."""


def metadata_of_name(stem: str) -> ZooMetadata:
    """Metadata in the name of a file, without its ending, in the zoo's convention.

    >>> metadata_of_name("2nd_argmax_16_10_1073741824_3")
    ZooMetadata(task='2nd_argmax', hidden=16, sequence=10, trained=1073741824, seed=3)
    """
    # Longest first, as "argmax" is contained in "2nd_argmax".
    task = next((name for name in sorted(TASKS, key=len, reverse=True) if name in stem), None)
    # All handcrafted networks are for this task (handcrafted.py).
    if task is None and "handcrafted" in stem:
        task = "2nd_argmax"
    match = _ZOO.search(stem) or _SIZES.search(stem)
    numbers = {} if match is None else {name: int(text) for name, text in match.groupdict().items() if text}
    return ZooMetadata(task=task, **numbers)


def read_tensors(path: Path) -> tuple[dict[str, Array], ZooMetadata]:
    """Tensors and metadata of a file.

    Raises:
        ModelNotFound: for a missing file.
        WeightsError: for another format, a pickle with code in it, or tensors that are not floating-point.
    """
    if path.is_dir() or path.suffix not in FORMATS:
        found = "a folder" if path.is_dir() else f"a name that ends in {path.suffix or 'nothing'}"
        raise WeightsError(
            f"expected a file of AlgZoo, {' or '.join(FORMATS)}, found {found}: {path}; give the file itself"
        )
    if not path.is_file():
        raise ModelNotFound(
            f"expected a file of AlgZoo, found none at {path}; give a file, or a name that ships"
        )
    tensors, notes = _safetensors(path) if path.suffix == ".safetensors" else (_pickled(path), {})
    for name, tensor in tensors.items():
        if tensor.dtype not in (np.float32, np.float64, np.float16):
            raise WeightsError(f"{path}: expected floating-point tensors, found {name} of {tensor.dtype}")
    named = metadata_of_name(path.stem)
    return tensors, ZooMetadata(
        task=notes.get("task", named.task),
        hidden=named.hidden,
        sequence=_whole(notes, "sequence", named.sequence),
        trained=_whole(notes, "trained", named.trained),
        seed=_whole(notes, "seed", named.seed),
    )


def _whole(notes: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    """A whole number in the metadata of a safetensors file, or `otherwise`."""
    text = notes.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else otherwise


def write_tensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str | int] | None = None
) -> Path:
    """Write tensors as float32 in the format of the path's ending, atomically.

    Arguments:
        path: file ending in `.safetensors` or `.pth`.
        tensors: named as in a checkpoint.
        metadata: of a `.safetensors` file; ignored for `.pth`.
    """
    if path.suffix not in FORMATS:
        raise WeightsError(
            f"expected a file that ends in {' or '.join(FORMATS)}, found {path.name}; rename it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target and renamed, so that no reader sees half a file.
    temporary = path.with_name(f".{path.name}.part")
    arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, temporary, metadata={name: str(value) for name, value in (metadata or {}).items()})
    else:
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, temporary)
    temporary.replace(path)
    return path


def _safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors and header metadata of a safetensors file."""
    tensors, metadata = read_safetensors(path)
    # Copied: the tensors are a memory map of the file, and would change if it were saved again.
    return {name: np.array(tensor) for name, tensor in tensors.items()}, metadata


def _pickled(path: Path) -> dict[str, Array]:
    """Tensors of a state dict saved by torch."""
    import torch

    state = load_pickled(path, WeightsError, mmap=False)
    if not isinstance(state, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in state.values()
    ):
        found = type(state).__name__ if not isinstance(state, Mapping) else "other values among its tensors"
        raise WeightsError(
            f"expected a state dict of tensors in {path}, found {found}; save model.state_dict()"
        )
    # Trained parameters require gradients, and sparse ones have no numpy form.
    return {str(name): tensor.detach().cpu().to_dense().numpy() for name, tensor in state.items()}
