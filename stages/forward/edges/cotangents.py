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
"""("heads", layer) or ("mlp", layer): attention heads or MLP of a layer whose output counts as constant."""
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
    """Gradients of a scalar with respect to what each head and MLP reads from the residual stream.

    They are computed layer by layer, from the logits down.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        streams: recorded streams of the run.
        of_logits: function from the last logits [B, vocab] to the gradient of the scalar at them.
        constant: heads or MLPs whose output counts as constant; their destinations are left out.

    Yields:
        Slice of destinations, and their gradients [B, column, S, D].
    """
    after = torch.zeros_like(streams.logits)
    # Only the last position's logits are read, so all other gradients start at zero.
    after[:, -1] = _gradient_at_final_stream(network, streams.logits[:, -1], of_logits)
    yield slice(-1, None), after.unsqueeze(1)
    history = WholePrompts(after.shape[1], NO_TAPS, after.device)
    # One layer's graph at a time: that of a whole pass with a stream per head would not fit in memory.
    for layer in reversed(range(layout.num_layers)):
        # Gradients at the stream: after the layer, at the output of its heads, and before it.
        at_head_output = before = after
        if ("mlp", layer) not in constant:
            gradient = _gradient_at_mlp_input(network, layer, streams.mlps[layer], after)
            column = layout.mlp_input(layer)
            yield slice(column, column + 1), gradient.unsqueeze(1)
            before = after + gradient
            at_head_output = after if layout.parallel[layer] else before
        if ("heads", layer) not in constant:
            stream, n_heads = streams.heads[layer], layout.num_heads
            gradients = _gradients_at_head_inputs(network, layer, stream, at_head_output, n_heads, history)
            yield layout.inputs(layer), gradients
            before = before + gradients.sum(1)
        after = before


@torch.enable_grad()
def _gradient_at_final_stream(network: SplitNetwork, stream: Tensor, of_logits: OfLogits) -> Tensor:
    """Gradient at the stream that the final norm reads at the last position, [B, D]."""
    leaf = stream.detach().requires_grad_()
    logits = network.unembed(network.final_norm(leaf), Logits())
    (gradient,) = torch.autograd.grad(logits, leaf, of_logits(logits.detach()))
    return gradient


@torch.enable_grad()
def _gradient_at_mlp_input(network: SplitNetwork, layer: int, stream: Tensor, after: Tensor) -> Tensor:
    """Backpropagate through an MLP: gradient at the stream that it reads, [B, S, D].

    Arguments:
        network: the network.
        layer: layer index.
        stream: stream that the MLP reads, [B, S, D].
        after: gradient at the output of the MLP, [B, S, D].
    """
    leaf = stream.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(network.fed(layer, leaf, NO_TAPS), leaf, after)
    return gradient


@torch.enable_grad()
def _gradients_at_head_inputs(
    network: SplitNetwork, layer: int, stream: Tensor, after: Tensor, heads: int, history: WholePrompts
) -> Tensor:
    """Backpropagate through attention: gradients at what each head reads for q, for k and for v.

    Arguments:
        network: the network.
        layer: layer index.
        stream: stream that the heads read, [B, S, D].
        after: gradient at the summed output of the heads, [B, S, D].
        heads: number of query heads.
        history: positions of the prompts.

    Returns:
        [B, 3 * head, S, D]: first q of all heads, then k, then v.
    """
    copies = stream.detach().unsqueeze(1).expand(-1, heads, -1, -1)
    # Expanded copies share memory; each leaf needs its own for autograd to tell the heads apart.
    leaves = [copies.clone(memory_format=torch.contiguous_format).requires_grad_() for _ in KINDS]
    inserted = {f"{kind}_input": leaf for kind, leaf in zip(KINDS, leaves, strict=True)}
    z = attended(network, layer, inserted, stream, history)
    z_gradient = torch.matmul(after.unsqueeze(1), output_by_head(network, layer, heads).transpose(1, 2))
    return torch.cat(torch.autograd.grad(z, leaves, z_gradient), dim=1)
