"""Methods: what changing an edge would do to a metric, estimated by gradients.

Every method but one is a first-order estimate, <D, g>: what the source's output changes by, times the
gradient with respect to what the destination reads, summed over positions and width. They differ in where
the gradient is taken.

    EAP                  in the clean run (Syed et al., Attribution Patching Outperforms ACDC, 2023)
    EAP-IG-inputs        on the way from the corrupted embedding to the clean one, k / n of it, k = 0 … n - 1
                         (Hanna et al., Have Faith in Faithfulness, 2024, equation 3)
    clean-corrupted      in both runs, halved (ibid.)
    EAP-IG-activations   in runs in which one group - the input, a layer's heads, an MLP - stands k / n of the
                         way, k = 1 … n, averaged over all groups and steps
    information-flow-routes
                         no gradient: the share of a destination's stream that a source makes up (Ferrando and
                         Voita, Information Flow Routes, 2024, equation 3)

An estimate is of M(the edge left out) - M(clean): positive where leaving it out raises the metric.

Border: one batch of pairs; tensors.

Axes: as in batches.py; source, destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forward.edges.cotangents import ConstantPart, cotangents
from ..forward.edges.layout import Layout
from ..forward.edges.parts import SplitNetwork
from ..forward.edges.prompts import Streams, constants, streams_of
from ..forward.hooks.taps import Place
from ..forward.networks.history import STREAM
from .batches import PairBatch
from .names import Method

__all__ = ["OfLogits", "edge_scores"]

OfLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _At:
    """Where a gradient is taken, and what it counts for edges and for nodes. lost: whether edges from the
    input into the first layer's heads count nothing."""

    streams: Streams
    weight: float
    of_nodes: float
    held: tuple[ConstantPart, ...] = ()
    lost: bool = False


@torch.no_grad()
def edge_scores(
    network: SplitNetwork,
    layout: Layout,
    batch: PairBatch,
    method: Method,
    steps: int,
    of_logits: OfLogits,
    *,
    by_position: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores of a batch's edges and of all edges of each node at once, <D, dM/du>, summed over its pairs:
    float64 [source, destination] and [source]; of a method that takes no gradient, 0 of nodes.

    of_logits: last logits [B, vocab] -> gradient of each pair's metric. steps: n. Of nodes, the steps of
    EAP-IG-inputs are k = 1 … n. by_position: whether products are not summed over positions, and scores are
    [position, source, destination].
    """
    places = batch.ids.shape[1:] if by_position else ()
    found = torch.zeros((*places, *layout.edges.shape), dtype=torch.float64)
    nodes = torch.zeros(len(layout.sources), dtype=torch.float64)
    if method == "information-flow-routes":
        for columns, shares in _shares(layout, batch):
            by_source = shares.T if by_position else shares.mean(-1)
            found[..., : len(shares), columns] = by_source[..., None]
        return found, nodes
    change = batch.change
    for at in _taken(network, layout, batch, method, steps):
        for columns, gradient in cotangents(network, layout, at.streams, of_logits, at.held):
            count = int(layout.read[columns][0])
            estimate = _product(change[:, :count], gradient, by_position=by_position).double().cpu()
            nodes[:count] += at.of_nodes * estimate.sum(-1).reshape(-1, count).sum(0)
            if not (at.lost and columns == layout.inputs(0)):
                found[..., :count, columns] += at.weight * estimate
    return found, nodes


def _taken(
    network: SplitNetwork, layout: Layout, batch: PairBatch, method: Method, steps: int
) -> Iterator[_At]:
    """Where gradients are taken, one after the other, so that no more than one run is held."""
    if method == "EAP":
        yield _At(batch.clean.streams, 1.0, 1.0)
    elif method == "clean-corrupted":
        yield _At(batch.clean.streams, 0.5, 0.5)
        yield _At(streams_of(network, layout, batch.corrupted_ids), 0.5, 0.5)
    elif method == "EAP-IG-inputs":
        yield from _on_the_way(network, layout, batch, steps)
    else:
        yield from _in_groups(network, layout, batch, steps)


def _on_the_way(network: SplitNetwork, layout: Layout, batch: PairBatch, steps: int) -> Iterator[_At]:
    """Runs whose embedding is k / n of the way from the corrupted prompt's to the clean one's: for edges from
    k = 0 on, for nodes to k = n."""
    entering, weight = batch.clean.streams.heads[0], 1 / steps
    away = network.embed(batch.corrupted_ids, None)[STREAM] - batch.clean.added[:, 0]
    for k in range(steps):
        given: dict[Place, Tensor] = {("embed", None): entering + (1 - k / steps) * away}
        yield _At(streams_of(network, layout, batch.ids, given), weight, weight if k else 0.0)
    yield _At(batch.clean.streams, 0.0, weight)


def _in_groups(network: SplitNetwork, layout: Layout, batch: PairBatch, steps: int) -> Iterator[_At]:
    """Runs in which one group of sources stands k / n of the way from what stands for it to what it adds.

    Where the input is held and nothing but sources makes up the stream that enters, edges into the first
    layer's heads are left out: that stream is a constant there, as the published code has it. A learned
    position makes it one that still has a gradient.
    """
    weight = 1 / (steps * (2 * layout.num_layers + 1))
    change, clean = batch.change, batch.clean
    entering = clean.streams.heads[0]
    fixed = constants(network, layout, batch.ids[:1], clean.z[0][:1])
    has_positions = "positions" in network.config.tensors.outside
    for k in range(1, steps + 1):
        away = 1 - k / steps
        given: dict[Place, Tensor] = {("embed", None): entering + away * change[:, 0]}
        yield _At(streams_of(network, layout, batch.ids, given), weight, weight, (), not has_positions)
        for layer in range(layout.num_layers):
            heads, mlp = layout.heads(layer), layout.mlp(layer)
            summed = (clean.added[:, heads] + away * change[:, heads]).sum(1)
            of_heads: dict[Place, Tensor] = {("attn_out", layer): summed + (fixed[layer + 1] - fixed[layer])}
            yield _At(streams_of(network, layout, batch.ids, of_heads), weight, weight, (("heads", layer),))
            of_mlp: dict[Place, Tensor] = {("mlp_out", layer): clean.added[:, mlp] + away * change[:, mlp]}
            yield _At(streams_of(network, layout, batch.ids, of_mlp), weight, weight, (("mlp", layer),))


def _shares(layout: Layout, batch: PairBatch) -> Iterator[tuple[slice, Tensor]]:
    """Destinations that read the same, and the share of what they read that each source makes up, summed over
    pairs, float64 [source, S]."""
    streams = batch.clean.streams
    read: list[tuple[slice, Tensor]] = [(slice(-1, None), streams.logits)]
    for layer in range(layout.num_layers):
        column = layout.mlp_input(layer)
        read += [
            (layout.inputs(layer), streams.heads[layer]),
            (slice(column, column + 1), streams.mlps[layer]),
        ]
    for columns, stream in read:
        count = int(layout.read[columns][0])
        norm = stream.abs().sum(-1)[:, None]
        without = (stream[:, None] - batch.clean.added[:, :count]).abs().sum(-1)
        near = (norm - without).clamp(min=0).double()
        shares = near / near.sum(1, keepdim=True)
        yield columns, shares.sum(0).cpu()


def _product(change: Tensor, gradient: Tensor, *, by_position: bool) -> Tensor:
    """[B, source, S, D] and [B, column, S, D] -> their product over all but source and column, and, where
    asked, position, which is first."""
    return torch.einsum(f"bspd,bcpd->{'p' if by_position else ''}sc", change, gradient)
