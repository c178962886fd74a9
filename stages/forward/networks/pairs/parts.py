"""Attention masks between source and target of encoder-decoder models, and where targets begin.

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
    """Position of each prompt's first target token, int [B, 1], from ids [B, S]: ids of targets are offset by
    the vocabulary size. None unless the model is an encoder-decoder."""
    if config.target_start is None:
        return None
    return (ids >= config.vocab_size).int().argmax(1, keepdim=True)


def seen_of(part: str, queries: Tensor, keys: Tensor, starts: Tensor | None) -> Tensor:
    """Attention mask of one kind of attention, bool, True where it may look; all False for queries of the
    other side.

    Arguments:
        part: self-attention of "source" or "target", or "cross" from target to source.
        queries: positions of queries.
        keys: positions of keys, broadcastable with queries.
        starts: positions at which targets begin, broadcastable with both.

    Raises:
        ConfigError: `starts` is None, as the pass does not support encoder-decoders.
    """
    if starts is None:
        raise no_pairs()
    if part == "source":
        return (queries < starts) & (keys < starts)
    if part == "cross":
        return (queries >= starts) & (keys < starts)
    return (queries >= starts) & (keys >= starts) & (keys <= queries)


def no_pairs() -> ConfigError:
    """Error of a pass that does not support encoder-decoders."""
    return ConfigError(
        "expected a model of one sequence here, found one with an encoder and a decoder; ask it by forward, "
        "run, capture or generate"
    )


class CrossTaps:
    """Taps of cross-attention (`AttentionTaps`): hook points of attention with the prefix "cross_".

    Edges can be cut in self-attention only.
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
