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
    """One quantised weight."""

    shape: tuple[int, ...]
    """Shape of the dequantised weight."""
    parts: Mapping[str, str]
    """Role -> name of the stored tensor."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further values that dequantising needs, from its quantisation state."""


@dataclass(frozen=True)
class Scheme:
    """A quantisation method with its settings."""

    name: str
    """quant_method, as quantization_config spells it."""
    version: int
    """Version of the dequantised numbers."""
    settings: Mapping[str, Any]
    """Configuration values that change a weight."""
    find: Callable[[TensorSource], dict[str, Packed]]
    """Source -> {name of the dequantised weight: its parts}."""
    plain: Callable[[Packed, Mapping[str, Tensor]], Tensor]
    """(weight, tensors by role) -> the weight in float32."""

    @property
    def digest(self) -> str:
        """Digest of everything but the stored bytes that decides a weight."""
        return digest("quantised", self.name, self.version, dict(self.settings))


@dataclass(frozen=True)
class Dequantised:
    """A source of the dequantised weights of another source."""

    base: TensorSource
    """The stored tensors."""
    scheme: Scheme
    """How they are packed."""

    @cached_property
    def packed(self) -> dict[str, Packed]:
        """Name of each quantised weight -> its parts. Raises WeightsError for missing parts."""
        return self.scheme.find(self.base)

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """See `TensorSource.entries`: dequantised weights in place of their parts."""
        parts = {name for packed in self.packed.values() for name in packed.parts.values()}
        entries = {name: entry for name, entry in self.base.entries.items() if name not in parts}
        return entries | {name: TensorEntry(packed.shape, "F32") for name, packed in self.packed.items()}

    def mapped(self, name: str) -> Array | None:
        """See `TensorSource.mapped`."""
        return None if name in self.packed else self.base.mapped(name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource.opened`. Raises WeightsError for parts whose shapes do not fit together."""
        with self.base.opened() as take:

            def plain(name: str) -> Tensor:
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
                        f"expected parts of {name!r} that fit together as {self.scheme.name} packs them, "
                        f"found {shapes}{reason}; is config.json of another checkpoint?"
                    )
                # Dequantising may transpose; readers of weights expect row-major memory.
                return weight.contiguous()

            yield plain


def grouped(
    source: TensorSource, mark: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Group tensor names by module, for every module with a tensor named `mark`.

    Arguments:
        source: the stored tensors.
        mark: role that identifies a quantised module; a tensor is named module.role.
        needed: further roles that such a module must have.
        optional: roles that it may have.

    Returns:
        Module -> role -> name of the tensor.

    Raises:
        WeightsError: for a module without one of the needed roles.
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
                f"expected {roles[missing[0]]!r} beside {name!r}, found no such tensor; fetch the "
                "checkpoint again"
            )
        modules[module] = present
    return modules


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Integers of `bits` bits, as int32, unpacked from int32 words along a dimension, lowest bits first.

    Arguments:
        words: int32 tensor of packed integers.
        bits: bits of an integer, a divisor of 32.
        dim: dimension along which integers are packed.
    """
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (words.ndim + 1)
    shape[dim + 1] = -1
    # The mask also removes the sign bits that `>>` copies into negative words.
    spread = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return spread.flatten(dim, dim + 1)
