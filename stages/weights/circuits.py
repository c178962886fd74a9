"""Circuits of heads and between parts of a model, as factored matrices.

Border: matrices of a model (`Matrices`, plain or folded) in, `FactoredMatrix` out; nothing is multiplied out.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"): a head's queries and keys only
ever meet each other, and its values only ever go through its output projection, so that a head is two
matrices of rank d_head: QK = W_Q W_K', which key positions a query position looks at, and OV = W_V W_O, what
is written of what is read. Between tokens they stand between embedding and unembedding. What one part writes
and a later one reads meets in a product of their matrices alone: virtual weights.

Axes: query, key (what is read at either), source (what is read), target (what is written), hidden, mlp,
feature, vocab; rows are what is read, columns what is written or, of QK, the key.

Biases are in no circuit. Rope turns queries towards keys, so QK is that of one distance. Where queries or
keys are normed head by head, or heads multiplied by gates, there is no such matrix, and a line says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from ..forward.models.turned import turned_queries
from .factored import BLOCK, FactoredMatrix
from .matrices import attending, heads_in

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture, Heads
    from .matrices import Matrices

__all__ = [
    "bigrams",
    "feature_to_head",
    "has_scores",
    "head_to_mlp",
    "key_queries",
    "mlp_to_mlp",
    "ov_circuit",
    "ov_of_tokens",
    "qk_circuit",
    "qk_of_tokens",
]


def key_queries(
    weights: Matrices, layer: int, head: int, *, offset: int = 0, length: int | None = None
) -> tuple[Array, Array]:
    """(queries, keys), each [hidden, d_head], whose product with the stream is what a head's scores are made
    of, for a key `offset` positions before its query; length: see `turned_queries`. ConfigError where scores
    are not bilinear in the stream."""
    heads = heads_in(weights.config, layer)
    if what := _between(heads):
        raise ConfigError(
            f"expected queries and keys that meet as they are made, found them {what} in layer {layer} "
            f"of {weights.config.model_type}; no QK circuit follows such heads, OV circuits do"
        )
    query, key = (weights.projection(part, layer, head).matrix for part in ("q", "k"))
    return turned_queries(heads, query, offset, length), key


def has_scores(config: Architecture) -> bool:
    """Whether the scores of all heads of a model are products of matrices."""
    return not any(_between(heads_in(config, layer)) for layer in attending(config))


def _between(heads: Heads) -> str:
    """What is done to queries and keys between their matrices and their scores; empty for nothing but
    rope."""
    return "normed" if heads.are_normed else "scaled by their positions" if heads.grows else ""


def qk_circuit(
    weights: Matrices, layer: int, head: int, *, offset: int = 0, length: int | None = None
) -> FactoredMatrix:
    """[query, key] of a head: by how much a score grows with each entry of what stands at either.

    Times the head's scale (`Heads.mixer.scale`) these are scores, before any soft cap; ALiBi adds its rise
    with position. offset: positions between, with rope; 0 leaves queries as they are.
    """
    query, key = key_queries(weights, layer, head, offset=offset, length=length)
    return FactoredMatrix(query, key.T, ("query", "key"))


def ov_circuit(weights: Matrices, layer: int, head: int) -> FactoredMatrix:
    """[source, target] of a head: what it writes of what it reads with weight 1."""
    value = weights.projection("v", layer, head).matrix
    return FactoredMatrix(value, weights.output(layer, head), ("source", "target"))


def qk_of_tokens(
    weights: Matrices,
    layer: int,
    head: int,
    *,
    offset: int = 0,
    length: int | None = None,
    block: int = BLOCK,
) -> FactoredMatrix:
    """[query token, key token]: the QK circuit through the embedding; factors are read block by block."""
    query, key = key_queries(weights, layer, head, offset=offset, length=length)
    factors = [_embedded(weights, part, block) for part in (query, key)]
    return FactoredMatrix(factors[0], factors[1].T, ("query_token", "key_token"))


def ov_of_tokens(weights: Matrices, layer: int, head: int, *, block: int = BLOCK) -> FactoredMatrix:
    """[source token, target token]: the OV circuit through embedding and unembedding, logits of a token when
    another is read; factors are read block by block."""
    value, output = weights.projection("v", layer, head).matrix, weights.output(layer, head)
    left, right = _embedded(weights, value, block), _unembedded(weights, output, block)
    return FactoredMatrix(left, right, ("source_token", "target_token"))


def bigrams(weights: Matrices, *, block: int = BLOCK) -> FactoredMatrix:
    """[source token, target token] of the direct path from embedding to unembedding."""
    eye = np.eye(weights.config.hidden_size, dtype=np.float32)
    left, right = _embedded(weights, eye, block), _unembedded(weights, eye, block)
    return FactoredMatrix(left, right, ("source_token", "target_token"))


def mlp_to_mlp(weights: Matrices, source: int, layer: int, *, part: str = "up") -> FactoredMatrix:
    """[neuron of `source`, neuron of `layer`]: by how much a neuron's input grows with another's activation.

    part: "up", or "gate" of a gated MLP. ConfigError unless the first layer is before the second.
    """
    _require_before(source, layer)
    written, read = weights.mlp_out(source).matrix, _of_part(weights.mlp_in(layer), part)
    return FactoredMatrix(written, read, ("mlp", "target_mlp"))


def head_to_mlp(weights: Matrices, source: int, head: int, layer: int, *, part: str = "up") -> FactoredMatrix:
    """[source, neuron of `layer`]: what a neuron gets of what a head reads. The head may be of the same layer
    where the MLP reads behind it."""
    _require_before(source, layer, same=not weights.config.layers[layer].is_parallel)
    ov = ov_circuit(weights, source, head)
    return FactoredMatrix.product(
        ov.left, ov.right, _of_part(weights.mlp_in(layer), part), dims=("source", "mlp")
    )


def feature_to_head(
    weights: Matrices, written: Array, layer: int, head: int, *, part: str = "v", offset: int = 0
) -> FactoredMatrix:
    """[feature, …] of features that write rows [feature, hidden]: what a head makes of each. Raises
    ConfigError for another part.

    part: "v", what it writes of it, [feature, target]; "q", which keys it then looks for, [feature, key];
    "k", which queries then look at it, [feature, query].
    """
    rows = np.asarray(written)
    if part not in ("q", "k", "v"):
        raise ConfigError(f"expected part 'q', 'k' or 'v' of a head, found {part!r}")
    if part == "v":
        circuit = ov_circuit(weights, layer, head)
    else:
        qk = qk_circuit(weights, layer, head, offset=offset)
        circuit = qk if part == "q" else qk.T
    dims = ("feature", circuit.dims[1])
    return FactoredMatrix.product(rows, circuit.left, circuit.right, dims=dims)


def _of_part(read: Mapping[str, Any], part: str) -> Array:
    if part not in read:
        raise ConfigError(f"expected a part among {', '.join(read)} of the MLP, found {part!r}")
    found: Array = read[part].matrix
    return found


def _require_before(source: int, layer: int, *, same: bool = False) -> None:
    if source > layer or (source == layer and not same):
        raise ConfigError(
            f"expected a part that is computed before what reads it, found layer {source} read in {layer}"
        )


def _embedded(weights: Matrices, matrix: Array, block: int) -> Any:
    """embedding @ matrix, [vocab, column], a dask array whose blocks read their rows when they are asked."""
    return _by_rows(lambda here: weights.embedding(here) @ matrix, weights, matrix.shape[1], block)


def _unembedded(weights: Matrices, matrix: Array, block: int) -> Any:
    """matrix @ unembedding, [row, vocab], likewise."""
    return _by_rows(
        lambda here: weights.unembedding(here).matrix.T @ matrix.T, weights, matrix.shape[0], block
    ).T


def _by_rows(read: Any, weights: Matrices, width: int, block: int) -> Any:
    import dask.array as da
    from dask.delayed import delayed

    vocab, later = weights.config.vocab_size, delayed(read, pure=False)
    ranges = [slice(start, min(start + block, vocab)) for start in range(0, vocab, block)]
    return da.concatenate(
        [da.from_delayed(later(here), (here.stop - here.start, width), np.float32) for here in ranges]
    )
