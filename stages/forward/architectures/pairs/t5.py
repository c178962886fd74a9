"""Families of T5 (Raffel et al., 2020): mT5 (Xue et al., 2021) and UMT5 (Chung et al., 2023).

Keys and defaults are those of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, PairSpec
from ..families import read_activation
from ..heads import class_name, is_encoder_class
from ..layer_tensors import EncoderNames, PairNames, Spelling
from ..mixers import AttentionSpec, MlpSpec, RelativeSpec
from ..transformer import ActivationName, ConfigReader
from .builders import TensorShapes, encoder_alone, family, pair_layers, require_complete, token_id

__all__ = ["mt5", "t5", "umt5"]

_T5: Mapping[str, Any] = {
    "vocab_size": 32128,
    "num_layers": 6,
    "num_heads": 8,
    "d_ff": 2048,
    "feed_forward_proj": "relu",
}
"""Config key -> its value in T5 if config.json leaves it out."""
_MT5: Mapping[str, Any] = {
    "vocab_size": 250112,
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
}
"""Config key -> its value in mT5 and UMT5 if config.json leaves it out."""


@family(
    "t5", "T5, T5 1.1, Flan-T5", norm="RMS", mlp="plain ReLU or gated GELU", positions="biases by distance"
)
def t5(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of T5: the stream is divided by sqrt(hidden) before a tied head."""
    is_tied = config.raw.get("tie_word_embeddings") is not False
    return _t5(config, shapes, _T5, divides_stream=config.raw.get("scale_decoder_outputs", is_tied))


@family("mt5", "mT5", norm="RMS", mlp="gated GELU (tanh)", positions="biases by distance")
def mt5(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of mT5: the stream is never divided before the head."""
    return _t5(config, shapes, _MT5, divides_stream=False)


@family("umt5", "UMT5", norm="RMS", mlp="gated GELU (tanh)", positions="biases by distance")
def umt5(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of UMT5: every layer has its own table of relative position biases; the stream is always
    divided."""
    return _t5(config, shapes, _MT5, divides_stream=True, has_own_tables=True)


def _t5(
    config: ConfigReader,
    shapes: TensorShapes,
    defaults: Mapping[str, Any],
    *,
    divides_stream: bool,
    has_own_tables: bool = False,
) -> ComposedArchitecture:
    """Architecture of a model of the T5 families.

    Arguments:
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        defaults: Values for keys that config.json leaves out.
        divides_stream: Whether the stream is divided by sqrt(hidden) before the head.
        has_own_tables: Whether each layer has its own table of relative position biases, instead of one for
            the encoder and one for the decoder.
    """
    if not (is_encoder := is_encoder_class(class_name(config.raw))):
        require_complete(config, shapes, "decoder.block.0.layer.1.EncDecAttention.q.weight")
    activation, is_gated = _feed_forward(config, defaults["feed_forward_proj"])
    hidden, heads = config.integer("d_model", 512), config.integer("num_heads", defaults["num_heads"])
    encoder = config.integer("num_layers", defaults["num_layers"])
    padding = config.raw.get("pad_token_id") or 0
    buckets = config.integer("relative_attention_num_buckets", 32, least=4)
    farthest = config.integer("relative_attention_max_distance", 128)

    def relative(layer: int) -> RelativeSpec:
        is_causal = layer >= encoder
        # Half of the buckets of each direction hold one distance each.
        near = buckets // (2 if is_causal else 4)
        source = layer if has_own_tables else encoder if is_causal else 0
        return RelativeSpec(buckets, near, farthest, ("bias",), looks_back=is_causal, source=source)

    model = ComposedArchitecture(
        model_type=config.raw["model_type"],
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size", defaults["vocab_size"]),
        blocks=pair_layers(
            # T5 does not scale scores; its initialisation makes up for it.
            AttentionSpec(heads, heads, config.integer("d_kv", 64), scale=1.0),
            MlpSpec(config.integer("d_ff", defaults["d_ff"]), activation, is_gated=is_gated),
            (encoder, config.integer("num_decoder_layers", encoder)),
            relative=relative,
        ),
        spelling=_spelling(is_gated),
        norm_eps=config.number("layer_norm_epsilon", 1e-6),
        logit_factor=hidden**-0.5 if divides_stream else 1.0,
        # transformers uses a head in the file even if tie_word_embeddings is true.
        tie_word_embeddings="lm_head.weight" not in shapes,
        pair=PairSpec(encoder, token_id(config, "decoder_start_token_id", padding)),
    )
    return encoder_alone(model) if is_encoder else model


def _feed_forward(config: ConfigReader, default: str) -> tuple[ActivationName, bool]:
    """Activation function of the MLPs, and whether they are gated, from the config key feed_forward_proj.
    default: for an absent key."""
    text = config.text("feed_forward_proj", default)
    parts = text.split("-")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise ConfigError(
            f"{config.source}: expected feed_forward_proj to be the name of an activation function such as "
            f"'relu', or of a gated one such as 'gated-gelu', found {text!r}; correct the file, or fetch it "
            "again"
        )
    # In T5 1.1, "gated-gelu" means the tanh approximation.
    name = "gelu_new" if text == "gated-gelu" else parts[-1]
    return read_activation(config.reading({"hidden_act": name})), len(parts) == 2


def _spelling(is_gated: bool) -> Spelling:
    """Tensor names of a T5 checkpoint; is_gated: whether its MLPs are gated."""
    return Spelling(
        embed="shared",
        # Old checkpoints hold an unused relative bias of cross-attention.
        unread=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        final_norm="decoder.final_layer_norm",
        layer="encoder.block.{}.",
        ln1="layer.0.layer_norm",
        ln2="layer.1.layer_norm",
        attention="layer.0.SelfAttention.",
        attention_parts=("q", "k", "v"),
        attention_out="o",
        mlp="layer.1.DenseReluDense.",
        mlp_parts=("wi_0", "wi_1", "wo") if is_gated else ("wi", "wo"),
        encoder=EncoderNames(relative="relative_attention_bias"),
        pair=PairNames(
            layer="decoder.block.{}.",
            ln2="layer.2.layer_norm",
            mlp="layer.2.DenseReluDense.",
            cross="layer.1.EncDecAttention.",
            ln_cross="layer.1.layer_norm",
            memory_norm="encoder.final_layer_norm",
        ),
    )
