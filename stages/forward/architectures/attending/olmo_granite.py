"""OLMo; Granite, with factors of embeddings, scores, layer outputs and logits; and HyperCLOVA X.

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation
from ..hybrids.mamba_families import none_if_one
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import AttentionSpec, ExpertsSpec, QkNorm
from ..transformer import ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, Windows, family
from .experts import qwen_experts


@family("olmo", "OLMo 1")
def olmo(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of OLMo: layer norms without weights and biases; with clip_qkv, queries, keys and values
    are clipped."""
    return build.decoder(
        config,
        build.attention(
            config, bias=build.attention_bias(config), clip_qkv=config.optional_number("clip_qkv")
        ),
        build.mlp(config),
        context=build.PositionContext(2048),
        norm_type="layer",
        norm_biases="none",
        has_norm_weights=False,
        # A constant in transformers; the config has no key for it.
        eps=1e-5,
    )


@family("olmo2", "OLMo 2")
def olmo2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of OLMo 2: norms after attention and MLP, and of queries and keys over all heads."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        build.mlp(config),
        context=build.PositionContext(2048),
        norms="after",
        eps=eps,
    )


@family("olmo3", "Olmo 3")
def olmo3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Olmo 3: OLMo 2 with sliding windows in three of four layers."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        build.mlp(config),
        context=build.PositionContext(
            2048,
            rope=build.two_ropes(500000.0, 500000.0),
            windows=build.windows_by_type(config, build.every_nth_full(4)),
        ),
        norms="after",
        eps=eps,
    )


# transformers clips OLMoE's queries and keys after their norm; `clip_qkv` here clips before it.
@family("olmoe", "OLMoE", never=("clip_qkv",))
def olmoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of OLMoE: norms of queries and keys over all heads; softmax-routed experts."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        qwen_experts(config, count=64, chosen=8, width=2048, width_key="intermediate_size"),
        context=build.PositionContext(4096),
        eps=eps,
    )


@family("flex_olmo", "FlexOlmo")
def flex_olmo(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of FlexOlmo: OLMo 2 with softmax-routed experts."""
    eps = config.number("rms_norm_eps", 1e-6)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        qwen_experts(config, count=7, chosen=5, width=11008, width_key="intermediate_size"),
        context=build.PositionContext(4096, rope=build.rope_everywhere(500000.0)),
        norms="after",
        eps=eps,
    )


GRANITE_SPELLING = replace(
    LLAMA,
    mlp_parts=("input_linear", "output_linear"),
    experts=ExpertNames(
        prefix="block_sparse_moe.",
        router="router.layer",
        parts=("input_linear", "output_linear"),
        shared="shared_mlp.",
    ),
)


def _residual(config: ConfigReader) -> float:
    """Factor of the outputs of attention and MLP, from the config key residual_multiplier."""
    return config.number("residual_multiplier", 1.0)


def _attention(config: ConfigReader, **fields: Any) -> AttentionSpec:
    """Sizes and switches of Granite's attention. fields: further arguments of `attention` in builders.py."""
    return build.attention(
        config,
        bias=build.attention_bias(config),
        scale=config.number("attention_multiplier", 1.0),
        factors=(1.0, 1.0, _residual(config)),
        **fields,
    )


def _ends(config: ConfigReader) -> dict[str, Any]:
    """Fields of `ComposedArchitecture` by name, for Granite: factors of the embeddings and of the logits."""
    return {
        "embedding_scale": none_if_one(config.number("embedding_multiplier", 1.0)),
        # Granite divides logits by logits_scaling.
        "logit_factor": 1 / config.number("logits_scaling", 1.0),
    }


def _experts(config: ConfigReader, *, has_shared: bool = True) -> ExpertsSpec:
    """Spec of Granite's experts, which checkpoints store in one tensor. has_shared: whether the family may
    have a shared expert."""
    return ExpertsSpec(
        config.integer("num_local_experts", 8),
        config.integer("num_experts_per_tok", 2),
        config.integer("intermediate_size"),
        read_activation(config),
        routing="softmax of chosen",
        shared_size=config.integer("shared_intermediate_size", 0, least=0) if has_shared else 0,
        is_listed=False,
        factor=_residual(config),
    )


@family("granite", "Granite 3")
def granite(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Granite 3: Llama with four factors."""
    return build.decoder(
        config,
        _attention(config),
        build.mlp(config, bias=config.flag("mlp_bias", False), factors=(1.0, _residual(config))),
        context=build.PositionContext(2048),
        eps=config.number("rms_norm_eps", 1e-6),
        **_ends(config),
    )


@family("granitemoeshared", "Granite 3.1 MoE with a shared expert")
@family("granitemoe", "Granite 3 MoE")
def granitemoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Granite 3 with experts, and a shared expert in 3.1."""
    return build.decoder(
        config,
        _attention(config),
        _experts(config, has_shared=config.raw["model_type"] == "granitemoeshared"),
        context=build.PositionContext(2048),
        eps=config.number("rms_norm_eps", 1e-6),
        spelling=GRANITE_SPELLING,
        **_ends(config),
    )


def _rope_by_theta(config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows) -> Any:
    """Rope of each layer of Granite with windows: the config key layer_rope_theta may list a base for each
    layer, 0 for no rope.

    Raises:
        ConfigError: layer_rope_theta does not list a number for each layer.
    """
    thetas, layers = config.raw.get("layer_rope_theta"), len(windows)
    if thetas is None:
        return build.rope_everywhere()(config, head_dim, max_positions, windows)
    is_list = isinstance(thetas, list) and len(thetas) == layers
    if not is_list or any(isinstance(theta, bool) or not isinstance(theta, int | float) for theta in thetas):
        raise ConfigError(
            f"{config.source}: expected layer_rope_theta to list a number for each of {layers} layers, found "
            f"{thetas!r}; correct the file, or fetch it again"
        )
    scaling = config.mapping("rope_scaling") or config.mapping("rope_parameters")

    def with_theta(theta: float) -> RopeConfig:
        raw = {**config.raw, "rope_scaling": {**scaling, "rope_theta": theta}}
        return build.rope(theta)(ConfigReader(raw, config.source), head_dim, max_positions)

    # Layers with equal bases share one RopeConfig, which is built and checked once.
    by_theta = {theta: with_theta(theta) for theta in set(thetas) if theta}
    return [by_theta.get(theta) for theta in thetas]


@family("granite_swa", "Granite with windows and sinks")
def granite_swa(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Granite with sliding windows, attention sinks, and possibly a rope base per layer."""
    return build.decoder(
        config,
        _attention(config, kv_heads=4, attention_sinks=True),
        build.mlp(config, bias=config.flag("mlp_bias", False), factors=(1.0, _residual(config))),
        context=build.PositionContext(
            8192, rope=_rope_by_theta, windows=build.windows_by_type(config, build.first_of_four_full, 128)
        ),
        eps=config.number("rms_norm_eps", 1e-5),
        tied=True,
        **_ends(config),
    )


@family("granitemoe_swa", "Granite MoE with windows and sinks")
def granitemoe_swa(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Granite with experts, sliding windows, attention sinks, and possibly a rope base per
    layer."""
    return build.decoder(
        config,
        _attention(config, attention_sinks=True),
        _experts(config),
        context=build.PositionContext(
            2048, rope=_rope_by_theta, windows=build.windows_by_type(config, build.first_of_four_full, 128)
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        spelling=replace(
            GRANITE_SPELLING,
            experts=replace(
                GRANITE_SPELLING.experts,
                router="router",
                parts=("experts.gate_up_proj", "experts.down_proj"),
                ending="",
            ),
        ),
        **_ends(config),
    )


@family("hyperclovax", "HyperCLOVA X SEED Think", always={"use_post_norm": True})
def hyperclovax(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of HyperCLOVA X: factors like those of Granite, with three differences: logits are
    multiplied instead of divided, the default scale of scores is 1 / sqrt(head_dim), and outputs are
    multiplied after their post-norm."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    scale = config.number("attention_multiplier", config.integer("head_dim", head_dim) ** -0.5)
    residual = _residual(config)
    model = build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), scale=scale),
        build.mlp(config, bias=config.flag("mlp_bias", False)),
        context=build.PositionContext(2048),
        norms="around",
        eps=config.number("rms_norm_eps", 1e-6),
        embedding_scale=none_if_one(config.number("embedding_multiplier", 1.0)),
        logit_factor=config.number("logits_scaling", 1.0),
        spelling=replace(LLAMA, ln1_post="post_norm1", ln2_post="post_norm2"),
    )
    return build.with_layers(model, lambda layer: {"post_factor": residual})
