"""The matrices of a model's heads, MLPs, embedding and unembedding, read from its checkpoint as they are.

Border: a checkpoint and an architecture; runs no model and never imports torch where files hold plain
numbers. One head, or a block of rows, is read at a time. What is not a matrix between the stream and a head -
a gate, a clip, a norm of queries - is refused by whoever would be wrong about it (`Heads`).

Matrices are as row vectors meet them: x W. So a reading matrix is [hidden, …] and a writing one […, hidden],
as in Elhage et al. 2021 and TransformerLens; values are of the dtype the model computes in, as float32.

Axes: hidden, d_head, mlp, vocab, position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from ..logits.readout import read_weight

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture, Heads, Stored
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
]

Part = Literal["q", "k", "v"]


@dataclass(frozen=True, eq=False)
class Affine:
    """matrix [in, out] and bias [out]: y = x matrix + bias."""

    matrix: Array
    bias: Array


@dataclass(frozen=True, eq=False)
class Norm:
    """What a norm multiplies by and adds, each float32 [hidden], zeros where it adds nothing; is_centring:
    whether it takes the mean out first."""

    gain: Array
    bias: Array
    is_centring: bool


class Matrices(Protocol):
    """A model's matrices, as stored (`PlainMatrices`) or with norms folded in (folded.py)."""

    @property
    def config(self) -> Architecture:
        """The model without its weights."""
        ...

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """[hidden, d_head] of the queries of a head, or of the keys or values it reads."""
        ...

    def output(self, layer: int, head: int) -> Array:
        """What a head writes with, [d_head, hidden]."""
        ...

    def output_bias(self, layer: int) -> Array:
        """What attention adds whatever heads read, [hidden]."""
        ...

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """What neurons read with, [hidden, mlp]: "up", and "gate" where the MLP is gated."""
        ...

    def mlp_out(self, layer: int) -> Affine:
        """What neurons write with, [mlp, hidden], and what is added beside them."""
        ...

    def embedding(self, rows: slice | Array) -> Array:
        """What tokens enter the stream as, [vocab, hidden], without positions."""
        ...

    def positions(self) -> Array:
        """What positions enter the stream as, [position, hidden]."""
        ...

    def unembedding(self, rows: slice | Array) -> Affine:
        """What logits are read with, matrix [hidden, vocab] and bias [vocab]."""
        ...


@dataclass(frozen=True, eq=False)
class PlainMatrices:
    """`Matrices` of a checkpoint as they are.

    dtype: what the model computes in; weights are rounded to it. Every method raises ConfigError, in a line,
    for a layer that has no such part.
    """

    checkpoint: Checkpoint
    config: Architecture
    dtype: str = "float32"

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """See `Matrices`; of a model with grouped queries, the keys and values its group shares."""
        heads = heads_in(self.config, layer)
        if not 0 <= head < heads.count:
            raise ConfigError(f"expected a head in 0..{heads.count - 1} of layer {layer}, found {head}")
        _require_linear(self.config, layer, heads)
        weight, rows = _rows(heads, part, head, fused="qkv" in self.config.tensors.layers[layer])
        matrix = self._in_layer(layer, weight, rows=rows)
        assert matrix is not None  # every layer that attends has it
        bias = self._in_layer(layer, f"{weight}.bias", rows=rows)
        if bias is None and weight == "qkv":  # beside the tensor of all, some have one of their own
            own, rows = _rows(heads, part, head, fused=False)
            bias = self._in_layer(layer, f"{own}.bias", rows=rows)
        return Affine(matrix.T, np.zeros(len(matrix), np.float32) if bias is None else bias)

    def output(self, layer: int, head: int) -> Array:
        """See `Matrices`."""
        heads = heads_in(self.config, layer)
        _require_ungated(self.config, layer, heads)
        columns = slice(head * heads.size, (head + 1) * heads.size)
        found = self._in_layer(layer, "o", columns=columns)
        assert found is not None  # as above
        return found.T

    def output_bias(self, layer: int) -> Array:
        """See `Matrices`; zeros where there is none."""
        found = self._in_layer(layer, "o.bias")
        return np.zeros(self.config.hidden_size, np.float32) if found is None else found

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """See `Matrices`."""
        held = self._mlp(layer)
        if "gate_up" in held:
            half = held["gate_up"].shape[0] // 2
            places = {"gate": ("gate_up", slice(0, half)), "up": ("gate_up", slice(half, 2 * half))}
        else:
            places = {name: (name, slice(None)) for name in ("gate", "up") if name in held}
        found = {}
        for name, (weight, rows) in places.items():
            matrix, bias = (self._in_layer(layer, each, rows=rows) for each in (weight, f"{weight}.bias"))
            assert matrix is not None  # looked up above
            found[name] = Affine(matrix.T, np.zeros(len(matrix), np.float32) if bias is None else bias)
        return found

    def mlp_out(self, layer: int) -> Affine:
        """See `Matrices`."""
        self._mlp(layer)
        matrix, bias = self._in_layer(layer, "down"), self._in_layer(layer, "down.bias")
        assert matrix is not None  # looked up above
        return Affine(matrix.T, np.zeros(len(matrix), np.float32) if bias is None else bias)

    def embedding(self, rows: slice | Array = slice(None)) -> Array:
        """See `Matrices`, after the family's scale. ConfigError where what a token enters the stream as is no
        row of a matrix (`require_embedding`)."""
        outside = self.config.tensors.outside
        require_embedding(self.config)
        found = self._read(outside["embed"].name, outside["embed"], rows=rows)
        scale = self.config.embedding_scale
        return found if scale is None else found * np.float32(scale)

    def positions(self) -> Array:
        """See `Matrices`. ConfigError for a model that learns none."""
        stored = self.config.tensors.outside.get("positions")
        if stored is None:
            raise ConfigError(
                f"expected a model with a table of learned positions, found {self.config.model_type}, which "
                "has none; nothing can be said of positions without the tokens that stand there"
            )
        return self._read(stored.name, stored, rows=slice(self.config.first_position, None))

    def token_type(self) -> Array:
        """What stands beside every token as it enters the stream, [hidden]: the first row of a table of token
        types, of which prompts have one; zeros where there is no such table."""
        stored = self.config.tensors.outside.get("token_types")
        if stored is None:
            return np.zeros(self.config.hidden_size, np.float32)
        found: Array = self._read(stored.name, stored, rows=slice(0, 1))[0]
        return found

    def unembedding(self, rows: slice | Array = slice(None)) -> Affine:
        """See `Matrices`. ConfigError where logits are no linear map of the normed stream."""
        outside = self.config.tensors.outside
        self.config.require_linear_head()
        matrix = self._read(outside["head"].name, outside["head"], rows=rows)
        bias = outside.get("head.bias")
        added = np.zeros(len(matrix), np.float32)
        return Affine(matrix.T, added if bias is None else self._read(bias.name, bias, rows=rows))

    def norm(self, name: str, layer: int | None) -> Norm | None:
        """A norm of a layer ("ln1", "ln2_post", …) or, without a layer, "final_norm"; None where there is no
        such norm."""
        tensors = self.config.tensors
        held = tensors.outside if layer is None else tensors.layers[layer]
        if name not in held:
            return None

        def read(weight: str) -> Array | None:
            if layer is not None:
                return self._in_layer(layer, weight)
            stored = held.get(weight)
            return None if stored is None else self._read(stored.name, stored)

        gain, bias = read(name), read(f"{name}.bias")
        assert gain is not None  # looked up above
        if self.config.norm_type == "gemma_rms":
            gain = gain + np.float32(1)
        return Norm(gain, np.zeros_like(gain) if bias is None else bias, self.config.norm_type == "layer")

    def _mlp(self, layer: int) -> Mapping[str, Stored]:
        held = self.config.tensors.layers[_in_range(self.config, layer)]
        if "down" not in held or ("up" not in held and "gate_up" not in held):
            kind = self.config.layers[layer].channel_mixer or "none"
            raise ConfigError(
                f"expected an MLP in layer {layer} of {self.config.model_type}, found {kind}; no matrices of "
                "neurons are read there"
            )
        return held

    def _in_layer(
        self, layer: int, weight: str, rows: slice | Array | None = None, columns: slice | None = None
    ) -> Array | None:
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
        return read_weight(self.checkpoint, name, stored, self.dtype, rows=rows, columns=columns)


def attending(config: Architecture) -> list[int]:
    """Layers whose heads have matrices. ConfigError for a model that has none."""
    found = [layer for layer in range(config.num_layers) if config.heads_of(layer) is not None]
    if not found:
        raise ConfigError(
            f"expected a model with heads that have queries, keys and values of their own, found "
            f"{config.model_type}; choose one that attends"
        )
    return found


def require_outputs(config: Architecture) -> None:
    """ConfigError for a model one of whose heads does not write what it reads by a matrix."""
    for layer in attending(config):
        _require_linear(config, layer, heads_in(config, layer))
        _require_ungated(config, layer, heads_in(config, layer))


def require_embedding(config: Architecture) -> None:
    """ConfigError for a model whose tokens enter the stream as no rows of a matrix: as they are normed or
    mapped first, or multiplied by what their prompt says."""
    outside, found = config.tensors.outside, ""
    if "embed_norm" in outside or "embed_in" in outside:
        found = f"a {'norm' if 'embed_norm' in outside else 'map'} behind those of {config.model_type}"
    elif config.dropped_token is not None:
        found = f"those of {config.model_type} multiplied by the share of masks in their prompt"
    if found:
        raise ConfigError(
            f"expected embeddings that enter the stream as they are, found {found}; ask for circuits between "
            "heads, which need none"
        )


def _require_linear(config: Architecture, layer: int, heads: Heads) -> None:
    if heads.clip is not None:
        raise ConfigError(
            f"expected queries, keys and values that are linear in the stream, found them held within "
            f"{heads.clip:g} in layer {layer} of {config.model_type}; no circuit follows such heads"
        )


def _require_ungated(config: Architecture, layer: int, heads: Heads) -> None:
    if heads.is_gated or heads.are_normed_together:
        found = "multiplied by gates" if heads.is_gated else "normed together"
        raise ConfigError(
            f"expected heads that write what they read, found them {found} in layer {layer} of "
            f"{config.model_type}; no OV circuit follows such heads"
        )


def heads_in(config: Architecture, layer: int) -> Heads:
    """The heads of a layer. ConfigError for a layer there is not, or one without such heads."""
    found = config.heads_of(_in_range(config, layer))
    if found is None:
        raise ConfigError(
            f"expected a layer whose heads have queries, keys and values of their own, found layer {layer} "
            f"of {config.model_type}, whose mixer is a {config.layers[layer].mixer.kind}; it has no circuits"
        )
    return found


def _in_range(config: Architecture, layer: int) -> int:
    if not 0 <= layer < config.num_layers:
        raise ConfigError(f"expected a layer in 0..{config.num_layers - 1}, found {layer}")
    return layer


def _rows(heads: Heads, part: Part, head: int, *, fused: bool) -> tuple[str, Array]:
    """(weight, its rows) in which a head's matrix lies, as the network takes them apart
    (forward/networks/mixers/attention.py)."""
    mine = head if part == "q" else head // heads.shared_by
    if not fused:
        beside = 2 if part == "q" and heads.gates_beside else 1
        return part, mine * beside * heads.size + np.arange(heads.size)
    rows = np.arange((heads.count + 2 * heads.kv_count) * heads.size)
    if heads.layout == "by head":
        grouped = rows.reshape(heads.kv_count, -1, heads.size)
        parts = {"q": grouped[:, :-2], "k": grouped[:, -2], "v": grouped[:, -1]}
    elif heads.layout == "by fourths":
        fourths = rows.reshape(4, 3, -1)
        parts = {"q": fourths[:, 0], "v": fourths[:, 1], "k": fourths[:, 2]}
    else:
        cuts = np.cumsum([heads.count, heads.kv_count]) * heads.size
        parts = dict(zip("qkv", np.split(rows, cuts), strict=True))
    return "qkv", parts[part].reshape(-1, heads.size)[mine]
