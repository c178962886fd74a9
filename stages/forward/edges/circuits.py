"""Passes of circuits: chosen edges carry what their source adds in this pass, all others an alternative.

Every destination reads a stream of its own: constants, the alternative of each source, and for each chosen
edge the difference between what its source adds in this pass and the alternative. So a source responds to
what the edges into it carry, and its chosen edges carry the response (Hanna et al., 2024, section 2.2; Conmy
et al., Towards Automated Circuit Discovery, 2023). If only edges into later layers are left out, the layers
below are the clean pass (`first_layer`).

Axes: B prompts, C circuits, S positions, D hidden, source, destination; row = a circuit on a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hooks.wants import Logits
from ..passes.plain import WholePrompts
from .layout import KINDS, Layout
from .parts import NO_TAPS, SplitNetwork, attended
from .prompts import EdgeSources, constants, written_by_heads

__all__ = ["Alternatives", "circuit_logits"]


@dataclass(frozen=True)
class Alternatives:
    """Clean runs of some prompts, and what edges outside a circuit carry instead, e.g. a corrupted run."""

    clean: EdgeSources
    """Clean runs of B prompts."""
    alternative: Tensor
    """What edges outside a circuit carry from each source, [B, source, S, D]."""
    constant: Sequence[Tensor]
    """Part of the stream that no source adds, [S, D]: as the heads of each layer read it, then after all
    layers."""

    @classmethod
    def of(
        cls, network: SplitNetwork, layout: Layout, ids: Tensor, clean: EdgeSources, alternative: Tensor
    ) -> Alternatives:
        """Compute the part of the stream that no source adds, and combine it with clean runs and alternative.

        Arguments:
            network: the network.
            layout: sources and destinations of the model.
            ids: token ids [B, S].
            clean: clean runs of the prompts.
            alternative: what edges outside a circuit carry from each source, [B, source, S, D].
        """
        # One prompt: constants depend on positions alone.
        return cls(clean, alternative, constants(network, layout, ids[:1], clean.z[0][:1]))


def circuit_logits(
    network: SplitNetwork,
    layout: Layout,
    alternatives: Alternatives,
    circuits: Tensor,
    want: Logits,
    *,
    memory: int,
    first_layer: int = 0,
) -> Tensor:
    """Run prompts in which only the edges of a circuit carry what their source adds.

    All other edges carry the alternative.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        alternatives: clean runs, and what other edges carry.
        circuits: edges of each circuit, bool [C, source, destination], or by position [C, S, source,
            destination].
        want: tokens whose logits are computed.
        memory: bytes that may be allocated beside the arguments.
        first_layer: first layer into which any circuit leaves out edges.

    Returns:
        Logits at the last position, [C, B, token].
    """
    n_prompts = len(alternatives.alternative)
    # (circuit, prompt) pairs: circuit by circuit, each with all prompts, as `unflatten` takes them apart.
    pairs = torch.cartesian_prod(torch.arange(len(circuits)), torch.arange(n_prompts)).reshape(-1, 2)
    blocks = [
        _logits_of_rows(network, layout, alternatives, circuits[block[:, 0]], block[:, 1], first_layer, want)
        for block in pairs.split(_most_rows(layout, alternatives.alternative, memory))
    ]
    logits: Tensor = torch.cat(blocks).unflatten(0, (len(circuits), n_prompts))
    return logits


def _logits_of_rows(
    network: SplitNetwork,
    layout: Layout,
    alternatives: Alternatives,
    circuits: Tensor,
    prompt: Tensor,
    first_layer: int,
    want: Logits,
) -> Tensor:
    """Logits [row, token] of rows, each of which is a circuit on a prompt.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        alternatives: clean runs, and what other edges carry.
        circuits: edges of each row, bool [row, source, destination] or [row, S, source, destination].
        prompt: prompt of each row, int [row].
        first_layer: first layer into which any circuit leaves out edges.
        want: tokens whose logits are computed.
    """
    alternative, weights = alternatives.alternative[prompt], circuits.to(alternatives.alternative)
    # Sources below the first changed layer are those of the clean run.
    differing = torch.zeros_like(alternative)
    n_known = layout.read_by_heads(first_layer)
    differing[:, :n_known] = alternatives.clean.added[prompt, :n_known] - alternative[:, :n_known]
    history = WholePrompts(alternative.shape[2], NO_TAPS, alternative.device)
    # Every source first counts with its alternative; chosen edges add the difference.
    summed = alternative[:, :n_known].sum(1)
    for layer in range(first_layer, layout.num_layers):
        base = alternatives.constant[layer] + summed
        read = _streams_read(base, weights, differing, layout.inputs(layer), layout.read_by_heads(layer))
        # Destinations of a layer are ordered q, k, v, so three equal chunks separate them.
        inputs = {f"{kind}_input": x for kind, x in zip(KINDS, read.chunk(3, dim=1), strict=True)}
        z = attended(network, layer, inputs, base, history)
        heads, mlp = layout.heads(layer), layout.mlp(layer)
        differing[:, heads] = written_by_heads(network, layer, z) - alternative[:, heads]
        after = summed + alternative[:, heads].sum(1)
        column = layout.mlp_input(layer)
        # In a parallel layer the MLP reads the same stream as the heads.
        if not layout.parallel[layer]:
            base = alternatives.constant[layer + 1] + after
        mlp_column = slice(column, column + 1)
        read = _streams_read(base, weights, differing, mlp_column, layout.read_by_mlp(layer))
        differing[:, mlp] = network.fed(layer, read[:, 0], NO_TAPS) - alternative[:, mlp]
        summed = after + alternative[:, mlp]
    base, last = alternatives.constant[-1] + summed, slice(len(layout.destinations) - 1, None)
    # Logits are read at the last position only, so edges into them exist there only.
    at_last = weights if weights.ndim == 3 else weights[:, -1:]
    read = _streams_read(base[:, -1:], at_last, differing[:, :, -1:], last, len(layout.sources))
    return network.unembed(network.final_norm(read[:, 0, -1]), want)


def _streams_read(base: Tensor, weights: Tensor, differing: Tensor, columns: slice, count: int) -> Tensor:
    """Streams that some destinations read: the alternative, and the difference along chosen edges.

    Arguments:
        base: constants and alternatives, [row, S, D].
        weights: 1 where an edge is chosen, [row, source, destination] or [row, S, source, destination].
        differing: output of sources in this pass minus their alternative, [row, source, S, D].
        columns: slice of the destinations.
        count: number of sources that are computed before these destinations.

    Returns:
        [row, destination, S, D].
    """
    edges = weights[..., :count, columns].transpose(-1, -2)
    if edges.ndim == 3:
        added = torch.bmm(edges, differing[:, :count].flatten(2)).unflatten(2, base.shape[1:])
    else:
        added = torch.matmul(edges, differing[:, :count].transpose(1, 2)).transpose(1, 2)
    stream: Tensor = base.unsqueeze(1) + added
    return stream


def _most_rows(layout: Layout, alternative: Tensor, memory: int) -> int:
    """Number of rows to compute at a time: each needs the sources 3 times and the head inputs 6 times."""
    row_bytes = alternative[0, 0].nbytes * (3 * len(layout.sources) + 6 * 3 * layout.num_heads)
    return max(1, memory // row_bytes)
