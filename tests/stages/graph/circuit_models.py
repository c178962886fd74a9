"""Random models in files that mizarr and circuit-tracer's stack both read, and circuit-tracer on them.

circuit-tracer 0.5.0 knows models by their hub names only, so its model is built from an explicit
TransformerLens configuration with the weights of the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 12,
        "sliding_window": 128,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
}
CONVERTERS = {
    "llama": "convert_llama_weights",
    "gemma2": "convert_gemma_weights",
    "qwen2": "convert_qwen2_weights",
    "qwen3": "convert_qwen3_weights",
}
"""transformer-lens' own, by family."""


def save_model(folder: Path, family: str, seed: int, **sizes: int) -> Path:
    """Write config, weights and a tokenizer of a random model of a family of OWN; returns the folder."""
    from mizarr.stages.forward.architectures.known import from_hf_config
    from mizarr.stages.forward.networks.weights import expected_tensors

    from ..forward.random_models import save_tokenizer

    described = {
        "model_type": family,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SIZES,
        **OWN[family],
        **sizes,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described))
    config = from_hf_config(described)
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            # Gains of norms lie about 1, which Gemma adds itself; biases about 0.
            low, high = (-0.4, 0.4) if family == "gemma2" or name.endswith("bias") else (0.6, 1.4)
            tensors[name] = torch.rand(shape, generator=rng) * (high - low) + low
            continue
        scale = 1.5 / shape[1] ** 0.5
        if "embed_tokens" in name:
            scale = 1.0 if family != "gemma2" else 3 / shape[1] ** 0.5
        elif "lm_head" in name:
            scale = 3 / shape[1] ** 0.5
        tensors[name] = torch.randn(shape, generator=rng) * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def tracer(folder: Path, transcoders: Path) -> Any:
    """circuit-tracer's replacement model of these files, checked against transformers."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import (
        TransformerLensReplacementModel,
    )
    from transformer_lens.pretrained import weight_conversions
    from transformers import AutoModelForCausalLM, AutoTokenizer

    described = json.loads((folder / "config.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = _lens_config(folder, described)
    convert = getattr(weight_conversions, CONVERTERS[described["model_type"]])
    state = {name: value.detach().clone() for name, value in convert(reference, config).items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = TransformerLensReplacementModel(config, tokenizer, move_to_device=False)
    model.load_and_process_state_dict(
        state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    model.eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert (model(ids, prepend_bos=False) - reference(ids).logits).abs().max() < 2e-3
    model._configure_replacement_model(_loaded(transcoders, described["num_hidden_layers"]))
    return model


def _lens_config(folder: Path, described: dict[str, Any]) -> Any:
    from transformer_lens import HookedTransformerConfig

    layers, heads, width = (
        described[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim")
    )
    options: dict[str, Any] = {
        "n_layers": layers,
        "d_model": described["hidden_size"],
        "n_ctx": described["max_position_embeddings"],
        "d_head": width,
        "n_heads": heads,
        "n_key_value_heads": described["num_key_value_heads"],
        "d_mlp": described["intermediate_size"],
        "d_vocab": described["vocab_size"],
        "d_vocab_out": described["vocab_size"],
        "gated_mlp": True,
        "final_rms": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": width,
        "rotary_base": 10000.0,
        "rotary_adjacent_pairs": False,
        "attention_dir": "causal",
        "dtype": torch.float32,
        "device": "cpu",
        "model_name": f"tiny-{described['model_type']}",
        "tokenizer_name": str(folder),
        "default_prepend_bos": True,
        "init_weights": False,
        "use_attn_scale": True,
        "attn_scale": described.get("query_pre_attn_scalar", width) ** 0.5,
        "normalization_type": "RMS",
        "eps": described["rms_norm_eps"],
        "original_architecture": described["architectures"][0],
        "act_fn": "silu",
    }
    if described["model_type"] == "qwen3":
        options["use_qk_norm"] = True
    if described["model_type"] == "gemma2":
        options |= {
            "act_fn": "gelu_pytorch_tanh",
            "window_size": described["sliding_window"],
            "use_local_attn": True,
            "attn_types": (["local", "global"] * layers)[:layers],
            "attn_scores_soft_cap": described["attn_logit_softcapping"],
            "output_logits_soft_cap": described["final_logit_softcapping"],
            "use_normalization_before_and_after": True,
        }
    return HookedTransformerConfig(**options)


def _loaded(folder: Path, layers: int) -> Any:
    """Transcoders as circuit-tracer loads them."""
    from circuit_tracer.transcoder.activation_functions import TopK
    from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
    from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set

    lines = (line.split(": ", 1) for line in (folder / "config.yaml").read_text().splitlines())
    said = dict(lines)
    options = {
        "feature_input_hook": said["feature_input_hook"],
        "feature_output_hook": said["feature_output_hook"],
        "scan": said["scan"],
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "lazy_encoder": False,
    }
    if said["model_kind"] == "cross_layer_transcoder":
        return load_clt(str(folder), lazy_decoder=True, **options)
    files = {layer: str(folder / f"layer_{layer}.safetensors") for layer in range(layers)}
    found = load_transcoder_set(files, lazy_decoder=False, **options)
    if said.get("activation") == "topk":  # the wheel has the activation, but does not read the setting
        for layer in range(layers):
            found.transcoders[layer].activation_function = TopK(int(said["k"]))
    return found
