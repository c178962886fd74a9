"""Sizes of defaults: how many prompts a workflow asks about, as a function of the model's size.

The function never depends on timing, so that the same question has the same keys on every machine.
"""

from __future__ import annotations

__all__ = ["OPERATIONS", "affordable"]

OPERATIONS = 1.5e12
"""Floating-point operations that a default may take in one stage: about a minute on two cores."""


def affordable(operations: float, most: int, *, least: int = 8) -> int:
    """Number of items, such as prompts, that a workflow takes by default.

    Arguments:
        operations: floating-point operations of one item.
        most: number of items there are.
        least: smallest number, if there are so many: fewer would answer nothing.

    Returns:
        `most`, or as many as OPERATIONS allow.
    """
    return min(most, max(least, int(OPERATIONS / operations)))
