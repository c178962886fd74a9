"""OPT, BioGPT and XGLM (from fairseq), BLOOM, MPT and Falcon: decoders with layer norms, and with learned
positions, sines and cosines, ALiBi, or rope.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation
from ..hybrids.mamba_families import none_if_one
from ..layer_tensors import LLAMA, Spelling
from ..transformer import TRY_TRANSFORMERS, ConfigReader
from . import builders as build
from .builders import TensorShapes, family

FIRST_ROW = 2
"""Row of the first position in tables of positions made by fairseq, whose rows 0 and 1 are for padding."""
FAIRSEQ_SPELLING = Spelling(
    positions="model.embed_positions",
    final_norm="model.layer_norm",
    ln1="self_attn_layer_norm",
    ln2="final_layer_norm",
    attention_out="out_proj",
    mlp="",
    mlp_parts=("fc1", "fc2"),
)


@family(
    "opt",
    "OPT, but for 350M",
    aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    always={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    },
    reads_tensors=True,
)
def opt(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of OPT, except for the 350M model, whose norms and embedding width differ."""
    bias = config.flag("enable_bias", True)
    spelling = replace(
        FAIRSEQ_SPELLING,
        embed="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
    )
    return build.decoder(
        config,
        build.attention(config, bias=bias),
        build.mlp(config, read_activation(config, "relu"), is_gated=False, bias=bias),
        context=build.position_table(config, 2048, start_row=FIRST_ROW),
        norm_type="layer",
        # PyTorch's default; the config has no key for it.
        eps=1e-5,
        tied=True,
        spelling=spelling,
    )


def _embedding_scale(config: ConfigReader) -> float | None:
    """Factor sqrt(hidden_size) of the embeddings; None if scale_embedding is false."""
    hidden = config.integer("hidden_size")
    return none_if_one(math.sqrt(hidden)) if config.flag("scale_embedding", True) else None


@family("biogpt", "BioGPT")
def biogpt(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BioGPT: learned positions, scaled embeddings."""
    return build.decoder(
        config,
        build.attention(config, bias=True),
        build.mlp(config, read_activation(config, "gelu"), is_gated=False, bias=True),
        context=build.position_table(config, 1024, start_row=FIRST_ROW),
        norm_type="layer",
        # PyTorch's default; transformers ignores layer_norm_eps here.
        eps=1e-5,
        embedding_scale=_embedding_scale(config),
        tied=True,
        spelling=replace(
            FAIRSEQ_SPELLING,
            embed="biogpt.embed_tokens",
            head="output_projection",
            positions="biogpt.embed_positions",
            final_norm="biogpt.layer_norm",
            layer="biogpt.layers.{}.",
        ),
    )


@family(
    "xglm",
    "XGLM",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
    },
    never=("add_cross_attention",),
)
def xglm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of XGLM, with positions encoded as sines and cosines."""
    # transformers zeroes row pad_token_id of its table; from row 2 on, that row belongs to a real position.
    pad = config.raw.get("pad_token_id")
    if isinstance(pad, int) and pad >= FIRST_ROW:
        raise ConfigError(
            f"{config.source}: expected pad_token_id to be below {FIRST_ROW}, because transformers zeroes "
            f"that row of the table of positions, found {pad}; {TRY_TRANSFORMERS}"
        )
    return build.decoder(
        config,
        build.attention(config, bias=True),
        build.mlp(config, read_activation(config, "gelu"), is_gated=False, bias=True),
        context=build.position_table(config, 2048, start_row=FIRST_ROW),
        norm_type="layer",
        # PyTorch's default; the config has no key for it.
        eps=1e-5,
        position_waves="fairseq",
        embedding_scale=_embedding_scale(config),
        tied=True,
        spelling=FAIRSEQ_SPELLING,
    )


# -- ALiBi


def _slopes(heads: int) -> tuple[float, ...]:
    """ALiBi slopes, one per head: 2^(-8 i / n) for heads i = 1 to n, where n is the largest power of two up
    to the number of heads; further heads get values between these (Press et al., Train Short, Test Long,
    2021, section 3, and its reference code)."""
    power = 2 ** math.floor(math.log2(heads))
    # First slopes of geometric sequences of `power` and of 2 `power` slopes.
    base, finer_base = (2 ** -(2 ** -(math.log2(size) - 3)) for size in (power, 2 * power))
    further = [finer_base**exponent for exponent in range(1, 2 * (heads - power), 2)]
    return (*(base**exponent for exponent in range(1, power + 1)), *further)


def _slopes_of_mpt(heads: int) -> tuple[float, ...]:
    """ALiBi slopes of MPT, one per head. If the number of heads is no power of two, they are taken from the
    slopes for the next power of two, every second slope first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** -(number * 8 / power) for number in range(1, power + 1)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


BLOOM_SPELLING = replace(
    LLAMA,
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention="self_attention.",
    attention_in="query_key_value",
    attention_out="dense",
    mlp_parts=("dense_h_to_4h", "dense_4h_to_h"),
)


@family(
    "bloom",
    "BLOOM",
    aliases={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    never=("apply_residual_connection_post_layernorm",),
    reads_tensors=True,
)
def bloom(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BLOOM: ALiBi, and a norm of the embeddings."""
    slopes = _slopes(config.integer("num_attention_heads"))
    # BLOOM has no config key for the width of its MLP.
    width = 4 * config.integer("hidden_size")
    return build.decoder(
        config,
        build.attention(config, bias=True, layout="by head", alibi_slopes=slopes),
        build.mlp(config, "gelu_tanh", width=width, is_gated=False, bias=True),
        # ALiBi needs no table, so the context is unbounded.
        context=build.PositionContext(None, rope=None),
        norm_type="layer",
        has_embedding_norm=True,
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=BLOOM_SPELLING,
    )


@family(
    "mpt",
    "MPT",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    },
    never=("logit_scale",),
    always={"no_bias": True},
    reads_tensors=True,
)
def mpt(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MPT, with attention settings in attn_config; those that transformers does not implement
    are refused.

    Raises:
        ConfigError: attn_config has a value that is not implemented, or softmax_scale 0.
    """
    section = ConfigReader(config.mapping("attn_config"), f"{config.source}: attn_config")
    implemented = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}
    implemented |= {"qk_ln": False, "prefix_lm": False}
    for key, value in implemented.items():
        if section.raw.get(key, value) != value:
            raise ConfigError(
                f"{section.source}: expected {key} to be {value!r}, found {section.raw[key]!r}; "
                f"{TRY_TRANSFORMERS}"
            )
    slopes = _slopes_of_mpt(config.integer("num_attention_heads"))
    # clip_qkv 0 means no clip, as null does.
    heads = build.attention(
        config, layout="by part", alibi_slopes=slopes, clip_qkv=section.optional_number("clip_qkv") or None
    )
    scale = section.number("softmax_scale", heads.head_dim**-0.5)
    if scale == 0:
        raise ConfigError(
            f"{config.source}: expected attn_config.softmax_scale to be another number than 0, found 0; "
            "correct the file, or fetch it again"
        )
    spelling = Spelling(
        embed="transformer.wte",
        final_norm="transformer.norm_f",
        layer="transformer.blocks.{}.",
        ln1="norm_1",
        ln2="norm_2",
        attention="attn.",
        attention_in="Wqkv",
        attention_out="out_proj",
        mlp="ffn.",
        mlp_parts=("up_proj", "down_proj"),
    )
    return build.decoder(
        config,
        replace(heads, scale=scale),
        build.mlp(config, "gelu", width=4 * config.integer("hidden_size"), is_gated=False),
        context=build.PositionContext(2048, rope=None),
        norm_type="layer",
        norm_biases="none",
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=spelling,
    )


@family(
    "falcon",
    "Falcon 1, 7B to 180B",
    aliases={
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "hidden_size": "n_embed",
    },
    never=("head_dim",),
    # With ALiBi transformers is inconsistent: its eager attention adds the slopes twice, its fused one once.
    always={"alibi": False},
    reads_tensors=True,
)
def falcon(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Falcon in its older (7B) and newer (40B, 180B) architecture.

    The newer one has num_kv_heads, and in parallel layers by default a norm each for attention and MLP. The
    older one has multi_query, one key head for all query heads.

    Raises:
        ConfigError: Parallel layers and the number of norms do not fit the architecture.
    """
    heads, is_new = config.integer("num_attention_heads"), config.flag("new_decoder_architecture", False)
    is_shared, bias = not is_new and config.flag("multi_query", True), config.flag("bias", False)
    kv_heads = config.integer("num_kv_heads", heads) if is_new else 1 if is_shared else heads
    is_parallel = config.flag("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if (is_new and not is_parallel) or norms > 2 or (norms == 2 and not is_new and is_parallel):
        raise ConfigError(
            f"{config.source}: expected parallel_attn to be true if new_decoder_architecture is, and "
            "num_ln_in_parallel_attn to be 1, or 2 with new_decoder_architecture, found "
            f"new_decoder_architecture={is_new}, parallel_attn={is_parallel} and "
            f"num_ln_in_parallel_attn={norms}; {TRY_TRANSFORMERS}"
        )
    # The tensors have other names if attention and MLP have a norm each.
    has_two_norms = is_new and norms == 2
    spelling = replace(BLOOM_SPELLING, ln1="ln_attn", ln2="ln_mlp") if has_two_norms else BLOOM_SPELLING
    layout = "by part" if is_shared else "by head"
    act, width = read_activation(config, "gelu"), 4 * config.integer("hidden_size")
    return build.decoder(
        config,
        build.attention(config, num_kv_heads=kv_heads, bias=bias, layout=layout),
        build.mlp(config, act, default_width=width, is_gated=False, bias=bias),
        context=build.PositionContext(2048),
        parallel_norms=norms if is_parallel else 0,
        norm_type="layer",
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied=True,
        spelling=spelling,
    )
