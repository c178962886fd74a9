"""Small random models of every type transformers lists, made from its own default configurations.

`shrunk` makes the default configuration of a model type small by the names its fields usually have, and turns
some of them by seed; `save` writes a model of it, with weights large enough that a wrong mask or rope shows,
and returns it: eager, float32, to compare with. Most are laid out like nothing we read.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from .random_models import draw_weights

VOCAB = 128
LARGEST = 50_000_000
"""Parameters beyond which a type did not become small."""
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 96
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TURNED: dict[str, list[Any]] = {
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "sliding_window": [9, 40, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
}


class NotBuildable(Exception):
    """The type cannot be made small this way; says why."""


def model_types() -> list[str]:
    """Every type transformers lists as a causal or a masked language model."""
    from transformers.models.auto import modeling_auto as auto

    listed = (*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return sorted(set(listed))


def shrunk(model_type: str, seed: int, *, plain: bool = False) -> Any:
    """The default configuration of a type, made small; plain: no field turned, none emptied."""
    from transformers import AutoConfig

    rng = random.Random(f"{model_type} {seed}")
    default = AutoConfig.for_model(model_type).to_dict()
    chosen = {key: value for key, value in SMALL.items() if default.get(key) is not None}
    foreign = [
        key
        for key, value in default.items()
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCAB
    ]
    chosen |= dict.fromkeys(foreign, 1)
    if "num_key_value_heads" in default:
        chosen["num_key_value_heads"] = rng.choice([1, 2, 4])
    if "layer_types" in default:
        chosen["layer_types"] = None
    if plain:
        return AutoConfig.for_model(model_type, **chosen)
    if "head_dim" in default:
        chosen["head_dim"] = 16
    chosen |= {key: rng.choice(values) for key, values in TURNED.items() if key in default}
    chosen |= {key: None for key in foreign if key == "pad_token_id"}
    return AutoConfig.for_model(model_type, **chosen)


def save(directory: Path, model_type: str, seed: int = 0, described: Any = None) -> Any:
    """Write a random model of a type into `directory`; returns it. Raises NotBuildable.

    described: its configuration, instead of those `shrunk` makes.
    """
    made = [lambda: shrunk(model_type, seed), lambda: shrunk(model_type, seed, plain=True)]
    reason = None
    for describe in made if described is None else [lambda: described]:
        try:
            return _saved(directory, model_type, seed, describe())
        except NotBuildable:
            raise
        except Exception as error:  # noqa: BLE001 - any of two hundred classes may refuse in its own way
            reason = error
    raise NotBuildable(" ".join(f"{type(reason).__name__}: {reason}".split())[:120])


def _saved(directory: Path, model_type: str, seed: int, described: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind.from_config(described).parameters())
    if size > LARGEST:
        raise NotBuildable(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = kind.from_config(described, attn_implementation="eager").float().eval()
    draw_weights(model)
    model.save_pretrained(directory)
    return model
