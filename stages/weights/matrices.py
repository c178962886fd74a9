"""Matrices of a model's heads, MLPs, embedding and unembedding, read from its checkpoint.

Border: a checkpoint and an architecture; no forward pass, and no torch where files hold plain numbers. One
head, or one block of rows, is read at a time. Operations that are no matrix (gates, clips, norms of queries)
are refused by the functions whose results they would falsify (`AttentionSpec`).

Matrices multiply row vectors, x W: reading matrices are [hidden, …], writing ones […, hidden], as in Elhage
et al. 2021 and TransformerLens. Values are float32, rounded to the dtype in which the model computes.

Axes: hidden, d_head, mlp, vocab, position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from ..logits.readout import effective_gain, read_weight

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture, AttentionSpec, Stored
    from ..forward.checkpoints.checkpoint import Checkpoint

__all__ = [
    "Affine",
    "Matrices",
    "Norm",
    "Part",
    "PlainMatrices",
    "attending",
    "heads_in",
    "require_embedding",
    "require_outputs",
    "vocabulary_blocks",
]

Part = Literal["q", "k", "v"]
"""Queries, keys or values of a head."""
ROWS = 4096
"""Number of vocabulary rows that are read at a time: 64 MiB of float32 in a stream of width 4096."""


@dataclass(frozen=True, eq=False)
class Affine:
    """An affine map y = x matrix + bias."""

    matrix: Array
    """The matrix, [in, out]."""
    bias: Array
    """The bias, [out]; zeros for a map without a bias."""


@dataclass(frozen=True, eq=False)
class Norm:
    """Parameters of a norm of the residual stream."""

    gain: Array
    """Factor that is applied after the division, float32 [hidden]."""
    bias: Array
    """Bias that is added after the gain, float32 [hidden]; zeros for a norm without a bias."""
    is_centring: bool
    """Whether the mean over hidden is subtracted first (layer norm), or not (RMS norm)."""


class Matrices(Protocol):
    """Matrices of a model, as stored (`PlainMatrices`) or with norms folded in (`FoldedMatrices`)."""

    @property
    def config(self) -> Architecture:
        """Architecture of the model."""
        ...

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """Query, key or value matrix of a head.

        Arguments:
            part: "q", "k" or "v".
            layer: layer of the head.
            head: index of the query head; its keys and values may be shared with other heads.

        Returns:
            Matrix [hidden, d_head] and bias [d_head].
        """
        ...

    def output(self, layer: int, head: int) -> Array:
        """Output matrix of a head, [d_head, hidden].

        Arguments:
            layer: layer of the head.
            head: index of the head.
        """
        ...

    def output_bias(self, layer: int) -> Array:
        """Output bias of attention, [hidden]."""
        ...

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """Input matrices of the MLP, [hidden, mlp]: "up", and "gate" of a gated MLP."""
        ...

    def mlp_out(self, layer: int) -> Affine:
        """Output matrix of the MLP, [mlp, hidden], and its bias."""
        ...

    def embedding(self, rows: slice | Array) -> Array:
        """Token embeddings as they enter the stream, [vocab, hidden], without positions."""
        ...

    def positions(self) -> Array:
        """Learned position embeddings as they enter the stream, [position, hidden]."""
        ...

    def unembedding(self, rows: slice | Array) -> Affine:
        """Unembedding matrix [hidden, vocab] and bias [vocab]."""
        ...


@dataclass(frozen=True, eq=False)
class PlainMatrices:
    """The `Matrices` of a checkpoint as stored, without folding.

    Methods raise ConfigError for a layer that lacks the requested matrix.
    """

    checkpoint: Checkpoint
    """Files of the weights."""
    config: Architecture
    """Architecture of the model."""
    dtype: str = "float32"
    """Dtype in which the model computes; weights are rounded to it."""

    def __post_init__(self) -> None:
        # Layers of an encoder write to other positions than those that its decoder reads.
        if self.config.target_start is not None:
            raise ConfigError(
                "circuits are computed for models whose layers all read and write one residual stream, found "
                f"{self.config.model_type}, an encoder with a decoder; choose a decoder-only or "
                "encoder-only model"
            )

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """As `Matrices.projection`; with grouped queries, keys and values are those that the head shares.

        Arguments:
            part: "q", "k" or "v".
            layer: layer of the head.
            head: index of the query head.
        """
        heads = heads_in(self.config, layer)
        if not 0 <= head < heads.num_attention_heads:
            raise ConfigError(
                f"expected a head in 0..{heads.num_attention_heads - 1} of layer {layer}, found head {head}"
            )
        _require_linear(self.config, layer, heads)
        weight, rows = _rows(heads, part, head, fused="qkv" in self.config.tensors.layers[layer])
        matrix = self._in_layer(layer, weight, rows=rows)
        bias = self._in_layer(layer, f"{weight}.bias", rows=rows)
        # Some families fuse the matrices but keep the biases in tensors of their own.
        if bias is None and weight == "qkv":
            part_weight, rows = _rows(heads, part, head, fused=False)
            bias = self._in_layer(layer, f"{part_weight}.bias", rows=rows)
        return _affine(matrix, bias)

    def output(self, layer: int, head: int) -> Array:
        """As `Matrices.output`.

        Arguments:
            layer: layer of the head.
            head: index of the head.
        """
        heads = heads_in(self.config, layer)
        _require_ungated(self.config, layer, heads)
        # The output projection reads the heads side by side: its columns, as stored, are ordered by head.
        columns = slice(head * heads.head_dim, (head + 1) * heads.head_dim)
        matrix = self._in_layer(layer, "o", columns=columns)
        assert matrix is not None  # every layer that attends has one
        return matrix.T

    def output_bias(self, layer: int) -> Array:
        """Output bias of attention, [hidden]; zeros without one."""
        bias = self._in_layer(layer, "o.bias")
        return np.zeros(self.config.hidden_size, np.float32) if bias is None else bias

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """Input matrices of the MLP, [hidden, mlp]: "up", and "gate" of a gated MLP."""
        tensors = self._mlp(layer)
        if "gate_up" in tensors:
            # Fused tensors hold the gate's rows first, as the network splits them.
            half = tensors["gate_up"].shape[0] // 2
            rows_of = {"gate": ("gate_up", slice(0, half)), "up": ("gate_up", slice(half, 2 * half))}
        else:
            rows_of = {name: (name, slice(None)) for name in ("gate", "up") if name in tensors}
        return {
            name: _affine(
                *(self._in_layer(layer, tensor, rows=rows) for tensor in (weight, f"{weight}.bias"))
            )
            for name, (weight, rows) in rows_of.items()
        }

    def mlp_out(self, layer: int) -> Affine:
        """Output matrix of the MLP, [mlp, hidden], and its bias."""
        self._mlp(layer)
        return _affine(self._in_layer(layer, "down"), self._in_layer(layer, "down.bias"))

    def embedding(self, rows: slice | Array = slice(None)) -> Array:
        """Token embeddings [vocab, hidden], scaled as the family scales them.

        Raises:
            ConfigError: the embeddings do not enter the stream unchanged (`require_embedding`).
        """
        require_embedding(self.config)
        outside = self.config.tensors.outside
        embedding = self._read(outside["embed"].name, outside["embed"], rows=rows)
        scale = self.config.embedding_scale
        return embedding if scale is None else embedding * np.float32(scale)

    def positions(self) -> Array:
        """Learned position embeddings [position, hidden].

        Raises:
            ConfigError: for a model without them.
        """
        stored = self.config.tensors.outside.get("positions")
        if stored is None:
            raise ConfigError(
                f"the model {self.config.model_type} has no learned position embeddings, because it encodes "
                "positions in attention only; choose a model with learned position embeddings, such as gpt2"
            )
        # RoBERTa counts positions from pad_token_id + 1; no position reads the rows before.
        return self._read(stored.name, stored, rows=slice(self.config.first_position, None))

    def token_type(self) -> Array:
        """Embedding of the token type of prompts, [hidden], the first row of the table; zeros without one."""
        stored = self.config.tensors.outside.get("token_types")
        if stored is None:
            return np.zeros(self.config.hidden_size, np.float32)
        row: Array = self._read(stored.name, stored, rows=slice(0, 1))[0]
        return row

    def unembedding(self, rows: slice | Array = slice(None)) -> Affine:
        """Unembedding matrix [hidden, vocab] and bias [vocab].

        Raises:
            ConfigError: for logits that are not linear in the normalised stream.
        """
        self.config.require_linear_head()
        outside = self.config.tensors.outside
        matrix, bias = (
            self._read(stored.name, stored, rows=rows) if stored is not None else None
            for stored in map(outside.get, ("head", "head.bias"))
        )
        return _affine(matrix, bias)

    def norm(self, name: str, layer: int | None) -> Norm | None:
        """Parameters of a norm; None if the model has no such norm.

        Arguments:
            name: "ln1", "ln1_post", "ln2", "ln2_post", or "final_norm".
            layer: layer of the norm; None for the final norm.
        """
        stored_by_name = self.config.tensors.outside if layer is None else self.config.tensors.layers[layer]
        if name not in stored_by_name:
            return None

        def read(weight: str) -> Array | None:
            if layer is not None:
                return self._in_layer(layer, weight)
            stored = stored_by_name.get(weight)
            return None if stored is None else self._read(stored.name, stored)

        gain, bias = read(name), read(f"{name}.bias")
        assert gain is not None  # `name` is among the tensors
        gain = effective_gain(gain, self.config.norm_type)
        return Norm(gain, np.zeros_like(gain) if bias is None else bias, self.config.norm_type == "layer")

    def _mlp(self, layer: int) -> Mapping[str, Stored]:
        """Stored tensors of a layer, by weight; ConfigError unless they include those of an MLP."""
        tensors = self.config.tensors.layers[_in_range(self.config, layer)]
        if "down" not in tensors or ("up" not in tensors and "gate_up" not in tensors):
            kind = self.config.layers[layer].channel_mixer or "none"
            raise ConfigError(
                f"layer {layer} of {self.config.model_type} has no MLP whose matrices can be read, its "
                f"channel mixer is {kind}; choose another layer"
            )
        return tensors

    def _in_layer(
        self, layer: int, weight: str, rows: slice | Array | None = None, columns: slice | None = None
    ) -> Array | None:
        """A weight of a layer, float32 [out, in] or [out]; None if the layer has no such weight.

        Arguments:
            layer: layer number.
            weight: name of the weight in `Architecture.tensors`.
            rows: rows to read; None for all.
            columns: columns to read; None for all.
        """
        stored = self.config.tensors.layers[layer].get(weight)
        if stored is None:
            return None
        return self._read(self.config.tensors.in_layer(layer, weight), stored, rows, columns)

    def _read(
        self,
        name: str,
        stored: Stored,
        rows: slice | Array | None = None,
        columns: slice | None = None,
    ) -> Array:
        """A tensor of the checkpoint as the model uses it; arguments as in `read_weight`."""
        return read_weight(self.checkpoint, name, stored, self.dtype, rows=rows, columns=columns)


def _affine(matrix: Array | None, bias: Array | None) -> Affine:
    """Affine map from a matrix stored as [out, in] and its bias; zeros for a missing bias."""
    assert matrix is not None  # callers checked that the layer has it
    return Affine(matrix.T, np.zeros(len(matrix), np.float32) if bias is None else bias)


def vocabulary_blocks(config: Architecture, size: int | None = None) -> Iterator[slice]:
    """Yield consecutive slices of token ids that cover the vocabulary.

    Arguments:
        config: architecture of the model.
        size: rows per slice; None for `ROWS`.
    """
    # Embeddings are reduced block by block: as a whole, in float32, they take gigabytes in large models.
    step = size or ROWS
    for start in range(0, config.vocab_size, step):
        yield slice(start, min(start + step, config.vocab_size))


def attending(config: Architecture) -> list[int]:
    """Numbers of the layers with attention heads that have query, key and value matrices, in order.

    Raises:
        ConfigError: the model has no such layer.
    """
    layers = [layer for layer in range(config.num_layers) if config.heads_of(layer) is not None]
    if not layers:
        raise ConfigError(
            "circuits are computed for attention heads with query, key and value matrices, and "
            f"{config.model_type} has none; choose a model with attention"
        )
    return layers


def require_outputs(config: Architecture) -> None:
    """Raise ConfigError for a model with a head whose output is not linear in what it reads."""
    for layer in attending(config):
        _require_linear(config, layer, heads_in(config, layer))
        _require_ungated(config, layer, heads_in(config, layer))


def require_embedding(config: Architecture) -> None:
    """Raise ConfigError for a model whose token embeddings do not enter the residual stream unchanged."""
    outside, operation = config.tensors.outside, ""
    if "embed_norm" in outside or "embed_in" in outside:
        operation = f"pass through a {'norm' if 'embed_norm' in outside else 'linear map'}"
    elif config.dropped_token is not None:
        operation = "are multiplied by the share of masks in their prompt"
    if operation:
        raise ConfigError(
            f"circuits between tokens need embeddings that enter the residual stream unchanged, and those of "
            f"{config.model_type} {operation}; compute circuits between heads instead"
        )


def _require_linear(config: Architecture, layer: int, heads: AttentionSpec) -> None:
    """Raise ConfigError for heads whose queries, keys and values are clipped."""
    if heads.clip_qkv is not None:
        raise ConfigError(
            f"heads of layer {layer} of {config.model_type} have no circuits, because their queries, keys "
            f"and values are clipped to ±{heads.clip_qkv:g} and so are not linear in the stream"
        )


def _require_ungated(config: Architecture, layer: int, heads: AttentionSpec) -> None:
    """Raise ConfigError for heads whose outputs are gated, or normalised together."""
    if heads.is_gated or heads.inner_norm_eps is not None:
        operation = "multiplied by gates" if heads.is_gated else "normalised together"
        raise ConfigError(
            f"heads of layer {layer} of {config.model_type} have no OV circuit, because their outputs are "
            f"{operation} and so are not linear in their values"
        )


def heads_in(config: Architecture, layer: int) -> AttentionSpec:
    """Attention of a layer, and where the matrices of its heads lie in its tensors.

    Arguments:
        config: architecture of the model.
        layer: layer number.

    Raises:
        ConfigError: the layer is out of range, or has no attention heads with matrices of their own.
    """
    heads = config.heads_of(_in_range(config, layer))
    if heads is None:
        raise ConfigError(
            f"layer {layer} of {config.model_type} has no attention heads with query, key and value "
            f"matrices, its mixer is a {config.layers[layer].mixer.kind}; choose a layer with attention"
        )
    return heads


def _in_range(config: Architecture, layer: int) -> int:
    """The layer number itself; ConfigError if the model has no such layer."""
    if not 0 <= layer < config.num_layers:
        raise ConfigError(
            f"expected a layer in 0..{config.num_layers - 1} of {config.model_type}, found layer {layer}"
        )
    return layer


def _rows(heads: AttentionSpec, part: Part, head: int, *, fused: bool) -> tuple[str, Array]:
    """Where a head's query, key or value matrix is stored.

    Arguments:
        heads: attention of the layer.
        part: "q", "k" or "v".
        head: index of the query head.
        fused: whether queries, keys and values are in one tensor, which is split as in
            forward/networks/mixers/attention.py.

    Returns:
        (name of the weight, numbers of the head's rows in it).
    """
    # With grouped queries, query head h reads key/value head h // (query heads per group).
    head_index = head if part == "q" else head // heads.queries_per_key
    if not fused:
        # Some families interleave each head's gate with its queries.
        parts_per_head = 2 if part == "q" and heads.gates_in_queries else 1
        return part, head_index * parts_per_head * heads.head_dim + np.arange(heads.head_dim)
    # Row numbers take the place of weights: slicing and reshaping them finds the rows of one head.
    rows = np.arange((heads.num_attention_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    if heads.layout == "by head":
        # GPT-NeoX, Falcon: for each key/value head its query heads, its key and its value follow each other.
        grouped = rows.reshape(heads.num_kv_heads, -1, heads.head_dim)
        parts = {"q": grouped[:, :-2], "k": grouped[:, -2], "v": grouped[:, -1]}
    elif heads.layout == "by fourths":
        # CodeGen: four shards for the four TPU cores of its training, each with queries, values, keys.
        fourths = rows.reshape(4, 3, -1)
        parts = {"q": fourths[:, 0], "v": fourths[:, 1], "k": fourths[:, 2]}
    else:
        cuts = np.cumsum([heads.num_attention_heads, heads.num_kv_heads]) * heads.head_dim
        parts = dict(zip("qkv", np.split(rows, cuts), strict=True))
    return "qkv", parts[part].reshape(-1, heads.head_dim)[head_index]
