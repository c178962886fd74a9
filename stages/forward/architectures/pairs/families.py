"""Families of encoders with decoders: how a config.json of each is read, with the reference's defaults.

T5 and its kin (Raffel et al., 2020; Xue et al., mT5, 2021), and BART and its kin (Lewis et al., 2020; Liu et
al., mBART, 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .....store.errors import ConfigError
from ..families import ACTIVATIONS
from ..transformer import ActivationName, ConfigReader
from .config import PairConfig

__all__ = ["PAIRS", "PairFamily"]

TensorShapes = Mapping[str, tuple[int, ...]]
UNUSED = (
    *(
        "dropout_rate",
        "initializer_factor",
        "classifier_dropout",
        "use_cache",
        "is_decoder",
        "task_specific_params",
    ),
    *("dropout", "attention_dropout", "activation_dropout", "init_std", "num_labels", "num_hidden_layers"),
    *("encoder_layerdrop", "decoder_layerdrop", "forced_eos_token_id", "forced_bos_token_id", "n_positions"),
    *("output_past", "add_final_layer_norm", "normalize_before", "add_bias_logits", "classif_dropout"),
)
"""Keys that change no number of a pass."""


@dataclass(frozen=True)
class PairFamily:
    """A family: how it is read, and in words."""

    read: Callable[[ConfigReader, TensorShapes], PairConfig]
    described: Mapping[str, str]


def _activation(reader: ConfigReader, name: str) -> ActivationName:
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; this "
            "model cannot run here"
        )
    return ACTIVATIONS[name]


def _begin(reader: ConfigReader, shapes: TensorShapes, witness: str) -> None:
    """Refuse checkpoints of an encoder or a decoder alone."""
    reader.read.update(UNUSED)
    if shapes and witness not in shapes:
        raise ConfigError(
            f"{reader.source}: expected an encoder with its decoder and LM head, found a checkpoint without "
            f"{witness!r}; load a part by itself with backend='transformers'"
        )


def _token(reader: ConfigReader, key: str, default: int | None) -> int:
    value: Any = reader.raw.get(key, default)
    reader.read.add(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{reader.source}: expected {key} to be a token id, found {value!r}; add it")
    return value


def _read_t5(reader: ConfigReader, shapes: TensorShapes, *, each: bool, tied: bool) -> PairConfig:
    _begin(reader, shapes, "decoder.block.0.layer.1.EncDecAttention.q.weight")
    raw = reader.raw
    form = reader.text("feed_forward_proj", "gated-gelu" if not tied else "relu")
    parts = form.split("-")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise ConfigError(
            f"{reader.source}: expected feed_forward_proj to be an activation, or gated- and an activation, "
            f"found {form!r}"
        )
    name = "gelu_new" if form == "gated-gelu" else parts[-1]
    reader.read.update(("scale_decoder_outputs", "tie_word_embeddings", "dense_act_fn", "is_gated_act"))
    hidden = reader.integer("d_model", 512)
    told = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
    scales = {"t5": told, "mt5": False}.get(raw["model_type"], True)
    buckets = reader.integer("relative_attention_num_buckets", 32, least=4)
    layers = reader.integer("num_layers", 6 if tied else 8)
    return PairConfig(
        model_type=raw["model_type"],
        spelling="t5",
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 32128 if tied else 250112),
        encoder_layers=layers,
        decoder_layers=reader.integer("num_decoder_layers", layers),
        heads=reader.integer("num_heads", 8 if tied else 6),
        head_dim=reader.integer("d_kv", 64),
        mlp_size=reader.integer("d_ff", 2048 if tied else 1024),
        activation=_activation(reader, name),
        start_token=_token(reader, "decoder_start_token_id", raw.get("pad_token_id") or 0),
        is_gated=len(parts) == 2,
        norm_eps=reader.number("layer_norm_epsilon", 1e-6),
        scale=1.0,
        buckets=buckets,
        farthest=reader.integer("relative_attention_max_distance", 128),
        bias_in_each=each,
        logit_factor=hidden**-0.5 if scales else 1.0,
        # A head of its own in the file is what the reference computes with, whatever the config says.
        tie_word_embeddings="lm_head.weight" not in shapes,
    )


def _read_bart(reader: ConfigReader, shapes: TensorShapes, *, like_mbart: bool) -> PairConfig:
    _begin(reader, shapes, "model.decoder.layers.0.encoder_attn.q_proj.weight")
    raw = reader.raw
    reader.read.add("tie_word_embeddings")
    sides = {}
    for key, default in (("attention_heads", 16), ("ffn_dim", 4096), ("layers", 12)):
        sides[key] = [reader.integer(f"{side}_{key}", default) for side in ("encoder", "decoder")]
        if key != "layers" and len(set(sides[key])) > 1:
            raise ConfigError(
                f"{reader.source}: expected encoder and decoder of the same {key}, found "
                f"{sides[key][0]} and {sides[key][1]}; such a model cannot run here"
            )
    hidden, heads = reader.integer("d_model", 1024), sides["attention_heads"][0]
    if hidden % heads:
        raise ConfigError(f"{reader.source}: expected heads that divide d_model {hidden}, found {heads}")
    scales = reader.flag("scale_embedding", False)
    own = "lm_head.weight" in shapes and raw.get("tie_word_embeddings") is False
    return PairConfig(
        model_type=raw["model_type"],
        spelling="bart",
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 50265),
        encoder_layers=sides["layers"][0],
        decoder_layers=sides["layers"][1],
        heads=heads,
        head_dim=hidden // heads,
        mlp_size=sides["ffn_dim"][0],
        activation=_activation(reader, reader.text("activation_function", "gelu")),
        start_token=_token(reader, "decoder_start_token_id", raw.get("eos_token_id", 2)),
        norm_type="layer",
        norm_eps=1e-5,
        norms="before" if like_mbart else "of sums",
        has_biases=True,
        max_positions=reader.integer("max_position_embeddings", 1024),
        position_offset=2,
        embedding_scale=math.sqrt(hidden) if scales else None,
        has_embedding_norm=True,
        has_final_norm=like_mbart,
        has_head_bias="final_logits_bias" in shapes,
        tie_word_embeddings=not own,
    )


def _row(model_type: str, examples: str, norm: str, mlp: str, positions: str) -> dict[str, str]:
    found = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    return found | {"attention": f"encoder, decoder, cross-attention; {positions}", "head": "tied or its own"}


def _t5(model_type: str, examples: str, mlp: str, *, each: bool = False, tied: bool = False) -> PairFamily:
    return PairFamily(
        lambda reader, shapes: _read_t5(reader, shapes, each=each, tied=tied),
        _row(model_type, examples, "RMS", mlp, "biases by distance"),
    )


def _bart(model_type: str, examples: str, norm: str, *, like_mbart: bool) -> PairFamily:
    return PairFamily(
        lambda reader, shapes: _read_bart(reader, shapes, like_mbart=like_mbart),
        _row(model_type, examples, norm, "plain, GELU", "learned positions"),
    )


PAIRS: dict[str, PairFamily] = {
    "t5": _t5("t5", "T5, T5 1.1, Flan-T5", "plain ReLU or gated GELU", tied=True),
    "mt5": _t5("mt5", "mT5", "gated GELU (tanh)"),
    "umt5": _t5("umt5", "UMT5", "gated GELU (tanh)", each=True),
    "bart": _bart("bart", "BART", "layer norm, on the sums", like_mbart=False),
    "mbart": _bart("mbart", "mBART", "layer norm", like_mbart=True),
}
"""model_type -> family."""
