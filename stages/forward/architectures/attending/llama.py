"""Llama and relatives: decoders with RMS norms and mostly gated MLPs, whose tensor names follow Llama.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation
from ..hybrids.linear_families import MIXTRAL_PARTS
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import AttentionSpec, DifferentialSpec, ExpertsSpec, MlpSpec, QkNorm, TemperatureTuning
from ..transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, Windows, family

LLAMA3 = {
    "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""rope_parameters of Llama 3.1, without base and factor."""


def _mlp_bias(config: ConfigReader) -> bool:
    """Value of the config key mlp_bias, with default False."""
    return config.flag("mlp_bias", False)


@family("llama", "Llama 2 and 3, SmolLM", reports_unread_keys=True)
def llama(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Llama."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(2048),
        eps=config.number("rms_norm_eps", 1e-6),
    )


@family("helium", "Helium 1", reports_unread_keys=True)
def helium(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Helium: rope of neighbouring entries; heads of a width that does not depend on
    hidden_size."""
    width, bias = config.integer("head_dim", 128), build.attention_bias(config)
    return build.decoder(
        config,
        build.attention(config, width=width, kv_heads=20, qkv_bias=bias),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(4096, rope=build.rope_everywhere(100000.0, interleaved=True)),
        eps=config.number("rms_norm_eps", 1e-8),
    )


@family("phi3", "Phi 3 and 3.5", reports_unread_keys=True)
def phi3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Phi 3: fused projections, sliding window, longrope under older names."""
    # The first configs of Phi 3 call longrope "su" or "yarn".
    rope = build.rope_everywhere(
        is_partial=True, original_context=4096, aliases={"su": "longrope", "yarn": "longrope"}
    )
    return build.decoder(
        config,
        build.attention(config, layout="by part"),
        build.mlp(config, is_fused=True),
        context=build.PositionContext(4096, rope=rope, windows=build.window_everywhere(config)),
        eps=config.number("rms_norm_eps", 1e-5),
        spelling=replace(LLAMA, attention_in="qkv_proj", mlp_parts=("gate_up_proj", "down_proj")),
    )


@family("arcee", "AFM")
def arcee(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of AFM: Llama with plain MLPs and squared ReLU."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config, read_activation(config, "relu2"), is_gated=False, bias=_mlp_bias(config)),
        context=build.PositionContext(4096),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("seed_oss", "Seed-OSS")
def seed_oss(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Seed-OSS: Llama with biases of queries, keys and values."""
    return build.decoder(
        config,
        build.attention(
            config,
            head_dim=128,
            kv_heads=8,
            qkv_bias=config.flag("attention_bias", True),
            o_bias=config.flag("attention_out_bias", False),
        ),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(524288),
        eps=config.number("rms_norm_eps", 1e-6),
    )


@family("smollm3", "SmolLM 3")
def smollm3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of SmolLM 3: rope in three of four layers; the layers without rope have a sliding window
    if the config enables it."""

    def types(config: ConfigReader, layers: int) -> list[str]:
        # Windows are only for layers without rope.
        flags = build.rope_flags(config, layers)
        return ["full_attention" if has_rope else "sliding_attention" for has_rope in flags]

    return build.decoder(
        config,
        build.attention(config, kv_heads=4, bias=build.attention_bias(config)),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(
            32768,
            rope=build.rope_where_flagged(2000000.0),
            windows=build.windows_by_type(config, types, None, has_flag=True),
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        tied=True,
    )


@family("apertus", "Apertus")
def apertus(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Apertus: plain MLPs with xIELU, whose parameters are learned; norms of queries and
    keys."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)),
        build.mlp(config, read_activation(config, "xielu"), is_gated=False),
        context=build.PositionContext(
            65536,
            rope=build.rope_everywhere(
                12000000.0, default={**LLAMA3, "rope_theta": 12000000.0, "factor": 8.0}
            ),
        ),
        eps=eps,
        spelling=replace(LLAMA, ln1="attention_layernorm", ln2="feedforward_layernorm"),
    )


@family("bitnet", "BitNet b1.58 2B4T, its plain weights")
def bitnet(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BitNet: RMS norms before the attention output projection and before the MLP down
    projection."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, kv_heads=5, bias=build.attention_bias(config), inner_norm_eps=eps),
        build.mlp(config, read_activation(config, "relu2"), inner_norm_eps=eps),
        context=build.PositionContext(2048, rope=build.rope_everywhere(500000.0)),
        eps=eps,
        spelling=replace(LLAMA, inner_norms=("attn_sub_norm", "ffn_sub_norm")),
    )


@family("cwm", "Code World Model")
def cwm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Code World Model: full attention in the first of every four layers, windows in the
    others."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=8),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(
            131072,
            rope=build.rope_everywhere(
                1000000.0, default={**LLAMA3, "rope_theta": 1000000.0, "factor": 16.0}
            ),
            windows=build.windows_by_type(config, build.first_of_four_full, 8192),
        ),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("diffllama", "DiffLlama", follows_is_causal=False)
def diffllama(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DiffLlama: differential attention: each pair of heads uses the difference of two
    attention patterns; the initial lambda grows with the layer number (Ye et al., Differential Transformer,
    2024, section 2.1)."""
    eps, heads = (
        config.number("rms_norm_eps", 1e-5),
        build.attention(config, bias=build.attention_bias(config)),
    )

    def mixer(rope: RopeConfig | None, window: int | None, layer: int) -> DifferentialSpec:
        # The paper's initial lambda, with layers counted from 0.
        return DifferentialSpec(replace(heads, rope=rope), 0.8 - 0.6 * math.exp(-0.3 * layer), eps)

    return build.decoder(
        config,
        mixer,
        build.mlp(config),
        context=build.PositionContext(2048, head_dim=heads.head_dim),
        eps=eps,
    )


@family("doge", "Doge without experts", never=("is_moe",))
def doge(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Doge: scores have a term computed from the value at the key's position (dynamic mask),
    and the stream is multiplied by learned weights before each addition."""
    eps = config.number("rms_norm_eps", 1e-6)
    model = build.decoder(
        config,
        build.attention(
            config, bias=build.attention_bias(config), has_value_scores=True, qk_norm=QkNorm("head", eps)
        ),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(
            2048,
            windows=build.window_everywhere(
                config
            ),  # With more keys, transformers masks those with the smallest value scores.
            longest=config.integer("keep_window_size", 2048),
        ),
        eps=eps,
        spelling=replace(LLAMA, gains=("input_residual", "post_attention_residual")),
    )
    return build.with_layers(model, lambda layer: {"has_gains": True})


@family("internlm3", "InternLM 3", aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"})
def internlm3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of InternLM 3: Llama with other key names of biases."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=2, bias=build.attention_bias(config)),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(32768),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("internlm2", "InternLM 2 and 2.5")
def internlm2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of InternLM 2, with queries, keys and values in one tensor.

    Reference for this and the next two families is the code in their repositories on the Hugging Face hub.
    """
    return build.decoder(
        config,
        build.attention(config, bias=config.flag("bias", True), layout="by head"),
        build.mlp(config),
        context=build.PositionContext(2048),
        eps=config.number("rms_norm_eps", 1e-6),
        spelling=replace(
            LLAMA,
            embed="model.tok_embeddings",
            head="output",
            ln1="attention_norm",
            ln2="ffn_norm",
            attention="attention.",
            attention_in="wqkv",
            attention_out="wo",
            mlp="feed_forward.",
            mlp_parts=MIXTRAL_PARTS,
        ),
    )


@family("baichuan", "Baichuan 7B")
def baichuan(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Baichuan 7B: Llama with queries, keys and values in one tensor."""
    # Baichuan 13B has ALiBi and no max_position_embeddings; Baichuan 2 normalises the rows of its LM head and
    # has z_loss_weight.
    if "z_loss_weight" in config.raw or "max_position_embeddings" not in config.raw:
        raise ConfigError(
            f"{config.source}: expected the config of Baichuan 7B, found that of Baichuan 13B or Baichuan 2; "
            f"{TRY_TRANSFORMERS}"
        )
    return build.decoder(
        config,
        build.attention(config, layout="by part"),
        build.mlp(config),
        context=build.PositionContext(4096),
        eps=config.number("rms_norm_eps", 1e-6),
        spelling=replace(LLAMA, attention_in="W_pack"),
    )


@family("iquestcoder", "IQuest-Coder", never=("clip_qkv", "use_sliding_window"))
def iquestcoder(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of IQuest-Coder: Llama with heads of width 128."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=8, bias=build.attention_bias(config)),
        build.mlp(config, bias=_mlp_bias(config)),
        context=build.PositionContext(131072),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("jais2", "Jais 2")
def jais2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Jais 2: layer norms, biases, plain MLPs with squared ReLU."""
    return build.decoder(
        config,
        build.attention(config, bias=config.flag("attention_bias", True)),
        build.mlp(
            config, read_activation(config, "relu2"), is_gated=False, bias=config.flag("mlp_bias", True)
        ),
        context=build.PositionContext(8192),
        norm_type="layer",
        eps=config.number("layer_norm_eps", 1e-5),
    )


@family("nanochat", "nanochat")
def nanochat(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of nanochat: norms without weights; queries and keys are normalised after rope, whose
    angles are negative."""
    eps = config.number("rms_norm_eps", 1e-6)
    qk_norm = QkNorm("head", eps, has_weights=False, after_rope=True)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=qk_norm),
        build.mlp(config, read_activation(config, "relu2"), is_gated=False),
        context=build.PositionContext(2048, rope=build.rope_everywhere(is_backwards=True)),
        has_embedding_norm=True,
        has_norm_weights=False,
        eps=eps,
        final_logit_softcapping=config.optional_number("final_logit_softcapping", 15.0),
        spelling=replace(LLAMA, mlp_parts=("fc1", "fc2")),
    )


@family("nemotron", "Nemotron and Minitron")
def nemotron(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Nemotron and Minitron: layer norms with weight 1 + w, rope of half of each head,
    squared ReLU."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config, read_activation(config, "relu2"), is_gated=False, bias=_mlp_bias(config)),
        context=build.PositionContext(4096, rope=build.rope_everywhere(share=0.5)),
        norm_type="layer",
        has_unit_norms=True,
        eps=config.number("norm_eps", 1e-5),
    )


# -- Llama 4

CHUNKED, FULL = "chunked_attention", "full_attention"


def _chunks(config: ConfigReader) -> Windows:
    """For each layer of Llama 4, the length in tokens of the chunks within which it attends; None for full
    attention. If the config key layer_types is absent, layers with rope attend within chunks.

    Raises:
        ConfigError: layer_types does not list a known type for each layer.
    """
    layers = build.layers_of(config)
    default = [CHUNKED if has_rope else FULL for has_rope in build.rope_flags(config, layers)]
    types = config.strings("layer_types") or default
    if len(types) != layers or not set(types) <= {CHUNKED, FULL}:
        raise ConfigError(
            f"{config.source}: expected layer_types to list {CHUNKED} or {FULL} for each of {layers} "
            f"layers, found {types!r}; correct the file, or fetch it again"
        )
    size = config.integer("attention_chunk_size", 8192)
    return [size if kind == CHUNKED else None for kind in types]


def _mlp_of_llama4(config: ConfigReader, layer: int) -> MlpSpec | ExpertsSpec:
    """Spec of the channel mixer of a layer of Llama 4: routed and shared experts in layers that the config
    key moe_layers lists, by default in every interleave_moe_layer_step-th; an MLP in the others. layer:
    number of the layer."""
    step, expert_layers = config.integer("interleave_moe_layer_step", 1), config.raw.get("moe_layers")
    act = read_activation(config)
    has_experts = (layer + 1) % step == 0 if expert_layers is None else layer in expert_layers
    if not has_experts:
        return MlpSpec(config.integer("intermediate_size_mlp", 16384), act)
    width = config.integer("intermediate_size", 8192)
    return ExpertsSpec(
        config.integer("num_local_experts", 16),
        config.integer("num_experts_per_tok", 1),
        width,
        act,
        routing="sigmoid of inputs",
        shared_size=width,
        is_listed=False,
        is_transposed=True,
    )


@family("llama4_text", "Llama 4 Scout and Maverick, their text model", follows_is_causal=False)
def llama4_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Llama 4: layers with rope normalise queries and keys after it, without weights, and
    attend within chunks; layers without rope scale queries by log(position) (attention temperature
    tuning)."""
    eps = config.number("rms_norm_eps", 1e-5)
    heads = build.attention(config, head_dim=128, kv_heads=8, bias=build.attention_bias(config))
    has_norms = config.flag("use_qk_norm", True)
    qk_norm = QkNorm("head", eps, has_weights=False, after_rope=True) if has_norms else None

    def tuning() -> TemperatureTuning | None:
        if not config.raw.get("attn_temperature_tuning", True):  # an integer, 4, in some released files
            return None
        # Offset 1: transformers counts positions from 1 in this formula.
        return TemperatureTuning(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), 1)

    def mixer(rope: RopeConfig | None, window: int | None, layer: int) -> AttentionSpec:
        changes = {"temperature_tuning": tuning()} if rope is None else {"qk_norm": qk_norm}
        return replace(heads, rope=rope, window=window, is_chunked=window is not None, **changes)

    return build.decoder(
        config,
        mixer,
        lambda layer: _mlp_of_llama4(config, layer),
        context=build.PositionContext(
            131072,
            rope=build.rope_where_flagged(500000.0, interleaved=True),
            windows=_chunks(config),
            head_dim=heads.head_dim,
        ),
        eps=eps,
        spelling=replace(
            LLAMA,
            mlp="feed_forward.",
            experts=ExpertNames(
                prefix="feed_forward.",
                parts=("experts.gate_up_proj", "experts.down_proj"),
                ending="",
                shared="feed_forward.shared_expert.",
                router="router",
            ),
        ),
    )


# -- masked diffusion models (Nie et al., LLaDA, 2025), with the key names of their code on the hub


@family(
    "llada",
    "LLaDA 8B",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "vocab_size": "embedding_size",
        "hidden_act": "activation_type",
        "tie_word_embeddings": "weight_tying",
    },
    never=(
        *("alibi", "input_emb_norm", "attention_layer_norm", "scale_logits", "include_bias"),
        *("bias_for_layer_norm", "clip_qkv", "multi_query_attention"),
    ),
    always={"block_type": "llama", "layer_norm_type": "rms", "rope": True},
)
def llada(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of LLaDA: Llama with bidirectional attention."""
    return build.decoder(
        config,
        build.attention(config, qkv_bias=config.flag("include_qkv_bias", False)),
        build.mlp(config),
        # A masked diffusion model: every token sees all others.
        context=build.PositionContext(4096, looks_ahead=True),
        eps=config.number("rms_norm_eps", 1e-5),
        spelling=replace(
            LLAMA,
            embed="model.transformer.wte",
            head="model.transformer.ff_out",
            final_norm="model.transformer.ln_f",
            layer="model.transformer.blocks.{}.",
            ln1="attn_norm",
            ln2="ff_norm",
            attention="",
            attention_out="attn_out",
            mlp="",
            mlp_parts=("ff_proj", "up_proj", "ff_out"),
        ),
    )
