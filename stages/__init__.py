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
    from .forward.runs.experiment import Experiment

__all__ = ["REGISTRY", "find"]

# Experiment, or form of a stage -> the module that declares it, and its name there where that is another.
REGISTRY = {
    "moments": ".geometry.pca",
    "principal_components": ".geometry.pca",
    "scree": ".geometry.pca",
    "randomized_components": ".geometry.randomized_pca",
    "layer_cosine": ".geometry.similarity",
    "layer_cka": ".geometry.similarity",
    "token_statistics": ".corpus.token_statistics",
    "dimension_sums": ".corpus.token_statistics",
    "state_statistics": ".training_data.normalisation",
    "outlier_dimensions": ".corpus.token_statistics",
    "side_sums": ".geometry.directions",
    "contrastive_direction": ".geometry.directions",
    "projection_scores": ".geometry.directions",
    "logit_lens": ".logits.lens",
    "count_sums": ".geometry.character_count",
    "count_geometry": ".geometry.character_count",
    "decodability": ".geometry.character_count",
    "expert_use": ".corpus.expert_use",
    "attention_flow": ".attention.flow",
    "head_scores": ".attention.head_detection",
    "displaced_scores": ".attention.head_detection",
    "pattern_scores": ".attention.head_detection",
    "head_statistics": ".attention.statistics",
    "layer_scan": ".attention.layer_scan",
    "probe": ".geometry.probe",
    "representation_similarity": ".geometry.representations",
    "composition_scores": ".weights.composition",
    "copying_scores": ".weights.copying",
    "position_scores": ".weights.positional",
    "singular_directions": ".weights.singular",
    "singular_directions_of_best": ".weights.singular singular_directions",
    "contrasted_tokens": ".logits.attribution",
    "component_attribution": ".logits.attribution",
    "component_attribution_pre_norm": ".logits.attribution component_attribution",
    "component_attribution_of_mixers": ".logits.attribution component_attribution",
    "head_attribution": ".logits.attribution_units",
    "head_attribution_post_norm": ".logits.attribution_units head_attribution",
    "neuron_attribution": ".logits.attribution_units",
    "neuron_attribution_post_norm": ".logits.attribution_units neuron_attribution",
    "encode_features": ".features.corpus.encode",
    "encode_head_features": ".features.corpus.encode encode_features",
    "encode_neuron_features": ".features.corpus.encode encode_features",
    "encode_embedding_features": ".features.corpus.encode encode_features",
    "encode_crosscoder": ".features.corpus.encode",
    "encode_crosscoder_of_two": ".features.corpus.encode encode_crosscoder",
    "encode_head_crosscoder": ".features.corpus.encode encode_crosscoder",
    "encode_head_crosscoder_of_two": ".features.corpus.encode encode_crosscoder",
    "encode_neuron_crosscoder": ".features.corpus.encode encode_crosscoder",
    "encode_neuron_crosscoder_of_two": ".features.corpus.encode encode_crosscoder",
    "feature_statistics": ".features.corpus.statistics",
    "top_examples": ".features.corpus.examples",
    "feature_intervals": ".features.pages.intervals",
    "example_windows": ".features.pages.windows",
    "feature_partners": ".features.pages.partners",
    "place_norms": ".features.pages.places",
    "decoder_neighbours": ".features.pages.decoders",
    "feature_logits": ".features.pages.logits",
    "pruned_graph": ".graph.pruning",
    "logit_effects": ".graph.logit_effects",
    "activation_patching": ".causal.grids.patching ActivationPatching",
    "donor_patching": ".causal.grids.patching DonorPatching",
    "line_patching": ".causal.grids.line_patching LinePatching",
    "patch_table": ".causal.grids.patching PatchTable",
    "attribution_patching": ".causal.attribution.patching AttributionPatching",
    "attribution_check": ".causal.attribution.check AttributionCheck",
    "integrated_gradients": ".causal.attribution.integrated IntegratedGradients",
    **dict.fromkeys(
        ("patch_attribution", "patch_attribution_of_heads", "patch_attribution_of_neurons"),
        ".causal.attribution.scores patch_attribution",
    ),
    **dict.fromkeys(
        ("gradient_attribution", "gradient_attribution_of_heads", "gradient_attribution_of_neurons"),
        ".causal.attribution.scores gradient_attribution",
    ),
    "causal_tracing": ".causal.grids.tracing CausalTracing",
    "ablation": ".causal.grids.ablation Ablation",
    "counterfact_patching": ".causal.counterfact CounterFactPatching",
    "factual_routing": ".causal.factual_routing FactualRouting",
    "edge_knockout": ".causal.knockout EdgeKnockout",
    "head_knockout": ".causal.knockout HeadKnockout",
    "dose_response": ".causal.steering DoseResponse",
    "state_knockout": ".causal.state_writes StateKnockout",
    "state_steering": ".causal.state_writes StateSteering",
    "random_writes": ".causal.state_writes RandomWrites",
    "contrastive_vectors": ".causal.convergence ContrastiveVectors",
    "steering_convergence": ".causal.convergence PushedStates",
    "random_pushes": ".causal.random_pushes RandomPushes",
    "continuation": ".causal.continuation Continuation",
    "denoising": ".causal.denoising Denoising",
    "recurrent_continuation": ".causal.recurrence RecurrentContinuation",
    "corpus_loss": ".evaluation.loss CorpusLoss",
    "layer_orders": ".evaluation.order LayerOrders",
    "factual_recall": ".evaluation.recall FactualRecall",
    "feature_activity": ".features.effects.activity FeatureActivity",
    "feature_trace": ".features.effects.activity FeatureTrace",
    "feature_attribution": ".features.effects.attribution FeatureAttribution",
    "random_attribution": ".features.effects.random_attribution RandomAttribution",
    "feature_vectors": ".features.effects.pushes FeatureVectors",
    "feature_pushes": ".features.effects.pushes FeaturePushes",
    "random_feature_pushes": ".features.effects.pushes RandomFeaturePushes",
    "feature_words": ".features.effects.words",
    "words_of_active": ".features.effects.words",
    "words_of_attribution": ".features.effects.words",
    "words_of_ranked": ".features.effects.words",
    "injection_sweep": ".features.effects.sweeps InjectionSweep",
    "feature_exchanges": ".features.effects.exchanges FeatureExchanges",
    "ranked_exchanges": ".features.effects.ranked RankedExchanges",
    "ranked_sweep": ".features.effects.ranked RankedSweep",
    "ranked_trace": ".features.effects.ranked RankedTrace",
    "decoder_search": ".features.effects.alignment DecoderSearch",
    "edge_scores": ".circuits.scores EdgeScores",
    "edge_effects": ".circuits.scores EdgeEffects",
    "path_patching": ".circuits.paths PathPatching",
    "strongest_paths": ".circuits.strongest_paths StrongestPaths",
    "circuit_values": ".circuits.evaluation CircuitValues",
    "selected_circuits": ".circuits.selected SelectedCircuits",
    "circuit_search": ".circuits.search CircuitSearch",
    "algzoo_samples": ".algzoo.samples",
    "sampled_accuracy": ".algzoo.accuracy",
    "trained_rnn": ".algzoo.training",
    "training_checkpoints": ".algzoo.training",
    "weights_at": ".algzoo.training",
    "standardized_rnn": ".algzoo.analysis.standardized",
    "neuron_ablation": ".algzoo.analysis.ablation",
    "random_ablation": ".algzoo.analysis.ablation",
    "linear_regions": ".algzoo.analysis.regions",
    "neuron_roles": ".algzoo.analysis.probing",
    "gaussian_accuracy": ".algzoo.analysis.cones",
    "surprise_accounting": ".algzoo.analysis.surprise",
    "compute_curve": ".algzoo.analysis.compute_curve",
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
