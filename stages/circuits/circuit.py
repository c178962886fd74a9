"""Circuit: a set of edges of a model's graph that is claimed to do a task, as a value.

    circuit = Circuit.top(layout, scores, 150).pruned()
    complement = ~circuit                            # every other edge
    Circuit.from_json(circuit.to_json()) == circuit

Selection follows EAP-IG (Hanna et al. 2024, "Have Faith in Faithfulness", section 2.3), and so does pruning:
nodes without incoming or without outgoing edges are removed with their edges.

A circuit may have edges by position (Haklay et al. 2025, "Position-aware Automatic Circuit Discovery"):
"m1->a2.h3<v>@5" is what the destination reads of the source at position 5. What a head reads there for keys
and values enters its output at this and later positions; a node is then a head or MLP at a position.

Border: names and numbers of edges; no model. Never imports torch.

Axes: position (if edges are by position), source, destination, as in forward/edges/layout.py.
"""

from __future__ import annotations

import hashlib
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
"""Version of the JSON form."""
LEAVES_NOTHING = -1
"""`Layout.owner` of the logits, which are a destination but no source."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges of a graph.

    Raises:
        ShapeError: for an array whose shape does not fit the graph.
    """

    layout: Layout
    """Sources, destinations and possible edges of the model's graph."""
    chosen: Bools
    """Edges of the circuit, bool [source, destination], or [position, source, destination] for prompts of
    that length; copied, and set to False where the graph has no edge.
    """

    def __post_init__(self) -> None:
        edges = np.array(self.chosen, np.bool_)
        if edges.ndim not in (2, 3) or edges.shape[-2:] != self.layout.edges.shape or not len(edges):
            raise ShapeError(
                f"expected edges [source, destination] of shape {list(self.layout.edges.shape)}, or of each "
                f"position, found {list(edges.shape)}"
            )
        # Impossible edges are dropped silently, so that complements stay within the graph.
        edges &= _edges(self.layout, len(edges) if edges.ndim == 3 else None)
        # Read-only, as the names of edges and nodes are derived once.
        edges.setflags(write=False)
        object.__setattr__(self, "chosen", edges)

    @property
    def positions(self) -> int | None:
        """Length of the position axis; None for a circuit whose edges hold at all positions."""
        return len(self.chosen) if self.chosen.ndim == 3 else None

    # -- constructors

    @classmethod
    def whole(cls, layout: Layout, positions: int | None = None) -> Circuit:
        """Every edge: the full model.

        Arguments:
            layout: graph of the model.
            positions: number of positions with edges of their own; None for edges at all positions.
        """
        return cls(layout, _edges(layout, positions))

    @classmethod
    def of(cls, layout: Layout, names: Iterable[str], positions: int | None = None) -> Circuit:
        """Edges by name.

        Arguments:
            layout: graph of the model.
            names: "m1->a2.h3<v>", or with positions "m1->a2.h3<v>@5".
            positions: number of positions with edges of their own; None for edges at all positions.

        Raises:
            ConfigError: for an edge that does not exist.
        """
        if positions is None:
            return cls(layout, layout.chosen(list(names)))
        all_edges = _edges(layout, positions)
        edges = np.zeros_like(all_edges)
        for name in names:
            edge, _, position = name.partition("@")
            named = layout.chosen([edge])
            if (
                not position.isdecimal()
                or int(position) >= positions
                or not (named & all_edges[int(position)]).any()
            ):
                raise ConfigError(
                    f"expected an edge at one of {positions} positions, such as "
                    f"{layout.name(0, 0) + '@0'!r}, found {name!r}"
                )
            edges[int(position)] |= named
        return cls(layout, edges)

    @classmethod
    def top(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """The edges of largest |score|; ties go to the first by position and source.

        Arguments:
            layout: graph of the model.
            scores: [source, destination], or [position, source, destination].
            size: number of edges.
        """
        magnitude = _magnitudes(layout, scores)
        # Stable on -|score|: ties keep the order of position, source and destination.
        order = np.argsort(-magnitude, axis=None, kind="stable")[: _within(size, magnitude)]
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def greedy(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """Edges taken backwards from the logits: each time the largest |score| into a node of the circuit.

        The source of each edge joins the circuit, so that every edge leads to the logits.

        Arguments:
            layout: graph of the model.
            scores: [source, destination], or [position, source, destination].
            size: number of edges.
        """
        magnitude = _magnitudes(layout, scores)
        order = _from_the_logits(layout, magnitude, _within(size, magnitude))
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def at_random(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """Random edges, uniform and without replacement.

        Arguments:
            layout: graph of the model.
            size: number of edges.
            seed: seed of the draw.
            positions: number of positions with edges of their own; None for edges at all positions.
        """
        all_edges = _edges(layout, positions)
        places = np.random.default_rng(seed).choice(
            np.flatnonzero(all_edges), _within(size, all_edges), replace=False
        )
        return cls(layout, _among(places, all_edges.shape))

    @classmethod
    def grown(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """Random edges taken backwards from the logits, as `greedy` takes them: each leads to the logits.

        A fairer control than `at_random`, most of whose edges reach nothing.

        Arguments:
            layout: graph of the model.
            size: number of edges.
            seed: seed of the draw.
            positions: number of positions with edges of their own; None for edges at all positions.
        """
        (circuit,) = cls.growing(layout, (size,), seed=seed, positions=positions)
        return circuit

    @classmethod
    def growing(
        cls, layout: Layout, sizes: Sequence[int], *, seed: int, positions: int | None = None
    ) -> tuple[Circuit, ...]:
        """`grown` of several sizes; each circuit contains the smaller ones.

        Arguments:
            layout: graph of the model.
            sizes: numbers of edges.
            seed: seed of the draw.
            positions: number of positions with edges of their own; None for edges at all positions.
        """
        shape = _edges(layout, positions).shape
        # A random order as scores makes `greedy` draw uniformly among the edges into the circuit.
        scores = np.random.default_rng(seed).permutation(int(np.prod(shape))) + 1.0
        magnitude = _magnitudes(layout, scores.reshape(shape))
        largest = max((_within(size, magnitude) for size in sizes), default=0)
        order = _from_the_logits(layout, magnitude, largest)
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
        # Arrays are not hashable; equal circuits have equal digests.
        return hash(self.digest)

    def __repr__(self) -> str:
        count = int(_edges(self.layout, self.positions).sum())
        where = "" if self.positions is None else f" at {self.positions} positions"
        return f"Circuit({len(self)} of {count} edges{where}, {len(self.nodes)} nodes)"

    def at(self, positions: int) -> Circuit:
        """This circuit with a position axis: the same edges at each of `positions` positions.

        Raises:
            ConfigError: for a circuit with another number of positions.
        """
        if self.positions not in (None, positions):
            raise ConfigError(f"expected a circuit of {positions} positions, found one of {self.positions}")
        return Circuit(self.layout, np.broadcast_to(self.chosen, (positions, *self.layout.edges.shape)))

    @property
    def anywhere(self) -> Circuit:
        """Edges that the circuit has at any position, without positions."""
        return Circuit(self.layout, np.array(self._by_position.any(0)))

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """Names of the edges, by destination, source and position."""
        if self.positions is None:
            return tuple(self.layout.names(self.chosen))
        places = zip(*np.nonzero(self.chosen.transpose(2, 1, 0)), strict=True)
        return tuple(f"{self.layout.name(int(s), int(d))}@{p}" for d, s, p in places)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with an edge, in order of computation; the logits last."""
        owner, by_position = self.layout.owner, self._by_position
        with_edges: Bools = np.array(by_position.any(2))
        position, destination = np.nonzero(by_position.any(1) & (owner >= 0))
        with_edges[position, owner[destination]] = True
        names = [
            self._named(self.layout.sources[source], int(node_position))
            for source, node_position in zip(*np.nonzero(with_edges.T), strict=True)
        ]
        # The logits are the last destination, and are read at the last position only.
        is_read = by_position[-1, :, -1].any()
        return (*names, self._named(LOGITS, len(by_position) - 1)) if is_read else tuple(names)

    def pruned(self) -> Circuit:
        """The circuit without edges of nodes that have no outgoing or (except the input) no incoming edges.

        Repeated until nothing changes.
        """
        edges, owner, later = self._by_position, self.layout.owner, self.layout.is_seen_later
        # One node removed may leave another without edges, hence the loop.
        while True:
            has_input: Bools = np.array(edges.any(1))
            has_input[:, later] = np.logical_or.accumulate(has_input[:, later], axis=0)
            # A key or value read at a position reaches the head's output at all later positions: accumulate.
            is_reading: Bools = np.zeros(edges.shape[:2], np.bool_)
            position, destination = np.nonzero(has_input & (owner >= 0))
            is_reading[position, owner[destination]] = True
            is_reading[:, self.layout.sources.index(INPUT)] = True
            is_kept = edges.any(2) & is_reading
            is_read = is_kept[:, owner] | (owner < 0)
            is_read[:, later] = np.logical_or.accumulate(is_read[::-1, later], axis=0)[::-1]
            remaining = edges & is_kept[:, :, None] & is_read[:, None]
            if (remaining == edges).all():
                return Circuit(self.layout, edges.reshape(self.chosen.shape))
            edges = remaining

    # -- identity and exchange

    @cached_property
    def digest(self) -> str:
        """Digest of the graph's sizes and the edges."""
        # Packed bits instead of names: an evaluation digests hundreds of circuits of 100,000 edges.
        edges = hashlib.sha256(np.packbits(self.chosen).tobytes()).hexdigest()
        return digest("circuit", self._graph_json() | {"edges": edges})

    def _graph_json(self) -> dict[str, Any]:
        """Format, sizes of the graph and number of positions, as plain values."""
        sizes = {"heads": self.layout.num_heads, "parallel": list(self.layout.parallel)}
        optional = {} if self.positions is None else {"positions": self.positions}
        return {"format": FORMAT, **sizes, **optional}

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads back."""
        return {**self._graph_json(), "edges": list(self.edges)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Circuit:
        """Circuit from a record made by `to_json`.

        Raises:
            ConfigError: for an invalid record, naming the wrong field.
        """
        expected = {"format": int, "heads": int, "parallel": list, "edges": list}
        if not isinstance(record, Mapping) or set(record) - {"positions"} != set(expected):
            found = ", ".join(map(str, record)) if isinstance(record, Mapping) else repr(record)
            raise ConfigError(f"expected a circuit with {', '.join(expected)}, found {found}")
        for name, kind in {**expected, **({"positions": int} if "positions" in record else {})}.items():
            # type, not isinstance: true of JSON would pass as an integer.
            if type(record[name]) is not kind:
                raise ConfigError(f"circuit: expected {name} as {kind.__name__}, found {record[name]!r}")
        if record["format"] != FORMAT:
            raise ConfigError(f"expected a circuit of format {FORMAT}, found {record['format']!r}")
        if (
            record["heads"] < 1
            or not record["parallel"]
            or not all(type(p) is bool for p in record["parallel"])
        ):
            raise ConfigError(
                "circuit: expected heads of at least 1 and, in parallel, true or false for each layer, found "
                f"{record['heads']!r} and {record['parallel']!r}"
            )
        positions = record.get("positions")
        if positions is not None and positions < 1:
            raise ConfigError(f"circuit: expected at least one position, found {positions}")
        names = record["edges"]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ConfigError("circuit: expected the names of edges, each once, found another list")
        return cls.of(Layout(record["heads"], tuple(record["parallel"])), names, positions)

    def node_link(self, scores: Any = None) -> dict[str, Any]:
        """The graph as networkx.node_link_graph(…, edges="edges") reads it: directed, with parallel edges.

        A head has edges of three kinds, its key. With positions there is a fourth, "attends", from each
        position at which keys or values are read to later positions of the head.

        Arguments:
            scores: weight of each edge, shaped as the edges; None for no weights.
        """
        edges = []
        weights = None if scores is None else np.asarray(scores).reshape(self._by_position.shape)
        for index in zip(*np.nonzero(self._by_position), strict=True):
            position, source, destination = map(int, index)
            # Heads read by kind, "a2.h3<v>"; MLPs and logits have one input, called "all".
            node, _, kind = self.layout.destinations[destination].partition("<")
            ends = {
                "source": self._named(self.layout.sources[source], position),
                "target": self._named(node, position),
                "key": kind.rstrip(">") or "all",
            }
            edges.append(
                ends | ({} if weights is None else {"weight": float(weights[position, source, destination])})
            )
        nodes = [{"id": name} for name in self.nodes]
        edges += self._attending()
        return {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": edges}

    def _attending(self) -> list[dict[str, Any]]:
        """Edges "attends", from a head where its keys or values are read, to itself at later positions."""
        is_key: Bools = np.array(self._by_position.any(1)) & self.layout.is_seen_later
        writes: Bools = np.array(self._by_position.any(2))
        links = {}
        for start, destination in zip(*np.nonzero(is_key), strict=True):
            head = int(self.layout.owner[destination])
            name = self.layout.sources[head]
            # A dict: keys and values of one head at one position give one link, not two.
            for end in range(int(start) + 1, len(writes)):
                if writes[end, head]:
                    ends = self._named(name, int(start)), self._named(name, end)
                    links[ends] = {"source": ends[0], "target": ends[1], "key": "attends"}
        return list(links.values())

    @property
    def _by_position(self) -> Bools:
        """Edges [position, source, destination], with one position if the circuit has none."""
        edges: Bools = self.chosen.reshape(-1, *self.layout.edges.shape)
        return edges

    def _named(self, node: str, position: int) -> str:
        return node if self.positions is None else f"{node}@{position}"

    def _alike(self, other: Circuit) -> Bools:
        """Edges of a circuit on the same graph; ConfigError for another graph, or other positions."""
        if other.layout != self.layout:
            raise ConfigError(
                f"expected circuits of one graph, found {self.layout.num_layers} layers of "
                f"{self.layout.num_heads} heads and {other.layout.num_layers} of {other.layout.num_heads}, "
                "or layers with parallel attention and MLP in one of them only"
            )
        if other.positions != self.positions:
            raise ConfigError(
                f"expected circuits of equally many positions, found {self.positions or 'none'} and "
                f"{other.positions or 'none'}; at(…) repeats the edges of a circuit at each position"
            )
        return other.chosen


def _edges(layout: Layout, positions: int | None) -> Bools:
    """Edges of the graph, bool [source, destination], or at each of `positions`."""
    return layout.edges if positions is None else layout.edges_at(positions)


def _among(indices: Any, shape: tuple[int, ...]) -> Bools:
    """Bool array that is True at flat indices."""
    mask: Bools = np.zeros(int(np.prod(shape)), np.bool_)
    mask[indices] = True
    return mask.reshape(shape)


def _magnitudes(layout: Layout, scores: Any) -> Floats:
    """Absolute score of every edge, -inf where the graph has no edge.

    Raises:
        ShapeError: for scores of another shape than the graph.
        ConfigError: for an edge whose score is not finite.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim not in (2, 3) or values.shape[-2:] != layout.edges.shape or not len(values):
        raise ShapeError(
            f"expected scores [source, destination] of shape {list(layout.edges.shape)}, found "
            f"{list(values.shape)}; scores by position have that axis first"
        )
    is_edge = _edges(layout, len(values) if values.ndim == 3 else None)
    if not np.isfinite(values[is_edge]).all():
        raise ConfigError("expected a finite score for every edge, found NaN or infinity")
    # -inf sorts impossible edges last, behind edges of score 0.
    return np.where(is_edge, np.abs(values), -np.inf)


def _from_the_logits(layout: Layout, magnitude: Floats, size: int) -> Ints:
    """Flat indices of edges in the order in which `Circuit.greedy` takes them.

    Arguments:
        magnitude: |score| of every edge, -inf where there is none.
        size: number of edges; fewer are returned if no more lead to the logits.
    """
    # Taking edges from a priority queue one by one takes seconds in a graph of 100,000 edges. The same order
    # follows from the moments at which nodes join, of which there are few:
    # edges into a node wait from the moment it joins, and each moment lasts until the edge is taken that
    # brings in the next node.
    by_position = magnitude.reshape(-1, *layout.edges.shape)
    n_positions, n_sources, n_destinations = by_position.shape
    # Rank 0 is the largest score; stable, so that of equal scores the smaller index comes first.
    index_of_rank = np.argsort(-by_position, axis=None, kind="stable")
    n_edges = int((by_position > -np.inf).sum())
    rank = np.empty(by_position.shape, np.int64)
    rank.flat[index_of_rank] = np.arange(rank.size)
    waits_since = np.full((n_positions, n_destinations), -1)
    best_rank = np.full((n_positions, n_sources), n_edges)
    has_joined = np.zeros((n_positions, n_sources), np.bool_)
    last_ranks: list[int] = []
    position, node = n_positions - 1, LEAVES_NOTHING
    while True:
        is_input = layout.owner == node
        is_new = np.zeros_like(waits_since, np.bool_)
        # A node at a position reads queries and MLP inputs there, keys and values there and before.
        is_new[position] = is_input
        is_new[:position] = is_input & layout.is_seen_later
        is_new &= waits_since < 0
        waits_since[is_new] = len(last_ranks)
        at_positions, destinations = np.nonzero(is_new)
        np.minimum.at(best_rank, at_positions, rank[at_positions, :, destinations])
        open_ranks = np.where(has_joined, n_edges, best_rank)
        last_ranks.append(int(open_ranks.min()))
        if last_ranks[-1] >= n_edges:
            break
        position, node = divmod(int(open_ranks.argmin()), n_sources)
        has_joined[position, node] = True
    ranks, moments = [], []
    for moment in range(len(last_ranks)):
        at_positions, destinations = np.nonzero(waits_since == moment)
        waiting = rank[at_positions, :, destinations].ravel()
        waiting = waiting[waiting < n_edges]
        # Taken in the first moment that lasts until a rank as large as its own.
        ranks.append(waiting)
        moments.append(moment + np.searchsorted(np.maximum.accumulate(last_ranks[moment:]), waiting))
    all_ranks = np.concatenate(ranks)
    taken = all_ranks[np.lexsort((all_ranks, np.concatenate(moments)))]
    order: Ints = index_of_rank[taken[:size]]
    return order


def _within(size: int, edges: Any) -> int:
    """`size`, if the graph has as many edges; else raises ConfigError.

    Arguments:
        edges: bool, or magnitudes with -inf where there is no edge.
    """
    n_edges = int((edges > -np.inf).sum()) if edges.dtype != np.bool_ else int(edges.sum())
    if not 0 <= size <= n_edges:
        raise ConfigError(f"expected a size in 0..{n_edges} edges, found {size}")
    return size
