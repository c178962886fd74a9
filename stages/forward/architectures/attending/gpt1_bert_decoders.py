"""Decoders whose layers are an encoder's: norms on the sums, or a transform before the head; one row each.

GPT-1 is the decoder BERT was made after; what is BERT's or ModernBERT's stands in encoders.py.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

from dataclasses import replace

from ..families import asks_to_look_ahead
from ..transformer import ConfigReader
from .encoders import BERT, ENCODERS, OF_BERT, OF_MODERNBERT, windows_of_modernbert
from .family import Attends, Windows
from .spellings import KEYS_OF_GPT2, OF_GPT2

__all__ = ["LIKE_ENCODERS"]


def _windows_behind(reader: ConfigReader, *, layers: int) -> Windows:
    """Half of what the encoder sees on both sides, and the query itself is one of them."""
    return windows_of_modernbert(reader, layers, itself=0)


LIKE_ENCODERS: dict[str, Attends] = {
    "openai-gpt": Attends(
        examples="GPT-1",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu",
        mlp="plain",
        places="of sums",
        layout="by part",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gelu_is_tanh=True,
        inner_factor=4,
        has_fixed_inner=True,
        first_position=0,
        has_final_norm=False,
        tied=True,
        max_positions=512,
        aliases={**KEYS_OF_GPT2, "hidden_act": "afn"},
        root="transformer.",
        spelling=replace(
            OF_GPT2,
            embed="transformer.tokens_embed",
            positions="transformer.positions_embed",
            final_norm="",
            unread=("transformer.position_ids",),
        ),
    ),
    "bert-generation": replace(
        BERT,
        examples="BERT for generation",
        token_types=None,
        transform=None,
        spelling=replace(
            OF_BERT,
            head="lm_head.decoder",
            head_bias="lm_head.bias",
            transform=("", ""),
            token_types="",
            unread=("bert.embeddings.position_ids", "lm_head.bias"),
        ),
    ),
    "modernbert-decoder": replace(
        ENCODERS["modernbert"],
        examples="Ettin, its decoders",
        looks_ahead=asks_to_look_ahead,
        layout="separate",
        windows_of=_windows_behind,
        spelling=replace(
            OF_MODERNBERT,
            attention_in="",
            transform=("lm_head.dense", "lm_head.norm"),
        ),
    ),
}
"""model_type -> row."""
