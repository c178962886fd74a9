"""Cohere's Command models: parallel layers, layer norms without biases, scaled logits.

Border: never imports torch.
"""

from __future__ import annotations

from ..composed import ComposedArchitecture
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family


@family("cohere", "Command R", never=("use_qk_norm",))
def cohere(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config),
        rope=build.rope_everywhere(500000.0, interleaved=True),
        is_parallel=True,
        norm_type="layer",
        norm_biases="none",
        eps=config.number("layer_norm_eps", 1e-5),
        max_positions=8192,
        logit_factor=config.number("logit_scale", 0.0625),
        tied=True,
    )


@family("cohere2", "Command R7B and A")
def cohere2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Rope in layers with a window alone."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config),
        rope=build.rope_in_windows(interleaved=True),
        windows=build.windows_by_type(config, build.every_nth_full(4, "sliding_window_pattern")),
        is_parallel=True,
        norm_type="layer",
        norm_biases="none",
        eps=config.number("layer_norm_eps", 1e-5),
        max_positions=8192,
        logit_factor=config.number("logit_scale", 0.0625),
        tied=True,
    )
