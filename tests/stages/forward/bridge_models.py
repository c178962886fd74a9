"""Small random models of any type transformers lists, to be run behind the bridge.

`shrunk_models` turns the fields of Llamas; here a type only has to be made small and to run, whatever it is
made of: nested configurations, experts, latent attention, tables of positions. Fields are set by the names
they have in any configuration, then a few types are told what their checks ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 128
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
WIDE = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "hidden_dim", "emb_dim")
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
    *("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads"),
)
INNER = (
    *("intermediate_size", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "dff"),
    *("ffn_dim", "d_ff", "d_inner"),
)
EXPERT = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
SMALL: dict[str, Any] = {
    **dict.fromkeys(WIDE, 64),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(INNER, 96),
    **dict.fromkeys(EXPERT, 32),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(CHOSEN, 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("vocab_size", "n_words", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_chunk_size"), 16),
    "entity_vocab_size": 16,
    "entity_emb_size": 32,
    "hidden_size_per_layer_input": 8,
}
"""By name, of fields a default configuration has."""
SHAPES: list[dict[str, Any]] = [
    {"layers": 2, "num_key_value_heads": 2, "head_dim": 16},
    {"layers": 4, "num_key_value_heads": 4, "head_dim": 8},
    {"layers": 4, "num_key_value_heads": 2, "head_dim": 16},
    {"layers": 4, "num_key_value_heads": 4},
    {"layers": 4, "num_key_value_heads": 4, "intermediate_size": 128, "mamba_d_ssm": 128},
    {"layers": 6, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 1},
]
"""What is tried in turn: no one shape fits the checks of every type."""


class NotBuildable(Exception):
    """The type cannot be made small this way; says why."""


NESTED = ("text_config", "decoder", "attn_config", "ffn_config", "encoder", "vision_config", "audio_config")
LARGEST = 60_000_000
"""Parameters beyond which a type did not become small."""
TOLD: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {"n_groups": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 5, "pad_token_id": 1},
}
"""Of single types, what they ask for."""
BY_KIND: dict[tuple[str, str], dict[str, Any]] = {
    ("reformer", "causal"): {"is_decoder": True, "axial_pos_embds": False},
    ("reformer", "masked"): {"is_decoder": False, "axial_pos_embds": False},
}


def made(model_type: str, kind: str, seed: int, **told: Any) -> Any:
    """A random model of a type that runs, eager, float32. kind: "causal" or "masked". Raises
    NotBuildable."""
    failed = []
    for shape in SHAPES:
        try:
            return _made(model_type, kind, seed, shape, told)
        except Exception as error:  # noqa: BLE001 - any of two hundred classes may refuse in its own way
            failed.append(" ".join(f"{type(error).__name__}: {error}".split())[:120])
    raise NotBuildable(failed[-1])


def _made(model_type: str, kind: str, seed: int, shape: dict[str, Any], told: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    auto = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}[kind]
    told = {**TOLD.get(model_type, {}), **BY_KIND.get((model_type, kind), {}), **told}
    default = AutoConfig.for_model(model_type, **BY_KIND.get((model_type, kind), {})).to_dict()
    described = AutoConfig.for_model(model_type, **{**_shrunk(default, shape), **told})
    described.use_cache = False
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto.from_config(described).parameters())
    if size > LARGEST:
        raise NotBuildable(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = auto.from_config(described, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.normal_(mean=0.5, std=0.3)
        model(input_ids=torch.tensor([[7, 8, 9, 10, 11]]))
    return model


def _shrunk(default: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    sizes = {**SMALL, **dict.fromkeys(LAYERS, shape["layers"]), **shape}
    depth = next((default[key] for key in LAYERS if isinstance(default.get(key), int)), None)
    chosen: dict[str, Any] = {}
    for key, value in default.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
            chosen[key] = 1
        elif key in NESTED and isinstance(value, dict):
            chosen[key] = {**value, **_shrunk(value, shape)}
        elif key == "per_layer_config" and isinstance(value, dict):
            chosen[key] = {place: each for place, each in value.items() if int(place) < shape["layers"]}
        elif key in sizes and value is not None:
            chosen[key] = sizes[key]
        elif isinstance(value, list) and len(value) == depth:
            chosen[key] = value[: shape["layers"]]
    return chosen


def save(directory: Path, model_type: str, kind: str, seed: int = 0, **told: Any) -> Any:
    """Write a random model of a type into `directory`; returns it. Raises NotBuildable."""
    model = made(model_type, kind, seed, **told)
    model.save_pretrained(directory)
    return model
