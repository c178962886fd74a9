"""Which tensors of a checkpoint a hybrid is made of.

Checkpoints differ in the names of rooms (`Spelling`); inside a room a mixer's tensors have the names of the
code it comes from. Weights are named as the classes of networks/mixers/ ask for them: those of attention and
MLP as in a decoder, those of state spaces with "ssm." before them, of experts with "experts.". What a model
multiplies products by is told as factors of the weights (`Stored.factors`).

Border: names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .architecture import Stored, Tensors
from .mixers import AttentionShape, ExpertsShape, Mamba2Shape, MambaShape, MixerShape, MlpShape

__all__ = ["Spelling", "hybrid_tensors"]

Named = Iterator[tuple[str, Stored]]
Factors = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Spelling:
    """How a checkpoint names its rooms; each of a layer with the dot behind it.

    layer: "{}" for its number. mixer: of every mixer but attention. mlp_parts: gate and up projection (or
    both as one, or only up), and down projection.
    """

    embed: str = "model.embed_tokens"
    final_norm: str = "model.final_layernorm"
    layer: str = "model.layers.{}."
    ln1: str = "input_layernorm"
    ln2: str = "pre_ff_layernorm"
    mixer: str = "mamba."
    attention: str = "self_attn."
    mlp: str = "feed_forward."
    mlp_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    experts: str = "feed_forward."
    router: str = "router"
    expert_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""


class _Block(Protocol):
    @property
    def mixers(self) -> Sequence[MixerShape]: ...
    @property
    def channel_mixer(self) -> Any: ...


class Shapes(Protocol):
    """What of a configuration decides which tensors there are, and their shapes."""

    @property
    def blocks(self) -> Sequence[_Block]: ...
    @property
    def spelling(self) -> Spelling: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_type(self) -> str: ...
    @property
    def logit_factor(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def hybrid_tensors(config: Shapes) -> Tensors:
    """The map of a hybrid; "head" is the embedding's where the two are tied."""
    c, spelling = config, config.spelling
    table = (c.vocab_size, c.hidden_size)
    outside = {"embed": Stored(f"{spelling.embed}.weight", table)}
    outside |= _norm("final_norm", spelling.final_norm, c)
    tied = c.tie_word_embeddings
    head = outside["embed"].name if tied else "lm_head.weight"
    outside["head"] = Stored(head, table, factors=_all(c.vocab_size, c.logit_factor))
    copies = {"lm_head.weight": "embed"} if tied else {}
    layers = [dict(_block(c, block)) for block in c.blocks]
    return Tensors(outside, layers, spelling.layer, copies)


def _all(rows: int, factor: float) -> Factors:
    """All rows by one factor."""
    return () if factor == 1 else ((rows, factor),)


def _norm(weight: str, name: str, config: Shapes) -> dict[str, Stored]:
    found = {weight: Stored(f"{name}.weight", (config.hidden_size,))}
    if config.norm_type == "layer":
        found[f"{weight}.bias"] = Stored(f"{name}.bias", (config.hidden_size,))
    return found


def _block(config: Shapes, block: _Block) -> Named:
    spelling, hidden = config.spelling, config.hidden_size
    if block.mixers:
        yield from _norm("ln1", spelling.ln1, config).items()
    for shape in block.mixers:
        yield from MIXERS[shape.kind](shape, spelling, hidden)
    if block.channel_mixer is not None:
        yield from _norm("ln2", spelling.ln2, config).items()
        yield from MIXERS[block.channel_mixer.kind](block.channel_mixer, spelling, hidden)


def _linear(
    weight: str, name: str, shape: tuple[int, int], factors: Factors = (), *, into: float = 1.0, bias: bool
) -> Named:
    """A matrix [out, in], and its bias where there is one. factors: of what comes out; into: of what goes in,
    which a bias does not see."""
    of_weight = factors if into == 1 else tuple((rows, by * into) for rows, by in factors or ((shape[0], 1),))
    yield weight, Stored(f"{name}.weight", shape, factors=of_weight)
    if bias:
        yield f"{weight}.bias", Stored(f"{name}.bias", shape[:1], factors=factors)


def _attention(shape: AttentionShape, spelling: Spelling, hidden: int) -> Named:
    room = spelling.attention
    into, of_keys, out = shape.factors
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for weight, size, factor in (("q", queries, 1.0), ("k", keys, of_keys), ("v", keys, 1.0)):
        factors, name = _all(size, factor), f"{room}{weight}_proj"
        yield from _linear(weight, name, (size, hidden), factors, into=into, bias=shape.qkv_bias)
    yield from _linear("o", f"{room}o_proj", (hidden, queries), _all(hidden, out), bias=shape.o_bias)
    if shape.use_qk_norm:
        for weight in ("q_norm", "k_norm"):
            yield weight, Stored(f"{room}{weight}.weight", (shape.head_dim,))


def _convolution(room: str, channels: int, size: int, has_bias: bool) -> Named:
    yield "ssm.conv", Stored(f"{room}conv1d.weight", (channels, 1, size))
    if has_bias:
        yield "ssm.conv.bias", Stored(f"{room}conv1d.bias", (channels,))


def _mamba(shape: MambaShape, spelling: Spelling, hidden: int) -> Named:
    room, channels, bias = spelling.mixer, shape.channels, shape.has_bias
    yield from _linear("ssm.in", f"{room}in_proj", (2 * channels, hidden), bias=bias)
    yield from _convolution(room, channels, shape.conv_size, shape.has_conv_bias)
    rows = shape.rank + 2 * shape.state_size
    yield "ssm.select", Stored(f"{room}x_proj.weight", (rows, channels))
    yield from _linear("ssm.dt", f"{room}dt_proj", (channels, shape.rank), bias=True)
    yield "ssm.A_log", Stored(f"{room}A_log", (channels, shape.state_size))
    yield "ssm.D", Stored(f"{room}D", (channels,))
    yield from _linear("ssm.out", f"{room}out_proj", (hidden, channels), bias=bias)
    if shape.norms == "weighted":
        for weight, size in (("dt", shape.rank), ("b", shape.state_size), ("c", shape.state_size)):
            yield f"ssm.{weight}_norm", Stored(f"{room}{weight}_layernorm.weight", (size,))


def _mamba2(shape: Mamba2Shape, spelling: Spelling, hidden: int) -> Named:
    room, channels, shared = spelling.mixer, shape.channels, shape.groups * shape.state_size
    sizes = (channels, channels, shared, shared, shape.heads)
    factors = tuple(zip(sizes, shape.in_factors, strict=True)) if set(shape.in_factors) != {1.0} else ()
    size = (sum(sizes), hidden)
    yield from _linear("ssm.in", f"{room}in_proj", size, factors, into=shape.into_factor, bias=shape.has_bias)
    yield from _convolution(room, shape.convolved, shape.conv_size, shape.has_conv_bias)
    for weight in ("dt_bias", "A_log", "D"):
        yield f"ssm.{weight}", Stored(f"{room}{weight}", (shape.heads,))
    if shape.norm is not None:
        yield "ssm.norm", Stored(f"{room}norm.weight", (channels,))
    out = _all(hidden, shape.out_factor)
    yield from _linear("ssm.out", f"{room}out_proj", (hidden, channels), out, bias=shape.has_out_bias)


def _mlp(shape: MlpShape, spelling: Spelling, hidden: int) -> Named:
    room, parts, inner = spelling.mlp, spelling.mlp_parts, shape.intermediate_size
    of_gate, out = shape.factors
    gate = _all(inner, of_gate)
    if shape.is_fused:
        both = ((inner, of_gate), (inner, 1.0)) if gate else ()
        yield from _linear("gate_up", f"{room}{parts[0]}", (2 * inner, hidden), both, bias=shape.has_bias)
    else:
        if shape.is_gated:
            yield from _linear("gate", f"{room}{parts[0]}", (inner, hidden), gate, bias=shape.has_bias)
        yield from _linear("up", f"{room}{parts[-2]}", (inner, hidden), bias=shape.has_bias)
    name = f"{room}{parts[-1]}"
    yield from _linear("down", name, (hidden, inner), _all(hidden, out), bias=shape.has_bias)


def _experts(shape: ExpertsShape, spelling: Spelling, hidden: int) -> Named:
    room, parts, inner, bias = (
        spelling.experts,
        spelling.expert_parts,
        shape.intermediate_size,
        shape.has_bias,
    )
    width, out = shape.latent_size or hidden, shape.factor
    yield "experts.router", Stored(f"{room}{spelling.router}.weight", (shape.count, hidden))
    if shape.routing == "sigmoid":
        correction = f"{room}{spelling.router}.e_score_correction_bias"
        yield "experts.correction", Stored(correction, (shape.count,))
    last = 1.0 if shape.latent_size else out
    if shape.is_listed:
        words = ("gate", "up", "down") if shape.is_gated else ("up", "down")
        for expert in range(shape.count):
            for word, part in zip(words, parts, strict=True):
                size = (width, inner) if word == "down" else (inner, width)
                factors = _all(width, last) if word == "down" else ()
                name = f"{room}experts.{expert}.{part}.weight"
                yield f"experts.{expert}.{word}", Stored(name, size, factors=factors)
    else:
        both = 2 * inner if shape.is_gated else inner
        yield "experts.up", Stored(f"{room}{parts[0]}.weight", (shape.count, both, width))
        factors = _all(shape.count, last)
        yield "experts.down", Stored(f"{room}{parts[1]}.weight", (shape.count, width, inner), factors=factors)
    if shape.latent_size:
        into = (shape.latent_size, hidden)
        yield from _linear("experts.into_latent", f"{room}fc1_latent_proj", into, bias=bias)
        yield from _linear(
            "experts.from_latent", f"{room}fc2_latent_proj", into[::-1], _all(hidden, out), bias=bias
        )
    if shape.shared_size:
        shared = MlpShape(
            shape.shared_size,
            shape.activation,
            is_gated=shape.is_gated,
            is_fused=len(spelling.mlp_parts) == 2 and shape.is_gated,
            has_bias=bias,
            factors=(1.0, out),
        )
        own = Spelling(mlp=spelling.shared, mlp_parts=spelling.mlp_parts)
        yield from ((f"experts.shared.{weight}", stored) for weight, stored in _mlp(shared, own, hidden))


MIXERS: dict[str, Callable[[Any, Spelling, int], Named]] = {
    AttentionShape.kind: _attention,
    MambaShape.kind: _mamba,
    Mamba2Shape.kind: _mamba2,
    MlpShape.kind: _mlp,
    ExpertsShape.kind: _experts,
}
"""Kind of a mixer or channel mixer -> its weights, and where they are."""
