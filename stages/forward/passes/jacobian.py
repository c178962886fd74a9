"""Vector-Jacobian products of the last residual stream with respect to earlier ones, many in one backward pass.

For a cotangent z, one backward pass gives the row

    1/|V| sum over t in V of  sum over t' in V of  z^T d h[L,t'] / d h[l,t]

of every source layer l: h[l,t] is the residual stream after layer l at position t, L the last layer, and V
the counted positions. In a causal model h[L,t'] depends on no later t, so that the targets of a source are
the counted positions from its own on. Copies of the prompt carry one cotangent each.

Only the counted positions are recorded: earlier ones depend on no source, and later ones are read by no
target. Keys, values and states of the earlier ones are cached and count as constant.

Axes: S positions, D hidden; row = a copy of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architectures.points import HookPoint
from ..hooks.spec import BoundSpec, Capture
from ..hooks.taps import EarlyStop, RunTaps
from ..networks.loop import Network, through_layers
from .backward import graph_bytes
from .gradient_taps import GradientTaps
from .kept import Cache, NewestPositions
from .plain import WholePrompts
from .planner import MEMORY
from .recomputed import recomputed

__all__ = ["vector_jacobian_products"]


def vector_jacobian_products(
    network: Network,
    ids: Tensor,
    layers: Sequence[int],
    cotangents: Tensor,
    counted: range,
    *,
    rows: int = 8,
    memory: int = MEMORY,
) -> Tensor:
    """Products of cotangents with the Jacobian of the last stream, for each source layer.

    Arguments:
        network: a causal network.
        ids: token ids of one prompt, int [S].
        layers: source layers, below the last one.
        cotangents: [cotangent, D].
        counted: consecutive positions that count as source and as target.
        rows: cotangents per backward pass; fewer where their graph would exceed the memory.
        memory: bytes that the recorded graph may take; where one copy exceeds it, layers are computed again.

    Returns:
        [layer, cotangent, D], float32, summed over targets, averaged over sources; row = cotangent.
    """
    sources = [Capture(HookPoint.resid_post(layer), is_gradient=True) for layer in layers]
    spec = BoundSpec(captures=tuple(sources))
    copy_bytes = graph_bytes(network, ids[None], spec)
    rows = max(1, min(rows, len(cotangents), memory // copy_bytes))
    taps = _StreamTaps(spec, network.config.num_layers - 1)
    copies = ids.expand(rows, -1)
    # Leaving positions out must rotate no key otherwise; layers computed again would extend the cache twice.
    is_cut = all(network.config.keeps_keys(length, len(ids)) for length in (counted.start, counted.stop))
    if is_cut and copy_bytes <= memory:
        _run_after_prefix(network, copies[:, : counted.stop], counted.start, taps)
        inside = slice(0, len(counted))
    else:
        _run_whole(network if copy_bytes <= memory else recomputed(network), copies, taps)
        inside = slice(counted.start, counted.stop)
    edges = [edge for source in sources for edge in taps.watched[source].edges]
    products = torch.empty(len(layers), len(cotangents), cotangents.shape[1], device=ids.device)
    cotangent = torch.zeros_like(taps.stream)
    for start in range(0, len(cotangents), rows):
        part = cotangents[start : start + rows].to(cotangent)
        cotangent.zero_()[: len(part), inside] = part[:, None]
        is_last = start + rows >= len(cotangents)
        gradients = torch.autograd.grad(taps.stream, edges, cotangent, retain_graph=not is_last)
        for layer, gradient in enumerate(gradients):
            products[layer, start : start + rows] = gradient[: len(part), inside].float().mean(1)
    return products


class _StreamTaps(GradientTaps):
    """Taps that end the pass at the stream after the last layer, which is then differentiated."""

    stream: Tensor
    """Residual stream after the last layer, [row, S, D], a part of autograd's graph."""

    def __init__(self, spec: BoundSpec, last: int) -> None:
        super().__init__(spec, lambda capture, x: None)
        self._last = last

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Register the value x where its gradient is wanted; raises EarlyStop at the last stream."""
        if (kind, layer) == ("resid_post", self._last):
            self.stream = x
            raise EarlyStop
        return super().__call__(kind, layer, x, allowed)


def _run_whole(network: Network, ids: Tensor, taps: _StreamTaps) -> None:
    """Run whole prompts up to the last stream under autograd."""
    with torch.enable_grad():
        _run_to_stream(network, ids, WholePrompts(ids.shape[1], taps, ids.device), taps)


def _run_after_prefix(network: Network, ids: Tensor, start: int, taps: _StreamTaps) -> None:
    """Run prompts up to the last stream, of which only the positions from `start` on are recorded."""
    cache = Cache()
    if start:
        with torch.no_grad():
            prefix_taps = RunTaps(BoundSpec(), lambda capture, x: None)
            prefix = NewestPositions(cache, start, prefix_taps, ids.device)
            through_layers(network, ids[:, :start], prefix, prefix_taps)
        cache.length = start
    with torch.enable_grad():
        history = NewestPositions(cache, ids.shape[1], taps, ids.device)
        _run_to_stream(network, ids[:, start:], history, taps)


def _run_to_stream(
    network: Network, ids: Tensor, history: WholePrompts | NewestPositions, taps: _StreamTaps
) -> None:
    try:
        through_layers(network, ids, history, taps)
    except EarlyStop:
        pass
