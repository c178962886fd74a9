"""Interventions on attention edges: Knockout cuts them, Steer and SetValue change their attention weight.

An edge is a (query, key) pair: the query attends to the key. None on one side means every position. Edges are
cut in the scores, together with the causal mask and after any soft cap. Weights are changed in the pattern,
whose changed rows are renormalised to sum to 1. None of them lets a query see a key that the mask hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....store.arrays import as_index, as_indices, shown
from ....store.errors import InterventionError
from ..architectures.points import HookPoint
from .interventions import Intervention, PositionSubset, Scale, Zero, check_indices
from .payloads import Payload, PayloadField, finite, private_payload, readonly_copy

if TYPE_CHECKING:
    from torch import Tensor

Edge = tuple[int | None, int | None]
_SCORES = ("scores", "attn_scores")


class _EdgeIntervention(Intervention):
    """Base of interventions on edges. No dataclass: `edges` and `heads` are fields of its subclasses."""

    # Declared here as fields, they would come first in every constructor: Steer(edges, factor, heads).
    edges: Sequence[Edge]
    heads: tuple[int, ...] | None

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        where = f"{type(self).__name__} at '{point}'"
        if self.heads is not None:
            check_indices(where, "heads", self.heads, sizes["head"])
        for query, key in self.edges:
            check_indices(where, "query positions", [] if query is None else [query], sizes["query_position"])
            check_indices(where, "key positions", [] if key is None else [key], sizes["key_position"])

    def require_causal(self, point: HookPoint, length: int) -> None:
        """Raise InterventionError for an edge from a query to a later key, which the causal mask hides.

        Arguments:
            point: hook point, for the message.
            length: tokens of the prompt, for positions that count from the end.
        """
        for query, key in self.edges:
            if query is not None and key is not None and query % length < key % length:
                raise InterventionError(
                    f"{type(self).__name__} at '{point}': expected a query at or after its key, found edge "
                    f"(query {query}, key {key}); a causal model has no weight there"
                )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Positions, counted from 0 and ascending, whose attention rows the edges change.

        Arguments:
            length: tokens of the prompt.
            ahead: whether queries see later keys (no causal mask).
        """
        queries: set[int] = set()
        for query, key in self.edges:
            # In a causal model, an edge from every query starts at its key: earlier queries do not see it.
            first = 0 if key is None or ahead else key % length
            queries.update(range(first, length) if query is None else [query % length])
        return tuple(sorted(queries))

    def _store_checked(self) -> None:
        """Check the fields `edges` and `heads`, and store them as tuples of ints."""
        name = type(self).__name__
        object.__setattr__(self, "edges", _checked_edges(name, self.edges))
        if self.heads is not None:
            heads = as_indices(self.heads, f"{name}: heads", InterventionError)
            object.__setattr__(self, "heads", heads)

    def _require_edges(self) -> None:
        if not self.edges:
            raise InterventionError(
                f"{type(self).__name__}: expected at least one (query, key) edge, found none; write [(-1, 0)]"
            )


@dataclass(frozen=True, eq=False)
class Knockout(_EdgeIntervention):
    """Cut attention edges: their scores become -inf together with the causal mask, after any soft cap.

    A row left without any key raises InterventionError instead of giving NaN.
    """

    kinds: ClassVar[tuple[str, ...]] = _SCORES
    cuts_edges: ClassVar[bool] = True
    is_positionwise: ClassVar[bool] = True
    edges: Sequence[Edge] = ()
    """(query, key) pairs; None on one side for every position. Empty if `mask` is given."""
    mask: Payload | None = PayloadField(None)
    """[query, key] or [head, query, key], True (or -inf) where an edge is cut; None if `edges` are given."""
    heads: tuple[int, ...] | None = None
    """Query heads; None for all."""

    def __post_init__(self) -> None:
        self._store_checked()
        if bool(self.edges) == (self.edge_mask is not None):
            raise InterventionError(
                f"Knockout: expected either edges or a mask, found {'both' if self.edges else 'neither'}; "
                "write Knockout([(-1, 0)]) or Knockout(mask=mask)"
            )
        if self.edge_mask is not None:
            object.__setattr__(self, "mask", _cut_mask(self.edge_mask))

    @property
    def edge_mask(self) -> Payload | None:
        """The mask itself, to be read only; the field `mask` returns a copy. None if edges are given."""
        return private_payload(self, "mask")

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes.

        Arguments:
            point: hook point at which it is to be applied.
            sizes: axis name -> length.
        """
        super().check(point, sizes)
        if self.edge_mask is not None:
            # transformers makes masks [1, 1, query, key]: leading axes of length 1 are accepted.
            full = (sizes["head"], sizes["query_position"], sizes["key_position"])
            if tuple(self.edge_mask.shape) not in (full, full[1:], (1, *full), (1, 1, *full[1:])):
                raise InterventionError(
                    f"Knockout at '{point}': expected a mask of shape {list(full[1:])} or {list(full)}, "
                    f"found {list(self.edge_mask.shape)}; make its query and key axes as long as the prompt"
                )

    def touched(self, length: int, *, ahead: bool = False) -> tuple[int, ...] | None:
        """Queries with a cut edge, counted from 0.

        Arguments:
            length: tokens of the prompt.
            ahead: whether queries see later keys (no causal mask).
        """
        if self.edge_mask is None:
            return super().touched(length, ahead=ahead)
        # A query counts if any head cuts any of its keys.
        cut = np.asarray(self.edge_mask).reshape(-1, length, length).any(axis=(0, 2))
        return tuple(np.flatnonzero(cut).tolist())

    def cut(self, heads: int, queries: int, keys: int, device: Any) -> Tensor:
        """Bool [head, query, key], True where an edge is cut.

        Arguments:
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the result.
        """
        import torch

        if self.edge_mask is not None:
            is_cut = torch.as_tensor(np.array(self.edge_mask), device=device).reshape(-1, queries, keys)
        else:
            is_cut = _edge_mask(self.edges, queries, keys, device)[None]
        if self.heads is None:
            return is_cut.expand(heads, queries, keys)
        # A mask with one entry on the head axis is the same for every selected head.
        selected = is_cut if is_cut.shape[0] == 1 else is_cut[list(self.heads)]
        by_head = torch.zeros(heads, queries, keys, dtype=torch.bool, device=device)
        by_head[list(self.heads)] = selected
        return by_head


@dataclass(frozen=True, eq=False)
class Steer(_EdgeIntervention):
    """Multiply the attention weight of edges by `factor`, then renormalise the changed rows.

    For one edge of weight a: a' = factor * a / (1 + (factor - 1) * a). A repeated edge counts once. Keys that
    the mask hides keep weight 0.
    """

    kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    is_positionwise: ClassVar[bool] = True
    edges: Sequence[Edge]
    """(query, key) pairs; None on one side for every position."""
    factor: float
    """Factor >= 0."""
    heads: tuple[int, ...] | None = None
    """Query heads; None for all."""

    def __post_init__(self) -> None:
        self._store_checked()
        self._require_edges()
        object.__setattr__(self, "factor", finite("Steer", self.factor))
        if self.factor < 0:
            raise InterventionError(f"Steer: expected a factor >= 0, found {self.factor}")

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed pattern, as a new tensor.

        Arguments:
            x: pattern [batch, head, query, key].
            point: hook point at which it is.
            allowed: attention mask, bool [query, key], True where attention may look; None for all keys.
            subset: queries that x has; None for all.
        """
        import torch

        def scale_edges(weights: Tensor, targets: Tensor) -> Tensor:
            return torch.where(targets, weights * self.factor, weights)

        return _with_changed_rows(x, self.edges, self.heads, allowed, subset, scale_edges)


@dataclass(frozen=True, eq=False)
class SetValue(_EdgeIntervention):
    """Set the attention weight of each edge to `value`; other keys of the row share the rest in proportion.

    Keys that the attention mask hides keep weight 0. A row whose visible keys all have an edge is
    renormalised to sum to 1. Raises InterventionError where a row has other keys and its edges times `value`
    exceed 1.
    """

    kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    is_positionwise: ClassVar[bool] = True
    edges: Sequence[Edge]
    """(query, key) pairs; None on one side for every position."""
    value: float
    """Attention weight in [0, 1]."""
    heads: tuple[int, ...] | None = None
    """Query heads; None for all."""

    def __post_init__(self) -> None:
        self._store_checked()
        self._require_edges()
        object.__setattr__(self, "value", finite("SetValue", self.value))
        if not 0 <= self.value <= 1:
            raise InterventionError(f"SetValue: expected a weight in [0, 1], found {self.value}")

    def apply(
        self, x: Tensor, point: HookPoint, allowed: Tensor | None = None, subset: PositionSubset | None = None
    ) -> Tensor:
        """The changed pattern, as a new tensor.

        Arguments:
            x: pattern [batch, head, query, key].
            point: hook point at which it is.
            allowed: attention mask, bool [query, key], True where attention may look; None for all keys.
            subset: queries that x has; None for all.
        """
        import torch

        def set_edges(weights: Tensor, targets: Tensor) -> Tensor:
            visible = torch.ones_like(targets) if allowed is None else allowed
            others = visible & ~targets
            assigned = self.value * targets.sum(-1, keepdim=True)
            # 1e-6: weights such as 1/3 on three keys may sum to just above 1 by rounding.
            if bool(((assigned > 1 + 1e-6) & others.any(-1, keepdim=True)).any()):
                raise InterventionError(
                    f"SetValue at '{point}': expected attention weights that sum to at most 1, found "
                    f"{self.value} on each of {int(targets.sum(-1).max())} keys of one query; lower the value"
                )
            rest = weights.masked_fill(~others, 0)
            total = rest.sum(-1, keepdim=True)
            # A row that gave no weight to its other keys shares the remainder equally among them. The clamp
            # only avoids 0 / 0, whose gradient would be NaN even in the branch that `where` drops.
            share = torch.where(
                total > 0, rest / total.clamp_min(1e-30), others / others.sum(-1, keepdim=True).clamp_min(1)
            )
            return torch.where(targets, weights.new_full((), self.value), share * (1 - assigned))

        return _with_changed_rows(x, self.edges, self.heads, allowed, subset, set_edges)


def may_look_ahead(point: HookPoint, change: Intervention) -> bool:
    """Whether an intervention may give weight to keys that the causal mask hides.

    That happens where masked scores are no longer -inf, or masked weights no longer zero. Generation with a
    cache refuses such an intervention, and stores keep whole patterns instead of their lower triangle.

    Arguments:
        point: hook point of the intervention.
        change: the intervention.
    """
    if point.kind not in ("attn_scores", "pattern"):
        return False
    # Such an intervention computes anything from the whole matrix, so nothing is known of its upper triangle.
    if change.needs_all_positions:
        return True
    if isinstance(change, Scale):
        # Masked scores are -inf: a negative factor makes them +inf, and 0 times -inf is NaN.
        return point.kind == "attn_scores" and change.factor <= 0
    if isinstance(change, Zero):
        # A masked score of 0 instead of -inf gets weight; a masked weight of 0 stays 0.
        return point.kind == "attn_scores"
    return not isinstance(change, Knockout | Steer | SetValue)


def _with_changed_rows(
    x: Tensor,
    edges: Sequence[Edge],
    heads: tuple[int, ...] | None,
    allowed: Tensor | None,
    subset: PositionSubset | None,
    change: Any,
) -> Tensor:
    """Change the rows of an attention pattern that have an edge, in float32; each then sums to 1 again.

    Arguments:
        x: attention pattern [batch, head, query, key].
        edges: (query, key) pairs; None on one side for every position.
        heads: heads that are changed; None for all.
        allowed: attention mask, bool [query, key], True where attention may look; None for all keys.
        subset: queries that x has; None for all.
        change: function of (float32 weights, bool [query, key] that is True at the edges) -> new weights.
    """
    import torch

    keys = x.shape[-1]
    targets = _edge_mask(edges, keys, keys, x.device)
    if subset is not None:
        targets = targets[torch.as_tensor(subset.positions, device=x.device)]
    if allowed is not None:
        targets = targets & allowed
    is_changed = targets.any(-1, keepdim=True)
    if heads is not None:
        is_selected = torch.zeros(x.shape[1], 1, 1, dtype=torch.bool, device=x.device)
        is_selected[list(heads)] = True
        is_changed = is_changed & is_selected
    # float32: renormalising in bfloat16 would move all weights of the row by up to 0.4 %.
    weights = change(x.float(), targets)
    total = weights.sum(-1, keepdim=True)
    # A row that steering leaves without weight (factor 0 on all its keys) keeps its old weights instead of
    # becoming NaN.
    return torch.where(is_changed & (total > 1e-10), weights / total.clamp_min(1e-10), x.float()).to(x.dtype)


def _edge_mask(edges: Sequence[Edge], queries: int, keys: int, device: Any) -> Tensor:
    import torch

    mask = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    for query, key in edges:
        mask[slice(None) if query is None else query, slice(None) if key is None else key] = True
    return mask


def _checked_edges(name: str, edges: Sequence[Edge]) -> tuple[Edge, ...]:
    if not isinstance(edges, Iterable):
        raise InterventionError(f"{name}: expected (query, key) edges, found {shown(edges)}; write [(-1, 0)]")
    checked = []
    for edge in edges:
        if not isinstance(edge, Sequence) or len(edge) != 2 or (edge[0] is None and edge[1] is None):
            raise InterventionError(
                f"{name}: expected each edge as (query, key) with at most one None, found {edge!r}; write "
                "(-1, 0)"
            )
        query, key = (
            None if end is None else as_index(end, f"{name}: positions of edges", InterventionError)
            for end in edge
        )
        checked.append((query, key))
    return tuple(checked)


def _cut_mask(mask: Payload) -> Payload:
    """A read-only bool array, True where cut, from True/False or 0/-inf."""
    # float32, because numpy cannot hold bfloat16 masks.
    array = np.asarray(mask.detach().cpu().float() if hasattr(mask, "detach") else mask)
    if array.dtype == bool:
        return readonly_copy(array)
    if not np.isin(array, (0.0, -np.inf)).all() and not (
        hasattr(mask, "detach") and str(mask.dtype) == "torch.bool"
    ):
        raise InterventionError(
            "Knockout: expected a mask of True/False or of 0 and -inf, found other values; to cut some edges "
            "pass mask == -inf, to add a bias use Add at hook_attn_scores"
        )
    # Without any -inf this is a torch mask of True and False, read as 1 and 0, or one that cuts nothing.
    return readonly_copy((array == -np.inf) if np.isneginf(array).any() else array.astype(bool))
