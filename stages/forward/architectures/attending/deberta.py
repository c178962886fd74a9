"""DeBERTa: scores by content and by distance.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..layer_tensors import Spelling
from ..mixers import RelativeSpec
from ..transformer import ConfigReader
from . import builders as build
from .bert import NEVER, OF_BERT, bert_family, bert_like, of_bert
from .builders import TensorShapes

NEVER_IN_DEBERTA = (*NEVER, "attention_head_size", "z_steps")


def _terms(config: ConfigReader) -> list[str]:
    """Of scores besides content: c2p, p2c; older configs list them in one string."""
    told = config.raw.get("pos_att_type") or []
    terms = [part.strip() for part in told.lower().split("|")] if isinstance(told, str) else list(told)
    if not set(terms) <= {"c2p", "p2c"} or len(set(terms)) < len(terms):
        raise ConfigError(
            f"{config.source}: expected pos_att_type of c2p and p2c, each once, found {told!r}; this model "
            "cannot run here"
        )
    return terms


def _relative(config: ConfigReader, *, is_first: bool) -> RelativeSpec | None:
    """Disentangled attention, by distances that share rows where there are buckets of them. The first DeBERTa
    has no buckets, no norm, and maps of its own."""
    terms = _terms(config)
    if not config.flag("relative_attention", False) or not terms:
        return None
    farthest = config.integer("max_relative_positions", -1, least=-1)
    farthest = farthest if farthest > 0 else config.integer("max_position_embeddings", 512)
    named = {"c2p": "content to position", "p2c": "position to content"}
    told: tuple[Any, ...] = tuple(words for name, words in named.items() if name in terms)
    if is_first:
        return RelativeSpec(2 * farthest, farthest, farthest, told, has_key_bias=False)
    buckets = config.integer("position_buckets", -1, least=-1)
    norms = config.text("norm_rel_ebd", "none").lower().split("|")
    has_norm = "layer_norm" in map(str.strip, norms)
    return RelativeSpec(
        2 * (buckets if buckets > 0 else farthest),
        buckets // 2 if buckets > 0 else farthest,
        farthest,
        told,
        shares_maps=config.flag("share_att_key", False),
        norm_eps=config.number("layer_norm_eps", 1e-7) if has_norm else None,
    )


def _spelling(config: ConfigReader, shapes: TensorShapes) -> Spelling:
    """The first head's names, or those of version 3, which always unembeds by the embedding. Its files do not
    say that they have it; the reference then draws a head at random."""
    bert = of_bert("deberta.")
    first = replace(
        bert,
        attention_parts=("self.query_proj", "self.key_proj", "self.value_proj"),
        encoder=replace(
            bert.encoder,
            relative="deberta.encoder.rel_embeddings",
            relative_norm="deberta.encoder.LayerNorm",
            relative_parts=("self.pos_query_proj", "self.pos_key_proj"),
        ),
        unread=(
            *OF_BERT.unread,
            "deberta.embeddings.position_embeddings.weight",
            "deberta.embeddings.position_ids",
            # What version 3 tells replaced tokens by.
            *(
                f"mask_predictions.{part}.{end}"
                for part in ("dense", "LayerNorm", "classifier")
                for end in ("weight", "bias")
            ),
        ),
    )
    head = "lm_predictions.lm_head"
    if config.flag("legacy", f"{head}.dense.weight" not in shapes):
        return first
    if not config.flag("tie_word_embeddings", True):
        raise ConfigError(
            f"{config.source}: expected tie_word_embeddings to be true where legacy is false, as such a "
            "model unembeds by its embedding, found false; correct the file"
        )
    return replace(
        first,
        head=head,
        encoder=replace(
            first.encoder, head_bias=f"{head}.bias", transform=(f"{head}.dense", f"{head}.LayerNorm")
        ),
    )


def _deberta(
    config: ConfigReader,
    shapes: TensorShapes,
    spelling: Spelling,
    relative: RelativeSpec | None,
    **heads: Any,
) -> ComposedArchitecture:
    """Scores are scaled by the width of heads and how many terms they may have."""
    head_dim = build.attention(config).head_dim
    scale = 1 / math.sqrt(head_dim * (1 + len(set(_terms(config)))))
    has_table = config.flag("position_biased_input", True)
    return bert_like(
        config,
        shapes,
        spelling,
        eps=config.number("layer_norm_eps", 1e-7),
        looks_ahead=True,
        token_types=0,
        positions=None if has_table else {},
        heads={"scale": scale, "relative": relative, **heads},
    )


@bert_family("deberta-v2", "DeBERTa 2 and 3", never=NEVER_IN_DEBERTA, always={"conv_kernel_size": 0})
def deberta_v2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    spelling = _spelling(config, shapes)
    return _deberta(config, shapes, spelling, _relative(config, is_first=False))


@bert_family("deberta", "DeBERTa 1", never=(*NEVER_IN_DEBERTA, "talking_head"), always={})
def deberta(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Queries, keys and values in one tensor; biases of queries and values alone."""
    second = _spelling(config, shapes)
    spelling = replace(
        second,
        attention_in="self.in_proj",
        encoder=replace(
            second.encoder,
            attention_biases=("self.q_bias", "self.v_bias"),
            relative_parts=("self.pos_q_proj", "self.pos_proj"),
        ),
    )
    relative = _relative(config, is_first=True)
    return _deberta(config, shapes, spelling, relative, qkv_bias=False, layout="by head")
