"""Whether a loaded model is still what it was: everything a forward pass reads, as it is in memory now.

A key made of files says nothing about weights that were edited after they were loaded: by a training step,
by `mul_`, through `.data` or a numpy view (neither of which counts as a new version of the tensor), by
assigning another tensor, a hook or an adapter. So the state of a model is looked at itself: every tensor by
dtype, shape and checksum of its bytes (`_checksum`), everything else by value, and what has no value
(functions, objects of a kind unknown here) by being the same object.

Border: Python objects and tensors; what an identity is made of stands in model.py.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.digest import content_digest, digest
from ....store.errors import ConfigError

__all__ = ["Fingerprint", "fingerprint", "weights_digest"]

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, Path),
    *(torch.dtype, torch.device, torch.Size),
)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
_WORDS = 1 << 24
"""Words of 4 bytes that are weighted at a time."""
_SPREAD = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread evenly over 64 bits (Fibonacci hashing, Knuth 1973, 6.4)."""
_WHOLE = (Tensor, np.ndarray, set, frozenset, *_VALUES, *_CODE)


@runtime_checkable
class ComesAndGoes(Protocol):
    """What is not all in memory, and says itself what it is known by."""

    def known_by(self) -> Mapping[str, Any]:
        """Values that are the same for as long as it is what it was."""
        ...


@dataclass(frozen=True)
class Fingerprint:
    """What was found below an object, by path.

    tensors: (dtype, shape, checksum). others: values, or the objects themselves where they have none; they
    are held, so that no other object gets their place in memory.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
    others: Mapping[str, Any]

    def first_difference(self, now: Fingerprint, *, tensors: bool = True) -> str | None:
        """Where another state first differs; None where it does not.  tensors: whether theirs counts."""
        pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(self.others, now.others)]
        if tensors:
            pairs.append((self.tensors, now.tensors))
        for before, after in pairs:
            for path in dict.fromkeys([*before, *after]):
                if path not in before or path not in after or not _same(before[path], after[path]):
                    return path
        return None


def fingerprint(root: object) -> Fingerprint:
    """The state of an object now, through attributes, sequences and mappings.

    Raises ConfigError for a tensor whose bytes cannot be read (on no device, of a layout of its own).
    """
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    others: dict[str, Any] = {}
    for path, found in _leaves(root):
        if isinstance(found, Tensor | np.ndarray):
            tensors[path] = (str(found.dtype), tuple(found.shape), _checksum(path, found))
        else:
            others[path] = found
    return Fingerprint(tensors, others)


def weights_digest(root: object) -> str:
    """`sha256:…` of every tensor below an object: path, dtype, shape and bytes. Raises as `fingerprint`."""
    found = [
        [path, str(leaf.dtype), list(leaf.shape), content_digest(_bytes(path, leaf).data)]
        for path, leaf in _leaves(root)
        if isinstance(leaf, Tensor | np.ndarray)
    ]
    return f"sha256:{digest('weights-in-memory', found)}"


def tensor_bytes(root: object) -> int:
    """What the tensors below an object take, each memory once: a tied head is its embedding."""
    held = {leaf.data_ptr(): leaf.nbytes for _, leaf in _leaves(root) if isinstance(leaf, Tensor)}
    return sum(held.values())


def _leaves(root: object) -> Iterator[tuple[str, Any]]:
    """(path, what is there) of everything below an object that is a tensor, a value, or has no parts."""
    waiting: list[tuple[str, Any]] = [("", root)]
    above: dict[int, Any] = {}
    while waiting:
        path, found = waiting.pop()
        parts = None if id(found) in above else _parts(found)
        if parts is None:
            # Also what was met before: which object it is, is all there is left to say.
            yield path, tuple(sorted(map(repr, found))) if isinstance(found, set | frozenset) else found
        else:
            above[id(found)] = found
            yield f"{path}:{type(found).__module__}.{type(found).__qualname__}", len(parts)
            waiting += [(f"{path}.{name}" if path else name, part) for name, part in parts.items()]


def _parts(found: Any) -> dict[str, Any] | None:
    """What an object is made of, by name; None for one that is taken as it is."""
    if isinstance(found, _WHOLE):
        return None
    if isinstance(found, ComesAndGoes):
        return dict(found.known_by())
    if isinstance(found, Mapping):
        return {repr(key): part for key, part in found.items()}
    if isinstance(found, list | tuple):
        return {str(number): part for number, part in enumerate(found)}
    kinds = type(found).__mro__
    slots = {name for kind in kinds for name in _slots(kind)}
    parts = {name: getattr(found, name) for name in sorted(slots) if hasattr(found, name)}
    # What is worked out from the rest when first asked for says nothing new.
    worked_out = {
        name for kind in kinds for name, it in vars(kind).items() if isinstance(it, cached_property)
    }
    parts |= {name: part for name, part in getattr(found, "__dict__", {}).items() if name not in worked_out}
    return parts if parts or is_dataclass(found) else None  # a dataclass without fields is all its type says


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)


def _same(before: Any, after: Any) -> bool:
    by_value = isinstance(before, (tuple, *_VALUES)) and type(before) is type(after)
    return before is after or (by_value and bool(before == after))


def _checksum(path: str, found: Tensor | npt.NDArray[Any]) -> int:
    """A number that changes with the bytes of a tensor: on the CPU its crc32c (12 GB/s), on a GPU a sum that
    the GPU computes itself, because copying the weights of a model from it takes longer than a pass.

    Tensors that moved to another device since they were loaded therefore count as changed.
    """
    if not isinstance(found, Tensor) or found.device.type != "cuda":
        checksum: int = google_crc32c.value(_bytes(path, found))
        return checksum
    return _weighted_sum(found)


def _weighted_sum(tensor: Tensor) -> int:
    """The words of a tensor, each times an odd number of its own, summed modulo 2^64.

    A change of one word always changes the sum, as odd numbers have inverses modulo 2^64; that changes of
    several words cancel has the odds of 1 in 2^64.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -flat.numel() % 4:
        flat = F.pad(flat, (0, missing))
    flat = flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _WORDS):
        words = flat[start : start + _WORDS]
        places = torch.arange(start, start + words.numel(), dtype=torch.int64, device=flat.device)
        total += (words * (places * _SPREAD | 1)).sum()
    return int(total.item())


def _bytes(path: str, found: Tensor | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in C order, read-only; copied only from another device or order."""
    try:
        tensor = torch.from_numpy(np.array(found)) if isinstance(found, np.ndarray) else found.detach().cpu()
        flat: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"expected a plain tensor at {path}, found one whose bytes cannot be read ({error}); its model "
            "has no identity, so nothing of it can be stored: load it from its files"
        ) from error
    flat.flags.writeable = False
    return flat
