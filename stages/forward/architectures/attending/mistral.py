"""Mistral, Ministral, Mixtral, and Phi 3.5 MoE.

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation
from ..hybrids.linear_families import MIXTRAL_PARTS
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ExpertsSpec, TemperatureTuning
from ..transformer import TRY_TRANSFORMERS, ConfigReader
from . import builders as build
from .builders import TensorShapes, family

MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""rope_parameters of Ministral 3."""
MIXTRAL_SPELLING = replace(
    LLAMA,
    experts=ExpertNames(prefix="block_sparse_moe.", parts=MIXTRAL_PARTS),
)


@family("ministral", "Ministral 8B", reports_unread_keys=True)
@family("mistral", "Mistral 7B", reports_unread_keys=True)
def mistral(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Mistral and Ministral: Llama with a sliding window."""
    size = config.optional_integer("sliding_window", 4096)
    # All layers have the window unless layer_types says otherwise.
    return build.decoder(
        config,
        build.attention(config, kv_heads=8),
        build.mlp(config),
        context=build.PositionContext(
            131072, windows=build.windows_where_listed(config, lambda layer: True, size)
        ),
        eps=config.number("rms_norm_eps", 1e-6),
    )


@family("mixtral", "Mixtral 8x7B and 8x22B")
def mixtral(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Mixtral: Mistral with experts, weighed by a softmax over the scores of the top k."""
    return build.decoder(
        config,
        build.attention(config, kv_heads=8),
        ExpertsSpec(
            config.integer("num_local_experts", 8),
            config.integer("num_experts_per_tok", 2),
            config.integer("intermediate_size"),
            read_activation(config),
            routing="softmax of chosen",
        ),
        context=build.PositionContext(
            131072, rope=build.rope_everywhere(1000000.0), windows=build.window_everywhere(config)
        ),
        eps=config.number("rms_norm_eps", 1e-5),
        spelling=MIXTRAL_SPELLING,
    )


@family("ministral3", "Ministral 3", never=("layer_types",))
def ministral3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Ministral 3: queries are scaled by log(position) with parameters in rope_parameters
    (attention temperature tuning)."""
    parameters = config.mapping("rope_scaling") or config.mapping("rope_parameters") or MINISTRAL_YARN
    rope = ConfigReader(dict(parameters), f"{config.source}: rope_parameters")
    tuning = TemperatureTuning(
        rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")
    )
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=8, temperature_tuning=tuning),
        build.mlp(config),
        context=build.PositionContext(
            262144,
            rope=build.rope_everywhere(default=MINISTRAL_YARN),
            windows=build.window_everywhere(config),
        ),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("phimoe", "Phi 3.5 MoE")
def phimoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Phi 3.5 MoE: Mixtral with layer norms and biases, and two experts per token that sparse
    mixing chooses one after the other (Liu et al., GRIN, 2024)."""
    if (top_k := config.integer("num_experts_per_tok", 2)) != 2:
        raise ConfigError(
            f"{config.source}: expected num_experts_per_tok to be 2, because sparse mixing routes to two "
            f"experts, found {top_k}; {TRY_TRANSFORMERS}"
        )
    experts = ExpertsSpec(
        config.integer("num_local_experts", 16),
        top_k,
        config.integer("intermediate_size"),
        read_activation(config),
        routing="sparse mixing",
        jitter=config.number("router_jitter_noise", 0.01),
    )
    return build.decoder(
        config,
        build.attention(config, kv_heads=8, bias=build.attention_bias(config)),
        experts,
        context=build.PositionContext(
            131072, rope=build.rope_everywhere(1000000.0), windows=build.window_everywhere(config)
        ),
        norm_type="layer",
        eps=config.number("rms_norm_eps", 1e-5),
        has_head_bias=config.flag("lm_head_bias", False),
        spelling=MIXTRAL_SPELLING,
    )
