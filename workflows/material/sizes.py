"""Sizes of defaults: how many prompts, tokens or controls a workflow takes, by the size of the model.

Sizes follow from a count of operations, which never depends on timing, so that the same question has the same
keys on every machine. The models that ship with mizarr are small enough for every default in full.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ...stages.forward.runs.duration import PassWork

if TYPE_CHECKING:
    from ...stages.forward.architectures.architecture import Architecture

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "CONTROLS",
    "FEWEST_CONTROLS",
    "FEWEST_FACTS",
    "OPERATIONS",
    "affordable",
    "affordable_characters",
    "intervention_operations",
    "spread_layers",
]

OPERATIONS = 1.2e12
"""Floating-point operations that a default may take in one stage: 24 to 40 seconds of one processor core at
the 30 to 50 GFLOP/s of short prompts. A workflow has up to three such stages, and starts in 10 seconds, so
that it answers within two minutes of processor time."""

CONTROLS, FEWEST_CONTROLS = 50, 19
"""Largest and smallest number of random causes by default: of fewer than 19, no p-value is below 5 %."""
FEWEST_FACTS = 4
"""Smallest number of facts by default to choose a cause on, and to score it on: an interval over fewer says
little."""
CHARACTERS_PER_TOKEN = 4
"""Characters of English prose per token, about, in vocabularies of 30,000 to 260,000 tokens."""


def affordable(operations: float, most: int, *, least: int = 8) -> int:
    """Number of items, such as prompts, that a workflow takes by default.

    Arguments:
        operations: floating-point operations of one item, such as one prompt or one control.
        most: number of items there are.
        least: smallest number, if there are so many: fewer would answer nothing.

    Returns:
        `most`, or as many as OPERATIONS allow.
    """
    return min(most, max(least, int(OPERATIONS / operations)))


def intervention_operations(config: Architecture, n_tokens: float, *, logit_rows: float = 1) -> float:
    """Floating-point operations of a run with an intervention in one layer, mean over layers: only the layers
    above are computed, on average half of them.

    Arguments:
        config: architecture of the model.
        n_tokens: length of the prompt.
        logit_rows: number of positions whose logits are computed.
    """
    return PassWork(n_tokens * config.num_layers / 2, logit_rows=logit_rows).operations(config)


def affordable_characters(config: Architecture, most: int, *, times: int = 1) -> int:
    """Number of characters of English prose that a default reads: `most`, or as many as OPERATIONS allow in
    forward passes without logits.

    Arguments:
        config: architecture of the model.
        most: number of characters that suffice for any model.
        times: how often each character is read, such as once at each of several line widths.
    """
    per_token = CHARACTERS_PER_TOKEN / times
    one_token = PassWork(config.num_layers).operations(config)
    n_tokens = affordable(one_token, math.ceil(most / per_token))
    return min(most, int(n_tokens * per_token))


def spread_layers(n_layers: int, most: int) -> tuple[int, ...]:
    """Candidate layers of an intervention by default: at most `most`, evenly spaced, without the last layer,
    after which nothing is left to read the change.

    Arguments:
        n_layers: number of layers of the model.
        most: largest number of candidates.
    """
    layers = np.linspace(0, max(n_layers - 2, 0), min(most, max(n_layers - 1, 1)))
    return tuple(dict.fromkeys(int(layer) for layer in layers.round()))
