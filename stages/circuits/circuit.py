"""Circuit: a set of edges of a model's graph that is claimed to do a task, as a value.

    found = Circuit.top(layout, scores, 150).pruned()
    rest = ~found                                   # every other edge
    Circuit.from_json(found.to_json()) == found

Selections are those of EAP-IG (Hanna et al., Have Faith in Faithfulness, 2024, section 2.3), pruning as its
code prunes: what nothing reads, or what reads nothing, does not belong.

Border: names and numbers of edges; knows no model and no scores but those it is given. Never imports torch.

Axes: source, destination, as in forward/edges/layout.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...store.arrays import Floats
from ...store.digest import digest
from ...store.errors import ConfigError, ShapeError
from ..forward.edges.layout import INPUT, LOGITS, Bools, Layout

__all__ = ["Circuit"]

FORMAT = 1
LEAVES_NOTHING = -1
"""Owner of the logits (`Layout.owner`), which are no source."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges of a graph. chosen: bool [source, destination]; copied, and False where there is no edge."""

    layout: Layout
    chosen: Bools

    def __post_init__(self) -> None:
        held = np.array(self.chosen, np.bool_)
        if held.shape != self.layout.edges.shape:
            raise ShapeError(
                f"expected edges [source, destination] of shape {list(self.layout.edges.shape)}, found "
                f"{list(held.shape)}"
            )
        held &= self.layout.edges
        held.setflags(write=False)
        object.__setattr__(self, "chosen", held)

    # -- made of

    @classmethod
    def whole(cls, layout: Layout) -> Circuit:
        """Every edge: the model."""
        return cls(layout, layout.edges)

    @classmethod
    def of(cls, layout: Layout, names: Iterable[str]) -> Circuit:
        """Edges by name, "m1->a2.h3<v>". Raises ConfigError for one that is not there."""
        return cls(layout, layout.chosen(list(names)))

    @classmethod
    def top(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """The edges of largest |score| [source, destination]; of equal ones the first by source."""
        magnitude = _magnitudes(layout, scores)
        order = np.argsort(-magnitude, axis=None, kind="stable")[: _within(size, layout)]
        found = np.zeros(magnitude.size, np.bool_)
        found[order] = True
        return cls(layout, found.reshape(magnitude.shape))

    @classmethod
    def greedy(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """As many edges one after the other, from the logits down: each time the one of largest |score| into
        a node that is in already, whose source is then in as well."""
        magnitude, found = _magnitudes(layout, scores), np.zeros_like(layout.edges)
        waiting: list[tuple[float, int]] = []

        def enter(node: int) -> None:
            """Queue the edges into a node, the largest first and of equal ones the first by source."""
            into = layout.edges & (layout.owner == node)
            for place in np.flatnonzero(into).tolist():
                heapq.heappush(waiting, (-magnitude.flat[place], place))

        entered = {LEAVES_NOTHING}
        enter(LEAVES_NOTHING)
        for _ in range(_within(size, layout)):
            if not waiting:
                break
            place = heapq.heappop(waiting)[1]
            found.flat[place] = True
            source = place // found.shape[1]
            if source not in entered:
                entered.add(source)
                enter(source)
        return cls(layout, found)

    @classmethod
    def at_random(cls, layout: Layout, size: int, *, seed: int) -> Circuit:
        """As many edges, drawn evenly and without replacement."""
        places = np.flatnonzero(layout.edges)
        chosen = np.random.default_rng(seed).choice(places, _within(size, layout), replace=False)
        found = np.zeros(layout.edges.size, np.bool_)
        found[chosen] = True
        return cls(layout, found.reshape(layout.edges.shape))

    @classmethod
    def grown(cls, layout: Layout, size: int, *, seed: int) -> Circuit:
        """As many edges, drawn one after the other from the logits down, as `greedy` takes them: each leads
        to the logits, as those of a circuit that does something must."""
        scores = np.random.default_rng(seed).permutation(layout.edges.size) + 1.0
        return cls.greedy(layout, scores.reshape(layout.edges.shape), size)

    # -- sets

    def __or__(self, other: Circuit) -> Circuit:
        return Circuit(self.layout, self.chosen | self._alike(other))

    def __and__(self, other: Circuit) -> Circuit:
        return Circuit(self.layout, self.chosen & self._alike(other))

    def __sub__(self, other: Circuit) -> Circuit:
        return Circuit(self.layout, self.chosen & ~self._alike(other))

    def __invert__(self) -> Circuit:
        return Circuit(self.layout, ~self.chosen)

    def __len__(self) -> int:
        return int(self.chosen.sum())

    def __contains__(self, name: str) -> bool:
        return bool((self.chosen & self.layout.chosen([name])).any())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Circuit)
            and self.layout == other.layout
            and bool((self.chosen == other.chosen).all())
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.layout.edges.sum())} edges, {len(self.nodes)} nodes)"

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """Names, destination by destination."""
        return tuple(self.layout.names(self.chosen))

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with an edge, in the order in which they are computed; the logits last."""
        owner = self.layout.owner
        with_edges: Bools = np.array(self.chosen.any(1))
        with_edges[owner[self.chosen.any(0) & (owner >= 0)]] = True
        names = [name for name, held in zip(self.layout.sources, with_edges, strict=True) if held]
        return (*names, LOGITS) if self.chosen[:, -1].any() else tuple(names)

    def pruned(self) -> Circuit:
        """Without edges of nodes that nothing in it reads or, but for the input, that read nothing in it;
        again, until nothing changes."""
        held, owner = self.chosen, self.layout.owner
        while True:
            is_reading: Bools = np.zeros(len(held), np.bool_)
            is_reading[owner[held.any(0) & (owner >= 0)]] = True
            is_reading[self.layout.sources.index(INPUT)] = True
            stays = held.any(1) & is_reading
            left = held & stays[:, None] & (stays[owner] | (owner < 0))
            if (left == held).all():
                return Circuit(self.layout, held)
            held = left

    # -- elsewhere

    @property
    def digest(self) -> str:
        """Of the graph's sizes and the edges."""
        return digest("circuit", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads back."""
        sizes = {"heads": self.layout.num_heads, "parallel": list(self.layout.parallel)}
        return {"format": FORMAT, **sizes, "edges": list(self.edges)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Circuit:
        """What `to_json` gave. Raises ConfigError for anything else, naming what is wrong."""
        expected = {"format": int, "heads": int, "parallel": list, "edges": list}
        if not isinstance(told, Mapping) or set(told) != set(expected):
            found = ", ".join(map(str, told)) if isinstance(told, Mapping) else repr(told)
            raise ConfigError(f"expected a circuit with {', '.join(expected)}, found {found}")
        for name, kind in expected.items():
            if type(told[name]) is not kind:
                raise ConfigError(f"circuit: expected {name} as {kind.__name__}, found {told[name]!r}")
        if told["format"] != FORMAT:
            raise ConfigError(f"expected a circuit of format {FORMAT}, found {told['format']!r}")
        if told["heads"] < 1 or not told["parallel"] or not all(type(p) is bool for p in told["parallel"]):
            raise ConfigError(
                "circuit: expected heads of at least 1 and, in parallel, true or false for each layer, found "
                f"{told['heads']!r} and {told['parallel']!r}"
            )
        names = told["edges"]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ConfigError("circuit: expected the names of edges, each once, found another list")
        return cls.of(Layout(told["heads"], tuple(told["parallel"])), names)

    def node_link(self, scores: Any = None) -> dict[str, Any]:
        """As networkx.node_link_graph(…, edges="edges") reads a directed graph of several edges between two
        nodes: for a head three kinds of them. scores: [source, destination], weights of the edges."""
        edges = []
        for place in zip(*np.nonzero(self.chosen), strict=True):
            source, destination = map(int, place)
            node, _, kind = self.layout.destinations[destination].partition("<")
            edge = {"source": self.layout.sources[source], "target": node, "key": kind.rstrip(">") or "all"}
            weight = {} if scores is None else {"weight": float(np.asarray(scores)[source, destination])}
            edges.append(edge | weight)
        nodes = [{"id": name} for name in self.nodes]
        return {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": edges}

    def _alike(self, other: Circuit) -> Bools:
        if other.layout != self.layout:
            raise ConfigError(
                f"expected circuits of one graph, found {self.layout.num_layers} layers of "
                f"{self.layout.num_heads} heads and {other.layout.num_layers} of {other.layout.num_heads}, "
                "or layers that are parallel in one of them alone"
            )
        return other.chosen


def _magnitudes(layout: Layout, scores: Any) -> Floats:
    """|score| of every edge, -inf where there is none; ShapeError, or ConfigError for what is no number."""
    given = np.asarray(scores, np.float64)
    if given.shape != layout.edges.shape:
        raise ShapeError(
            f"expected scores [source, destination] of shape {list(layout.edges.shape)}, found "
            f"{list(given.shape)}"
        )
    if not np.isfinite(given[layout.edges]).all():
        raise ConfigError("expected a finite score for every edge, found NaN or infinity")
    return np.where(layout.edges, np.abs(given), -np.inf)


def _within(size: int, layout: Layout) -> int:
    most = int(layout.edges.sum())
    if not 0 <= size <= most:
        raise ConfigError(f"expected a size in 0..{most} edges, found {size}")
    return size
