"""QK and OV circuits of heads, and products of matrices between parts of a model, as factored matrices.

Border: matrices of a model (`Matrices`, plain or folded) in, `FactoredMatrix` out; products are not
evaluated.

A head is two matrices of rank d_head (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"): QK = W_Q W_K^T decides which key positions a query position attends to, and OV = W_V W_O what is
written for what is read. Between tokens they are multiplied by embedding and unembedding. The product of what
one part writes with and a later part reads with is called virtual weights.

Axes: query, key (residual stream at either position), source (stream that is read), target (stream that is
written), hidden, mlp, feature, vocab. Rows are read; columns are written or, of QK, the key side.

Biases are in no circuit. Rope rotates queries relative to keys, so QK belongs to one distance. Heads with
normalised queries and keys, or with gates, have no such matrix, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from ..forward.models.turned import turned_queries
from .factored import BLOCK, FactoredMatrix
from .matrices import attending, heads_in, vocabulary_blocks

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture, AttentionSpec
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
    """Query and key matrix of a head, each [hidden, d_head].

    The attention score between a query stream x and a key stream y is (x W_Q) . (y W_K).

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
        offset: distance from the key to its query; rotates the queries of a model with rope.
        length: prompt length, for rope that depends on it; see `turned_queries`.

    Raises:
        ConfigError: the head's scores are not bilinear in the stream.
    """
    heads = heads_in(weights.config, layer)
    if operation := _operation_on_queries_and_keys(heads):
        raise ConfigError(
            f"heads of layer {layer} of {weights.config.model_type} have no QK circuit, because their "
            f"queries and keys are {operation} before they are multiplied; use OV circuits"
        )
    query, key = (weights.projection(part, layer, head).matrix for part in ("q", "k"))
    return turned_queries(heads.rope, query, offset, length), key


def has_scores(config: Architecture) -> bool:
    """Whether the scores of all heads of a model are bilinear in the stream."""
    return not any(_operation_on_queries_and_keys(heads_in(config, layer)) for layer in attending(config))


def _operation_on_queries_and_keys(heads: AttentionSpec) -> str:
    """What is done to queries and keys between projections and scores, besides rope; "" for nothing."""
    # Both depend on more than the stream at one position, so no fixed matrix gives the score.
    if heads.qk_norm is not None:
        return "normed"
    return "" if heads.temperature_tuning is None else "scaled by their positions"


def qk_circuit(
    weights: Matrices, layer: int, head: int, *, offset: int = 0, length: int | None = None
) -> FactoredMatrix:
    """QK circuit of a head, W_Q W_K^T [query, key]: the score as a bilinear form of two stream states.

    Scores are this form times the head's scale (`AttentionMixer.scale`), before a soft cap; ALiBi is added to
    them.

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
        offset: distance from the key to its query, with rope; 0 leaves queries unrotated.
        length: prompt length, for rope that depends on it.
    """
    query, key = key_queries(weights, layer, head, offset=offset, length=length)
    return FactoredMatrix(query, key.T, ("query", "key"))


def ov_circuit(weights: Matrices, layer: int, head: int) -> FactoredMatrix:
    """OV circuit of a head, W_V W_O [source, target]: output for a state that is attended to with weight 1.

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
    """
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
    """QK circuit of a head through the embedding, [query_token, key_token]: scores between tokens.

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
        offset: distance from the key to its query, with rope.
        length: prompt length, for rope that depends on it.
        block: vocabulary rows read at a time.
    """
    query, key = key_queries(weights, layer, head, offset=offset, length=length)
    # One factor per side, [vocab, d_head]: the product [vocab, vocab] is never made.
    factors = [_embedded(weights, part, block) for part in (query, key)]
    return FactoredMatrix(factors[0], factors[1].T, ("query_token", "key_token"))


def ov_of_tokens(weights: Matrices, layer: int, head: int, *, block: int = BLOCK) -> FactoredMatrix:
    """OV circuit through embedding and unembedding, [source_token, target_token]: logits of attended tokens.

    Arguments:
        weights: matrices of the model.
        layer: layer of the head.
        head: index of the head.
        block: vocabulary rows read at a time.
    """
    value, output = weights.projection("v", layer, head).matrix, weights.output(layer, head)
    embedded, unembedded = _embedded(weights, value, block), _unembedded(weights, output, block)
    return FactoredMatrix(embedded, unembedded, ("source_token", "target_token"))


def bigrams(weights: Matrices, *, block: int = BLOCK) -> FactoredMatrix:
    """Direct path from embedding to unembedding, [source_token, target_token]: logits without any layer.

    Arguments:
        weights: matrices of the model.
        block: vocabulary rows read at a time.
    """
    # The identity takes the place of a head's matrices, so that one code path multiplies all circuits.
    eye = np.eye(weights.config.hidden_size, dtype=np.float32)
    embedded, unembedded = _embedded(weights, eye, block), _unembedded(weights, eye, block)
    return FactoredMatrix(embedded, unembedded, ("source_token", "target_token"))


def mlp_to_mlp(weights: Matrices, source: int, layer: int, *, part: str = "up") -> FactoredMatrix:
    """Virtual weights from neurons of an earlier MLP to neurons of a later one, [mlp, target_mlp].

    Arguments:
        weights: matrices of the model.
        source: layer of the MLP that writes.
        layer: layer of the MLP that reads.
        part: input matrix of the reading MLP: "up", or "gate" of a gated MLP.

    Raises:
        ConfigError: `source` is not before `layer`.
    """
    _require_before(source, layer)
    written, read = weights.mlp_out(source).matrix, _input_matrix(weights.mlp_in(layer), part)
    return FactoredMatrix(written, read, ("mlp", "target_mlp"))


def head_to_mlp(weights: Matrices, source: int, head: int, layer: int, *, part: str = "up") -> FactoredMatrix:
    """Virtual weights from the stream that a head reads to neurons of an MLP, [source, mlp].

    Arguments:
        weights: matrices of the model.
        source: layer of the head; may equal `layer` unless attention and MLP are parallel.
        head: index of the head.
        layer: layer of the MLP.
        part: input matrix of the MLP: "up", or "gate" of a gated MLP.
    """
    _require_before(source, layer, same_layer=not weights.config.layers[layer].is_parallel)
    ov = ov_circuit(weights, source, head)
    return FactoredMatrix.product(
        ov.left, ov.right, _input_matrix(weights.mlp_in(layer), part), dims=("source", "mlp")
    )


def feature_to_head(
    weights: Matrices, written: Array, layer: int, head: int, *, part: str = "v", offset: int = 0
) -> FactoredMatrix:
    """Effect of dictionary features on a head: what it writes, or where it attends, if it reads a feature.

    Arguments:
        weights: matrices of the model.
        written: decoder vectors of the features, [feature, hidden].
        layer: layer of the head.
        head: index of the head.
        part: "v" for what the head writes for each feature [feature, target], "q" for the key directions that
            a query with the feature attends to [feature, key], "k" for the query directions that attend to a
            key with the feature [feature, query].
        offset: distance from the key to its query, with rope.

    Raises:
        ConfigError: another part.
    """
    rows = np.asarray(written)
    if part not in ("q", "k", "v"):
        raise ConfigError(
            f"expected 'q', 'k' or 'v' as the part of a head that reads features, found {part!r}"
        )
    if part == "v":
        circuit = ov_circuit(weights, layer, head)
    else:
        qk = qk_circuit(weights, layer, head, offset=offset)
        circuit = qk if part == "q" else qk.T
    dims = ("feature", circuit.dims[1])
    return FactoredMatrix.product(rows, circuit.left, circuit.right, dims=dims)


def _input_matrix(inputs: Mapping[str, Any], part: str) -> Array:
    """Input matrix [hidden, mlp] of an MLP, by name ("up" or "gate"); ConfigError if the MLP has none."""
    if part not in inputs:
        raise ConfigError(
            f"this MLP has the input matrices {', '.join(inputs)}, found part={part!r}; name one of them"
        )
    matrix: Array = inputs[part].matrix
    return matrix


def _require_before(source: int, layer: int, *, same_layer: bool = False) -> None:
    """Raise ConfigError unless what a part in layer `source` writes can be read in `layer`."""
    if source > layer or (source == layer and not same_layer):
        raise ConfigError(
            f"virtual weights lead from a layer to a later one, found source layer {source} and reading "
            f"layer {layer}; choose a reading layer after the source"
        )


def _embedded(weights: Matrices, matrix: Array, block: int) -> Any:
    """embedding @ matrix, [vocab, column], as a dask array that reads vocabulary rows on computing."""
    return _by_rows(lambda rows: weights.embedding(rows) @ matrix, weights, matrix.shape[1], block)


def _unembedded(weights: Matrices, matrix: Array, block: int) -> Any:
    """matrix @ unembedding, [row, vocab], as a dask array that reads vocabulary rows on computing."""
    return _by_rows(
        lambda rows: weights.unembedding(rows).matrix.T @ matrix.T, weights, matrix.shape[0], block
    ).T


def _by_rows(read: Any, weights: Matrices, width: int, block: int) -> Any:
    """Dask array [vocab, width] whose blocks of vocabulary rows `read` computes on access.

    Arguments:
        read: function from a slice of the vocabulary to these rows.
        weights: matrices of the model.
        width: number of columns.
        block: vocabulary rows per block.
    """
    import dask.array as da
    from dask.delayed import delayed

    # pure=False: dask would otherwise hash the closure, and with it the weights, to name the task.
    lazy_read = delayed(read, pure=False)
    return da.concatenate(
        [
            da.from_delayed(lazy_read(rows), (rows.stop - rows.start, width), np.float32)
            for rows in vocabulary_blocks(weights.config, block)
        ]
    )
