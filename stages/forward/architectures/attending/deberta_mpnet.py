"""Encoders whose scores go by distance, or whose parts are read in part, one row each.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..layer_tensors import Spelling
from ..mixers import RelativeSpec
from ..transformer import ConfigReader
from .encoders import BERT, OF_BERT, ROBERTA, always, of_bert, of_roberta
from .family import TensorShapes

__all__ = ["NEWER_ENCODERS"]


def _relative_of_mpnet(reader: ConfigReader) -> RelativeSpec:
    """T5's, whatever the config says of buckets."""
    reader.read.add("relative_attention_num_buckets")
    return RelativeSpec(32, 8, 128, ("bias",))


def _terms(reader: ConfigReader) -> list[str]:
    """Of DeBERTa's scores besides content: c2p, p2c; older configs list them in one string."""
    told = reader.raw.get("pos_att_type") or []
    reader.read.add("pos_att_type")
    found = [each.strip() for each in told.lower().split("|")] if isinstance(told, str) else list(told)
    if not set(found) <= {"c2p", "p2c"} or len(set(found)) < len(found):
        raise ConfigError(
            f"{reader.source}: expected pos_att_type of c2p and p2c, each once, found {told!r}; this model "
            "cannot run here"
        )
    return found


def _relative_of_deberta(reader: ConfigReader) -> RelativeSpec | None:
    """Disentangled attention, by distances that share rows where there are buckets of them."""
    terms = _terms(reader)
    if not reader.flag("relative_attention", False) or not terms:
        return None
    farthest = reader.integer("max_relative_positions", -1, least=-1)
    farthest = farthest if farthest > 0 else reader.integer("max_position_embeddings", 512)
    buckets = reader.integer("position_buckets", -1, least=-1)
    norms = reader.text("norm_rel_ebd", "none").lower().split("|")
    named = {"c2p": "content to position", "p2c": "position to content"}
    return RelativeSpec(
        2 * (buckets if buckets > 0 else farthest),
        buckets // 2 if buckets > 0 else farthest,
        farthest,
        tuple(told for name, told in named.items() if name in terms),  # type: ignore[misc]
        shares_maps=reader.flag("share_att_key", False),
        norm_eps=reader.number("layer_norm_eps", 1e-7) if "layer_norm" in map(str.strip, norms) else None,
    )


def _relative_of_first(reader: ConfigReader) -> RelativeSpec | None:
    """The same in the first DeBERTa, which has no buckets, and maps of its own."""
    told = {key: value for key, value in reader.raw.items() if key not in _LATER}
    found = _relative_of_deberta(ConfigReader(told, reader.source))
    reader.read |= {"relative_attention", "max_relative_positions"}
    return found and replace(found, has_key_bias=False)


_LATER = ("position_buckets", "norm_rel_ebd", "share_att_key")
"""Keys that the first DeBERTa does not read."""


def _scale_of_deberta(reader: ConfigReader, layer: int, head_dim: int) -> float:
    """By the width of heads and how many terms a score may have."""
    return 1 / math.sqrt(head_dim * (1 + len(set(_terms(reader)))))


def _spelled_by_deberta(reader: ConfigReader, shapes: TensorShapes) -> Spelling:
    """The first head's names, or those of version 3, which always unembeds by the embedding. Its files do not
    say that they have it; the reference then draws a head at random."""
    found = replace(
        of_bert("deberta."),
        attention_parts=("self.query_proj", "self.key_proj", "self.value_proj"),
        relative="deberta.encoder.rel_embeddings",
        relative_norm="deberta.encoder.LayerNorm",
        relative_parts=("self.pos_query_proj", "self.pos_key_proj"),
        unread=(
            *OF_BERT.unread,
            "deberta.embeddings.position_embeddings.weight",
            "deberta.embeddings.position_ids",
            *(f"mask_predictions.{part}.{end}" for part in _PREDICTED for end in ("weight", "bias")),
        ),
    )
    head = "lm_predictions.lm_head"
    if reader.flag("legacy", f"{head}.dense.weight" not in shapes):
        return found
    if not reader.flag("tie_word_embeddings", True):
        raise ConfigError(
            f"{reader.source}: expected tie_word_embeddings to be true where legacy is false, as such a "
            "model unembeds by its embedding, found false; correct the file"
        )
    return replace(
        found, head=head, head_bias=f"{head}.bias", transform=(f"{head}.dense", f"{head}.LayerNorm")
    )


def _spelled_by_first(reader: ConfigReader, shapes: TensorShapes) -> Spelling:
    """The same, with queries, keys and values as one tensor."""
    return replace(
        _spelled_by_deberta(reader, shapes),
        attention_in="self.in_proj",
        attention_biases=("self.q_bias", "self.v_bias"),
        relative_parts=("self.pos_q_proj", "self.pos_proj"),
    )


_PREDICTED = ("dense", "LayerNorm", "classifier")
"""Parts of what version 3 tells replaced tokens by."""

NEWER_ENCODERS = {
    "mpnet": replace(
        ROBERTA,
        examples="MPNet",
        looks_ahead=always,
        positions_behind_padding=False,
        first_position=2,
        rows_hold_padding=True,
        token_types=None,
        relative=_relative_of_mpnet,
        always={"pad_token_id": 1},
        spelling=replace(
            of_roberta("mpnet."),
            attention="attention.attn.",
            attention_parts=("q", "k", "v"),
            attention_out="o",
            relative="mpnet.encoder.relative_attention_bias",
            ln1="attention.LayerNorm",
            token_types="",
        ),
    ),
    "luke": replace(
        ROBERTA,
        examples="LUKE, its words",
        looks_ahead=always,
        tied=False,
        is_never_tied=True,
        spelling=replace(
            of_roberta("luke."),
            unread=(
                *of_roberta("luke.").unread,
                "luke.entity_embeddings.entity_embeddings.weight",
                "luke.entity_embeddings.entity_embedding_dense.weight",
                "luke.entity_embeddings.position_embeddings.weight",
                "luke.entity_embeddings.token_type_embeddings.weight",
                "luke.entity_embeddings.LayerNorm.weight",
                "luke.entity_embeddings.LayerNorm.bias",
                "entity_predictions.bias",
                "entity_predictions.decoder.weight",
                "entity_predictions.transform.dense.weight",
                "entity_predictions.transform.dense.bias",
                "entity_predictions.transform.LayerNorm.weight",
                "entity_predictions.transform.LayerNorm.bias",
                *(
                    f"luke.encoder.layer.{{}}.attention.self.{asked}_query.{end}"
                    for asked in ("w2e", "e2w", "e2e")
                    for end in ("weight", "bias")
                ),
            ),
        ),
    ),
    "squeezebert": replace(
        BERT,
        examples="SqueezeBERT",
        looks_ahead=always,
        groups=(
            *("q_groups", "k_groups", "v_groups", "post_attention_groups"),
            *("intermediate_groups", "output_groups"),
        ),
        never=BERT.never[:-1],
        # Norms in layers have this one whatever the config says.
        always={**BERT.always, "layer_norm_eps": 1e-12},
        spelling=replace(
            of_bert("transformer."),
            layer="transformer.encoder.layers.{}.",
            attention="",
            attention_parts=("attention.query", "attention.key", "attention.value"),
            attention_out="post_attention.conv1d",
            ln1="post_attention.layernorm",
            ln2="output.layernorm",
            mlp_parts=("intermediate.conv1d", "output.conv1d"),
        ),
    ),
    "deberta-v2": replace(
        BERT,
        examples="DeBERTa 2 and 3",
        eps=1e-7,
        looks_ahead=always,
        token_types=("type_vocab_size", 0),
        position_key=("position_biased_input", True),
        rope_of=lambda reader, family, head_dim: None,
        relative=_relative_of_deberta,
        scale_of=_scale_of_deberta,
        never=(*BERT.never, "attention_head_size", "z_steps"),
        always={"conv_kernel_size": 0},
        spelling=_spelled_by_deberta,
    ),
}
"""model_type -> row."""
NEWER_ENCODERS["deberta"] = replace(
    NEWER_ENCODERS["deberta-v2"],
    examples="DeBERTa 1",
    layout="by head",
    qkv_bias=False,
    words=("biases of queries and values",),
    relative=_relative_of_first,
    never=(*BERT.never, "attention_head_size", "z_steps", "talking_head"),
    always={},
    spelling=_spelled_by_first,
)
