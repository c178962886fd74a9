"""Attention edges chosen by layers, heads and positions, and what is done to them: cut, scaled or set.

A `KnockoutSpec` or `SteeringSpec` is an immutable value, built by chaining; `hooks(config, length)` turns it
into the interventions of a forward pass. An edge goes from a query (the row, the position that reads) to a
key (the column, the position that is read); None stands for every position, on one side at most.

Border: names and numbers; knows a model by its sizes only, and never imports torch.

Nothing is dropped in silence: what a model does not have, an edge into the future and a row left with nothing
to read are refused before a pass starts. (Geva et al. 2023, "Dissecting Recall of Factual Associations in
Auto-Regressive Language Models", section 5, on attention knockout.)
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
    """Which edges: layers, heads (None for all of them) and (query, key) pairs.

    Each method gives a changed copy. Choosing layers or heads again replaces the choice, edges add up; an
    edge named twice is one edge.
    """

    edges: tuple[Edge, ...] = ()
    keeps_self: bool = False
    """Whether "every position" leaves out the edge from a position to itself."""

    _called: ClassVar[str] = "edges"

    def edge(self, query: int | None, key: int | None) -> Self:
        """Also the edge from a query to a key; negative positions count from the end, None is every one."""
        if query is None and key is None:
            raise InterventionError(
                "expected an edge with a query or a key, found every position on both sides; name one of them"
            )
        what = f"{type(self).__name__}: positions of edges"
        ends = [None if end is None else as_index(end, what, InterventionError) for end in (query, key)]
        return replace(self, edges=tuple(dict.fromkeys([*self.edges, (ends[0], ends[1])])))

    def from_position(self, query: int) -> Self:
        """Also every edge from a query: all it reads."""
        return self.edge(query, None)

    def to_position(self, key: int) -> Self:
        """Also every edge to a key: all that read it, itself included unless `keep_self`."""
        return self.edge(None, key)

    def from_to_positions(self, query: int, keys: Iterable[int]) -> Self:
        """Also the edges from a query to each of these keys."""
        spec = self
        for key in as_indices(keys, f"{type(self).__name__}: keys", InterventionError):
            spec = spec.edge(query, key)
        return spec

    def keep_self(self) -> Self:
        """Leave out of "every position" the edge from a position to itself. The first position of a prompt
        reads nothing else, so that `to_position(0)` cannot be cut without this."""
        return replace(self, keeps_self=True)

    def is_prompt_only(self, prompt_length: int) -> bool:
        """Whether every edge is read by a fixed position of the prompt, so that tokens generated after it
        are left alone. A query that counts from the end moves along with them."""
        return all(query is not None and 0 <= query < prompt_length for query, _ in self.edges)

    @property
    def max_query(self) -> int | None:
        """The largest query named; None when none is."""
        return max((query for query, _ in self.edges if query is not None), default=None)

    @property
    def max_key(self) -> int | None:
        """The largest key named; None when none is."""
        return max((key for _, key in self.edges if key is not None), default=None)

    def resolved(self, length: int, *, ahead: bool = False) -> tuple[tuple[int, int], ...]:
        """Every (query, key) pair meant, for a prompt of this length, in order and each once. ahead: of a
        model that looks ahead (`Architecture.looks_ahead`).

        Raises InterventionError for a position out of range, an edge into the future of a model that looks
        back, and no edge at all.
        """
        if not self.edges:
            raise InterventionError(
                f"expected {self._called} with at least one edge, found none; add one with .edge(query, key)"
            )
        found: set[tuple[int, int]] = set()
        for edge in self.edges:
            query, key = (None if place is None else _position(place, length, edge) for place in edge)
            if query is not None and key is not None and key > query and not ahead:
                raise InterventionError(
                    f"expected a query at or after its key, found edge {edge} in a prompt of {length} "
                    "tokens; a causal model has no weight there"
                )
            queries = range(0 if ahead else key or 0, length) if query is None else [query]
            for row in queries:
                keys = range(length if ahead else row + 1) if key is None else [key]
                named = query is not None and key is not None
                found |= {(row, column) for column in keys if named or not self.keeps_self or column != row}
        if not found:
            raise InterventionError(
                f"expected {self._called} that touch something, found only edges from a position to itself, "
                "which .keep_self() leaves out"
            )
        return tuple(sorted(found))

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Raise InterventionError unless a model with these sizes has all that is chosen, for a prompt of
        `length` tokens. ahead: see `resolved`."""
        self.require_places(n_layers, n_heads)
        self.resolved(length, ahead=ahead)


@dataclass(frozen=True)
class KnockoutSpec(_EdgeSpec):
    """Attention edges to cut.

    >>> KnockoutSpec().layer(2).from_to_positions(-1, [0, 1]).resolved(length=5)
    ((4, 0), (4, 1))
    """

    _called: ClassVar[str] = "a knockout"

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Raise InterventionError unless a model with these sizes has all that is chosen, and every query
        keeps something to read. (With a sliding window the pass itself finds what is left.)"""
        super().validate(n_layers, n_heads, length, ahead=ahead)
        _no_empty_row(self.resolved(length, ahead=ahead), length if ahead else None)

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """The interventions that cut these edges in a prompt of `length` tokens.

        Raises InterventionError if the model or the prompt does not have them.
        """
        self.validate(config.num_layers, config.axis_sizes["head"], length, ahead=config.looks_ahead)
        change = Knockout(self.resolved(length, ahead=config.looks_ahead), heads=self.chosen_heads)
        return self.at_layers(config, "scores", change)


@dataclass(frozen=True)
class SteeringSpec(_EdgeSpec):
    """Attention edges to scale, to set, or to cut; what a row has is shared out again so that it sums to 1.

    Made by `scale`, `set_value`, `knockout` or `from_knockout`. Scaling all that a query reads by one factor
    changes nothing, as the row is renormalised.
    """

    kind: SteeringKind = "scale"
    value: float = 1.0
    """Factor or weight; of no meaning to a knockout."""

    _called: ClassVar[str] = "steering"

    def __post_init__(self) -> None:
        low, high, what = (0.0, 1.0, "weight") if self.kind == "set_value" else (0.0, float("inf"), "factor")
        if not low <= self.value <= high or self.value == float("inf"):
            upper = "in [0, 1]" if self.kind == "set_value" else ">= 0"
            raise InterventionError(f"expected a {what} {upper}, found {self.value}")

    @classmethod
    def scale(cls, factor: float) -> SteeringSpec:
        """Multiply weights by a factor >= 0."""
        return cls(kind="scale", value=float(factor))

    @classmethod
    def set_value(cls, weight: float) -> SteeringSpec:
        """Set each weight to a value in [0, 1]."""
        return cls(kind="set_value", value=float(weight))

    @classmethod
    def knockout(cls) -> SteeringSpec:
        """A spec that cuts edges, none yet."""
        return cls(kind="knockout", value=0.0)

    @classmethod
    def from_knockout(cls, spec: KnockoutSpec) -> SteeringSpec:
        """The same cut, as a steering spec."""
        chosen = (spec.chosen_layers, spec.chosen_heads, spec.edges, spec.keeps_self)
        return cls(*chosen, kind="knockout", value=0.0)

    @property
    def is_knockout(self) -> bool:
        """Whether edges are cut, and neither scaled nor set."""
        return self.kind == "knockout"

    @property
    def is_steering(self) -> bool:
        """Whether weights are scaled or set."""
        return not self.is_knockout

    def validate(self, n_layers: int, n_heads: int, length: int, *, ahead: bool = False) -> None:
        """Raise InterventionError unless a model with these sizes has all that is chosen, and the weights
        asked for fit into a row."""
        super().validate(n_layers, n_heads, length, ahead=ahead)
        edges = self.resolved(length, ahead=ahead)
        if self.kind == "knockout":
            _no_empty_row(edges, length if ahead else None)
        if self.kind == "set_value":
            query, targets = max(_by_query(edges).items(), key=lambda row: len(row[1]))
            if self.value * len(targets) > 1 + 1e-6:
                raise InterventionError(
                    f"expected weights that sum to at most 1, found {self.value} on {len(targets)} keys of "
                    f"query {query}; lower the value to {1 / len(targets):.3g} or name fewer keys"
                )

    def hooks(self, config: Architecture, length: int) -> HookSpec:
        """The interventions that steer these edges in a prompt of `length` tokens, inside the pass.

        Raises InterventionError if the model or the prompt does not have them.
        """
        self.validate(config.num_layers, config.axis_sizes["head"], length, ahead=config.looks_ahead)
        edges, heads = self.resolved(length, ahead=config.looks_ahead), self.chosen_heads
        if self.kind == "knockout":
            return self.at_layers(config, "scores", Knockout(edges, heads=heads))
        change = (
            Steer(edges, self.value, heads) if self.kind == "scale" else SetValue(edges, self.value, heads)
        )
        return self.at_layers(config, "pattern", change)


def _position(position: int, length: int, edge: Edge) -> int:
    if not -length <= position < length:
        raise InterventionError(
            f"expected positions in 0..{length - 1} (or negative, from the end), found {position} in edge "
            f"{edge}"
        )
    return position % length


def _by_query(edges: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = defaultdict(list)
    for query, key in edges:
        rows[query].append(key)
    return rows


def _no_empty_row(edges: Sequence[tuple[int, int]], length: int | None) -> None:
    """length: of the prompt, where every query reads all of it; None where it reads those up to itself."""
    for query, keys in _by_query(edges).items():
        read = query + 1 if length is None else length
        if len(keys) == read:
            raise InterventionError(
                f"the knockout leaves query {query} no key to attend to: it reads positions 0..{read - 1}, "
                "and all are cut; keep one edge of it, .keep_self(), or zero the head's output (hook_z) "
                "instead"
            )
