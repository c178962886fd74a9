"""Names and shapes of the tensors of encoder-decoder checkpoints.

Layers of encoder and decoder are numbered consecutively here, but from 0 each in a checkpoint. Weights of
encoder or decoder outside of their layers - positions, embedding norms, the encoder's final norm - belong to
the first layer of their side, under names that begin with "outer.".

Border: names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ..architecture import Stored, Tensors

__all__ = ["PairTensors", "pair_tensors"]

OUTER = "outer."
"""Prefix of the names of weights outside of layers that belong to the first layer of encoder or decoder."""
_T5 = {
    "attn": ("layer.0.SelfAttention.", {"q": "q", "k": "k", "v": "v", "o": "o"}),
    "cross": ("layer.1.EncDecAttention.", {"q": "q", "k": "k", "v": "v", "o": "o"}),
}
_BART_PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
_BART = {"attn": ("self_attn.", _BART_PARTS), "cross": ("encoder_attn.", _BART_PARTS)}


class PairShapes(Protocol):
    """Attributes of an architecture that determine its tensors and their shapes."""

    @property
    def spelling(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def encoder_layers(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_size(self) -> int: ...
    @property
    def norm_type(self) -> str: ...
    @property
    def is_gated(self) -> bool: ...
    @property
    def has_biases(self) -> bool: ...
    @property
    def buckets(self) -> int | None: ...
    @property
    def bias_in_each(self) -> bool: ...
    @property
    def position_rows(self) -> int: ...
    @property
    def has_position_waves(self) -> bool: ...
    @property
    def has_embedding_norm(self) -> bool: ...
    @property
    def has_final_norm(self) -> bool: ...
    @property
    def logit_factor(self) -> float: ...
    @property
    def has_head_bias(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    def is_decoder(self, layer: int) -> bool: ...


@dataclass(frozen=True)
class PairTensors(Tensors):
    """`Tensors` with different prefixes for encoder layers (`prefix`) and decoder layers."""

    depth: int = 0
    """Number of encoder layers."""
    decoder_prefix: str = ""
    """Prefix of the tensors of a decoder layer; "{}" stands for its number within the decoder."""

    def in_layer(self, layer: int, weight: str) -> str:
        """See `Tensors`."""
        stored = self.layers[layer][weight]
        if weight.startswith(OUTER):
            return stored.name
        number = layer if stored.layer is None else stored.layer
        if number < self.depth:
            return self.prefix.format(number) + stored.name
        return self.decoder_prefix.format(number - self.depth) + stored.name

    def placed(self, name: str) -> tuple[int | None, str]:
        """See `Tensors`."""
        for prefix, start in ((self.prefix, 0), (self.decoder_prefix, self.depth)):
            before, after = prefix.split("{}")
            number, separator, name_in_layer = name.removeprefix(before).partition(after)
            if name.startswith(before) and separator and number.isdigit():
                return start + int(number), name_in_layer
        return None, name


def pair_tensors(config: PairShapes) -> PairTensors:
    """Map of the weights of an encoder-decoder model to tensors."""
    c, is_t5 = config, config.spelling == "t5"
    root = "" if is_t5 else "model."
    table = (c.vocab_size, c.hidden_size)
    embed = Stored(f"{root}shared.weight", table)
    outside = {"embed": embed}
    factors = () if c.logit_factor == 1 else ((c.vocab_size, c.logit_factor),)
    head = embed.name if c.tie_word_embeddings else "lm_head.weight"
    outside["head"] = Stored(head, table, factors=factors) if factors or head != embed.name else embed
    if c.has_head_bias:
        outside["head.bias"] = Stored("final_logits_bias", (1, c.vocab_size))
    if c.has_final_norm:
        outside |= _norm(c, "final_norm", f"{root}decoder.{'final_layer_norm' if is_t5 else 'layer_norm'}")
    layers = tuple(dict(_layer(c, layer)) for layer in range(c.num_layers))
    copies = {f"{root}{side}.embed_tokens.weight": embed.name for side in ("encoder", "decoder")}
    copies |= {"lm_head.weight": embed.name} if c.tie_word_embeddings else {}
    # Old checkpoints of T5 hold an unused relative bias of cross-attention, those of M2M100 the sines and
    # cosines.
    stale = [f"{root}{side}.embed_positions.weights" for side in ("encoder", "decoder")]
    stale = ["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] if is_t5 else stale
    layer_prefix = "block.{}." if is_t5 else "layers.{}."
    return PairTensors(
        outside,
        layers,
        f"{root}encoder.{layer_prefix}",
        copies,
        stale,
        depth=c.encoder_layers,
        decoder_prefix=f"{root}decoder.{layer_prefix}",
    )


def _layer(c: PairShapes, layer: int) -> Iterator[tuple[str, Stored]]:
    """Tensors of a layer."""
    is_decoder, is_t5 = c.is_decoder(layer), c.spelling == "t5"
    inner, hidden = c.heads * c.head_dim, c.hidden_size
    rooms = _T5 if is_t5 else _BART
    for room in ("attn", "cross") if is_decoder else ("attn",):
        before, parts = rooms[room]
        for part, name in parts.items():
            shape = (hidden, inner) if part == "o" else (inner, hidden)
            yield from _map(c, f"{room}.{part}", before + name, shape)
    ff = f"layer.{1 + is_decoder}.DenseReluDense."
    if is_t5 and c.is_gated:
        maps = {"gate": f"{ff}wi_0", "up": f"{ff}wi_1", "down": f"{ff}wo"}
    else:
        maps = {"up": f"{ff}wi", "down": f"{ff}wo"} if is_t5 else {"up": "fc1", "down": "fc2"}
    for part, name in maps.items():
        shape = (hidden, c.mlp_size) if part == "down" else (c.mlp_size, hidden)
        yield from _map(c, f"mlp.{part}", name, shape)
    if is_t5:
        norms = {"ln1": "layer.0.layer_norm", "ln2": f"layer.{1 + is_decoder}.layer_norm"}
        norms |= {"ln_cross": "layer.1.layer_norm"} if is_decoder else {}
    else:
        norms = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm"}
        norms |= {"ln_cross": "encoder_attn_layer_norm"} if is_decoder else {}
    for weight, name in norms.items():
        yield from _norm(c, weight, name).items()
    first_layer = c.encoder_layers if is_decoder else 0
    if c.buckets is not None:
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        source = None if c.bias_in_each or layer == first_layer else first_layer
        yield "relative", Stored(table, (c.buckets, c.heads), layer=source)
    if layer == first_layer:
        yield from _outer(c, is_decoder=is_decoder)


def _outer(c: PairShapes, *, is_decoder: bool) -> Iterator[tuple[str, Stored]]:
    """Tensors outside of the layers of encoder or decoder, which belong to the first layer of that side."""
    root = "" if c.spelling == "t5" else "model."
    side = "decoder" if is_decoder else "encoder"
    if c.position_rows and not c.has_position_waves:
        shape = (c.position_rows, c.hidden_size)
        yield f"{OUTER}positions", Stored(f"{root}{side}.embed_positions.weight", shape)
    if c.has_embedding_norm:
        yield from _norm(c, f"{OUTER}embed_norm", f"{root}{side}.layernorm_embedding").items()
    if is_decoder and c.has_final_norm:
        name = "final_layer_norm" if c.spelling == "t5" else "layer_norm"
        yield from _norm(c, f"{OUTER}memory_norm", f"{root}encoder.{name}").items()


def _map(c: PairShapes, weight: str, name: str, shape: tuple[int, int]) -> Iterator[tuple[str, Stored]]:
    """Tensors of a linear layer [out, in]: its matrix, and its bias if the model has biases."""
    yield weight, Stored(f"{name}.weight", shape)
    if c.has_biases:
        yield f"{weight}.bias", Stored(f"{name}.bias", shape[:1])


def _norm(c: PairShapes, weight: str, name: str) -> dict[str, Stored]:
    """Checkpoint tensors of a norm layer: weight, and bias of layer norms."""
    tensors = {weight: Stored(f"{name}.weight", (c.hidden_size,))}
    return tensors | (
        {f"{weight}.bias": Stored(f"{name}.bias", (c.hidden_size,))} if c.norm_type == "layer" else {}
    )
