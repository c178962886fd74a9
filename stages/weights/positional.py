"""Which distance heads would look at if all tokens were the same: attention to positions alone.

Border: matrices of a model with learned positions; runs nothing.

Idea (Elhage et al. 2021: heads that attend to the previous token by position): the stream at position p is
taken to be the mean embedding and the row of p, normed exactly as the first norm of the layer does, and
queries and keys are made of it with their biases. The softmax over the positions that a head sees is then
attention as positions alone make it; its mean by distance is the score, and the score of distance 1 is the
previous-token score. Other distances are its control. Of later layers it says what positions do through the
stream directly.

A model that knows positions by rope or by a rise of scores has no such rows, and is refused; so is one whose
norms stand on the stream, as later layers then read no sum that positions are a part of.

Axes: layer, head, offset (how far back: 0 a position itself, below 0 later ones, of heads that see these).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from .circuits import key_queries
from .matrices import PlainMatrices, attending, heads_in

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from .matrices import Matrices, Norm

__all__ = ["position_scores"]

ROWS = 4096


@stage(
    version=2,
    inputs={},
    outputs={
        "weight": Output(("layer", "head", "offset"), "1", "mean attention to a position so far back"),
    },
    resources=("weights",),
)
def position_scores(*, weights: Matrices, length: int = 64, offsets: int = 8) -> xr.Dataset:
    """Attention by distance, of positions 0 to length - 1 alone; queries that have no position so far back
    take no part in its mean.

    weights: plain, not folded, as norms are done exactly. offsets: the farthest, on both sides where heads
    see later positions. Raises ConfigError for a model without learned positions or with norms on the stream,
    and for distances that reach beyond the length.
    """
    import xarray as xr

    if not isinstance(weights, PlainMatrices):
        raise ConfigError("expected plain matrices, found folded ones; StoredMatrices.of(…, folded=False)")
    table = weights.positions()[:length].astype(np.float64)
    if not 1 <= offsets < len(table):
        raise ConfigError(
            f"expected offsets in 1..{len(table) - 1}, the positions there are, found {offsets}"
        )
    config, layers = weights.config, attending(weights.config)
    _require_sum(config)
    stream = table + _mean_embedding(weights) + weights.token_type()
    heads = heads_in(config, layers[0]).count
    distances = np.arange(-offsets if config.looks_ahead else 0, offsets + 1)
    found = np.zeros((len(layers), heads, len(distances)))
    for i, layer in enumerate(layers):
        read = _normed(stream, weights.norm("ln1", layer), config.norm_eps)
        scale = heads_in(config, layer).mixer.scale
        for head in range(heads):
            pattern = _pattern(weights, layer, head, read, scale)
            found[i, head] = [pattern.diagonal(-back).mean() for back in distances]
    dims = ("layer", "head", "offset")
    return xr.Dataset({"weight": (dims, found)}, {"layer": layers, "offset": distances})


def _require_sum(config: Architecture) -> None:
    for layer, fact in enumerate(config.layers):
        if fact.norms == "of stream":
            raise ConfigError(
                f"expected norms that stand beside the stream, found them on it in layer {layer} of "
                f"{config.model_type}; nothing can be said of positions without the tokens that stand there"
            )


def _pattern(weights: Matrices, layer: int, head: int, read: Floats, scale: float) -> Floats:
    """[query position, key position]."""
    query, key = key_queries(weights, layer, head)
    of_query, of_key = (weights.projection(part, layer, head).bias for part in ("q", "k"))
    heads = heads_in(weights.config, layer)
    scores = heads.mixer.capped(scale * (read @ query + of_query) @ (read @ key + of_key).T, np)
    back = np.subtract.outer(np.arange(len(read)), np.arange(len(read)))
    seen = np.full_like(back, heads.mixer.is_bidirectional, dtype=bool) | (back >= 0)
    if heads.mixer.window is not None:
        seen &= np.abs(back) < heads.mixer.window
    scores = np.where(seen, scores, -np.inf)
    grown = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Floats = grown / grown.sum(axis=1, keepdims=True)
    return found


def _normed(stream: Floats, norm: Norm | None, eps: float) -> Floats:
    if norm is None:
        return stream
    wide = stream - stream.mean(axis=1, keepdims=True) if norm.is_centring else stream
    found: Floats = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + eps) * norm.gain + norm.bias
    return found


def _mean_embedding(weights: Matrices) -> Array:
    vocab, total = weights.config.vocab_size, np.zeros(weights.config.hidden_size)
    for start in range(0, vocab, ROWS):
        total += weights.embedding(slice(start, min(start + ROWS, vocab))).sum(axis=0, dtype=np.float64)
    return total / vocab
