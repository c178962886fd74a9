"""How the config.json of a model of one recurrent mixer is read: xLSTM, and those of flash-linear-attention.

As in mamba_families.py, whose table of families these are part of. Semantics and defaults are those of the
code that writes such checkpoints: of transformers for xLSTM, else of flash-linear-attention, which in some
layers may have plain attention instead.

Border: one config; never imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from ....store.errors import ConfigError
from .composed import ComposedArchitecture, LayerSpec
from .layer_tensors import Spelling
from .linear_families import either
from .linear_mixers import GatedDeltaSpec, LinearAttentionSpec, MlstmSpec
from .mamba_families import FamilyReader, TensorShapes, activation_of, checked, require_silu
from .mixers import AttentionSpec, MixerSpec, MlpSpec
from .transformer import ConfigReader, RopeConfig

__all__ = ["RECURRENT"]


# -- matrix memories


def _xlstm(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """xLSTM 7B: mLSTMs alone, and gates with soft caps."""
    hidden, heads = either(reader, "hidden_size", "embedding_dim", 4096), reader.integer("num_heads", 8)
    layers = either(reader, "num_hidden_layers", "num_blocks", 32)
    keys, values = (int(hidden * reader.number(f"{part}_dim_factor", usual)) for part, usual in _XLSTM)
    if keys % heads or values % heads:
        raise ConfigError(
            f"{reader.source}: expected num_heads to divide {keys} channels of keys and {values} of values, "
            f"found {heads}; correct the file, or fetch it again"
        )
    mode, bias = reader.text("weight_mode", "single"), reader.flag("use_bias", False)
    if mode not in ("single", "fused"):
        raise ConfigError(
            f"{reader.source}: expected weight_mode to be 'single' or 'fused', found {mode!r}; this model "
            "cannot run here"
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
        # The reference ties nothing, whatever the config says.
        tie_word_embeddings=False,
        norm_biases="in layers" if bias else "of layer norms",
    )


_XLSTM = (("qk", 0.5), ("v", 1.0))
"""Parts of a memory, and their share of the stream's width."""


# -- flash-linear-attention


def _gla(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    mixer = _fading(reader, "key", heads=4, expand_k=0.5, expand_v=1.0)
    return _of_fla(reader, mixer, ratio=4)


def _retnet(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    mixer = _fading(reader, "fixed", heads=8, expand_k=1.0, expand_v=2.0)
    return _of_fla(reader, mixer, ratio=2)


def _fading(
    reader: ConfigReader, decays: Literal["key", "fixed"], *, heads: int, expand_k: float, expand_v: float
) -> LinearAttentionSpec:
    """Gated linear attention or retention; the latter has no convolution, whatever the config says."""
    heads, is_gated = reader.integer("num_heads", heads), decays == "key"
    key_size, groups = _width(reader, "expand_k", expand_k, heads), reader.integer("num_kv_heads", heads)
    if heads % groups:
        raise ConfigError(
            f"{reader.source}: expected a number of heads that {groups} groups divide, found {heads}; "
            "correct the file, or fetch it again"
        )
    return LinearAttentionSpec(
        heads,
        groups,
        key_size,
        _width(reader, "expand_v", expand_v, heads),
        decays,
        conv_size=_conv_size(reader, usual=False) if is_gated else 0,
        rope=None if is_gated else RopeConfig(10000.0, key_size),
        activation=activation_of(reader, "feature_map") if reader.has("feature_map") else None,
        least_log_decay=reader.optional_number("clamp_min") if is_gated else None,
        has_gate=reader.flag("use_output_gate", True),
        has_norm_weight=reader.flag("elementwise_affine", True),
        norm_eps=reader.number("norm_eps", 1e-6),
    )


def _delta_net(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    for key, only in (("qk_activation", "silu"), ("qk_norm", "l2")):
        if (found := reader.text(key, only)) != only:
            raise ConfigError(
                f"{reader.source}: expected {key} {only!r}, found {found!r}; this model cannot run here"
            )
    if not reader.flag("use_beta", True):
        raise ConfigError(f"{reader.source}: expected use_beta, found none; this model cannot run here")
    heads = reader.integer("num_heads", 16)
    mixer = GatedDeltaSpec(
        heads,
        heads,
        _width(reader, "expand_k", 1.0, heads),
        _width(reader, "expand_v", 1.0, heads),
        _conv_size(reader, usual=True),
        layout="separate",
        decays=None,
        beta_factor=_beta_factor(reader),
        gate="silu" if reader.flag("use_gate", False) else None,
        norm_eps=reader.number("norm_eps", 1e-6),
    )
    return _of_fla(reader, mixer, ratio=4)


def _gated_deltanet(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    groups, head_dim = reader.integer("num_heads", 6), reader.integer("head_dim", 256)
    mixer = GatedDeltaSpec(
        reader.integer("num_v_heads", groups),
        groups,
        head_dim,
        int(head_dim * reader.number("expand_v", 2.0)),
        _conv_size(reader, usual=True),
        layout="separate",
        beta_factor=_beta_factor(reader),
        gate="silu" if reader.flag("use_gate", True) else None,
        norm_eps=reader.number("norm_eps", 1e-6),
    )
    return _of_fla(reader, mixer, ratio=4, layers=21)


def _of_fla(reader: ConfigReader, mixer: MixerSpec, *, ratio: int, layers: int = 24) -> ComposedArchitecture:
    """What its models have in common. ratio: of the MLP's parameters to those of a square matrix; that and
    layers where the config does not say."""
    require_silu(reader, "hidden_act")
    if reader.has("attnres_block_size"):
        raise ConfigError(
            f"{reader.source}: expected no attnres_block_size, found {reader.raw['attnres_block_size']!r}: "
            "such a stream is no sum; this model cannot run here"
        )
    hidden, layers = reader.integer("hidden_size", 2048), reader.integer("num_hidden_layers", layers)
    wanted = int(hidden * reader.integer("hidden_ratio", ratio) * 2 / 3)
    mlp = MlpSpec(reader.integer("intermediate_size", 256 * ((wanted + 255) // 256)), "silu")
    attends = _attention_of_fla(reader, hidden, layers)
    spelling = Spelling(
        embed="model.embeddings",
        final_norm="model.norm",
        ln1="attn_norm",
        ln2="mlp_norm",
        mixer="attn.",
        mixer_norm="g_norm_swish_gate" if _is_norm_fused(reader) else "g_norm",
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
    """Layers that attend: sections of the config, each with a list of its layers."""
    told = reader.raw.get("attn")
    reader.read.add("attn")
    sections: list[Any] = [] if told is None else told if isinstance(told, list) else [told]
    found: dict[int, AttentionSpec] = {}
    for section in sections:
        listed = section.get("layers") if isinstance(section, dict) else None
        if not isinstance(listed, list) or any(layer not in range(layers) for layer in listed):
            raise ConfigError(
                f"{reader.source}: expected attn to list layers among {layers}, found {section!r}; correct "
                "the file, or fetch it again"
            )
        of_section = ConfigReader(section, f"{reader.source}: attn")
        heads = of_section.integer("num_heads")
        if hidden % heads:
            raise ConfigError(
                f"{of_section.source}: expected num_heads to divide {hidden}, found {heads}; correct the "
                "file, or fetch it again"
            )
        shape = AttentionSpec(
            heads,
            of_section.integer("num_kv_heads", heads),
            hidden // heads,
            RopeConfig(of_section.number("rope_theta", 10000.0), hidden // heads),
            window=of_section.optional_integer("window_size"),
            qkv_bias=of_section.flag("qkv_bias", False),
        )
        found |= dict.fromkeys(listed, shape)
    return found


def _width(reader: ConfigReader, key: str, usual: float, heads: int) -> int:
    """Of a head, of channels that are a multiple of the stream's."""
    channels = int(reader.integer("hidden_size", 2048) * reader.number(key, usual))
    if channels % heads:
        raise ConfigError(
            f"{reader.source}: expected num_heads to divide {channels} channels of {key}, found {heads}; "
            "correct the file, or fetch it again"
        )
    return channels // heads


def _conv_size(reader: ConfigReader, *, usual: bool) -> int:
    """Of short convolutions; 0 for none."""
    return reader.integer("conv_size", 4) if reader.flag("use_short_conv", usual) else 0


def _beta_factor(reader: ConfigReader) -> float:
    return 2.0 if reader.flag("allow_neg_eigval", False) else 1.0


def _is_norm_fused(reader: ConfigReader) -> bool:
    """Whether norm and gate are one module, which is called otherwise."""
    return reader.flag("fuse_norm", True) and reader.flag("use_output_gate", True)


RECURRENT: dict[str, FamilyReader] = {
    "xlstm": FamilyReader(_xlstm, "xLSTM 7B", "mLSTMs", "gated SiLU", "untied, soft caps"),
    "gla": FamilyReader(_gla, "GLA 340M to 2.7B", "gated linear attention", "gated SiLU"),
    "retnet": FamilyReader(_retnet, "RetNet 1.3B and 2.7B", "retention with rope", "gated SiLU"),
    "delta_net": FamilyReader(_delta_net, "DeltaNet 1.3B", "delta nets", "gated SiLU"),
    "gated_deltanet": FamilyReader(_gated_deltanet, "Gated DeltaNet", "gated delta nets", "gated SiLU"),
}
"""Every model of one recurrent mixer that is neither RWKV nor a state space, by model_type."""
