"""Files of AlgZoo: tensors by name from `.safetensors` or `.pth`, and what the name of a file says of them.

A `.pth` is a pickle, which can hold code: torch reads tensors from it and nothing else (`weights_only`), and
a file that asks for more is refused. A name such as `2nd_argmax_16_10_1073741824_3.pth` says task, width,
length, training sequences and seed; what the tensors' shapes say counts more, and a name that contradicts
them is refused.

Border: paths, names and tensors as numpy arrays; what network they are is networks.py's business. Never
imports torch but for a `.pth`.
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

__all__ = ["FORMATS", "Said", "read_tensors", "said_by_name", "write_tensors"]

FORMATS = (".safetensors", ".pth")
_ZOO = re.compile(
    r"_(?P<hidden>\d{1,18})_(?P<sequence>\d{1,18})(?:_(?P<trained>\d{1,18})_(?P<seed>\d{1,18}))?$"
)
_SIZES = re.compile(r"_h(?P<hidden>\d{1,18})_n(?P<sequence>\d{1,18})$")


@dataclass(frozen=True)
class Said:
    """What a file says of its network beside the tensors; None where it says nothing.

    trained: sequences it was trained on.
    """

    task: str | None = None
    hidden: int | None = None
    sequence: int | None = None
    trained: int | None = None
    seed: int | None = None


def said_by_name(stem: str) -> Said:
    """What the name of a file, without its ending, says in the spelling of the zoo.

    >>> said_by_name("2nd_argmax_16_10_1073741824_3")
    Said(task='2nd_argmax', hidden=16, sequence=10, trained=1073741824, seed=3)
    """
    task = next((name for name in sorted(TASKS, key=len, reverse=True) if name in stem), None)
    if task is None and "handcrafted" in stem:
        task = "2nd_argmax"
    found = _ZOO.search(stem) or _SIZES.search(stem)
    numbers = {} if found is None else {name: int(text) for name, text in found.groupdict().items() if text}
    return Said(task=task, **numbers)


def read_tensors(path: Path) -> tuple[dict[str, Array], Said]:
    """The tensors of a file, and what it says of them beside their shapes.

    Raises ModelNotFound for a file that is not there, WeightsError for another format, a pickle with code in
    it, anything but floating-point tensors.
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
    tensors, told = _safetensors(path) if path.suffix == ".safetensors" else (_pickled(path), {})
    for name, held in tensors.items():
        if held.dtype not in (np.float32, np.float64, np.float16):
            raise WeightsError(f"{path}: expected floating-point tensors, found {name} of {held.dtype}")
    named = said_by_name(path.stem)
    return tensors, Said(
        task=told.get("task", named.task),
        hidden=named.hidden,
        sequence=_whole(told, "sequence", named.sequence),
        trained=_whole(told, "trained", named.trained),
        seed=_whole(told, "seed", named.seed),
    )


def _whole(notes: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    """A whole number among the notes of a file; `otherwise` where there is none."""
    text = notes.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else otherwise


def write_tensors(
    path: Path, tensors: Mapping[str, Array], said: Mapping[str, str | int] | None = None
) -> Path:
    """Write tensors in the format of the path's ending; whole, or not at all. said: notes of a
    `.safetensors`."""
    if path.suffix not in FORMATS:
        raise WeightsError(
            f"expected a file that ends in {' or '.join(FORMATS)}, found {path.name}; rename it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    held = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(held, temporary, metadata={name: str(value) for name, value in (said or {}).items()})
    else:
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in held.items()}, temporary)
    temporary.replace(path)
    return path


def _safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    tensors, metadata = read_safetensors(path)
    # A copy: the tensors are a mapping of a file, and may be written by whoever saves there again.
    return {name: np.array(tensor) for name, tensor in tensors.items()}, metadata


def _pickled(path: Path) -> dict[str, Array]:
    import torch

    state = load_pickled(path, WeightsError, mmap=False)
    if not isinstance(state, Mapping) or not all(isinstance(held, torch.Tensor) for held in state.values()):
        found = type(state).__name__ if not isinstance(state, Mapping) else "other values among its tensors"
        raise WeightsError(
            f"expected a state dict of tensors in {path}, found {found}; save model.state_dict()"
        )
    return {str(name): held.detach().cpu().to_dense().numpy() for name, held in state.items()}
