"""Which tensors of a checkpoint a transformer is made of, by the names its families share.

Border: names and shapes; how families that name their tensors otherwise do so is told in hybrid_tensors.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .architecture import Stored, Tensors

__all__ = ["transformer_tensors"]

EMBED, FINAL_NORM, LAYER = "embed_tokens", "norm", "layers.{}."


class TransformerShapes(Protocol):
    """What of a transformer's configuration decides which tensors there are, and their shapes."""

    @property
    def root(self) -> str: ...
    @property
    def head(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_type(self) -> str: ...
    @property
    def use_post_norms(self) -> bool: ...
    @property
    def use_qk_norm(self) -> bool: ...
    @property
    def qkv_layout(self) -> str: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_proj_bias(self) -> bool: ...
    @property
    def mlp_layout(self) -> str: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def transformer_tensors(config: TransformerShapes) -> Tensors:
    """The map of a decoder: `Linear`s and norms by the field of LayerWeights they become, biases spelled
    ``field.bias``."""
    c = config
    table = (c.vocab_size, c.hidden_size)
    outside = {
        "embed": Stored(f"{c.root}{EMBED}.weight", table),
        "final_norm": Stored(f"{c.root}{FINAL_NORM}.weight", (c.hidden_size,)),
    }
    if c.norm_type == "layer":
        outside["final_norm.bias"] = Stored(f"{c.root}{FINAL_NORM}.bias", (c.hidden_size,))
    head = Stored(f"{c.head}.weight", table)
    outside["head"] = outside["embed"] if c.tie_word_embeddings else head
    copies = {head.name: outside["embed"].name} if c.tie_word_embeddings else {}
    return Tensors(outside, (_layer(c),) * c.num_layers, c.root + LAYER, copies)


def _layer(config: TransformerShapes) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for field, name, rows, into, has_bias in _linears(config):
        size = sum(count for _, count in rows)
        parts = rows if len(rows) > 1 else ()
        found[field] = Stored(f"{name}.weight", (size, into), parts)
        if has_bias:
            found[f"{field}.bias"] = Stored(f"{name}.bias", (size,), parts)
    for field, name, size in _norms(config):
        found[field] = Stored(f"{name}.weight", (size,))
        if config.norm_type == "layer":
            found[f"{field}.bias"] = Stored(f"{name}.bias", (size,))
    return found


_Rows = tuple[tuple[str, int], ...]


def _linears(config: TransformerShapes) -> Iterator[tuple[str, str, _Rows, int, bool]]:
    """(field, name, its rows, columns, whether it has a bias) of each matrix."""
    c = config
    hidden, inner = c.hidden_size, c.intermediate_size
    heads, kv = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "o", "self_attn.o_proj", (("o", hidden),), heads, c.o_proj_bias
    if c.qkv_layout == "fused":
        yield "qkv", "self_attn.qkv_proj", (("q", heads), ("k", kv), ("v", kv)), hidden, c.qkv_bias
    else:
        for field, size in (("q", heads), ("k", kv), ("v", kv)):
            yield field, f"self_attn.{field}_proj", ((field, size),), hidden, c.qkv_bias
    if c.mlp_layout == "plain":
        yield "up", "mlp.c_fc", (("up", inner),), hidden, c.mlp_bias
        yield "down", "mlp.c_proj", (("down", hidden),), inner, c.mlp_bias
        return
    yield "down", "mlp.down_proj", (("down", hidden),), inner, c.mlp_bias
    if c.mlp_layout == "gated_fused":
        yield "gate_up", "mlp.gate_up_proj", (("gate", inner), ("up", inner)), hidden, c.mlp_bias
    else:
        yield "gate", "mlp.gate_proj", (("gate", inner),), hidden, c.mlp_bias
        yield "up", "mlp.up_proj", (("up", inner),), hidden, c.mlp_bias


def _norms(config: TransformerShapes) -> Iterator[tuple[str, str, int]]:
    hidden = config.hidden_size
    yield "ln1", "input_layernorm", hidden
    if config.use_post_norms:
        yield "ln1_post", "post_attention_layernorm", hidden
        yield "ln2", "pre_feedforward_layernorm", hidden
        yield "ln2_post", "post_feedforward_layernorm", hidden
    else:
        yield "ln2", "post_attention_layernorm", hidden
    if config.use_qk_norm:
        yield "q_norm", "self_attn.q_norm", config.head_dim
        yield "k_norm", "self_attn.k_norm", config.head_dim
