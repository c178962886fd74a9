"""Small random models of every family, made by the reference implementation and saved as it saves them.

`draw` picks a configuration from a family's axes (sizes, head counts, biases, windows, rope, caps) by seed;
`save_random_model` writes config.json, model.safetensors and a tokenizer into a directory and returns the
reference model, eager and float32, to compare with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "starcoder2",
    "ministral",
    "helium",
)
VOCAB, CONTEXT = 320, 128


def draw(family: str, seed: int) -> dict[str, Any]:
    """Keyword arguments of the family's reference configuration."""
    rng = random.Random(f"{family} {seed}")
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2, 3])
    head_dim = rng.choice([8, 16])
    chosen: dict[str, Any] = {
        "num_hidden_layers": rng.choice([2, 3]),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": rng.choice([40, 72]),
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": rng.random() < 0.5,
        "norm_epsilon" if family == "starcoder2" else "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "rope_parameters": _rope(rng, family, head_dim),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family in ("llama", "mistral", "qwen3", "gemma", "gemma2") and rng.random() < 0.5:
        chosen["head_dim"] = head_dim * 2
        chosen["rope_parameters"] = _rope(rng, family, head_dim * 2)
    elif family in ("qwen3", "gemma", "gemma2", "ministral", "helium"):
        chosen["head_dim"] = head_dim
    return chosen | _axes_of(family, rng)


def _axes_of(family: str, rng: random.Random) -> dict[str, Any]:
    window = rng.choice([5, 9, None])
    if family in ("llama", "helium"):
        return {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    if family in ("qwen2", "qwen3"):
        sliding = {"use_sliding_window": rng.random() < 0.7, "sliding_window": 7, "max_window_layers": 1}
        return sliding | ({"attention_bias": rng.random() < 0.5} if family == "qwen3" else {})
    if family == "gemma2":
        scalar = rng.choice([16, 24])
        caps = {
            "attn_logit_softcapping": rng.choice([20.0, 50.0, None]),
            "final_logit_softcapping": rng.choice([10.0, None]),
        }
        return {"sliding_window": rng.choice([5, 9]), "query_pre_attn_scalar": scalar, **caps}
    if family == "starcoder2":
        return {"sliding_window": window, "use_bias": rng.random() < 0.7}
    if family == "ministral":  # the reference cannot run without a window
        return {"sliding_window": window or 6}
    return {} if family == "gemma" else {"sliding_window": window}


def _rope(rng: random.Random, family: str, head_dim: int) -> dict[str, Any]:
    theta = rng.choice([1e4, 5e5])
    if family == "phi3":
        share = rng.choice([1.0, 0.5])
        plain = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        half = int(head_dim * share) // 2
        long = {
            "rope_type": "longrope",
            "short_factor": [1 + 0.1 * i for i in range(half)],
            "long_factor": [2 + 0.3 * i for i in range(half)],
            "factor": 4.0,
        }
        return rng.choice([plain, plain | long])
    schemes: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ]
    return {"rope_theta": theta, **rng.choice(schemes)}


def config(family: str, seed: int = 0, **overrides: Any) -> Any:
    """The reference configuration `draw` describes."""
    from transformers import AutoConfig

    axes = draw(family, seed) | overrides
    if family == "phi3":
        axes.setdefault("original_max_position_embeddings", 32)
    return AutoConfig.for_model(family, **axes)


def save_random_model(
    directory: Path, family: str, seed: int = 0, *, tokenizer: bool = True, **overrides: Any
) -> Any:
    """Write a random model of a family into `directory`; returns the reference model, eager, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    described = config(family, seed, **overrides)
    described._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(described).float().eval()
    draw_weights(model)
    model.save_pretrained(directory)
    if tokenizer:
        save_tokenizer(directory)
    return model


def draw_weights(model: Any) -> None:
    """Weights larger than an initialisation: attention must be far from uniform for a wrong mask to show."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2)
            else:
                weight.normal_(mean=0.5, std=0.3)


TEXT = "The capital of France is Paris. It was the best of times, the worst of times. naïve 🙂 café myself"


def save_tokenizer(directory: Path, *, bos: bool = True) -> None:
    """A byte-level tokenizer of at most VOCAB tokens, with <s> in front if `bos`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if bos:
        with_bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.post_processor = with_bos
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def save_world_vocabulary(directory: Path, *tokens: str | bytes) -> Path:
    """A vocabulary of RWKV World: the bytes from id 1 on, and these tokens from id 300 on."""
    listed = dict(enumerate((bytes([byte]) for byte in range(256)), 1)) | dict(enumerate(tokens, 300))
    file = directory / "rwkv_vocab_v20230424.txt"
    file.write_bytes(world_lines(listed).encode())
    return file


def world_lines(tokens: Mapping[int, str | bytes]) -> str:
    """A vocabulary of RWKV World as its file has it."""
    sizes = {i: len(token.encode() if isinstance(token, str) else token) for i, token in tokens.items()}
    return "".join(f"{i} {token!r} {sizes[i]}\n" for i, token in tokens.items())
