"""Encoders since ModernBERT, which take rope and other parts from decoders; and Ettin's decoders.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..architecture import FinalNorm
from ..composed import ComposedArchitecture
from ..families import listed_windows, read_activation
from ..layer_tensors import LLAMA, EncoderNames, Spelling
from ..mixers import AttentionSpec, MlpSpec, QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .bert import bert_spelling, roberta_spelling
from .builders import TensorShapes, Windows, family

MODERNBERT_SPELLING = Spelling(
    embed="model.embeddings.tok_embeddings",
    embed_norm="model.embeddings.norm",
    head="decoder",
    encoder=EncoderNames(transform=("head.dense", "head.norm")),
    final_norm="model.final_norm",
    ln1="attn_norm",
    ln2="mlp_norm",
    attention="attn.",
    attention_in="Wqkv",
    attention_out="Wo",
    mlp="mlp.",
    mlp_parts=("Wi", "Wo"),
)


def _windows(config: ConfigReader, *, itself: int) -> Windows:
    """Window of each layer, in keys; None for full attention, in every third layer by default. A query sees
    `local_attention // 2` keys on each side.

    Arguments:
        config: The config.json.
        itself: 1 if the query's own key is counted besides these keys; 0 if it is one of them.

    Raises:
        ConfigError: `sliding_window`, which transformers derives from `local_attention`, contradicts it.
    """
    half = config.integer("local_attention", 128) // 2
    window, layers = config.integer("sliding_window", half), build.layers_of(config)
    if window != half and config.has("local_attention"):
        raise ConfigError(
            f"{config.source}: expected sliding_window to be half of local_attention, {half}, found "
            f"{window}; correct the file, or fetch it again"
        )
    period = config.integer("global_attn_every_n_layers", 3)
    types = config.strings("layer_types") or [
        "sliding_attention" if layer % period else "full_attention" for layer in range(layers)
    ]
    return listed_windows(config, types, window + itself, layers)


def _modernbert(
    config: ConfigReader, spelling: Spelling, windows: Windows, *, looks_ahead: bool | None, layout: str
) -> ComposedArchitecture:
    """Architecture of ModernBERT, encoder or decoder.

    Arguments:
        config: The config.json, under the usual names of its keys.
        spelling: Names of the checkpoint's tensors.
        windows: Window of each layer; None for full attention.
        looks_ahead: Whether queries see later keys; None to follow is_causal.
        layout: Layout of the query, key and value projections (`AttentionSpec.layout`).
    """
    eps, has_norm_bias = config.number("norm_eps", 1e-5), config.flag("norm_bias", False)
    act = read_activation(config, "gelu", "hidden_activation")
    transform = build.head_transform(
        config,
        eps,
        key="classifier_activation",
        has_bias=config.flag("classifier_bias", False),
        has_norm_bias=has_norm_bias,
    )
    model = build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), layout=layout),
        build.mlp(config, act, is_fused=True, bias=config.flag("mlp_bias", False)),
        context=build.PositionContext(
            8192,
            rope=build.two_ropes(160000.0, 10000.0, "local_rope_theta"),
            windows=windows,
            looks_ahead=looks_ahead,
        ),
        norm_type="layer",
        norm_biases="of layer norms" if has_norm_bias else "none",
        has_embedding_norm=True,
        eps=eps,
        transform=transform,
        has_head_bias=config.flag("decoder_bias", True),
        tied=True,
        spelling=spelling,
    )
    # Embeddings are normed already, so that attention of the first layer has no norm before it.
    return build.with_layers(model, lambda layer: {"reads_normed": layer > 0})


@family("modernbert", "ModernBERT", aliases={"rope_theta": "global_rope_theta"})
def modernbert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ModernBERT, a bidirectional encoder."""
    windows = _windows(config, itself=1)
    return _modernbert(config, MODERNBERT_SPELLING, windows, looks_ahead=True, layout="by part")


@family("modernbert-decoder", "Ettin, its decoders", aliases={"rope_theta": "global_rope_theta"})
def modernbert_decoder(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Ettin's causal decoders: windows are half as long as those of the encoder,
    and include the query."""
    spelling = replace(
        MODERNBERT_SPELLING,
        attention_in="",
        encoder=replace(MODERNBERT_SPELLING.encoder, transform=("lm_head.dense", "lm_head.norm")),
    )
    windows = _windows(config, itself=0)
    return _modernbert(config, spelling, windows, looks_ahead=None, layout="separate")


@family("eurobert", "EuroBERT")
def eurobert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of EuroBERT: Llama with bidirectional attention."""
    bias = config.flag("mlp_bias", False)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config, bias=bias),
        context=build.PositionContext(8192, looks_ahead=True),
        eps=config.number("rms_norm_eps", 1e-5),
        has_head_bias=bias,
    )


@family("esmc", "ESM Cambrian")
def esmc(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ESM C: outputs of attention and MLP are multiplied by sqrt(36 / number of layers)."""
    residual = math.sqrt(36 / build.layers_of(config))
    qk_norm = QkNorm("all", 1e-5, "layer", has_bias=False)
    factors = (1.0, 1.0, residual)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), factors=factors, qk_norm=qk_norm),
        build.mlp(config, bias=config.flag("mlp_bias", False), factors=(1.0, residual)),
        context=build.PositionContext(2048, looks_ahead=True),
        norm_type="layer",
        eps=1e-5,
        final_norm=FinalNorm(has_bias=False),
        transform=build.head_transform(config, 1e-5),
        has_head_bias=True,
        tied=None,
        spelling=replace(
            LLAMA,
            embed="esmc.embed_tokens",
            head="lm_head.decoder",
            encoder=replace(LLAMA.encoder, transform=("lm_head.dense", "lm_head.layer_norm")),
            final_norm="esmc.norm",
            layer="esmc.layers.{}.",
        ),
    )


def _rotary_bert(
    config: ConfigReader,
    spelling: Spelling,
    attention_spec: AttentionSpec,
    mlp_spec: MlpSpec,
    *,
    context: build.PositionContext,
    token_types: int,
    **options: Any,
) -> ComposedArchitecture:
    """Architecture with BERT's norms, token types and head transform, and with rope.

    Arguments:
        config: The config.json, under the usual names of its keys.
        spelling: Names of the checkpoint's tensors, except for names inside of layers that are set here.
        attention_spec: Attention of all layers.
        mlp_spec: MLP of all layers.
        context: Positions and rope.
        token_types: Default of type_vocab_size.
        options: Further arguments of `decoder`.
    """
    return build.decoder(
        config,
        attention_spec,
        mlp_spec,
        context=context,
        norms="of sums",
        norm_type="layer",
        has_embedding_norm=True,
        final_norm=None,
        token_types=config.integer("type_vocab_size", token_types, least=0),
        has_head_bias=True,
        tied=True,
        spelling=replace(spelling, ln1="norm1", ln2="norm2", attention_in="Wqkv", attention_out="out_proj"),
        **options,
    )


@family("nomic_bert", "Nomic Embed")
def nomic_bert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Nomic Embed: BERT with rope and gated MLPs."""
    eps = config.number("layer_norm_eps", 1e-12)
    base = bert_spelling("nomic_bert.")
    spelling = replace(
        base,
        embed_norm="nomic_bert.emb_ln",
        encoder=replace(
            base.encoder,
            transform=("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"),
        ),
        layer="nomic_bert.encoder.layers.{}.",
        attention="attn.",
        mlp="mlp.",
        mlp_parts=("fc12", "fc11", "fc2"),
    )
    return _rotary_bert(
        config,
        spelling,
        build.attention(config, layout="by part"),
        build.mlp(config),
        context=build.PositionContext(2048, rope=build.rope_everywhere(1000.0), looks_ahead=True),
        token_types=2,
        eps=eps,
        transform=build.head_transform(config, eps, "silu", key="hidden_act"),
    )


@family("jina_embeddings_v3", "Jina Embeddings 3")
def jina_embeddings_v3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Jina Embeddings 3: XLM-RoBERTa with rope."""
    eps = config.number("layer_norm_eps", 1e-5)
    spelling = replace(
        roberta_spelling("roberta."),
        embed_norm="roberta.emb_ln",
        layer="roberta.encoder.layers.{}.",
        attention="mixer.",
        mlp="mlp.",
        mlp_parts=("fc1", "fc2"),
    )
    return _rotary_bert(
        config,
        spelling,
        build.attention(config, bias=True, layout="by part"),
        build.mlp(config, read_activation(config, "gelu"), is_gated=False, bias=True),
        context=build.PositionContext(8194, rope=build.rope_everywhere(20000.0), looks_ahead=True),
        token_types=1,
        eps=eps,
        transform=build.head_transform(config, eps),
    )
