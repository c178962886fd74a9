"""Passes in which some edges carry what their source adds, and the others what stands for it.

Every destination reads a stream of its own: the constants, what stands for each source, and of the edges that
are chosen the difference between what the source adds in this pass and that. So a source answers to what the
edges into it carry, and its own edges carry the answer (Hanna et al., 2024, section 2.2; Conmy et al.,
Towards Automated Circuit Discovery, 2023).

Where only edges into one layer and those above are left out, everything below is the clean pass: `first`.

Border: tensors and masks; which edges belong to a circuit, others decide.

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
    """The clean pass of some prompts, and what stands for each source where an edge is left out.

    clean: of B prompts. other: [B, source, S, D]. constant: what no source adds [S, D], as the heads of each
    layer read it, and behind all of them.
    """

    clean: EdgeSources
    other: Tensor
    constant: Sequence[Tensor]

    @classmethod
    def of(
        cls, network: SplitNetwork, layout: Layout, ids: Tensor, clean: EdgeSources, other: Tensor
    ) -> Alternatives:
        """ids: of the prompts, [B, S]."""
        return cls(clean, other, constants(network, layout, ids[:1], clean.z[0][:1]))


def circuit_logits(
    network: SplitNetwork,
    layout: Layout,
    given: Alternatives,
    chosen: Tensor,
    want: Logits,
    *,
    memory: int,
    first: int = 0,
) -> Tensor:
    """Logits at the last position, [C, B, token].

    chosen: bool [C, source, destination], or [C, S, source, destination] by position. first: the first layer
    into which edges are left out. memory: bytes that may be taken beside what is given.
    """
    prompts = len(given.other)
    rows = torch.cartesian_prod(torch.arange(len(chosen)), torch.arange(prompts)).reshape(-1, 2)
    parts = [
        _logits(network, layout, given, chosen[part[:, 0]], part[:, 1], first, want)
        for part in rows.split(_most_rows(layout, given.other, memory))
    ]
    found: Tensor = torch.cat(parts).unflatten(0, (len(chosen), prompts))
    return found


def _logits(
    network: SplitNetwork,
    layout: Layout,
    given: Alternatives,
    chosen: Tensor,
    prompt: Tensor,
    first: int,
    want: Logits,
) -> Tensor:
    """Of rows: the edges chosen [row, source, destination], or by position, on a prompt each, int [row]."""
    other, weights = given.other[prompt], chosen.to(given.other)
    differing = torch.zeros_like(other)
    known = layout.read_by_heads(first)
    differing[:, :known] = given.clean.added[prompt, :known] - other[:, :known]
    history = WholePrompts(other.shape[2], NO_TAPS, other.device)
    summed = other[:, :known].sum(1)
    for layer in range(first, layout.num_layers):
        base = given.constant[layer] + summed
        read = _read(base, weights, differing, layout.inputs(layer), layout.read_by_heads(layer))
        inputs = {f"{kind}_input": x for kind, x in zip(KINDS, read.chunk(3, dim=1), strict=True)}
        z = attended(network, layer, inputs, base, history)
        heads, mlp = layout.heads(layer), layout.mlp(layer)
        differing[:, heads] = written_by_heads(network, layer, z) - other[:, heads]
        behind = summed + other[:, heads].sum(1)
        column = layout.mlp_input(layer)
        if not layout.parallel[layer]:
            base = given.constant[layer + 1] + behind
        read = _read(base, weights, differing, slice(column, column + 1), layout.read_by_mlp(layer))
        differing[:, mlp] = network.fed(layer, read[:, 0], NO_TAPS) - other[:, mlp]
        summed = behind + other[:, mlp]
    base, last = given.constant[-1] + summed, slice(len(layout.destinations) - 1, None)
    at_last = weights if weights.ndim == 3 else weights[:, -1:]
    read = _read(base[:, -1:], at_last, differing[:, :, -1:], last, len(layout.sources))
    return network.unembed(network.final_norm(read[:, 0, -1]), want)


def _read(base: Tensor, weights: Tensor, differing: Tensor, columns: slice, count: int) -> Tensor:
    """What destinations read [row, column, S, D]: the base [row, S, D], and of the first `count` sources the
    difference, where the edge is chosen: weights [row, source, column], or [row, S, source, column]."""
    held = weights[..., :count, columns].transpose(-1, -2)
    if held.ndim == 3:
        added = torch.bmm(held, differing[:, :count].flatten(2)).unflatten(2, base.shape[1:])
    else:
        added = torch.matmul(held, differing[:, :count].transpose(1, 2)).transpose(1, 2)
    found: Tensor = base.unsqueeze(1) + added
    return found


def _most_rows(layout: Layout, other: Tensor, memory: int) -> int:
    """Rows at once: of each the sources twice, what heads read and what is made of it, six times over."""
    of_a_row = other[0, 0].nbytes * (3 * len(layout.sources) + 6 * 3 * layout.num_heads)
    return max(1, memory // of_a_row)
