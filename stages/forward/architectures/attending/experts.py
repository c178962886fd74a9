"""What routes tokens to experts in these families: a function per way to say it in a config.json.

Border: one config and one layer; never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from .....store.errors import ConfigError
from ..families import has_bias, read_activation
from ..mixers import ChannelMixerSpec, ExpertsSpec, MlpSpec
from ..transformer import ConfigReader
from .family import Attends, dense, residual_factor

__all__ = [
    "corrected_experts",
    "granite_experts",
    "grouped_experts",
    "hunyuan_experts",
    "jetmoe_experts",
    "kolibri_experts",
    "limited_experts",
    "llama4_experts",
    "mixtral_experts",
    "qwen_experts",
    "sigmoid_experts",
    "sparsely_mixed_experts",
]

_USUAL = {
    "flex_olmo": (7, 5, 11008, 0),
    "mellum": (64, 8, 896, 0),
    "olmoe": (64, 8, 2048, 0),
    "qwen2_moe": (60, 4, 1408, 5632),
    "qwen3_moe": (128, 8, 768, 0),
}
"""Where a config is silent: experts, how many of them are chosen, their width, and that of the one of all."""


def mixtral_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts in every layer, weighed among the chosen (Jiang et al., Mixtral of Experts, 2024)."""
    return ExpertsSpec(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        routing="softmax of chosen",
    )


def qwen_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts in every decoder_sparse_step-th layer but for those listed, and in some families one that all
    tokens go through, gated (OLMoE, Qwen 2 and 3 MoE)."""
    model_type = reader.raw["model_type"]
    count, chosen, inner, shared = _USUAL[model_type]
    is_olmoe, is_mellum = model_type in ("olmoe", "flex_olmo"), model_type == "mellum"
    if is_mellum and _listed_dense(reader, reader.strings("mlp_layer_types"), layer):
        return dense(reader, family, layer)
    dense_layers = reader.raw.get("mlp_only_layers") or []
    reader.read.add("mlp_only_layers")
    if (
        not is_olmoe
        and not is_mellum
        and (layer in dense_layers or (layer + 1) % reader.integer("decoder_sparse_step", 1))
    ):
        return dense(reader, family, layer)
    if shared:
        shared = reader.integer("shared_expert_intermediate_size", shared)
    return ExpertsSpec(
        reader.integer("num_experts", reader.integer("num_local_experts", count)),
        reader.integer("num_experts_per_tok", chosen),
        reader.integer("intermediate_size" if is_olmoe else "moe_intermediate_size", inner),
        read_activation(reader, family),
        routing="softmax of chosen" if reader.flag("norm_topk_prob", is_mellum) else "chosen of softmax",
        shared_size=shared,
        has_shared_gate=bool(shared),
    )


def llama4_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts in layers that are listed, or every few, and one that all tokens go through; the others are
    dense, of a width of their own (Llama 4)."""
    step = reader.integer("interleave_moe_layer_step", 1)
    listed = reader.raw.get("moe_layers")
    reader.read.add("moe_layers")
    activation = read_activation(reader, family)
    if (layer + 1) % step if listed is None else layer not in listed:
        return MlpSpec(reader.integer("intermediate_size_mlp", 16384), activation)
    inner = reader.integer("intermediate_size", 8192)
    return ExpertsSpec(
        reader.integer("num_local_experts", 16),
        reader.integer("num_experts_per_tok", 1),
        inner,
        activation,
        routing="sigmoid of inputs",
        shared_size=inner,
        is_listed=False,
        is_transposed=True,
    )


def jetmoe_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts whose tensors are one, and a bias behind them (JetMoE)."""
    return ExpertsSpec(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size", 5632),
        read_activation(reader, family),
        routing="softmax of chosen",
        is_listed=False,
        has_output_bias=True,
    )


def granite_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts whose tensors are one, and in Granite's later releases one that all tokens go through."""
    has_shared = reader.raw["model_type"] != "granitemoe"
    return ExpertsSpec(
        reader.integer("num_local_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        routing="softmax of chosen",
        shared_size=reader.integer("shared_intermediate_size", 0, least=0) if has_shared else 0,
        is_listed=False,
        factor=residual_factor(reader, family),
    )


@dataclass(frozen=True)
class _Sigmoids:
    """Where the config of a family of sigmoid experts is silent; first: layers that are dense; sums_to_one:
    None where no key asks whether the weights of the chosen do, as they always do.
    """

    inner: int
    count: int | None
    chosen: int | None
    shared: int | None = 1
    first: int | None = None
    groups: tuple[int, int] = (1, 1)
    sums_to_one: bool | None = True
    factor: float = 1.0
    count_key: str = "n_routed_experts"
    shared_key: str = "n_shared_experts"
    factor_key: str = "routed_scaling_factor"
    first_key: str = "first_k_dense_replace"


_SIGMOIDS = {
    "afmoe": _Sigmoids(
        1408,
        64,
        6,
        2,
        first=1,
        sums_to_one=None,
        factor_key="route_scale",
        first_key="num_dense_layers",
        count_key="num_experts",
        shared_key="num_shared_experts",
    ),
    "deepseek_v3": _Sigmoids(2048, 256, 8, first=3, groups=(8, 4), factor=2.5),
    "dots1": _Sigmoids(1408, None, None, None, first=0, sums_to_one=False),
    "exaone_moe": _Sigmoids(
        1024, 64, 8, first=1, factor=2.5, count_key="num_experts", shared_key="num_shared_experts"
    ),
    "glm4_moe": _Sigmoids(1408, 128, 8, first=1),
    "glm4_moe_lite": _Sigmoids(1536, 64, 4, first=1, factor=1.8),
    "hy_v3": _Sigmoids(
        1536,
        192,
        8,
        first=1,
        sums_to_one=None,
        factor=2.826,
        factor_key="router_scaling_factor",
        count_key="num_experts",
        shared_key="num_shared_experts",
    ),
    "solar_open": _Sigmoids(1280, 128, 8, first=0),
}
"""Of them, exaone_moe and glm4_moe_lite may list layers."""


def sigmoid_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts chosen by sigmoids in groups (DeepSeek-V3, 2024, section 2.1.2), in layers listed, or behind
    the first ones."""
    usual = _SIGMOIDS[reader.raw["model_type"]]
    if _is_dense(reader, usual, layer):
        return dense(reader, family, layer)
    inner = reader.integer("moe_intermediate_size", usual.inner)
    return ExpertsSpec(
        _count(reader, usual.count, usual.count_key, "num_local_experts"),
        reader.integer("num_experts_per_tok", usual.chosen),
        inner,
        read_activation(reader, family),
        routing="sigmoid",
        shared_size=inner * reader.integer(usual.shared_key, usual.shared),
        groups=reader.integer("n_group", usual.groups[0]),
        chosen_groups=reader.integer("topk_group", usual.groups[1]),
        sums_to_one=_sums_to_one(reader, usual),
        routed_factor=reader.number(usual.factor_key, usual.factor),
        has_bias=has_bias(reader, family.mlp_bias),
    )


def _sums_to_one(reader: ConfigReader, usual: _Sigmoids) -> bool:
    """Whether weights of the chosen are divided by their sum, which some families always do."""
    return True if usual.sums_to_one is None else reader.flag("norm_topk_prob", usual.sums_to_one)


def _count(reader: ConfigReader, usual: int | None, *keys: str) -> int:
    """Of experts, under the first of these names that is there."""
    return reader.integer(next((key for key in keys if reader.has(key)), keys[0]), usual)


def _is_dense(reader: ConfigReader, usual: _Sigmoids, layer: int) -> bool:
    model_type = reader.raw["model_type"]
    if model_type in ("exaone_moe", "glm4_moe_lite", "hy_v3"):
        listed = reader.strings("mlp_layer_types")
        if listed is not None:
            return _listed_dense(reader, listed, layer)
    if model_type in ("glm4_moe_lite", "hy_v3"):
        return layer < 1
    return model_type != "solar_open" and layer < reader.integer(usual.first_key, usual.first, least=0)


def _listed_dense(reader: ConfigReader, listed: list[str] | None, layer: int) -> bool:
    if listed is None:
        return False
    layers = reader.integer("num_hidden_layers")
    if len(listed) != layers or not set(listed) <= {"dense", "sparse"}:
        raise ConfigError(
            f"{reader.source}: expected mlp_layer_types to say dense or sparse for each of {layers} layers, "
            f"found {listed!r}; correct the file, or fetch it again"
        )
    return listed[layer] == "dense"


def grouped_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts chosen by softmax, in the best groups where it says so (DeepSeek-V2, 2024, section 2.2.2)."""
    if layer < reader.integer("first_k_dense_replace", 0, least=0):
        return dense(reader, family, layer)
    inner, method = reader.integer("moe_intermediate_size", 1407), reader.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{reader.source}: expected topk_method 'greedy' or 'group_limited_greedy', found {method!r}; "
            "this model cannot run here"
        )
    is_grouped = method != "greedy"
    return ExpertsSpec(
        reader.integer("n_routed_experts", reader.integer("num_experts", 64)),
        reader.integer("num_experts_per_tok"),
        inner,
        read_activation(reader, family),
        routing="chosen of softmax",
        shared_size=inner * reader.integer("n_shared_experts", 2),
        groups=reader.integer("n_group") if is_grouped else 1,
        chosen_groups=reader.integer("topk_group") if is_grouped else 1,
        routed_factor=reader.number("routed_scaling_factor", 1.0),
        has_bias=has_bias(reader, family.mlp_bias),
    )


def corrected_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts of some layers, chosen by softmax and a correction, beside those of all tokens (ERNIE 4.5)."""
    first, last = (
        reader.integer("moe_layer_start_index", 1, least=0),
        reader.raw.get("moe_layer_end_index", -1),
    )
    reader.read.add("moe_layer_end_index")
    last = (
        reader.integer("num_hidden_layers") - 1
        if last == -1
        else reader.integer("moe_layer_end_index", least=0)
    )
    if (layer + 1) % reader.integer("moe_layer_interval", 1) or not first <= layer <= last:
        return dense(reader, family, layer)
    inner = reader.integer("moe_intermediate_size", 1536)
    return ExpertsSpec(
        reader.integer("moe_num_experts", reader.integer("num_experts", 64)),
        reader.integer("moe_k", reader.integer("num_experts_per_tok", 6)),
        inner,
        read_activation(reader, family),
        routing="chosen of corrected softmax",
        shared_size=inner * reader.integer("moe_num_shared_experts", 2, least=0),
        sums_to_one=True,
        sum_eps=reader.number("moe_norm_min", 1e-12),
        has_bias=has_bias(reader, family.mlp_bias),
    )


def hunyuan_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts of every layer beside one of all tokens, as wide as they are."""
    inner, chosen = reader.integer("intermediate_size"), reader.raw.get("moe_topk", 1)
    reader.read.add("moe_topk")
    if isinstance(chosen, list) and len(chosen) == reader.integer("num_hidden_layers"):
        chosen = chosen[layer]
    told = ConfigReader({"moe_topk": chosen}, reader.source)
    return ExpertsSpec(
        reader.integer("num_experts", reader.integer("num_local_experts", 1)),
        reader.integer("num_experts_per_tok", told.integer("moe_topk", 1)),
        inner,
        read_activation(reader, family),
        routing="softmax of chosen",
        shared_size=inner,
    )


def kolibri_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts weighed by sigmoids and chosen by what is behind them."""
    return ExpertsSpec(
        reader.integer("num_experts", reader.integer("num_local_experts", 384)),
        reader.integer("num_experts_per_tok", 6),
        reader.integer("moe_intermediate_size", 512),
        read_activation(reader, family),
        routing="sigmoid of chosen",
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
        sums_to_one=reader.flag("norm_topk_prob", False),
        sum_eps=0.0,
    )


def limited_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Experts with biases and a gate held within limits (gpt-oss, 2025)."""
    return ExpertsSpec(
        reader.integer("num_local_experts", reader.integer("num_experts", 128)),
        reader.integer("num_experts_per_tok", 4),
        reader.integer("intermediate_size", 2880),
        "silu",
        routing="softmax of chosen",
        is_listed=False,
        has_routed_bias=True,
        limits=(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0)),
    )


def sparsely_mixed_experts(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """Two experts of every layer, chosen one after the other (Liu et al., GRIN, 2024)."""
    if (chosen := reader.integer("num_experts_per_tok", 2)) != 2:
        raise ConfigError(
            f"{reader.source}: expected num_experts_per_tok to be 2, as many as sparse mixing weighs, found "
            f"{chosen}; this model cannot run here"
        )
    return ExpertsSpec(
        reader.integer("num_local_experts", 16),
        chosen,
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        routing="sparse mixing",
        jitter=reader.number("router_jitter_noise", 0.01),
    )
