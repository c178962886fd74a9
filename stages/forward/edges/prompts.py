"""Prompts of one length through a model, with what each node adds to the stream and what each reads of it.

Axes: B prompts, S positions, D hidden; source and destination as in layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures.architecture import AttentionMixer
from ..hooks.taps import PassTaps, Place
from ..networks.history import STREAM
from ..networks.loop import through_layers
from ..passes.plain import WholePrompts
from .layout import Layout
from .parts import NO_TAPS, PartTaps, SplitNetwork, output_by_head, output_constant

__all__ = [
    "KeptPrompts",
    "EdgeSources",
    "Streams",
    "constants",
    "sources_of",
    "streams_of",
    "written_by_heads",
]


@dataclass(frozen=True)
class Streams:
    """What is read along a pass, each [B, S, D].

    heads, mlps: by layer, what heads and the MLP read, before the norm. logits: what the final norm reads.
    """

    heads: Sequence[Tensor]
    mlps: Sequence[Tensor]
    logits: Tensor


@dataclass(frozen=True)
class EdgeSources:
    """A pass with what each source added to the stream, [B, source, S, D], and what heads had read.

    keys: by layer, rotated keys and values as attention took them.
    """

    streams: Streams
    added: Tensor
    z: Sequence[Tensor]
    keys: Mapping[int, tuple[Tensor, Tensor]]


class KeptPrompts(WholePrompts):
    """Whole prompts whose keys and values are kept, by layer."""

    def __init__(self, length: int, taps: PassTaps, device: torch.device) -> None:
        super().__init__(length, taps, device)
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """See `History`."""
        self.keys[layer] = k, v
        return super().attend(layer, q, k, v, how)


def streams_of(
    network: SplitNetwork, layout: Layout, ids: Tensor, given: Mapping[Place, Tensor] | None = None
) -> Streams:
    """What is read along a pass over token ids [B, S]. given: what is put in at hook points, such as
    ("mlp_out", 3)."""
    taps = PartTaps(given, _read(layout))
    final = through_layers(network, ids, WholePrompts(ids.shape[1], taps, ids.device), taps)
    return _streams(layout, taps, final)


def sources_of(network: SplitNetwork, layout: Layout, ids: Tensor) -> EdgeSources:
    """The pass over token ids [B, S], with what each source adds."""
    layers = range(layout.num_layers)
    wanted = [*_read(layout), *((kind, layer) for kind in ("z", "mlp_out") for layer in layers)]
    taps = PartTaps(None, wanted)
    history = KeptPrompts(ids.shape[1], taps, ids.device)
    final = through_layers(network, ids, history, taps)
    added = final.new_empty(len(ids), len(layout.sources), *final.shape[1:])
    added[:, 0] = network.embed(ids, None)[STREAM]
    for layer in layers:
        added[:, layout.heads(layer)] = written_by_heads(network, layer, taps.found["z", layer])
        added[:, layout.mlp(layer)] = taps.found["mlp_out", layer]
    return EdgeSources(
        _streams(layout, taps, final), added, [taps.found["z", layer] for layer in layers], history.keys
    )


def written_by_heads(network: SplitNetwork, layer: int, z: Tensor) -> Tensor:
    """z [..., head, S, d_head] -> what each head adds to the stream, [..., head, S, D]."""
    return torch.matmul(z, output_by_head(network, layer, z.shape[-3]))


def constants(network: SplitNetwork, layout: Layout, ids: Tensor, z: Tensor) -> list[Tensor]:
    """What the stream holds that no source adds, [S, D], as the heads of each layer read it and, last, behind
    all of them: learned positions, and biases of attention's output.

    ids: of one prompt, [1, S]. z: of any one row [1, head, S, d_head]. Summed up by themselves, so that
    nothing is left of a stream from which every source is taken.
    """
    history = WholePrompts(ids.shape[1], NO_TAPS, ids.device)
    found = [network.embed(ids, history.positions)[STREAM][0] - network.embed(ids, None)[STREAM][0]]
    for layer in range(layout.num_layers):
        found.append(found[-1] + output_constant(network, layer, z, history))
    return found


def _read(layout: Layout) -> list[Place]:
    layers = range(layout.num_layers)
    between = [("resid_mid", layer) for layer in layers if not layout.parallel[layer]]
    return [*(("resid_pre", layer) for layer in layers), *between]


def _streams(layout: Layout, taps: PartTaps, final: Tensor) -> Streams:
    heads = [taps.found["resid_pre", layer] for layer in range(layout.num_layers)]
    mlps = [
        heads[layer] if is_parallel else taps.found["resid_mid", layer]
        for layer, is_parallel in enumerate(layout.parallel)
    ]
    return Streams(heads, mlps, final)
