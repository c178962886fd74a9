"""A forward and a backward pass: gradients of a metric of the logits at any hook points.

The forward pass is recorded from the first gradient capture on, and differentiated once. Metrics are not
known here: the caller passes a function from logits to the gradient of its metric with respect to them, the
cotangent. Everything before the logits is autograd through the one loop over layers, for every architecture
computed by it. Rows of a batch do not interact, so a prompt's gradients are those of its own metric alone.

Where the recorded graph would exceed the given memory, layers are computed again in the backward pass, which
costs one more forward pass and gives the same bits.
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

__all__ = ["Cotangent", "Gradients", "backward", "graph_bytes"]

Cotangent = Callable[[Tensor], Tensor]
"""Logits [B, positions, tokens] -> the gradient of the metric with respect to them, in the same shape."""
Gradients = dict[Capture, Tensor]
"""Value or gradient of each capture."""
_BESIDE_SPLIT = ("ln1_scale", "ln1_normalized")
"""Points that queries, keys and values are computed from, unless per-head inputs are captured."""


def backward(
    network: Network,
    ids: Tensor,
    spec: BoundSpec,
    want: Logits,
    cotangent: Cotangent,
    memory: int = MEMORY,
    dropped: int | None = None,
) -> tuple[Tensor, Gradients]:
    """Run prompts of one length forward and backward.

    Arguments:
        network: the network.
        ids: token ids, int [B, S].
        spec: bound spec with activations and gradients to capture.
        want: logits that the metric reads.
        cotangent: gradient of the metric with respect to these logits.
        memory: bytes that the recorded graph may take; above it, layers are computed again.
        dropped: layer whose contribution to the stream counts as constant in the backward pass; None for
            none.

    Returns:
        (logits [B, positions, tokens], capture -> value or gradient); a gradient has the shape of its
        activation.

    Raises:
        ConfigError: for repeated layers, where a hook point has several values.
    """
    if spec.order is not None:
        raise ConfigError(
            "gradients need layers that run once, found repeated layers, in which a hook point has several "
            "values; leave out recurrent="
        )
    # Recomputing costs one more forward pass, so it is used only where the graph would not fit.
    has_room = graph_bytes(network, ids, spec) <= memory
    recorded_network = network if has_room else recomputed(network)
    passes = [
        _one_backward(recorded_network, ids, part, want, cotangent, dropped)
        for part in _without_conflicts(spec)
    ]
    logits, _ = passes[0]
    return logits, {capture: x for _, values in passes for capture, x in values.items()}


def _one_backward(
    network: Network, ids: Tensor, spec: BoundSpec, want: Logits, cotangent: Cotangent, dropped: int | None
) -> tuple[Tensor, Gradients]:
    """One forward and one backward pass; returns (logits, capture -> value or gradient)."""
    values: Gradients = {}
    taps = GradientTaps(spec, values.__setitem__, dropped)
    with torch.enable_grad():
        logits = forward(network, ids, taps, want)
    assert logits is not None  # `want` selects some
    detached = logits.detach()
    # Edges of the graph instead of tensors: autograd can then free the values themselves.
    edges = [edge for watched in taps.watched.values() for edge in watched.edges]
    if not edges:
        return detached, values
    # Where only captures before a dropped layer's output are watched, the logits have no graph at all.
    gradients: Sequence[Tensor | None] = [None] * len(edges)
    if logits.requires_grad:
        # allow_unused: the metric need not depend on every captured value; such gradients become zeros.
        gradients = torch.autograd.grad(logits, edges, cotangent(detached), allow_unused=True)
    parts = iter(gradients)
    for capture, watched in taps.watched.items():
        values[capture] = watched.gradient([next(parts) for _ in watched.edges])
    return detached, values


def _without_conflicts(spec: BoundSpec) -> Sequence[BoundSpec]:
    """The spec itself, or two specs if one gradient capture would cut the path of another.

    The captures of the spec are then divided between the two.
    """
    # Capturing per-head inputs makes queries, keys and values depend on them and no longer on the shared
    # norm, so that the gradient at the norm would miss these paths.
    head_inputs = tuple(capture for capture in spec.gradients if capture.point.kind in SPLIT_INPUTS)
    if not head_inputs or not any(capture.point.kind in _BESIDE_SPLIT for capture in spec.gradients):
        return [spec]
    others = tuple(capture for capture in spec.captures if capture not in head_inputs)
    return [replace(spec, captures=others), replace(spec, captures=head_inputs)]


def graph_bytes(network: Network, ids: Tensor, spec: BoundSpec) -> int:
    """Estimate the bytes that autograd stores for a pass.

    Per token and layer these are the working memory of a forward pass. Where scores or patterns are captured,
    changed or soft-capped, scores, masked scores and weights of all token pairs are stored as well, because
    no fused kernel avoids them then.

    Arguments:
        network: the network.
        ids: token ids, int [B, S].
        spec: bound spec with captures and interventions.
    """
    config, itemsize = network.config, network.dtype.itemsize
    token_bytes = ids.numel() * config.num_layers * config.bytes_per_token(itemsize)
    points = (*(capture.point for capture in spec.captures), *(point for point, _ in spec.interventions))
    layers_with_scores = {point.layer for point in points if point.kind in ATTENTION}
    layers_with_scores |= {
        number for number, layer in enumerate(config.layers) if getattr(layer.mixer, "is_capped", False)
    }
    n_pairs = ids.numel() * ids.shape[-1] * config.axis_sizes.get("head", 0)
    return token_bytes + len(ATTENTION) * len(layers_with_scores) * n_pairs * itemsize
