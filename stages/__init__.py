"""The science: labelled arrays in, labelled arrays out. This table is the registry; a stage loads when it is
named.

    from mizarr.stages import find
    print(find("logit_lens").describe())

A stage is a plain function with a declaration, in the module named after its subject; `forward/` holds the
models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..pipeline import Stage

__all__ = ["STAGES", "find"]

# Form of a stage -> the module that declares it, and the stage's name there where that is another.
STAGES = {
    "moments": ".geometry.pca",
    "principal_components": ".geometry.pca",
    "scree": ".geometry.pca",
    "randomized_components": ".geometry.randomized_pca",
    "layer_cosine": ".geometry.similarity",
    "layer_cka": ".geometry.similarity",
    "token_statistics": ".corpus.token_statistics",
    "dimension_sums": ".corpus.token_statistics",
    "outlier_dimensions": ".corpus.token_statistics",
    "side_sums": ".geometry.directions",
    "contrastive_direction": ".geometry.directions",
    "projection_scores": ".geometry.directions",
    "logit_lens": ".logits.lens",
    "count_sums": ".geometry.character_count",
    "count_geometry": ".geometry.character_count",
    "decodability": ".geometry.character_count",
    "attention_flow": ".attention.flow",
    "head_scores": ".attention.head_detection",
    "pattern_scores": ".attention.head_detection",
    "head_statistics": ".attention.statistics",
    "layer_scan": ".attention.layer_scan",
    "probe": ".geometry.probe",
    "contrasted_tokens": ".logits.attribution",
    "component_attribution": ".logits.attribution",
    "head_attribution": ".logits.attribution_units",
    "head_attribution_post_norm": ".logits.attribution_units head_attribution",
    "neuron_attribution": ".logits.attribution_units",
    "neuron_attribution_post_norm": ".logits.attribution_units neuron_attribution",
    "encode_features": ".features.corpus.encode",
    "encode_head_features": ".features.corpus.encode encode_features",
    "encode_neuron_features": ".features.corpus.encode encode_features",
    "encode_embedding_features": ".features.corpus.encode encode_features",
    "feature_statistics": ".features.corpus.statistics",
    "top_examples": ".features.corpus.examples",
    "pruned_graph": ".graph.pruning",
    "logit_effects": ".graph.logit_effects",
}


def find(name: str) -> Stage:
    """The stage, or the form of one, of this name; StageError for an unknown one, with the nearest name."""
    from ..store.errors import StageError, nearest

    if name not in STAGES:
        near = nearest(name, STAGES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(STAGES)}"
        raise StageError(f"no stage {name!r}; {hint}")
    module, _, declared = STAGES[name].partition(" ")
    stage: Stage = getattr(importlib.import_module(module, __name__), declared or name)
    return stage.form(name)
