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
"""Value of `Layout.owner` for the logits, which are a destination but not a source."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """A set of edges of a model's graph that is claimed to do a task.

    Raises:
        ShapeError: The shape of the array of edges does not fit the graph.
    """

    layout: Layout
    """Sources, destinations and possible edges of the model's graph."""
    chosen: Bools
    """Edges of the circuit, bool [source, destination], or by position [position, source, destination].

    The array is copied, and set to False where the graph has no edge.
    """

    def __post_init__(self) -> None:
        edges = np.array(self.chosen, np.bool_)
        if edges.ndim not in (2, 3) or edges.shape[-2:] != self.layout.edges.shape or not len(edges):
            raise ShapeError(
                "expected the edges of a circuit as an array [source, destination] of shape "
                f"{list(self.layout.edges.shape)}, or with a first axis of positions, found shape "
                f"{list(edges.shape)}"
            )
        # Impossible edges are dropped silently, so that complements stay within the graph.
        edges &= _edges(self.layout, len(edges) if edges.ndim == 3 else None)
        # Read-only, as the names of edges and nodes are derived once.
        edges.setflags(write=False)
        object.__setattr__(self, "chosen", edges)

    @property
    def positions(self) -> int | None:
        """Number of positions with separate edges; None for edges at all positions."""
        return len(self.chosen) if self.chosen.ndim == 3 else None

    # -- constructors

    @classmethod
    def whole(cls, layout: Layout, positions: int | None = None) -> Circuit:
        """The circuit of all edges, which is the full model.

        Arguments:
            layout: Graph of the model.
            positions: Number of positions with edges of their own; None for edges at all positions.
        """
        return cls(layout, _edges(layout, positions))

    @classmethod
    def of(cls, layout: Layout, names: Iterable[str], positions: int | None = None) -> Circuit:
        """Circuit from edge names.

        Arguments:
            layout: Graph of the model.
            names: Names such as "m1->a2.h3<v>", or with positions "m1->a2.h3<v>@5".
            positions: Number of positions with edges of their own; None for edges at all positions.

        Raises:
            ConfigError: An edge does not exist.
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
                    f"expected the name of an edge at a position from 0 to {positions - 1}, such as "
                    f"{layout.name(0, 0) + '@0'!r}, found {name!r}"
                )
            edges[int(position)] |= named
        return cls(layout, edges)

    @classmethod
    def top(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """The circuit of the edges with largest |score|; the first by position and source wins ties.

        Arguments:
            layout: Graph of the model.
            scores: Scores [source, destination], or [position, source, destination].
            size: Number of edges.
        """
        magnitude = _magnitudes(layout, scores)
        # Stable on -|score|: ties keep the order of position, source and destination.
        order = np.argsort(-magnitude, axis=None, kind="stable")[: _within(size, magnitude)]
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def greedy(cls, layout: Layout, scores: Any, size: int) -> Circuit:
        """A circuit grown backwards from the logits, each time by the edge of largest |score| into its nodes.

        The source of each edge joins the circuit, so that every edge leads to the logits.

        Arguments:
            layout: Graph of the model.
            scores: Scores [source, destination], or [position, source, destination].
            size: Number of edges.
        """
        magnitude = _magnitudes(layout, scores)
        order = _from_the_logits(layout, magnitude, _within(size, magnitude))
        return cls(layout, _among(order, magnitude.shape))

    @classmethod
    def at_random(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """A circuit of random edges, drawn uniformly without replacement.

        Arguments:
            layout: Graph of the model.
            size: Number of edges.
            seed: Seed of the draw.
            positions: Number of positions with edges of their own; None for edges at all positions.
        """
        all_edges = _edges(layout, positions)
        places = np.random.default_rng(seed).choice(
            np.flatnonzero(all_edges), _within(size, all_edges), replace=False
        )
        return cls(layout, _among(places, all_edges.shape))

    @classmethod
    def grown(cls, layout: Layout, size: int, *, seed: int, positions: int | None = None) -> Circuit:
        """A circuit of random edges grown backwards from the logits, so that each edge leads to the logits.

        It is a fairer control than `at_random`, most of whose edges have no effect.

        Arguments:
            layout: Graph of the model.
            size: Number of edges.
            seed: Seed of the draw.
            positions: Number of positions with edges of their own; None for edges at all positions.
        """
        (circuit,) = cls.growing(layout, (size,), seed=seed, positions=positions)
        return circuit

    @classmethod
    def growing(
        cls, layout: Layout, sizes: Sequence[int], *, seed: int, positions: int | None = None
    ) -> tuple[Circuit, ...]:
        """Random circuits of several sizes, as `grown` makes them; each contains the smaller ones.

        Arguments:
            layout: Graph of the model.
            sizes: Numbers of edges.
            seed: Seed of the draw.
            positions: Number of positions with edges of their own; None for edges at all positions.
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
        """This circuit with edges by position: the same edges at each of `positions` positions.

        Raises:
            ConfigError: The circuit has another number of positions.
        """
        if self.positions not in (None, positions):
            raise ConfigError(
                f"expected a circuit with edges at {positions} positions, found one with {self.positions}"
            )
        return Circuit(self.layout, np.broadcast_to(self.chosen, (positions, *self.layout.edges.shape)))

    @property
    def anywhere(self) -> Circuit:
        """The circuit without positions, of all edges that this one has at some position."""
        return Circuit(self.layout, np.array(self._by_position.any(0)))

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """Names of the edges, sorted by destination, source and position."""
        if self.positions is None:
            return tuple(self.layout.names(self.chosen))
        places = zip(*np.nonzero(self.chosen.transpose(2, 1, 0)), strict=True)
        return tuple(f"{self.layout.name(int(s), int(d))}@{p}" for d, s, p in places)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that have an edge, in order of computation; the logits are last."""
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
        """The circuit without the edges of nodes that lack outgoing or (except the input) incoming edges.

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
        """The circuit as JSON values, which `from_json` reads back."""
        return {**self._graph_json(), "edges": list(self.edges)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Circuit:
        """Circuit from a record that `to_json` made.

        Raises:
            ConfigError: The record is invalid; the message names the wrong field.
        """
        expected = {"format": int, "heads": int, "parallel": list, "edges": list}
        if not isinstance(record, Mapping) or set(record) - {"positions"} != set(expected):
            found = ", ".join(map(str, record)) if isinstance(record, Mapping) else repr(record)
            raise ConfigError(
                f"expected the record of a circuit with the fields {', '.join(expected)}, found {found}"
            )
        for name, kind in {**expected, **({"positions": int} if "positions" in record else {})}.items():
            # type, not isinstance: true of JSON would pass as an integer.
            if type(record[name]) is not kind:
                raise ConfigError(
                    f"expected the field {name} of a circuit to be {kind.__name__}, found {record[name]!r}"
                )
        if record["format"] != FORMAT:
            raise ConfigError(f"expected a circuit in format {FORMAT}, found format {record['format']!r}")
        if (
            record["heads"] < 1
            or not record["parallel"]
            or not all(type(p) is bool for p in record["parallel"])
        ):
            raise ConfigError(
                "expected the field heads of a circuit to be at least 1, and parallel to hold true or false "
                f"for each layer, found {record['heads']!r} and {record['parallel']!r}"
            )
        positions = record.get("positions")
        if positions is not None and positions < 1:
            raise ConfigError(
                f"expected the field positions of a circuit to be at least 1, found {positions}"
            )
        names = record["edges"]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ConfigError(
                "expected the field edges of a circuit to list names of edges, each once, found other values "
                "or repeated names"
            )
        return cls.of(Layout(record["heads"], tuple(record["parallel"])), names, positions)

    def node_link(self, scores: Any = None) -> dict[str, Any]:
        """The circuit as JSON that networkx.node_link_graph(..., edges="edges") reads: a directed multigraph.

        The key of an edge into a head is the input that it enters, "q", "k" or "v"; of others "all". With
        positions there are also edges with the key "attends", from each position at which keys or values are
        read to later positions of the same head.

        Arguments:
            scores: Weight of each edge, in the shape of the edges; None for no weights.
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
        """Edges with the key "attends", from a head reading keys or values to itself at later positions."""
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
        """Edges bool [position, source, destination]; a circuit without positions gets a single one."""
        edges: Bools = self.chosen.reshape(-1, *self.layout.edges.shape)
        return edges

    def _named(self, node: str, position: int) -> str:
        return node if self.positions is None else f"{node}@{position}"

    def _alike(self, other: Circuit) -> Bools:
        """Edges of another circuit; ConfigError if it is of another graph, or has other positions."""
        if other.layout != self.layout:
            raise ConfigError(
                f"expected two circuits of one model's graph, found {self.layout.num_layers} layers of "
                f"{self.layout.num_heads} heads and {other.layout.num_layers} layers of "
                f"{other.layout.num_heads} heads, or attention parallel to the MLP in one of them only"
            )
        if other.positions != self.positions:
            raise ConfigError(
                f"expected two circuits with equally many positions, found {self.positions or 'none'} and "
                f"{other.positions or 'none'}; repeat the edges of one at each position with "
                "circuit.at(positions)"
            )
        return other.chosen


def _edges(layout: Layout, positions: int | None) -> Bools:
    """All edges of a graph, bool [source, destination], or [position, source, destination]."""
    return layout.edges if positions is None else layout.edges_at(positions)


def _among(indices: Any, shape: tuple[int, ...]) -> Bools:
    """Bool array of a shape that is True at some flat indices."""
    mask: Bools = np.zeros(int(np.prod(shape)), np.bool_)
    mask[indices] = True
    return mask.reshape(shape)


def _magnitudes(layout: Layout, scores: Any) -> Floats:
    """Absolute score of every edge, float64 in the shape of the edges; -inf where the graph has no edge.

    Raises:
        ShapeError: The scores have another shape than the edges.
        ConfigError: The score of an edge is infinite or NaN.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim not in (2, 3) or values.shape[-2:] != layout.edges.shape or not len(values):
        raise ShapeError(
            f"expected edge scores [source, destination] of shape {list(layout.edges.shape)}, or with a "
            f"first axis of positions, found shape {list(values.shape)}"
        )
    is_edge = _edges(layout, len(values) if values.ndim == 3 else None)
    if not np.isfinite(values[is_edge]).all():
        raise ConfigError("expected a finite score for every edge of the graph, found NaN or infinity")
    # -inf sorts impossible edges last, behind edges of score 0.
    return np.where(is_edge, np.abs(values), -np.inf)


def _from_the_logits(layout: Layout, magnitude: Floats, size: int) -> Ints:
    """Flat indices of edges, in the order in which a circuit grows backwards from the logits.

    Arguments:
        layout: Graph of the model.
        magnitude: |score| of every edge, -inf where there is none.
        size: Number of edges; fewer are returned if no more lead to the logits.
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
    """The size, after checking that a graph has as many edges; ConfigError if not.

    Arguments:
        size: Number of edges of a circuit.
        edges: Edges of the graph as bool, or their magnitudes, -inf where there is no edge.
    """
    n_edges = int((edges > -np.inf).sum()) if edges.dtype != np.bool_ else int(edges.sum())
    if not 0 <= size <= n_edges:
        raise ConfigError(
            f"expected a circuit of 0 to {n_edges} edges, all that the graph has, found size {size}"
        )
    return size
