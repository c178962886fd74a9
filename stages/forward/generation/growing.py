"""Interventions on a sequence that grows: what a spec means while positions it names are still to come.

Border: bound specs and lengths; knows no model and no tokens.

Positions and edges are those of the grown sequence. A position counted from the start is that position from
the step on at which it exists, and nothing before; one counted from the end (-1) is counted from what the end
is at each step. A payload, or a mask, with a row for every position needs one for every position the sequence
can reach; the first rows of it are used while it grows.

Keys and values of a position can be kept if nothing that is done to it, or to positions it sees, depends on
how many follow. That is so for positions and edges counted from the start, or all of them, wherever no weight
is given to later positions (`why_read_anew`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..architectures.points import HookPoint
from ..hooks.edge_interventions import Edge, Knockout, SetValue, Steer, may_look_ahead
from ..hooks.interventions import Add, AddAtPositions, Intervention, Replace, Scale, Zero
from ..hooks.spec import BoundSpec

GONE_THROUGH_AGAIN = "layers are gone through again, and one would need keys and values of each time"
_POSITION_AXES = ("position", "query_position", "key_position")


def spec_so_far(spec: BoundSpec, length: int) -> BoundSpec:
    """The spec as it applies to the first `length` positions of a sequence."""
    changes = [(point, so_far(point, change, length)) for point, change in spec.interventions]
    kept = tuple((point, change) for point, change in changes if change is not None)
    return replace(spec, interventions=kept)


def why_read_anew(spec: BoundSpec) -> str | None:
    """Why keys and values that are kept would not be those of the longer sequence: the first intervention
    that is in the way, in words. None where nothing is."""
    if spec.order is not None:
        return GONE_THROUGH_AGAIN
    for point, change in spec.interventions:
        why = _in_the_way(point, change)
        if why is not None:
            return f"{type(change).__name__} at '{point}' {why}"
    return None


def _in_the_way(point: HookPoint, change: Any) -> str | None:
    if change.needs_all_positions:
        return "looks at all positions"
    if isinstance(change, AddAtPositions):
        chosen = [position for position, _ in change.pairs]
    elif isinstance(change, Knockout | Steer | SetValue):
        chosen = [place for edge in change.edges for place in edge if place is not None]
    elif isinstance(change, Replace | Add | Scale | Zero):
        chosen = list(change.positions or ())
        if may_look_ahead(point, change):
            return "may give weight to later positions"
    else:
        return "is of a kind that is not known here"
    return "counts positions from the end" if any(place < 0 for place in chosen) else None


def so_far(point: HookPoint, change: Intervention, length: int) -> Intervention | None:
    """An intervention as it applies to the first `length` positions; None if there is nothing for it yet."""
    if isinstance(change, AddAtPositions):
        pairs = tuple(pair for pair in change.pairs if pair[0] < length)
        return _changed(change, len(pairs) < len(change.pairs), bool(pairs), vectors=pairs)
    if isinstance(change, Knockout) and change.edge_mask is not None:
        mask = change.edge_mask[..., :length, :length]
        return _changed(change, mask.shape != change.edge_mask.shape, True, mask=mask)
    if isinstance(change, Knockout | Steer | SetValue):
        edges = tuple(edge for edge in change.edges if _exists(edge, length))
        return _changed(change, len(edges) < len(change.edges), bool(edges), edges=edges)
    return _selected(point, change, length) if isinstance(change, Replace | Add | Scale | Zero) else change


def _selected(point: HookPoint, change: Any, length: int) -> Intervention | None:
    """Of an intervention on chosen positions: those there are, and their rows of its payload."""
    positions: tuple[int, ...] | None = change.positions
    kept = None if positions is None else [i for i, position in enumerate(positions) if position < length]
    if kept == []:
        return None
    fields: dict[str, Any] = {}
    if kept is not None and positions is not None and len(kept) < len(positions):
        fields["positions"] = tuple(positions[i] for i in kept)
    value = getattr(change, "payload", None)
    if value is not None:
        cut = _rows(value, point, kept, length)
        if tuple(cut.shape) != tuple(value.shape):
            fields["value"] = cut
    return _changed(change, bool(fields), True, **fields)


def _rows(value: Any, point: HookPoint, kept: Sequence[int] | None, length: int) -> Any:
    """The rows of a payload on every position axis it has; axes are counted from the end, as it broadcasts.

    kept: entries of the axis on which positions are chosen; None where none are.
    """
    chosen = kept
    for axis in (name for name in point.dims if name in _POSITION_AXES):
        back = len(point.dims) - point.dims.index(axis)
        if value.ndim >= back and value.shape[-back] > 1:
            rows = np.arange(min(length, value.shape[-back])) if chosen is None else np.asarray(chosen)
            value = value[(..., rows, *[slice(None)] * (back - 1))]
        chosen = None  # positions are chosen among queries, never among keys
    return value


def _exists(edge: Edge, length: int) -> bool:
    return all(place is None or place < length for place in edge)


def _changed(change: Any, is_cut: bool, is_left: bool, **fields: Any) -> Intervention | None:
    if not is_left:
        return None
    found: Intervention = replace(change, **fields) if is_cut else change
    return found
