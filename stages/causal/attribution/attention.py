"""Attribution patching of queries and keys with recomputed attention weights (AtP*).

Where softmax is saturated, the gradient at a query or key is near 0 whatever a large patch would do. AtP*
(Kramar et al. 2024, "AtP*: An efficient and scalable method for localizing LLM behaviour to components",
section 3) computes the attention weights under the patch exactly, and is first-order only behind them: effect
= sum over keys of (patched weight - corrupted weight) . gradient at the weight. Its second correction,
gradient dropout, is in patching.py.

Heads do not read each other's queries, and a score depends on a single query and key. So one run with all
clean queries of a layer gives the weights of each query patched alone, and one run with all clean keys gives
the scores of each key patched alone. Weights w under a single clean key p follow from its score: with d the
rise of the score, w_p becomes e^d w_p / (1 + w_p (e^d - 1)). Sinks and soft caps are already in w and d. Two
runs per layer, derived from the corrupted run by the planner.

Border: token ids, hook points and labelled numbers; the planner computes the runs.

Axes: head, query, key; for keys kv_head, key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.arrays import Floats
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Replace
from ...forward.hooks.spec import HookSpec
from ...forward.runs.run import Run, stream

if TYPE_CHECKING:
    from torch import Tensor

    from ...forward.models.model import Model

__all__ = ["NEEDED", "key_effects", "query_effects", "recomputed_attention"]

NEEDED: Mapping[str, str] = {"q": "pattern", "k": "attn_scores"}
"""Patched hook kind -> hook kind whose values are recomputed under the patch."""


def recomputed_attention(
    model: Model, prompt: Sequence[int], clean: Mapping[HookPoint, Tensor]
) -> dict[HookPoint, Floats]:
    """Attention of the corrupted prompt with all queries, or all keys, of one layer set to clean values.

    Arguments:
        model: The model.
        prompt: Token ids of the corrupted prompt.
        clean: Clean activation of each `q` or `k` hook point.

    Returns:
        By hook point, float64 [head, query, key]: attention weights for `q`, attention scores for `k`.
    """
    points = list(clean)
    targets = [HookPoint(NEEDED[point.kind], point.layer) for point in points]
    # One run per layer, with all heads patched together: heads do not read each other's queries or keys.
    runs = [
        Run(prompt, HookSpec().intervene(point, Replace(clean[point])).capture(target), None)
        for point, target in zip(points, targets, strict=True)
    ]
    return {
        points[index]: result[targets[index]][0].double().cpu().numpy()
        for index, result in stream(model, runs)
    }


def query_effects(weights: Floats, patched: Floats, gradient: Floats) -> Floats:
    """Effect of patching each clean query, with exact attention weights, float64 [head, query].

    Arguments:
        weights: Attention weights of the corrupted run [head, query, key].
        patched: Attention weights under clean queries, same shape.
        gradient: Gradient of the metric at the attention weights, same shape.
    """
    # Exact up to the weights, first-order behind them.
    effects: Floats = ((patched - weights) * gradient).sum(-1)
    return effects


def key_effects(weights: Floats, scores: Floats, patched: Floats, gradient: Floats, heads: int) -> Floats:
    """Effect of patching each clean key, with exact attention weights, float64 [kv_head, key].

    Arguments:
        weights: Attention weights of the corrupted run [head, query, key].
        scores: Attention scores of the corrupted run, -inf where masked, same shape.
        patched: Attention scores under clean keys, same shape.
        gradient: Gradient of the metric at the attention weights, same shape.
        heads: Number of key/value heads (fewer than query heads with grouped-query attention).
    """
    is_visible = np.isfinite(scores)
    # expm1 keeps small rises exact; masked scores are set to 0 first, because -inf - -inf is NaN.
    rise: Any = np.expm1(np.where(is_visible, patched, 0.0) - np.where(is_visible, scores, 0.0))
    mean = (weights * gradient).sum(-1, keepdims=True)
    # The key's own weight rises and all others shrink in proportion: sum_j g_j (w'_j - w_j) in closed form.
    moved = weights * rise * (gradient - mean) / (1.0 + weights * rise)
    # Query heads that share a key/value head are neighbours: their effects add up to the key's.
    by_head = moved.sum(1)
    effects: Floats = by_head.reshape(heads, -1, by_head.shape[-1]).sum(1)
    return effects
