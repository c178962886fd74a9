"""KnockoutSpec and SteeringSpec: attention edges to cut, scale or set, by layers, heads and positions.

Both are immutable values built by chaining; `hooks(config, length)` turns one into the interventions of a
forward pass. An edge goes from a query (row of the pattern: the position that attends) to a key (column: the
position attended to); None stands for every position, on one side at most.

Edges that the model or prompt does not have, edges to a later key and rows without any key left are refused
before a pass starts. Attention knockout: Geva et al. 2023, "Dissecting Recall of Factual Associations in
Auto-Regressive Language Models", section 5. Knows a model by its sizes only and never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from ....store.arrays import as_index, as_indices
from ....store.errors import InterventionError
from .edge_interventions import Edge, Knockout, SetValue, Steer
from .places import PlacedSpec
from .spec import HookSpec

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["KnockoutSpec", "SteeringSpec"]

SteeringKind = Literal["knockout", "scale", "set_value"]


@dataclass(frozen=True)
class _EdgeSpec(PlacedSpec):
    """Attention edges of selected layers and heads.

    Each method returns a changed copy. Selecting layers or heads again replaces the earlier selection; edges
    add up, and a repeated edge counts once.
    """

    edges: tuple[Edge, ...] = ()
    """(query, key) pairs; None on one side for every position."""
    keeps_self: bool = False
    """Whether an edge with None (all positions) leaves out the pair of a position with itself."""

    _noun: ClassVar[str] = "edges"
    """Name of the spec in error messages."""

    def edge(self, query: int | None, key: int | None) -> Self:
        """Add the edge from a query to a key.

        Arguments:
            query: attending position; negative from the end, None for every position.
            key: position attended to; likewise.

        Raises:
            InterventionError: for None on both sides.
        """
        if query is None and key is None:
            raise InterventionError(
                f"{type(self).__name__}.edge: expected a query or a key position, found None for both, which "
                "would be every edge; name at least one of them"
            )
        what = f"{type(self).__name__}: positions of edges"
        ends = [None if end is None else as_index(end, what, InterventionError) for end in (query, key)]
        # A repeated edge counts once; a dict keeps the order of the calls.
        return replace(self, edges=tuple(dict.fromkeys([*self.edges, (ends[0], ends[1])])))

    def from_position(self, query: int) -> Self:
        """Add every edge from a query: all keys it attends to."""
        return self.edge(query, None)

    def to_position(self, key: int) -> Self:
        """Add every edge to a key position, from all queries that attend to it (see also `keep_self`)."""
        return self.edge(None, key)

    def from_to_positions(self, query: int, keys: Iterable[int]) -> Self:
        """Add the edges from one query position to several key positions."""
        spec = self
        for key in as_indices(keys, f"{type(self).__name__}: keys", InterventionError):
            spec = spec.edge(query, key)
        return spec

    def keep_self(self) -> Self:
        """Exclude the edge from a position to itself wherever None stands for every position.

        The first position of a causal prompt attends to itself only, so `to_position(0)` needs this.
        """
        return replace(self, keeps_self=True)

    def is_prompt_only(self, prompt_length: int) -> bool:
        """Whether every edge has a query inside the prompt, so that generated tokens attend as usual.

        A query that counts from the end moves along with the generated text.
        """
        return all(query is not None and 0 <= query < prompt_length for query, _ in self.edges)

    @property
    def max_query(self) -> int | None:
        """The largest query among the edges; None if no edge names one."""
        return max((query for query, _ in self.edges if query is not None), default=None)

    @property
    def max_key(self) -> int | None:
        """The largest key among the edges; None if no edge names one."""
        return max((key for _, key in self.edges if key is not None), default=None)

    def resolved(self, length: int, *, ahead: bool = False) -> tuple[tuple[int, int], ...]:
        """Every (query, key) pair for a prompt of this length, sorted and without duplicates.

        Arguments:
            length: tokens of the prompt.
            ahead: whether queries see later keys (`Architecture.looks_ahead`).

        Raises:
            InterventionError: for a position out of range, a later key in a causal model, or no edge.
        """
        if not self.edges:
            raise InterventionError(
                f"expected {self._noun} with at least one edge, found none; add one with .edge(query, key)"
            )
        pairs: set[tuple[int, int]] = set()
        for edge in self.edges:
            query, key = (None if end is None else _counted_from_start(end, length, edge) for end in edge)
            if query is not None and key is not None and key > query and not ahead:
                raise InterventionError(
                    f"expected an attention edge (query, key) whose query is at or after its key, found "
                    f"{edge} in a prompt of {length} tokens; a causal model has no weight there"
                )
            # In a causal model only queries from the key on attend to it.
            queries = range(0 if ahead else key or 0, length) if query is None else [query]
            for row in queries:
                keys = range(length if ahead else row + 1) if key is None else [key]
                # An edge written out from a position to itself is meant, whatever `keep_self` says of None.
                is_named = query is not None and key is not None
                pairs |= {
                    (row, column) for column in keys if is_named or not self.keeps_self or column != row
                }
        if not pairs:
            raise InterventionError(
                f"expected {self._noun} with an edge between two positions, found only edges from a position "
                "to itself, which .keep_self() excludes; leave out .keep_self(), or name other positions"
            )
        return tuple(sorted(pairs))

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Check the spec against a model and a prompt.

        Arguments:
            n_layers: layers of the model.
            n_heads: query heads of the model.
            length: tokens of the prompt.
            ahead: whether queries see later keys (`Architecture.looks_ahead`).

        Raises:
            InterventionError: for layers, heads or positions out of range, and as `resolved`.
        """
        self.require_places(n_layers, n_heads)
        self.resolved(length, ahead=ahead)


@dataclass(frozen=True)
class KnockoutSpec(_EdgeSpec):
    """Attention edges to cut: their scores become -inf before the softmax.

    >>> KnockoutSpec().layer(2).from_to_positions(-1, [0, 1]).resolved(length=5)
    ((4, 0), (4, 1))
    """

    _noun: ClassVar[str] = "a knockout"

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Check the knockout against a model and a prompt.

        Sliding windows are not considered: the pass itself raises where a window leaves a query no key.

        Arguments:
            n_layers: layers of the model.
            n_heads: query heads of the model.
            length: tokens of the prompt.
            ahead: whether queries see later keys.

        Raises:
            InterventionError: for layers, heads or positions out of range, an edge to a later key in a causal
                model, no edge, or a query whose keys are all cut.
        """
        super().validate(n_layers, n_heads, length, ahead=ahead)
        _require_a_key_left(self.resolved(length, ahead=ahead), length if ahead else None)

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """Interventions that cut these edges in a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            InterventionError: if the model or the prompt does not have the edges.
        """
        self.validate(config.num_layers, config.axis_sizes["head"], length, ahead=config.looks_ahead)
        change = Knockout(self.resolved(length, ahead=config.looks_ahead), heads=self.chosen_heads)
        return self.at_layers(config, "scores", change)


@dataclass(frozen=True)
class SteeringSpec(_EdgeSpec):
    """Attention edges to scale, set or cut; each changed row is renormalised to sum to 1.

    Made by `scale`, `set_value`, `knockout` or `from_knockout`. Scaling every edge of a query by one factor
    changes nothing, because of the renormalisation.
    """

    kind: SteeringKind = "scale"
    """"scale", "set_value" or "knockout"."""
    value: float = 1.0
    """Factor for "scale", attention weight for "set_value"; unused for "knockout"."""

    _noun: ClassVar[str] = "steering"

    def __post_init__(self) -> None:
        is_weight = self.kind == "set_value"
        if not 0.0 <= self.value <= (1.0 if is_weight else float("inf")) or self.value == float("inf"):
            expected = "a weight in [0, 1]" if is_weight else "a factor >= 0"
            raise InterventionError(
                f"SteeringSpec of kind {self.kind!r}: expected {expected}, found {self.value}"
            )

    @classmethod
    def scale(cls, factor: float) -> SteeringSpec:
        """A spec that multiplies attention weights by a finite factor >= 0."""
        return cls(kind="scale", value=float(factor))

    @classmethod
    def set_value(cls, weight: float) -> SteeringSpec:
        """A spec that sets each attention weight to a value in [0, 1]."""
        return cls(kind="set_value", value=float(weight))

    @classmethod
    def knockout(cls) -> SteeringSpec:
        """A steering spec that cuts attention edges; it has no edges until `edge` adds them."""
        return cls(kind="knockout", value=0.0)

    @classmethod
    def from_knockout(cls, spec: KnockoutSpec) -> SteeringSpec:
        """A SteeringSpec that cuts the edges of a KnockoutSpec, in the same layers and heads."""
        # In the order of the dataclass fields of both classes.
        fields = (spec.chosen_layers, spec.chosen_heads, spec.edges, spec.keeps_self)
        return cls(*fields, kind="knockout", value=0.0)

    @property
    def is_knockout(self) -> bool:
        """Whether attention edges are cut, instead of scaled or set to a weight."""
        return self.kind == "knockout"

    @property
    def is_steering(self) -> bool:
        """Whether attention weights are scaled or set."""
        return not self.is_knockout

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Check the steering against a model and a prompt.

        Arguments:
            n_layers: layers of the model.
            n_heads: query heads of the model.
            length: tokens of the prompt.
            ahead: whether queries see later keys.

        Raises:
            InterventionError: for layers, heads or positions out of range, an edge to a later key in a causal
                model, no edge, a query whose keys are all cut, or weights of a query that sum to more than 1.
        """
        super().validate(n_layers, n_heads, length, ahead=ahead)
        edges = self.resolved(length, ahead=ahead)
        if self.kind == "knockout":
            _require_a_key_left(edges, length if ahead else None)
        if self.kind == "set_value":
            query, keys = max(_keys_by_query(edges).items(), key=lambda row: len(row[1]))
            # Tolerance for weights such as 1/3 on three keys, whose sum may exceed 1 by rounding.
            if self.value * len(keys) > 1 + 1e-6:
                raise InterventionError(
                    f"expected attention weights that sum to at most 1, found {self.value} on each of "
                    f"{len(keys)} keys of query {query}; lower the value to {1 / len(keys):.3g}, or name "
                    "fewer keys"
                )

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """Interventions that steer these edges in a prompt of `length` tokens.

        Arguments:
            config: architecture of the model.
            length: tokens of the prompt.

        Raises:
            InterventionError: if the model or the prompt does not have the edges.
        """
        self.validate(config.num_layers, config.axis_sizes["head"], length, ahead=config.looks_ahead)
        # Resolved to positions now: an edge from the end would otherwise move with generated tokens.
        edges, heads = self.resolved(length, ahead=config.looks_ahead), self.chosen_heads
        if self.kind == "knockout":
            return self.at_layers(config, "scores", Knockout(edges, heads=heads))
        change = (
            Steer(edges, self.value, heads) if self.kind == "scale" else SetValue(edges, self.value, heads)
        )
        return self.at_layers(config, "pattern", change)


def _counted_from_start(position: int, length: int, edge: Edge) -> int:
    if not -length <= position < length:
        raise InterventionError(
            f"attention edge (query, key) = {edge}: expected positions in 0..{length - 1} (or negative, from "
            f"the end), found {position}"
        )
    return position % length


def _keys_by_query(edges: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    keys: dict[int, list[int]] = defaultdict(list)
    for query, key in edges:
        keys[query].append(key)
    return keys


def _require_a_key_left(edges: Sequence[tuple[int, int]], length: int | None) -> None:
    """Raise InterventionError for a query whose keys are all cut.

    Arguments:
        edges: (query, key) pairs that are cut, counted from 0.
        length: tokens of the prompt if queries see later keys; None in a causal model.
    """
    for query, keys in _keys_by_query(edges).items():
        n_keys = query + 1 if length is None else length
        if len(keys) == n_keys:
            raise InterventionError(
                f"the knockout leaves query {query} no key to attend to: positions 0..{n_keys - 1} are all "
                "cut; keep one of these edges, use .keep_self(), or zero the head's output (hook_z) instead"
            )
