"""What the reference implementation computes when attention edges are biased: an independent road to the
same numbers.

Transformers adds its mask to the scores after any soft cap. Adding -inf there cuts an edge; adding ln f
scales its weight by f and renormalises the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def biased(
    reference: Any,
    layers: Iterable[int],
    edges: Iterable[tuple[int, int]],
    bias: float,
    heads: Iterable[int] | None = None,
) -> Iterator[None]:
    """Within: `bias` is added to the scores of (query, key) edges in these layers and heads."""
    chosen, where = list(edges), None if heads is None else list(heads)

    def add(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        mask = mask.expand(1, reference.config.num_attention_heads, *mask.shape[-2:]).clone()
        for query, key in chosen:
            mask[:, slice(None) if where is None else where, query, key] += bias
        return args, kwargs | {"attention_mask": mask}

    handles = [
        reference.model.layers[layer].self_attn.register_forward_pre_hook(add, with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def pushed(reference: Any, layer: int, position: int, vector: Any) -> Iterator[None]:
    """Within: a vector is added to the residual stream after a layer, at one position."""

    def add(_module: Any, _args: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).clone()
        states[:, position] += torch.as_tensor(vector)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = reference.model.layers[layer].register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def logits(reference: Any, ids: Iterable[int]) -> np.ndarray:
    """Logits [position, vocab], float64."""
    with torch.no_grad():
        found = reference(torch.tensor([list(ids)])).logits[0]
    return np.asarray(found.double().numpy())


def attention(reference: Any, ids: Iterable[int]) -> list[np.ndarray]:
    """Weights [head, query, key] of every layer, float64."""
    with torch.no_grad():
        found = reference(torch.tensor([list(ids)]), output_attentions=True).attentions
    return [one[0].double().numpy() for one in found]


def states(reference: Any, ids: Iterable[int]) -> list[np.ndarray]:
    """Residual stream [position, hidden] after every layer, float64; the last before the final norm."""
    kept: dict[int, np.ndarray] = {}
    handles = []
    for number, layer in enumerate(reference.model.layers):

        def keep(_module: Any, _args: Any, output: Any, number: int = number) -> None:
            kept[number] = (output[0] if isinstance(output, tuple) else output)[0].double().numpy()

        handles.append(layer.register_forward_hook(keep))
    with torch.no_grad():
        reference(torch.tensor([list(ids)]))
    for handle in handles:
        handle.remove()
    return [kept[number] for number in sorted(kept)]


def kl(one: np.ndarray, other: np.ndarray) -> float:
    """KL(softmax(one) || softmax(other)), nats."""
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (one, other))
    return float((p * np.log(p / q)).sum())
