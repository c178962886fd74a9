"""Readers of config.json for hybrids with linear attention or short convolutions: a function per family.

Semantics and defaults are those of Hugging Face transformers; helpers shared with
state-space models are in mamba_families.py.

Border: one config, and tensor names in families whose checkpoints use two naming schemes; never imports
torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..families import read_activation, read_rope
from ..layer_tensors import LLAMA, ExpertNames, Spelling
from ..linear_mixers import GatedDeltaSpec, LightningSpec, LinearUnitSpec, ShortConvolutionSpec
from ..mixers import (
    AttentionSpec,
    ChannelMixerSpec,
    ExpertsSpec,
    GatedAttentionSpec,
    LatentAttentionSpec,
    MlpSpec,
    QkNorm,
)
from ..transformer import TRY_TRANSFORMERS, ConfigReader
from .mamba_families import FamilyReader, TensorShapes, composed_of, require_silu, rope_of

__all__ = ["KIN", "LINEAR", "either", "read_linear"]

MIXTRAL_PARTS = ("w1", "w3", "w2")
"""Tensor names of gate, up and down projection in Mixtral."""


def read_linear(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """The architecture that a config.json describes whose model_type is in `LINEAR`.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; may be empty for most families.
    """
    return LINEAR[reader.raw["model_type"]].config(reader, shapes)


# -- gated delta nets


def _qwen(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen3-Next and Qwen3.5, which differ in the layout of the gated delta nets'
    projections: "by group" of heads or "by part"."""
    model_type = reader.raw["model_type"]
    require_silu(reader, "hidden_act")
    eps, bias = reader.number("rms_norm_eps", 1e-6), reader.flag("attention_bias", False)
    head_dim = reader.integer("head_dim", 256)
    attention = GatedAttentionSpec(
        reader.integer("num_attention_heads", 16),
        reader.integer("num_key_value_heads", 4 if model_type == "qwen3_5_text" else 2),
        head_dim,
        rope=rope_of(reader, head_dim, 32768, share=0.25),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QkNorm("head", eps, "gemma_rms"),
    )
    delta = _gated_delta(reader, "by group" if model_type == "qwen3_next" else "by part", eps)
    layers = reader.integer("num_hidden_layers")
    types = _layer_types(reader, _attention_every(reader.integer("full_attention_interval", 4), layers))
    nested = "model.language_model."
    root = nested if any(name.startswith(nested) for name in shapes) else "model."
    # Released checkpoints hold all experts in one tensor; transformers writes one tensor per expert.
    ending = ".mlp.experts.gate_up_proj"
    is_listed = not any(name.startswith(f"{root}layers.") and name.endswith(ending) for name in shapes)
    blocks = tuple(
        LayerSpec(
            (attention if kind == "full_attention" else delta,),
            _qwen_channel_mixer(reader, layer, is_listed=is_listed),
        )
        for layer, kind in enumerate(types)
    )
    spelling = replace(
        LLAMA,
        embed=f"{root}embed_tokens",
        final_norm=f"{root}norm",
        layer=f"{root}layers.{{}}.",
        experts=ExpertNames(shared="mlp.shared_expert.", shared_gate="shared_expert_gate"),
    )
    if not is_listed:
        parts = ("experts.gate_up_proj", "experts.down_proj")
        spelling = replace(
            spelling,
            experts=replace(spelling.experts, parts=parts, ending=""),
        )
    return replace(composed_of(reader, blocks, spelling, eps=1e-6, context=32768), norm_type="gemma_rms")


def _qwen_of_images(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of the text model of a multimodal Qwen3.5, whose config is the section text_config."""
    text = reader.mapping("text_config")
    model_type = f"{reader.raw['model_type']}_text"
    values = [raw.get("tie_word_embeddings") for raw in (reader.raw, text)]
    flags = {flag for flag in values if flag is not None}
    # If the two values differ, different classes of transformers use different ones; the file decides here.
    tied = flags.pop() if len(flags) == 1 else bool(flags) and "lm_head.weight" not in shapes
    section = ConfigReader(
        text | {"model_type": model_type, "tie_word_embeddings": tied}, f"{reader.source}: text_config"
    )
    return _qwen(section, shapes)


def _qwen_channel_mixer(reader: ConfigReader, layer: int, *, is_listed: bool) -> ChannelMixerSpec:
    """Spec of the MLP or experts of a layer of Qwen3-Next or Qwen3.5. layer: its number; is_listed: whether
    the checkpoint has one tensor per expert."""
    default_count = {"qwen3_next": 512, "qwen3_5_moe_text": 256}.get(reader.raw["model_type"], 0)
    count = reader.integer("num_experts", default_count, least=0) if default_count else 0
    dense = reader.raw.get("mlp_only_layers") or []
    reader.read.add("mlp_only_layers")
    if not count or layer in dense or (layer + 1) % reader.integer("decoder_sparse_step", 1):
        return MlpSpec(reader.integer("intermediate_size", 5632 if default_count else 12288), "silu")
    # Qwen3.5 always normalises the weights of the top-k experts, and has no norm_topk_prob.
    sums = reader.raw["model_type"] != "qwen3_next" or reader.flag("norm_topk_prob", True)
    return ExpertsSpec(
        count,
        reader.integer("num_experts_per_tok", 10 if default_count == 512 else 8),
        reader.integer("moe_intermediate_size", 512),
        "silu",
        routing="softmax of chosen" if sums else "chosen of softmax",
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
        has_shared_gate=True,
        is_listed=is_listed,
    )


def _olmo(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Olmo Hybrid, with norms before gated delta nets and their MLPs, but after attention and
    its MLPs."""
    require_silu(reader, "hidden_act")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", 30)
    eps = reader.number("rms_norm_eps", 1e-6)
    bias = reader.flag("attention_bias", False)
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", heads),
        hidden // heads,
        rope=rope_of(reader, hidden // heads, 65536) if _has_rope(reader) else None,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QkNorm("all", eps),
    )
    groups = reader.integer("linear_num_key_heads", heads)
    key_size = reader.integer("linear_key_head_dim", int(0.75 * hidden / groups))
    delta = GatedDeltaSpec(
        reader.integer("linear_num_value_heads", heads),
        groups,
        key_size,
        reader.integer("linear_value_head_dim", 2 * key_size),
        reader.integer("linear_conv_kernel_dim", 4),
        layout="separate",
        beta_factor=2.0 if reader.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,  # transformers ignores rms_norm_eps here
    )
    layers = reader.integer("num_hidden_layers")
    default = _attention_every(4, layers)
    # transformers' default has at least one layer of attention, the last one.
    types = _layer_types(
        reader, default if "full_attention" in default else [*default[:-1], "full_attention"]
    )
    mlp = MlpSpec(reader.integer("intermediate_size", 11008), "silu")
    layer_specs = {
        "full_attention": LayerSpec((attention,), mlp, "after"),
        "linear_attention": LayerSpec((delta,), mlp),
    }
    names = {name.rsplit(".", 2)[-2] for name in shapes if name.endswith("norm.weight")}
    # Released checkpoints and those written by transformers use different names for the norms.
    has_layer_norms = "attention_layer_norm" in names
    spelling = replace(
        LLAMA,
        ln1="attention_layer_norm" if has_layer_norms else "input_layernorm",
        ln2="feedforward_layer_norm" if has_layer_norms else "post_attention_layernorm",
        ln1_post="post_attention_layernorm"
        if "post_attention_layernorm" in names
        else "feedforward_layer_norm",
    )
    return composed_of(reader, tuple(layer_specs[kind] for kind in types), spelling, eps=1e-6, context=65536)


def _has_rope(reader: ConfigReader) -> bool:
    """Whether attention of Olmo Hybrid has rope: an explicit null as rope_theta means no rope."""
    parameters = reader.mapping("rope_parameters")
    section = parameters if "rope_theta" in parameters else reader.raw
    return section.get("rope_theta", 0.0) is not None


def _kimi(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Kimi Linear: gated delta nets with a decay per key channel, and latent attention
    without rope."""
    require_silu(reader, "hidden_act")
    eps, linear = reader.number("rms_norm_eps", 1e-5), reader.mapping("linear_attn_config")
    section = ConfigReader(linear, f"{reader.source}: linear_attn_config")
    heads = section.integer("num_heads", reader.integer("linear_num_heads", 32))
    width = section.integer("head_dim", reader.integer("linear_head_dim", 128))
    size = section.integer("short_conv_kernel_size", reader.integer("linear_conv_kernel_dim", 4))
    delta = GatedDeltaSpec(
        heads, heads, width, width, size, "separate", decays="key", gate="sigmoid", norm_eps=eps
    )
    attention = LatentAttentionSpec(
        reader.integer("num_attention_heads", 32),
        reader.integer("qk_nope_head_dim", 128),
        reader.integer("qk_rope_head_dim", 64),
        reader.integer("v_head_dim", 128),
        reader.integer("kv_lora_rank", 512),
        reader.optional_integer("q_lora_rank"),
        has_bias=reader.flag("attention_bias", False),
    )
    layers = reader.integer("num_hidden_layers", 27)
    attends = linear.get("full_attn_layers")  # counted from 1
    default = [
        "full_attention"
        if (i + 1 in attends if attends is not None else i and not i % 4)
        else "linear_attention"
        for i in range(layers)
    ]
    dense = reader.integer("first_k_dense_replace", 1, least=0)
    parts = reader.strings("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]
    parts = _check_types(reader, "mlp_layer_types", parts, ("dense", "sparse"))
    experts, mlp = _kimi_experts(reader), MlpSpec(reader.integer("intermediate_size", 9216), "silu")
    blocks = tuple(
        LayerSpec((attention if kind == "full_attention" else delta,), mlp if part == "dense" else experts)
        for kind, part in zip(_layer_types(reader, default), parts, strict=True)
    )
    # transformers writes the MLP of a dense layer under the experts' prefix; released checkpoints do not.
    is_moved = any(name.endswith(".block_sparse_moe.gate_proj.weight") for name in shapes)
    spelling = replace(
        LLAMA,
        mixer="self_attn.",
        mlp="block_sparse_moe." if is_moved else "mlp.",
        experts=ExpertNames(
            prefix="block_sparse_moe.", parts=MIXTRAL_PARTS, shared="block_sparse_moe.shared_experts."
        ),
    )
    context = either(reader, "model_max_length", "max_position_embeddings", 1048576)
    model = composed_of(reader, blocks, spelling, context=None)
    return replace(model, max_position_embeddings=context)


def _kimi_experts(reader: ConfigReader) -> ExpertsSpec:
    """Spec of the experts of Kimi Linear."""
    inner = reader.integer("moe_intermediate_size", 1024)
    return ExpertsSpec(
        either(reader, "num_experts", "num_local_experts", 256),
        either(reader, "num_experts_per_token", "num_experts_per_tok", 8),
        inner,
        "silu",
        routing="sigmoid",
        shared_size=inner * either(reader, "num_shared_experts", "n_shared_experts", 1),
        groups=either(reader, "num_expert_group", "n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
        sums_to_one=reader.flag("moe_renormalize", reader.flag("norm_topk_prob", True)),
        routed_factor=reader.number("routed_scaling_factor", 2.446),
    )


def either(reader: ConfigReader, key: str, alias: str, default: int) -> int:
    """The integer at a config key that has two names.

    Arguments:
        reader: The config.json.
        key: First name.
        alias: Second name.
        default: Value if neither is present.

    Raises:
        ConfigError: Both names are present with different values.
    """
    size = reader.integer(key, reader.integer(alias, default))
    if reader.has(alias) and reader.integer(alias) != size:
        raise ConfigError(
            f"{reader.source}: expected {key} and {alias}, two names of the same size, to be equal, found "
            f"{size} and {reader.integer(alias)}; correct the file, or fetch it again"
        )
    return size


# -- short convolutions


def _lfm2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of LFM2, dense or with experts in all but its first layers."""
    eps, heads = reader.number("norm_eps", 1e-5), reader.integer("num_attention_heads", 32)
    hidden = reader.integer("hidden_size")
    head_dim = reader.integer("head_dim", hidden // heads)
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", 8),
        head_dim,
        rope=rope_of(reader, head_dim, 128_000, theta=1e6),
        qk_norm=QkNorm("head", eps),
    )
    size, bias = reader.integer("conv_L_cache", 3), reader.flag("conv_bias", False)
    convolution = ShortConvolutionSpec(hidden, size, bias)
    layers = reader.integer("num_hidden_layers", 32)
    attends = reader.raw.get("full_attn_idxs")
    default = ["full_attention" if attends is None or i in attends else "conv" for i in range(layers)]
    types = _layer_types(reader, default, ("full_attention", "conv"))
    blocks = tuple(
        LayerSpec(
            (attention if kind == "full_attention" else convolution,), _lfm2_channel_mixer(reader, layer)
        )
        for layer, kind in enumerate(types)
    )
    spelling = Spelling(
        final_norm="model.embedding_norm",
        ln1="operator_norm",
        ln2="ffn_norm",
        mixer="conv.",
        attention_norms=("q_layernorm", "k_layernorm"),
        attention_out="out_proj",
        mlp_parts=MIXTRAL_PARTS,
        experts=ExpertNames(
            router="gate", parts=MIXTRAL_PARTS, correction="expert_bias", prefix="feed_forward."
        ),
    )
    # Liquid's configs call the key tie_embedding, transformers tie_word_embeddings.
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True))
    model = composed_of(reader, blocks, spelling, eps=1e-6, context=128_000)
    return replace(model, norm_eps=eps, tie_word_embeddings=tied)


def _lfm2_channel_mixer(reader: ConfigReader, layer: int) -> ChannelMixerSpec:
    """Spec of the MLP or experts of a layer of LFM2; layer: its number."""
    if reader.raw["model_type"] == "lfm2":
        return MlpSpec(_lfm2_mlp_width(reader), "silu")
    if layer < reader.integer("num_dense_layers", 2, least=0):
        return MlpSpec(reader.integer("intermediate_size", 7168), "silu")
    return ExpertsSpec(
        reader.integer("num_experts", 32),
        reader.integer("num_experts_per_tok", 4),
        reader.integer("moe_intermediate_size", 1792),
        "silu",
        routing="sigmoid",
        has_correction=reader.flag("use_expert_bias", True),
        sums_to_one=reader.flag("norm_topk_prob", True),
        sum_eps=1e-6,
        routed_factor=reader.number("routed_scaling_factor", 1.0),
    )


def _lfm2_mlp_width(reader: ConfigReader) -> int:
    """Hidden width of LFM2's MLPs: with block_auto_adjust_ff_dim, two thirds of the configured width, times a
    factor, rounded up to a multiple of block_multiple_of."""
    configured = reader.integer("block_ff_dim", reader.integer("intermediate_size", 12288))
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return configured
    width, factor = int(2 * configured / 3), reader.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = reader.integer("block_multiple_of", 256)
    return multiple * math.ceil(int(factor * width) / multiple)


# -- gated linear units


def _recurrent_gemma(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of RecurrentGemma (Griffin): RG-LRU layers, and attention in windows."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", 10)
    activation = read_activation(reader, "gelu_pytorch_tanh", "hidden_activation")
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", heads),
        hidden // heads,
        rope=rope_of(reader, hidden // heads, 2048, share=0.5),
        window=reader.integer("attention_window_size", 2048),
        qkv_bias=reader.flag("attention_bias", False),
        o_bias=True,
    )
    unit = LinearUnitSpec(
        reader.integer("lru_width", hidden), heads, reader.integer("conv1d_width", 4), activation
    )
    # intermediate_size counts gate and up projection together.
    inner = reader.integer("intermediate_size", 3 * 2560) // 2
    mlp = MlpSpec(inner, activation, has_bias=True)
    layers, kinds = reader.integer("num_hidden_layers"), reader.strings("block_types")
    kinds = kinds or ["recurrent", "recurrent", "attention"]
    layer_specs = {"recurrent": LayerSpec((unit,), mlp), "attention": LayerSpec((attention,), mlp)}
    types = _check_types(reader, "block_types", kinds, tuple(layer_specs))
    # block_types is a pattern that repeats over the layers.
    blocks = tuple(layer_specs[types[layer % len(types)]] for layer in range(layers))
    spelling = Spelling(
        final_norm="model.final_norm",
        ln1="temporal_pre_norm",
        ln2="channel_pre_norm",
        mixer="temporal_block.",
        attention="temporal_block.",
        mlp="mlp_block.",
    )
    return replace(
        composed_of(reader, blocks, spelling, eps=1e-6, context=None),
        norm_type="gemma_rms",
        embedding_scale=_rounded(math.sqrt(hidden)),
        final_logit_softcapping=reader.number("logits_soft_cap", 30.0),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _rounded(number: float) -> float:
    """The bfloat16 number nearest to a number: transformers stores the factor of embeddings in bfloat16,
    whatever the dtype of the model."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


# -- lightning attention


def _minimax(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MiniMax-01: the normalised stream is carried on as the stream, and each addition weighs
    stream and output by factors alpha and beta."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", 32)
    head_dim, activation = reader.integer("head_dim", hidden // heads), read_activation(reader)
    layers, weighed = reader.integer("num_hidden_layers"), ("full_attn", "linear_attn", "mlp")
    alpha = {part: reader.number(f"{part}_alpha_factor", 1.0) for part in weighed}
    beta = {part: reader.number(f"{part}_beta_factor", 1.0) for part in weighed}
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", 8),
        head_dim,
        rope=rope_of(reader, head_dim, 131072, theta=1e6),
        window=reader.optional_integer("sliding_window"),
        factors=(1.0, 1.0, beta["full_attn"]),
    )
    experts = ExpertsSpec(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size", 14336),
        activation,
        routing="softmax of chosen",
        factor=beta["mlp"],
    )

    def block(layer: int, kind: str) -> LayerSpec:
        if kind == "full_attention":
            return LayerSpec((attention,), experts, "of stream", (alpha["full_attn"], alpha["mlp"]))
        # Decays get weaker in later layers; the epsilons are those of transformers (no division by 0).
        slope = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        lightning = LightningSpec(heads, head_dim, slope, activation, out_factor=beta["linear_attn"])
        return LayerSpec((lightning,), experts, "of stream", (alpha["linear_attn"], alpha["mlp"]))

    # By default, attention in even layers.
    default = ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    types = _layer_types(reader, default)
    blocks = tuple(block(layer, kind) for layer, kind in enumerate(types))
    spelling = replace(
        LLAMA,
        mixer="self_attn.",
        experts=ExpertNames(prefix="block_sparse_moe.", parts=MIXTRAL_PARTS),
    )
    return composed_of(reader, blocks, spelling, context=131072)


def _minimax_m2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MiniMax-M2, with attention in every layer."""
    heads = reader.integer("num_attention_heads", 48)
    head_dim, eps = reader.integer("head_dim", 128), reader.number("rms_norm_eps", 1e-6)
    context, raw = reader.integer("max_position_embeddings", 196608), reader.raw
    if reader.has("rotary_dim"):
        raw = {"partial_rotary_factor": reader.integer("rotary_dim") / head_dim} | raw
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", 8),
        head_dim,
        rope=read_rope(ConfigReader(raw, reader.source), head_dim, context, theta=5e6, is_partial=True),
        qk_norm=QkNorm("all", eps),
    )
    experts = ExpertsSpec(
        reader.integer("num_local_experts", 256),
        reader.integer("num_experts_per_tok", 8),
        reader.integer("intermediate_size", 1536),
        read_activation(reader),
        routing="sigmoid",
        sums_to_one=True,
        sum_eps=0.0,
    )
    blocks = (LayerSpec((attention,), experts),) * reader.integer("num_hidden_layers", 62)
    spelling = replace(
        LLAMA,
        experts=ExpertNames(
            prefix="block_sparse_moe.", parts=MIXTRAL_PARTS, correction="e_score_correction_bias"
        ),
    )
    return composed_of(reader, blocks, spelling, eps=1e-6, context=196608)


# -- config keys that several families share


def _gated_delta(reader: ConfigReader, layout: Literal["by group", "by part"], eps: float) -> GatedDeltaSpec:
    """Sizes and switches of the gated delta nets of Qwen3-Next and Qwen3.5.

    Arguments:
        reader: The config.json.
        layout: How a checkpoint stores the projections (`GatedDeltaSpec.layout`).
        eps: Epsilon of the norm of each head's output.
    """
    return GatedDeltaSpec(
        reader.integer("linear_num_value_heads", 32),
        reader.integer("linear_num_key_heads", 16),
        reader.integer("linear_key_head_dim", 128),
        reader.integer("linear_value_head_dim", 128),
        reader.integer("linear_conv_kernel_dim", 4),
        layout,
        norm_eps=eps,
    )


def _attention_every(period: int, layers: int) -> list[str]:
    """Type of each layer of a model with attention in every `period`-th layer and linear attention in the
    others."""
    return ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _layer_types(
    reader: ConfigReader,
    default: list[str],
    allowed: tuple[str, ...] = ("full_attention", "linear_attention"),
) -> list[str]:
    """Type of each layer, from the config key layer_types.

    Arguments:
        reader: The config.json.
        default: One type per layer, used if the config has no layer_types.
        allowed: Types that the family can have.

    Raises:
        ConfigError: A type is not allowed, or the list does not have one type per layer.
    """
    types = _check_types(reader, "layer_types", reader.strings("layer_types") or default, allowed)
    if len(types) != len(default):
        raise ConfigError(
            f"{reader.source}: expected layer_types to have one entry for each of {len(default)} layers, "
            f"found {len(types)} entries; correct the file, or fetch it again"
        )
    return types


def _check_types(reader: ConfigReader, key: str, types: list[str], allowed: tuple[str, ...]) -> list[str]:
    """The types of the layers, unchanged; ConfigError if one of them is not allowed.

    Arguments:
        reader: The config.json.
        key: Config key of the types, for the message.
        types: Type of each layer.
        allowed: Types that the family can have.
    """
    unknown = next((kind for kind in types if kind not in allowed), None)
    if unknown is not None:
        raise ConfigError(
            f"{reader.source}: expected {key} to list the type of each layer, {' or '.join(allowed)}, found "
            f"{unknown!r}; {TRY_TRANSFORMERS}"
        )
    return types


LINEAR: dict[str, FamilyReader] = {
    "qwen3_next": FamilyReader(
        _qwen,
        "Qwen3-Next",
        "gated delta nets, some gated attention with quarter rope",
        "experts and a gated shared expert",
    ),
    "qwen3_5_text": FamilyReader(
        _qwen,
        "Qwen3.5, its text model",
        "gated delta nets, some gated attention with quarter rope",
        "gated SiLU",
        reads_tensors=True,
    ),
    "qwen3_5_moe_text": FamilyReader(
        _qwen,
        "Qwen3.5 with experts, its text model",
        "gated delta nets, some gated attention with quarter rope",
        "experts and a gated shared expert",
        reads_tensors=True,
    ),
    "olmo_hybrid": FamilyReader(
        _olmo,
        "Olmo Hybrid",
        "gated delta nets, some attention with QK-norm and norms after it",
        "gated SiLU",
        reads_tensors=True,
    ),
    "kimi_linear": FamilyReader(
        _kimi,
        "Kimi Linear",
        "gated delta nets with a decay per key channel, some latent attention without rope",
        "gated SiLU, experts",
        reads_tensors=True,
    ),
    "lfm2": FamilyReader(
        _lfm2, "LFM2", "short convolutions, some attention with QK-norm", "gated SiLU", head="tied"
    ),
    "lfm2_moe": FamilyReader(
        _lfm2,
        "LFM2 with experts",
        "short convolutions, some attention with QK-norm",
        "gated SiLU, experts",
        head="tied",
    ),
    "recurrent_gemma": FamilyReader(
        _recurrent_gemma,
        "RecurrentGemma 2B and 9B",
        "gated linear units, some windowed attention with half rope",
        "gated GELU",
        "tied, scaled embedding, soft caps",
    ),
    "minimax": FamilyReader(
        _minimax, "MiniMax-Text-01", "lightning attention, some attention, norms on the stream", "experts"
    ),
}
"""model_type -> family, for linear attention, gated linear units and short convolutions."""
KIN: dict[str, FamilyReader] = {
    "minimax_m2": FamilyReader(
        _minimax_m2, "MiniMax-M2", "attention with QK-norm and partial rope", "experts"
    ),
    "qwen3_5": FamilyReader(
        _qwen_of_images,
        "Qwen3.5, of which the text model runs",
        "gated delta nets, some gated attention with quarter rope",
        "gated SiLU",
        reads_tensors=True,
    ),
    "qwen3_5_moe": FamilyReader(
        _qwen_of_images,
        "Qwen3.5 with experts, of which the text model runs",
        "gated delta nets, some gated attention with quarter rope",
        "experts and a gated shared expert",
        reads_tensors=True,
    ),
}
"""model_type -> family, for relatives of these: MiniMax-M2, which has attention in every layer, and
multimodal models whose text model is in `LINEAR`."""
