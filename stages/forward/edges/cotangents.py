"""Cotangents: how a number read off the logits answers to what each destination reads.

The gradient with respect to what one head reads for its queries is not that of the stream, which all read: it
is what goes back through this head's queries alone. A pass that has kept what is read is gone back layer by
layer, each taken apart and differentiated by itself, so that no more than one layer's graph is ever held:

    dM/d(resid_mid) = dM/d(resid_post) + dM/d(MLP's input)
    dM/d(resid_pre) = dM/d(resid_mid) + the sum of dM/d(input) over q, k, v of all heads

Norms are not held: gradients go through them.

Border: tensors; whose gradient it is, the caller says.

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

__all__ = ["Held", "cotangents"]

Held = tuple[str, int]
"""What stays as it is whatever is read: ("heads", layer) or ("mlp", layer)."""
OfLogits = Callable[[Tensor], Tensor]


@steps_in_plain_torch
def cotangents(
    network: SplitNetwork,
    layout: Layout,
    streams: Streams,
    of_logits: OfLogits,
    held: Collection[Held] = (),
) -> Iterator[tuple[slice, Tensor]]:
    """Columns and the gradients with respect to what they read [B, column, S, D], from the logits down.

    of_logits: last logits [B, vocab] -> their gradient. held: parts whose output is a constant, and whose
    inputs reach the logits no more; nothing is given of these.
    """
    after = torch.zeros_like(streams.logits)
    after[:, -1] = _of_stream(network, streams.logits[:, -1], of_logits)
    yield slice(-1, None), after.unsqueeze(1)
    history = WholePrompts(after.shape[1], NO_TAPS, after.device)
    for layer in reversed(range(layout.num_layers)):
        of_heads = before = after
        if ("mlp", layer) not in held:
            given = _of_mlp(network, layer, streams.mlps[layer], after)
            column = layout.mlp_input(layer)
            yield slice(column, column + 1), given.unsqueeze(1)
            before = after + given
            of_heads = after if layout.parallel[layer] else before
        if ("heads", layer) not in held:
            inputs = _of_inputs(network, layer, streams.heads[layer], of_heads, layout.num_heads, history)
            yield layout.inputs(layer), inputs
            before = before + inputs.sum(1)
        after = before


@torch.enable_grad()
def _of_stream(network: SplitNetwork, stream: Tensor, of_logits: OfLogits) -> Tensor:
    """Gradient at the last stream [B, D]."""
    leaf = stream.detach().requires_grad_()
    logits = network.unembed(network.final_norm(leaf), Logits())
    (found,) = torch.autograd.grad(logits, leaf, of_logits(logits.detach()))
    return found


@torch.enable_grad()
def _of_mlp(network: SplitNetwork, layer: int, stream: Tensor, after: Tensor) -> Tensor:
    """Gradient at what an MLP reads, of that at what it adds to."""
    leaf = stream.detach().requires_grad_()
    (found,) = torch.autograd.grad(network.fed(layer, leaf, NO_TAPS), leaf, after)
    return found


@torch.enable_grad()
def _of_inputs(
    network: SplitNetwork, layer: int, stream: Tensor, after: Tensor, heads: int, history: WholePrompts
) -> Tensor:
    """Gradients at what heads read for queries, keys and values [B, 3 head, S, D], of that at what they add
    to."""
    copies = stream.detach().unsqueeze(1).expand(-1, heads, -1, -1)
    leaves = [copies.clone(memory_format=torch.contiguous_format).requires_grad_() for _ in KINDS]
    given = {f"{kind}_input": leaf for kind, leaf in zip(KINDS, leaves, strict=True)}
    z = attended(network, layer, given, stream, history)
    of_z = torch.matmul(after.unsqueeze(1), output_by_head(network, layer, heads).transpose(1, 2))
    return torch.cat(torch.autograd.grad(z, leaves, of_z), dim=1)
