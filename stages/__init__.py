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
    "moments": ".pca",
    "principal_components": ".pca",
    "scree": ".pca",
    "randomized_components": ".randomized_pca",
    "layer_cosine": ".similarity",
    "layer_cka": ".similarity",
    "token_statistics": ".token_statistics",
    "dimension_sums": ".token_statistics",
    "outlier_dimensions": ".token_statistics",
    "side_sums": ".directions",
    "contrastive_direction": ".directions",
    "projection_scores": ".directions",
    "logit_lens": ".lens",
    "count_sums": ".character_count",
    "count_geometry": ".character_count",
    "decodability": ".character_count",
    "attention_flow": ".attention",
    "head_scores": ".head_detection",
    "pattern_scores": ".head_detection",
    "head_statistics": ".attention_statistics",
    "layer_scan": ".layer_scan",
    "probe": ".probe",
    "contrasted_tokens": ".attribution",
    "component_attribution": ".attribution",
    "head_attribution": ".attribution_units",
    "head_attribution_post_norm": ".attribution_units head_attribution",
    "neuron_attribution": ".attribution_units",
    "neuron_attribution_post_norm": ".attribution_units neuron_attribution",
    "encode_features": ".features.encode",
    "encode_head_features": ".features.encode encode_features",
    "encode_neuron_features": ".features.encode encode_features",
    "encode_embedding_features": ".features.encode encode_features",
    "feature_statistics": ".features.statistics",
    "top_examples": ".features.examples",
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
