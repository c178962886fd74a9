"""Cotangents: the gradient of a scalar of the logits with respect to what each destination reads.

The gradient for what one head reads for its queries is not that of the stream, which all parts read: it is
what flows back through this head's queries alone. A recorded run is differentiated layer by layer, each by
itself, so that only one layer's graph exists at a time:

    dM/d(resid_mid) = dM/d(resid_post) + dM/d(MLP's input)
    dM/d(resid_pre) = dM/d(resid_mid) + the sum of dM/d(input) over q, k, v of all heads

Norms are not frozen: gradients flow through them.

Axes: B prompts, S positions, D hidden; column = destinations of one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from ....pipeline.ambient import steps_in_plain_torch
from ..hooks.wants import Logits
from ..passes.plain import WholePrompts
from .layout import KINDS, Layout
from .parts import NO_TAPS, SplitNetwork, attended, output_by_head
from .prompts import Streams

__all__ = ["ConstantPart", "cotangents"]

ConstantPart = tuple[str, int]
"""("heads", layer) or ("mlp", layer): a part whose output counts as constant."""
OfLogits = Callable[[Tensor], Tensor]
"""Last logits [B, vocab] -> gradient of the scalar with respect to them."""


@steps_in_plain_torch
def cotangents(
    network: SplitNetwork,
    layout: Layout,
    streams: Streams,
    of_logits: OfLogits,
    constant: Collection[ConstantPart] = (),
) -> Iterator[tuple[slice, Tensor]]:
    """Gradients with respect to what destinations read, from the logits down.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        streams: recorded streams of the run.
        of_logits: last logits [B, vocab] -> gradient with respect to them.
        constant: parts whose output counts as constant; their destinations are left out.

    Yields:
        Slice of destinations, and their gradients [B, column, S, D].
    """
    after = torch.zeros_like(streams.logits)
    # Only the last position's logits are read, so all other gradients start at zero.
    after[:, -1] = _of_stream(network, streams.logits[:, -1], of_logits)
    yield slice(-1, None), after.unsqueeze(1)
    history = WholePrompts(after.shape[1], NO_TAPS, after.device)
    # One layer's graph at a time: that of a whole pass with a stream per head would not fit in memory.
    for layer in reversed(range(layout.num_layers)):
        of_heads = before = after
        if ("mlp", layer) not in constant:
            gradient = _of_mlp(network, layer, streams.mlps[layer], after)
            column = layout.mlp_input(layer)
            yield slice(column, column + 1), gradient.unsqueeze(1)
            before = after + gradient
            of_heads = after if layout.parallel[layer] else before
        if ("heads", layer) not in constant:
            inputs = _of_inputs(network, layer, streams.heads[layer], of_heads, layout.num_heads, history)
            yield layout.inputs(layer), inputs
            before = before + inputs.sum(1)
        after = before


@torch.enable_grad()
def _of_stream(network: SplitNetwork, stream: Tensor, of_logits: OfLogits) -> Tensor:
    """Gradient at the last stream, [B, D]."""
    leaf = stream.detach().requires_grad_()
    logits = network.unembed(network.final_norm(leaf), Logits())
    (gradient,) = torch.autograd.grad(logits, leaf, of_logits(logits.detach()))
    return gradient


@torch.enable_grad()
def _of_mlp(network: SplitNetwork, layer: int, stream: Tensor, after: Tensor) -> Tensor:
    """Backpropagate through an MLP: gradient with respect to its input stream, [B, S, D]."""
    leaf = stream.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(network.fed(layer, leaf, NO_TAPS), leaf, after)
    return gradient


@torch.enable_grad()
def _of_inputs(
    network: SplitNetwork, layer: int, stream: Tensor, after: Tensor, heads: int, history: WholePrompts
) -> Tensor:
    """Gradients at what heads read for q, k and v, [B, 3 head, S, D], from that at their output."""
    copies = stream.detach().unsqueeze(1).expand(-1, heads, -1, -1)
    # Expanded copies share memory; each leaf needs its own for autograd to tell the heads apart.
    leaves = [copies.clone(memory_format=torch.contiguous_format).requires_grad_() for _ in KINDS]
    inserted = {f"{kind}_input": leaf for kind, leaf in zip(KINDS, leaves, strict=True)}
    z = attended(network, layer, inserted, stream, history)
    of_z = torch.matmul(after.unsqueeze(1), output_by_head(network, layer, heads).transpose(1, 2))
    return torch.cat(torch.autograd.grad(z, leaves, of_z), dim=1)
