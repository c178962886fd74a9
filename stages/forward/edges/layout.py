"""Layout: the sources and destinations of a model, and the edges between them.

A model whose parts only add to one stream is a graph: what a part reads is a constant plus the sum of what
all earlier parts have added, so each addend is an edge that can be changed by itself (Elhage et al., A
Mathematical Framework for Transformer Circuits, 2021; Goldowsky-Dill et al., Localizing Model Behavior with
Path Patching, 2023). Sources are the token embedding, each head and each MLP; destinations are queries, keys
and values of each head, each MLP, and the logits. Heads that share keys and values are still separate
destinations.

Names and order are those of EAP-IG (Hanna et al., Have Faith in Faithfulness, 2024):

    sources        input, then in each layer a0.h0 a0.h1 … m0
    destinations   in each layer a0.h0<q> … a0.h0<k> … a0.h0<v> … m0, then logits

Works on an architecture, names and numbers. Never imports torch. Axes: source, destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ....store.errors import ConfigError
from ..architectures.architecture import Architecture

__all__ = ["INPUT", "KINDS", "LOGITS", "Bools", "Layout"]

Bools = npt.NDArray[np.bool_]
INPUT, LOGITS = "input", "logits"
KINDS = ("q", "k", "v")
"""Inputs of a head, in the order of destinations."""
_NEEDED = ("resid_pre", "q", "k", "v", "z", "attn_out", "mlp_out")


@dataclass(frozen=True)
class Layout:
    """Graph of a model: destinations (heads, MLPs, logits) read what sources add to the residual stream.

    Sources are the token embedding, each head and each MLP.
    """

    num_heads: int
    """Query heads per layer."""
    parallel: tuple[bool, ...]
    """By layer, whether MLP and heads read the same stream, so that no edge goes from heads to the MLP."""

    @classmethod
    def of(cls, config: Architecture) -> Layout:
        """Read the graph of a model from its architecture: heads per layer, and which layers are parallel.

        Arguments:
            config: architecture of the model.

        Raises:
            ConfigError: for a model without a language head, or whose heads and MLPs do more than add to one
                residual stream.
        """
        config.require_vocabulary()
        for layer in range(config.num_layers):
            if (reason := _obstacle(config, layer)) is not None:
                raise ConfigError(
                    "edges need layers whose heads and MLP add to one residual stream, which each reads "
                    f"through a norm of its own; found {reason} in layer {layer} of {config.model_type}; "
                    "patch whole activations instead, with the workflow activation_patching"
                )
        outside = config.tensors.outside
        # Inside a norm, positions and token embedding do not add up: neither is a separate source.
        if "embed_norm" in outside and "positions" in outside:
            raise ConfigError(
                "edges need position embeddings that are added to the residual stream; found them inside the "
                f"norm of the embedding of {config.model_type}; patch whole activations instead, with the "
                "workflow activation_patching"
            )
        return cls(config.axis_sizes["head"], tuple(layer.is_parallel for layer in config.layers))

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.parallel)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of all sources in the order of computation: "input", then "a0.h0", …, "m0" of each layer."""
        names = [INPUT]
        for layer in range(self.num_layers):
            names += [f"a{layer}.h{head}" for head in range(self.num_heads)]
            names.append(f"m{layer}")
        return tuple(names)

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """Names of all destinations in the order of computation: "a0.h0<q>", …, "m0", …, "logits"."""
        names = []
        for layer in range(self.num_layers):
            names += [f"a{layer}.h{head}<{kind}>" for kind in KINDS for head in range(self.num_heads)]
            names.append(f"m{layer}")
        return (*names, LOGITS)

    def heads(self, layer: int) -> slice:
        """Slice of the sources that are a layer's heads."""
        start = 1 + layer * (self.num_heads + 1)
        return slice(start, start + self.num_heads)

    def mlp(self, layer: int) -> int:
        """Index of a layer's MLP among the sources."""
        return int(self.heads(layer).stop)

    def inputs(self, layer: int, kind: str | None = None) -> slice:
        """Slice of the destinations that are the queries, keys and values of a layer's heads.

        Arguments:
            layer: layer index.
            kind: "q", "k" or "v"; None for all three.
        """
        start = layer * (3 * self.num_heads + 1)
        if kind is None:
            return slice(start, start + 3 * self.num_heads)
        first = start + KINDS.index(kind) * self.num_heads
        return slice(first, first + self.num_heads)

    def mlp_input(self, layer: int) -> int:
        """Index of a layer's MLP among the destinations."""
        return int(self.inputs(layer).stop)

    def read_by_heads(self, layer: int) -> int:
        """Number of sources that the heads of a layer read; these are the first in `sources`."""
        return int(self.heads(layer).start)

    def read_by_mlp(self, layer: int) -> int:
        """Number of sources that the MLP of a layer reads; these are the first in `sources`."""
        heads = self.heads(layer)
        return int(heads.start if self.parallel[layer] else heads.stop)

    @cached_property
    def read(self) -> npt.NDArray[np.int64]:
        """Number of sources that each destination reads, int [destination]; the first in `sources`."""
        counts = np.empty(len(self.destinations), np.int64)
        for layer in range(self.num_layers):
            counts[self.inputs(layer)] = self.read_by_heads(layer)
            counts[self.mlp_input(layer)] = self.read_by_mlp(layer)
        counts[-1] = len(self.sources)
        return counts

    @cached_property
    def edges(self) -> Bools:
        """Whether an edge exists from each source to each destination, bool [source, destination]."""
        return np.arange(len(self.sources))[:, None] < self.read

    @cached_property
    def owner(self) -> npt.NDArray[np.int64]:
        """Index of the source that belongs to the same head or MLP, int [destination]; -1 for the logits."""
        index = {name: number for number, name in enumerate(self.sources)}
        return np.array([index.get(name.partition("<")[0], -1) for name in self.destinations], np.int64)

    @cached_property
    def is_seen_later(self) -> Bools:
        """Whether later positions attend to a destination, bool [destination]: True for keys and values."""
        return np.array([name.endswith(("<k>", "<v>")) for name in self.destinations], np.bool_)

    def edges_at(self, positions: int) -> Bools:
        """Whether an edge exists at each position, bool [position, source, destination].

        Edges into the logits exist at the last position only.
        """
        edges: Bools = np.repeat(self.edges[None], positions, axis=0)
        # Metrics read the logits of the last position alone.
        edges[:-1, :, -1] = False
        return edges

    def name(self, source: int, destination: int) -> str:
        """Name of an edge, e.g. "m1->a2.h3<v>".

        Arguments:
            source: index of the source.
            destination: index of the destination.
        """
        return f"{self.sources[source]}->{self.destinations[destination]}"

    def layer_of(self, destination: int) -> int:
        """Layer of a destination; the number of layers for the logits."""
        # A layer has three destinations per head and one MLP.
        return min(destination // (3 * self.num_heads + 1), self.num_layers)

    def names(self, edges: Bools) -> list[str]:
        """Names of edges from bool [source, destination], ordered by destination."""
        return [self.name(int(s), int(d)) for d, s in zip(*np.nonzero(edges.T), strict=True)]

    def chosen(self, names: Sequence[str]) -> Bools:
        """Select edges by their names, e.g. "m1->a2.h3<v>"; returns bool [source, destination].

        Raises:
            ConfigError: for an unknown name.
        """
        rows = {name: number for number, name in enumerate(self.sources)}
        columns = {name: number for number, name in enumerate(self.destinations)}
        edges = np.zeros_like(self.edges)
        for name in names:
            source, _, destination = name.partition("->")
            edge = rows.get(source), columns.get(destination)
            if None in edge or not self.edges[edge]:
                raise ConfigError(
                    f"expected an edge of a model with {self.num_layers} layers of {self.num_heads} heads, "
                    f"such as {self.name(0, 0)!r}, found {name!r}; layout.names(layout.edges) lists all edges"
                )
            edges[edge] = True
        return edges


def _obstacle(config: Architecture, layer: int) -> str | None:
    """Why the edges of a layer cannot be separated, as a noun phrase; None where they can."""
    spec = config.layers[layer]
    kinds = {point.kind for point in config.known_points if point.layer == layer}
    if spec.mixer.kind != "attention":
        return f"a mixer of kind {spec.mixer.kind!r}"
    if spec.channel_mixer is None:
        return "no MLP"
    if spec.norms != "before":
        if spec.norms == "of stream":
            return "norms on the stream itself"
        return f"norms {spec.norms!r} the output of heads or MLP"
    if "attn_gate" in kinds:
        return "gates of heads, which read the stream besides q, k and v"
    missing = [kind for kind in _NEEDED if kind not in kinds]
    if missing or not config.predicts_next:
        return f"no hook point {missing[0]!r}" if missing else "positions that attend to later positions"
    # Normalising all heads together makes each head's queries depend on the streams of the others.
    norm = config.tensors.layers[layer].get("q_norm")
    if norm is not None and norm.shape[0] != config.axis_sizes["d_head"]:
        return "a norm over the queries of all heads together"
    if "z_norm" in config.tensors.layers[layer]:
        return "a norm over the output z of all heads together"
    return None
