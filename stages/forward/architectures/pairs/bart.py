"""Families of BART (Lewis et al., 2020) and relatives: mBART (Liu et al., 2020), Marian (Junczys-Dowmunt et
al., 2018), PEGASUS (Zhang et al., 2020), Blenderbot (Roller et al., 2021), M2M-100 (Fan et al., 2021), PLBART
(Ahmad et al., 2021), MVP (Tang et al., 2023).

Keys and defaults are those of Hugging Face transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from .....store.errors import ConfigError
from ..architecture import FinalNorm
from ..composed import ComposedArchitecture, PairSpec
from ..families import read_activation
from ..layer_tensors import EncoderNames, PairNames, Spelling
from ..mixers import AttentionSpec, MlpSpec
from ..transformer import TRY_TRANSFORMERS, ConfigReader
from .builders import TensorShapes, family, pair_layers, require_complete, token_id

__all__ = ["bart", "blenderbot", "blenderbot_small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "plbart"]

_SPELLING = Spelling(
    embed="model.shared",
    positions="model.encoder.embed_positions",
    embed_norm="model.encoder.layernorm_embedding",
    # Old checkpoints of M2M-100 hold the sines and cosines.
    unread=("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights"),
    final_norm="model.decoder.layer_norm",
    layer="model.encoder.layers.{}.",
    ln1="self_attn_layer_norm",
    ln2="final_layer_norm",
    attention_out="out_proj",
    mlp="",
    mlp_parts=("fc1", "fc2"),
    encoder=EncoderNames(head_bias="final_logits_bias", own_head_bias="final_logits_bias"),
    pair=PairNames(
        layer="model.decoder.layers.{}.",
        ln2="final_layer_norm",
        mlp="",
        cross="encoder_attn.",
        ln_cross="encoder_attn_layer_norm",
        memory_norm="model.encoder.layer_norm",
        positions="model.decoder.embed_positions",
        embed_norm="model.decoder.layernorm_embedding",
        embeds=("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
    ),
)
_DEFAULTS: Mapping[str, Any] = {
    "d_model": 1024,
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "attention_heads": 16,
    "ffn_dim": 4096,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "activation_function": "gelu",
    "scale_embedding": False,
}
"""Config key -> its value in BART if config.json leaves it out; the keys attention_heads and ffn_dim are
written without their prefix "encoder_" or "decoder_"."""


@family("bart", "BART", norm="layer norm, post-norm", mlp="plain, GELU", positions="learned positions")
def bart(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BART."""
    return _bart(config, shapes)


@family("mbart", "mBART", norm="layer norm", mlp="plain, GELU", positions="learned positions")
def mbart(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of mBART, with pre-norms."""
    return _bart(config, shapes, norms="before")


@family("plbart", "PLBART", norm="layer norm, post-norm", mlp="plain, GELU", positions="learned positions")
def plbart(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of PLBART, with scaled embeddings."""
    defaults = {"d_model": 768, "vocab_size": 50005, "attention_heads": 12, "ffn_dim": 3072}
    defaults |= {"encoder_layers": 6, "decoder_layers": 6, "scale_embedding": True}
    return _bart(config, shapes, defaults)


@family("mvp", "MVP", norm="layer norm, post-norm", mlp="plain, GELU", positions="learned positions")
def mvp(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MVP, without its prompts."""
    return _bart(config, shapes, {"vocab_size": 50267})


@family("marian", "Opus-MT", norm="layer norm, post-norm", mlp="plain, SiLU", positions="positions as waves")
def marian(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Marian."""
    defaults = {"vocab_size": 58101, "decoder_start_token_id": 58100}
    return _bart(config, shapes, defaults, embedding_norm=None, waves="transformer", offset=0)


@family("pegasus", "PEGASUS", norm="layer norm", mlp="plain, ReLU", positions="positions as waves")
def pegasus(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of PEGASUS."""
    defaults = {"decoder_start_token_id": 0}
    return _bart(config, shapes, defaults, norms="before", embedding_norm=None, waves="transformer", offset=0)


@family("m2m_100", "M2M-100, NLLB", norm="layer norm", mlp="plain, ReLU", positions="positions as waves")
def m2m_100(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of M2M-100, whose positions begin after the row of the padding token."""
    defaults = {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
    defaults |= {"decoder_start_token_id": 2}
    return _bart(config, shapes, defaults, norms="before", embedding_norm=None, waves="fairseq")


@family("blenderbot", "Blenderbot", norm="layer norm", mlp="plain, GELU", positions="learned positions")
def blenderbot(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Blenderbot."""
    defaults = {"d_model": 2560, "vocab_size": 8008, "max_position_embeddings": 128, "attention_heads": 32}
    defaults |= {"ffn_dim": 10240, "encoder_layers": 2, "decoder_layers": 24, "decoder_start_token_id": 1}
    return _bart(config, shapes, defaults, norms="before", embedding_norm=None, offset=0)


@family(
    "blenderbot-small",
    "Blenderbot 90M",
    norm="layer norm, post-norm; of target tokens without positions",
    mlp="plain, GELU",
    positions="learned positions",
)
def blenderbot_small(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Blenderbot 90M, which normalises the embeddings of target tokens before positions are
    added."""
    defaults = {"d_model": 512, "max_position_embeddings": 512, "ffn_dim": 2048, "encoder_layers": 8}
    defaults |= {"decoder_layers": 8, "decoder_start_token_id": 1}
    return _bart(config, shapes, defaults, embedding_norm="of target tokens", offset=0)


def _bart(
    config: ConfigReader,
    shapes: TensorShapes,
    defaults: Mapping[str, Any] | None = None,
    *,
    norms: Literal["before", "of sums"] = "of sums",
    embedding_norm: Literal["of sums", "of target tokens"] | None = "of sums",
    waves: Literal["fairseq", "transformer"] | None = None,
    offset: int = 2,
) -> ComposedArchitecture:
    """Architecture of BART, or of a related family of encoder-decoders.

    Arguments:
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        defaults: Values for keys that config.json leaves out, where the family's differ from BART's.
        norms: Place of the norms in a layer (`LayerSpec.norms`).
        embedding_norm: Norm of the embeddings: of the sum of token and position embeddings, or in targets of
            the token embeddings only; None for no norm.
        waves: Formula of sinusoidal positions: "transformer", unless the checkpoint has a table, or
            "fairseq". None for a learned table.
        offset: Row of the table for the first position; with "fairseq", the padding token's id + 1 instead.

    Raises:
        ConfigError: A setting is not implemented, such as different sizes in encoder and decoder.
    """
    require_complete(config, shapes, "model.decoder.layers.0.encoder_attn.q_proj.weight")
    raw, values = config.raw, {**_DEFAULTS, **(defaults or {})}
    _require_flag(config, "share_encoder_decoder_embeddings", implemented=True)
    _require_flag(config, "use_prompt", implemented=False)
    heads, mlp_size = (_of_both_sides(config, key, values[key]) for key in ("attention_heads", "ffn_dim"))
    hidden = config.integer("d_model", values["d_model"])
    if hidden % heads:
        raise ConfigError(
            f"{config.source}: expected encoder_attention_heads to divide d_model ({hidden}), found {heads}; "
            "correct the file, or fetch it again"
        )
    padding = None
    if waves == "fairseq":
        padding = config.integer("pad_token_id", 1, least=0)
        offset = padding + 1
    elif any(name.endswith("encoder.embed_positions.weight") for name in shapes):
        waves = None
    if waves is not None and hidden % 2:
        raise ConfigError(
            f"{config.source}: expected an even d_model in a model with sinusoidal positions, found "
            f"{hidden}; {TRY_TRANSFORMERS}"
        )
    depths = [config.integer(f"{side}_layers", values[f"{side}_layers"]) for side in ("encoder", "decoder")]
    length = config.integer("max_position_embeddings", values["max_position_embeddings"])
    start = values.get("decoder_start_token_id", raw.get("eos_token_id", 2))
    is_scaled = config.flag("scale_embedding", values["scale_embedding"])
    return ComposedArchitecture(
        model_type=raw["model_type"],
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size", values["vocab_size"]),
        blocks=pair_layers(
            AttentionSpec(heads, heads, hidden // heads, qkv_bias=True, o_bias=True),
            MlpSpec(
                mlp_size,
                read_activation(config, values["activation_function"], "activation_function"),
                is_gated=False,
                has_bias=True,
            ),
            (depths[0], depths[1]),
            norms=norms,
        ),
        spelling=_SPELLING,
        # PyTorch's default; the config has no key for it.
        norm_eps=1e-5,
        norm_type="layer",
        max_position_embeddings=2 * length,
        embedding_scale=math.sqrt(hidden) if is_scaled else None,
        position_rows=length + offset,
        first_position=offset,
        # BART ties its head unless both the config and the file say otherwise.
        tie_word_embeddings="lm_head.weight" not in shapes or raw.get("tie_word_embeddings") is not False,
        position_waves=waves,
        has_embedding_norm=embedding_norm is not None,
        has_head_bias="final_logits_bias" in shapes,
        unknown_token=padding,
        final_norm=FinalNorm() if norms == "before" else None,
        pair=PairSpec(
            depths[0],
            token_id(config, "decoder_start_token_id", start),
            side_length=length,
            norms_target_tokens=embedding_norm == "of target tokens",
        ),
    )


def _of_both_sides(config: ConfigReader, key: str, default: int) -> int:
    """A size that encoder and decoder must have in common.

    Arguments:
        config: The config.json.
        key: Config key of the size without its prefix "encoder_" or "decoder_", such as "ffn_dim".
        default: Value for an absent key.

    Raises:
        ConfigError: Encoder and decoder have different sizes.
    """
    encoder, decoder = (config.integer(f"{side}_{key}", default) for side in ("encoder", "decoder"))
    if encoder != decoder:
        raise ConfigError(
            f"{config.source}: expected encoder_{key} and decoder_{key} to be equal, found {encoder} and "
            f"{decoder}; {TRY_TRANSFORMERS}"
        )
    return encoder


def _require_flag(config: ConfigReader, key: str, *, implemented: bool) -> None:
    """Raise ConfigError unless a boolean config key is absent or has the only value that is implemented."""
    value = config.flag(key, implemented)
    if value is not implemented:
        raise ConfigError(
            f"{config.source}: expected {key} to be {str(implemented).lower()}, found {str(value).lower()}; "
            f"{TRY_TRANSFORMERS}"
        )
