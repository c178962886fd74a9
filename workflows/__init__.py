"""Workflows: questions about a model, answered by graphs of stages. Each is imported when it is used.

mizarr.compute("logit_lens", store="activations", prompts=["The capital of France is"]).render(console)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from ..store import Store
    from .workflow import Workflow

__all__ = ["WORKFLOWS", "build", "compute", "kind_of"]

WORKFLOWS = {
    "logit_lens": ".readout.logit_lens:LogitLens",
    "jacobian_lens": ".readout.jacobian_lens:JacobianLens",
    "logit_attribution": ".readout.logit_attribution:LogitAttribution",
    "generate": ".writing.generate:Generate",
    "character_count_helix": ".readout.character_count_helix:CharacterCountHelix",
    "activation_patching": ".causal.activation_patching:ActivationPatchingTrace",
    "attribution_patching": ".gradients.attribution_patching:AttributionPatchingTrace",
    "feature_attribution": ".gradients.feature_attribution:FeatureAttributionTrace",
    "integrated_gradients": ".gradients.integrated_gradients:IntegratedGradientsTrace",
    "circuit_discovery": ".circuits.discovery:CircuitDiscovery",
    "circuit_evaluation": ".circuits.evaluation:CircuitEvaluation",
    "path_patching": ".circuits.paths:PathPatchingTrace",
    "causal_tracing": ".causal.causal_tracing:CausalTrace",
    "ablation": ".causal.ablation:AblationOfEach",
    "counterfact_patching": ".causal.counterfact_patching:CounterFactPatches",
    "factual_routing": ".causal.factual_routing:Routing",
    "attention_knockout": ".causal.attention_knockout:AttentionKnockout",
    "attention_patterns": ".attention.attention_patterns:AttentionPatterns",
    "head_detection": ".attention.head_detection:HeadDetection",
    "layer_scan": ".attention.layer_scan:LayerScan",
    "patchscopes": ".causal.patchscopes:PatchscopesWorkflow",
    "expert_routing": ".causal.expert_routing:ExpertRouting",
    "probe": ".readout.probe:Probe",
    "monitor": ".readout.monitor:Monitor",
    "inspect_weights": ".weights.inspect_weights:InspectWeights",
    "ov_qk": ".weights.ov_qk:OvQk",
    "composition": ".weights.composition:Composition",
    "evaluate": ".evaluation.evaluate:Evaluate",
    "steering": ".steering.steering:Steering",
    "steering_dose_response": ".steering.steering_dose_response:SteeringDoseResponse",
    "steering_convergence": ".steering.steering_convergence:PushedStatesCases",
    "recurrent_feedback": ".recurrent.recurrent_feedback:RecurrentFeedback",
    "rwkv_inference": ".recurrent.rwkv_inference:RwkvInference",
    "state_patching": ".recurrent.state_patching:StatePatching",
    "token_positions": ".writing.token_positions:TokenPositions",
    "planning_in_poems": ".feature_exchange.planning_in_poems:PlanningInPoems",
    "couplet_planning": ".planning.couplets:CoupletPlanning",
    "planning_pairs": ".feature_exchange.planning_pairs:PlanningPairs",
    "attention_routing": ".feature_exchange.attention_routing:AttentionRouting",
    "correction_test": ".feature_exchange.correction_test:CorrectionTest",
    "sae_features": ".features.sae_features:SaeFeatures",
    "feature_pages": ".features.feature_pages:FeaturePages",
    "clt_probe": ".features.clt_probe:CltProbe",
    "clt_vs_plt": ".feature_exchange.clt_vs_plt:CltVsPlt",
    "attribution_graph": ".features.attribution_graph:AttributionGraphs",
    "stoicheia_inference": ".algzoo.inference:StoicheiaInference",
    "stoicheia_analysis": ".algzoo.analysis:StoicheiaAnalysis",
    "stoicheia_sweep": ".algzoo.sweep:StoicheiaSweep",
}
"""Name of each workflow -> "module:class" of its implementation; the module is imported when it is first
used."""


def build(
    name: str,
    *,
    trust_layout: bool = False,
    backend: str | None = None,
    adapter: str | Path | None = None,
    **settings: Any,
) -> Workflow:
    """Build a workflow by name without running it: checks the settings and plans its graph of stages, but
    loads no weights.

    Arguments:
        name: name of the workflow.
        trust_layout, backend, adapter: options of the named model, see `Model.from_pretrained`. They become
            part of the setting `model`.
        settings: settings of the workflow, such as `model`. Several values of `revision`, as a list or "a,b",
            give one workflow over all of them (checkpoints.py).

    Raises:
        ConfigError: an unknown workflow or setting; the message has the nearest name.
    """
    from .checkpoints import Checkpoints, several_revisions
    from .settings import read_settings

    if revisions := several_revisions(settings.get("revision")):
        options: dict[str, Any] = {"trust_layout": trust_layout, "backend": backend, "adapter": adapter}
        workflows = (build(name, **options, **settings | {"revision": r}) for r in revisions)
        return Checkpoints(dict(zip(revisions, workflows, strict=True)))
    kind = kind_of(name)
    model: Any = settings.get("model")
    if isinstance(model, Path):
        settings["model"] = model = str(model)
    # By attribute, as importing the class of loaded models would import torch.
    loaded = model if hasattr(model, "network") else None
    if loaded is not None:
        from ..stages.forward.models.reference import ModelRef

        names = ("revision", "dtype", "device")
        options = {name: settings[name] for name in names if settings.get(name) is not None}
        # Raises ConfigError for options that do not fit the loaded model.
        ModelRef(loaded, **options, trust_layout=trust_layout, backend=backend, adapter=adapter)
        settings["model"] = loaded.name
    elif trust_layout or backend is not None or adapter is not None:
        settings["model"] = _named(model, settings.get("revision"), trust_layout, backend, adapter)
    workflow: Workflow = kind(read_settings(kind.settings_type, name, settings), loaded)
    return workflow


def kind_of(name: str) -> type[Workflow]:
    """Class that implements a workflow. Raises ConfigError for an unknown name, with the nearest one."""
    if name not in WORKFLOWS:
        near = nearest(name, WORKFLOWS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(WORKFLOWS)}"
        raise ConfigError(f"no workflow {name!r}; {hint}")
    module, _, kind = WORKFLOWS[name].partition(":")
    workflow: type[Workflow] = getattr(importlib.import_module(module, __name__), kind)
    return workflow


def _named(
    model: str | None,
    revision: str | None,
    trust_layout: bool,
    backend: str | None,
    adapter: str | Path | None,
) -> str:
    """Name of a model that encodes its loading options (trust_layout, backend, adapter), for the setting
    `model`."""
    from ..stages.forward.models.reference import ModelRef

    if model is None:
        option = "trust_layout" if trust_layout else "adapter" if backend is None else "backend"
        raise ConfigError(f"expected a model together with {option}, found none; name it: model=…")
    reference = ModelRef(
        model, revision=revision, trust_layout=trust_layout, backend=backend, adapter=adapter
    )
    return reference.files().name


def compute(
    name: str,
    *,
    store: Store | str | Path,
    cluster: str | None = None,
    workers: int = 0,
    threads: int | None = None,
    memory: int | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Workflow:
    """Build a workflow, compute the results that are not stored yet, and return it with open results.

    Arguments:
        name: name of the workflow.
        store: a store, or its path or address.
        cluster: address of a Dask scheduler; None for threads of this process.
        workers: number of worker processes on this machine; 0 for none (see `pipeline.run`).
        threads: number of threads; see `pipeline.run`.
        memory: memory limit in bytes; see `pipeline.run`.
        quiet: whether to hide progress.
        settings: settings of the workflow, trust_layout, backend and adapter; see `build`.
    """
    from ..store.store import requested_store

    workflow = build(name, **settings)  # first, so that a wrong setting creates no store
    options = {"cluster": cluster, "workers": workers, "threads": threads, "memory": memory, "quiet": quiet}
    if not isinstance(store, (str, Path)):
        return workflow.run(store, **options)
    with requested_store(store) as opened:
        return workflow.run(opened, **options)
