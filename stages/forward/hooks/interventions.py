"""Interventions: frozen values that say how an activation is changed at a hook point.

They know tensors and the axes of a hook point, nothing of models or stores. An intervention is data, not a
callback, so that it can be checked before a forward pass starts and digested into the key of its results.
Importing this module does not import torch.

Payloads are torch tensors, numpy arrays or lists of floats. They must be real, floating point and finite, and
are cast to the dtype of the activation they change. ``positions``, ``heads`` and ``neurons`` restrict an
intervention to a part of the tensor; negative positions count from the end. ``within`` restricts it to a
subspace of the activation vectors, ``where`` to positions at which a linear probe fires (subspaces.py).
Interventions on attention edges are in edge_interventions.py.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from ....pipeline.parameters import parameter_records
from ....store.arrays import as_index, as_indices, shown
from ....store.digest import canonical_json
from ....store.errors import InterventionError
from ...declared import name_of
from ..architectures.points import HookPoint
from .payloads import (
    Payload,
    PayloadField,
    PayloadPositions,
    as_tensor,
    checked_payload,
    copy_payloads,
    finite,
    payload_record,
    plain_value,
    private_payload,
    select_positions,
)
from .subspaces import LinearCondition, Subspace

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
class PositionSubset:
    """Prompt positions along a tensor's position axis, where a pass computes a subset of the prompt."""

    positions: npt.NDArray[np.int64]
    """Ascending positions, one for each entry of the tensor's position axis."""
    length: int
    """Tokens of the whole prompt; negative positions count from its end."""

    def locate(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the tensor holds the given prompt positions; positions that it lacks are left out.

        Arguments:
            positions: prompt positions, negative from the end.

        Returns:
            (indices on the tensor's position axis, indices into `positions`), of equal length.
        """
        index_of = {int(position): i for i, position in enumerate(self.positions)}
        wanted = enumerate(position % self.length for position in positions)
        present = [(index_of[position], i) for i, position in wanted if position in index_of]
        return [index for index, _ in present], [i for _, i in present]


@dataclass(frozen=True, eq=False)
class Intervention:
    """Base class of all interventions; two are equal when their canonical forms are."""

    kinds: ClassVar[tuple[str, ...] | None] = None
    """Supported hook point kinds, e.g. ("pattern",); None for all kinds."""
    version: ClassVar[int | str | None] = None
    """Version of a user-defined intervention, which enters its key; to be raised when its numbers change."""
    cuts_edges: ClassVar[bool] = False
    """Whether the intervention is an attention mask, which `cut` returns and attention applies together with
    the causal mask; `apply` is then never called."""
    is_positionwise: ClassVar[bool] = False
    """Whether the new value at a position (for attention: of a query) depends only on the old value there.
    Such an intervention may be given some positions of a prompt only. Never inherited: a subclass that does
    not set it is given all positions."""

    @property
    def needs_all_positions(self) -> bool:
        """Whether `apply` must get every position of a prompt."""
        # Not inherited: a subclass may override `apply` and read other positions without knowing of the flag.
        return not vars(type(self)).get("is_positionwise", False)

    def with_copied_payloads(self) -> Self:
        """A copy with private tensors; the intervention itself where its fields already are private."""
        fields = {
            name: copy_payloads(value)
            for name, value in vars(self).items()
            if not isinstance(inspect.getattr_static(type(self), name, None), PayloadField)
        }
        # Most interventions hold private payloads only; copying them again would double the memory.
        if all(value is vars(self)[name] for name, value in fields.items()):
            return self
        clone = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(clone, name, value)
        return clone

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify the intervention; payloads by dtype, shape and sha256 of the bytes.

        Raises:
            InterventionError: for a user-defined class without a `version`, as its fields do not show what
                its code does, or with a field that cannot be recorded.
        """
        name = name_of(type(self), InterventionError)
        fields = {field: value for field, value in vars(self).items() if value is not None}
        if isinstance(name, str):
            # Field names are part of the digest: renaming one changes every key.
            return {"intervention": name, **{field: plain_value(value) for field, value in fields.items()}}
        # Fields of a user's class are recorded as stage parameters are: its code may tell a tuple from a
        # list, or iterate over a mapping in order.
        try:
            return {"intervention": name, **parameter_records(fields, payload_record)}
        except (TypeError, ValueError) as error:
            raise InterventionError(
                f"{type(self).__name__}: the key of a run records every field of an intervention: {error}"
            ) from error

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Check that the intervention fits a hook point.

        Arguments:
            point: hook point at which it is to be applied.
            sizes: axis name -> length, for the axes of that point.

        Raises:
            InterventionError: for a hook point of another kind, or indices and shapes that do not fit.
        """
        if self.kinds is not None and point.kind not in self.kinds:
            supported = " or ".join(f"'{HookPoint(kind, point.layer or 0)}'" for kind in self.kinds)
            raise InterventionError(
                f"{type(self).__name__}: expected the hook point {supported}, found '{point}'; move it "
                "there, or use Replace, Scale or Zero"
            )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Positions of a prompt (for attention: queries) that may change.

        Arguments:
            length: tokens of the prompt.
            ahead: whether queries see later keys (no causal mask).

        Returns:
            Positions counted from 0; None for all of them.
        """
        return None

    def require_causal(self, point: HookPoint, length: int) -> None:
        """Raise InterventionError for an edge from a query to a later key, which a causal model masks.

        Arguments:
            point: hook point at which it is applied.
            length: tokens of the prompt.
        """

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed activation, as a new tensor.

        Arguments:
            x: activation with the axes of the hook point.
            point: hook point at which it is.
            allowed: attention mask, bool [query, key], True where attention may look; for patterns only.
            subset: positions that x has; None for all.
        """
        raise NotImplementedError

    def applied(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed activation; forward passes call this instead of `apply`.

        An intervention that needs all positions is applied to a copy, one prompt at a time. So its result
        depends neither on the other prompts of the batch nor on what it writes to its argument.

        Arguments:
            x: activation with the axes of the hook point.
            point: hook point at which it is.
            allowed: attention mask, bool [query, key] or with a batch axis; for patterns only.
            subset: positions that x has; None for all.

        Raises:
            InterventionError: where `apply` returns another shape than it got.
        """
        if not self.needs_all_positions:
            return self.apply(x, point, allowed, subset)
        import torch

        # One prompt at a time: a mean over positions must not see the other prompts of the batch.
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
                    f"{type(self).__name__} at '{point}': expected apply() to return a tensor of shape "
                    f"{list(rows[0].shape)}, like its argument, found {list(row.shape)}; expand it to that "
                    "shape"
                )
        return torch.cat(changed).to(x)

    def cut(self, heads: int, queries: int, keys: int, device: Any) -> Tensor:
        """Bool [head, query, key], True where an edge is cut; only where `cuts_edges` is set.

        Arguments:
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the result.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervention) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        # Payloads are arrays, which have no hash of their own; the canonical form holds their digest.
        return hash(canonical_json(self.canonical()))


_CHOICES = {
    "positions": _POSITION_AXES,
    "heads": _HEAD_AXES,
    "neurons": _NEURON_AXES,
    "experts": _EXPERT_AXES,
}
"""Field of `Selective` -> axes of a hook point on which its indices select."""


@dataclass(frozen=True, eq=False)
class Selective(Intervention, ABC):
    """An intervention on all of an activation, or on selected positions, heads, neurons or experts."""

    positions: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Token positions that are changed, negative from the end; None for every position."""
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Head indices on the head axis of the hook point; None for every head."""
    neurons: tuple[int, ...] | None = field(default=None, kw_only=True)
    """MLP neuron indices; None for every neuron."""
    experts: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Expert indices; None for every expert."""
    within: Subspace | None = field(default=None, kw_only=True)
    """Subspace of the last axis in which the activation changes: x becomes x + P (f(x) - x), where f(x) is
    the changed value and P the projection on the subspace. None for all of the axis."""
    where: LinearCondition | None = field(default=None, kw_only=True)
    """Linear probe of the last axis: x changes only where the probe fires at x. None for everywhere."""

    def __post_init__(self) -> None:
        for name in _CHOICES:
            indices = getattr(self, name)
            if indices is not None:
                indices = as_indices(indices, f"{type(self).__name__}: {name}", InterventionError)
                if not indices:
                    raise InterventionError(
                        f"{type(self).__name__}: expected at least one of {name}, found none; leave {name} "
                        "out to mean all"
                    )
                object.__setattr__(self, name, indices)
        for name, kind in (("within", Subspace), ("where", LinearCondition)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InterventionError(
                    f"{type(self).__name__}: expected {name} to be a {kind.__name__}, found {shown(value)}; "
                    f"write {name}=mizarr.{kind.__name__}(vector)"
                )

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        for axis, name, indices in self._selected(point, self.positions):
            check_indices(f"{type(self).__name__} at '{point}'", name, indices, sizes.get(axis))
        for name in ("within", "where"):
            value = getattr(self, name)
            if value is None:
                continue
            self._require_vectors(point, name)
            if value.width != (width := self.region(point, sizes)[-1]):
                raise InterventionError(
                    f"{type(self).__name__} at '{point}': expected {name}= of width {width}, the size of the "
                    f"axis {point.dims[-1]!r} that is changed, found width {value.width}; make it from "
                    "activations of this model at this hook point"
                )

    def _require_vectors(self, point: HookPoint, name: str) -> None:
        """Raise InterventionError unless the point has one activation vector, its last axis, per position.

        Arguments:
            point: hook point of the intervention.
            name: field that needs vectors, for the message.
        """
        if "position" not in point.dims[:-1]:
            raise InterventionError(
                f"{type(self).__name__} at '{point}': expected a hook point with a vector at each position "
                f"for {name}=, found axes {list(point.dims)}; leave {name} out, or choose a point such as "
                "'blocks.0.hook_resid_post'"
            )

    def region(self, point: HookPoint, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the activation slice selected by positions, heads, neurons or experts."""
        shape = {axis: sizes[axis] for axis in point.dims}
        shape |= {axis: len(indices) for axis, _, indices in self._selected(point, self.positions)}
        return tuple(shape.values())

    def _selected(
        self, point: HookPoint, positions: tuple[int, ...] | None
    ) -> list[tuple[str, str, tuple[int, ...]]]:
        """(axis of the hook point, field name, indices) of every selection, in the order of the axes."""
        fields = {name: getattr(self, name) for name in _CHOICES} | {"positions": positions}
        selections = [
            (axis_of(point, _CHOICES[name], name), name, indices)
            for name, indices in fields.items()
            if indices is not None
        ]
        # In the order of the axes, as `np.ix_` gives one array per axis in that order.
        return sorted(selections, key=lambda selection: point.dims.index(selection[0]))

    def _index(self, point: HookPoint, positions: tuple[int, ...] | None) -> tuple[Any, ...]:
        """Tensor index of the selected part."""
        index: list[Any] = [slice(None)] * len(point.dims)
        selections = self._selected(point, positions)
        # `np.ix_` makes index arrays broadcast as an outer product. Selected axes are neighbours in every
        # hook point; with a slice between them, indexing would move their axes to the front.
        outer = np.ix_(*(indices for *_, indices in selections))
        for (axis, *_), indices in zip(selections, outer, strict=True):
            index[point.dims.index(axis)] = indices
        return tuple(index)

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Selected positions counted from 0; None for all."""
        return None if self.positions is None else tuple(position % length for position in self.positions)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed activation, as a new tensor; x itself where x has none of the selected positions."""
        positions, payload_positions = self.positions, None
        if subset is not None:
            # Counted from the end, because a payload may lack leading axes, as in broadcasting.
            axis = len(point.dims) - point.dims.index(axis_of(point, _POSITION_AXES, "positions"))
            if self.positions is None:
                payload_positions = (axis, subset.positions.tolist())
            else:
                indices, entries = subset.locate(self.positions)
                if not indices:
                    return x
                positions, payload_positions = tuple(indices), (axis, entries)
        if not self._selected(point, positions):
            return self._changed(x, payload_positions)
        index = self._index(point, positions)
        # The caller's tensor may already be captured, so it is never written to.
        changed = x.clone()
        changed[index] = self._changed(x[index], payload_positions)
        return changed

    def _changed(self, part: Tensor, positions: PayloadPositions) -> Tensor:
        """`change`, restricted to the subspace `within` and to where the probe `where` fires."""
        if self.within is None and self.where is None:
            return self.change(part, positions)
        import torch

        # bfloat16 has 8 bits: a projection computed in it would leave part of the direction behind.
        wide = part.float() if part.dtype.itemsize < 4 else part
        changed = self.change(wide, positions)
        if self.within is not None:
            changed = wide + self.within.component(changed - wide)
        if self.where is not None:
            changed = torch.where(self.where.holds(wide), changed, wide)
        return changed.to(part.dtype)

    @abstractmethod
    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """The new value of the selected part.

        Arguments:
            part: selected part of the activation.
            positions: (position axis of the payload, counted from its end; indices on it that belong to the
                part); None for all.
        """


@dataclass(frozen=True, eq=False)
class _WithPayload(Selective):
    """A selective intervention with a tensor that broadcasts to the selected part."""

    value: Payload = PayloadField()
    """Tensor that broadcasts to the selected part of the activation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "value", checked_payload(type(self).__name__, private_payload(self, "value"))
        )

    @property
    def payload(self) -> Payload:
        """The tensor itself, to be read only; the field `value` returns a copy of it."""
        return private_payload(self, "value")

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        region, shape = self.region(point, sizes), tuple(self.payload.shape)
        try:
            # A payload larger than the part would broadcast the part instead, and change the shape of the
            # activation.
            fits = np.broadcast_shapes(shape, region) == region
        except ValueError:
            fits = False
        if not fits:
            axes = ", ".join(f"{axis}={size}" for axis, size in zip(point.dims, region, strict=True))
            raise InterventionError(
                f"{type(self).__name__} at '{point}': expected a tensor that broadcasts to [{axes}], found "
                f"shape {list(shape)}; reshape it, or select positions= or heads="
            )


@dataclass(frozen=True, eq=False)
class Replace(_WithPayload):
    """Replace the activation by `value`; replacing it by its captured value changes nothing."""

    is_positionwise: ClassVar[bool] = True

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """A copy of `value`, broadcast to the shape of the selected part."""
        # A copy: the result may be captured, and writing to a capture must not write to the payload.
        return as_tensor(select_positions(self.payload, positions), part).expand_as(part).clone()


@dataclass(frozen=True, eq=False)
class Add(_WithPayload):
    """Add `value`, broadcast: a [hidden] vector is added at every position, or at `positions`."""

    is_positionwise: ClassVar[bool] = True
    relative_to: Literal["norm"] | None = field(default=None, kw_only=True)
    """Unit of `value`: "norm" for the norm (over the last axis) of the state that it is added to, so that 0.1
    times a vector of norm 1 adds a tenth of the state's length; None for that of the activation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative_to not in (None, "norm"):
            raise InterventionError(
                f"Add: expected relative_to to be 'norm' or None, found {self.relative_to!r}; leave it out "
                "to add the tensor as it is"
            )

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        if self.relative_to is not None:
            self._require_vectors(point, "relative_to")

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """The selected part plus `value`, broadcast."""
        value = select_positions(self.payload, positions)
        if self.relative_to is None:
            return part + as_tensor(value, part)
        # In float32: the squares of a norm overflow float16.
        wide = part.float() if part.dtype.itemsize < 4 else part
        norm: Tensor = wide.norm(dim=-1, keepdim=True)
        return part + (norm * as_tensor(value, wide)).to(part.dtype)


@dataclass(frozen=True, eq=False)
class Scale(Selective):
    """Multiply by `factor`; attention patterns are not renormalised (use `Steer` for that)."""

    is_positionwise: ClassVar[bool] = True
    factor: float
    """Factor of the selected part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", finite("Scale", self.factor))

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """The selected part times the factor."""
        return part * self.factor


@dataclass(frozen=True, eq=False)
class Zero(Selective):
    """Set the activation to zero."""

    is_positionwise: ClassVar[bool] = True

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """A zero tensor with shape, dtype and device of the selected slice."""
        return part.new_zeros(part.shape)


@dataclass(frozen=True, eq=False)
class Clamp(Selective):
    """Limit every number of the activation, or every coefficient in the basis of `within`, to a range.

    Equal limits set a coefficient: `Clamp(3.0, 3.0, within=direction)`.
    """

    is_positionwise: ClassVar[bool] = True
    low: float | None = None
    """Smallest value; None for no lower limit."""
    high: float | None = None
    """Largest value; None for no upper limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high"):
            if (limit := getattr(self, name)) is not None:
                object.__setattr__(self, name, finite(f"Clamp: {name}", limit))
        if self.low is None and self.high is None:
            raise InterventionError("Clamp: expected a limit low or high, found neither; give at least one")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InterventionError(
                f"Clamp: expected low at most high, found low={self.low:g} and high={self.high:g}; "
                "exchange them"
            )

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """The selected part with every number, or every coefficient, within the limits."""
        if self.within is None:
            return part.clamp(self.low, self.high)
        coefficients: Tensor = self.within.coefficients(part)
        difference: Tensor = self.within.combined(coefficients.clamp(self.low, self.high) - coefficients)
        return part + difference


@dataclass(frozen=True, eq=False)
class AddAtPositions(Intervention):
    """Add scale * vector at each (position, vector) pair; several vectors at one position are summed."""

    is_positionwise: ClassVar[bool] = True
    vectors: Sequence[tuple[int, Payload]] = PayloadField()  # type: ignore[assignment]  # a descriptor
    """(position, [hidden] vector) pairs, or a mapping of positions to vectors. They are summed in float32 and
    cast to the dtype of the activation once, before the addition."""
    scale: float = 1.0
    """Factor of all vectors."""

    def __post_init__(self) -> None:
        vectors = private_payload(self, "vectors")
        pairs = vectors.items() if isinstance(vectors, Mapping) else vectors
        try:
            entries = [(position, vector) for position, vector in pairs]
        except (TypeError, ValueError) as error:
            raise InterventionError(
                f"AddAtPositions: expected a list of (position, vector) pairs, found {shown(vectors)}; write "
                "AddAtPositions([(-1, vector)])"
            ) from error
        checked = tuple(
            (
                as_index(position, "AddAtPositions: positions", InterventionError),
                checked_payload("AddAtPositions", vector),
            )
            for position, vector in entries
        )
        if not checked:
            raise InterventionError(
                "AddAtPositions: expected at least one (position, vector) pair, found none; write "
                "AddAtPositions([(-1, vector)])"
            )
        object.__setattr__(self, "vectors", checked)
        object.__setattr__(self, "scale", finite("AddAtPositions", self.scale))

    @property
    def pairs(self) -> tuple[tuple[int, Payload], ...]:
        """(position, vector) pairs with the tensors themselves, to be read only; `vectors` returns copies."""
        pairs: tuple[tuple[int, Payload], ...] = private_payload(self, "vectors")
        return pairs

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes.

        Arguments:
            point: hook point at which it is to be applied.
            sizes: axis name -> length.
        """
        if "position" not in point.dims or point.dims[-1] != "hidden":
            raise InterventionError(
                "AddAtPositions: expected a hook point with axes [batch, position, hidden], found "
                f"'{point}' with axes {list(point.dims)}; add there with Add"
            )
        check_indices(
            f"AddAtPositions at '{point}'", "positions", [p for p, _ in self.pairs], sizes["position"]
        )
        for position, vector in self.pairs:
            if tuple(vector.shape) != (sizes["hidden"],):
                raise InterventionError(
                    f"AddAtPositions at '{point}': expected a vector of length {sizes['hidden']} (hidden "
                    f"size of the model) for position {position}, found shape {list(vector.shape)}"
                )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Positions that have a vector, counted from 0.

        Arguments:
            length: tokens of the prompt.
            ahead: unused here.
        """
        return tuple(position % length for position, _ in self.pairs)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed activation, as a new tensor.

        Arguments:
            x: activation [batch, position, hidden].
            point: hook point at which it is.
            allowed: unused.
            subset: positions that x has; None for all.
        """
        import torch

        indices = [position for position, _ in self.pairs]
        vectors = [vector for _, vector in self.pairs]
        if subset is not None:
            indices, entries = subset.locate(indices)
            vectors = [vectors[i] for i in entries]
        # Summed in float32, so that the order of several vectors at one position does not change the result
        # much.
        delta = torch.zeros(x.shape[-2], x.shape[-1], dtype=torch.float32, device=x.device)
        for index, vector in zip(indices, vectors, strict=True):
            delta[index] += self.scale * as_tensor(vector, delta)
        return x + delta.to(x.dtype)


def payload_rows(point: HookPoint, change: Intervention) -> int:
    """Rows of an intervention's tensor along the batch axis; 1 where tensor or hook point has no such axis.

    Arguments:
        point: hook point of the intervention.
        change: the intervention.
    """
    if not isinstance(change, _WithPayload) or point.dims[0] != "batch":
        return 1
    shape = tuple(change.payload.shape)
    # With fewer axes than the hook point, a payload's first axis is not the batch.
    return int(shape[0]) if len(shape) == len(point.dims) else 1


def check_indices(where: str, name: str, indices: Sequence[int], size: int | None) -> None:
    """Check indices against the length of an axis.

    Arguments:
        where: intervention and hook point, for the message.
        name: what is indexed, e.g. "positions".
        indices: indices, negative from the end.
        size: length of the axis; None checks nothing.

    Raises:
        InterventionError: for the first index out of range.
    """
    if size is None:
        return
    outside = [index for index in indices if not -size <= index < size]
    if outside:
        raise InterventionError(
            f"{where}: expected {name} in 0..{size - 1} (or negative, from the end), found {outside[0]}"
        )


def axis_of(point: HookPoint, axes: tuple[str, ...], name: str) -> str:
    """First axis of `axes` that a hook point has.

    Arguments:
        point: the hook point.
        axes: names of axes, in order of preference.
        name: what is selected on the axis, e.g. "heads", for the message.

    Raises:
        InterventionError: if it has none of them.
    """
    for axis in axes:
        if axis in point.dims:
            return axis
    raise InterventionError(
        f"expected a hook point with {name} to select, found '{point}' with axes {list(point.dims)}; "
        f"leave {name} out, or choose another point"
    )
