"""Interventions on a growing sequence, whose later positions do not exist yet.

Positions and edges are those of the grown sequence. A position counted from the start is changed from the
step on at which it exists; one counted from the end (-1) is counted from the current end at each step. A
payload or mask with a row per position needs a row for every position the sequence can reach; while it grows,
the first rows are used.

Keys and values of a position can be cached if nothing done to it, or to positions it sees, depends on how
many positions follow. That holds for positions and edges counted from the start, and for all positions, as
long as no weight is given to later ones (`why_uncached`). Works on bound specs and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..architectures.points import HookPoint
from ..hooks.edge_interventions import Edge, Knockout, SetValue, Steer, may_look_ahead
from ..hooks.interventions import AddAtPositions, Intervention, Selective
from ..hooks.spec import BoundSpec

REPEATED_LAYERS = "layers are repeated, and each repetition would need keys and values of its own"
_POSITION_AXES = ("position", "query_position", "key_position")


def spec_so_far(spec: BoundSpec, length: int) -> BoundSpec:
    """The spec as it applies to the first `length` positions of a sequence.

    Arguments:
        spec: bound spec for the final length.
        length: positions of the sequence so far.
    """
    changes = [(point, so_far(point, change, length)) for point, change in spec.interventions]
    existing = tuple((point, change) for point, change in changes if change is not None)
    return replace(spec, interventions=existing)


def why_uncached(spec: BoundSpec) -> str | None:
    """Why cached keys and values would differ from those of the longer sequence.

    Arguments:
        spec: bound spec of the generation.

    Returns:
        A clause that names the first intervention that prevents caching; None if nothing does.
    """
    if spec.order is not None:
        return REPEATED_LAYERS
    for point, change in spec.interventions:
        reason = _why_uncached(point, change)
        if reason is not None:
            return f"{type(change).__name__} at '{point}' {reason}"
    return None


def _why_uncached(point: HookPoint, change: Any) -> str | None:
    if change.needs_all_positions:
        return "looks at all positions"
    if isinstance(change, AddAtPositions):
        positions = [position for position, _ in change.pairs]
    elif isinstance(change, Knockout | Steer | SetValue):
        positions = [position for edge in change.edges for position in edge if position is not None]
    elif isinstance(change, Selective):
        positions = list(change.positions or ())
        if may_look_ahead(point, change):
            return "may give weight to later positions"
    else:
        # A user's class may count positions from the end, which does not show here.
        return "is of a kind that is not known here"
    return "counts positions from the end" if any(position < 0 for position in positions) else None


def so_far(point: HookPoint, change: Intervention, length: int) -> Intervention | None:
    """Restrict an intervention to the first `length` positions; None if no position is left.

    Arguments:
        point: hook point of the intervention.
        change: the intervention.
        length: positions of the sequence so far.
    """
    if isinstance(change, AddAtPositions):
        pairs = tuple(pair for pair in change.pairs if pair[0] < length)
        return _shortened(change, len(pairs) < len(change.pairs), bool(pairs), vectors=pairs)
    if isinstance(change, Knockout) and change.edge_mask is not None:
        # A mask covers the longest sequence; its upper left corner is that of the shorter one.
        mask = change.edge_mask[..., :length, :length]
        return _shortened(change, mask.shape != change.edge_mask.shape, True, mask=mask)
    if isinstance(change, Knockout | Steer | SetValue):
        edges = tuple(edge for edge in change.edges if _exists(edge, length))
        return _shortened(change, len(edges) < len(change.edges), bool(edges), edges=edges)
    if isinstance(change, Selective):
        return _at_existing_positions(point, change, length)
    return change


def _at_existing_positions(point: HookPoint, change: Any, length: int) -> Intervention | None:
    """Restrict an intervention, and the rows of its tensor, to the positions that exist already.

    Returns:
        The restricted intervention; None if none of its positions exists.
    """
    positions: tuple[int, ...] | None = change.positions
    existing = None if positions is None else [i for i, position in enumerate(positions) if position < length]
    if existing == []:
        return None
    fields: dict[str, Any] = {}
    if existing is not None and positions is not None and len(existing) < len(positions):
        fields["positions"] = tuple(positions[i] for i in existing)
    tensor = getattr(change, "payload", None)
    if tensor is not None:
        existing_rows = _existing_rows(tensor, point, existing, length)
        if tuple(existing_rows.shape) != tuple(tensor.shape):
            fields["value"] = existing_rows
    return _shortened(change, bool(fields), True, **fields)


def _existing_rows(value: Any, point: HookPoint, entries: Sequence[int] | None, length: int) -> Any:
    """Cut the position axes of an intervention's tensor to existing positions.

    Arguments:
        value: the tensor; its axes count from the end, as in broadcasting.
        point: hook point of the intervention.
        entries: rows of the existing positions if the intervention selects positions; None if it does not.
        length: positions of the sequence so far.
    """
    selected = entries
    for axis in (name for name in point.dims if name in _POSITION_AXES):
        # Counted from the end, because a payload may lack leading axes, as in broadcasting.
        back = len(point.dims) - point.dims.index(axis)
        if value.ndim >= back and value.shape[-back] > 1:
            rows = np.arange(min(length, value.shape[-back])) if selected is None else np.asarray(selected)
            value = value[(..., rows, *[slice(None)] * (back - 1))]
        selected = None  # positions select queries, never keys
    return value


def _exists(edge: Edge, length: int) -> bool:
    return all(position is None or position < length for position in edge)


def _shortened(change: Any, is_cut: bool, is_left: bool, **fields: Any) -> Intervention | None:
    """A copy of an intervention with shortened fields.

    Arguments:
        change: the intervention.
        is_cut: whether the fields are shorter than those of `change`; else it is returned itself.
        is_left: whether any position or edge is left; else the result is None.
        fields: name -> shortened value.
    """
    if not is_left:
        return None
    shortened: Intervention = replace(change, **fields) if is_cut else change
    return shortened
