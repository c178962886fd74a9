"""Interventions: frozen values that say how an activation is changed at a hook point.

Know tensors and the axes of the hook point they are applied at; know nothing of models or stores. An
intervention is data, not a callback, so that it can be checked before a forward pass starts and digested
into the key of what it produces. Importing this module does not import torch; payloads may be torch
tensors, numpy arrays or lists of floats.

Payloads must be real floating point and finite; they are cast to the dtype of the activation they meet.
``positions``, ``heads`` and ``neurons`` narrow an intervention to part of the tensor; negative positions
count from the end. Those on attention edges are in edge_interventions.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ....pipeline.parameters import parameter_records
from ....store.arrays import as_index, as_indices
from ....store.digest import canonical_json
from ....store.errors import InterventionError
from ...declared import name_of
from ..architectures.points import HookPoint
from .payloads import (
    Chosen,
    Owned,
    Payload,
    as_tensor,
    checked_payload,
    copied,
    finite,
    owned,
    payload_record,
    picked,
    plain_value,
)

if TYPE_CHECKING:
    from torch import Tensor

_POSITION_AXES = ("position", "query_position")
_HEAD_AXES = (
    *("head", "kv_head", "diff_head", "ssm_head", "ssm_group"),
    *("linear_head", "linear_group", "mlstm_head"),
)
_NEURON_AXES = ("neuron", "mlp")
_EXPERT_AXES = ("expert",)


@dataclass(frozen=True)
class Held:
    """Which positions of a prompt a tensor holds, where it does not hold them all.

    positions: int [held], ascending. length: of the prompt, from whose end negative positions count.
    """

    positions: npt.NDArray[np.int64]
    length: int

    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """(index in the tensor, index in `positions`) of those positions that are held."""
        where = {int(position): i for i, position in enumerate(self.positions)}
        wanted = enumerate(position % self.length for position in positions)
        found = [(where[position], i) for i, position in wanted if position in where]
        return [place for place, _ in found], [i for _, i in found]


@dataclass(frozen=True, eq=False)
class Intervention:
    """Base of all interventions; two are equal when their canonical forms are."""

    kinds: ClassVar[tuple[str, ...] | None] = None
    """Hook point kinds this intervention makes sense at; None for all."""
    version: ClassVar[int | str | None] = None
    """Of an intervention written outside of mizarr: moves when what it does moves."""
    cuts_edges: ClassVar[bool] = False
    """Whether it is a mask (`cut`), which attention applies with its own; others change what stands there."""
    is_positionwise: ClassVar[bool] = False
    """Whether the new value at a position (on attention: of a query) depends on the old one at that position
    alone, wherever it is, so that a pass may hand over some positions only. Each class says so of itself: a
    subclass that does not is taken to look at all of them."""

    @property
    def needs_all_positions(self) -> bool:
        """Whether `apply` must see every position of a prompt."""
        return not vars(type(self)).get("is_positionwise", False)

    def with_own_payloads(self) -> Self:
        """This intervention where nobody else holds its tensors, else a copy with tensors of its own."""
        fields = {
            name: copied(value)
            for name, value in vars(self).items()
            if not isinstance(inspect.getattr_static(type(self), name, None), Owned)
        }
        if all(value is vars(self)[name] for name, value in fields.items()):
            return self
        same = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(same, name, value)
        return same

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify the intervention; payloads enter by dtype, shape and sha256 of
        their bytes. Fields of a class that a user wrote are recorded as stage parameters are, as that class
        may tell a tuple from a list, or try a mapping in its order.

        Raises:
            InterventionError: for a user's class that declares no version of itself, as its fields do not say
                what it does, and for a field of it that has no record.
        """
        name = name_of(type(self), InterventionError)
        fields = {field: value for field, value in vars(self).items() if value is not None}
        if isinstance(name, str):
            return {"intervention": name, **{field: plain_value(value) for field, value in fields.items()}}
        try:
            return {"intervention": name, **parameter_records(fields, payload_record)}
        except (TypeError, ValueError) as error:
            raise InterventionError(f"{type(self).__name__}: its fields enter the key: {error}") from error

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless this can be applied at `point`, whose axes have these sizes."""
        if self.kinds is not None and point.kind not in self.kinds:
            places = " or ".join(f"'{HookPoint(kind, point.layer or 0)}'" for kind in self.kinds)
            raise InterventionError(
                f"{type(self).__name__} belongs at {places}, found it at '{point}'; use Replace, Scale or "
                "Zero there"
            )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Positions (on attention: queries) of a prompt of `length` that may change; None for all of them.
        ahead: whether queries see later keys."""
        return None

    def require_causal(self, point: HookPoint, length: int) -> None:
        """Raise InterventionError for an edge to a later key, which models that look back have not."""

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor. allowed: bool [query, key], where attention may look
        (patterns only). held: which positions x holds; None for all."""
        raise NotImplementedError

    def applied(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """As `apply`, and what passes call. An intervention that looks at all positions gets a copy of them,
        one prompt at a time, so that neither who shares a batch nor what it writes to its argument matters.

        Raises InterventionError where it gives another shape than it got.
        """
        if not self.needs_all_positions:
            return self.apply(x, point, allowed, held)
        import torch

        rows = list(x.clone().split(1)) if point.dims[0] == "batch" else [x.clone()]
        masks = (
            [allowed] * len(rows)
            if allowed is None or allowed.ndim < x.ndim
            else allowed.expand(len(rows), *allowed.shape[1:]).split(1)
        )
        changed = [self.apply(row, point, mask) for row, mask in zip(rows, masks, strict=True)]
        for row in changed:
            if row.shape != rows[0].shape:
                raise InterventionError(
                    f"{type(self).__name__} at '{point}': expected apply() to give a tensor of shape "
                    f"{list(rows[0].shape)}, as it got, found {list(row.shape)}; expand it to that shape"
                )
        return torch.cat(changed).to(x)

    def cut(self, heads: int, queries: int, keys: int, device: Any) -> Tensor:
        """Bool [head, query, key], True where an edge is cut; of interventions that cut edges."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervention) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(canonical_json(self.canonical()))


_CHOICES = {
    "positions": _POSITION_AXES,
    "heads": _HEAD_AXES,
    "neurons": _NEURON_AXES,
    "experts": _EXPERT_AXES,
}
"""What can be chosen of an activation, and the axes that have it."""


@dataclass(frozen=True, eq=False)
class _Selective(Intervention):
    """An intervention on all of an activation, or on some positions, heads, neurons or experts of it."""

    positions: tuple[int, ...] | None = field(default=None, kw_only=True)
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)
    neurons: tuple[int, ...] | None = field(default=None, kw_only=True)
    experts: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in _CHOICES:
            chosen = getattr(self, name)
            if chosen is not None:
                chosen = as_indices(chosen, f"{type(self).__name__}: {name}", InterventionError)
                if not chosen:
                    raise InterventionError(
                        f"{type(self).__name__}: expected at least one of {name}, found none; leave {name} "
                        "out to mean all"
                    )
                object.__setattr__(self, name, chosen)

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        for axis, name, chosen in self._chosen(point, self.positions):
            check_indices(f"{type(self).__name__} at '{point}'", name, chosen, sizes.get(axis))

    def region(self, point: HookPoint, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the part of the activation that is touched."""
        shape = {axis: sizes[axis] for axis in point.dims}
        shape |= {axis: len(chosen) for axis, _, chosen in self._chosen(point, self.positions)}
        return tuple(shape.values())

    def _chosen(
        self, point: HookPoint, positions: tuple[int, ...] | None
    ) -> list[tuple[str, str, tuple[int, ...]]]:
        """(axis of the point, what is chosen there, which) in the order of its axes."""
        own = {name: getattr(self, name) for name in _CHOICES}
        named = own | {"positions": positions}
        found = [
            (axis_of(point, _CHOICES[name], name), name, chosen)
            for name, chosen in named.items()
            if chosen is not None
        ]
        return sorted(found, key=lambda each: point.dims.index(each[0]))

    def _where(self, point: HookPoint, positions: tuple[int, ...] | None) -> tuple[Any, ...]:
        """Index of the touched part: heads or experts, positions and neurons are neighbouring axes, so their
        indices broadcast as an outer product."""
        index: list[Any] = [slice(None)] * len(point.dims)
        found = self._chosen(point, positions)
        for (axis, *_), places in zip(found, np.ix_(*(chosen for *_, chosen in found)), strict=True):
            index[point.dims.index(axis)] = places
        return tuple(index)

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """See `Intervention`: the positions chosen, counted from the start."""
        return None if self.positions is None else tuple(position % length for position in self.positions)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        positions, chosen = self.positions, None
        if held is not None:
            axis = len(point.dims) - point.dims.index(axis_of(point, _POSITION_AXES, "positions"))
            if self.positions is None:
                chosen = (axis, held.positions.tolist())
            else:
                places, among = held.places(self.positions)
                if not places:
                    return x
                positions, chosen = tuple(places), (axis, among)
        if not self._chosen(point, positions):
            return self.change(x, chosen)
        where = self._where(point, positions)
        changed = x.clone()
        changed[where] = self.change(x[where], chosen)
        return changed

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part. chosen: which entries of a payload's position axis it is, where
        it is not all of them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _WithPayload(_Selective):
    """A selective intervention that carries a tensor which broadcasts to the part it touches."""

    value: Payload = Owned()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "value", checked_payload(type(self).__name__, owned(self, "value")))

    @property
    def payload(self) -> Payload:
        """The value itself, for passes; `value` is a copy."""
        return owned(self, "value")

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        region, found = self.region(point, sizes), tuple(self.payload.shape)
        try:
            fits = np.broadcast_shapes(found, region) == region
        except ValueError:
            fits = False
        if not fits:
            named = ", ".join(f"{axis}={size}" for axis, size in zip(point.dims, region, strict=True))
            raise InterventionError(
                f"{type(self).__name__} at '{point}': expected a tensor that broadcasts to [{named}], found "
                f"shape {list(found)}; reshape it, or choose positions/heads"
            )


@dataclass(frozen=True, eq=False)
class Replace(_WithPayload):
    """The activation becomes `value` (Replace(captured) changes nothing)."""

    is_positionwise: ClassVar[bool] = True

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        # A copy: what follows may be captured, and whoever writes to that must not write to the payload.
        return as_tensor(picked(self.payload, chosen), part).expand_as(part).clone()


@dataclass(frozen=True, eq=False)
class Add(_WithPayload):
    """x + value, broadcast: a [hidden] vector is added at every position (or at `positions`)."""

    is_positionwise: ClassVar[bool] = True

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part + as_tensor(picked(self.payload, chosen), part)


@dataclass(frozen=True, eq=False)
class Scale(_Selective):
    """x * factor, without renormalisation even on attention patterns (use Steer for that)."""

    is_positionwise: ClassVar[bool] = True
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", finite("Scale", self.factor))

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part * self.factor


@dataclass(frozen=True, eq=False)
class Zero(_Selective):
    """The activation becomes zero."""

    is_positionwise: ClassVar[bool] = True

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part.new_zeros(part.shape)


@dataclass(frozen=True, eq=False)
class AddAtPositions(Intervention):
    """x + scale * vector at each (position, vector); several vectors at one position add up.

    vectors: pairs (position, [hidden] vector). Accumulated in float32, cast once, added once.
    """

    is_positionwise: ClassVar[bool] = True
    vectors: Sequence[tuple[int, Payload]] = Owned()  # type: ignore[assignment]  # a descriptor
    scale: float = 1.0

    def __post_init__(self) -> None:
        vectors = owned(self, "vectors")
        pairs = vectors.items() if isinstance(vectors, Mapping) else vectors
        try:
            split = [(position, vector) for position, vector in pairs]
        except (TypeError, ValueError) as error:
            raise InterventionError(
                "AddAtPositions: expected (position, vector) pairs, found something else; write "
                "AddAtPositions([(-1, vector)])"
            ) from error
        kept = tuple(
            (
                as_index(position, "AddAtPositions: positions", InterventionError),
                checked_payload("AddAtPositions", vector),
            )
            for position, vector in split
        )
        if not kept:
            raise InterventionError(
                "AddAtPositions: expected at least one (position, vector) pair, found none"
            )
        object.__setattr__(self, "vectors", kept)
        object.__setattr__(self, "scale", finite("AddAtPositions", self.scale))

    @property
    def pairs(self) -> tuple[tuple[int, Payload], ...]:
        """(position, vector) pairs with the vectors themselves, for passes; `vectors` are copies."""
        pairs: tuple[tuple[int, Payload], ...] = owned(self, "vectors")
        return pairs

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        if "position" not in point.dims or point.dims[-1] != "hidden":
            raise InterventionError(
                "AddAtPositions adds vectors to a [batch, position, hidden] activation, found it at "
                f"'{point}' with axes {list(point.dims)}"
            )
        check_indices(
            f"AddAtPositions at '{point}'", "positions", [p for p, _ in self.pairs], sizes["position"]
        )
        for position, vector in self.pairs:
            if tuple(vector.shape) != (sizes["hidden"],):
                raise InterventionError(
                    f"AddAtPositions at '{point}': expected a vector of length {sizes['hidden']} for "
                    f"position {position}, found shape {list(vector.shape)}"
                )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """The positions that have a vector."""
        return tuple(position % length for position, _ in self.pairs)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        import torch

        places = [position for position, _ in self.pairs]
        vectors = [vector for _, vector in self.pairs]
        if held is not None:
            places, among = held.places(places)
            vectors = [vectors[i] for i in among]
        delta = torch.zeros(x.shape[-2], x.shape[-1], dtype=torch.float32, device=x.device)
        for place, vector in zip(places, vectors, strict=True):
            delta[place] += self.scale * as_tensor(vector, delta)
        return x + delta.to(x.dtype)


def payload_rows(point: HookPoint, change: Intervention) -> int:
    """Rows of a payload along the batch axis of a point; 1 where it has no such axis, or no payload."""
    if not isinstance(change, _WithPayload) or point.dims[0] != "batch":
        return 1
    shape = tuple(change.payload.shape)
    return int(shape[0]) if len(shape) == len(point.dims) else 1


def check_indices(where: str, name: str, chosen: Sequence[int], size: int | None) -> None:
    """InterventionError for the first index outside an axis of this size; None checks nothing."""
    if size is None:
        return
    outside = [index for index in chosen if not -size <= index < size]
    if outside:
        raise InterventionError(
            f"{where}: expected {name} in 0..{size - 1} (or negative, from the end), found {outside[0]}"
        )


def axis_of(point: HookPoint, axes: tuple[str, ...], name: str) -> str:
    """Which of these axes a point has; InterventionError, naming what was to be chosen, if it has none."""
    for axis in axes:
        if axis in point.dims:
            return axis
    raise InterventionError(f"'{point}' has axes {list(point.dims)}: it has no {name} to choose")
