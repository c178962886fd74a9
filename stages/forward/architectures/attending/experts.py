"""What routes tokens to experts in these families: a function per way to say it in a config.json.

Border: one config and one layer; never imports torch.
"""

from __future__ import annotations

from ..families import read_activation
from ..mixers import ChannelShape, ExpertsShape
from ..transformer import ConfigReader
from .reading import Attends, dense, residual_factor

__all__ = ["glm_experts", "granite_experts", "mixtral_experts", "qwen_experts"]

_USUAL = {"olmoe": (64, 8, 2048, 0), "qwen2_moe": (60, 4, 1408, 5632), "qwen3_moe": (128, 8, 768, 0)}
"""Where a config is silent: experts, how many of them are chosen, their width, and that of the one of all."""


def mixtral_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """Experts in every layer, weighed among the chosen (Jiang et al., Mixtral of Experts, 2024)."""
    return ExpertsShape(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        routing="softmax of chosen",
    )


def qwen_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """Experts in every decoder_sparse_step-th layer but for those listed, and in some families one that all
    tokens go through, gated (OLMoE, Qwen 2 and 3 MoE)."""
    model_type = reader.raw["model_type"]
    count, chosen, inner, shared = _USUAL[model_type]
    is_olmoe = model_type == "olmoe"
    dense_layers = reader.raw.get("mlp_only_layers") or []
    reader.read.add("mlp_only_layers")
    if not is_olmoe and (layer in dense_layers or (layer + 1) % reader.integer("decoder_sparse_step", 1)):
        return dense(reader, family, layer)
    if shared:
        shared = reader.integer("shared_expert_intermediate_size", shared)
    return ExpertsShape(
        reader.integer("num_experts", reader.integer("num_local_experts", count)),
        reader.integer("num_experts_per_tok", chosen),
        reader.integer("intermediate_size" if is_olmoe else "moe_intermediate_size", inner),
        read_activation(reader, family),
        routing="softmax of chosen" if reader.flag("norm_topk_prob", False) else "chosen of softmax",
        shared_size=shared,
        has_shared_gate=bool(shared),
    )


def granite_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """Experts whose tensors are one, and in Granite's later releases one that all tokens go through."""
    has_shared = reader.raw["model_type"] == "granitemoeshared"
    return ExpertsShape(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        routing="softmax of chosen",
        shared_size=reader.integer("shared_intermediate_size", 0, least=0) if has_shared else 0,
        is_listed=False,
        factor=residual_factor(reader, family),
    )


def glm_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """Experts behind the first layers, chosen by sigmoids in groups (DeepSeek-V3, 2024, section 2.1.2)."""
    if layer < reader.integer("first_k_dense_replace", 1, least=0):
        return dense(reader, family, layer)
    inner = reader.integer("moe_intermediate_size", 1408)
    return ExpertsShape(
        reader.integer("n_routed_experts", reader.integer("num_local_experts", 128)),
        reader.integer("num_experts_per_tok", 8),
        inner,
        read_activation(reader, family),
        routing="sigmoid",
        shared_size=inner * reader.integer("n_shared_experts", 1),
        groups=reader.integer("n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
        sums_to_one=reader.flag("norm_topk_prob", True),
        routed_factor=reader.number("routed_scaling_factor", 1.0),
    )
