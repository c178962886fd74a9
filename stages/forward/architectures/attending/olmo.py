"""OLMo's lineage.

Border: never imports torch.
"""

from __future__ import annotations

from ..composed import ComposedArchitecture
from ..mixers import QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family
from .experts import qwen_experts


@family("olmo", "OLMo 1")
def olmo(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Layer norms without weights or biases; queries, keys and values are clipped where clip_qkv says so."""
    return build.decoder(
        config,
        build.attention(
            config, bias=build.attention_bias(config), clip_qkv=config.optional_number("clip_qkv")
        ),
        build.mlp(config),
        norm_type="layer",
        norm_biases="none",
        has_norm_weights=False,
        eps=1e-5,
        max_positions=2048,
    )


@family("olmo2", "OLMo 2")
def olmo2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        build.mlp(config),
        norms="after",
        eps=eps,
        max_positions=2048,
    )


@family("olmo3", "Olmo 3")
def olmo3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        build.mlp(config),
        rope=build.two_ropes(500000.0, 500000.0),
        windows=build.windows_by_type(config, build.every_nth_full(4)),
        norms="after",
        eps=eps,
        max_positions=2048,
    )


@family("olmoe", "OLMoE", never=("clip_qkv",))
def olmoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        qwen_experts(config, count=64, chosen=8, width=2048, width_key="intermediate_size"),
        eps=eps,
        max_positions=4096,
    )


@family("flex_olmo", "FlexOlmo")
def flex_olmo(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    eps = config.number("rms_norm_eps", 1e-6)
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config), qk_norm=QkNorm("all", eps)),
        qwen_experts(config, count=7, chosen=5, width=11008, width_key="intermediate_size"),
        rope=build.rope_everywhere(500000.0),
        norms="after",
        eps=eps,
        max_positions=4096,
    )
