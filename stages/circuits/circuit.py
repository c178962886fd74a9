"""Circuit: a set of edges of a model's graph that is claimed to do a task, as a value.

    found = Circuit.top(layout, scores, 150).pruned()
    rest = ~found                                   # every other edge
    Circuit.from_json(found.to_json()) == found

Selections are those of EAP-IG (Hanna et al., Have Faith in Faithfulness, 2024, section 2.3), pruning as its
code prunes: what nothing reads, or what reads nothing, does not belong.

A circuit may say of each edge at which positions it is one (Haklay et al., Position-aware Automatic Circuit
Discovery, 2025): what a destination reads of a source there, "m1->a2.h3<v>@5". What a head reads for keys and
values at a position goes into what it adds there and later; a node is a part at a position.

Border: names and numbers of edges; knows no model and no scores but those it is given. Never imports torch.

Axes: position (where it says), source, destination, as in forward/edges/layout.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...store.arrays import Floats, Ints
from ...store.digest import digest
from ...store.errors import ConfigError, ShapeError
from ..forward.edges.layout import INPUT, LOGITS, Bools, Layout

__all__ = ["Circuit"]

FORMAT = 1
LEAVES_NOTHING = -1
"""Owner of the logits (`Layout.owner`), which are no source."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges of a graph. chosen: bool [source, destination], or [position, source, destination] of prompts of
    that length; copied, and False where there is no edge."""

    layout: Layout
    chosen: Bools

    def __post_init__(self) -> None:
        held = np.array(self.chosen, np.bool_)
        if held.ndim not in (2, 3) or held.shape[-2:] != self.layout.edges.shape or not len(held):
            raise ShapeError(
                f"expected edges [source, destination] of shape {list(self.layout.edges.shape)}, or of each "
                f"position, found {list(held.shape)}"
            )
        held &= _edges(self.layout, len(held) if held.ndim == 3 else None)
        held.setflags(write=False)
        object.__setattr__(self, "chosen", held)

    @property
    def positions(self) -> int | None:
        """How many positions it tells apart; None where it is of all of them."""
        return len(self.chosen) if self.chosen.ndim == 3 else None

    # -- made of

    @classmethod
    def whole(cls, layout: Layout, positions: int | None = None) -> Circuit:
        """Every edge: the model as it is. positions: of how many each has edges of its own; None for none."""
        return cls(layout, _edges(layout, positions))

    @classmethod
    def of(cls, layout: Layout, names: Iterable[str], positions: int | None = None) -> Circuit:
        """Edges by name, "m1->a2.h3<v>", with positions "m1->a2.h3<v>@5". Raises ConfigError for one that is
        not there."""
        if positions is None:
            return cls(layout, layout.chosen(list(names)))
        every = _edges(layout, positions)
        found = np.zeros_like(every)
        for name in names:
            edge, _, at = name.partition("@")
            here = layout.chosen([edge])
            if not at.isdecimal() or int(at) >= positions or not (here & every[int(at)]).any():
                raise ConfigError(
                    f"expected an edge at one of {positions} positions, such as "
                    f"{layout.name(0, 0) + '@0'!r}, found {name!r}"
                )
            found[int(at)] |= here
        return cls(layout, found)

    @classmethod
    def top(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """The edges of largest |score| [source, destination], or [position, source, destination]; of equal
        ones the first by position and source."""
        magnitude = _magnitudes(layout, scores)
        order = np.argsort(-magnitude, axis=None, kind="stable")[: _within(size, magnitude)]
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def greedy(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """As many edges one after the other, from the logits down: each time the one of largest |score| into
        a node that is in already, whose source is then in as well."""
        magnitude = _magnitudes(layout, scores)
        order = _from_the_logits(layout, magnitude, _within(size, magnitude))
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def at_random(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """As many edges, drawn evenly and without replacement."""
        every = _edges(layout, positions)
        drawn = np.random.default_rng(seed).choice(np.flatnonzero(every), _within(size, every), replace=False)
        return cls(layout, _among(drawn, every.shape))

    @classmethod
    def grown(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """As many edges, drawn one after the other from the logits down, as `greedy` takes them: each leads
        to the logits, as those of a circuit that does something must."""
        (found,) = cls.growing(layout, (size,), seed=seed, positions=positions)
        return found

    @classmethod
    def growing(
        cls, layout: Layout, sizes: Sequence[int], *, seed: int, positions: int | None = None
    ) -> tuple[Circuit, ...]:
        """`grown` of several sizes, drawn together: each goes on where a smaller one ends."""
        shape = _edges(layout, positions).shape
        scores = np.random.default_rng(seed).permutation(int(np.prod(shape))) + 1.0
        magnitude = _magnitudes(layout, scores.reshape(shape))
        most = max((_within(size, magnitude) for size in sizes), default=0)
        order = _from_the_logits(layout, magnitude, most)
        return tuple(cls(layout, _among(order[:size], shape)) for size in sizes)

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
        return bool((self.chosen & Circuit.of(self.layout, [name], self.positions).chosen).any())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Circuit)
            and self.layout == other.layout
            and bool(np.array_equal(self.chosen, other.chosen))
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        count = int(_edges(self.layout, self.positions).sum())
        where = "" if self.positions is None else f" at {self.positions} positions"
        return f"Circuit({len(self)} of {count} edges{where}, {len(self.nodes)} nodes)"

    def at(self, positions: int) -> Circuit:
        """The same at each of so many positions."""
        if self.positions not in (None, positions):
            raise ConfigError(f"expected a circuit of {positions} positions, found one of {self.positions}")
        return Circuit(self.layout, np.broadcast_to(self.chosen, (positions, *self.layout.edges.shape)))

    @property
    def anywhere(self) -> Circuit:
        """The edges it has at any position."""
        return Circuit(self.layout, np.array(self._by_place.any(0)))

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """Names, destination by destination, positions in order."""
        if self.positions is None:
            return tuple(self.layout.names(self.chosen))
        places = zip(*np.nonzero(self.chosen.transpose(2, 1, 0)), strict=True)
        return tuple(f"{self.layout.name(int(s), int(d))}@{p}" for d, s, p in places)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with an edge, in the order in which they are computed; the logits last."""
        owner, held = self.layout.owner, self._by_place
        with_edges: Bools = np.array(held.any(2))
        position, read = np.nonzero(held.any(1) & (owner >= 0))
        with_edges[position, owner[read]] = True
        names = [
            self._named(self.layout.sources[source], int(at))
            for source, at in zip(*np.nonzero(with_edges.T), strict=True)
        ]
        is_read = held[-1, :, -1].any()
        return (*names, self._named(LOGITS, len(held) - 1)) if is_read else tuple(names)

    def pruned(self) -> Circuit:
        """Without edges of nodes that nothing in it reads or, but for the input, that read nothing in it;
        again, until nothing changes."""
        held, owner, later = self._by_place, self.layout.owner, self.layout.is_seen_later
        while True:
            given: Bools = np.array(held.any(1))
            given[:, later] = np.logical_or.accumulate(given[:, later], axis=0)
            is_reading: Bools = np.zeros(held.shape[:2], np.bool_)
            position, read = np.nonzero(given & (owner >= 0))
            is_reading[position, owner[read]] = True
            is_reading[:, self.layout.sources.index(INPUT)] = True
            stays = held.any(2) & is_reading
            is_read = stays[:, owner] | (owner < 0)
            is_read[:, later] = np.logical_or.accumulate(is_read[::-1, later], axis=0)[::-1]
            left = held & stays[:, :, None] & is_read[:, None]
            if (left == held).all():
                return Circuit(self.layout, held.reshape(self.chosen.shape))
            held = left

    # -- elsewhere

    @property
    def digest(self) -> str:
        """Of the graph's sizes and the edges."""
        return digest("circuit", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads back."""
        sizes = {"heads": self.layout.num_heads, "parallel": list(self.layout.parallel)}
        told = {} if self.positions is None else {"positions": self.positions}
        return {"format": FORMAT, **sizes, **told, "edges": list(self.edges)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Circuit:
        """What `to_json` gave. Raises ConfigError for anything else, naming what is wrong."""
        expected = {"format": int, "heads": int, "parallel": list, "edges": list}
        if not isinstance(told, Mapping) or set(told) - {"positions"} != set(expected):
            found = ", ".join(map(str, told)) if isinstance(told, Mapping) else repr(told)
            raise ConfigError(f"expected a circuit with {', '.join(expected)}, found {found}")
        for name, kind in {**expected, **({"positions": int} if "positions" in told else {})}.items():
            if type(told[name]) is not kind:
                raise ConfigError(f"circuit: expected {name} as {kind.__name__}, found {told[name]!r}")
        if told["format"] != FORMAT:
            raise ConfigError(f"expected a circuit of format {FORMAT}, found {told['format']!r}")
        if told["heads"] < 1 or not told["parallel"] or not all(type(p) is bool for p in told["parallel"]):
            raise ConfigError(
                "circuit: expected heads of at least 1 and, in parallel, true or false for each layer, found "
                f"{told['heads']!r} and {told['parallel']!r}"
            )
        positions = told.get("positions")
        if positions is not None and positions < 1:
            raise ConfigError(f"circuit: expected at least one position, found {positions}")
        names = told["edges"]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ConfigError("circuit: expected the names of edges, each once, found another list")
        return cls.of(Layout(told["heads"], tuple(told["parallel"])), names, positions)

    def node_link(self, scores: Any = None) -> dict[str, Any]:
        """As networkx.node_link_graph(…, edges="edges") reads a directed graph of several edges between two
        nodes: for a head three kinds of them, and with positions a fourth, "attends", from where its keys or
        values are read to later ones of it that write. scores: as the edges, their weights."""
        edges = []
        given = None if scores is None else np.asarray(scores).reshape(self._by_place.shape)
        for place in zip(*np.nonzero(self._by_place), strict=True):
            at, source, destination = map(int, place)
            node, _, kind = self.layout.destinations[destination].partition("<")
            ends = {
                "source": self._named(self.layout.sources[source], at),
                "target": self._named(node, at),
                "key": kind.rstrip(">") or "all",
            }
            edges.append(ends | ({} if given is None else {"weight": float(given[at, source, destination])}))
        nodes = [{"id": name} for name in self.nodes]
        edges += self._attending()
        return {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": edges}

    def _attending(self) -> list[dict[str, Any]]:
        """From each head at a position, where its keys or values are read, to later ones of it that write."""
        is_key: Bools = np.array(self._by_place.any(1)) & self.layout.is_seen_later
        writes: Bools = np.array(self._by_place.any(2))
        found = {}
        for start, read in zip(*np.nonzero(is_key), strict=True):
            head = int(self.layout.owner[read])
            name = self.layout.sources[head]
            for end in range(int(start) + 1, len(writes)):
                if writes[end, head]:
                    ends = self._named(name, int(start)), self._named(name, end)
                    found[ends] = {"source": ends[0], "target": ends[1], "key": "attends"}
        return list(found.values())

    @property
    def _by_place(self) -> Bools:
        """[position, source, destination]; of one place where positions are not told apart."""
        found: Bools = self.chosen.reshape(-1, *self.layout.edges.shape)
        return found

    def _named(self, node: str, position: int) -> str:
        return node if self.positions is None else f"{node}@{position}"

    def _alike(self, other: Circuit) -> Bools:
        if other.layout != self.layout:
            raise ConfigError(
                f"expected circuits of one graph, found {self.layout.num_layers} layers of "
                f"{self.layout.num_heads} heads and {other.layout.num_layers} of {other.layout.num_heads}, "
                "or layers that are parallel in one of them alone"
            )
        if other.positions != self.positions:
            raise ConfigError(
                f"expected circuits of as many positions, found {self.positions or 'all together'} and "
                f"{other.positions or 'all together'}; at(…) says one of all together at each"
            )
        return other.chosen


def _edges(layout: Layout, positions: int | None) -> Bools:
    """Which edges there are, [source, destination], or at each of some positions."""
    return layout.edges if positions is None else layout.edges_at(positions)


def _among(places: Any, shape: tuple[int, ...]) -> Bools:
    """True at some places of an array, counted in its order."""
    found: Bools = np.zeros(int(np.prod(shape)), np.bool_)
    found[places] = True
    return found.reshape(shape)


def _magnitudes(layout: Layout, scores: Any) -> Floats:
    """|score| of every edge, -inf where there is none; ShapeError, or ConfigError for what is no number."""
    given = np.asarray(scores, np.float64)
    if given.ndim not in (2, 3) or given.shape[-2:] != layout.edges.shape or not len(given):
        raise ShapeError(
            f"expected scores [source, destination] of shape {list(layout.edges.shape)}, found "
            f"{list(given.shape)}; scores by position have that axis first"
        )
    every = _edges(layout, len(given) if given.ndim == 3 else None)
    if not np.isfinite(given[every]).all():
        raise ConfigError("expected a finite score for every edge, found NaN or infinity")
    return np.where(every, np.abs(given), -np.inf)


def _from_the_logits(layout: Layout, magnitude: Floats, size: int) -> Ints:
    """Places of edges, in the order in which `Circuit.greedy` takes them; as many as asked for lead there."""
    by_place = magnitude.reshape(-1, *layout.edges.shape)
    is_waiting = np.zeros_like(by_place, np.bool_)
    waiting: list[tuple[float, int]] = []

    def enter(position: int, node: int) -> None:
        """Queue the edges into a node, the largest first and of equal ones the first by source."""
        into = (layout.owner == node) & (by_place > -np.inf) & ~is_waiting
        into[position + 1 :] = False
        into[:position, :, ~layout.is_seen_later] = False
        is_waiting[into] = True
        for place in np.flatnonzero(into).tolist():
            heapq.heappush(waiting, (-by_place.flat[place], place))

    last = len(by_place) - 1
    entered = {(last, LEAVES_NOTHING)}
    enter(last, LEAVES_NOTHING)
    found: list[int] = []
    while waiting and len(found) < size:
        place = heapq.heappop(waiting)[1]
        found.append(place)
        position, source, _ = map(int, np.unravel_index(place, by_place.shape))
        if (position, source) not in entered:
            entered.add((position, source))
            enter(position, source)
    return np.array(found, np.int64)


def _within(size: int, every: Any) -> int:
    """A size that there are edges for. every: bool, or magnitudes with -inf where there is none."""
    most = int((every > -np.inf).sum()) if every.dtype != np.bool_ else int(every.sum())
    if not 0 <= size <= most:
        raise ConfigError(f"expected a size in 0..{most} edges, found {size}")
    return size
