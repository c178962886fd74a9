"""GGUF files as a source of tensors, with the names and layouts of the checkpoint they were converted from.

Quantised tensors are dequantised to float32 when they are read, one tensor or expert at a time, by
`gguf.dequantize`. The identity of the model is that of the quantised bytes.
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
"""Version of the numbers that reading gives; raised when a weight changes."""
_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that hold rope scaling, which goes into config.json."""
Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def config_of(files: tuple[Path, ...]) -> dict[str, Any]:
    """The config.json of the checkpoint that GGUF files were converted from.

    Arguments:
        files: all files of a model.

    Raises:
        ConfigError: for an architecture without a row, or damaged metadata.
    """
    header = header_of(files)
    family = family_of(header)
    try:
        return family.config(header)
    # Metadata of wrong types, and missing tensors, surface as these errors in the rows' functions.
    except (TypeError, KeyError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{header.path}: expected the metadata and tensors of a {header.architecture!r} model, found a "
            f"file that lacks some ({type(error).__name__}: {error!s:.80}); fetch the file again"
        ) from error


@dataclass(frozen=True)
class _Inverse:
    """Undoes what llama.cpp's converter did to a tensor, e.g. a transposition."""

    numbers: Callable[[Array], Array] = lambda whole: whole
    """Function from the tensor in the GGUF file to the tensor in the original checkpoint."""
    shape: Callable[[Shape], Shape] = lambda shape: shape
    """Function from the shape in the GGUF file to the shape in the original checkpoint."""


@dataclass(frozen=True)
class _Location:
    """Location of an original checkpoint tensor in the GGUF file, and its conversion back."""

    stored: str
    """Name in the GGUF file."""
    expert: int | None
    """Expert index along axis 0 of a stacked tensor; None for an unstacked tensor."""
    shape: Shape
    """Shape in the original checkpoint."""
    inverse: Callable[[Array], Array]
    """Function from the tensor in the GGUF file to the tensor in the original checkpoint."""


@dataclass(frozen=True)
class GgufFiles:
    """Tensors of the GGUF files of one checkpoint."""

    files: tuple[Path, ...]
    """All files of the checkpoint, in order."""

    @cached_property
    def _header(self) -> Header:
        return header_of(self.files)

    @cached_property
    def _locations(self) -> dict[str, _Location]:
        header = self._header
        family = family_of(header)
        locations: dict[str, _Location] = {}
        for name, stored in header.tensors.items():
            if name in _SETTINGS:
                continue
            target = _checkpoint_name(name, family)
            if target is None:
                raise WeightsError(
                    f"expected tensors of a {header.architecture!r} model in {header.path}, found {name!r}, "
                    "which mizarr does not know; load the checkpoint from which the file was converted"
                )
            inverse = _inverse_of_conversion(name, family, header)
            if "{}" in target:
                # Stacked experts are separate tensors in the checkpoint, and are dequantised one at a time.
                for expert in range(stored.shape[0]):
                    locations[target.format(expert)] = _Location(
                        name, expert, stored.shape[1:], inverse.numbers
                    )
            else:
                locations[target] = _Location(name, None, inverse.shape(stored.shape), inverse.numbers)
        return locations

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Shape and dtype of every tensor, by its name in the original checkpoint."""
        tensors = self._header.tensors
        return {
            name: TensorEntry(location.shape, tensors[location.stored].dtype)
            for name, location in self._locations.items()
        }

    def mapped(self, name: str) -> None:
        """Always None: tensors cannot be memory-mapped, because the converter quantised or reordered them."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads and dequantises a tensor by its name.

        Raises:
            WeightsError: for a tensor whose type cannot be dequantised.
        """
        import torch

        def take(name: str) -> Tensor:
            location = self._locations[name]
            try:
                plain = location.inverse(tensors[location.stored].plain(location.expert))
            except ValueError as error:
                raise WeightsError(
                    f"{self._header.path}: expected tensor {location.stored!r:.80} of a type that can be "
                    f"dequantised, found {tensors[location.stored].kind} ({error!s:.80}); use a file of the "
                    "model with another quantisation"
                ) from error
            # Transposed and reordered tensors are views; readers of weights expect row-major memory.
            return torch.from_numpy(np.ascontiguousarray(plain))

        tensors = self._header.tensors
        try:
            yield take
        finally:
            for tensor in tensors.values():
                tensor.release()


def _checkpoint_name(name: str, family: GgufFamily) -> str | None:
    """Name of a GGUF tensor in the original checkpoint; None for an unknown tensor."""
    match = _IN_LAYER.fullmatch(name)
    stem, _, kind = (match[2] if match else name).rpartition(".")
    target = (family.layer if match else family.outside).get(stem)
    if target is None or kind not in ("weight", "bias"):
        return None
    return (family.prefix.format(match[1]) if match else "") + f"{target}.{kind}"


def _inverse_of_conversion(name: str, family: GgufFamily, header: Header) -> _Inverse:
    # "blk.3.attn_q.weight" -> "attn_q.weight".
    stem = name.removeprefix("blk.").partition(".")[2] if name.startswith("blk.") else name
    # llama.cpp rotates neighbouring channels of these families, transformers rotates halves.
    if family.has_paired_rope and stem.startswith(("attn_q.", "attn_k.")):
        heads = header.require("attention.head_count")
        if stem.startswith("attn_k."):
            heads = header.get("attention.head_count_kv", heads)
        rows = header.tensors[name].shape[0]
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise WeightsError(
                f"{header.path}: expected a number of heads that divides the {rows} rows of tensor {name!r}, "
                f"found {heads!r:.80}; fetch the file again"
            )
        return _Inverse(lambda rows: _from_pairs(rows, heads))
    if family.has_shifted_norms and stem.endswith("norm.weight"):
        # The converter stores 1 + weight, as llama.cpp's norm multiplies by the stored value.
        return _Inverse(lambda gains: gains - 1)
    if family.is_transposed and name.startswith("blk.") and stem.endswith(".weight") and "norm" not in stem:
        # GPT-2 stores matrices as [in, out] (Conv1D); llama.cpp as [out, in].
        return _Inverse(np.transpose, lambda shape: shape[::-1])
    if stem == "ffn_gate_inp_shexp.weight":
        # The converter drops the axis of length 1 of this gate.
        return _Inverse(lambda row: row.reshape(1, -1), lambda shape: (1, *shape))
    return _Inverse()


def _from_pairs(rows: Array, heads: int) -> Array:
    """Reorder the rows of each head: rope pairs that are neighbours become pairs half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
