"""Masked-diffusion language models: decoders whose positions see all others, trained to fill in masks.

Nie et al., LLaDA, 2025; Ye et al., Dream, 2025. Keys and names of tensors are those of their code on the hub,
which transformers does not hold.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

from dataclasses import replace

from ..layer_tensors import LLAMA
from .encoders import always
from .family import Attends

__all__ = ["DIFFUSION"]

DIFFUSION: dict[str, Attends] = {
    "Dream": Attends(
        examples="Dream 7B",
        looks_ahead=always,
        qkv_bias=True,
        max_positions=131072,
        never=("use_mrope", "use_sliding_window"),
    ),
    "llada": Attends(
        examples="LLaDA 8B",
        looks_ahead=always,
        eps=1e-5,
        qkv_bias="include_qkv_bias",
        max_positions=4096,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "mlp_hidden_size",
            "max_position_embeddings": "max_sequence_length",
            "vocab_size": "embedding_size",
            "hidden_act": "activation_type",
            "tie_word_embeddings": "weight_tying",
        },
        never=(
            *("alibi", "input_emb_norm", "attention_layer_norm", "scale_logits", "include_bias"),
            *("bias_for_layer_norm", "clip_qkv", "multi_query_attention"),
        ),
        always={"block_type": "llama", "layer_norm_type": "rms", "rope": True},
        spelling=replace(
            LLAMA,
            embed="model.transformer.wte",
            head="model.transformer.ff_out",
            final_norm="model.transformer.ln_f",
            layer="model.transformer.blocks.{}.",
            ln1="attn_norm",
            ln2="ff_norm",
            attention="",
            attention_out="attn_out",
            mlp="",
            mlp_parts=("ff_proj", "up_proj", "ff_out"),
        ),
    ),
}
"""model_type -> row."""
