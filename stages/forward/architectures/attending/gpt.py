"""Decoders with layer norms and biases: GPT-1, GPT-2, GPT-Neo, GPT-J, GPT-NeoX, and their successors
StableLM, StarCoder, Persimmon and Phi.

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import confirm_derived, read_activation
from ..layer_tensors import LLAMA, Spelling
from ..mixers import QkNorm
from ..transformer import ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, Windows, family

GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""Usual name of a config key -> its name in GPT-2."""
GPT2_SPELLING = Spelling(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    ln1="ln_1",
    ln2="ln_2",
    attention="attn.",
    attention_in="c_attn",
    attention_out="c_proj",
    mlp="mlp.",
    mlp_parts=("c_fc", "c_proj"),
    is_transposed=True,
)
GPTJ_SPELLING = replace(
    GPT2_SPELLING,
    attention_in="qkv_proj",
    attention_out="out_proj",
    mlp_parts=("fc_in", "fc_out"),
    is_transposed=False,
)


def _four_times(config: ConfigReader) -> int:
    """Default width of an MLP: four times the hidden size."""
    return 4 * config.integer("hidden_size")


def _scale(config: ConfigReader, head_dim: int) -> float:
    """Factor of the attention scores: 1 / sqrt(head_dim), or 1 if the config key scale_attn_weights is
    false."""
    return head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0


@family("openai-gpt", "GPT-1", aliases={**GPT2_ALIASES, "hidden_act": "afn"}, reads_tensors=True)
def gpt1(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT-1, with post-norms: each norm is applied to the sum of stream and output, as later
    in BERT."""
    # transformers maps the name "gelu" to the tanh approximation in GPT-1.
    act, width = read_activation(config, "gelu", gelu_is_tanh=True), _four_times(config)
    spelling = replace(
        GPT2_SPELLING,
        embed="transformer.tokens_embed",
        positions="transformer.positions_embed",
        final_norm="",
        unread=("transformer.position_ids",),
    )
    return build.decoder(
        config,
        build.attention(config, bias=True, layout="by part"),
        build.mlp(config, act, width=width, is_gated=False, bias=True),
        context=build.position_table(config, 512, start_row=0),
        norms="of sums",
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        final_norm=None,
        tied=True,
        spelling=spelling,
    )


@family("gpt-sw3", "GPT-SW3", aliases=GPT2_ALIASES, never=("add_cross_attention",), reads_tensors=True)
@family(
    "gpt2", "GPT-2, DistilGPT-2", aliases=GPT2_ALIASES, never=("add_cross_attention",), reads_tensors=True
)
def gpt2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT-2; with scale_attn_by_inverse_layer_idx, scores of layer i are also divided by i +
    1 (Mistral's GPT-2 training runs)."""
    heads = build.attention(config, bias=True, layout="by part")
    act = read_activation(config, "gelu_new")
    # A function as mixer, since the scale depends on the layer.
    scale, by_layer = _scale(config, heads.head_dim), config.flag("scale_attn_by_inverse_layer_idx", False)
    looks_ahead = not config.raw.get("is_causal", True)
    return build.decoder(
        config,
        lambda rope, window, layer: replace(
            heads,
            scale=scale / (layer + 1) if by_layer else scale,
            window=window,
            is_bidirectional=looks_ahead,
        ),
        build.mlp(config, act, default_width=_four_times(config), is_gated=False, bias=True),
        context=build.position_table(config, 1024, start_row=0),
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=GPT2_SPELLING,
    )


@family(
    "gpt_bigcode",
    "StarCoder 1, SantaCoder",
    aliases=GPT2_ALIASES,
    never=("add_cross_attention",),
    reads_tensors=True,
)
def gpt_bigcode(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT BigCode (StarCoder, SantaCoder): with multi_query, all query heads share one key
    and value head."""
    is_shared = config.flag("multi_query", True)
    heads = config.integer("num_attention_heads")
    spec = build.attention(
        config,
        bias=True,
        # Without multi_query, rows of c_attn are grouped by head: q, k and v of one head, then the next.
        layout="by part" if is_shared else "by head",
        num_kv_heads=1 if is_shared else heads,
    )
    act = read_activation(config, "gelu_pytorch_tanh")
    return build.decoder(
        config,
        replace(spec, scale=_scale(config, spec.head_dim)),
        build.mlp(config, act, default_width=_four_times(config), is_gated=False, bias=True),
        context=build.position_table(config, 1024, start_row=0),
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=replace(GPT2_SPELLING, is_transposed=False),
    )


def _windows_of_gpt_neo(config: ConfigReader) -> Windows:
    """Window of each layer of GPT-Neo, in keys; None for full attention. The config key attention_types lists
    pairs [kinds of layers, repetitions], in which kinds are "global" (full attention) and "local".

    Raises:
        ConfigError: The list does not give a known kind for each layer.
    """
    layers, patterns = build.layers_of(config), config.raw.get("attention_types")
    if patterns is None:
        # transformers' default pattern alternates between global and local.
        patterns = [[config.strings("attention_layers") or ["global", "local"] * (layers // 2), 1]]
    try:
        kinds = [kind for pattern, repetitions in patterns for kind in list(pattern) * repetitions]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise ConfigError(
            f"{config.source}: expected attention_types to list 'global' or 'local' for each of {layers} "
            f"layers, found {patterns!r}; correct the file, or fetch it again"
        )
    confirm_derived(config, "attention_layers", kinds)
    window = config.integer("window_size", 256)
    return tuple(window if kind == "local" else None for kind in kinds)


@family(
    "gpt_neo",
    "GPT-Neo, TinyStories",
    aliases={
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
    },
    reads_tensors=True,
)
def gpt_neo(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT-Neo: unscaled scores, and local windows in layers that attention_types lists."""
    spelling = replace(
        GPT2_SPELLING, attention="attn.attention.", attention_out="out_proj", is_transposed=False
    )
    act = read_activation(config, "gelu_new")
    return build.decoder(
        config,
        build.attention(config, o_bias=True, scale=1.0),
        build.mlp(config, act, default_width=_four_times(config), is_gated=False, bias=True),
        context=build.position_table(config, 2048, start_row=0, windows=_windows_of_gpt_neo(config)),
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=spelling,
    )


def _rope_of_gptj(
    config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows
) -> tuple[RopeConfig, ...]:
    """Rope of each layer of GPT-J: the first rotary_dim entries of a head rotate, always with base 10000."""
    if config.raw.get("rotary_dim", 64) is None:
        raise ConfigError(
            f"{config.source}: expected rotary_dim to be a positive integer, found null, with which "
            "transformers cannot run the model either; correct the file, or fetch it again"
        )
    return (RopeConfig(10000.0, config.integer("rotary_dim", 64), interleaved=True),) * len(windows)


def _gptj(config: ConfigReader, **fields: Any) -> ComposedArchitecture:
    """Architecture of GPT-J and CodeGen. fields: of `AttentionSpec`."""
    act = read_activation(config, "gelu_new")
    return build.decoder(
        config,
        build.attention(config, **fields),
        build.mlp(config, act, default_width=_four_times(config), is_gated=False, bias=True),
        context=build.PositionContext(2048, rope=_rope_of_gptj),
        parallel_norms=1,
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        has_head_bias=True,
        spelling=GPTJ_SPELLING,
    )


@family("gptj", "GPT-J", aliases=GPT2_ALIASES)
def gptj(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT-J: parallel attention and MLP, rope of the first entries of a head."""
    return _gptj(config)


@family("codegen", "CodeGen", aliases=GPT2_ALIASES)
def codegen(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of CodeGen: GPT-J with one tensor of queries, values and keys in four parts."""
    return _gptj(config, layout="by fourths")


@family(
    "gpt_neox",
    "Pythia, GPT-NeoX",
    aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    reads_tensors=True,
)
def gpt_neox(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GPT-NeoX: parallel attention and MLP with a norm each, unless use_parallel_residual is
    false."""
    spelling = Spelling(
        embed="gpt_neox.embed_in",
        head="embed_out",
        final_norm="gpt_neox.final_layer_norm",
        layer="gpt_neox.layers.{}.",
        ln2="post_attention_layernorm",
        attention="attention.",
        attention_in="query_key_value",
        attention_out="dense",
        mlp="mlp.",
        mlp_parts=("dense_h_to_4h", "dense_4h_to_h"),
    )
    return build.decoder(
        config,
        build.attention(config, bias=config.flag("attention_bias", True), layout="by head"),
        build.mlp(config, read_activation(config, "gelu"), is_gated=False, bias=True),
        context=build.PositionContext(2048, rope=build.rope_everywhere(share=0.25)),
        parallel_norms=2 if config.flag("use_parallel_residual", True) else 0,
        norm_type="layer",
        eps=config.number("layer_norm_eps", 1e-5),
        spelling=spelling,
    )


@family("stablelm", "StableLM 2 and 3B", never=("qk_layernorm",))
def stablelm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of StableLM: Llama with layer norms and rope of a quarter of each head."""
    return build.decoder(
        config,
        build.attention(config, kv_heads=32, qkv_bias=config.flag("use_qkv_bias", False)),
        build.mlp(config),
        context=build.PositionContext(4096, rope=build.rope_everywhere(share=0.25)),
        parallel_norms=int(config.flag("use_parallel_residual", False)),
        norm_type="layer",
        eps=config.number("layer_norm_eps", 1e-5),
    )


@family("starcoder2", "StarCoder 2", reports_unread_keys=True)
def starcoder2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of StarCoder 2: plain MLPs, biases, and a sliding window."""
    bias, act = config.flag("use_bias", True), read_activation(config, "gelu_pytorch_tanh")
    return build.decoder(
        config,
        build.attention(config, kv_heads=2, bias=bias),
        build.mlp(config, act, is_gated=False, bias=bias),
        context=build.PositionContext(4096, windows=build.window_everywhere(config)),
        norm_type="layer",
        eps=config.number("norm_epsilon", 1e-5),
        tied=True,
        spelling=replace(LLAMA, mlp_parts=("c_fc", "c_proj")),
    )


@family("persimmon", "Persimmon", never=("head_dim", "num_key_value_heads"))
def persimmon(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Persimmon: layer norms of queries and keys, squared ReLU."""
    eps = config.number("layer_norm_eps", 1e-5)
    qk_norm = QkNorm("head", eps, "layer") if config.flag("qk_layernorm", True) else None
    return build.decoder(
        config,
        build.attention(config, bias=True, layout="by head", qk_norm=qk_norm),
        build.mlp(config, read_activation(config, "relu2"), is_gated=False, bias=True),
        context=build.PositionContext(16384, rope=build.rope_everywhere(share=0.5)),
        norm_type="layer",
        eps=eps,
        spelling=replace(
            LLAMA,
            final_norm="model.final_layernorm",
            attention_in="query_key_value",
            attention_out="dense",
            attention_norms=("q_layernorm", "k_layernorm"),
            mlp_parts=("dense_h_to_4h", "dense_4h_to_h"),
        ),
    )


@family("phi", "Phi 1, 1.5 and 2")
def phi(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Phi: parallel attention and MLP with one norm, rope of half of each head, biases
    everywhere."""
    eps = config.number("layer_norm_eps", 1e-5)
    qk_norm = QkNorm("head", eps, "layer") if config.flag("qk_layernorm", False) else None
    return build.decoder(
        config,
        build.attention(config, bias=True, qk_norm=qk_norm),
        build.mlp(config, read_activation(config, "gelu_new"), is_gated=False, bias=True),
        context=build.PositionContext(2048, rope=build.rope_everywhere(share=0.5)),
        parallel_norms=1,
        norm_type="layer",
        eps=eps,
        has_head_bias=True,
        spelling=replace(
            LLAMA,
            final_norm="model.final_layernorm",
            attention_out="dense",
            attention_norms=("q_layernorm", "k_layernorm"),
            mlp_parts=("fc1", "fc2"),
        ),
    )
