"""GGUF files as a source of tensors, under the names and in the order of the checkpoint they were made of.

Quantised rows are made plain in float32 when they are read, tensor by tensor, by the formula of the format
(`gguf.dequantize`); of stacked experts one at a time. The quantised bytes are the identity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .....store.errors import ConfigError, WeightsError
from ..source import Take, TensorEntry
from .families import GgufFamily, family_of
from .header import Header, header_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VERSION", "GgufFiles", "config_of"]

VERSION = 1
"""Declared, of what reading computes: moves when a weight does."""
_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that say how rotations are scaled; config.json has that."""
Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def config_of(files: tuple[Path, ...]) -> dict[str, Any]:
    """The config.json of the checkpoint that files were made of. Raises ConfigError for a kind of model that
    is not read."""
    header = header_of(files)
    family = family_of(header)
    try:
        return family.config(header)
    # Metadata of other types than the format says, and tensors that are not there.
    except (TypeError, KeyError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{header.path}: expected the metadata and tensors of {header.architecture!r}, found others "
            f"({type(error).__name__}: {error!s:.80}); fetch the file again"
        ) from error


@dataclass(frozen=True)
class _Undo:
    """What makes a stored tensor the checkpoint's."""

    numbers: Callable[[Array], Array] = lambda whole: whole
    shape: Callable[[Shape], Shape] = lambda shape: shape


@dataclass(frozen=True)
class _Placed:
    """Where one tensor of the checkpoint lies. expert: along the first axis of what is stored; None for all.
    undo: what the converter did."""

    stored: str
    expert: int | None
    shape: Shape
    undo: Callable[[Array], Array]


@dataclass(frozen=True)
class GgufFiles:
    """Tensors of the files of one checkpoint."""

    files: tuple[Path, ...]

    @cached_property
    def _header(self) -> Header:
        return header_of(self.files)

    @cached_property
    def _placed(self) -> dict[str, _Placed]:
        header = self._header
        family = family_of(header)
        found: dict[str, _Placed] = {}
        for name, stored in header.tensors.items():
            if name in _SETTINGS:
                continue
            target = _target(name, family)
            if target is None:
                raise WeightsError(
                    f"expected tensors of {header.architecture!r} in {header.path}, found {name!r}, which "
                    "nothing of it reads; use the checkpoint it was made of"
                )
            undo = _undo(name, family, header)
            if "{}" in target:
                for expert in range(stored.shape[0]):
                    found[target.format(expert)] = _Placed(name, expert, stored.shape[1:], undo.numbers)
            else:
                found[target] = _Placed(name, None, undo.shape(stored.shape), undo.numbers)
        return found

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """As `TensorSource.entries`."""
        tensors = self._header.tensors
        return {
            name: TensorEntry(placed.shape, tensors[placed.stored].dtype)
            for name, placed in self._placed.items()
        }

    def mapped(self, name: str) -> None:
        """As `TensorSource.mapped`: never, as most are quantised, and others moved about."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """As `TensorSource.opened`."""
        import torch

        def take(name: str) -> Tensor:
            placed = self._placed[name]
            try:
                plain = placed.undo(tensors[placed.stored].plain(placed.expert))
            except ValueError as error:
                raise WeightsError(
                    f"{self._header.path}: expected {placed.stored!r:.80} in blocks that can be dequantised, "
                    f"found {tensors[placed.stored].kind} ({error!s:.80}); use another file of the model"
                ) from error
            return torch.from_numpy(np.ascontiguousarray(plain))

        tensors = self._header.tensors
        try:
            yield take
        finally:
            for tensor in tensors.values():
                tensor.release()


def _target(name: str, family: GgufFamily) -> str | None:
    """What the checkpoint calls a tensor; None for one it does not have."""
    match = _IN_LAYER.fullmatch(name)
    stem, _, kind = (match[2] if match else name).rpartition(".")
    found = (family.layer if match else family.outside).get(stem)
    if found is None or kind not in ("weight", "bias"):
        return None
    return (family.prefix.format(match[1]) if match else "") + f"{found}.{kind}"


def _undo(name: str, family: GgufFamily, header: Header) -> _Undo:
    stem = name.removeprefix("blk.").partition(".")[2] if name.startswith("blk.") else name
    if family.turned and stem.startswith(("attn_q.", "attn_k.")):
        heads = header.require("attention.head_count")
        if stem.startswith("attn_k."):
            heads = header.get("attention.head_count_kv", heads)
        rows = header.tensors[name].shape[0]
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise WeightsError(
                f"{header.path}: expected a number of heads that {name!r} of {rows} rows has, found "
                f"{heads!r:.80}; fetch the file again"
            )
        return _Undo(lambda rows: _halves(rows, heads))
    if family.shifted and stem.endswith("norm.weight"):
        return _Undo(lambda gains: gains - 1)
    if family.transposed and name.startswith("blk.") and stem.endswith(".weight") and "norm" not in stem:
        return _Undo(np.transpose, lambda shape: shape[::-1])
    if stem == "ffn_gate_inp_shexp.weight":
        return _Undo(lambda row: row.reshape(1, -1), lambda shape: (1, *shape))
    return _Undo()


def _halves(rows: Array, heads: int) -> Array:
    """Rows of each head from pairs of neighbours to two halves: llama.cpp turns neighbours, checkpoints have
    what is turned together half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
