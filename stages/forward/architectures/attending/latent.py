"""Families whose keys and values are made of one narrow latent in every layer, one row each.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..families import yarn_magnitude
from ..layer_tensors import LLAMA
from ..mixers import LatentAttentionSpec
from ..transformer import ConfigReader, RopeConfig
from .experts import grouped_experts, sigmoid_experts
from .family import Attends, Factors, residual_factor
from .reading import AttentionContext

__all__ = ["LATENT"]

_USUAL = {
    "deepseek_v2": (128, 64, 128, 512, 1536),
    "deepseek_v3": (128, 64, 128, 512, 1536),
    "glm4_moe_lite": (192, 64, 256, 512, 768),
    "minicpm3": (64, 32, 0, 256, 768),
    "youtu": (128, 64, 128, 512, 1536),
}
"""Where a config is silent: widths of a head's own and shared keys and of its values (0: as the stream is cut
into heads), rank of the latent, and of the map to queries."""

_TURNED_BY_HEAD_DIM = ("deepseek_v3", "youtu")
"""Families whose reference makes rotary angles of head_dim where config.json has it. DeepSeek-V3 and Kimi K2
have none; what transformers saves is the width of the shared keys."""


def _latent(
    context: AttentionContext, rope: RopeConfig | None, window: int | None, layer: int
) -> LatentAttentionSpec:
    """Of DeepSeek-V2 (2024, section 2.1)."""
    reader = context.reader
    own, shared, values, rank, of_queries = _USUAL[reader.raw["model_type"]]
    widths = reader.integer("qk_nope_head_dim", own), reader.integer("qk_rope_head_dim", shared)
    if reader.raw["model_type"] in _TURNED_BY_HEAD_DIM and "head_dim" in reader.raw:
        turned = reader.optional_integer("head_dim") or reader.integer("hidden_size") // context.heads
        if turned != widths[1]:
            raise ConfigError(
                f"{reader.source}: expected head_dim, by which angles are made, to be qk_rope_head_dim="
                f"{widths[1]}, found {turned}; leave head_dim out"
            )
    usual = values or reader.integer("hidden_size") // context.heads
    interleaves = reader.flag("rope_interleave", True) if context.family.interleaved_rope else False
    assert rope is not None  # all of them turn
    return LatentAttentionSpec(
        context.heads,
        *widths,
        reader.integer("v_head_dim", usual),
        reader.integer("kv_lora_rank", rank),
        reader.optional_integer("q_lora_rank", of_queries),
        has_bias=reader.flag("attention_bias", False),
        turning=replace(rope, interleaved=interleaves),
        scale=sum(widths) ** -0.5 * _sharpened(reader) ** 2,
        factor=residual_factor(reader, context.family),
    )


def _sharpened(reader: ConfigReader) -> float:
    """How much larger queries, and keys, are where rope is stretched."""
    told = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
    rope = ConfigReader(told, f"{reader.source}: rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    share = rope.optional_number("mscale_all_dim")
    return yarn_magnitude(rope.number("factor"), share) if share and kind != "default" else 1.0


def _factors_of_minicpm(reader: ConfigReader) -> Factors:
    """Of embedding, by the number of layers, and by width (Hu et al., MiniCPM, 2024, section 3)."""
    layers, hidden = reader.integer("num_hidden_layers"), reader.integer("hidden_size")
    depth = reader.optional_number("scale_depth", 1.4)
    base = reader.optional_integer("dim_model_base", 256) or hidden
    return Factors(
        reader.number("scale_emb", 12.0),
        1.0 if depth is None else depth / math.sqrt(layers),
        base / hidden,
    )


LATENT: dict[str, Attends] = {
    "deepseek_v2": Attends(
        examples="DeepSeek-V2",
        mixer=_latent,
        turned_key="qk_rope_head_dim",
        head_dim=64,
        interleaved_rope=True,
        mlp_bias="mlp_bias",
        max_positions=2048,
        channel_mixer=grouped_experts,
        spelling=replace(LLAMA, shared="mlp.shared_experts."),
    ),
    "deepseek_v3": Attends(
        examples="DeepSeek-V3 and R1",
        mixer=_latent,
        turned_key="qk_rope_head_dim",
        head_dim=64,
        interleaved_rope=True,
        max_positions=4096,
        channel_mixer=sigmoid_experts,
        spelling=replace(LLAMA, shared="mlp.shared_experts."),
    ),
    "glm4_moe_lite": Attends(
        examples="GLM 4.7 Flash",
        eps=1e-5,
        mixer=_latent,
        turned_key="qk_rope_head_dim",
        head_dim=64,
        interleaved_rope=True,
        max_positions=202752,
        channel_mixer=sigmoid_experts,
        spelling=replace(LLAMA, shared="mlp.shared_experts."),
    ),
    "minicpm3": Attends(
        examples="MiniCPM 3",
        eps=1e-5,
        mixer=_latent,
        turned_key="qk_rope_head_dim",
        head_dim=32,
        mlp_bias="mlp_bias",
        factors=_factors_of_minicpm,
        tied=True,
        max_positions=32768,
    ),
    "youtu": Attends(
        examples="Youtu-LLM",
        mixer=_latent,
        turned_key="qk_rope_head_dim",
        head_dim=64,
        interleaved_rope=True,
        tied=True,
        max_positions=131072,
    ),
}
"""model_type -> row."""
