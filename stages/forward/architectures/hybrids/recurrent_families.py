"""Readers of config.json for xLSTM, and for the recurrent models of flash-linear-attention (fla).

Semantics and defaults are those of the code that writes such checkpoints: transformers for xLSTM, fla for the
others, where some layers may have attention instead of the recurrent mixer.

Border: one config; never imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..layer_tensors import Spelling
from ..linear_mixers import GatedDeltaSpec, LinearAttentionSpec, MlstmSpec
from ..mixers import AttentionSpec, MixerSpec, MlpSpec
from ..transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig
from .linear_families import either
from .mamba_families import FamilyReader, TensorShapes, activation_of, checked, require_silu

__all__ = ["RECURRENT"]


# -- matrix memories


def _xlstm(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of xLSTM 7B: mLSTM layers only, with soft-capped gates."""
    hidden, heads = either(reader, "hidden_size", "embedding_dim", 4096), reader.integer("num_heads", 8)
    layers = either(reader, "num_hidden_layers", "num_blocks", 32)
    keys, values = (int(hidden * reader.number(f"{part}_dim_factor", share)) for part, share in _XLSTM)
    if keys % heads or values % heads:
        raise ConfigError(
            f"{reader.source}: expected num_heads to divide the {keys} channels of keys and the {values} "
            f"channels of values, found {heads}; correct the file, or fetch it again"
        )
    mode, bias = reader.text("weight_mode", "single"), reader.flag("use_bias", False)
    if mode not in ("single", "fused"):
        raise ConfigError(
            f"{reader.source}: expected weight_mode to be 'single' or 'fused', found {mode!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    is_fused, eps = mode == "fused", reader.number("norm_eps", 1e-6)
    mixer = MlstmSpec(
        heads,
        keys // heads,
        values // heads,
        reader.number("gate_soft_cap", 15.0),
        reader.number("eps", 1e-6),
        eps,
        has_bias=bias,
        is_fused=is_fused,
    )
    # The hidden width of the MLP is rounded up to a multiple of this.
    step = reader.integer("ffn_round_up_to_multiple_of", 64)
    inner = int((hidden * reader.number("ffn_proj_factor", 2.667) + step - 1) // step * step)
    mlp = MlpSpec(inner, "silu", is_fused=is_fused, has_bias=bias)
    spelling = Spelling(
        embed="backbone.embeddings",
        final_norm="backbone.out_norm",
        layer="backbone.blocks.{}.",
        ln1="norm_mlstm",
        ln2="norm_ffn",
        mixer="mlstm_layer.",
        mlp="ffn.",
        mlp_parts=("proj_up_gate_z", "proj_down") if is_fused else ("proj_up_gate", "proj_up", "proj_down"),
    )
    return ComposedArchitecture(
        model_type="xlstm",
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 50304),
        blocks=(LayerSpec((mixer,), mlp),) * layers,
        spelling=spelling,
        norm_eps=eps,
        final_logit_softcapping=reader.number("output_logit_soft_cap", 30.0),
        # transformers ignores tie_word_embeddings and never ties the head.
        tie_word_embeddings=False,
        norm_biases="in layers" if bias else "of layer norms",
    )


_XLSTM = (("qk", 0.5), ("v", 1.0))
"""(prefix of the config key "…_dim_factor", its default) for the widths of queries and keys, and of values,
as shares of the hidden size."""


# -- flash-linear-attention


def _gla(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of gated linear attention (GLA)."""
    mixer = _linear_attention(reader, "key", heads=4, expand_k=0.5, expand_v=1.0)
    return _of_fla(reader, mixer, ratio=4)


def _retnet(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of RetNet (retention)."""
    mixer = _linear_attention(reader, "fixed", heads=8, expand_k=1.0, expand_v=2.0)
    return _of_fla(reader, mixer, ratio=2)


def _linear_attention(
    reader: ConfigReader, decays: Literal["key", "fixed"], *, heads: int, expand_k: float, expand_v: float
) -> LinearAttentionSpec:
    """Sizes and switches of gated linear attention (decays "key") or retention (decays "fixed").

    Arguments:
        reader: The config.json.
        decays: Kind of decays (`LinearAttentionSpec.decays`).
        heads: Default of num_heads.
        expand_k: Default of the key channels as a multiple of the hidden size.
        expand_v: Default of the value channels as a multiple of the hidden size.
    """
    heads, is_gated = reader.integer("num_heads", heads), decays == "key"
    key_size, groups = _width(reader, "expand_k", expand_k, heads), reader.integer("num_kv_heads", heads)
    if heads % groups:
        raise ConfigError(
            f"{reader.source}: expected num_heads to be a multiple of num_kv_heads ({groups}), found "
            f"{heads}; correct the file, or fetch it again"
        )
    return LinearAttentionSpec(
        heads,
        groups,
        key_size,
        _width(reader, "expand_v", expand_v, heads),
        decays,
        # fla's retention ignores use_short_conv.
        conv_size=_conv_size(reader, default=False) if is_gated else 0,
        rope=None if is_gated else RopeConfig(10000.0, key_size),
        activation=activation_of(reader, "feature_map") if reader.has("feature_map") else None,
        least_log_decay=reader.optional_number("clamp_min") if is_gated else None,
        has_gate=reader.flag("use_output_gate", True),
        has_norm_weight=reader.flag("elementwise_affine", True),
        norm_eps=reader.number("norm_eps", 1e-6),
    )


def _delta_net(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DeltaNet: delta rule without decays."""
    for key, implemented in (("qk_activation", "silu"), ("qk_norm", "l2")):
        if (value := reader.text(key, implemented)) != implemented:
            raise ConfigError(
                f"{reader.source}: expected {key} {implemented!r}, found {value!r}; {TRY_TRANSFORMERS}"
            )
    # Without beta a write would replace the whole old value (beta = 1), which is not implemented.
    if not reader.flag("use_beta", True):
        raise ConfigError(f"{reader.source}: expected use_beta to be true, found false; {TRY_TRANSFORMERS}")
    heads = reader.integer("num_heads", 16)
    mixer = GatedDeltaSpec(
        heads,
        heads,
        _width(reader, "expand_k", 1.0, heads),
        _width(reader, "expand_v", 1.0, heads),
        _conv_size(reader, default=True),
        layout="separate",
        decays=None,
        beta_factor=_beta_factor(reader),
        gate="silu" if reader.flag("use_gate", False) else None,
        norm_eps=reader.number("norm_eps", 1e-6),
    )
    return _of_fla(reader, mixer, ratio=4)


def _gated_deltanet(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gated DeltaNet: delta rule with one decay per head."""
    groups, head_dim = reader.integer("num_heads", 6), reader.integer("head_dim", 256)
    mixer = GatedDeltaSpec(
        reader.integer("num_v_heads", groups),
        groups,
        head_dim,
        int(head_dim * reader.number("expand_v", 2.0)),
        _conv_size(reader, default=True),
        layout="separate",
        beta_factor=_beta_factor(reader),
        gate="silu" if reader.flag("use_gate", True) else None,
        norm_eps=reader.number("norm_eps", 1e-6),
    )
    return _of_fla(reader, mixer, ratio=4, layers=21)


def _of_fla(reader: ConfigReader, mixer: MixerSpec, *, ratio: int, layers: int = 24) -> ComposedArchitecture:
    """Architecture of a model of flash-linear-attention (fla): in each layer a recurrent mixer, or attention,
    and a gated MLP.

    Arguments:
        reader: The config.json.
        mixer: The recurrent mixer of all layers without attention.
        ratio: Default of hidden_ratio, the width of an ungated MLP of equal size as a multiple of the hidden
            size.
        layers: Default of num_hidden_layers.

    Raises:
        ConfigError: A setting is not implemented.
    """
    require_silu(reader, "hidden_act")
    # Attention residuals replace the sum of outputs by attention over them.
    if reader.has("attnres_block_size"):
        raise ConfigError(
            f"{reader.source}: expected no attnres_block_size, found {reader.raw['attnres_block_size']!r}, "
            f"with which the residual stream is not a sum of outputs; {TRY_TRANSFORMERS}"
        )
    hidden, layers = reader.integer("hidden_size", 2048), reader.integer("num_hidden_layers", layers)
    # A gated MLP has three matrices instead of two, hence 2/3 of the width, rounded up to a multiple of 256.
    width = int(hidden * reader.integer("hidden_ratio", ratio) * 2 / 3)
    mlp = MlpSpec(reader.integer("intermediate_size", 256 * ((width + 255) // 256)), "silu")
    attends = _attention_of_fla(reader, hidden, layers)
    # Norm and output gate are one module, whose tensors have another name.
    is_norm_fused = reader.flag("fuse_norm", True) and reader.flag("use_output_gate", True)
    spelling = Spelling(
        embed="model.embeddings",
        final_norm="model.norm",
        ln1="attn_norm",
        ln2="mlp_norm",
        mixer="attn.",
        mixer_norm="g_norm_swish_gate" if is_norm_fused else "g_norm",
        attention="attn.",
        mlp="mlp.",
    )
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 32000),
        blocks=tuple(
            checked(reader, LayerSpec((attends.get(layer, mixer),), mlp)) for layer in range(layers)
        ),
        spelling=spelling,
        norm_eps=reader.number("norm_eps", 1e-6),
        max_position_embeddings=reader.integer("max_position_embeddings", 2048) if attends else None,
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _attention_of_fla(reader: ConfigReader, hidden: int, layers: int) -> dict[int, AttentionSpec]:
    """Number of a layer -> its attention, for the layers that have attention instead of the recurrent mixer.

    The config key attn holds one or several sections, each with sizes and a list of its layers.

    Arguments:
        reader: The config.json.
        hidden: Hidden size of the model.
        layers: Number of layers.

    Raises:
        ConfigError: A section does not list existing layers, or its heads do not divide the hidden size.
    """
    value = reader.raw.get("attn")
    reader.read.add("attn")
    sections: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    specs: dict[int, AttentionSpec] = {}
    for section in sections:
        numbers = section.get("layers") if isinstance(section, dict) else None
        if not isinstance(numbers, list) or any(layer not in range(layers) for layer in numbers):
            raise ConfigError(
                f"{reader.source}: expected attn to have a key layers that lists layer numbers below "
                f"{layers}, found {section!r}; correct the file, or fetch it again"
            )
        section_reader = ConfigReader(section, f"{reader.source}: attn")
        heads = section_reader.integer("num_heads")
        if hidden % heads:
            raise ConfigError(
                f"{section_reader.source}: expected num_heads to divide hidden_size ({hidden}), found "
                f"{heads}; correct the file, or fetch it again"
            )
        spec = AttentionSpec(
            heads,
            section_reader.integer("num_kv_heads", heads),
            hidden // heads,
            RopeConfig(section_reader.number("rope_theta", 10000.0), hidden // heads),
            window=section_reader.optional_integer("window_size"),
            qkv_bias=section_reader.flag("qkv_bias", False),
        )
        specs |= dict.fromkeys(numbers, spec)
    return specs


def _width(reader: ConfigReader, key: str, default: float, heads: int) -> int:
    """Number of channels of a head: hidden size times a factor, divided by the number of heads.

    Arguments:
        reader: The config.json.
        key: Config key of the factor.
        default: Factor if the key is absent.
        heads: Number of heads.

    Raises:
        ConfigError: The number of heads does not divide the channels.
    """
    channels = int(reader.integer("hidden_size", 2048) * reader.number(key, default))
    if channels % heads:
        raise ConfigError(
            f"{reader.source}: expected num_heads to divide {channels} channels of {key}, found {heads}; "
            "correct the file, or fetch it again"
        )
    return channels // heads


def _conv_size(reader: ConfigReader, *, default: bool) -> int:
    """Kernel size of the short convolutions, in tokens; 0 for none. default: of the config key
    use_short_conv."""
    return reader.integer("conv_size", 4) if reader.flag("use_short_conv", default) else 0


def _beta_factor(reader: ConfigReader) -> float:
    """Factor of the write strength beta (`GatedDeltaSpec.beta_factor`): 2 if the config allows negative
    eigenvalues of the state transition, else 1."""
    return 2.0 if reader.flag("allow_neg_eigval", False) else 1.0


RECURRENT: dict[str, FamilyReader] = {
    "xlstm": FamilyReader(_xlstm, "xLSTM 7B", "mLSTMs", "gated SiLU", "untied, soft caps"),
    "gla": FamilyReader(_gla, "GLA 340M to 2.7B", "gated linear attention", "gated SiLU"),
    "retnet": FamilyReader(_retnet, "RetNet 1.3B and 2.7B", "retention with rope", "gated SiLU"),
    "delta_net": FamilyReader(_delta_net, "DeltaNet 1.3B", "delta nets", "gated SiLU"),
    "gated_deltanet": FamilyReader(_gated_deltanet, "Gated DeltaNet", "gated delta nets", "gated SiLU"),
}
"""model_type -> family, for recurrent models other than RWKV and state-space models."""
