"""Rows of the table of families in words, derived from the architecture of a sample config.

Border: never imports torch.
"""

from __future__ import annotations

from typing import Any

from .attending.builders import AttendingFamily
from .composed import ComposedArchitecture
from .mixers import (
    AttentionSpec,
    DifferentialSpec,
    ExpertsSpec,
    GatedAttentionSpec,
    LatentAttentionSpec,
    MlpSpec,
    RoutedAttentionSpec,
)
from .transformer import ConfigReader

__all__ = ["described_attending"]

_SIZES = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "vocab_size": 96,
}
_OPTIONAL: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "bias", "include_qkv_bias", "use_bias", "use_qkv_bias"), True),
    **dict.fromkeys(("emb_layer_norm_before", "mup_enabled", "use_qk_norm", "qk_layernorm"), True),
    **dict.fromkeys(("lm_head_bias", "mlp_bias", "use_parallel_residual"), True),
    "relative_attention": True,
    "pos_att_type": ["c2p"],
    "type_vocab_size": 2,
    "sliding_window": 512,
    "use_sliding_window": True,
    "max_window_layers": 4,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "final_logit_softcapping": 30.0,
}
"""Config keys that enable optional parts of some families; other families ignore or refuse them."""
_EXTRA_KEYS: dict[str, dict[str, Any]] = {
    "baichuan": {"max_position_embeddings": 4096},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "mellum": {"layer_types": ["sliding_attention"] * 7 + ["full_attention"]},
    "rembert": {"output_embedding_size": 1664},
}
"""model_type -> further config keys: those without defaults, and those that enable optional parts."""
NORM_WORDS = {"rms": "RMS", "gemma_rms": "RMS, weight + 1", "layer": "layer norm"}
"""Kind of norm (`Architecture.norm_type`) -> its name in the table of families."""
ACTIVATION_WORDS = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "tanh-GELU",
    "relu": "ReLU",
    "relu2": "squared ReLU",
    "xielu": "xIELU",
}
"""Name of an activation function -> its name in the table of families."""
_NORM_PLACES = {
    "before": "",
    "after": "after attention and MLP",
    "around": "four per block",
    "of sums": "post-norm",
}
"""Place of the norms in a layer (`LayerSpec.norms`) -> text in the table of families."""


def described_attending(model_type: str, family: AttendingFamily) -> dict[str, str]:
    """Row in the table of families of a family whose layers all have attention: column name (model_type,
    examples, norm, mlp, attention, head) -> text. Optional parts (windows, biases, soft caps) are named if
    configs of the family can enable them.

    Arguments:
        model_type: The family's model_type.
        family: The family.
    """
    # A sample config, which enables as many optional parts as the family allows.
    sizes = {family.aliases.get(key, key): value for key, value in _SIZES.items()}
    optional = {key: value for key, value in _OPTIONAL.items() if key not in family.never}
    raw = {**optional, **sizes, **_EXTRA_KEYS.get(model_type, {}), "model_type": model_type}
    model = family.read(ConfigReader(raw), {})
    norm_words = (NORM_WORDS[model.norm_type], _NORM_PLACES[str(model.blocks[0].norms)])
    return {
        "model_type": model_type,
        "examples": family.examples,
        "norm": ", ".join(filter(None, norm_words)),
        "mlp": _mlp(model),
        "attention": ", ".join(filter(None, _attention(model))) or "plain",
        "head": ", ".join(filter(None, _head(model))) or "untied",
    }


def _mlp(model: ComposedArchitecture) -> str:
    """Text of the column "mlp": experts, gate, activation function, fused projections."""
    mixers = [block.channel_mixer for block in model.blocks]
    experts = any(isinstance(mixer, ExpertsSpec) for mixer in mixers)
    mixer = mixers[-1]
    assert isinstance(mixer, MlpSpec | ExpertsSpec)  # as all families of attending/ have
    words = ("experts, " if experts else "") + ("gated " if mixer.is_gated else "plain ")
    fused = ", fused" if isinstance(mixer, MlpSpec) and mixer.is_fused else ""
    return words + ACTIVATION_WORDS[mixer.activation] + fused


def _attention(model: ComposedArchitecture) -> list[str]:
    """Texts of the column "attention", one per property of the model's attention; "" for a property that it
    lacks."""
    mixers = [block.mixers[0] for block in model.blocks]
    # The kind of mixer is the same in all layers.
    mixer = mixers[0]
    grouped = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    if isinstance(mixer, DifferentialSpec):
        grouped = [mixer.attention]
    ropes = {mixer.rope for mixer in mixers}
    rotary = next((rope for rope in ropes if rope is not None), None)
    rotated_shares = {mixer.rope.dim / mixer.head_dim for mixer in grouped if mixer.rope is not None}
    share = min(rotated_shares, default=1.0)
    windows = [mixer.window for mixer in grouped]
    return [
        "norms on q and k" if any(mixer.qk_norm for mixer in grouped) else "",
        "biases" if any(mixer.qkv_bias for mixer in grouped) else "",
        "latent keys and values" if isinstance(mixer, LatentAttentionSpec) else "",
        "mixture of attention heads" if isinstance(mixer, RoutedAttentionSpec) else "",
        "differential attention" if isinstance(mixer, DifferentialSpec) else "",
        "gated heads" if isinstance(mixer, GatedAttentionSpec) else "",
        "grouped convolutions" if any(mixer.groups for mixer in grouped) else "",
        "norms before the output projection" if any(mixer.inner_norm_eps for mixer in grouped) else "",
        "rope of neighbouring entries" if rotary is not None and rotary.interleaved else "",
        f"rope of {share:g} of a head" if share < 1 else "",
        "a second rope in windows" if len(ropes - {None}) > 1 else "",
        "no rope in some layers" if rotary is not None and None in ropes else "",
        "sliding window" if any(windows) and not any(mixer.is_chunked for mixer in grouped) else "",
        "chunks" if any(mixer.is_chunked for mixer in grouped) else "",
        "parallel to the MLP" if model.blocks[0].is_parallel else "",
        _positions(model),
        "ALiBi" if any(mixer.alibi_slopes for mixer in grouped) else "",
        "soft cap" if any(mixer.logit_softcap for mixer in grouped) else "",
        "dynamic mask by values" if any(mixer.has_value_scores for mixer in grouped) else "",
        "relative positions" if any(mixer.relative for mixer in grouped) else "",
        "sinks" if any(mixer.attention_sinks for mixer in grouped) else "",
        "temperature tuning" if any(mixer.temperature_tuning for mixer in grouped) else "",
        "gains on the stream" if model.blocks[0].has_gains else "",
        "layers share weights" if model.blocks[-1].source not in (None, model.num_layers - 1) else "",
        "bidirectional" if isinstance(mixers[-1], AttentionSpec) and mixers[-1].is_bidirectional else "",
    ]


def _positions(model: ComposedArchitecture) -> str:
    """Text about the table of positions: learned, or sines and cosines; "" for a model without such a
    table."""
    if not model.position_rows:
        return ""
    return "positions of sines and cosines" if model.position_waves else "learned positions"


def _head(model: ComposedArchitecture) -> list[str]:
    """Texts of the column "head", one per property of embedding and head; "" for a property that the model
    lacks."""
    return [
        "scaled embedding" if model.embedding_scale is not None else "",
        "normalised embedding" if model.has_embedding_norm else "",
        "embeddings narrower than the stream" if model.embedding_width else "",
        "token types" if model.token_types else "",
        "tied" if model.tie_word_embeddings else "",
        "head transform" if model.transform else "",
        "scaled" if model.logit_factor != 1 else "",
        "bias" if model.has_head_bias else "",
        "soft cap" if model.final_logit_softcapping else "",
    ]
