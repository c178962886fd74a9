"""Builders of `ExpertsSpec`: routed and shared experts as configs of several families describe them.

Border: one config; never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from .....store.errors import ConfigError
from ..families import read_activation
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ExpertsSpec
from ..transformer import ConfigReader
from . import builders as build

__all__ = ["SHARED", "is_listed_dense", "qwen_experts", "sigmoid_experts"]

SHARED = replace(LLAMA, experts=ExpertNames(shared="mlp.shared_experts."))
"""Tensor names of Llama with DeepSeek's shared experts."""


def is_listed_dense(config: ConfigReader, layer: int) -> bool | None:
    """Whether mlp_layer_types lists a layer as dense (an MLP without experts); None without that list."""
    listed, layers = config.strings("mlp_layer_types"), build.layers_of(config)
    if listed is None:
        return None
    if len(listed) != layers or not set(listed) <= {"dense", "sparse"}:
        raise ConfigError(
            f"{config.source}: expected mlp_layer_types to say dense or sparse for each of {layers} layers, "
            f"found {listed!r}; correct the file, or fetch it again"
        )
    return listed[layer] == "dense"


def qwen_experts(
    config: ConfigReader,
    *,
    count: int,
    chosen: int,
    width: int,
    width_key: str = "moe_intermediate_size",
    shared: int = 0,
    sums_to_one: bool = False,
) -> ExpertsSpec:
    """Experts routed by a softmax over all router logits, and optionally a gated shared expert (Qwen 2 MoE).

    Args:
        count, chosen, width: Defaults of the number of experts, of experts per token, and of their width.
        shared: Default of the shared expert's width; 0 for no shared expert.
        width_key: Config key of the experts' width.
        sums_to_one: Default of norm_topk_prob.
    """
    shared = config.integer("shared_expert_intermediate_size", shared) if shared else 0
    return ExpertsSpec(
        config.integer("num_experts", config.integer("num_local_experts", count)),
        config.integer("num_experts_per_tok", chosen),
        config.integer(width_key, width),
        read_activation(config),
        routing="softmax of chosen" if config.flag("norm_topk_prob", sums_to_one) else "chosen of softmax",
        shared_size=shared,
        has_shared_gate=bool(shared),
    )


def sigmoid_experts(
    config: ConfigReader,
    *,
    count: int | None,
    chosen: int | None,
    width: int,
    shared: int | None = 1,
    groups: tuple[int, int] = (1, 1),
    sums_to_one: bool | None = True,
    factor: float = 1.0,
    factor_key: str = "routed_scaling_factor",
    count_key: str = "n_routed_experts",
    shared_key: str = "n_shared_experts",
    bias: bool = False,
) -> ExpertsSpec:
    """Experts routed by sigmoid scores within groups, and shared experts (DeepSeek-V3, 2024, section 2.1.2).

    Args:
        count, chosen, width: Defaults of the number of experts, of experts per token, and of their width;
            None if the config must have the key.
        shared: Default of the number of shared experts; None if the config must have the key.
        groups: Defaults of n_group and topk_group.
        sums_to_one: Default of norm_topk_prob; None to normalise always.
        factor: Default of the factor of the routed output.
        factor_key, count_key, shared_key: Config keys of that factor and of the two numbers of experts.
        bias: Whether experts have biases.
    """
    inner = config.integer("moe_intermediate_size", width)
    key = next((name for name in (count_key, "num_local_experts") if config.has(name)), count_key)
    return ExpertsSpec(
        config.integer(key, count),
        config.integer("num_experts_per_tok", chosen),
        inner,
        read_activation(config),
        routing="sigmoid",
        shared_size=inner * config.integer(shared_key, shared),
        groups=config.integer("n_group", groups[0]),
        chosen_groups=config.integer("topk_group", groups[1]),
        sums_to_one=sums_to_one is None or config.flag("norm_topk_prob", sums_to_one),
        routed_factor=config.number(factor_key, factor),
        has_bias=bias,
    )
