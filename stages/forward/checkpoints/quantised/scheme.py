"""Scheme and Dequantised: how weights are packed, and a source of the dequantised weights.

A scheme is made from quantization_config in config.json (reading.py), without torch. It finds by names and
shapes which tensors are parts of which weight. A weight is dequantised when it is read, in float32, and
rounded once to the dtype of the model. Nothing is ever computed in fewer bits, and activations are not
quantised. The identity of the model is that of the quantised bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .....store.arrays import Array
from .....store.digest import digest
from .....store.errors import WeightsError
from ..source import Take, TensorEntry, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Dequantised", "Packed", "Scheme", "grouped", "unpacked"]


@dataclass(frozen=True)
class Packed:
    """One quantised weight, and the stored tensors from which it is dequantised."""

    shape: tuple[int, ...]
    """Shape of the dequantised weight."""
    parts: Mapping[str, str]
    """Role of a stored tensor, e.g. "scales" -> its name in the checkpoint."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further values that dequantising needs, e.g. the block size; empty for most methods."""


@dataclass(frozen=True)
class Scheme:
    """A quantisation method with its settings."""

    name: str
    """Name of the method, e.g. "gptq"."""
    version: int
    """Version of the dequantised numbers; raised when they change."""
    settings: Mapping[str, Any]
    """Settings of quantization_config that change a weight."""
    find: Callable[[TensorSource], dict[str, Packed]]
    """Function that finds the quantised weights among stored tensors: name of the weight -> its parts."""
    plain: Callable[[Packed, Mapping[str, Tensor]], Tensor]
    """Function from a quantised weight and its stored tensors by role to the weight in float32."""

    @property
    def digest(self) -> str:
        """Digest of method, version and settings: with the stored bytes, they decide every weight."""
        return digest("quantised", self.name, self.version, dict(self.settings))


@dataclass(frozen=True)
class Dequantised:
    """Tensors of a quantised checkpoint, dequantised to float32 when they are read."""

    base: TensorSource
    """The stored tensors."""
    scheme: Scheme
    """The quantisation method, which knows how weights are stored."""

    @cached_property
    def packed(self) -> dict[str, Packed]:
        """Name of each quantised weight -> the stored tensors that it consists of.

        Raises:
            WeightsError: for a weight of which a tensor is missing.
        """
        return self.scheme.find(self.base)

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Shape and dtype of every dequantised weight and every tensor that is not quantised, by name."""
        parts = {name for packed in self.packed.values() for name in packed.parts.values()}
        entries = {name: entry for name, entry in self.base.entries.items() if name not in parts}
        return entries | {name: TensorEntry(packed.shape, "F32") for name, packed in self.packed.items()}

    def mapped(self, name: str) -> Array | None:
        """Memory-mapped array of an unquantised tensor; None for a quantised tensor."""
        return None if name in self.packed else self.base.mapped(name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads and dequantises a tensor by name.

        Raises:
            WeightsError: for a weight whose stored tensors have shapes that do not fit together.
        """
        with self.base.opened() as take:

            def take_dequantised(name: str) -> Tensor:
                packed = self.packed.get(name)
                if packed is None:
                    return take(name)
                parts = {role: take(part) for role, part in packed.parts.items()}
                try:
                    weight = self.scheme.plain(packed, parts)
                # Wrong shapes surface as any of these from tensor operations.
                except (RuntimeError, IndexError, ValueError) as error:
                    weight, reason = None, f" ({str(error).splitlines()[0]})"
                else:
                    reason = ""
                if weight is None or tuple(weight.shape) != packed.shape:
                    shapes = ", ".join(f"{role} {list(part.shape)}" for role, part in parts.items())
                    raise WeightsError(
                        f"expected tensors of the quantised weight {name!r} with shapes that fit together "
                        f"for {self.scheme.name}, found {shapes}{reason}; fetch weights and config.json of "
                        "one checkpoint again"
                    )
                # Dequantising may transpose; readers of weights expect row-major memory.
                return weight.contiguous()

            yield take_dequantised


def grouped(
    source: TensorSource, mark: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Find the quantised modules of a checkpoint, and group their tensors by role.

    A tensor is named module.role, e.g. "model.layers.0.mlp.up_proj.scales".

    Arguments:
        source: the stored tensors.
        mark: role that only quantised modules have, e.g. "qweight".
        needed: further roles that such a module must have.
        optional: roles that it may have.

    Returns:
        Module -> role -> name of the tensor.

    Raises:
        WeightsError: for a module without a tensor of a needed role.
    """
    names = source.entries
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module = name.removesuffix(f".{mark}")
        if module == name:
            continue
        roles = {role: f"{module}.{role}" for role in (mark, *needed, *optional)}
        present = {role: part for role, part in roles.items() if part in names}
        if missing := [role for role in needed if role not in present]:
            raise WeightsError(
                f"expected a tensor {roles[missing[0]]!r} for the quantised {name!r}, found none; fetch the "
                "checkpoint again"
            )
        modules[module] = present
    return modules


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack small integers from the int32 words of a tensor, lowest bits first.

    Arguments:
        words: int32 tensor, each word of which holds 32 / bits integers.
        bits: bits of an integer, a divisor of 32.
        dim: dimension along which integers are packed.

    Returns:
        The integers as int32; `dim` is 32 / bits times as long.
    """
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (words.ndim + 1)
    shape[dim + 1] = -1
    # The mask also removes the sign bits that `>>` copies into negative words.
    spread = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return spread.flatten(dim, dim + 1)
