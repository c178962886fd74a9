"""Edge scores by gradients: estimated effect of changing an edge on a metric.

All methods but one are first-order estimates <D, g>: the change D of the source's output times the gradient g
of the metric at the destination's input, summed over positions and hidden. They differ in where the gradient
is taken.

    EAP                  in the clean run (Syed et al. 2023, "Attribution Patching Outperforms ACDC")
    EAP-IG-inputs        with the embedding k / n of the way from corrupted to clean, k = 0 … n - 1
                         (Hanna et al. 2024, "Have Faith in Faithfulness", equation 3)
    clean-corrupted      in the clean and the corrupted run, averaged (ibid.)
    EAP-IG-activations   with the output of one group (the input, a layer's heads, an MLP) k / n of the way,
                         k = 1 … n, averaged over all groups and steps
    information-flow-routes
                         no gradient: the share of a destination's input that a source makes up (Ferrando
                         and Voita 2024, "Information Flow Routes", equation 3)

The estimate is of M(edge left out) - M(clean): positive where leaving the edge out raises the metric.

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

__all__ = ["LogitGradient", "edge_scores"]

LogitGradient = Callable[[Tensor], Tensor]
"""Function from the last logits [B, vocab] to the gradient of each pair's metric there, same shape."""


@dataclass(frozen=True)
class _GradientPoint:
    """A run whose gradient enters the estimate, with the weights of this gradient."""

    streams: Streams
    """Residual streams of the run."""
    weight: float
    """Weight of its gradient in edge scores."""
    node_weight: float
    """Weight of its gradient in node scores."""
    held: tuple[ConstantPart, ...] = ()
    """Model parts with constant output in this run, so that no gradient passes through them."""
    skips_first_heads: bool = False
    """Whether this run adds nothing to the scores of edges into the first layer's heads."""


@torch.no_grad()
def edge_scores(
    network: SplitNetwork,
    layout: Layout,
    batch: PairBatch,
    method: Method,
    steps: int,
    of_logits: LogitGradient,
    *,
    by_position: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores of the edges, and of all outgoing edges of each node together, summed over a batch's pairs.

    Arguments:
        network: The model's network.
        layout: Graph of the model.
        batch: Pairs of one length with their clean runs.
        method: Method of estimation; the module's docstring defines the methods.
        steps: Number n of steps of the integrated-gradients methods.
        of_logits: Gradient of each pair's metric at the last logits.
        by_position: Whether scores are kept by position instead of summed over positions.

    Returns:
        (edge scores, node scores): float64 [source, destination], with a first axis position if
        `by_position`, and float64 [source]. Node scores are 0 for information-flow-routes; those of
        EAP-IG-inputs use the steps k = 1 … n.
    """
    position_axis = batch.ids.shape[1:] if by_position else ()
    scores = torch.zeros((*position_axis, *layout.edges.shape), dtype=torch.float64)
    nodes = torch.zeros(len(layout.sources), dtype=torch.float64)
    if method == "information-flow-routes":
        for columns, shares in _shares(layout, batch):
            # Destinations that read the same stream get the same shares.
            by_source = shares.T if by_position else shares.mean(-1)
            scores[..., : len(shares), columns] = by_source[..., None]
        return scores, nodes
    # Sources before pairs, so that those that a destination reads are one block of memory: an einsum of the
    # original axes copies them in each of the hundreds of products.
    change = batch.change.permute((2, 1, 0, 3) if by_position else (1, 0, 2, 3)).contiguous()
    for point in _gradient_points(network, layout, batch, method, steps):
        for columns, gradient in cotangents(network, layout, point.streams, of_logits, point.held):
            # Destinations of one slice read the same sources: the first `count`.
            count = int(layout.read[columns][0])
            if by_position:
                rows, columns_read = change[:, :count].flatten(2), gradient.permute(2, 0, 3, 1).flatten(1, 2)
            else:
                rows, columns_read = change[:count].flatten(1), gradient.permute(0, 2, 3, 1).flatten(0, 2)
            estimate = (rows @ columns_read).double().cpu()
            # A node's score is the sum over all edges that leave it, hence the sum over columns.
            nodes[:count] += point.node_weight * estimate.sum(-1).reshape(-1, count).sum(0)
            if not (point.skips_first_heads and columns == layout.inputs(0)):
                scores[..., :count, columns] += point.weight * estimate
    return scores, nodes


def _gradient_points(
    network: SplitNetwork, layout: Layout, batch: PairBatch, method: Method, steps: int
) -> Iterator[_GradientPoint]:
    """Yield the runs in which a method takes gradients; only the current run is in memory."""
    if method == "EAP":
        yield _GradientPoint(batch.clean.streams, 1.0, 1.0)
    elif method == "clean-corrupted":
        yield _GradientPoint(batch.clean.streams, 0.5, 0.5)
        yield _GradientPoint(streams_of(network, layout, batch.corrupted_ids), 0.5, 0.5)
    elif method == "EAP-IG-inputs":
        yield from _interpolated_inputs(network, layout, batch, steps)
    else:
        yield from _interpolated_groups(network, layout, batch, steps)


def _interpolated_inputs(
    network: SplitNetwork, layout: Layout, batch: PairBatch, steps: int
) -> Iterator[_GradientPoint]:
    """Yield runs with the embedding k / n of the way to clean: k = 0 … n - 1 for edges, 1 … n for nodes."""
    clean_input, weight = batch.clean.streams.heads[0], 1 / steps
    difference = network.embed(batch.corrupted_ids, None)[STREAM] - batch.clean.added[:, 0]
    for k in range(steps):
        replaced: dict[Place, Tensor] = {("embed", None): clean_input + (1 - k / steps) * difference}
        # The published code integrates edges from k = 0 and nodes from k = 1; both are kept.
        yield _GradientPoint(streams_of(network, layout, batch.ids, replaced), weight, weight if k else 0.0)
    yield _GradientPoint(batch.clean.streams, 0.0, weight)


def _interpolated_groups(
    network: SplitNetwork, layout: Layout, batch: PairBatch, steps: int
) -> Iterator[_GradientPoint]:
    """Yield runs with one group of sources k / n of the way from its replacement to its clean output.

    With the input interpolated and no other term in the first residual stream, that stream is a constant, and
    edges into the first layer's heads get no gradient, as in the published code. A learned position embedding
    leaves it differentiable.
    """
    weight = 1 / (steps * (2 * layout.num_layers + 1))
    change, clean = batch.change, batch.clean
    clean_input = clean.streams.heads[0]
    fixed = constants(network, layout, batch.ids[:1], clean.z[0][:1])
    has_positions = "positions" in network.config.tensors.outside
    for k in range(1, steps + 1):
        share = 1 - k / steps
        embedding: dict[Place, Tensor] = {("embed", None): clean_input + share * change[:, 0]}
        yield _GradientPoint(
            streams_of(network, layout, batch.ids, embedding), weight, weight, (), not has_positions
        )
        for layer in range(layout.num_layers):
            heads, mlp = layout.heads(layer), layout.mlp(layer)
            summed = (clean.added[:, heads] + share * change[:, heads]).sum(1)
            # The group's outputs are replaced as a sum; its constant part (biases) is no source and stays.
            heads_replaced: dict[Place, Tensor] = {
                ("attn_out", layer): summed + (fixed[layer + 1] - fixed[layer])
            }
            yield _GradientPoint(
                streams_of(network, layout, batch.ids, heads_replaced), weight, weight, (("heads", layer),)
            )
            mlp_replaced: dict[Place, Tensor] = {
                ("mlp_out", layer): clean.added[:, mlp] + share * change[:, mlp]
            }
            yield _GradientPoint(
                streams_of(network, layout, batch.ids, mlp_replaced), weight, weight, (("mlp", layer),)
            )


def _shares(layout: Layout, batch: PairBatch) -> Iterator[tuple[slice, Tensor]]:
    """Yield (destinations that read one stream, each source's share of this stream, float64 [source, S]).

    Shares are summed over pairs.
    """
    streams = batch.clean.streams
    inputs: list[tuple[slice, Tensor]] = [(slice(-1, None), streams.logits)]
    for layer in range(layout.num_layers):
        column = layout.mlp_input(layer)
        inputs += [
            (layout.inputs(layer), streams.heads[layer]),
            (slice(column, column + 1), streams.mlps[layer]),
        ]
    for columns, stream in inputs:
        n_sources = int(layout.read[columns][0])
        # Proximity of the paper: L1 norm of the input minus that of the input without the source, at least 0.
        norm = stream.abs().sum(-1)[:, None]
        remaining_norm = (stream[:, None] - batch.clean.added[:, :n_sources]).abs().sum(-1)
        proximity = (norm - remaining_norm).clamp(min=0).double()
        # Normalised per destination: shares of all sources add up to 1.
        shares = proximity / proximity.sum(1, keepdim=True)
        yield columns, shares.sum(0).cpu()
