"""Names and shapes of the tensors of RWKV checkpoints, which use three naming schemes.

    hf      rwkv.blocks.0.attention.key.weight    what transformers and the RWKV organisation write (4, 5, 6)
    fla     model.layers.0.attn.k_proj.weight     flash-linear-attention (7)
    native  blocks.0.att.key.weight               the training code, saved as safetensors (4 to 7)

Weights have the names of `networks/rwkv.py`, whatever their names in the file. Matrices are [out, in] there;
low-rank matrices that the native code multiplies from the left are transposed on loading.

Border: names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from .architecture import Stored, Tensors

__all__ = ["Spelling", "rwkv_tensors"]

Spelling = Literal["hf", "fla", "fla, one x_x", "native"]
MIXES = ("r", "w", "k", "v", "a", "g")
"""Token-shift mixes of the time mix of version 7, in their order in the fused tensor x_x."""


class RwkvShapes(Protocol):
    """Attributes of an architecture that determine its tensors and their shapes."""

    @property
    def generation(self) -> Literal[4, 5, 6, 7]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def attention_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ranks(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def spelling(self) -> Spelling: ...
    @property
    def has_gate(self) -> bool: ...
    @property
    def has_norm_bias(self) -> bool: ...
    @property
    def norm_first(self) -> bool: ...
    @property
    def decays_per_head(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


LAYER = {"hf": "rwkv.blocks.{}.", "fla": "model.layers.{}.", "native": "blocks.{}."}
OUTSIDE = {
    "hf": ("rwkv.embeddings", "rwkv.ln_out", "head"),
    "fla": ("model.embeddings", "model.norm", "lm_head"),
    "native": ("emb", "ln_out", "head"),
}
NORMS = {
    "hf": {"pre_norm": "pre_ln", "ln1": "ln1", "ln2": "ln2", "head_norm": "attention.ln_x"},
    "fla": {"pre_norm": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "head_norm": "attn.g_norm"},
    "native": {"pre_norm": "ln0", "ln1": "ln1", "ln2": "ln2", "head_norm": "att.ln_x"},
}
MATRICES = {"r": "receptance", "k": "key", "v": "value", "g": "gate", "o": "output"}


def rwkv_tensors(config: RwkvShapes) -> Tensors:
    """Map of the weights of an RWKV model to tensors; "head" is the tensor of the embedding if both are
    tied."""
    c, style = config, config.spelling.partition(",")[0]
    embed, final, head = OUTSIDE[style]
    table = (c.vocab_size, c.hidden_size)
    outside = {"embed": Stored(f"{embed}.weight", table)}
    outside |= _norm("final_norm", final, c.hidden_size, has_bias=c.has_norm_bias)
    untied_head = Stored(f"{head}.weight", table)
    outside["head"] = outside["embed"] if c.tie_word_embeddings else untied_head
    copies = {untied_head.name: outside["embed"].name} if c.tie_word_embeddings else {}
    layers = [dict(_layer(c, style, layer)) for layer in range(c.num_layers)]
    return Tensors(outside, layers, LAYER[style], copies, _left_over(c, style))


def _left_over(config: RwkvShapes, style: str) -> list[str]:
    """Unused tensors in old files of version 7: the value residual of layer 0, which has no earlier layer."""
    if config.generation < 7:
        return []
    values = [stored.name for weight, stored in _time_mix_7(config, style, 1) if weight in ("v0", "v1", "v2")]
    return [LAYER[style].format(0) + name for name in values]


def _norm(weight: str, name: str, size: int, *, has_bias: bool) -> dict[str, Stored]:
    """Tensors of a norm of this width: `weight` and, with has_bias, "<weight>.bias"."""
    tensors = {weight: Stored(f"{name}.weight", (size,))}
    return tensors | ({f"{weight}.bias": Stored(f"{name}.bias", (size,))} if has_bias else {})


def _layer(config: RwkvShapes, style: str, layer: int) -> Iterator[tuple[str, Stored]]:
    """Tensors of a layer. style: "hf", "fla" or "native"."""
    c, names = config, NORMS[style]
    for norm in ("pre_norm", "ln1", "ln2"):
        if norm != "pre_norm" or (layer == 0 and c.norm_first):
            yield from _norm(norm, names[norm], c.hidden_size, has_bias=c.has_norm_bias).items()
    if c.generation > 4:
        # The norm of heads has a bias even if norm_bias is false.
        yield from _norm("head_norm", names["head_norm"], c.attention_size, has_bias=True).items()
    yield from _matrices(c, style)
    if c.generation == 7:
        yield from _time_mix_7(c, style, layer)
    else:
        yield from _time_mix(c, style)
    yield from _channel_mix(c, style)


def _matrices(config: RwkvShapes, style: str) -> Iterator[tuple[str, Stored]]:
    """Projection matrices [out, in] of the time mix."""
    c = config
    has_gate = c.has_gate and c.generation < 7  # the gate of version 7 is low-rank, see _time_mix_7
    for weight in ("r", "k", "v", "o", *(("g",) if has_gate else ())):
        rows, columns = c.attention_size, c.hidden_size
        shape = (columns, rows) if weight == "o" else (rows, columns)
        name = f"attn.{weight}_proj" if style == "fla" else f"{_attention(style)}.{MATRICES[weight]}"
        yield weight, Stored(f"{name}.weight", shape)


def _time_mix(config: RwkvShapes, style: str) -> Iterator[tuple[str, Stored]]:
    """Token-shift mixes, decay and bonus of versions 4 to 6, with the same names in all schemes."""
    c, room = config, _attention(style)
    flat, ranks = (1, 1, c.hidden_size), dict(c.ranks)
    channels = (c.attention_size,) if c.generation == 4 else (c.num_heads, c.head_dim)
    if c.decays_per_head:
        channels = (c.num_heads,)
    if c.generation < 6:
        words = {"k": "key", "v": "value", "r": "receptance", **({"g": "gate"} if c.has_gate else {})}
        words = {k: word for k, word in words.items() if k != "g" or c.generation == 5}
        for mix, word in words.items():
            yield f"mix_{mix}", Stored(f"{room}.time_mix_{word}", flat)
        yield "decay", Stored(f"{room}.time_decay", channels)
    else:
        for mix in ("x", "w", "k", "v", "r", "g"):
            yield f"mix_{mix}", Stored(f"{room}.time_maa_{mix}", flat)
        yield "mix_w1", Stored(f"{room}.time_maa_w1", (c.hidden_size, 5 * ranks["mix"]))
        yield "mix_w2", Stored(f"{room}.time_maa_w2", (5, ranks["mix"], c.hidden_size))
        yield "decay", Stored(f"{room}.time_decay", (1, 1, c.attention_size))
        yield "decay_w1", Stored(f"{room}.time_decay_w1", (c.hidden_size, ranks["decay"]))
        yield "decay_w2", Stored(f"{room}.time_decay_w2", (ranks["decay"], c.attention_size))
    bonus = "time_first" if c.generation == 4 else "time_faaaa"
    yield "bonus", Stored(f"{room}.{bonus}", channels)


def _time_mix_7(config: RwkvShapes, style: str, layer: int) -> Iterator[tuple[str, Stored]]:
    """Token-shift mixes and low-rank maps of version 7."""
    c, room, ranks = config, _attention(style), dict(config.ranks)
    if config.spelling == "fla, one x_x":
        yield "mixes", Stored(f"{room}.x_x", (len(MIXES), c.hidden_size))
    else:
        for mix in MIXES:
            yield f"mix_{mix}", Stored(f"{room}.x_{mix}", (1, 1, c.hidden_size))
    vector = (c.attention_size,) if style == "fla" else (1, 1, c.attention_size)
    for weight in ("k_k", "k_a"):
        yield weight, Stored(f"{room}.{weight}", vector)
    yield "r_k", Stored(f"{room}.r_k", (c.num_heads, c.head_dim))
    for map_ in ("w", "a", "v", "g"):
        if map_ == "v" and layer == 0:
            continue
        rank = ranks[map_]
        if style == "fla":
            yield f"{map_}1", Stored(f"{room}.{map_}_lora.lora.0.weight", (rank, c.hidden_size))
            yield f"{map_}2", Stored(f"{room}.{map_}_lora.lora.2.weight", (c.attention_size, rank))
            if map_ != "g":
                yield f"{map_}0", Stored(f"{room}.{map_}_lora.lora.2.bias", (c.attention_size,))
        else:
            yield f"{map_}1", Stored(f"{room}.{map_}1", (c.hidden_size, rank), is_transposed=True)
            yield f"{map_}2", Stored(f"{room}.{map_}2", (rank, c.attention_size), is_transposed=True)
            if map_ != "g":
                yield f"{map_}0", Stored(f"{room}.{map_}0", vector)


def _channel_mix(config: RwkvShapes, style: str) -> Iterator[tuple[str, Stored]]:
    """Tensors of the channel mix."""
    c = config
    room = "feed_forward" if style == "hf" else "ffn"
    hidden, inner = c.hidden_size, c.intermediate_size
    yield "ffn_key", Stored(f"{room}.key.weight", (inner, hidden))
    yield "ffn_value", Stored(f"{room}.value.weight", (hidden, inner))
    if c.generation == 7:
        yield "ffn_mix_k", Stored(f"{room}.x_k", (hidden,) if style == "fla" else (1, 1, hidden))
        return
    yield "ffn_receptance", Stored(f"{room}.receptance.weight", (hidden, hidden))
    word = (
        {"k": "time_maa_k", "r": "time_maa_r"}
        if c.generation == 6
        else {"k": "time_mix_key", "r": "time_mix_receptance"}
    )
    for mix, name in word.items():
        yield f"ffn_mix_{mix}", Stored(f"{room}.{name}", (1, 1, hidden))


def _attention(style: str) -> str:
    """Name of the time mix module in a naming scheme."""
    return {"hf": "attention", "fla": "attn", "native": "att"}[style]
