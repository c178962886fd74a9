"""What of a pair sees what of it, and where in a row of ids a target begins.

Axes: [B, H, query, key].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .....store.errors import ConfigError

if TYPE_CHECKING:
    from ...architectures.architecture import Architecture
    from ...hooks.taps import PassTaps

__all__ = ["CrossTaps", "seen_of", "starts_of"]


def starts_of(ids: Tensor, config: Architecture) -> Tensor | None:
    """Where targets begin in whole prompts of ids [B, S]: int [B, 1]; None where prompts are no pairs."""
    if config.target_start is None:
        return None
    return (ids >= config.vocab_size).int().argmax(1, keepdim=True)


def seen_of(part: str, queries: Tensor, keys: Tensor, starts: Tensor | None) -> Tensor:
    """Bool, True where a part of a pair is looked at: queries, keys and starts of targets broadcast.

    part: of self-attention among "source" or "target", or "cross" from the second to the first. At other
    queries nothing is seen. Raises ConfigError where nobody knows where targets begin.
    """
    if starts is None:
        raise no_pairs()
    if part == "source":
        return (queries < starts) & (keys < starts)
    if part == "cross":
        return (queries >= starts) & (keys < starts)
    return (queries >= starts) & (keys >= starts) & (keys <= queries)


def no_pairs() -> ConfigError:
    """What to say where a pass does not know of pairs."""
    return ConfigError(
        "expected a model of one sequence here, found one with an encoder and a decoder; ask it by forward, "
        "run, capture or generate"
    )


class CrossTaps:
    """Taps of cross-attention (`AttentionTaps`), whose hook points are attention's with "cross_" before.

    Cut edges are those of self-attention alone.
    """

    def __init__(self, taps: PassTaps) -> None:
        self._taps = taps

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `AttentionTaps`."""
        return self._taps(f"cross_{kind}", layer, x, allowed)

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """See `AttentionTaps`."""
        return self._taps.captures(layer, *(f"cross_{kind}" for kind in kinds))

    def changes_attention(self, layer: int) -> bool:
        """See `AttentionTaps`."""
        return self._taps.changes(layer, "cross_scores", "cross_attn_scores", "cross_pattern")

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """See `AttentionTaps`."""
        return None
