"""The science: labelled arrays in, labelled arrays out. This table is the registry of stages and experiments;
each loads when it is named. `mizarr stages` prints it.

    from mizarr.stages import find
    print(find("logit_lens").describe())

A stage is a plain function with a declaration; an experiment is declared the same way, and needs runs of a
model. Each is in the module named after its subject; `forward/` holds the models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..pipeline import Stage
    from .forward.experiment import Experiment

__all__ = ["REGISTRY", "find"]

# Experiment, or form of a stage -> the module that declares it, and its name there where that is another.
REGISTRY = {
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
    "activation_patching": ".patching ActivationPatching",
    "patch_table": ".patching PatchTable",
    "causal_tracing": ".tracing CausalTracing",
    "ablation": ".ablation Ablation",
    "counterfact_patching": ".counterfact CounterFactPatching",
    "factual_routing": ".factual_routing FactualRouting",
    "edge_knockout": ".knockout EdgeKnockout",
    "head_knockout": ".knockout HeadKnockout",
    "dose_response": ".steering DoseResponse",
    "contrastive_vectors": ".convergence ContrastiveVectors",
    "steering_convergence": ".convergence SteeringConvergence",
    "continuation": ".continuation Continuation",
    "feature_activity": ".features.activity FeatureActivity",
    "injection_sweep": ".features.sweeps InjectionSweep",
    "ranked_sweep": ".features.ranked RankedSweep",
    "ranked_trace": ".features.ranked RankedTrace",
    "decoder_search": ".features.alignment DecoderSearch",
}


def find(name: str) -> Stage | type[Experiment]:
    """The stage, the form of one, or the experiment of this name; StageError for an unknown one, with the
    nearest name."""
    from ..pipeline import Stage
    from ..store.errors import StageError, nearest

    if name not in REGISTRY:
        near = nearest(name, REGISTRY)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(REGISTRY)}"
        raise StageError(f"no stage or experiment {name!r}; {hint}")
    module, _, declared = REGISTRY[name].partition(" ")
    found: Stage | type[Experiment] = getattr(importlib.import_module(module, __name__), declared or name)
    return found.form(name) if isinstance(found, Stage) else found
