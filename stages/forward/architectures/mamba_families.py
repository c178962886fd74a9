"""How the config.json of a state-space model or a hybrid is read: a function per family, and a table of them.

Semantics and defaults are those of the reference implementation (transformers). What stands in several
configs under one name is read by one helper; what a family alone has is in its function.

Border: one config, and names of tensors where checkpoints of a family spell them in two ways; never imports
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ....store.errors import ConfigError
from .composed import ComposedArchitecture, LayerSpec
from .families import ACTIVATIONS, read_rope, refuse_unfollowed
from .layer_tensors import ExpertNames, Spelling
from .mixers import AttentionSpec, ExpertsSpec, Mamba2Spec, MambaSpec, MlpSpec
from .transformer import ActivationName, ConfigReader, RopeConfig

__all__ = [
    "HYBRIDS",
    "FamilyReader",
    "activation_of",
    "checked",
    "expanded",
    "layer_types_of",
    "rank_of",
    "read_mamba",
    "require_silu",
    "rope_of",
]

TensorShapes = Mapping[str, tuple[int, ...]]
LAYER_TYPES = {
    "attention": "attention",
    "full_attention": "attention",
    "mamba": "mamba",
    "mamba2": "mamba",
    "linear_attention": "mamba",
    "mlp": "mlp",
    "moe": "moe",
}
"""What configs of several years call the same."""
SHARED = (("ssm_head", "ssm_group"), ("linear_head", "linear_group"))
"""Axes of heads, and of what groups of them share."""
BACKBONE = Spelling(
    embed="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    ln1="norm",
    ln2="norm",
    mixer="mixer.",
    attention="mixer.",
    mlp="mixer.",
)


@dataclass(frozen=True)
class FamilyReader:
    """How a family's config.json becomes an architecture, and how it is described (`described` in known.py).

    reads_tensors: whether its checkpoints are spelled in two ways, so that names of tensors are asked for.
    may_look_both_ways: whether its reader takes use_bidirectional_attention upon itself.
    """

    read: Callable[[ConfigReader, TensorShapes], ComposedArchitecture]
    examples: str
    mixers: str
    mlp: str = "none"
    head: str = "untied"
    reads_tensors: bool = False
    may_look_both_ways: bool = False

    def config(self, reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
        """The architecture. shapes: of its tensors by name; empty where its family asks for none.

        Raises ConfigError for a key that is missing, of the wrong type, or asks for what is not followed.
        """
        refuse_unfollowed(reader, both_ways=self.may_look_both_ways)
        return self.read(reader, shapes)


def read_mamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """The architecture of a model with state spaces, by the row of its model_type."""
    return HYBRIDS[reader.raw["model_type"]].config(reader, shapes)


# -- state spaces alone


def _mamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Mamba and Falcon-Mamba, which norms step sizes, B and C without weights."""
    hidden = reader.integer("hidden_size")
    require_silu(reader, "hidden_act")
    is_falcon = reader.raw["model_type"] == "falcon_mamba"
    shape = MambaSpec(
        channels=expanded(reader, "expand", hidden),
        state_size=reader.integer("state_size", 16),
        conv_size=reader.integer("conv_kernel", 4),
        rank=rank_of(reader, "time_step_rank", hidden),
        has_bias=reader.flag("use_bias", False),
        has_conv_bias=reader.flag("use_conv_bias", True),
        norms="plain" if is_falcon else None,
        norm_eps=reader.number("mixer_rms_eps", 1e-6) if is_falcon else 1e-6,
    )
    return _alone(reader, LayerSpec((shape,)), tied=True)


def _mamba2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    require_silu(reader, "hidden_act")
    bias, eps = reader.flag("use_bias", False), reader.number("layer_norm_epsilon", 1e-5)
    shape = Mamba2Spec(
        heads=reader.integer("num_heads", 128),
        head_dim=reader.integer("head_dim", 64),
        groups=reader.integer("n_groups", 8),
        state_size=reader.integer("state_size", 128),
        conv_size=reader.integer("conv_kernel", 4),
        limits=_limits(reader),
        norm_eps=eps,
        has_bias=bias,
        has_out_bias=bias,
        has_conv_bias=reader.flag("use_conv_bias", True),
    )
    return _alone(reader, checked(reader, LayerSpec((shape,))), tied=False)


def _alone(reader: ConfigReader, block: LayerSpec, *, tied: bool) -> ComposedArchitecture:
    """A model of one kind of layer without channel mixers, as `backbone` checkpoints have it."""
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        blocks=(block,) * reader.integer("num_hidden_layers"),
        spelling=BACKBONE,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        has_wide_stream=reader.flag("residual_in_fp32", True),
        tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
    )


# -- hybrids with attention


def _bamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    layers, listed = reader.integer("num_hidden_layers"), reader.raw.get("attn_layer_indices") or []
    # The reference turns half of each head, unless rope_parameters says otherwise.
    attention = _attention(reader, rope=rope_of(reader, _head_dim(reader), 262144, share=0.5))
    mamba = _mamba2_of_hybrid(reader)
    mlp = MlpSpec(reader.integer("intermediate_size"), activation_of(reader), has_bias=_mlp_bias(reader))
    blocks = tuple(LayerSpec((attention if layer in listed else mamba,), mlp) for layer in range(layers))
    return _hybrid(reader, blocks, Spelling(), context=262144)


def _jamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    require_silu(reader, "hidden_act")
    # It has no rope, and its attention no biases.
    attention = replace(_attention(reader, rope=None), qkv_bias=False, o_bias=False)
    mamba = MambaSpec(
        channels=expanded(reader, "mamba_expand", hidden),
        state_size=reader.integer("mamba_d_state", 16),
        conv_size=reader.integer("mamba_d_conv", 4),
        rank=rank_of(reader, "mamba_dt_rank", hidden),
        has_bias=reader.flag("mamba_proj_bias", False),
        has_conv_bias=reader.flag("mamba_conv_bias", True),
        norms="weighted",
        norm_eps=reader.number("rms_norm_eps", 1e-6),
    )
    inner = reader.integer("intermediate_size")
    mlp: MlpSpec | ExpertsSpec = MlpSpec(inner, "silu")
    experts, count, chosen = mlp, reader.integer("num_experts", 16), reader.integer("num_experts_per_tok", 2)
    if count > 1:
        experts = ExpertsSpec(count, chosen, inner, "silu", routing="chosen of softmax")
    attends = reader.integer("attn_layer_period", 8), reader.integer("attn_layer_offset", 4, least=0)
    routes = reader.integer("expert_layer_period", 2), reader.integer("expert_layer_offset", 1, least=0)
    blocks = tuple(
        LayerSpec(
            (attention if _is_at(layer, attends) else mamba,),
            experts if _is_at(layer, routes) else mlp,
        )
        for layer in range(layers)
    )
    return _hybrid(reader, blocks, Spelling(), context=262144, eps=1e-6)


def _granite(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    types = layer_types_of(reader, "layer_types", ["mamba"] * reader.integer("num_hidden_layers"))
    position = reader.raw.get("position_embedding_type")
    factor = reader.number("residual_multiplier", 1.0)
    attention = replace(
        _attention(
            reader,
            rope=rope_of(reader, _head_dim(reader), 2048) if position == "rope" else None,
            kv_heads=None,
        ),
        scale=reader.number("attention_multiplier", 1.0),
        factors=(1.0, 1.0, factor),
    )
    mamba = replace(_mamba2_of_hybrid(reader, eps=1e-6), out_factor=factor)
    shared, activation = reader.integer("shared_intermediate_size", 1024), activation_of(reader)
    channel_mixer: MlpSpec | ExpertsSpec = MlpSpec(shared, activation, is_fused=True, factors=(1.0, factor))
    if count := reader.integer("num_local_experts", 8, least=0):
        channel_mixer = ExpertsSpec(
            count,
            reader.integer("num_experts_per_tok", 2),
            reader.integer("intermediate_size"),
            activation,
            routing="softmax of chosen",
            shared_size=shared,
            is_listed=False,
            factor=factor,
        )
    spelling = Spelling(
        final_norm="model.norm",
        ln2="post_attention_layernorm",
        mlp="shared_mlp.",
        mlp_parts=("input_linear", "output_linear"),
        experts=ExpertNames(
            room="block_sparse_moe.",
            router="router.layer",
            parts=("input_linear", "output_linear"),
            shared="shared_mlp.",
        ),
    )
    blocks = tuple(LayerSpec((attention if kind == "attention" else mamba,), channel_mixer) for kind in types)
    return replace(
        _hybrid(reader, blocks, spelling, context=2048, eps=1e-6),
        embedding_scale=_unless_one(reader.number("embedding_multiplier", 1.0)),
        logit_factor=1 / reader.number("logits_scaling", 1.0),
    )


def _falcon_h1(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Attention and Mamba-2 side by side in every layer."""
    of_mlp = _numbers(reader, "mlp_multipliers", 2)
    attention = replace(
        _attention(reader, rope=rope_of(reader, _head_dim(reader), 8192)),
        factors=(
            reader.number("attention_in_multiplier", 1.0),
            reader.number("key_multiplier", 1.0),
            reader.number("attention_out_multiplier", 1.0),
        ),
    )
    before_gate: Literal["before gate", "gated"] = (
        "before gate" if reader.flag("mamba_norm_before_gate", True) else "gated"
    )
    mamba = replace(
        _mamba2_of_hybrid(reader, channels=reader.optional_integer("mamba_d_ssm", 1024)),
        norm=before_gate if reader.flag("mamba_rms_norm", False) else None,
        has_out_bias=reader.flag("projectors_bias", False),
        into_factor=reader.number("ssm_in_multiplier", 1.0),
        in_factors=_numbers(reader, "ssm_multipliers", 5),
        out_factor=reader.number("ssm_out_multiplier", 1.0),
    )
    mlp = MlpSpec(
        reader.integer("intermediate_size"),
        activation_of(reader),
        has_bias=_mlp_bias(reader),
        factors=(of_mlp[0], of_mlp[1]),
    )
    block = LayerSpec((attention, mamba), mlp)
    return replace(
        _hybrid(reader, (block,) * reader.integer("num_hidden_layers"), Spelling(), context=8192),
        embedding_scale=_unless_one(reader.number("embedding_multiplier", 1.0)),
        logit_factor=reader.number("lm_head_multiplier", 1.0),
    )


def _nemotron_h(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Every layer is a mixer, or a channel mixer, alone."""
    bias, mlp_bias = reader.flag("use_bias", False), _mlp_bias(reader)
    eps, activation = (
        reader.number("layer_norm_epsilon", 1e-5),
        activation_of(reader, "mlp_hidden_act", "relu2"),
    )
    require_silu(reader, "mamba_hidden_act")
    heads = reader.integer("num_attention_heads", 32)
    attention = AttentionSpec(
        heads, reader.integer("num_key_value_heads", 8), reader.integer("head_dim", 128)
    )
    mamba = Mamba2Spec(
        heads=reader.integer("mamba_num_heads", 128),
        head_dim=reader.integer("mamba_head_dim", 64),
        groups=reader.integer("n_groups", reader.integer("mamba_n_groups", 8)),
        state_size=reader.integer("ssm_state_size", 128),
        conv_size=reader.integer("conv_kernel", reader.integer("mamba_d_conv", 4)),
        # The reference computes with time_step_min as the smallest step, and reads no time_step_limit.
        limits=(reader.number("time_step_min", reader.number("mamba_dt_min", 0.001)), None),
        norm_eps=eps,
        has_bias=bias,
        has_out_bias=bias,
        has_conv_bias=reader.flag("use_conv_bias", reader.flag("mamba_conv_bias", True)),
    )
    parts = ("up_proj", "down_proj")
    mlp = MlpSpec(reader.integer("intermediate_size", 21504), activation, is_gated=False, has_bias=mlp_bias)
    experts = ExpertsSpec(
        reader.integer("n_routed_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("moe_intermediate_size", 7688),
        activation,
        routing="sigmoid",
        shared_size=reader.integer("moe_shared_expert_intermediate_size", 7688),
        is_gated=False,
        groups=reader.integer("n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
        sums_to_one=reader.flag("norm_topk_prob", True),
        routed_factor=reader.number("routed_scaling_factor", 1.0),
        latent_size=reader.optional_integer("moe_latent_size"),
        has_bias=mlp_bias,
    )
    found = {
        "attention": LayerSpec((attention,)),
        "mamba": LayerSpec((mamba,)),
        "mlp": LayerSpec((), mlp),
        "moe": LayerSpec((), experts),
    }
    root = "backbone" if any(name.startswith("backbone.") for name in shapes) else "model"
    spelling = replace(
        BACKBONE,
        embed=f"{root}.embeddings",
        final_norm=f"{root}.norm_f",
        layer=f"{root}.layers.{{}}.",
        mlp_parts=parts,
        experts=ExpertNames("mixer.", parts=parts, shared="mixer.shared_experts."),
    )
    pattern = reader.text("hybrid_override_pattern", "")
    letters = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    usual = [letters.get(letter, letter) for letter in pattern]
    types = layer_types_of(reader, "layers_block_type", usual, known=tuple(found))
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(found[kind] for kind in types),
        spelling=spelling,
        norm_eps=eps,
        max_position_embeddings=reader.integer("max_position_embeddings", 4096),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _hybrid(
    reader: ConfigReader,
    blocks: tuple[LayerSpec, ...],
    spelling: Spelling,
    *,
    context: int,
    eps: float = 1e-5,
) -> ComposedArchitecture:
    """What hybrids of attention and state spaces have in common. context, eps: where the config is silent."""
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=spelling,
        norm_eps=reader.number("rms_norm_eps", eps),
        max_position_embeddings=reader.integer("max_position_embeddings", context),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


# -- what several configs have under one name


def _attention(reader: ConfigReader, *, rope: RopeConfig | None, kv_heads: int | None = 8) -> AttentionSpec:
    """kv_heads: where the key is absent, and divides the heads; one a head where it is null, or does not."""
    heads = reader.integer("num_attention_heads")
    bias = reader.flag("attention_bias", False)
    is_told = "num_key_value_heads" in reader.raw or not kv_heads or heads % kv_heads
    return AttentionSpec(
        num_attention_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads if is_told else kv_heads),
        head_dim=_head_dim(reader),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
    )


def _head_dim(reader: ConfigReader) -> int:
    return reader.integer("head_dim", reader.integer("hidden_size") // reader.integer("num_attention_heads"))


def rope_of(
    reader: ConfigReader, head_dim: int, context: int, *, share: float = 1.0, theta: float = 10000.0
) -> RopeConfig:
    """Rope of a hybrid. context, theta, and the share of each head that turns: where the config does not say.
    Families in which all of it turns take no other share."""
    raw = reader.raw if share == 1 else {"partial_rotary_factor": share} | reader.raw
    longest = reader.integer("max_position_embeddings", context)
    own = ConfigReader(raw, reader.source)
    return read_rope(own, head_dim, longest, theta=theta, is_partial=share != 1)


def _mamba2_of_hybrid(reader: ConfigReader, *, channels: int | None = None, eps: float = 1e-5) -> Mamba2Spec:
    """Mamba-2 as hybrids spell its sizes. channels: of all heads, where they are not a multiple of the
    stream's. eps: of norms, where the config does not say."""
    heads, hidden = reader.integer("mamba_n_heads", 128), reader.integer("hidden_size")
    width = channels or expanded(reader, "mamba_expand", hidden)
    told = reader.raw.get("mamba_d_head", "auto")
    bias = reader.flag("mamba_proj_bias", False)
    require_silu(reader, "hidden_act")
    shape = Mamba2Spec(
        heads=heads,
        head_dim=width // heads if told in ("auto", None) else reader.integer("mamba_d_head"),
        groups=reader.integer("mamba_n_groups", 1),
        state_size=reader.integer("mamba_d_state", 256),
        conv_size=reader.integer("mamba_d_conv", 4),
        limits=_limits(reader),
        norm_eps=reader.number("rms_norm_eps", eps),
        has_bias=bias,
        has_out_bias=bias,
        has_conv_bias=reader.flag("mamba_conv_bias", True),
    )
    if shape.channels != width:
        raise ConfigError(
            f"{reader.source}: expected mamba_n_heads * mamba_d_head to be {width}, found {heads} * "
            f"{shape.head_dim}; correct the file, or fetch it again"
        )
    return shape


def checked(reader: ConfigReader, block: LayerSpec) -> LayerSpec:
    """The block, unless groups do not divide the heads that share them."""
    for shape in block.all_mixers:
        sizes = shape.axis_sizes
        for heads, groups in SHARED:
            if sizes.get(heads, 0) % sizes.get(groups, 1):
                raise ConfigError(
                    f"{reader.source}: expected a number of heads that {sizes[groups]} groups divide, found "
                    f"{sizes[heads]}; correct the file, or fetch it again"
                )
    return block


def expanded(reader: ConfigReader, key: str, hidden: int) -> int:
    """Channels inside a mixer: `key`, 2 where the config does not say, times the width of the stream."""
    return int(reader.number(key, 2.0) * hidden)


def rank_of(reader: ConfigReader, key: str, hidden: int) -> int:
    """Of the map to step sizes; "auto" is a sixteenth of the stream's width."""
    if reader.raw.get(key, "auto") == "auto":
        return math.ceil(hidden / 16)
    return reader.integer(key)


def _limits(reader: ConfigReader) -> tuple[float, float | None]:
    """Least and greatest step size; None for no greatest one, which JSON has no number for."""
    told = reader.raw.get("time_step_limit")
    reader.read.add("time_step_limit")
    if told is None:
        return (0.0, None)
    if not isinstance(told, list | tuple) or len(told) != 2:
        raise ConfigError(
            f"{reader.source}: expected time_step_limit to be two numbers, found {told!r}; correct the file, "
            "or fetch it again"
        )
    low, high = (_finite(reader, "time_step_limit", value) for value in told)
    return (low or 0.0, high)


def _finite(reader: ConfigReader, key: str, value: Any) -> float | None:
    """A number, None for infinity, which is written as Infinity, "inf", or {"__float__": "Infinity"}."""
    plain = value.get("__float__") if isinstance(value, Mapping) else value
    try:
        number = float(plain) if isinstance(plain, str | int | float) else None
    except ValueError:
        number = None
    if number is None or isinstance(plain, bool) or math.isnan(number):
        raise ConfigError(
            f"{reader.source}: expected {key} to hold numbers, found {value!r}; correct the file, or fetch "
            "it again"
        )
    return None if math.isinf(number) else number


def _numbers(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; all 1 where the key is absent."""
    found = reader.raw.get(key)
    reader.read.add(key)
    if found is None:
        return (1.0,) * count
    fits = isinstance(found, list | tuple) and len(found) == count
    if not fits or any(isinstance(each, bool) or not isinstance(each, int | float) for each in found):
        raise ConfigError(
            f"{reader.source}: expected {key} to list {count} numbers, found {found!r}; correct the file, or "
            "fetch it again"
        )
    return tuple(float(each) for each in found)


def layer_types_of(
    reader: ConfigReader, key: str, usual: list[str], known: tuple[str, ...] = ("attention", "mamba")
) -> list[str]:
    """What each layer is, whatever year's word says it."""
    told = reader.strings(key) or usual
    types = [LAYER_TYPES.get(word, word) for word in told]
    strange = next((word for word, kind in zip(told, types, strict=True) if kind not in known), None)
    if strange is not None or not types:
        raise ConfigError(
            f"{reader.source}: expected {key} to list layers of {', '.join(known)}, found "
            f"{'none' if strange is None else repr(strange)}; this model cannot run here"
        )
    layers = reader.optional_integer("num_hidden_layers", len(types))
    if layers not in (None, len(types)):
        raise ConfigError(
            f"{reader.source}: expected one {key} entry per layer ({layers}), found {len(types)}; correct "
            "the file, or fetch it again"
        )
    return types


def activation_of(reader: ConfigReader, key: str = "hidden_act", usual: str = "silu") -> ActivationName:
    """The activation under a key."""
    name = reader.text(key, usual)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; this "
            "model cannot run here"
        )
    return ACTIVATIONS[name]


def require_silu(reader: ConfigReader, key: str) -> None:
    """Kernels of state spaces know no other activation, and no released model has one."""
    if (name := reader.text(key, "silu")) not in ("silu", "swish"):
        raise ConfigError(
            f"{reader.source}: expected {key} 'silu' in a model with state spaces, found {name!r}; this "
            "model cannot run here"
        )


def _mlp_bias(reader: ConfigReader) -> bool:
    return reader.flag("mlp_bias", False)


def _is_at(layer: int, period_and_offset: tuple[int, int]) -> bool:
    period, offset = period_and_offset
    return layer % period == offset


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


HYBRIDS: dict[str, FamilyReader] = {
    "mamba": FamilyReader(_mamba, "Mamba 130M to 2.8B", "Mamba-1", head="tied"),
    "falcon_mamba": FamilyReader(_mamba, "Falcon-Mamba 7B", "Mamba-1, norms on dt, B and C", head="tied"),
    "mamba2": FamilyReader(_mamba2, "Mamba-2, Codestral Mamba", "Mamba-2"),
    "bamba": FamilyReader(_bamba, "Bamba 9B", "Mamba-2, some attention with half rope", "gated SiLU"),
    "granitemoehybrid": FamilyReader(
        _granite,
        "Granite 4.0",
        "Mamba-2, some attention",
        "gated SiLU or experts",
        "tied or not, scaled embedding and logits",
    ),
    "jamba": FamilyReader(_jamba, "Jamba", "Mamba-1, some attention without rope", "gated SiLU, experts"),
    "falcon_h1": FamilyReader(
        _falcon_h1,
        "Falcon-H1",
        "Mamba-2 and attention side by side",
        "gated SiLU",
        "scaled embedding and logits",
    ),
    "nemotron_h": FamilyReader(
        _nemotron_h,
        "Nemotron-H, Nemotron 3 Nano",
        "Mamba-2, some attention without rope",
        "squared ReLU or experts, in layers of their own",
        reads_tensors=True,
    ),
}
"""Every family of state-space models and hybrids, by model_type."""
