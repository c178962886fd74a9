"""A pass and the way back: gradients of a metric of the logits at any hook points of it.

One forward pass is recorded from the first wanted point on, and gone back through once. Metrics are not known
here: whoever asks says what the gradient of his metric with respect to the logits is, the cotangent, when he
sees them; everything before the logits is autograd over the one loop, of every architecture whose layers we
compute. A prompt's gradients are those of its own metric alone: rows of a batch do not meet.

Where the recorded graph would not fit the memory given, layers are computed again on the way back, which
takes the time of one more pass and gives the same bits.

Border: token ids, specs and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....store.errors import ConfigError
from ..architectures.points import SPLIT_INPUTS
from ..hooks.spec import BoundSpec, Capture
from ..hooks.wants import Logits
from ..networks.loop import Network
from .branch_taps import ATTENTION
from .gradient_taps import GradientTaps
from .plain import forward
from .planner import MEMORY
from .recomputed import recomputed

__all__ = ["Cotangent", "Gradients", "backward"]

Cotangent = Callable[[Tensor], Tensor]
"""Logits wanted [B, positions, tokens] -> the gradient of the metric with respect to each of them."""
Gradients = dict[Capture, Tensor]
_BESIDE_SPLIT = ("ln1_scale", "ln1_normalized")
"""What queries, keys and values are made of, unless the input of each head is looked at."""


def backward(
    network: Network,
    ids: Tensor,
    spec: BoundSpec,
    want: Logits,
    cotangent: Cotangent,
    memory: int = MEMORY,
    dropped: int | None = None,
) -> tuple[Tensor, Gradients]:
    """The logits wanted [B, positions, tokens] of ids [B, S], and everything the spec captures: activations,
    and gradients shaped as these are.

    memory: bytes the recorded graph may take before layers are computed again instead. dropped: the layer
    whose contribution to the stream is a constant on the way back; None for none.
    Raises ConfigError for layers gone through again, where a point is met many times.
    """
    if spec.order is not None:
        raise ConfigError(
            "expected layers gone through once, found gradients of layers that are gone through again, where "
            "a hook point is met many times; leave recurrent= out"
        )
    over = network if _graph_bytes(network, ids, spec) <= memory else recomputed(network)
    parts = [_once(over, ids, part, want, cotangent, dropped) for part in _apart(spec)]
    return parts[0][0], {capture: x for _, found in parts for capture, x in found.items()}


def _once(
    network: Network, ids: Tensor, spec: BoundSpec, want: Logits, cotangent: Cotangent, dropped: int | None
) -> tuple[Tensor, Gradients]:
    found: Gradients = {}
    taps = GradientTaps(spec, found.__setitem__, dropped)
    with torch.enable_grad():
        logits = forward(network, ids, taps, want)
    assert logits is not None  # something is wanted
    told = logits.detach()
    edges = [edge for watched in taps.watched.values() for edge in watched.edges]
    if not edges:
        return told, found
    # Where nothing but a dropped layer is watched, the logits hang on none of it.
    given: Sequence[Tensor | None] = [None] * len(edges)
    if logits.requires_grad:
        given = torch.autograd.grad(logits, edges, cotangent(told), allow_unused=True)
    parts = iter(given)
    for capture, watched in taps.watched.items():
        found[capture] = watched.gradient([next(parts) for _ in watched.edges])
    return told, found


def _apart(spec: BoundSpec) -> Sequence[BoundSpec]:
    """The spec, or two where one gradient would take another's paths: who looks at what each head reads has
    queries, keys and values made of that, and no longer of the norm beside it."""
    split = tuple(c for c in spec.gradients if c.point.kind in SPLIT_INPUTS)
    if not split or not any(c.point.kind in _BESIDE_SPLIT for c in spec.gradients):
        return [spec]
    rest = tuple(c for c in spec.captures if c not in split)
    return [replace(spec, captures=rest), replace(spec, captures=split)]


def _graph_bytes(network: Network, ids: Tensor, spec: BoundSpec) -> int:
    """About what autograd keeps of a pass: as much of a token in every layer as one takes while it is
    computed, and where somebody looks at or changes them, or caps them, scores, masked scores and weights of
    all pairs of tokens, which no fused kernel then spares."""
    config, itemsize = network.config, network.dtype.itemsize
    of_tokens = ids.numel() * config.num_layers * config.bytes_per_token(itemsize)
    points = (*(capture.point for capture in spec.captures), *(point for point, _ in spec.interventions))
    looked_at = {point.layer for point in points if point.kind in ATTENTION}
    looked_at |= {n for n, layer in enumerate(config.layers) if getattr(layer.mixer, "is_capped", False)}
    pairs = ids.numel() * ids.shape[-1] * config.axis_sizes.get("head", 0)
    return of_tokens + len(ATTENTION) * len(looked_at) * pairs * itemsize
