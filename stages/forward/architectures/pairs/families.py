"""Readers of config.json for encoder-decoder models, with the defaults of the reference (transformers).

T5 and relatives (Raffel et al., 2020; Xue et al., mT5, 2021), and BART and relatives (Lewis et al., 2020; Liu
et al., mBART, 2020; Junczys-Dowmunt et al., Marian, 2018; Zhang et al., PEGASUS, 2020; Roller et al.,
Blenderbot, 2021; Fan et al., M2M-100, 2021; Ahmad et al., PLBART, 2021; Tang et al., MVP, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    *("normalize_embedding", "static_position_embeddings", "extra_pos_embeddings", "decoder_vocab_size"),
    *("extra_layer_norm", "layernorm_variant", "do_blenderbot_90_layernorm", "prompt_length"),
    *(
        "prompt_mid_dim",
        "encoder_no_repeat_ngram_size",
        "force_bos_token_to_be_generated",
        "gradient_checkpointing",
    ),
)
"""Config keys that do not change the results of a forward pass."""


@dataclass(frozen=True)
class PairFamily:
    """Reader of a family's config.json, and its row in the table of families."""

    read: Callable[[ConfigReader, TensorShapes], PairConfig]
    """Function (config, shapes of the checkpoint's tensors by name) -> architecture."""
    described: Mapping[str, str]
    """Column name -> text."""


@dataclass(frozen=True)
class _Bart:
    """Differences between a family and BART."""

    norms: Literal["before", "of sums"] = "of sums"
    """`PairConfig.norms`."""
    embedding_norm: Literal["of sums", "of target tokens"] | None = "of sums"
    """Norm of the sum of token and position embeddings; in targets possibly of the tokens only; None for
    none."""
    positions: Literal["learned", "waves", "waves of fairseq"] = "learned"
    """A learned table; sines and cosines unless the file has a table ("waves"); or sines and cosines that no
    file has and that begin after the row of the padding token ("waves of fairseq")."""
    offset: int = 2
    """Row of the first position in the table."""
    activation: str = "gelu"
    """Default of activation_function."""
    is_scaled: bool = False
    """Default of scale_embedding."""
    start: int | None = None
    """Default of decoder_start_token_id; None for eos_token_id."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Default sizes that differ from those of BART, by config key."""


# Default sizes in the reference, by config key; "attention_heads" and "ffn_dim" without their side.
_BART = {"d_model": 1024, "vocab_size": 50265, "max_position_embeddings": 1024}
_BART |= {"attention_heads": 16, "ffn_dim": 4096, "encoder_layers": 12, "decoder_layers": 12}
_PLBART = {"d_model": 768, "vocab_size": 50005, "attention_heads": 12, "ffn_dim": 3072}
_PLBART |= {"encoder_layers": 6, "decoder_layers": 6}
_BLENDERBOT = {"d_model": 2560, "vocab_size": 8008, "max_position_embeddings": 128, "attention_heads": 32}
_BLENDERBOT |= {"ffn_dim": 10240, "encoder_layers": 2, "decoder_layers": 24}
_SMALL = {"d_model": 512, "max_position_embeddings": 512, "ffn_dim": 2048}
_SMALL |= {"encoder_layers": 8, "decoder_layers": 8}


def _activation(reader: ConfigReader, name: str) -> ActivationName:
    """Activation function by config name; ConfigError for unsupported activations."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; this "
            "model cannot run here"
        )
    return ACTIVATIONS[name]


def _begin(reader: ConfigReader, shapes: TensorShapes, cross_attention: str) -> None:
    """Mark `UNUSED` keys as read, and refuse checkpoints of an encoder or a decoder alone.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        cross_attention: Name of a tensor of cross-attention, which a complete checkpoint must have.

    Raises:
        ConfigError: That tensor is missing.
    """
    reader.read.update(UNUSED)
    if shapes and cross_attention not in shapes:
        raise ConfigError(
            f"{reader.source}: expected an encoder with its decoder and LM head, found a checkpoint without "
            f"{cross_attention!r}; load a part by itself with backend='transformers'"
        )


def _token(reader: ConfigReader, key: str, default: int | None) -> int:
    """Token id under a config key; ConfigError for a missing or invalid id. default: None for a required
    key."""
    value: Any = reader.raw.get(key, default)
    reader.read.add(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{reader.source}: expected {key} to be a token id, found {value!r}; add it")
    return value


def _read_t5(reader: ConfigReader, shapes: TensorShapes, *, bias_in_each: bool, tied: bool) -> PairConfig:
    """Architecture of a T5.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        bias_in_each: Whether each layer has its own table of relative position biases (UMT5).
        tied: Whether defaults are those of T5, instead of those of mT5 and UMT5.
    """
    _begin(reader, shapes, "decoder.block.0.layer.1.EncDecAttention.q.weight")
    raw = reader.raw
    feed_forward = reader.text("feed_forward_proj", "gated-gelu" if not tied else "relu")
    parts = feed_forward.split("-")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise ConfigError(
            f"{reader.source}: expected feed_forward_proj to be an activation, or gated- and an activation, "
            f"found {feed_forward!r}"
        )
    # In T5 1.1, "gated-gelu" means the tanh approximation.
    name = "gelu_new" if feed_forward == "gated-gelu" else parts[-1]
    reader.read.update(("scale_decoder_outputs", "tie_word_embeddings", "dense_act_fn", "is_gated_act"))
    hidden = reader.integer("d_model", 512)
    # T5 divides the stream by sqrt(hidden) before a tied head; mT5 never does, UMT5 always.
    is_scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
    scales = {"t5": is_scaled, "mt5": False}.get(raw["model_type"], True)
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
        # T5 does not scale scores; its initialisation makes up for it.
        scale=1.0,
        buckets=buckets,
        farthest=reader.integer("relative_attention_max_distance", 128),
        bias_in_each=bias_in_each,
        logit_factor=hidden**-0.5 if scales else 1.0,
        # The reference uses a head in the file even if tie_word_embeddings is true.
        tie_word_embeddings="lm_head.weight" not in shapes,
    )


def _read_bart(reader: ConfigReader, shapes: TensorShapes, family: _Bart) -> PairConfig:
    """Architecture of a BART or a relative.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        family: Differences between the family and BART.

    Raises:
        ConfigError: A setting is not implemented, such as different sizes in encoder and decoder.
    """
    _begin(reader, shapes, "model.decoder.layers.0.encoder_attn.q_proj.weight")
    raw, defaults = reader.raw, {**_BART, **family.defaults}
    reader.read.add("tie_word_embeddings")
    _require_flag(reader, "share_encoder_decoder_embeddings", implemented=True)
    _require_flag(reader, "use_prompt", implemented=False)
    sizes = {}
    for key in ("attention_heads", "ffn_dim"):
        encoder, decoder = (reader.integer(f"{side}_{key}", defaults[key]) for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise ConfigError(
                f"{reader.source}: expected encoder and decoder of the same {key}, found {encoder} and "
                f"{decoder}; such a model cannot run here"
            )
        sizes[key] = encoder
    hidden, heads = reader.integer("d_model", defaults["d_model"]), sizes["attention_heads"]
    if hidden % heads:
        raise ConfigError(f"{reader.source}: expected heads that divide d_model {hidden}, found {heads}")
    is_fairseq = family.positions == "waves of fairseq"
    in_file = "model.encoder.embed_positions.weight" in shapes
    waves = is_fairseq or (family.positions == "waves" and not in_file)
    if waves and hidden % 2:
        raise ConfigError(
            f"{reader.source}: expected an even d_model where positions are waves, found {hidden}; such a "
            "model cannot run here"
        )
    # fairseq numbers positions from the padding token's id + 1.
    padding = reader.integer("pad_token_id", 1, least=0) if is_fairseq else None
    start = raw.get("eos_token_id", 2) if family.start is None else family.start
    # BART ties its head unless both the config and the file say otherwise.
    is_untied = "lm_head.weight" in shapes and raw.get("tie_word_embeddings") is False
    return PairConfig(
        model_type=raw["model_type"],
        spelling="bart",
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", defaults["vocab_size"]),
        encoder_layers=reader.integer("encoder_layers", defaults["encoder_layers"]),
        decoder_layers=reader.integer("decoder_layers", defaults["decoder_layers"]),
        heads=heads,
        head_dim=hidden // heads,
        mlp_size=sizes["ffn_dim"],
        activation=_activation(reader, reader.text("activation_function", family.activation)),
        start_token=_token(reader, "decoder_start_token_id", start),
        norm_type="layer",
        # PyTorch's default; the config has no key for it.
        norm_eps=1e-5,
        norms=family.norms,
        has_biases=True,
        max_positions=reader.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        position_offset=family.offset if padding is None else padding + 1,
        embedding_scale=math.sqrt(hidden) if reader.flag("scale_embedding", family.is_scaled) else None,
        has_embedding_norm=family.embedding_norm is not None,
        has_final_norm=family.norms == "before",
        has_head_bias="final_logits_bias" in shapes,
        tie_word_embeddings=not is_untied,
        has_position_waves=waves,
        ends_with_slowest_wave=is_fairseq or not waves,
        norms_target_tokens=family.embedding_norm == "of target tokens",
        unknown_token=padding,
    )


def _require_flag(reader: ConfigReader, key: str, *, implemented: bool) -> None:
    """Raise ConfigError unless a flag is absent or has the only value that is implemented."""
    value = reader.flag(key, implemented)
    if value is not implemented:
        raise ConfigError(
            f"{reader.source}: expected {key} to be {str(implemented).lower()}, found {str(value).lower()}; "
            "such a model cannot run here"
        )


def _row(model_type: str, examples: str, norm: str, mlp: str, positions: str) -> dict[str, str]:
    """Row of the table of families: column name -> text."""
    row = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    return row | {"attention": f"encoder, decoder, cross-attention; {positions}", "head": "tied or its own"}


def _t5(
    model_type: str, examples: str, mlp: str, *, bias_in_each: bool = False, tied: bool = False
) -> PairFamily:
    """A relative of T5; see `_read_t5`. mlp: its MLPs in words."""
    return PairFamily(
        lambda reader, shapes: _read_t5(reader, shapes, bias_in_each=bias_in_each, tied=tied),
        _row(model_type, examples, "RMS", mlp, "biases by distance"),
    )


def _bart(model_type: str, examples: str, norm: str, mlp: str, family: _Bart) -> PairFamily:
    """A relative of BART. norm, mlp: its norms and MLPs in words; family: its differences."""
    positions = {"learned": "learned positions", "waves": "positions as waves"}
    return PairFamily(
        lambda reader, shapes: _read_bart(reader, shapes, family),
        _row(model_type, examples, norm, mlp, positions[family.positions.split(" of ")[0]]),
    )


_POST_NORM = "layer norm, post-norm"
PAIRS: dict[str, PairFamily] = {
    "t5": _t5("t5", "T5, T5 1.1, Flan-T5", "plain ReLU or gated GELU", tied=True),
    "mt5": _t5("mt5", "mT5", "gated GELU (tanh)"),
    "umt5": _t5("umt5", "UMT5", "gated GELU (tanh)", bias_in_each=True),
    "bart": _bart("bart", "BART", _POST_NORM, "plain, GELU", _Bart()),
    "mbart": _bart("mbart", "mBART", "layer norm", "plain, GELU", _Bart(norms="before")),
    "plbart": _bart("plbart", "PLBART", _POST_NORM, "plain, GELU", _Bart(is_scaled=True, defaults=_PLBART)),
    "mvp": _bart("mvp", "MVP", _POST_NORM, "plain, GELU", _Bart(defaults={"vocab_size": 50267})),
    "marian": _bart(
        "marian",
        "Opus-MT",
        _POST_NORM,
        "plain, SiLU",
        _Bart(
            embedding_norm=None,
            positions="waves",
            offset=0,
            start=58100,
            defaults={"vocab_size": 58101},
        ),
    ),
    "pegasus": _bart(
        "pegasus",
        "PEGASUS",
        "layer norm",
        "plain, ReLU",
        _Bart(norms="before", embedding_norm=None, positions="waves", offset=0, start=0),
    ),
    "m2m_100": _bart(
        "m2m_100",
        "M2M-100, NLLB",
        "layer norm",
        "plain, ReLU",
        _Bart(
            norms="before",
            embedding_norm=None,
            positions="waves of fairseq",
            activation="relu",
            is_scaled=True,
            start=2,
            defaults={"vocab_size": 128112},
        ),
    ),
    "blenderbot": _bart(
        "blenderbot",
        "Blenderbot",
        "layer norm",
        "plain, GELU",
        _Bart(norms="before", embedding_norm=None, offset=0, start=1, defaults=_BLENDERBOT),
    ),
    "blenderbot-small": _bart(
        "blenderbot-small",
        "Blenderbot 90M",
        f"{_POST_NORM}; of target tokens without positions",
        "plain, GELU",
        _Bart(embedding_norm="of target tokens", offset=0, start=1, defaults=_SMALL),
    ),
}
"""model_type -> family."""
