"""Queries and keys under a patch: attention weights made anew, where their slope says little.

A saturated softmax is flat: the gradient at a query or a key is near 0, whatever a large patch would do. AtP*
(Kramar et al. 2024, "AtP*: An efficient and scalable method for localizing LLM behaviour to components")
makes the weights that the patch gives and takes the first order from there: sum over keys of (weight under
the patch - weight) . gradient at the weight. Its other part, gradients dropped layer by layer, is in
patching.py.

Heads do not see each other's queries, nor a score another query or key, so that one run with all clean
queries of a layer holds the weights of each of them patched alone, and one with all clean keys the scores.
Weights under a single clean key p follow from its score: e^d w_p over 1 + w_p (e^d - 1), with d what the
score rises by; sinks and soft caps are in w and d. Two runs per layer, taken from the corrupted one by the
planner.

Border: token ids, hook points, and labelled numbers; runs are the planner's.

Axes: head, query, key; of keys kv_head, key.
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

__all__ = ["NEEDED", "key_effects", "query_effects", "remade"]

NEEDED: Mapping[str, str] = {"q": "pattern", "k": "attn_scores"}
"""Kind that is patched -> what its weights follow from."""


def remade(model: Model, prompt: Sequence[int], clean: Mapping[HookPoint, Tensor]) -> dict[HookPoint, Floats]:
    """Of each point, clean queries or clean keys of a layer, what a run of the prompt with all of them has at
    `NEEDED`: float64 [head, query, key]."""
    points = list(clean)
    read = [HookPoint(NEEDED[point.kind], point.layer) for point in points]
    runs = [
        Run(prompt, HookSpec().intervene(point, Replace(clean[point])).capture(seen), None)
        for point, seen in zip(points, read, strict=True)
    ]
    return {
        points[index]: result[read[index]][0].double().cpu().numpy() for index, result in stream(model, runs)
    }


def query_effects(weights: Floats, patched: Floats, gradient: Floats) -> Floats:
    """What each clean query does by the weights it gives, [head, query].

    weights, patched: [head, query, key]; gradient: of the metric at the weights.
    """
    found: Floats = ((patched - weights) * gradient).sum(-1)
    return found


def key_effects(weights: Floats, scores: Floats, patched: Floats, gradient: Floats, heads: int) -> Floats:
    """What each clean key does by the weights it gives, [kv_head, key]. scores, patched: of the run and under
    clean keys, -inf where nobody looks. heads: how many have keys of their own."""
    seen = np.isfinite(scores)
    rise: Any = np.expm1(np.where(seen, patched, 0.0) - np.where(seen, scores, 0.0))
    mean = (weights * gradient).sum(-1, keepdims=True)
    moved = weights * rise * (gradient - mean) / (1.0 + weights * rise)
    by_head = moved.sum(1)
    found: Floats = by_head.reshape(heads, -1, by_head.shape[-1]).sum(1)
    return found
