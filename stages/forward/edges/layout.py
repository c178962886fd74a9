"""Layout: the nodes of a model that write to its stream, those that read it, and the edges between them.

A model whose parts only ever add to one stream is a graph: what a part reads is a constant and the sum of
what all parts before it have added, so that each addend is an edge that can be changed by itself (Elhage et
al., A Mathematical Framework for Transformer Circuits, 2021; Goldowsky-Dill et al., Localizing Model Behavior
with Path Patching, 2023). Sources are the embedding of the token, each head, each MLP; destinations the
queries, keys and values of each head, each MLP, and the logits. Heads that share keys and values read them
for themselves here: they are destinations of their own.

Names and order are those of EAP-IG (Hanna et al., Have Faith in Faithfulness, 2024):

    sources        input, then in each layer a0.h0 a0.h1 … m0
    destinations   in each layer a0.h0<q> … a0.h0<k> … a0.h0<v> … m0, then logits

Border: an architecture, names and numbers; no tensors. Never imports torch.

Axes: source, destination.
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
"""What a head reads the stream for, in the order of destinations."""
_NEEDED = ("resid_pre", "q", "k", "v", "z", "attn_out", "mlp_out")


@dataclass(frozen=True)
class Layout:
    """Sizes of a model's graph. parallel: of each layer, whether its MLP reads what its heads read, so that
    no edge goes from the one to the other."""

    num_heads: int
    parallel: tuple[bool, ...]

    @classmethod
    def of(cls, config: Architecture) -> Layout:
        """The graph of a model. Raises ConfigError, in one line, where parts do more than add to a stream or
        where heads cannot be shown streams of their own."""
        for layer in range(config.num_layers):
            if (found := _hindrance(config, layer)) is not None:
                raise ConfigError(
                    "expected layers whose heads and MLP add to one stream that each reads through a "
                    f"norm of its own, found {found} in layer {layer} of {config.model_type}; edges are "
                    "no parts of such a model: patch whole activations instead (activation_patching)"
                )
        outside = config.tensors.outside
        if "embed_norm" in outside and "positions" in outside:
            raise ConfigError(
                f"expected positions that are added to the stream, found them inside the norm of the "
                f"embedding of {config.model_type}; edges are no parts of such a model"
            )
        return cls(config.axis_sizes["head"], tuple(layer.is_parallel for layer in config.layers))

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.parallel)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of what adds to the stream, in the order in which it is computed."""
        layers = range(self.num_layers)
        each = ([*(f"a{layer}.h{head}" for head in range(self.num_heads)), f"m{layer}"] for layer in layers)
        return (INPUT, *(name for names in each for name in names))

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """Names of what reads it."""
        found = []
        for layer in range(self.num_layers):
            found += [f"a{layer}.h{head}<{kind}>" for kind in KINDS for head in range(self.num_heads)]
            found.append(f"m{layer}")
        return (*found, LOGITS)

    def heads(self, layer: int) -> slice:
        """The sources that are a layer's heads."""
        start = 1 + layer * (self.num_heads + 1)
        return slice(start, start + self.num_heads)

    def mlp(self, layer: int) -> int:
        """The source that is its MLP."""
        return int(self.heads(layer).stop)

    def inputs(self, layer: int, kind: str | None = None) -> slice:
        """The destinations that are what a layer's heads read, for one of `KINDS` or for all of them."""
        start = layer * (3 * self.num_heads + 1)
        if kind is None:
            return slice(start, start + 3 * self.num_heads)
        own = start + KINDS.index(kind) * self.num_heads
        return slice(own, own + self.num_heads)

    def mlp_input(self, layer: int) -> int:
        """The destination that is what its MLP reads."""
        return int(self.inputs(layer).stop)

    def read_by_heads(self, layer: int) -> int:
        """How many sources the heads of a layer read: the first ones."""
        return int(self.heads(layer).start)

    def read_by_mlp(self, layer: int) -> int:
        """How many its MLP reads."""
        heads = self.heads(layer)
        return int(heads.start if self.parallel[layer] else heads.stop)

    @cached_property
    def read(self) -> npt.NDArray[np.int64]:
        """How many sources each destination reads, int [destination]: the first ones, as all that is computed
        before it has written to the stream."""
        found = np.empty(len(self.destinations), np.int64)
        for layer in range(self.num_layers):
            found[self.inputs(layer)] = self.read_by_heads(layer)
            found[self.mlp_input(layer)] = self.read_by_mlp(layer)
        found[-1] = len(self.sources)
        return found

    @cached_property
    def edges(self) -> Bools:
        """Which edges there are, bool [source, destination]."""
        return np.arange(len(self.sources))[:, None] < self.read

    @cached_property
    def owner(self) -> npt.NDArray[np.int64]:
        """The node a destination belongs to as a source, int [destination]; -1 of the logits."""
        place = {name: number for number, name in enumerate(self.sources)}
        return np.array([place.get(name.partition("<")[0], -1) for name in self.destinations], np.int64)

    @cached_property
    def is_seen_later(self) -> Bools:
        """Which destinations later positions see, bool [destination]: keys and values."""
        return np.array([name.endswith(("<k>", "<v>")) for name in self.destinations], np.bool_)

    def edges_at(self, positions: int) -> Bools:
        """Which edges there are at each of some positions, bool [position, source, destination]; into the
        logits at the last alone, as no others are read."""
        found: Bools = np.repeat(self.edges[None], positions, axis=0)
        found[:-1, :, -1] = False
        return found

    def name(self, source: int, destination: int) -> str:
        """Of an edge: "m1->a2.h3<v>"."""
        return f"{self.sources[source]}->{self.destinations[destination]}"

    def layer_of(self, destination: int) -> int:
        """The layer a destination is in; the number of layers for the logits."""
        return min(destination // (3 * self.num_heads + 1), self.num_layers)

    def names(self, chosen: Bools) -> list[str]:
        """Of the edges chosen, bool [source, destination], destination by destination."""
        return [self.name(int(s), int(d)) for d, s in zip(*np.nonzero(chosen.T), strict=True)]

    def chosen(self, names: Sequence[str]) -> Bools:
        """Edges by their names, bool [source, destination]. Raises ConfigError for one that is not there."""
        rows = {name: number for number, name in enumerate(self.sources)}
        columns = {name: number for number, name in enumerate(self.destinations)}
        found = np.zeros_like(self.edges)
        for name in names:
            source, _, destination = name.partition("->")
            place = rows.get(source), columns.get(destination)
            if None in place or not self.edges[place]:
                raise ConfigError(
                    f"expected an edge of a model of {self.num_layers} layers of {self.num_heads} heads, "
                    f"such as {self.name(0, 0)!r}, found {name!r}"
                )
            found[place] = True
        return found


def _hindrance(config: Architecture, layer: int) -> str | None:
    """Why a layer is no sum of parts, in words; None where it is one."""
    fact, held = config.layers[layer], {point.kind for point in config.known_points if point.layer == layer}
    if fact.mixer.kind != "attention":
        return f"a mixer of kind {fact.mixer.kind!r}"
    if fact.channel_mixer is None:
        return "no MLP"
    if fact.norms != "before":
        return f"norms {fact.norms!r} what is added" if fact.norms != "of stream" else "norms on the stream"
    if "attn_gate" in held:
        return "gates of heads, a fourth thing that is read"
    missing = [kind for kind in _NEEDED if kind not in held]
    if missing or not config.predicts_next:
        return f"no hook point {missing[0]!r}" if missing else "positions that see later ones"
    norm = config.tensors.layers[layer].get("q_norm")
    if norm is not None and norm.shape[0] != config.axis_sizes["d_head"]:
        return "a norm over the queries of all heads together"
    if "z_norm" in config.tensors.layers[layer]:
        return "a norm over what all heads have read"
    return None
