"""Positional attention: distances at which heads attend by learned positions alone.

Border: matrices of a model with learned positions; no forward pass.

The stream at position p is taken to be the mean token embedding plus the position embedding of p, normalised
exactly as by the layer's first norm, and queries and keys are computed from it with their biases (Elhage et
al. 2021 find previous-token heads by position in this way). The softmax over visible positions is the
attention that positions alone produce; its mean by distance is the score, and that of distance 1 the
previous-token score. Other distances are its control. In later layers it covers the direct path of positions
through the stream only.

Refused are models that encode positions by rope or by score biases, as they have no such embeddings, and
models whose norms are applied to the stream itself (post-norm), where positions are no longer a summand.

Axes: layer, head, offset (distance from query to key: 0 for the position itself, negative for later keys of
bidirectional heads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from .circuits import key_queries
from .matrices import PlainMatrices, attending, heads_in, vocabulary_blocks

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from .matrices import Matrices, Norm

__all__ = ["position_scores"]


@stage(
    version=2,
    inputs={},
    outputs={
        "weight": Output(
            ("layer", "head", "offset"), "1", "mean attention to a key this many positions back"
        ),
    },
    resources=("weights",),
)
def position_scores(*, weights: Matrices, length: int = 64, offsets: int = 8) -> xr.Dataset:
    """Mean attention by distance that position embeddings alone cause.

    The mean is over the queries that have a key at that distance.

    Arguments:
        weights: matrices of the model as stored (plain), since norms are computed exactly here.
        length: number of positions, from 0 on.
        offsets: largest distance, in both directions for bidirectional heads.

    Raises:
        ConfigError: the matrices are folded, the model has no learned positions or is post-norm, or offsets
            exceed the length.
    """
    import xarray as xr

    if not isinstance(weights, PlainMatrices):
        raise ConfigError(
            "position_scores needs the matrices as stored, found folded ones; pass "
            "StoredMatrices.of(…, folded=False)"
        )
    table = weights.positions()[:length].astype(np.float64)
    if not 1 <= offsets < len(table):
        raise ConfigError(
            f"expected offsets in 1..{len(table) - 1}, as {len(table)} positions are used, found {offsets}"
        )
    config, layers = weights.config, attending(weights.config)
    _require_no_post_norm(config)
    # Encoders add a token type to every position; zeros elsewhere.
    stream = table + _mean_embedding(weights) + weights.token_type()
    heads = heads_in(config, layers[0]).num_attention_heads
    distances = np.arange(-offsets if config.looks_ahead else 0, offsets + 1)
    mean_weights = np.zeros((len(layers), heads, len(distances)))
    for i, layer in enumerate(layers):
        normed = _normed(stream, weights.norm("ln1", layer), config.norm_eps)
        scale = heads_in(config, layer).summary.scale
        for head in range(heads):
            pattern = _pattern(weights, layer, head, normed, scale)
            # diagonal(-d) holds the weights at distance d, of exactly the queries that have such a key.
            mean_weights[i, head] = [pattern.diagonal(-distance).mean() for distance in distances]
    dims = ("layer", "head", "offset")
    return xr.Dataset({"weight": (dims, mean_weights)}, {"layer": layers, "offset": distances})


def _require_no_post_norm(config: Architecture) -> None:
    """Raise ConfigError for a model that normalises the residual stream itself."""
    for layer, spec in enumerate(config.layers):
        if spec.norms == "of stream":
            raise ConfigError(
                f"layer {layer} of {config.model_type} normalises the residual stream itself (post-norm), so "
                "that the stream is not a sum with the position embedding as one term; choose a pre-norm "
                "model"
            )


def _pattern(weights: Matrices, layer: int, head: int, normed: Floats, scale: float) -> Floats:
    """Attention pattern of a head for given inputs, float64 [query position, key position].

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
        normed: normalised stream that the head reads, [position, hidden].
        scale: factor of the scores.
    """
    query, key = key_queries(weights, layer, head)
    query_bias, key_bias = (weights.projection(part, layer, head).bias for part in ("q", "k"))
    mixer = heads_in(weights.config, layer).summary
    scores = mixer.capped(scale * (normed @ query + query_bias) @ (normed @ key + key_bias).T, np)
    distance = np.subtract.outer(np.arange(len(normed)), np.arange(len(normed)))
    is_visible = np.full_like(distance, mixer.is_bidirectional, dtype=bool) | (distance >= 0)
    if mixer.window is not None:
        is_visible &= np.abs(distance) < mixer.window
    # After the soft cap: capped, -inf would become a finite score.
    scores = np.where(is_visible, scores, -np.inf)
    # The row maximum is subtracted so that exp cannot overflow.
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    pattern: Floats = exponentials / exponentials.sum(axis=1, keepdims=True)
    return pattern


def _normed(stream: Floats, norm: Norm | None, eps: float) -> Floats:
    """The stream [position, hidden] after a norm; None for a model without this norm."""
    if norm is None:
        return stream
    centred = stream - stream.mean(axis=1, keepdims=True) if norm.is_centring else stream
    normed: Floats = (
        centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + eps) * norm.gain + norm.bias
    )
    return normed


def _mean_embedding(weights: Matrices) -> Array:
    """Mean of all token embeddings, float64 [hidden]."""
    total = np.zeros(weights.config.hidden_size)
    for rows in vocabulary_blocks(weights.config):
        total += weights.embedding(rows).sum(axis=0, dtype=np.float64)
    return total / weights.config.vocab_size
