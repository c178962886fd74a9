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
    """What the header or the name of a network's file says about the network; None for what neither says."""

    task: str | None = None
    """Name of the task."""
    hidden: int | None = None
    """Number of neurons of an RNN, or width of a transformer's residual stream."""
    sequence: int | None = None
    """Number of time steps per input."""
    trained: int | None = None
    """Number of input sequences that the network was trained on."""
    seed: int | None = None
    """Seed of the training."""


def metadata_of_name(stem: str) -> ZooMetadata:
    """Metadata in the name of a file, without its ending, which follows AlgZoo's naming convention.

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
    """Read the tensors of a network's file, by name, and its metadata.

    Raises:
        ModelNotFound: there is no file at the path.
        WeightsError: the file has another format, is a pickle with code in it, or holds tensors that are not
            floating-point.
    """
    if path.is_dir() or path.suffix not in FORMATS:
        found = "a folder" if path.is_dir() else f"a file that ends in {path.suffix or 'nothing'}"
        raise WeightsError(
            f"expected the weights of an AlgZoo network, in a file that ends in {' or '.join(FORMATS)}, "
            f"found {found}: {path}; name the file with the weights"
        )
    if not path.is_file():
        raise ModelNotFound(
            f"there is no file of an AlgZoo network at {path}; give the path of a file, or the name of a "
            "network that ships with mizarr"
        )
    tensors, notes = _safetensors(path) if path.suffix == ".safetensors" else (_pickled(path), {})
    for name, tensor in tensors.items():
        if tensor.dtype not in (np.float32, np.float64, np.float16):
            raise WeightsError(
                f"{path}: expected tensors of floating-point numbers, found the tensor {name} with dtype "
                f"{tensor.dtype}; save the weights as float32"
            )
    named = metadata_of_name(path.stem)
    return tensors, ZooMetadata(
        task=notes.get("task", named.task),
        hidden=named.hidden,
        sequence=_whole(notes, "sequence", named.sequence),
        trained=_whole(notes, "trained", named.trained),
        seed=_whole(notes, "seed", named.seed),
    )


def _whole(notes: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    """Whole number under a name in the metadata of a safetensors file; `otherwise` if there is none."""
    text = notes.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else otherwise


def write_tensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str | int] | None = None
) -> Path:
    """Write tensors as float32 into a file, whose ending selects the format; the write is atomic.

    Arguments:
        path: file to write, ending in `.safetensors` or `.pth`.
        tensors: name in a checkpoint -> tensor.
        metadata: entries for the header of a `.safetensors` file; ignored for `.pth`.

    Returns:
        `path`.
    """
    if path.suffix not in FORMATS:
        raise WeightsError(
            f"expected a file name that ends in {' or '.join(FORMATS)} to write weights to, found "
            f"{path.name}; choose such a name"
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
            f"expected a state dict of tensors in {path}, found {found}; save the file again with "
            "torch.save(model.state_dict(), path)"
        )
    # Trained parameters require gradients, and sparse ones have no numpy form.
    return {str(name): tensor.detach().cpu().to_dense().numpy() for name, tensor in state.items()}
