"""Builders of `ExpertsSpec` that several families share: softmax (Qwen) and sigmoid (DeepSeek) routing.

Border: one config; never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .....store.errors import ConfigError
from ..families import read_activation
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ExpertsSpec
from ..transformer import ConfigReader
from . import builders as build

__all__ = [
    "DEEPSEEK_SPELLING",
    "ExpertDefaults",
    "ExpertKeys",
    "is_listed_dense",
    "qwen_experts",
    "sigmoid_experts",
]

DEEPSEEK_SPELLING = replace(LLAMA, experts=ExpertNames(shared="mlp.shared_experts."))
"""Tensor names of Llama with DeepSeek's shared experts."""


def is_listed_dense(config: ConfigReader, layer: int) -> bool | None:
    """Whether the config key mlp_layer_types lists a layer as dense (an MLP without experts); None if the key
    is absent.

    Arguments:
        config: The config.json.
        layer: Number of the layer.

    Raises:
        ConfigError: The list has another length than the number of layers, or an unknown type.
    """
    types, layers = config.strings("mlp_layer_types"), build.layers_of(config)
    if types is None:
        return None
    if len(types) != layers or not set(types) <= {"dense", "sparse"}:
        raise ConfigError(
            f"{config.source}: expected mlp_layer_types to list 'dense' or 'sparse' for each of {layers} "
            f"layers, found {types!r}; correct the file, or fetch it again"
        )
    return types[layer] == "dense"


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

    Arguments:
        config: The config.json.
        count: Default of the number of routed experts.
        chosen: Default of the number of experts per token.
        width: Default of the hidden width of a routed expert.
        width_key: Config key of the hidden width of a routed expert.
        shared: Default of the shared expert's hidden width; 0 for no shared expert.
        sums_to_one: Default of norm_topk_prob: whether weights of the top-k experts sum to 1.
    """
    # Families without a shared expert ignore that key.
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


@dataclass(frozen=True)
class ExpertDefaults:
    """Values of expert settings for keys that a config.json leaves out; None marks a required key."""

    count: int | None
    """Number of routed experts."""
    chosen: int | None
    """Number of routed experts per token (config key num_experts_per_tok)."""
    width: int
    """Hidden width of an expert (config key moe_intermediate_size)."""
    shared: int | None = 1
    """Number of shared experts."""
    groups: tuple[int, int] = (1, 1)
    """Number of groups of experts, and of groups that a token may choose from (config keys n_group and
    topk_group)."""
    factor: float = 1.0
    """Number by which the sum of the routed experts' outputs is multiplied."""


@dataclass(frozen=True)
class ExpertKeys:
    """Names of the config keys of experts that differ between families."""

    count: str = "n_routed_experts"
    """Config key of the number of routed experts; num_local_experts is read if it is absent."""
    shared: str = "n_shared_experts"
    """Config key of the number of shared experts."""
    factor: str = "routed_scaling_factor"
    """Config key of the factor of the sum of the routed experts' outputs."""


def sigmoid_experts(
    config: ConfigReader,
    defaults: ExpertDefaults,
    *,
    keys: ExpertKeys = ExpertKeys(),
    sums_to_one: bool | None = True,
    bias: bool = False,
) -> ExpertsSpec:
    """Experts routed by sigmoid scores within groups, and shared experts (DeepSeek-V3, 2024, section 2.1.2).

    Arguments:
        config: The config.json.
        defaults: Values for keys that the config leaves out.
        keys: Config keys whose names differ between families.
        sums_to_one: Default of norm_topk_prob, whether weights of the top-k experts are divided by their
            sum; None to do so always.
        bias: Whether experts have biases.
    """
    width = config.integer("moe_intermediate_size", defaults.width)
    count_key = next((name for name in (keys.count, "num_local_experts") if config.has(name)), keys.count)
    return ExpertsSpec(
        config.integer(count_key, defaults.count),
        config.integer("num_experts_per_tok", defaults.chosen),
        width,
        read_activation(config),
        routing="sigmoid",
        shared_size=width * config.integer(keys.shared, defaults.shared),
        groups=config.integer("n_group", defaults.groups[0]),
        chosen_groups=config.integer("topk_group", defaults.groups[1]),
        sums_to_one=sums_to_one is None or config.flag("norm_topk_prob", sums_to_one),
        routed_factor=config.number(keys.factor, defaults.factor),
        has_bias=bias,
    )
