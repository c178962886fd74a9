"""Readers of config.json for state-space models and their hybrids: a function per family, and their table.

Semantics and defaults are those of Hugging Face transformers. Keys that several families
share are read by helpers at the end; keys of one family are read in its function.

Border: one config, and tensor names in families whose checkpoints use two naming schemes; never imports
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..families import ACTIVATIONS, read_rope, refuse_unfollowed
from ..layer_tensors import ExpertNames, Spelling
from ..mixers import AttentionSpec, ExpertsSpec, Mamba2Spec, MambaSpec, MlpSpec
from ..transformer import TRY_TRANSFORMERS, ActivationName, ConfigReader, RopeConfig

__all__ = [
    "HYBRIDS",
    "FamilyReader",
    "activation_of",
    "checked",
    "composed_of",
    "expanded",
    "layer_types_of",
    "none_if_one",
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
"""Layer type in a config -> layer type here; names changed over the years."""
_GROUPED_AXES = (("ssm_head", "ssm_group"), ("linear_head", "linear_group"))
"""(name of an axis of heads, name of the axis of groups of these heads, which share parameters)."""
BACKBONE = Spelling(
    embed="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    # Each layer has one norm, called "norm", before its mixer or channel mixer.
    ln1="norm",
    ln2="norm",
    mixer="mixer.",
    attention="mixer.",
    mlp="mixer.",
)


@dataclass(frozen=True)
class FamilyReader:
    """A family of models: how its config.json is read, and its row in the table of families."""

    read: Callable[[ConfigReader, TensorShapes], ComposedArchitecture]
    """Function (config, shapes of the checkpoint's tensors by name) -> architecture."""
    examples: str
    """Well-known models of the family."""
    mixers: str
    """Text about its mixers, for the table of families."""
    mlp: str = "none"
    """Text about its channel mixers, for the table of families."""
    head: str = "untied"
    """Text about its language head, for the table of families."""
    reads_tensors: bool = False
    """Whether `read` needs the tensor shapes: checkpoints of the family use two naming schemes."""
    may_look_both_ways: bool = False
    """Whether `read` itself checks the config key use_bidirectional_attention; if False, the key is refused
    when true."""
    norm: str = "RMS"
    """Text about its norms, for the table of families."""

    def config(self, reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
        """The architecture that a config.json of this family describes.

        Arguments:
            reader: The config.json.
            shapes: Shapes of the checkpoint's tensors by name; may be empty unless `reads_tensors`.

        Raises:
            ConfigError: A key is missing, has the wrong type, or asks for a feature that is not implemented.
        """
        refuse_unfollowed(reader, bidirectional=self.may_look_both_ways)
        return self.read(reader, shapes)


def read_mamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """The architecture that a config.json describes whose model_type is in `HYBRIDS`.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; may be empty for most families.
    """
    return HYBRIDS[reader.raw["model_type"]].config(reader, shapes)


# -- state spaces alone


def _mamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Mamba, and of Falcon-Mamba, which has norms without weights of step sizes, B and C."""
    hidden = reader.integer("hidden_size")
    require_silu(reader, "hidden_act")
    is_falcon = reader.raw["model_type"] == "falcon_mamba"
    spec = MambaSpec(
        channels=expanded(reader, "expand", hidden),
        state_size=reader.integer("state_size", 16),
        conv_size=reader.integer("conv_kernel", 4),
        rank=rank_of(reader, "time_step_rank", hidden),
        has_bias=reader.flag("use_bias", False),
        has_conv_bias=reader.flag("use_conv_bias", True),
        norms="plain" if is_falcon else None,
        norm_eps=reader.number("mixer_rms_eps", 1e-6) if is_falcon else 1e-6,
    )
    return _alone(reader, LayerSpec((spec,)), tied=True)


def _mamba2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Mamba-2."""
    require_silu(reader, "hidden_act")
    bias, eps = reader.flag("use_bias", False), reader.number("layer_norm_epsilon", 1e-5)
    spec = Mamba2Spec(
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
    return _alone(reader, checked(reader, LayerSpec((spec,))), tied=False)


def _alone(reader: ConfigReader, block: LayerSpec, *, tied: bool) -> ComposedArchitecture:
    """Architecture of a pure state-space model: equal layers without channel mixers, tensor names that begin
    with "backbone.".

    Arguments:
        reader: The config.json.
        block: The layer.
        tied: Default of tie_word_embeddings.
    """
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
    """Architecture of Bamba: Mamba-2, and attention in layers that the config key attn_layer_indices
    lists."""
    layers, listed = reader.integer("num_hidden_layers"), reader.raw.get("attn_layer_indices") or []
    # transformers' default for partial_rotary_factor is 0.5.
    attention = _attention(reader, rope=rope_of(reader, _head_dim(reader), 262144, share=0.5))
    mamba = _mamba2_of_hybrid(reader)
    mlp = MlpSpec(
        reader.integer("intermediate_size"), activation_of(reader), has_bias=reader.flag("mlp_bias", False)
    )
    blocks = tuple(LayerSpec((attention if layer in listed else mamba,), mlp) for layer in range(layers))
    return composed_of(reader, blocks, Spelling(), context=262144)


def _jamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Jamba: layers of Mamba-1 or of attention without rope, with MLPs or experts."""
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    require_silu(reader, "hidden_act")
    # Jamba has no rope, and no biases in its attention.
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
    # num_experts 1 means no experts.
    experts, count, chosen = mlp, reader.integer("num_experts", 16), reader.integer("num_experts_per_tok", 2)
    if count > 1:
        experts = ExpertsSpec(count, chosen, inner, "silu", routing="chosen of softmax")
    # (period, offset) of the layers with attention, and below of those with experts.
    attends = reader.integer("attn_layer_period", 8), reader.integer("attn_layer_offset", 4, least=0)
    routes = reader.integer("expert_layer_period", 2), reader.integer("expert_layer_offset", 1, least=0)
    blocks = tuple(
        LayerSpec(
            (attention if _is_at(layer, attends) else mamba,),
            experts if _is_at(layer, routes) else mlp,
        )
        for layer in range(layers)
    )
    return composed_of(reader, blocks, Spelling(), context=262144, eps=1e-6)


def _granite(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Granite 4.0: layers of Mamba-2 or attention, experts or an MLP, and Granite's factors
    of embeddings, scores, outputs and logits."""
    types = layer_types_of(reader, "layer_types", ["mamba"] * reader.integer("num_hidden_layers"))
    # Granite 4.0 has no rope unless position_embedding_type is "rope".
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
            prefix="block_sparse_moe.",
            router="router.layer",
            parts=("input_linear", "output_linear"),
            shared="shared_mlp.",
        ),
    )
    blocks = tuple(LayerSpec((attention if kind == "attention" else mamba,), channel_mixer) for kind in types)
    return replace(
        composed_of(reader, blocks, spelling, context=2048, eps=1e-6),
        embedding_scale=none_if_one(reader.number("embedding_multiplier", 1.0)),
        logit_factor=1 / reader.number("logits_scaling", 1.0),
    )


def _falcon_h1(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Falcon-H1: parallel attention and Mamba-2 in every layer, and factors of many
    activations (µP)."""
    mlp_factors = _numbers(reader, "mlp_multipliers", 2)
    attention = replace(
        _attention(reader, rope=rope_of(reader, _head_dim(reader), 8192)),
        factors=(
            reader.number("attention_in_multiplier", 1.0),
            reader.number("key_multiplier", 1.0),
            reader.number("attention_out_multiplier", 1.0),
        ),
    )
    # mamba_norm_before_gate only matters if mamba_rms_norm enables the norm at all.
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
        has_bias=reader.flag("mlp_bias", False),
        factors=(mlp_factors[0], mlp_factors[1]),
    )
    block = LayerSpec((attention, mamba), mlp)
    return replace(
        composed_of(reader, (block,) * reader.integer("num_hidden_layers"), Spelling(), context=8192),
        embedding_scale=none_if_one(reader.number("embedding_multiplier", 1.0)),
        logit_factor=reader.number("lm_head_multiplier", 1.0),
    )


def _nemotron_h(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Nemotron-H, in which a layer is either a mixer or a channel mixer."""
    bias, mlp_bias = reader.flag("use_bias", False), reader.flag("mlp_bias", False)
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
        # transformers computes with time_step_min as the smallest step, and reads no time_step_limit.
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
    layer_specs = {
        "attention": LayerSpec((attention,)),
        "mamba": LayerSpec((mamba,)),
        "mlp": LayerSpec((), mlp),
        "moe": LayerSpec((), experts),
    }
    # Checkpoints of the family use one of two prefixes.
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
    # Older configs have one letter per layer instead of layers_block_type.
    letters = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    default = [letters.get(letter, letter) for letter in pattern]
    types = layer_types_of(reader, "layers_block_type", default, allowed=tuple(layer_specs))
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(layer_specs[kind] for kind in types),
        spelling=spelling,
        norm_eps=eps,
        max_position_embeddings=reader.integer("max_position_embeddings", 4096),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def composed_of(
    reader: ConfigReader,
    blocks: tuple[LayerSpec, ...],
    spelling: Spelling,
    *,
    context: int | None,
    eps: float = 1e-5,
) -> ComposedArchitecture:
    """Architecture of a hybrid model with pre-norms like Llama's.

    Arguments:
        reader: The config.json.
        blocks: Specs of its layers, in order.
        spelling: Names of the checkpoint's tensors.
        context: Value of max_position_embeddings if the key is absent; None for an unbounded context.
        eps: Default of rms_norm_eps.
    """
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=spelling,
        norm_eps=reader.number("rms_norm_eps", eps),
        max_position_embeddings=context and reader.integer("max_position_embeddings", context),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


# -- config keys that several families share


def _attention(reader: ConfigReader, *, rope: RopeConfig | None, kv_heads: int | None = 8) -> AttentionSpec:
    """Sizes and switches of the attention of a hybrid model.

    Arguments:
        reader: The config.json.
        rope: Rope of queries and keys; None for no rope.
        kv_heads: Default of num_key_value_heads, if it divides the number of heads; otherwise, and for a null
            in the config, there is one key head per query head. None for one key head per query head.
    """
    heads = reader.integer("num_attention_heads")
    bias = reader.flag("attention_bias", False)
    ignores_default = "num_key_value_heads" in reader.raw or not kv_heads or heads % kv_heads
    return AttentionSpec(
        num_attention_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads if ignores_default else kv_heads),
        head_dim=_head_dim(reader),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
    )


def _head_dim(reader: ConfigReader) -> int:
    """Number of entries of a head: the config key head_dim, by default hidden_size divided by the number of
    heads."""
    return reader.integer("head_dim", reader.integer("hidden_size") // reader.integer("num_attention_heads"))


def rope_of(
    reader: ConfigReader, head_dim: int, context: int, *, share: float = 1.0, theta: float = 10000.0
) -> RopeConfig:
    """Rotary position embedding of the attention of a hybrid model.

    Arguments:
        reader: The config.json.
        head_dim: Number of entries of a head.
        context: Default of max_position_embeddings.
        share: Default of partial_rotary_factor; 1 for families whose rope always rotates whole heads.
        theta: Default of rope_theta.
    """
    raw = reader.raw if share == 1 else {"partial_rotary_factor": share} | reader.raw
    length = reader.integer("max_position_embeddings", context)
    return read_rope(ConfigReader(raw, reader.source), head_dim, length, theta=theta, is_partial=share != 1)


def _mamba2_of_hybrid(reader: ConfigReader, *, channels: int | None = None, eps: float = 1e-5) -> Mamba2Spec:
    """Sizes and switches of the Mamba-2 mixer of a hybrid model, from the config keys "mamba_…".

    Arguments:
        reader: The config.json.
        channels: Number of channels of all heads together; None for mamba_expand times the hidden size.
        eps: Default of rms_norm_eps.

    Raises:
        ConfigError: The number of heads times channels per head is not the number of channels.
    """
    heads, hidden = reader.integer("mamba_n_heads", 128), reader.integer("hidden_size")
    width = channels or expanded(reader, "mamba_expand", hidden)
    d_head = reader.raw.get("mamba_d_head", "auto")
    bias = reader.flag("mamba_proj_bias", False)
    require_silu(reader, "hidden_act")
    spec = Mamba2Spec(
        heads=heads,
        head_dim=width // heads if d_head in ("auto", None) else reader.integer("mamba_d_head"),
        groups=reader.integer("mamba_n_groups", 1),
        state_size=reader.integer("mamba_d_state", 256),
        conv_size=reader.integer("mamba_d_conv", 4),
        limits=_limits(reader),
        norm_eps=reader.number("rms_norm_eps", eps),
        has_bias=bias,
        has_out_bias=bias,
        has_conv_bias=reader.flag("mamba_conv_bias", True),
    )
    if spec.channels != width:
        raise ConfigError(
            f"{reader.source}: expected mamba_n_heads * mamba_d_head to be {width}, found {heads} * "
            f"{spec.head_dim}; correct the file, or fetch it again"
        )
    return spec


def checked(reader: ConfigReader, block: LayerSpec) -> LayerSpec:
    """The layer's spec, unchanged; ConfigError if a mixer's number of heads is not a multiple of its number
    of groups."""
    for mixer in block.all_mixers:
        sizes = mixer.axis_sizes
        for head_axis, group_axis in _GROUPED_AXES:
            if sizes.get(head_axis, 0) % sizes.get(group_axis, 1):
                raise ConfigError(
                    f"{reader.source}: expected the number of heads to be a multiple of the number of "
                    f"groups, found {sizes[head_axis]} heads and {sizes[group_axis]} groups; correct the "
                    "file, or fetch it again"
                )
    return block


def expanded(reader: ConfigReader, key: str, hidden: int) -> int:
    """Number of inner channels of a mixer: a factor from the config times the hidden size, rounded down.

    Arguments:
        reader: The config.json.
        key: Config key of the factor; 2 if it is absent.
        hidden: Hidden size of the model.

    Raises:
        ConfigError: The factor is not a finite number.
    """
    return int(reader.number(key, 2.0) * hidden)


def rank_of(reader: ConfigReader, key: str, hidden: int) -> int:
    """Rank of a state space's low-rank projection to step sizes.

    Arguments:
        reader: The config.json.
        key: Config key of the rank; "auto", or an absent key, means hidden size / 16, rounded up.
        hidden: Hidden size of the model.

    Raises:
        ConfigError: The rank is neither "auto" nor a positive integer.
    """
    if reader.raw.get(key, "auto") == "auto":
        return math.ceil(hidden / 16)
    return reader.integer(key)


def _limits(reader: ConfigReader) -> tuple[float, float | None]:
    """Smallest and largest step size of Mamba-2, from the config key time_step_limit; None as largest for no
    limit."""
    limits = reader.raw.get("time_step_limit")
    reader.read.add("time_step_limit")
    if limits is None:
        return (0.0, None)
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ConfigError(
            f"{reader.source}: expected time_step_limit to be two numbers, found {limits!r}; correct the "
            "file, or fetch it again"
        )
    low, high = (_finite(reader, "time_step_limit", value) for value in limits)
    return (low or 0.0, high)


def _finite(reader: ConfigReader, key: str, value: Any) -> float | None:
    """The number that an entry of a config key holds; None for infinity, which JSON cannot hold and files
    write as Infinity, "inf", or {"__float__": "Infinity"}.

    Arguments:
        reader: The config.json.
        key: The config key, for the message.
        value: The entry.
    """
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
    """The numbers that a config key lists, `count` of them; all 1 if the key is absent. ConfigError for
    anything else."""
    values = reader.raw.get(key)
    reader.read.add(key)
    if values is None:
        return (1.0,) * count
    has_length = isinstance(values, list | tuple) and len(values) == count
    if not has_length or any(isinstance(n, bool) or not isinstance(n, int | float) for n in values):
        raise ConfigError(
            f"{reader.source}: expected {key} to list {count} numbers, found {values!r}; correct the file, "
            "or fetch it again"
        )
    return tuple(float(value) for value in values)


def layer_types_of(
    reader: ConfigReader, key: str, default: list[str], allowed: tuple[str, ...] = ("attention", "mamba")
) -> list[str]:
    """Type of each layer, such as "attention" or "mamba", in the words of `LAYER_TYPES`.

    Arguments:
        reader: The config.json.
        key: Config key of the list.
        default: Types if the key is absent.
        allowed: Types that the family can have, after translation.

    Raises:
        ConfigError: A type is not allowed, or the list does not have one type per layer.
    """
    words = reader.strings(key) or default
    types = [LAYER_TYPES.get(word, word) for word in words]
    unknown = next((word for word, kind in zip(words, types, strict=True) if kind not in allowed), None)
    if unknown is not None or not types:
        raise ConfigError(
            f"{reader.source}: expected {key} to list the type of each layer, {' or '.join(allowed)}, found "
            f"{'no types' if unknown is None else repr(unknown)}; {TRY_TRANSFORMERS}"
        )
    layers = reader.optional_integer("num_hidden_layers", len(types))
    if layers not in (None, len(types)):
        raise ConfigError(
            f"{reader.source}: expected {key} to have one entry for each of {layers} layers, found "
            f"{len(types)} entries; correct the file, or fetch it again"
        )
    return types


def activation_of(reader: ConfigReader, key: str = "hidden_act", default: str = "silu") -> ActivationName:
    """The activation function that a config key names.

    Arguments:
        reader: The config.json.
        key: The config key.
        default: Name of the activation if the key is absent.

    Raises:
        ConfigError: The activation is not implemented, or the value is no string.
    """
    name = reader.text(key, default)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    return ACTIVATIONS[name]


def require_silu(reader: ConfigReader, key: str) -> None:
    """Raise ConfigError unless a config key names SiLU: transformers' kernels of state spaces support no
    other activation, and no released model has one."""
    if (name := reader.text(key, "silu")) not in ("silu", "swish"):
        raise ConfigError(
            f"{reader.source}: expected {key} 'silu' in a model with state spaces, found {name!r}; "
            f"{TRY_TRANSFORMERS}"
        )


def _is_at(layer: int, period_and_offset: tuple[int, int]) -> bool:
    """Whether a layer's number leaves the remainder `offset` when divided by `period`."""
    period, offset = period_and_offset
    return layer % period == offset


def none_if_one(factor: float) -> float | None:
    """Factor, or None for factor 1, which changes nothing."""
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
"""model_type -> family, for state-space models and their hybrids."""
