"""Gemma 1 to 3 and VaultGemma; Gemma 3n and 4 are in ../gemma3n_gemma4_families.py.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..composed import ComposedArchitecture
from ..families import read_activation
from ..layer_tensors import LLAMA
from ..mixers import QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family

GEMMA_SPELLING = replace(LLAMA, ln2="pre_feedforward_layernorm")


def _scale(config: ConfigReader) -> float:
    """Factor of the attention scores: 1 / sqrt of the config key query_pre_attn_scalar."""
    # Not always head_dim: Gemma 2 27B has a scalar of 144 and heads of 128.
    return 1 / math.sqrt(config.positive("query_pre_attn_scalar", 256.0))


def _scaled_embedding(config: ConfigReader) -> dict[str, Any]:
    """Fields of `ComposedArchitecture`: embeddings times sqrt(hidden_size), a factor that is rounded to the
    dtype of the embeddings."""
    scale = math.sqrt(config.integer("hidden_size"))
    return {"embedding_scale": scale, "rounds_embedding_scale": True}


@family("gemma", "Gemma 1, CodeGemma", reports_unread_keys=True)
def gemma(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gemma 1: norms with weight 1 + w, scaled embeddings, tanh-GELU."""
    # Configs of Gemma 1 say "gelu" and mean the tanh approximation.
    act = read_activation(config, "gelu_pytorch_tanh", gelu_is_tanh=True)
    width, bias = config.integer("head_dim", 256), build.attention_bias(config)
    return build.decoder(
        config,
        build.attention(config, width=width, kv_heads=16, bias=bias),
        build.mlp(config, act),
        context=build.PositionContext(8192),
        norm_type="gemma_rms",
        eps=config.number("rms_norm_eps", 1e-6),
        **_scaled_embedding(config),
        tied=True,
    )


@family("gemma2", "Gemma 2", reports_unread_keys=True)
def gemma2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gemma 2: norms before and after each half of a layer, soft caps of scores and logits,
    windows in even layers."""
    size = config.optional_integer("sliding_window", 4096)
    return build.decoder(
        config,
        build.attention(
            config,
            width=config.integer("head_dim", 256),
            kv_heads=4,
            bias=build.attention_bias(config),
            scale=_scale(config),
            logit_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        ),
        build.mlp(config, read_activation(config, "gelu_pytorch_tanh", "hidden_activation")),
        context=build.PositionContext(
            8192, windows=build.windows_where_listed(config, lambda layer: layer % 2 == 0, size)
        ),
        norms="around",
        norm_type="gemma_rms",
        eps=config.number("rms_norm_eps", 1e-6),
        **_scaled_embedding(config),
        final_logit_softcapping=config.optional_number("final_logit_softcapping", 30.0),
        tied=True,
        spelling=GEMMA_SPELLING,
    )


@family(
    "gemma3_text",
    "Gemma 3, text; EmbeddingGemma",
    never=("attn_logit_softcapping",),
    follows_bidirectional=True,
)
def gemma3_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gemma 3: as Gemma 2, with norms of queries and keys instead of the soft cap of scores,
    and two ropes."""
    eps = config.number("rms_norm_eps", 1e-6)
    return build.decoder(
        config,
        build.attention(
            config,
            head_dim=256,
            kv_heads=4,
            bias=build.attention_bias(config),
            scale=_scale(config),
            qk_norm=QkNorm("head", eps, "gemma_rms"),
        ),
        build.mlp(config, read_activation(config, "gelu_pytorch_tanh", "hidden_activation")),
        context=build.PositionContext(
            131072,
            rope=build.two_ropes(1000000.0, 10000.0, "rope_local_base_freq"),
            windows=build.windows_by_type(config, build.every_nth_full(6, "sliding_window_pattern")),
        ),
        norms="around",
        norm_type="gemma_rms",
        eps=eps,
        **_scaled_embedding(config),
        final_logit_softcapping=config.optional_number("final_logit_softcapping"),
        tied=True,
        spelling=GEMMA_SPELLING,
    )


@family("vaultgemma", "VaultGemma")
def vaultgemma(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of VaultGemma: as Gemma 2, without norms after attention and MLP."""
    return build.decoder(
        config,
        build.attention(
            config,
            head_dim=256,
            kv_heads=4,
            bias=build.attention_bias(config),
            scale=_scale(config),
            logit_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        ),
        build.mlp(config, read_activation(config, "gelu_pytorch_tanh", "hidden_activation")),
        context=build.PositionContext(8192, windows=build.windows_by_type(config, build.every_nth_full(2))),
        norm_type="gemma_rms",
        eps=config.number("rms_norm_eps", 1e-6),
        **_scaled_embedding(config),
        final_logit_softcapping=config.optional_number("final_logit_softcapping", 30.0),
        tied=True,
        spelling=GEMMA_SPELLING,
    )
