"""Families of the years of GPT-3: layer norms, biases, positions of every kind, one row each.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..layer_tensors import LLAMA, Spelling
from ..transformer import ConfigReader, RopeConfig
from .family import Attends, Factors, Layout, TensorShapes
from .spellings import KEYS_OF_GPT2, OF_GPT2

__all__ = ["OLDER"]

OF_NEOX = replace(
    LLAMA,
    final_norm="model.final_layernorm",
    attention_in="query_key_value",
    attention_out="dense",
    mlp_parts=("dense_h_to_4h", "dense_4h_to_h"),
)
OF_BLOOM = replace(
    OF_NEOX,
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention="self_attention.",
)
OF_GPTJ = replace(
    OF_GPT2,
    attention_in="qkv_proj",
    attention_out="out_proj",
    mlp_parts=("fc_in", "fc_out"),
    is_transposed=False,
)
FIRST_ROW = 2
"""Of positions in tables as fairseq makes them."""
OF_FAIRSEQ = Spelling(
    positions="model.embed_positions",
    final_norm="model.layer_norm",
    ln1="self_attn_layer_norm",
    ln2="final_layer_norm",
    attention_out="out_proj",
    mlp="",
    mlp_parts=("fc1", "fc2"),
)


def _slopes(reader: ConfigReader, heads: int) -> tuple[float, ...]:
    """Geometric, from 2^(-8/n) for the nearest lower power n of two; heads beyond it lie between (Press et
    al., Train Short, Test Long, 2021, section 3, and its reference)."""
    power = 2 ** math.floor(math.log2(heads))
    base, between = (2 ** -(2 ** -(math.log2(size) - 3)) for size in (power, 2 * power))
    beyond = [between**place for place in range(1, 2 * (heads - power), 2)]
    return (*(base**place for place in range(1, power + 1)), *beyond)


def _slopes_of_mpt(reader: ConfigReader, heads: int) -> tuple[float, ...]:
    """The same, but heads that are no power of two take every other one of the next power first."""
    power = 2 ** math.ceil(math.log2(heads))
    whole = [2 ** -(place * 8 / power) for place in range(1, power + 1)]
    return tuple(whole if power == heads else (whole[1::2] + whole[::2])[:heads])


def _kv_heads_of_falcon(reader: ConfigReader, heads: int) -> int:
    """The newer releases say how many, of the older ones one of two flags."""
    if reader.flag("new_decoder_architecture", False):
        return reader.integer("num_kv_heads", heads)
    reader.read.add("num_kv_heads")
    return 1 if reader.flag("multi_query", True) else heads


def _layout_of_falcon(reader: ConfigReader) -> Layout:
    is_older = not reader.flag("new_decoder_architecture", False)
    return "by part" if is_older and reader.flag("multi_query", True) else "by head"


def _falcon_has_two_norms(reader: ConfigReader) -> bool:
    """In parallel layers of the newer releases, unless they say otherwise."""
    is_new = reader.flag("new_decoder_architecture", False)
    count, is_parallel = reader.integer("num_ln_in_parallel_attn", 2 if is_new else 1), _is_parallel(reader)
    if (is_new and not is_parallel) or count > 2 or (count == 2 and not is_new and is_parallel):
        raise ConfigError(
            f"{reader.source}: expected two norms in parallel layers of the newer architecture alone, found "
            f"new_decoder_architecture={is_new}, parallel_attn={is_parallel}, "
            f"num_ln_in_parallel_attn={count}; this model cannot run here"
        )
    return is_new and count == 2


def _is_parallel(reader: ConfigReader) -> bool:
    return reader.flag("parallel_attn", True)


def _spelling_of_falcon(reader: ConfigReader, shapes: TensorShapes) -> Spelling:
    if _is_parallel(reader) and _falcon_has_two_norms(reader):
        return replace(OF_BLOOM, ln1="ln_attn", ln2="ln_mlp")
    return OF_BLOOM


def _rope_of_gptj(reader: ConfigReader, family: Attends, head_dim: int) -> RopeConfig:
    """Of the first entries of a head, with one wavelength for all models."""
    if reader.raw.get("rotary_dim", 64) is None:
        raise ConfigError(
            f"{reader.source}: expected rotary_dim to be a positive integer, found null, with which the "
            "reference cannot run either; correct the file, or fetch it again"
        )
    return RopeConfig(family.theta, reader.integer("rotary_dim", 64), interleaved=True)


def _attention_of_mpt(reader: ConfigReader) -> ConfigReader:
    """What it says of attention, which is not all followed by the reference either."""
    told = ConfigReader(reader.mapping("attn_config"), f"{reader.source}: attn_config")
    followed = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}
    followed |= {"qk_ln": False, "prefix_lm": False}
    for key, usual in followed.items():
        if told.raw.get(key, usual) != usual:
            raise ConfigError(
                f"{told.source}: expected {key} to be {usual!r}, found {told.raw[key]!r}, which is not "
                "followed for mpt; this model cannot run here"
            )
    return told


def _clip_of_mpt(reader: ConfigReader) -> float | None:
    return _attention_of_mpt(reader).optional_number("clip_qkv") or None


def _scale_of_mpt(reader: ConfigReader, layer: int, head_dim: int) -> float:
    scale = _attention_of_mpt(reader).number("softmax_scale", head_dim**-0.5)
    if scale == 0:
        raise ConfigError(
            f"{reader.source}: expected attn_config.softmax_scale other than 0, with which heads read all "
            "tokens alike; correct the file, or fetch it again"
        )
    return scale


def _scale_of_bigcode(reader: ConfigReader, layer: int, head_dim: int) -> float:
    return head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0


def _shares_keys(reader: ConfigReader) -> bool:
    return reader.flag("multi_query", True)


def _scaled_embedding(reader: ConfigReader) -> Factors:
    """By the root of its width, where it says so."""
    hidden, is_scaled = reader.integer("hidden_size"), reader.flag("scale_embedding", True)
    return Factors(embedding=math.sqrt(hidden) if is_scaled else 1.0)


def _of_xglm(reader: ConfigReader) -> Factors:
    """The same. The reference has no position in the row of the padding token, if that is one's row."""
    pad = reader.raw.get("pad_token_id")
    if isinstance(pad, int) and pad >= FIRST_ROW:
        raise ConfigError(
            f"{reader.source}: expected pad_token_id below {FIRST_ROW}, found {pad}, at which the reference "
            "has no position; this model cannot run here"
        )
    return _scaled_embedding(reader)


OLDER: dict[str, Attends] = {
    "biogpt": Attends(
        examples="BioGPT",
        norm="layer",
        fixed_eps=1e-5,
        activation="gelu",
        mlp="plain",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        first_position=FIRST_ROW,
        factors=_scaled_embedding,
        tied=True,
        max_positions=1024,
        spelling=replace(
            OF_FAIRSEQ,
            embed="biogpt.embed_tokens",
            head="output_projection",
            positions="biogpt.embed_positions",
            final_norm="biogpt.layer_norm",
            layer="biogpt.layers.{}.",
        ),
    ),
    "bloom": Attends(
        examples="BLOOM",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation_keys=(),
        activation="gelu_new",
        mlp="plain",
        layout="by head",
        slopes=_slopes,
        has_embedding_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        inner_factor=4,
        has_fixed_inner=True,
        tied=True,
        max_positions=None,
        aliases={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        root="transformer.",
        spelling=OF_BLOOM,
        never=("apply_residual_connection_post_layernorm",),
    ),
    "codegen": Attends(
        examples="CodeGen",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu_new",
        mlp="plain",
        layout="by fourths",
        parallel=True,
        rope_of=_rope_of_gptj,
        mlp_bias=True,
        head_bias=True,
        inner_factor=4,
        max_positions=2048,
        aliases=KEYS_OF_GPT2,
        spelling=OF_GPTJ,
    ),
    "falcon": Attends(
        examples="Falcon 1, 7B to 180B",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu",
        mlp="plain",
        layout=_layout_of_falcon,
        parallel=("parallel_attn", True),
        has_two_norms=_falcon_has_two_norms,
        kv_heads_from=_kv_heads_of_falcon,
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        inner_factor=4,
        tied=True,
        max_positions=2048,
        aliases={
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "hidden_size": "n_embed",
        },
        root="transformer.",
        spelling=_spelling_of_falcon,
        never=("head_dim",),
        # The reference adds slopes twice to scores it computes step by step, and once elsewhere.
        always={"alibi": False},
    ),
    "gpt_bigcode": Attends(
        examples="StarCoder 1, SantaCoder",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu_pytorch_tanh",
        mlp="plain",
        layout=lambda reader: "by part" if _shares_keys(reader) else "by head",
        kv_heads_from=lambda reader, heads: 1 if _shares_keys(reader) else heads,
        scale_of=_scale_of_bigcode,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        inner_factor=4,
        first_position=0,
        tied=True,
        max_positions=1024,
        aliases=KEYS_OF_GPT2,
        root="transformer.",
        spelling=replace(OF_GPT2, is_transposed=False),
        never=("add_cross_attention",),
    ),
    "gptj": Attends(
        examples="GPT-J",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu_new",
        mlp="plain",
        parallel=True,
        rope_of=_rope_of_gptj,
        mlp_bias=True,
        head_bias=True,
        inner_factor=4,
        max_positions=2048,
        aliases=KEYS_OF_GPT2,
        spelling=OF_GPTJ,
    ),
    "mpt": Attends(
        examples="MPT",
        norm="layer",
        has_norm_bias=False,
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation_keys=(),
        activation="gelu",
        mlp="plain",
        layout="by part",
        slopes=_slopes_of_mpt,
        clip=_clip_of_mpt,
        scale_of=_scale_of_mpt,
        inner_factor=4,
        has_fixed_inner=True,
        tied=True,
        max_positions=2048,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        root="transformer.",
        spelling=Spelling(
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
        ),
        never=("logit_scale",),
        always={"no_bias": True},
    ),
    "persimmon": Attends(
        examples="Persimmon",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="relu2",
        mlp="plain",
        layout="by head",
        share=0.5,
        qk_norms="head",
        qk_norm_key=("qk_layernorm", True),
        qk_norm_type="layer",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        max_positions=16384,
        never=("head_dim", "num_key_value_heads"),
        spelling=replace(OF_NEOX, attention_norms=("q_layernorm", "k_layernorm")),
    ),
    "phi": Attends(
        examples="Phi 1, 1.5 and 2",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="gelu_new",
        mlp="plain",
        parallel=True,
        share=0.5,
        qk_norms="head",
        qk_norm_key=("qk_layernorm", False),
        qk_norm_type="layer",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        max_positions=2048,
        spelling=replace(
            LLAMA,
            final_norm="model.final_layernorm",
            attention_out="dense",
            attention_norms=("q_layernorm", "k_layernorm"),
            mlp_parts=("fc1", "fc2"),
        ),
    ),
    "xglm": Attends(
        examples="XGLM",
        norm="layer",
        fixed_eps=1e-5,
        activation="gelu",
        mlp="plain",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        first_position=FIRST_ROW,
        has_position_waves=True,
        factors=_of_xglm,
        tied=True,
        max_positions=2048,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "attention_heads",
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
        },
        spelling=OF_FAIRSEQ,
        never=("add_cross_attention",),
    ),
}
"""model_type -> row."""
