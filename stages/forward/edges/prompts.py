"""Runs of prompts of one length, recording source outputs and the streams that heads and MLPs read.

Axes: B prompts, S positions, D hidden; source and destination as in layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures.layer_summaries import AttentionMixer
from ..hooks.taps import PassTaps, Place
from ..networks.history import STREAM
from ..networks.loop import through_layers
from ..passes.plain import WholePrompts
from .layout import Layout
from .parts import NO_TAPS, PartTaps, SplitNetwork, output_by_head, output_constant

__all__ = [
    "PromptsWithKeys",
    "EdgeSources",
    "Streams",
    "constants",
    "sources_of",
    "streams_of",
    "written_by_heads",
]


@dataclass(frozen=True)
class Streams:
    """Residual stream of a run wherever a head, an MLP or the final norm reads it, each [B, S, D]."""

    heads: Sequence[Tensor]
    """By layer, the stream that heads read, before the norm."""
    mlps: Sequence[Tensor]
    """By layer, the stream that the MLP reads, before the norm."""
    logits: Tensor
    """The stream that the final norm reads."""


@dataclass(frozen=True)
class EdgeSources:
    """A run of prompts, with what each source (embedding, head or MLP) adds to the residual stream."""

    streams: Streams
    """Residual stream wherever a head, an MLP or the final norm reads it."""
    added: Tensor
    """What each source adds to the stream, [B, source, S, D]."""
    z: Sequence[Tensor]
    """By layer, z of all heads, [B, head, S, d_head]."""
    keys: Mapping[int, tuple[Tensor, Tensor]]
    """Layer -> (keys after RoPE, values), each [B, kv_head, S, d_head]."""


class PromptsWithKeys(WholePrompts):
    """Pass over whole prompts that records the keys and values of each layer."""

    def __init__(self, length: int, taps: PassTaps, device: torch.device) -> None:
        """Prepare a pass.

        Arguments:
            length: positions of the prompts.
            taps: hook points of the pass.
            device: device of its tensors.
        """
        super().__init__(length, taps, device)
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention over the prompts, returning z; records keys and values of the layer."""
        self.keys[layer] = k, v
        return super().attend(layer, q, k, v, mixer)


def streams_of(
    network: SplitNetwork, layout: Layout, ids: Tensor, inserted: Mapping[Place, Tensor] | None = None
) -> Streams:
    """Run prompts, and record the residual stream wherever a head, an MLP or the final norm reads it.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        ids: token ids, [B, S].
        inserted: values to continue with at hook points such as ("mlp_out", 3).
    """
    taps = PartTaps(inserted, _read_points(layout))
    final = through_layers(network, ids, WholePrompts(ids.shape[1], taps, ids.device), taps)
    return _streams(layout, taps, final)


def sources_of(network: SplitNetwork, layout: Layout, ids: Tensor) -> EdgeSources:
    """Run prompts, and record streams, z, keys and values, and what each source adds to the stream.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        ids: token ids [B, S].
    """
    layers = range(layout.num_layers)
    wanted = [*_read_points(layout), *((kind, layer) for kind in ("z", "mlp_out") for layer in layers)]
    taps = PartTaps(None, wanted)
    history = PromptsWithKeys(ids.shape[1], taps, ids.device)
    final = through_layers(network, ids, history, taps)
    added = final.new_empty(len(ids), len(layout.sources), *final.shape[1:])
    # Without positions: learned positions are a constant of the stream, not a source.
    added[:, 0] = network.embed(ids, None)[STREAM]
    for layer in layers:
        added[:, layout.heads(layer)] = written_by_heads(network, layer, taps.recorded["z", layer])
        added[:, layout.mlp(layer)] = taps.recorded["mlp_out", layer]
    return EdgeSources(
        _streams(layout, taps, final), added, [taps.recorded["z", layer] for layer in layers], history.keys
    )


def written_by_heads(network: SplitNetwork, layer: int, z: Tensor) -> Tensor:
    """What each head adds to the residual stream, [..., head, S, D].

    Arguments:
        network: the network.
        layer: layer index.
        z: output of each head before the output projection, [..., head, S, d_head].
    """
    return torch.matmul(z, output_by_head(network, layer, z.shape[-3]))


def constants(network: SplitNetwork, layout: Layout, ids: Tensor, z: Tensor) -> list[Tensor]:
    """Part of the residual stream that no source adds: learned positions and biases of attention's output.

    A stream without any source is exactly this.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        ids: token ids of one prompt, [1, S].
        z: any z of one row, [1, head, S, d_head].

    Returns:
        [S, D] as the heads of each layer read it, and as the last entry [S, D] after all layers.
    """
    history = WholePrompts(ids.shape[1], NO_TAPS, ids.device)
    totals = [network.embed(ids, history.positions)[STREAM][0] - network.embed(ids, None)[STREAM][0]]
    for layer in range(layout.num_layers):
        # The bias of attention's output belongs to no head.
        totals.append(totals[-1] + output_constant(network, layer, z, history))
    return totals


def _read_points(layout: Layout) -> list[Place]:
    layers = range(layout.num_layers)
    between = [("resid_mid", layer) for layer in layers if not layout.parallel[layer]]
    return [*(("resid_pre", layer) for layer in layers), *between]


def _streams(layout: Layout, taps: PartTaps, final: Tensor) -> Streams:
    heads = [taps.recorded["resid_pre", layer] for layer in range(layout.num_layers)]
    mlps = [
        heads[layer] if is_parallel else taps.recorded["resid_mid", layer]
        for layer, is_parallel in enumerate(layout.parallel)
    ]
    return Streams(heads, mlps, final)
