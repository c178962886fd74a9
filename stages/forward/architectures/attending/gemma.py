"""Gemma's lineage, of which Gemma 1 and 2 are rows of ../families.py, and Gemma 3n and 4 are in ../carrying.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..composed import ComposedArchitecture
from ..layer_tensors import LLAMA
from ..mixers import QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family

PRE_FEEDFORWARD = replace(LLAMA, ln2="pre_feedforward_layernorm")


def _scale(config: ConfigReader) -> float:
    return 1 / math.sqrt(config.positive("query_pre_attn_scalar", 256.0))


@family(
    "gemma3_text",
    "Gemma 3, text; EmbeddingGemma",
    never=("attn_logit_softcapping",),
    follows_bidirectional=True,
)
def gemma3_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
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
        build.mlp(config, build.activation(config, "gelu_pytorch_tanh", "hidden_activation")),
        rope=build.two_ropes(1000000.0, 10000.0, "rope_local_base_freq"),
        windows=build.windows_by_type(config, build.every_nth_full(6, "sliding_window_pattern")),
        norms="around",
        norm_type="gemma_rms",
        eps=eps,
        max_positions=131072,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        rounds_embedding_scale=True,
        final_logit_softcapping=config.optional_number("final_logit_softcapping"),
        tied=True,
        spelling=PRE_FEEDFORWARD,
    )


@family("vaultgemma", "VaultGemma")
def vaultgemma(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
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
        build.mlp(config, build.activation(config, "gelu_pytorch_tanh", "hidden_activation")),
        windows=build.windows_by_type(config, build.every_nth_full(2)),
        norm_type="gemma_rms",
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=8192,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        rounds_embedding_scale=True,
        final_logit_softcapping=config.optional_number("final_logit_softcapping", 30.0),
        tied=True,
        spelling=PRE_FEEDFORWARD,
    )
