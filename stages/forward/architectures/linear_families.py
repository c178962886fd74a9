"""How the config.json of a hybrid with linear attention or short convolutions is read: a function per family.

As in mamba_families.py, whose table of families these are part of: semantics and defaults are those of the
reference implementation (transformers).

Border: one config, and names of tensors where checkpoints of a family spell them in two ways; never imports
torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from ....store.errors import ConfigError
from .composed import ComposedArchitecture, LayerSpec
from .families import read_activation, read_rope
from .layer_tensors import LLAMA, ExpertNames, Spelling
from .linear_mixers import GatedDeltaSpec, LightningSpec, LinearUnitSpec, ShortConvolutionSpec
from .mamba_families import FamilyReader, TensorShapes, checked, require_silu, rope_of
from .mixers import (
    AttentionSpec,
    ChannelMixerSpec,
    ExpertsSpec,
    GatedAttentionSpec,
    LatentAttentionSpec,
    MlpSpec,
    QkNorm,
)
from .transformer import ConfigReader

__all__ = ["KIN", "LINEAR", "either", "read_linear"]

OF_MIXTRAL = ("w1", "w3", "w2")
"""Gate, up and down projections, as Mixtral has them."""


def read_linear(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """The architecture of such a hybrid, as `read_mamba` in mamba_families.py."""
    return LINEAR[reader.raw["model_type"]].config(reader, shapes)


# -- gated delta nets


def _qwen(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Qwen3-Next, whose projections lie by group of heads, and Qwen3.5, where they lie by part."""
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
    types = _layer_types(reader, _every(reader.integer("full_attention_interval", 4), layers))
    nested = "model.language_model."
    root = nested if any(name.startswith(nested) for name in shapes) else "model."
    # Released checkpoints have all experts in one tensor; transformers writes each by itself.
    ending = ".mlp.experts.gate_up_proj"
    is_listed = not any(name.startswith(f"{root}layers.") and name.endswith(ending) for name in shapes)
    blocks = tuple(
        LayerSpec(
            (attention if kind == "full_attention" else delta,), _of_qwen(reader, layer, is_listed=is_listed)
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
    return replace(_config(reader, blocks, spelling, context=32768), norm_type="gemma_rms")


def _qwen_of_images(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """The text model of a Qwen3.5 that reads images, too: a section of its config.json."""
    text = reader.mapping("text_config")
    model_type = f"{reader.raw['model_type']}_text"
    told = [raw.get("tie_word_embeddings") for raw in (reader.raw, text)]
    flags = {flag for flag in told if flag is not None}
    # The reference asks the one or the other, by which of its classes reads the files.
    tied = flags.pop() if len(flags) == 1 else bool(flags) and "lm_head.weight" not in shapes
    section = ConfigReader(
        text | {"model_type": model_type, "tie_word_embeddings": tied}, f"{reader.source}: text_config"
    )
    return _qwen(section, shapes)


def _of_qwen(reader: ConfigReader, layer: int, *, is_listed: bool) -> ChannelMixerSpec:
    """A layer's MLP or experts."""
    usual = {"qwen3_next": 512, "qwen3_5_moe_text": 256}.get(reader.raw["model_type"], 0)
    count = reader.integer("num_experts", usual, least=0) if usual else 0
    dense = reader.raw.get("mlp_only_layers") or []
    reader.read.add("mlp_only_layers")
    if not count or layer in dense or (layer + 1) % reader.integer("decoder_sparse_step", 1):
        return MlpSpec(reader.integer("intermediate_size", 5632 if usual else 12288), "silu")
    # Qwen3.5 norms the weights of the chosen always, and has no key to say otherwise.
    sums = reader.raw["model_type"] != "qwen3_next" or reader.flag("norm_topk_prob", True)
    return ExpertsSpec(
        count,
        reader.integer("num_experts_per_tok", 10 if usual == 512 else 8),
        reader.integer("moe_intermediate_size", 512),
        "silu",
        routing="softmax of chosen" if sums else "chosen of softmax",
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
        has_shared_gate=True,
        is_listed=is_listed,
    )


def _olmo(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Olmo Hybrid: norms stand before gated delta nets, and after attention."""
    require_silu(reader, "hidden_act")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", 30)
    eps = reader.number("rms_norm_eps", 1e-6)
    bias = reader.flag("attention_bias", False)
    attention = AttentionSpec(
        heads,
        reader.integer("num_key_value_heads", heads),
        hidden // heads,
        rope=rope_of(reader, hidden // heads, 65536) if _turns(reader) else None,
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
        norm_eps=1e-5,  # of the reference, whatever the config says
    )
    layers = reader.integer("num_hidden_layers")
    usual = _every(4, layers)
    types = _layer_types(reader, usual if "full_attention" in usual else [*usual[:-1], "full_attention"])
    mlp = MlpSpec(reader.integer("intermediate_size", 11008), "silu")
    found = {
        "full_attention": LayerSpec((attention,), mlp, "after"),
        "linear_attention": LayerSpec((delta,), mlp),
    }
    names = {name.rsplit(".", 2)[-2] for name in shapes if name.endswith("norm.weight")}
    # Checkpoints name norms by what they norm; transformers writes them so in layers that attend, too.
    told = "attention_layer_norm" in names
    spelling = replace(
        LLAMA,
        ln1="attention_layer_norm" if told else "input_layernorm",
        ln2="feedforward_layer_norm" if told else "post_attention_layernorm",
        ln1_post="post_attention_layernorm"
        if "post_attention_layernorm" in names
        else "feedforward_layer_norm",
    )
    return _config(reader, tuple(found[kind] for kind in types), spelling, context=65536)


def _turns(reader: ConfigReader) -> bool:
    """Whether queries and keys turn: not where the base of rope is null, which here is no absent key."""
    parameters = reader.mapping("rope_parameters")
    held = parameters if "rope_theta" in parameters else reader.raw
    return held.get("rope_theta", 0.0) is not None


def _kimi(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Kimi Linear: gated delta nets with a decay for every key, and latent attention."""
    require_silu(reader, "hidden_act")
    eps, linear = reader.number("rms_norm_eps", 1e-5), reader.mapping("linear_attn_config")
    told = ConfigReader(linear, f"{reader.source}: linear_attn_config")
    heads = told.integer("num_heads", reader.integer("linear_num_heads", 32))
    width = told.integer("head_dim", reader.integer("linear_head_dim", 128))
    size = told.integer("short_conv_kernel_size", reader.integer("linear_conv_kernel_dim", 4))
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
    usual = [
        "full_attention"
        if (i + 1 in attends if attends is not None else i and not i % 4)
        else "linear_attention"
        for i in range(layers)
    ]
    dense = reader.integer("first_k_dense_replace", 1, least=0)
    parts = reader.strings("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]
    parts = _known(reader, "mlp_layer_types", parts, ("dense", "sparse"))
    experts, mlp = _of_kimi(reader), MlpSpec(reader.integer("intermediate_size", 9216), "silu")
    blocks = tuple(
        LayerSpec((attention if kind == "full_attention" else delta,), mlp if part == "dense" else experts)
        for kind, part in zip(_layer_types(reader, usual), parts, strict=True)
    )
    # The reference writes the MLP of a dense layer into the room of experts.
    is_moved = any(name.endswith(".block_sparse_moe.gate_proj.weight") for name in shapes)
    spelling = replace(
        LLAMA,
        mixer="self_attn.",
        mlp="block_sparse_moe." if is_moved else "mlp.",
        experts=ExpertNames(
            room="block_sparse_moe.", parts=OF_MIXTRAL, shared="block_sparse_moe.shared_experts."
        ),
    )
    context = either(reader, "model_max_length", "max_position_embeddings", 1048576)
    found = _config(reader, blocks, spelling, eps=1e-5, context=None)
    return replace(found, max_position_embeddings=context)


def _of_kimi(reader: ConfigReader) -> ExpertsSpec:
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


def either(reader: ConfigReader, key: str, other: str, usual: int) -> int:
    """A size under either of two names; ConfigError where both are given and differ."""
    size = reader.integer(key, reader.integer(other, usual))
    if reader.has(other) and reader.integer(other) != size:
        raise ConfigError(
            f"{reader.source}: expected {key} and {other} to be equal, as they are two names of one size, "
            f"found {size} and {reader.integer(other)}; correct the file, or fetch it again"
        )
    return size


# -- short convolutions


def _lfm2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """LFM2, dense or, but for its first layers, of experts."""
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
    usual = ["full_attention" if attends is None or i in attends else "conv" for i in range(layers)]
    types = _layer_types(reader, usual, ("full_attention", "conv"))
    blocks = tuple(
        LayerSpec((attention if kind == "full_attention" else convolution,), _of_lfm2(reader, layer))
        for layer, kind in enumerate(types)
    )
    spelling = Spelling(
        final_norm="model.embedding_norm",
        ln1="operator_norm",
        ln2="ffn_norm",
        mixer="conv.",
        attention_norms=("q_layernorm", "k_layernorm"),
        attention_out="out_proj",
        mlp_parts=OF_MIXTRAL,
        experts=ExpertNames(router="gate", parts=OF_MIXTRAL, correction="expert_bias", room="feed_forward."),
    )
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True))
    found = _config(reader, blocks, spelling, context=128_000)
    return replace(found, norm_eps=eps, tie_word_embeddings=tied)


def _of_lfm2(reader: ConfigReader, layer: int) -> ChannelMixerSpec:
    """A layer's MLP or experts."""
    if reader.raw["model_type"] == "lfm2":
        return MlpSpec(_width_of_lfm2(reader), "silu")
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


def _width_of_lfm2(reader: ConfigReader) -> int:
    """Of an MLP: two thirds of what the config says, made wider to a multiple, where it is adjusted."""
    told = reader.integer("block_ff_dim", reader.integer("intermediate_size", 12288))
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return told
    width, factor = int(2 * told / 3), reader.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = reader.integer("block_multiple_of", 256)
    return multiple * math.ceil(int(factor * width) / multiple)


# -- gated linear units


def _recurrent_gemma(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
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
    inner = reader.integer("intermediate_size", 3 * 2560) // 2
    mlp = MlpSpec(inner, activation, has_bias=True)
    layers, kinds = reader.integer("num_hidden_layers"), reader.strings("block_types")
    kinds = kinds or ["recurrent", "recurrent", "attention"]
    found = {"recurrent": LayerSpec((unit,), mlp), "attention": LayerSpec((attention,), mlp)}
    types = _known(reader, "block_types", kinds, tuple(found))
    blocks = tuple(found[types[layer % len(types)]] for layer in range(layers))
    spelling = Spelling(
        final_norm="model.final_norm",
        ln1="temporal_pre_norm",
        ln2="channel_pre_norm",
        mixer="temporal_block.",
        attention="temporal_block.",
        mlp="mlp_block.",
    )
    return replace(
        _config(reader, blocks, spelling, eps=1e-6, context=None),
        norm_type="gemma_rms",
        embedding_scale=_rounded(math.sqrt(hidden)),
        final_logit_softcapping=reader.number("logits_soft_cap", 30.0),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _rounded(number: float) -> float:
    """The bfloat16 next to a number: the reference holds the scale of embeddings so, in any dtype."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


# -- lightning attention


def _minimax(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """MiniMax-01: what is normed becomes the stream, which is weighed against what is added to it."""
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
        slope = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        lightning = LightningSpec(heads, head_dim, slope, activation, out_factor=beta["linear_attn"])
        return LayerSpec((lightning,), experts, "of stream", (alpha["linear_attn"], alpha["mlp"]))

    types = _layer_types(reader, _alternating(layers))
    blocks = tuple(block(layer, kind) for layer, kind in enumerate(types))
    spelling = replace(
        LLAMA,
        mixer="self_attn.",
        experts=ExpertNames(room="block_sparse_moe.", parts=OF_MIXTRAL),
    )
    return _config(reader, blocks, spelling, eps=1e-5, context=131072)


def _minimax_m2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """MiniMax-M2, which attends in every layer."""
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
        experts=ExpertNames(room="block_sparse_moe.", parts=OF_MIXTRAL, correction="e_score_correction_bias"),
    )
    return _config(reader, blocks, spelling, context=196608)


def _alternating(layers: int) -> list[str]:
    return [("full_attention", "linear_attention")[layer % 2] for layer in range(layers)]


# -- what several configs have under one name


def _gated_delta(reader: ConfigReader, layout: Literal["by group", "by part"], eps: float) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        reader.integer("linear_num_value_heads", 32),
        reader.integer("linear_num_key_heads", 16),
        reader.integer("linear_key_head_dim", 128),
        reader.integer("linear_value_head_dim", 128),
        reader.integer("linear_conv_kernel_dim", 4),
        layout,
        norm_eps=eps,
    )


def _every(period: int, layers: int) -> list[str]:
    """Attention in the last of every few layers."""
    return ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _layer_types(
    reader: ConfigReader, usual: list[str], known: tuple[str, ...] = ("full_attention", "linear_attention")
) -> list[str]:
    """What each layer is, one of `known`."""
    found = _known(reader, "layer_types", reader.strings("layer_types") or usual, known)
    if len(found) != len(usual):
        raise ConfigError(
            f"{reader.source}: expected one layer_types entry per layer ({len(usual)}), found {len(found)}; "
            "correct the file, or fetch it again"
        )
    return found


def _known(reader: ConfigReader, key: str, found: list[str], known: tuple[str, ...]) -> list[str]:
    strange = next((kind for kind in found if kind not in known), None)
    if strange is not None:
        raise ConfigError(
            f"{reader.source}: expected {key} to list layers of {', '.join(known)}, found {strange!r}; this "
            "model cannot run here"
        )
    return found


def _config(
    reader: ConfigReader,
    blocks: tuple[LayerSpec, ...],
    spelling: Spelling,
    *,
    eps: float = 1e-6,
    context: int | None,
) -> ComposedArchitecture:
    """What they have in common; context: where the config does not say, None where nothing bounds it."""
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


LINEAR: dict[str, FamilyReader] = {
    "qwen3_next": FamilyReader(
        _qwen,
        "Qwen3-Next",
        "gated delta nets, some gated attention with quarter rope",
        "experts and a gated one of all",
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
        "experts and a gated one of all",
        reads_tensors=True,
    ),
    "olmo_hybrid": FamilyReader(
        _olmo,
        "Olmo Hybrid",
        "gated delta nets, some attention with QK-norm and norms behind it",
        "gated SiLU",
        reads_tensors=True,
    ),
    "kimi_linear": FamilyReader(
        _kimi,
        "Kimi Linear",
        "gated delta nets with a decay for every key, some latent attention without rope",
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
"""Every family of linear attention, gated linear units and short convolutions, by model_type."""
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
        "experts and a gated one of all",
        reads_tensors=True,
    ),
}
"""Their relatives, by model_type: a later one that attends everywhere; those whose text model is a section of
a larger one's config.json."""
