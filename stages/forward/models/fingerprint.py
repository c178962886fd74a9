"""Fingerprint of a loaded model: detects changes of anything in memory that a forward pass reads.

A key made from files cannot notice weights that were edited after loading: by a training step, by `mul_`,
through `.data` or a numpy view (neither increments the version counter of the tensor), or by assigning
another tensor, a hook or an adapter. So the objects in memory are compared: every tensor by dtype, shape and
checksum of its bytes (`_checksum`), other values by equality, and objects without a value (functions, unknown
types) by identity.

model.py derives the identity of a model from this.
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
"""4-byte words that are summed at a time."""
_SPREAD = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread evenly over 64 bits (Fibonacci hashing, Knuth 1973, 6.4)."""
_WHOLE = (Tensor, np.ndarray, set, frozenset, *_VALUES, *_CODE)


@runtime_checkable
class ComesAndGoes(Protocol):
    """An object that is only partly in memory (streamed weights), and reports its own state."""

    def known_by(self) -> Mapping[str, Any]:
        """Values that stay equal as long as the object is unchanged."""
        ...


@dataclass(frozen=True)
class Fingerprint:
    """State of an object and of everything that it refers to, by attribute path, for comparison later."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
    """Path -> (dtype, shape, checksum) of each tensor."""
    others: Mapping[str, Any]
    """Path -> value, or the object itself if it has no value; the reference keeps its memory address in
    use."""

    def first_difference(self, now: Fingerprint, *, tensors: bool = True) -> str | None:
        """Attribute path of the first difference between two states; None if equal.

        Arguments:
            now: the other state.
            tensors: whether to compare tensors, too.
        """
        pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(self.others, now.others)]
        if tensors:
            pairs.append((self.tensors, now.tensors))
        for before, after in pairs:
            for path in dict.fromkeys([*before, *after]):
                if path not in before or path not in after or not _same(before[path], after[path]):
                    return path
        return None


def fingerprint(root: object) -> Fingerprint:
    """The present state of an object, followed through attributes, sequences and mappings.

    Raises:
        ConfigError: for a tensor whose bytes cannot be read (on the meta device, or of a sparse layout).
    """
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    others: dict[str, Any] = {}
    for path, leaf in _leaves(root):
        if isinstance(leaf, Tensor | np.ndarray):
            tensors[path] = (str(leaf.dtype), tuple(leaf.shape), _checksum(path, leaf))
        else:
            others[path] = leaf
    return Fingerprint(tensors, others)


def weights_digest(root: object) -> str:
    """`sha256:…` over path, dtype, shape and bytes of every tensor that an object refers to.

    Raises:
        ConfigError: for a tensor whose bytes cannot be read (on the meta device, or of a sparse layout).
    """
    tensors = [
        [path, str(leaf.dtype), list(leaf.shape), content_digest(_bytes(path, leaf).data)]
        for path, leaf in _leaves(root)
        if isinstance(leaf, Tensor | np.ndarray)
    ]
    return f"sha256:{digest('weights-in-memory', tensors)}"


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors of an object; memory that tensors share, as a tied head, counts once."""
    sizes = {leaf.data_ptr(): leaf.nbytes for _, leaf in _leaves(root) if isinstance(leaf, Tensor)}
    return sum(sizes.values())


def _leaves(root: object) -> Iterator[tuple[str, Any]]:
    """Every tensor, value, and object without attributes that an object refers to, as (path, leaf) pairs.

    An object with attributes or items gives a pair, too: (path with its type name, number of parts).
    """
    waiting: list[tuple[str, Any]] = [("", root)]
    visited: dict[int, Any] = {}
    while waiting:
        path, node = waiting.pop()
        parts = None if id(node) in visited else _parts(node)
        if parts is None:
            # Also an object that was visited before: its parts are compared at the first visit.
            yield path, tuple(sorted(map(repr, node))) if isinstance(node, set | frozenset) else node
        else:
            # The reference keeps the object alive, so that no other gets its id meanwhile.
            visited[id(node)] = node
            yield f"{path}:{type(node).__module__}.{type(node).__qualname__}", len(parts)
            waiting += [(f"{path}.{name}" if path else name, part) for name, part in parts.items()]


def _parts(node: Any) -> dict[str, Any] | None:
    """Items or attributes of an object by name; None for a leaf."""
    if isinstance(node, _WHOLE):
        return None
    if isinstance(node, ComesAndGoes):
        return dict(node.known_by())
    if isinstance(node, Mapping):
        return {repr(key): part for key, part in node.items()}
    if isinstance(node, list | tuple):
        return {str(number): part for number, part in enumerate(node)}
    classes = type(node).__mro__
    slots = {name for base in classes for name in _slots(base)}
    parts = {name: getattr(node, name) for name in sorted(slots) if hasattr(node, name)}
    # A cached property is derived from other attributes, and appears only after its first use.
    cached = {
        name
        for base in classes
        for name, attribute in vars(base).items()
        if isinstance(attribute, cached_property)
    }
    parts |= {name: part for name, part in getattr(node, "__dict__", {}).items() if name not in cached}
    return parts if parts or is_dataclass(node) else None  # the type says all of a dataclass without fields


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)


def _same(before: Any, after: Any) -> bool:
    # The type is compared, too, because True == 1.
    by_value = isinstance(before, (tuple, *_VALUES)) and type(before) is type(after)
    return before is after or (by_value and bool(before == after))


def _checksum(path: str, tensor: Tensor | npt.NDArray[Any]) -> int:
    """Checksum of the bytes of a tensor: crc32c on the CPU (12 GB/s), `_weighted_sum` on a GPU.

    A GPU computes it itself, because copying the weights of a model from it takes longer than a pass. So a
    tensor that was moved to another device counts as changed.
    """
    if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
        checksum: int = google_crc32c.value(_bytes(path, tensor))
        return checksum
    return _weighted_sum(_flat(path, tensor))


def _weighted_sum(tensor: Tensor) -> int:
    """Sum modulo 2^64 of the 4-byte words of a tensor, each times an odd number that depends on its index.

    A change of one word always changes the sum, because odd numbers have inverses modulo 2^64. Changes of
    several words cancel with probability 2^-64.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    if padding := -flat.numel() % 4:
        flat = F.pad(flat, (0, padding))
    flat = flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # In steps, because the products take 8 bytes for each 4 of the weights.
    for start in range(0, flat.numel(), _WORDS):
        words = flat[start : start + _WORDS]
        places = torch.arange(start, start + words.numel(), dtype=torch.int64, device=flat.device)
        # int64 wraps around modulo 2^64 in torch; `| 1` makes each factor odd.
        total += (words * (places * _SPREAD | 1)).sum()
    return int(total.item())


def _bytes(path: str, source: Tensor | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in C order, read-only; copied only from another device or order."""
    # Copied: torch warns about arrays that are read-only.
    tensor = torch.from_numpy(np.array(source)) if isinstance(source, np.ndarray) else source
    array: npt.NDArray[np.uint8] = _flat(path, tensor, "cpu").numpy()
    # It may be the tensor's own memory.
    array.flags.writeable = False
    return array


def _flat(path: str, tensor: Tensor, device: str | None = None) -> Tensor:
    """The bytes of a tensor in C order, uint8 [byte], on a device; None for the device of the tensor.

    Raises:
        ConfigError: for a tensor whose bytes cannot be read.
    """
    try:
        return tensor.detach().to(device or tensor.device).contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"expected a dense tensor at {path} of the model, found one whose bytes cannot be read "
            f"({error}), so that results cannot be stored under a key; load the model from its files"
        ) from error
