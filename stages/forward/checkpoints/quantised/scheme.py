"""What a way to quantise says of a checkpoint, and a source whose packed weights are plain again.

A scheme is made of config.json's quantization_config (reading.py), which is torch-free, and finds by names
and shapes which tensors are parts of which weight. A weight is dequantised when it is read, alone, in
float32, and rounded once to what the model computes in; nothing is ever computed in fewer bits, and
activations are not quantised. The quantised bytes are the identity.

Border: one weight at a time; which ones a model needs is not known here.
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
    """One weight as a checkpoint holds it. shape: of the plain weight. parts: role -> name of a tensor.
    facts: what else there is to know of it."""

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """A way to quantise, with its settings.

    name: as quantization_config has it. version: declared, of what dequantising computes. settings: what of
    the configuration decides a number. find: names of plain weights -> what they are packed in. plain: the
    weight in float32 of its parts by role.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    find: Callable[[TensorSource], dict[str, Packed]]
    plain: Callable[[Packed, Mapping[str, Tensor]], Tensor]

    @property
    def digest(self) -> str:
        """Of everything but the bytes that decides a weight."""
        return digest("quantised", self.name, self.version, dict(self.settings))


@dataclass(frozen=True)
class Dequantised:
    """A source of the plain weights of a quantised one."""

    base: TensorSource
    scheme: Scheme

    @cached_property
    def packed(self) -> dict[str, Packed]:
        """What is packed, by the name of the plain weight. Raises WeightsError for parts that are missing."""
        return self.scheme.find(self.base)

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """As `TensorSource.entries`: plain weights in place of their parts."""
        parts = {name for packed in self.packed.values() for name in packed.parts.values()}
        found = {name: entry for name, entry in self.base.entries.items() if name not in parts}
        return found | {name: TensorEntry(packed.shape, "F32") for name, packed in self.packed.items()}

    def mapped(self, name: str) -> Array | None:
        """As `TensorSource.mapped`."""
        return None if name in self.packed else self.base.mapped(name)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """As `TensorSource.opened`. Raises WeightsError for parts that do not fit together."""
        with self.base.opened() as take:

            def plain(name: str) -> Tensor:
                packed = self.packed.get(name)
                if packed is None:
                    return take(name)
                parts = {role: take(part) for role, part in packed.parts.items()}
                try:
                    made = self.scheme.plain(packed, parts)
                except (RuntimeError, IndexError, ValueError) as error:
                    made, reason = None, f" ({str(error).splitlines()[0]})"
                else:
                    reason = ""
                if made is None or tuple(made.shape) != packed.shape:
                    shapes = ", ".join(f"{role} {list(part.shape)}" for role, part in parts.items())
                    raise WeightsError(
                        f"expected parts of {name!r} that fit together as {self.scheme.name} packs them, "
                        f"found {shapes}{reason}; is config.json of another checkpoint?"
                    )
                return made.contiguous()

            yield plain


def grouped(
    source: TensorSource, mark: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Module -> role -> tensor, of every module that has a tensor named by the mark.

    Raises WeightsError for a module that lacks one of the needed ones.
    """
    names = source.entries
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module = name.removesuffix(f".{mark}")
        if module == name:
            continue
        roles = {role: f"{module}.{role}" for role in (mark, *needed, *optional)}
        held = {role: part for role, part in roles.items() if part in names}
        if missing := [role for role in needed if role not in held]:
            raise WeightsError(
                f"expected {roles[missing[0]]!r} beside {name!r}, found no such tensor; fetch the checkpoint "
                "again"
            )
        found[module] = held
    return found


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Whole numbers of `bits` bits, int32, that lie in the words of int32 along a dimension, lowest first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (words.ndim + 1)
    shape[dim + 1] = -1
    spread = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return spread.flatten(dim, dim + 1)
