"""How checkpoints of several families name their tensors.

Border: names; never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from ..layer_tensors import LLAMA, Spelling

__all__ = ["KEYS_OF_GPT2", "OF_GLM", "OF_GLM4", "OF_GPT2", "OF_GRANITE"]

OF_GLM = ("gate_up_proj", "down_proj")

"""Gate and up projection as one, and the down projection."""
OF_GLM4 = replace(
    LLAMA,
    ln1_post="post_self_attn_layernorm",
    ln2="post_attention_layernorm",
    ln2_post="post_mlp_layernorm",
)
OF_GRANITE = replace(
    LLAMA,
    mlp_parts=("input_linear", "output_linear"),
    experts="block_sparse_moe.",
    router="router.layer",
    expert_parts=("input_linear", "output_linear"),
    shared="shared_mlp.",
)
OF_GPT2 = Spelling(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    ln1="ln_1",
    ln2="ln_2",
    attention="attn.",
    attention_in="c_attn",
    attention_out="c_proj",
    mlp="mlp.",
    mlp_parts=("c_fc", "c_proj"),
    is_transposed=True,
)
KEYS_OF_GPT2 = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""Their names for keys of a config."""
