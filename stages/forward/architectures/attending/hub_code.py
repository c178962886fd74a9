"""Families whose code came with their checkpoints, and whose shape is plain: one row each.

Decoders like Llama's under names of their own, some tensors laid together. Border: never imports torch. How a
row is read is told in reading.py.
"""

from __future__ import annotations

from dataclasses import replace

from .....store.errors import ConfigError
from ..layer_tensors import LLAMA, Spelling
from ..linear_families import OF_MIXTRAL
from ..transformer import ConfigReader
from .family import Attends, TensorShapes
from .spellings import OF_GPT2

__all__ = ["FROM_HUBS"]

OF_QWEN = replace(OF_GPT2, positions="", mlp_parts=("w2", "w1", "c_proj"), is_transposed=False)
OF_EXAONE = replace(
    OF_QWEN,
    attention="attn.attention.",
    attention_in="",
    attention_out="out_proj",
    mlp_parts=("c_fc_0", "c_fc_1", "c_proj"),
)
OF_INTERNLM = replace(
    LLAMA,
    embed="model.tok_embeddings",
    head="output",
    ln1="attention_norm",
    ln2="ffn_norm",
    attention="attention.",
    attention_in="wqkv",
    attention_out="wo",
    mlp="feed_forward.",
    mlp_parts=OF_MIXTRAL,
)


def _of_baichuan(reader: ConfigReader, shapes: TensorShapes) -> Spelling:
    """Of the 7B of the first generation. The 13B has ALiBi instead of a rope, and no key for positions; the
    second generation norms the rows of its LM head, and has a key for its loss."""
    kept = "z_loss_weight" not in reader.raw and "max_position_embeddings" in reader.raw
    if not kept:
        raise ConfigError(
            f"{reader.source}: expected the config of Baichuan 7B, found that of a 13B or of Baichuan 2, "
            "which is not followed; this model cannot run here"
        )
    return replace(LLAMA, attention_in="W_pack")


FROM_HUBS: dict[str, Attends] = {
    "baichuan": Attends(
        examples="Baichuan 7B",
        layout="by part",
        spelling=_of_baichuan,
    ),
    "exaone": Attends(
        examples="EXAONE 3 and 3.5",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        max_positions=2048,
        aliases={"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
        spelling=OF_EXAONE,
    ),
    "internlm2": Attends(
        examples="InternLM 2 and 2.5",
        qkv_bias=("bias", True),
        o_bias=("bias", True),
        layout="by head",
        max_positions=2048,
        spelling=OF_INTERNLM,
    ),
    "qwen": Attends(
        examples="Qwen 1",
        eps_key="layer_norm_epsilon",
        qkv_bias=True,
        layout="by part",
        max_positions=8192,
        # Beyond it, queries grow and the rope stretches.
        longest=("seq_length", 8192),
        inner_parts=2,
        always={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
        aliases={"head_dim": "kv_channels", "rope_theta": "rotary_emb_base"},
        spelling=OF_QWEN,
    ),
}
