"""Interventions: frozen values that say how an activation is changed at a hook point.

Know tensors and the axes of the hook point they are applied at; know nothing of models or stores. An
intervention is data, not a callback, so that it can be checked before a forward pass starts and digested
into the key of what it produces. Importing this module does not import torch; payloads may be torch
tensors, numpy arrays or lists of floats.

Payloads must be real floating point and finite; they are cast to the dtype of the activation they meet.
``positions`` and ``heads`` narrow an intervention to part of the tensor; negative positions count from the
end. Attention edges are (query, key) pairs, the query attending to the key; None on one side means every
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...store.digest import array_digest, canonical_json
from ...store.errors import InterventionError
from .points import HookPoint

if TYPE_CHECKING:
    from torch import Tensor

Payload = Any
"""A torch tensor, a numpy array, or nested sequences of floats."""
Edge = tuple[int | None, int | None]
Chosen = tuple[int, list[int]] | None
"""Position axis of a payload, counted from the end, and entries of it; None for all."""
_POSITION_AXES = ("position", "query_position")
_HEAD_AXES = ("head", "kv_head")
_SCORES = ("scores", "attn_scores")


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

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify the intervention; payloads enter by dtype, shape and sha256 of
        their bytes."""
        fields = {name: _plain(value) for name, value in vars(self).items() if value is not None}
        return {"intervention": type(self).__name__, **fields}

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless this can be applied at `point`, whose axes have these sizes."""
        if self.kinds is not None and point.kind not in self.kinds:
            places = " or ".join(f"'{HookPoint(kind, point.layer or 0)}'" for kind in self.kinds)
            raise InterventionError(
                f"{type(self).__name__} belongs at {places}, found it at '{point}'; use Replace, Scale or "
                "Zero there"
            )

    def touched(self, length: int) -> tuple[int, ...] | None:
        """Positions (on attention: queries) of a prompt of `length` that may change; None for all of them."""
        return None

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor. allowed: bool [query, key], where attention may look
        (patterns only). held: which positions x holds; None for all."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervention) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(canonical_json(self.canonical()))


@dataclass(frozen=True, eq=False)
class _Selective(Intervention):
    """An intervention on all of an activation, or on some positions and heads of it."""

    positions: tuple[int, ...] | None = field(default=None, kw_only=True)
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("positions", "heads"):
            chosen = getattr(self, name)
            if chosen is not None:
                chosen = (chosen,) if isinstance(chosen, int) else tuple(int(index) for index in chosen)
                if not chosen:
                    raise InterventionError(
                        f"{type(self).__name__}: expected at least one of {name}, found none; leave {name} "
                        "out to mean all"
                    )
                object.__setattr__(self, name, chosen)

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        for name, chosen, axes in (
            ("positions", self.positions, _POSITION_AXES),
            ("heads", self.heads, _HEAD_AXES),
        ):
            if chosen is not None:
                _check_indices(
                    f"{type(self).__name__} at '{point}'", name, chosen, sizes.get(_axis(point, axes, name))
                )

    def region(self, point: HookPoint, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the part of the activation that is touched."""
        shape = {axis: sizes[axis] for axis in point.dims}
        if self.positions is not None:
            shape[_axis(point, _POSITION_AXES, "positions")] = len(self.positions)
        if self.heads is not None:
            shape[_axis(point, _HEAD_AXES, "heads")] = len(self.heads)
        return tuple(shape.values())

    def _where(self, point: HookPoint, positions: tuple[int, ...] | None) -> tuple[Any, ...]:
        """Index of the touched part: heads and positions are neighbouring axes, so their indices broadcast
        as an outer product."""
        index: list[Any] = [slice(None)] * len(point.dims)
        both = positions is not None and self.heads is not None
        if positions is not None:
            index[point.dims.index(_axis(point, _POSITION_AXES, "positions"))] = np.asarray(positions)
        if self.heads is not None:
            heads = np.asarray(self.heads)
            index[point.dims.index(_axis(point, _HEAD_AXES, "heads"))] = heads[:, None] if both else heads
        return tuple(index)

    def touched(self, length: int) -> tuple[int, ...] | None:
        """The positions chosen."""
        return None if self.positions is None else tuple(position % length for position in self.positions)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        positions, chosen = self.positions, None
        if held is not None:
            axis = len(point.dims) - point.dims.index(_axis(point, _POSITION_AXES, "positions"))
            if self.positions is None:
                chosen = (axis, held.positions.tolist())
            else:
                places, among = held.places(self.positions)
                if not places:
                    return x
                positions, chosen = tuple(places), (axis, among)
        if positions is None and self.heads is None:
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

    value: Payload

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "value", _payload(type(self).__name__, self.value))

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        region, found = self.region(point, sizes), tuple(self.value.shape)
        try:
            fits = np.broadcast_shapes(found, region) == region
        except ValueError:
            fits = False
        if not fits:
            named = ", ".join(f"{axis}={size}" for axis, size in zip(point.dims, region, strict=True))
            raise InterventionError(
                f"{type(self).__name__} at '{point}': expected a tensor that broadcasts to [{named}], found "
                f"shape {list(found)}; "
                f"reshape it, or choose positions/heads"
            )


@dataclass(frozen=True, eq=False)
class Replace(_WithPayload):
    """The activation becomes `value` (Replace(captured) changes nothing)."""

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return _tensor(_picked(self.value, chosen), part).expand_as(part)


@dataclass(frozen=True, eq=False)
class Add(_WithPayload):
    """x + value, broadcast: a [hidden] vector is added at every position (or at `positions`)."""

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part + _tensor(_picked(self.value, chosen), part)


@dataclass(frozen=True, eq=False)
class Scale(_Selective):
    """x * factor, without renormalisation even on attention patterns (use Steer for that)."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", _finite("Scale", self.factor))

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part * self.factor


@dataclass(frozen=True, eq=False)
class Zero(_Selective):
    """The activation becomes zero."""

    def change(self, part: Tensor, chosen: Chosen = None) -> Tensor:
        """The new value of the touched part."""
        return part.new_zeros(()).expand_as(part)


@dataclass(frozen=True, eq=False)
class AddAtPositions(Intervention):
    """x + scale * vector at each (position, vector); several vectors at one position add up.

    vectors: pairs (position, [hidden] vector). Accumulated in float32, cast once, added once.
    """

    vectors: Sequence[tuple[int, Payload]]
    scale: float = 1.0

    def __post_init__(self) -> None:
        pairs = self.vectors.items() if isinstance(self.vectors, Mapping) else self.vectors
        kept = tuple((int(position), _payload("AddAtPositions", vector)) for position, vector in pairs)
        if not kept:
            raise InterventionError(
                "AddAtPositions: expected at least one (position, vector) pair, found none"
            )
        object.__setattr__(self, "vectors", kept)
        object.__setattr__(self, "scale", _finite("AddAtPositions", self.scale))

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        if "position" not in point.dims or point.dims[-1] != "hidden":
            raise InterventionError(
                "AddAtPositions adds vectors to a [batch, position, hidden] activation, found it at "
                f"'{point}' with axes {list(point.dims)}"
            )
        _check_indices(
            f"AddAtPositions at '{point}'", "positions", [p for p, _ in self.vectors], sizes["position"]
        )
        for position, vector in self.vectors:
            if tuple(vector.shape) != (sizes["hidden"],):
                raise InterventionError(
                    f"AddAtPositions at '{point}': expected a vector of length {sizes['hidden']} for "
                    f"position {position}, found shape {list(vector.shape)}"
                )

    def touched(self, length: int) -> tuple[int, ...] | None:
        """The positions that have a vector."""
        return tuple(position % length for position, _ in self.vectors)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        import torch

        places = [position for position, _ in self.vectors]
        vectors = [vector for _, vector in self.vectors]
        if held is not None:
            places, among = held.places(places)
            vectors = [vectors[i] for i in among]
        delta = torch.zeros(x.shape[-2], x.shape[-1], dtype=torch.float32, device=x.device)
        for place, vector in zip(places, vectors, strict=True):
            delta[place] += self.scale * _tensor(vector, delta)
        return x + delta.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Knockout(Intervention):
    """Cut attention edges: their scores become -inf together with the causal mask, after any soft cap.

    edges: (query, key) pairs, None on one side for every position. Or mask: [query, key] or [head, query,
    key], True (or -inf) where cut. heads: default all. A row left with nothing to attend to raises
    InterventionError instead of giving NaN.
    """

    kinds: ClassVar[tuple[str, ...]] = _SCORES
    edges: Sequence[Edge] = ()
    mask: Payload | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", _edges("Knockout", self.edges))
        object.__setattr__(self, "heads", _heads(self.heads))
        if bool(self.edges) == (self.mask is not None):
            raise InterventionError(
                "Knockout takes either edges or a mask, found " + ("both" if self.edges else "neither")
            )
        if self.mask is not None:
            object.__setattr__(self, "mask", _cut_mask(self.mask))

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        _check_edges("Knockout", point, self.edges, self.heads, sizes)
        if self.mask is not None:
            full = (sizes["head"], sizes["query_position"], sizes["key_position"])
            if tuple(self.mask.shape) not in (full, full[1:], (1, *full), (1, 1, *full[1:])):
                raise InterventionError(
                    f"Knockout at '{point}': expected a mask of shape {list(full[1:])} or {list(full)}, "
                    f"found {list(self.mask.shape)}"
                )

    def touched(self, length: int) -> tuple[int, ...] | None:
        """Queries with a cut edge."""
        if self.mask is None:
            return _queries(self.edges, length)
        cut = np.asarray(self.mask).reshape(-1, length, length).any(axis=(0, 2))
        return tuple(np.flatnonzero(cut).tolist())

    def cut(self, heads: int, queries: int, keys: int, device: Any) -> Tensor:
        """Bool [head, query, key], True where an edge is cut."""
        import torch

        if self.mask is not None:
            where = torch.as_tensor(self.mask, device=device).reshape(-1, queries, keys)
        else:
            where = _edge_mask(self.edges, queries, keys, device)[None]
        if self.heads is None:
            return where.expand(heads, queries, keys)
        chosen = torch.zeros(heads, queries, keys, dtype=torch.bool, device=device)
        chosen[list(self.heads)] = where if where.shape[0] == 1 else where[list(self.heads)]
        return chosen


@dataclass(frozen=True, eq=False)
class Steer(Intervention):
    """Multiply the attention weight of edges by `factor`, then renormalise the touched rows.

    For one edge of weight a: a' = factor * a / (1 + (factor - 1) * a). An edge named twice counts once.
    Weights stay causal.
    """

    kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    edges: Sequence[Edge]
    factor: float
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _prepare_steering(self)
        object.__setattr__(self, "factor", _finite("Steer", self.factor))
        if self.factor < 0:
            raise InterventionError(f"Steer: expected a factor >= 0, found {self.factor}")

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        _check_edges("Steer", point, self.edges, self.heads, sizes)

    def touched(self, length: int) -> tuple[int, ...] | None:
        """Queries with a steered edge."""
        return _queries(self.edges, length)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        import torch

        def scaled(weights: Tensor, targets: Tensor) -> Tensor:
            return torch.where(targets, weights * self.factor, weights)

        return _steered(x, self.edges, self.heads, allowed, held, scaled)


@dataclass(frozen=True, eq=False)
class SetValue(Intervention):
    """Set the attention weight of each edge to `value`; the rest of the row shares what is left, in
    proportion.

    Only keys the query may see take part, so that nothing leaks to the future. A row whose visible keys are
    all targets is renormalised. Raises InterventionError when value * targets exceeds 1 in a row that has
    other keys to give weight to.
    """

    kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    edges: Sequence[Edge]
    value: float
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _prepare_steering(self)
        object.__setattr__(self, "value", _finite("SetValue", self.value))
        if not 0 <= self.value <= 1:
            raise InterventionError(f"SetValue: expected a weight in [0, 1], found {self.value}")

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        _check_edges("SetValue", point, self.edges, self.heads, sizes)

    def touched(self, length: int) -> tuple[int, ...] | None:
        """Queries with a changed edge."""
        return _queries(self.edges, length)

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, held: Held | None = None
    ) -> Tensor:
        """The changed activation, a new tensor."""
        import torch

        def with_value(weights: Tensor, targets: Tensor) -> Tensor:
            visible = torch.ones_like(targets) if allowed is None else allowed
            others = visible & ~targets
            asked = self.value * targets.sum(-1, keepdim=True)
            if bool(((asked > 1 + 1e-6) & others.any(-1, keepdim=True)).any()):
                raise InterventionError(
                    f"SetValue at '{point}': {self.value} on {int(targets.sum(-1).max())} targets of one "
                    "row exceeds a total weight of 1; lower the value"
                )
            rest = weights.masked_fill(~others, 0)
            total = rest.sum(-1, keepdim=True)
            # A row that gave nothing to its other keys shares the remainder equally among them.
            share = torch.where(
                total > 0, rest / total.clamp_min(1e-30), others / others.sum(-1, keepdim=True).clamp_min(1)
            )
            return torch.where(targets, weights.new_full((), self.value), share * (1 - asked))

        return _steered(x, self.edges, self.heads, allowed, held, with_value)


def _steered(
    x: Tensor,
    edges: Sequence[Edge],
    heads: tuple[int, ...] | None,
    allowed: Tensor | None,
    held: Held | None,
    change: Any,
) -> Tensor:
    """A pattern [batch, head, query, key] with the touched rows changed in float32 and renormalised to 1."""
    import torch

    keys = x.shape[-1]
    targets = _edge_mask(edges, keys, keys, x.device)
    if held is not None:
        targets = targets[torch.as_tensor(held.positions, device=x.device)]
    if allowed is not None:
        targets = targets & allowed
    touched = targets.any(-1, keepdim=True)
    if heads is not None:
        chosen = torch.zeros(x.shape[1], 1, 1, dtype=torch.bool, device=x.device)
        chosen[list(heads)] = True
        touched = touched & chosen
    weights = change(x.float(), targets)
    total = weights.sum(-1, keepdim=True)
    return torch.where(touched & (total > 1e-10), weights / total.clamp_min(1e-10), x.float()).to(x.dtype)


def _queries(edges: Sequence[Edge], length: int) -> tuple[int, ...]:
    """Queries that own one of the edges; an edge from all of them starts at its key: attention is causal."""
    found: set[int] = set()
    for query, key in edges:
        first = 0 if key is None else key % length
        found.update(range(first, length) if query is None else [query % length])
    return tuple(sorted(found))


def _edge_mask(edges: Sequence[Edge], queries: int, keys: int, device: Any) -> Tensor:
    import torch

    where = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    for query, key in edges:
        where[slice(None) if query is None else query, slice(None) if key is None else key] = True
    return where


def _prepare_steering(intervention: Steer | SetValue) -> None:
    name = type(intervention).__name__
    object.__setattr__(intervention, "edges", _edges(name, intervention.edges))
    object.__setattr__(intervention, "heads", _heads(intervention.heads))
    if not intervention.edges:
        raise InterventionError(f"{name}: expected at least one (query, key) edge, found none")


def _edges(name: str, edges: Sequence[Edge]) -> tuple[Edge, ...]:
    kept = []
    for edge in edges:
        if len(edge) != 2 or (edge[0] is None and edge[1] is None):
            raise InterventionError(f"{name}: expected (query, key) with at most one None, found {edge!r}")
        kept.append((edge[0], edge[1]))
    return tuple(kept)


def _heads(heads: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if heads is None:
        return None
    return (heads,) if isinstance(heads, int) else tuple(int(head) for head in heads)


def _check_edges(
    name: str,
    point: HookPoint,
    edges: Sequence[Edge],
    heads: tuple[int, ...] | None,
    sizes: Mapping[str, int],
) -> None:
    where = f"{name} at '{point}'"
    if heads is not None:
        _check_indices(where, "heads", heads, sizes["head"])
    for query, key in edges:
        _check_indices(
            where, "query positions", [query] if query is not None else [], sizes["query_position"]
        )
        _check_indices(where, "key positions", [key] if key is not None else [], sizes["key_position"])
        if (
            query is not None
            and key is not None
            and query % sizes["query_position"] < key % sizes["key_position"]
        ):
            raise InterventionError(
                f"{where}: expected a query at or after its key, found edge ({query}, {key}); a causal "
                "model has no weight there"
            )


def _check_indices(where: str, name: str, chosen: Sequence[int], size: int | None) -> None:
    if size is None:
        return
    outside = [index for index in chosen if not -size <= index < size]
    if outside:
        raise InterventionError(
            f"{where}: expected {name} in 0..{size - 1} (or negative, from the end), found {outside[0]}"
        )


def _axis(point: HookPoint, axes: tuple[str, ...], name: str) -> str:
    for axis in axes:
        if axis in point.dims:
            return axis
    raise InterventionError(f"'{point}' has axes {list(point.dims)}: it has no {name} to choose")


def _payload(name: str, value: Payload) -> Payload:
    """A torch tensor as it is, anything else as a numpy array; InterventionError unless floating point and
    finite."""
    if not hasattr(value, "detach"):
        value = np.asarray(value)
        if value.dtype == np.float64:
            value = value.astype(np.float32)
    floating = value.is_floating_point() if hasattr(value, "is_floating_point") else value.dtype.kind in "fV"
    if not floating:
        raise InterventionError(
            f"{name}: expected a floating-point tensor, found dtype "
            f"{str(value.dtype).removeprefix('torch.')}; convert it to float32"
        )
    finite = (
        value.isfinite().all() if hasattr(value, "isfinite") else np.isfinite(value.astype(np.float32)).all()
    )
    if not bool(finite):
        raise InterventionError(
            f"{name}: expected finite numbers, found NaN or infinity in a tensor of shape {list(value.shape)}"
        )
    return value


def _cut_mask(mask: Payload) -> Payload:
    """A bool array from True/False or 0/-inf."""
    array = np.asarray(mask.detach().cpu().float() if hasattr(mask, "detach") else mask)
    if array.dtype == bool:
        return array
    if not np.isin(array, (0.0, -np.inf)).all() and not (
        hasattr(mask, "detach") and str(mask.dtype) == "torch.bool"
    ):
        raise InterventionError(
            "Knockout: expected a mask of True/False or of 0 and -inf, found other values"
        )
    return (array == -np.inf) if np.isneginf(array).any() else array.astype(bool)


def _picked(value: Payload, chosen: Chosen) -> Payload:
    """The entries of a payload that belong to some positions; the axis is counted from the end."""
    if chosen is None or value.ndim < chosen[0] or value.shape[-chosen[0]] == 1:
        return value
    return value[(..., chosen[1], *[slice(None)] * (chosen[0] - 1))]


def _tensor(value: Payload, like: Tensor) -> Tensor:
    import torch

    if isinstance(value, np.ndarray) and value.dtype.kind == "V":
        value = value.astype(np.float32)
    return torch.as_tensor(value).detach().to(device=like.device, dtype=like.dtype)


def _finite(name: str, value: float) -> float:
    if not np.isfinite(value):
        raise InterventionError(f"{name}: expected a finite number, found {value}")
    return float(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "shape"):
        return _payload_identity(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _payload_identity(value: Payload) -> dict[str, Any]:
    """dtype, shape and digest of a payload; a tensor and an array of equal content are the same payload."""
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        bits = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    else:
        dtype = str(value.dtype)
        bits = value.view(np.int16) if dtype == "bfloat16" else value
    return {
        "dtype": dtype,
        "shape": [int(size) for size in value.shape],
        "sha256": array_digest(np.ascontiguousarray(bits)),
    }
