"""Every field that can change a number changes a digest, or stands below with the reason why it need not.

Found by reflection: a field that is added and not keyed fails here, and so does a class without an example.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr

from mizarr import stages
from mizarr.pipeline import ConstantNode, Stage, run, stage
from mizarr.stages.causal.answer_ranks import AnswerRanks
from mizarr.stages.causal.attribution.check import AttributionCheck
from mizarr.stages.causal.attribution.integrated import IntegratedGradients
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.continuation import Continuation
from mizarr.stages.causal.convergence import ContrastiveVectors, PushedStates
from mizarr.stages.causal.counterfact import CounterFactPatching, FactTokens
from mizarr.stages.causal.denoising import Denoising
from mizarr.stages.causal.draws import AtOnce, Draws
from mizarr.stages.causal.factual_routing import FactualRouting
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.line_patching import LinePatching
from mizarr.stages.causal.grids.patching import ActivationPatching, DonorPatching, PatchTable
from mizarr.stages.causal.grids.patching_metrics import (
    KL,
    Custom,
    LogitDifference,
    LogProbability,
    Metric,
    Probability,
    Rank,
    Recovery,
)
from mizarr.stages.causal.grids.tracing import CausalTracing
from mizarr.stages.causal.knockout import EdgeKnockout, HeadKnockout
from mizarr.stages.causal.patchscopes import Patchscopes
from mizarr.stages.causal.pushes.random_pushes import RandomPushes
from mizarr.stages.causal.pushes.steered_texts import SteeredTexts
from mizarr.stages.causal.recurrence import RecurrentContinuation, Trial
from mizarr.stages.causal.state_writes import RandomWrites, StateKnockout, StateSteering
from mizarr.stages.causal.steering import DoseResponse
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.evaluation import CircuitValues
from mizarr.stages.circuits.pairs import Pair as EdgePair
from mizarr.stages.circuits.paths import PathPatching
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.circuits.search import CircuitSearch
from mizarr.stages.circuits.selected import SelectedCircuits
from mizarr.stages.circuits.strongest_paths import StrongestPaths
from mizarr.stages.circuits.tasks.years import ProbabilityDifference
from mizarr.stages.evaluation.changed import Means
from mizarr.stages.evaluation.loss import CorpusLoss
from mizarr.stages.evaluation.order import LayerOrders
from mizarr.stages.evaluation.recall import FactualRecall
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.activity import FeatureActivity, FeatureTrace
from mizarr.stages.features.effects.alignment import DecoderSearch
from mizarr.stages.features.effects.attribution import FeatureAttribution
from mizarr.stages.features.effects.doses import Dose
from mizarr.stages.features.effects.exchanges import FeatureExchanges
from mizarr.stages.features.effects.pushes import FeaturePushes, FeatureVectors, RandomFeaturePushes
from mizarr.stages.features.effects.random_attribution import RandomAttribution
from mizarr.stages.features.effects.ranked import RankedExchanges, RankedTrace
from mizarr.stages.features.layers.layout import DictionaryLayout
from mizarr.stages.forward.architectures.architecture import FinalNorm, HeadTransform
from mizarr.stages.forward.architectures.composed import ComposedArchitecture, LayerSpec
from mizarr.stages.forward.architectures.layer_tensors import Spelling
from mizarr.stages.forward.architectures.mixers import (
    AttentionSpec,
    MlpSpec,
    QkNorm,
    RelativeSpec,
    TemperatureTuning,
)
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.architectures.transformer import RopeConfig
from mizarr.stages.forward.edges.layout import Layout as GraphLayout
from mizarr.stages.forward.generation.continuations import GenerationSettings
from mizarr.stages.forward.hooks.edge_interventions import Knockout, SetValue, Steer
from mizarr.stages.forward.hooks.interventions import (
    Add,
    AddAtPositions,
    Clamp,
    Intervention,
    Replace,
    Scale,
    Zero,
)
from mizarr.stages.forward.hooks.spec import BoundSpec, Capture, HookSpec
from mizarr.stages.forward.hooks.subspaces import LinearCondition, Subspace
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.passes.branches import Wanted
from mizarr.stages.forward.runs.experiment import Experiment, ExperimentNode
from mizarr.stages.forward.runs.stored_runs import _run_digest, _shape
from mizarr.stages.graph import options as graph_options
from mizarr.stages.graph.rows import selection, targets
from mizarr.stages.lenses.interventions import SetCoordinates
from mizarr.stages.lenses.jacobian import JacobianLensFit
from mizarr.store import open_store
from mizarr.store.digest import canonical_json, digest
from mizarr.store.errors import InterventionError, MizarrError, SourceChanged, StageError
from mizarr.store.keys import ActivationKey, ModelIdentity, ResultKey, RunKey
from tests.stages.forward.random_encoders import save_random_encoder

for _found in pkgutil.walk_packages(stages.__path__, "mizarr.stages."):
    importlib.import_module(_found.name)  # so that subclasses are known

VECTOR = np.arange(4, dtype=np.float32)
MASK = np.eye(3, dtype=bool)
PLACES = {
    "positions": (0,),
    "heads": (1,),
    "neurons": (0,),
    "experts": (0,),
    "within": Subspace(VECTOR),
    "where": LinearCondition(VECTOR),
}
"""Restrictions of an intervention to a part of an activation."""


@dataclass(frozen=True)
class Pairwise:
    """Two sets of fields that differ in one, where this one means something beside certain others only."""

    one: dict[str, Any]
    other: dict[str, Any]


# An example of each class, and another value of each of its fields.
INTERVENTIONS: dict[type[Any], tuple[dict[str, Any], dict[str, Any]]] = {
    Replace: ({"value": VECTOR}, {"value": VECTOR + 1, **PLACES}),
    Add: ({"value": VECTOR}, {"value": VECTOR + 1, "relative_to": "norm", **PLACES}),
    Scale: ({"factor": 2.0}, {"factor": 3.0, **PLACES}),
    Zero: ({}, PLACES),
    Clamp: ({"low": 1.0}, {"low": 0.5, "high": 2.0, **PLACES}),
    SetCoordinates: (
        {"vectors": np.eye(2, 8, dtype=np.float32)},
        {
            "vectors": np.eye(3, 8, dtype=np.float32),
            "coordinates": np.ones(2, np.float32),
            "alpha": 0.5,
            **PLACES,
        },
    ),
    AddAtPositions: ({"vectors": [(1, VECTOR)]}, {"vectors": [(2, VECTOR)], "scale": 2.0}),
    Knockout: (
        {"edges": [(1, 0)]},
        {
            "edges": [(2, 0)],
            "heads": (1,),
            "mask": Pairwise({"edges": (), "mask": MASK}, {"edges": (), "mask": ~MASK}),
        },
    ),
    Steer: ({"edges": [(1, 0)], "factor": 2.0}, {"edges": [(2, 0)], "factor": 3.0, "heads": (1,)}),
    SetValue: ({"edges": [(1, 0)], "value": 0.5}, {"edges": [(2, 0)], "value": 0.25, "heads": (1,)}),
}


def first(logits: np.ndarray) -> float:
    return float(logits[0])


METRICS: dict[type[Any], tuple[dict[str, Any], dict[str, Any]]] = {
    LogitDifference: ({"correct": 1, "wrong": 2}, {"correct": 3, "wrong": 3, "name": "other"}),
    KL: ({}, {"name": "other"}),
    Probability: ({"token": 1}, {"token": 2, "name": "other"}),
    LogProbability: ({"token": 1}, {"token": 2, "name": "other"}),
    Rank: ({"token": 1}, {"token": 2, "name": "other"}),
    ProbabilityDifference: (
        {"right": (1,), "wrong": (2,)},
        {"right": (3,), "wrong": (3,), "name": "other"},
    ),
    Recovery: ({"of": KL()}, {"of": Probability(1), "name": "other"}),
    Custom: (
        {"function": first, "version": 1},
        {
            "version": 2,
            "name": "other",
            "units": "nats",
            "long_name": "another",
            "derivative": np.zeros_like,
        },
    ),
}

GRID = {"kinds": ("resid_post",), "metrics": (KL(),)}
OF_GRID = {
    "kinds": ("z",),
    "metrics": (Probability(1),),
    "over": "layer",
    "layers": (0,),
    "positions": (0,),
    "heads": Pairwise({"kinds": ("z",), "over": "head"}, {"kinds": ("z",), "over": "head", "heads": (0,)}),
    "window": 3,
    "at": -2,
}
NAMED = {"dictionary": "specimen/clt", "features": Dictionary.from_pretrained("specimen/clt").identity}
OF_CHANGED = {
    "hooks": HookSpec().intervene("hook_embed", Zero()),
    "mean": Means(("blocks.0.hook_mlp_out",), ((1, 2, 3),)),
    "dictionary": "specimen/plt",
    "features": "sha256:1",
    "turned": Pairwise(NAMED, {**NAMED, "turned": 1}),
}
OF_NAMED = {"features": "sha256:1"}
WORDS = {"positive": ((1, 2),), "negative": ((3, 4),)}
OF_WORDS = {
    "positive": ((1, 5),),
    "negative": ((3, 5),),
    "positive_positions": (0,),
    "negative_positions": (0,),
    "normalised": True,
}
PUSHED = {**WORDS, "tokens": (1, 2, 3), "layers": (0, 1)}
OF_PUSHED = {**OF_WORDS, "tokens": (1, 2, 4), "position": 0, "strengths": (2.0,), "layers": (0,)}
SAMPLED = {"references": ((1, 2, 3), (4, 5, 6))}
EDGES = {"tokens": (1, 2, 3), "edges": ((2, 0),)}
OF_EDGES = {"tokens": (1, 2, 4), "edges": ((2, 1),), "layers": (0,), "target": (5,), "top_k": 3}
OF_WRITES = {
    "tokens": (1, 2, 4),
    "layers": (0,),
    "target": (5,),
    "top_k": 3,
    "window": 2,
    "heads": (1,),
    "positions": (1,),
}
PAIR = FactTokens((1, 2, 3), (1, 4, 3), (1,), ((1, 1),))
EXPERIMENTS: dict[type[Any], tuple[dict[str, Any], dict[str, Any]]] = {
    ActivationPatching: (
        {**GRID, "clean": (1, 2, 3), "corrupted": (1, 4, 3)},
        {**OF_GRID, "clean": (1, 5, 3), "corrupted": (1, 5, 3), "align": (0, 1, 1)},
    ),
    DonorPatching: (
        {**GRID, "clean": (1, 2, 3), "corrupted": (1, 4, 3), "donor": (5, 6, 7)},
        {
            **OF_GRID,
            "clean": (1, 5, 3),
            "corrupted": (1, 5, 3),
            "align": (0, 1, 1),
            "donor": (5, 6, 8),
        },
    ),
    LinePatching: (
        {
            "prompt": (1, 2, 3),
            "donor": (1, 4, 3),
            "places": ((1,), (1, 2)),
            "groups": ((5,), (6, 7)),
            "read": (1,),
        },
        {
            "prompt": (1, 5, 3),
            "donor": (1, 5, 3),
            "places": ((1,),),
            "groups": ((5,),),
            "read": (),
            "ways": (((1,), ()),),
            "seed": 1,
        },
    ),
    AttributionPatching: (
        {**GRID, "clean": (1, 2, 3), "corrupted": (1, 4, 3)},
        {**OF_GRID, "clean": (1, 5, 3), "corrupted": (1, 5, 3), "attention": "anew", "dropout": True},
    ),
    AttributionCheck: (
        {**GRID, "clean": (1, 2, 3), "corrupted": (1, 4, 3), "verify": 2},
        {
            **OF_GRID,
            "clean": (1, 5, 3),
            "corrupted": (1, 5, 3),
            "verify": 3,
            "seed": 1,
            "attention": "anew",
            "dropout": True,
        },
    ),
    IntegratedGradients: (
        {"prompt": (1, 2, 3), "metric": Probability(1)},
        {
            "prompt": (1, 2, 4),
            "metric": Probability(2),
            "baseline": (1, 4, 3),
            "steps": 4,
            "at": -2,
            "exact": False,
        },
    ),
    CausalTracing: (
        {**GRID, "tokens": (1, 2, 3), "subject": (1,)},
        {**OF_GRID, "tokens": (1, 2, 4), "subject": (0,), "multiplier": 2.0, "samples": 3, "seed": 1},
    ),
    Ablation: (
        {**GRID, "tokens": (1, 2, 3)},
        {
            **OF_GRID,
            "tokens": (1, 2, 4),
            "how": Pairwise({"how": "mean", **SAMPLED}, {"how": "resample", **SAMPLED}),
            "references": Pairwise({"how": "mean", **SAMPLED}, {"how": "mean", "references": ((4, 5, 7),)}),
            "per_position": Pairwise(
                {"how": "mean", **SAMPLED}, {"how": "mean", **SAMPLED, "per_position": True}
            ),
            "samples": Pairwise({"how": "resample", **SAMPLED}, {"how": "resample", **SAMPLED, "samples": 2}),
            "seed": Pairwise({"how": "resample", **SAMPLED}, {"how": "resample", **SAMPLED, "seed": 1}),
        },
    ),
    PatchTable: (
        {"clean": (1, 2), "corrupted": (1, 3), "index": (("resid_post", 0, 1, None),), "metrics": (KL(),)},
        {
            "clean": (1, 4),
            "corrupted": (1, 4),
            "index": (("resid_post", 1, 1, None),),
            "metrics": (Probability(1),),
            "align": (0, 0),
            "at": -2,
        },
    ),
    AnswerRanks: ({"prompts": (((1, 2), 3, -1),)}, {"prompts": (((1, 2), 3, 0),)}),
    RecurrentContinuation: (
        {"groups": ((Trial((1, 2), (3,)),),), "settings": GenerationSettings(max_tokens=2, eos=(1,))},
        {"groups": ((Trial((1, 2), (4,)),),), "settings": GenerationSettings(max_tokens=3, eos=(1,))},
    ),
    Continuation: (
        {"prompts": ((1, 2),), "settings": GenerationSettings(max_tokens=2, eos=())},
        {
            "prompts": ((1, 3),),
            "settings": GenerationSettings(max_tokens=3, eos=()),
            "hooks": HookSpec().intervene("blocks.0.hook_mlp_out", Zero()),
        },
    ),
    Denoising: (
        {"prompts": ((1, 9),), "mask": 9},
        {
            "prompts": ((3, 9),),
            "mask": Pairwise({"prompts": ((2, 9),)}, {"prompts": ((2, 9),), "mask": 2}),
            "steps": 1,
            "order": "position",
            "temperature": 0.5,
            "seed": Pairwise({"order": "random"}, {"order": "random", "seed": 1}),
            "hooks": HookSpec().intervene("blocks.0.hook_mlp_out", Zero()),
        },
    ),
    ContrastiveVectors: (WORDS, OF_WORDS),
    PushedStates: (
        {**WORDS, "tokens": (1, 2, 3)},
        {
            **OF_WORDS,
            "tokens": (1, 2, 4),
            "position": 0,
            "strengths": (2.0,),
            "layers": (0,),
            "target": (5,),
            "top_k": 3,
        },
    ),
    RandomPushes: (
        {**WORDS, "tokens": (1, 2, 3)},
        {**OF_WORDS, "tokens": (1, 2, 4), "position": 0, "strengths": (2.0,), "layers": (0,), "draw": 1},
    ),
    FeatureVectors: (
        {**NAMED, "positive": ((1, 2),), "negative": (), "feature": (0, 1)},
        {
            **OF_NAMED,
            **{name: value for name, value in OF_WORDS.items() if name.startswith(("positive", "norm"))},
            "negative": ((3, 5),),
            "negative_positions": (0,),
            "feature": (0, 2),
        },
    ),
    FeaturePushes: (
        {**NAMED, **PUSHED, "feature": (0, 1)},
        {**OF_NAMED, **OF_PUSHED, "target": (5,), "top_k": 3, "feature": (0, 2)},
    ),
    RandomFeaturePushes: (
        {**NAMED, **PUSHED, "feature": (0, 1)},
        {**OF_NAMED, **OF_PUSHED, "draw": 1, "feature": (0, 2)},
    ),
    JacobianLensFit: (
        {"prompts": ((1, 2, 3, 4), (5, 6, 7, 8)), "skip": 0},
        {
            "prompts": ((1, 2, 3, 4), (5, 6, 7, 9)),
            "layers": (0,),
            "skip": 1,
            "longest": 3,
            "cotangents": 2,
            "seed": Pairwise({"cotangents": 2, "seed": 0}, {"cotangents": 2, "seed": 1}),
            "segment": 1,
        },
    ),
    Patchscopes: (
        {"sources": (((1, 2), -1),), "target": (3, 4)},
        {
            "sources": (((1, 2), 0),),
            "target": (3, 5),
            "placeholder": 0,
            "layers": (0,),
            "target_layers": (1,),
            "words": (7,),
            "max_tokens": 2,
        },
    ),
    SteeredTexts: (
        {"chosen_on": (((1,), (2,), (3,)),), "scored_on": (((1,), (4,), (5,)),)},
        {
            "chosen_on": (((1,), (2,), (4,)),),
            "scored_on": (((1,), (4,), (6,)),),
            "layers": (0,),
            "strengths": (2.0,),
            "method": "pca",
            "draws": 3,
            "seed": 1,
            "max_tokens": 3,
        },
    ),
    CounterFactPatching: ({"pairs": (PAIR,)}, {"pairs": (replace(PAIR, fact=(2,)),), "block_size": 2}),
    FactualRouting: ({"pairs": (PAIR,)}, {"pairs": (replace(PAIR, fact=(2,)),), "block_size": 2}),
    CorpusLoss: ({"prompts": ((1, 2, 3),)}, {"prompts": ((1, 2, 4),), **OF_CHANGED}),
    LayerOrders: (
        {"prompts": ((1, 2, 3),), "orders": ((1, 0, 2, 3, 4, 5),)},
        {"prompts": ((1, 2, 4),), "orders": ((0, 2, 1, 3, 4, 5),), **OF_CHANGED},
    ),
    FactualRecall: (
        {"prompts": ((1, 2, 3),), "targets": (4,)},
        {"prompts": ((1, 2, 4),), "targets": (5,), **OF_CHANGED},
    ),
    FeatureActivity: ({**NAMED, "tokens": (1, 2)}, {**OF_NAMED, "tokens": (1, 3), "zero_positions": 1}),
    FeatureTrace: (
        {**NAMED, "tokens": (1, 2), "chosen": ((0, 1),)},
        {**OF_NAMED, "tokens": (1, 3), "chosen": ((0, 2),)},
    ),
    StateKnockout: ({"tokens": (1, 2, 3)}, OF_WRITES),
    StateSteering: (
        {"tokens": (1, 2, 3), "positions": (0,)},
        {**OF_WRITES, "doses": (0.0, 2.0)},
    ),
    RandomWrites: (
        {"tokens": (1, 2, 3), "positions": (0,)},
        {**OF_WRITES, "draws": 3, "seed": 1},
    ),
    DecoderSearch: (
        {**NAMED, "token": 1},
        {**OF_NAMED, "token": 2, "target": 1, "top_k": 3, "cosine": False},
    ),
    RandomAttribution: (
        {**NAMED, "clean": (1, 2, 3), "corrupted": (1, 4, 3), "metric": Probability(1)},
        {
            **OF_NAMED,
            "clean": (1, 2, 4),
            "corrupted": (1, 4, 5),
            "metric": Probability(2),
            "at": -2,
            "draws": 3,
            "seed": 1,
        },
    ),
    FeatureAttribution: (
        {**NAMED, "clean": (1, 2, 3), "corrupted": (1, 4, 3), "metric": Probability(1)},
        {
            **OF_NAMED,
            "clean": (1, 2, 4),
            "corrupted": (1, 4, 5),
            "metric": Probability(2),
            "at": -2,
            "verify": 3,
            "seed": 1,
        },
    ),
    FeatureExchanges: (
        {
            **NAMED,
            "places": (((1, 2, 3), 1),),
            "exchanges": ((Dose(0, 1),),),
            "strengths": (1.0,),
            "words": (4,),
        },
        {
            **OF_NAMED,
            "places": (((1, 2, 3), 2),),
            "exchanges": ((Dose(0, 1, like="L0:2"),),),
            "strengths": (2.0,),
            "words": (5,),
            "edge": True,
        },
    ),
    RankedExchanges: (
        {**NAMED, "tokens": (1, 2), "word": 3, "target": 1},
        {
            **OF_NAMED,
            "tokens": (1, 4),
            "word": 4,
            "target": 0,
            "over_targets": True,
            "suppress": 2,
            "inject": "ranked",
            "strength": 2.0,
            "words": (5,),
            "positions": (1,),
            "draws": 3,
            "seed": 1,
        },
    ),
    RankedTrace: (
        {**NAMED, "tokens": (1, 2), "word": 3, "target": 1},
        {**OF_NAMED, "tokens": (1, 4), "word": 4, "target": 0, "top_k": 3},
    ),
    EdgeKnockout: (EDGES, {**OF_EDGES, "keeps_self": True, "heads": (1,)}),
    Draws: (
        {"experiments": (EdgeKnockout(**EDGES),)},
        {"experiments": (EdgeKnockout(**EDGES), EdgeKnockout(**{**EDGES, "top_k": 3}))},
    ),
    AtOnce: (
        {"experiments": (EdgeKnockout(**EDGES),)},
        {"experiments": (EdgeKnockout(**EDGES), EdgeKnockout(**{**EDGES, "top_k": 3}))},
    ),
    HeadKnockout: (EDGES, {**OF_EDGES, "keeps_self": True}),
    DoseResponse: (
        EDGES,
        {
            **OF_EDGES,
            "doses": (2.0,),
            "window": 2,
            "heads": (1,),
            "kind": Pairwise({"doses": (0.5,)}, {"doses": (0.5,), "kind": "set_value"}),
        },
    ),
}


OF_GRAPH = GraphLayout.of(ModelSource("specimen").config)
ONE_PAIR = EdgePair((1, 2, 3), (1, 4, 3), LogitDifference(1, 2))
ANOTHER_PAIR = EdgePair((1, 2, 5), (1, 4, 3), LogitDifference(1, 2))
ON_PAIRS = {"pairs": (ONE_PAIR, ANOTHER_PAIR)}
OF_PAIRS = {"pairs": (ANOTHER_PAIR,), "alternative": "zero", "seed": 1}
BY_BUDGET = {"rule": "budget"}
EXPERIMENTS |= {
    EdgeScores: (ON_PAIRS, {**OF_PAIRS, "method": "EAP", "steps": 6, "by_position": True}),
    EdgeEffects: (ON_PAIRS, {**OF_PAIRS, "position": 1}),
    PathPatching: (
        {**ON_PAIRS, "receivers": ("logits",)},
        {
            **OF_PAIRS,
            "receivers": ("m1",),
            "senders": ("a0.h0",),
            "mlps": "held",
            "position": 1,
        },
    ),
    StrongestPaths: (
        {**ON_PAIRS, "chosen_on": (ONE_PAIR, ANOTHER_PAIR)},
        {
            **OF_PAIRS,
            "chosen_on": (ANOTHER_PAIR,),
            "receivers": ("m1",),
            "mlps": "held",
            "strongest": 5,
            "draws": 21,
            "back": 1,
            "position": 1,
        },
    ),
    CircuitValues: (
        {**ON_PAIRS, "circuits": (Circuit.at_random(OF_GRAPH, 5, seed=0),)},
        {**OF_PAIRS, "circuits": (Circuit.at_random(OF_GRAPH, 5, seed=1),)},
    ),
    SelectedCircuits: (
        {**ON_PAIRS, "chosen_on": (ONE_PAIR, ANOTHER_PAIR), "sizes": (5,)},
        {
            **OF_PAIRS,
            "chosen_on": (ANOTHER_PAIR,),
            "sizes": (6,),
            "method": "EAP",
            "steps": 6,
            "selection": "greedy",
            "minimal": True,
            "by_position": True,
        },
    ),
    CircuitSearch: (
        {**ON_PAIRS, "threshold": 0.5},
        {
            **OF_PAIRS,
            "threshold": 0.25,
            "rule": "budget",
            "method": Pairwise(BY_BUDGET, {**BY_BUDGET, "method": "EAP"}),
            "steps": Pairwise(BY_BUDGET, {**BY_BUDGET, "steps": 6}),
        },
    ),
}

NOT_IN_A_KEY = {
    (JacobianLensFit, "batch"): "cotangents of one pass back, which change rounding alone",
    (DictionaryLayout, "modules"): "follows from `read` and `write`, and from files; only checked",
    **{
        (kind, "memory"): "how much is computed at once"
        for kind in (
            EdgeScores,
            EdgeEffects,
            PathPatching,
            StrongestPaths,
            CircuitValues,
            SelectedCircuits,
            CircuitSearch,
        )
    },
    **{(ProbabilityDifference, name): "constant of the class" for name in ("units", "long_name")},
    **{
        (kind, field): "an estimate has but one value of it: others are refused"
        for kind in (AttributionPatching, AttributionCheck)
        for field in ("align", "window")
    },
    (Custom, "function"): "its declared version stands for it, or else the digest of its text",
    (Continuation, "on_token"): "a listener: told what is computed, decides nothing",
    (LogitDifference, "units"): "constant of the class",
    (LogitDifference, "long_name"): "constant of the class",
    (KL, "units"): "constant of the class",
    (KL, "long_name"): "constant of the class",
    (Rank, "units"): "constant of the class",
    (Rank, "long_name"): "constant of the class",
    (Probability, "units"): "constant of the class",
    (Probability, "long_name"): "constant of the class",
    (LogProbability, "units"): "constant of the class",
    (LogProbability, "long_name"): "constant of the class",
    (Recovery, "units"): "constant of the class",
    **{
        (
            kind,
            "dictionary",
        ): "where the dictionary lies; `features` is what it is, and is checked when it is opened"
        for kind in (
            FeatureActivity,
            DecoderSearch,
            FeatureAttribution,
            RandomAttribution,
            FeatureExchanges,
            RankedExchanges,
            RankedTrace,
            FeatureTrace,
            FeatureVectors,
            FeaturePushes,
            RandomFeaturePushes,
            CorpusLoss,
            LayerOrders,
            FactualRecall,
        )
    },
    (
        GenerationSettings,
        "seed",
    ): "nobody draws at temperature 0; above it the seed is in the key (tested below)",
    (DictionaryLayout, "places"): "their hooks and scales are in its settings; names of models are labels",
    (DictionaryLayout, "format"): "which reader found the files: what it read of them is in the other fields",
    (DictionaryLayout, "kind"): "follows from targets, which follow from the files",
    (DictionaryLayout, "layers"): "follows from the files",
    (DictionaryLayout, "targets"): "follows from the files",
    (DictionaryLayout, "n_features"): "follows from the files",
    (DictionaryLayout, "d_in"): "follows from the files",
    (DictionaryLayout, "d_out"): "follows from the files",
    (DictionaryLayout, "model_name"): "for people",
    (DictionaryLayout, "scan"): "for people",
    (DictionaryLayout, "has_skip"): "follows from the files",
    (DictionaryLayout, "zero_positions"): "what is suggested; whoever follows it names it in their own key",
    ("encode", "dictionary"): "where it lies; `features` is what it is, and is checked when it is opened",
    ("encode", "device"): "which device computes is in no key",
}
"""(class, field) -> why another value needs no other digest."""


def cases(table: dict[type[Any], Any]) -> list[Any]:
    """(class, field) of all fields that must be keyed."""
    return [
        pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
        for kind in table
        for field in dataclasses.fields(kind)
        if (kind, field.name) not in NOT_IN_A_KEY
    ]


def changed(kind: type[Any], field: str, table: dict[type[Any], Any]) -> tuple[Any, Any]:
    """An example, and one in which the field is another."""
    given, others = table[kind]
    assert field in others, f"{kind.__name__}.{field}: give another value, or a reason why it is in no key"
    other = others[field]
    if not isinstance(other, Pairwise):
        other = Pairwise({}, {field: other})
    return kind(**{**given, **other.one}), kind(**{**given, **other.other})


def concrete(base: type[Any]) -> Iterator[type[Any]]:
    """Every class of mizarr's that derives from another and is meant to be used."""
    for kind in base.__subclasses__():
        yield from concrete(kind)
        is_ours = kind.__module__.startswith("mizarr.") and not kind.__name__.startswith("_")
        if is_ours and not inspect.isabstract(kind):
            yield kind


def another(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, another(value[-1])) if value else ("x",)
    if dataclasses.is_dataclass(value):
        return replace(value, **{(f := dataclasses.fields(value)[0]).name: another(getattr(value, f.name))})
    return {"x": 1} if isinstance(value, dict) else 7


@pytest.mark.parametrize(
    ("base", "table"),
    [(Intervention, INTERVENTIONS), (Metric, METRICS), (Experiment, EXPERIMENTS)],
    ids=["interventions", "metrics", "experiments"],
)
def test_every_class_has_an_example(base, table):
    assert set(concrete(base)) == set(table)


@pytest.mark.parametrize(("kind", "field"), cases(INTERVENTIONS))
def test_every_field_of_an_intervention_is_in_its_digest(kind, field):
    one, other = changed(kind, field, INTERVENTIONS)
    assert canonical_json(one.canonical()) != canonical_json(other.canonical())
    assert one != other


@pytest.mark.parametrize(("kind", "field"), cases(METRICS))
def test_every_field_of_a_metric_is_in_its_digest(kind, field):
    one, other = changed(kind, field, METRICS)
    assert canonical_json(one.canonical()) != canonical_json(other.canonical())


@pytest.fixture(scope="module")
def specimen() -> ModelSource:
    return ModelSource("specimen")


@pytest.fixture(scope="module")
def recurrent() -> ModelSource:
    return ModelSource("specimen-rwkv")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("bert")
    save_random_encoder(folder, "bert", tokenizer=False)
    return ModelSource(str(folder))


@pytest.mark.parametrize(("kind", "field"), cases(EXPERIMENTS))
def test_every_field_of_an_experiment_is_in_its_key(kind, field, specimen, recurrent, encoder):
    recurrences = dict.fromkeys((StateKnockout, StateSteering, RandomWrites), recurrent)
    model = {**recurrences, Denoising: encoder}.get(kind, specimen)
    one, other = (ExperimentNode(each, model) for each in changed(kind, field, EXPERIMENTS))
    if field == "features" and kind in (FeatureVectors, FeaturePushes, RandomFeaturePushes):
        # Their cells are read from the dictionary, which is never opened under another identity.
        with pytest.raises(SourceChanged, match="expected the dictionary specimen/clt to have the digest"):
            other.key(None)
        return
    assert one.key(None).digest != other.key(None).digest
    cells = [[node.cell_key(cell).digest for cell in node.cells()] for node in (one, other)]
    assert cells[0] != cells[1], "the whole would be made of cells of another experiment"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FactTokens)])
def test_every_field_of_a_pair_is_in_the_key_of_what_reads_it(field, specimen):
    others = {"original": (1, 2, 5), "counterfactual": (1, 4, 5), "fact": (2,), "subject": ((2, 1),)}
    pairs = PAIR, replace(PAIR, **{field: others[field]})
    for kind in (FactualRouting,) if field == "subject" else (FactualRouting, CounterFactPatching):
        one, other = (ExperimentNode(kind(pairs=(pair,)), specimen) for pair in pairs)
        assert one.key(None).digest != other.key(None).digest


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(GenerationSettings)])
def test_every_setting_of_a_generation_is_in_the_key_of_its_continuation(field):
    drawing = GenerationSettings(temperature=1.0, seed=0, eos=(), top_k=4, top_p=0.5)
    others = {"stop": "x", "eos": (1,), "capture_positions": "every", "top_p": 0.25, "cache": True}
    value = others.get(field, another(getattr(drawing, field)))
    one, other = (Continuation(((1,),), each) for each in (drawing, replace(drawing, **{field: value})))
    assert canonical_json(one.params()) != canonical_json(other.params())


def test_which_words_end_a_continuation_is_never_left_to_files():
    with pytest.raises(MizarrError, match="eos"):
        Continuation(((1,),), GenerationSettings(max_tokens=2))


# -- keys, configurations, runs

ATTENTION = AttentionSpec(4, 2, 4, RopeConfig(1e4, 4))
CONFIG = ComposedArchitecture(
    "llama", 16, 32, (LayerSpec((ATTENTION,), MlpSpec(24, "silu")),), Spelling(), 1e-5
)
AXES = [field.name for field in dataclasses.fields(ComposedArchitecture) if field.name != "spelling"]


def with_attention(attention: AttentionSpec) -> ComposedArchitecture:
    return replace(CONFIG, blocks=(replace(CONFIG.blocks[0], mixers=(attention,)),))


def test_how_a_checkpoint_names_its_tensors_is_in_no_digest():
    assert replace(CONFIG, spelling=Spelling(embed="other")).digest == CONFIG.digest


@pytest.mark.parametrize("field", AXES)
def test_every_axis_of_an_architecture_is_in_its_digest(field):
    value = getattr(CONFIG, field)
    others = {
        "blocks": CONFIG.blocks * 2,
        "norm_type": "layer",
        "norm_biases": "none",
        "final_norm": FinalNorm(eps=1e-6),
        "transform": HeadTransform(16, "gelu", 1e-5),
    }
    other = others[field] if field in others else 7 if value is None else another(value)
    assert replace(CONFIG, **{field: other}).digest != CONFIG.digest


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(AttentionSpec)])
def test_every_axis_of_attention_is_in_the_digest(field):
    value = getattr(ATTENTION, field)
    given = {
        "num_attention_heads": 6,
        "num_kv_heads": 4,
        "rope": None,
        "qk_norm": QkNorm("head", 1e-6),
        "layout": "by part",
        "temperature_tuning": TemperatureTuning(0.1, 8),
        "groups": (1, 1, 1, 1),
        "relative": RelativeSpec(8, 2, 4, ("bias",), looks_back=True),
        "alibi_slopes": (0.5,) * 4,
    }.get(field, 7 if value is None else another(value))
    heads = {"num_kv_heads": 4} if field == "alibi_slopes" else {}
    other = with_attention(replace(ATTENTION, **heads, **{field: given}))
    assert other.digest != with_attention(replace(ATTENTION, **heads)).digest


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RopeConfig) if field.compare])
def test_every_axis_of_a_rotary_embedding_is_in_its_digest(field):
    value = getattr(ATTENTION.rope, field)
    other = {"dim": 2, "short_factor": (1.5,), "long_factor": (1.5,)}.get(
        field, 7 if value is None else another(value)
    )
    rope = replace(ATTENTION.rope, **{field: other})
    assert with_attention(replace(ATTENTION, rope=rope)).digest != CONFIG.digest


RUN = RunKey("model", "prompt", "hooks")


@pytest.mark.parametrize(
    ("key", "field"),
    [
        pytest.param(key, field.name, id=f"{type(key).__name__}.{field.name}")
        for key in (
            ModelIdentity("weights", "config", "forward", "float32"),
            RUN,
            ActivationKey(RUN, "resid_post", 1, "float32"),
            ResultKey("stage", 1, {"a": 1}, {"b": "sha256:0"}),
        )
        for field in dataclasses.fields(key)
    ],
)
def test_every_field_of_a_key_is_in_its_digest(key, field):
    assert replace(key, **{field: another(getattr(key, field))}).digest != key.digest


def test_captures_are_no_part_of_which_run_it_is_and_interventions_are():
    point, other = HookPoint.resid_post(0), HookPoint.resid_post(1)
    plain = BoundSpec((Capture(point),))
    assert plain.run_digest == BoundSpec((Capture(other),)).run_digest
    assert plain.digest != BoundSpec((Capture(other),)).digest
    both = ((point, Zero()), (point, Scale(2.0)))
    digests = {BoundSpec((), changes).run_digest for changes in ((), both, both[::-1], both[:1])}
    assert len(digests | {BoundSpec((), ((other, Zero()), (point, Scale(2.0)))).run_digest}) == 5
    cells = {Capture(point).cell, Capture(other).cell, Capture(point, "before").cell}
    assert len(cells) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (1, 2, 4)},
        {"want": None},
        {"want": Logits((-1,), (5,))},
        {"want": Logits((-1, 0))},
        {"spec": BoundSpec((Capture(HookPoint.resid_post(1)),))},
        {"spec": BoundSpec((Capture(HookPoint.resid_post(0), "before"),))},
        {"spec": BoundSpec((Capture(HookPoint.resid_post(0)),), ((HookPoint.z(0), Zero()),))},
    ],
    ids=str,
)
def test_all_that_is_asked_of_a_run_is_in_the_key_of_its_group(change):
    assert {field.name for field in dataclasses.fields(Logits)} == {"positions", "tokens"}
    one = Wanted((1, 2, 3), BoundSpec((Capture(HookPoint.resid_post(0)),)), Logits((-1,)))
    other = replace(one, **change)
    assert [_shape(one), _run_digest("m", one)] != [_shape(other), _run_digest("m", other)]


# -- stages


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(tmp_path_factory.mktemp("store"), durability="process")


def inputs_of(stage: Any, number: float = 1.0) -> dict[str, Any]:
    """An input of the declared dims for each, holding one number."""
    held = {name: tuple(dim.split("|")[0] for dim in dims or ()) for name, dims in stage.inputs.items()}
    return {
        name: xr.DataArray(np.full((1,) * len(dims), number), dims=dims, name=name)
        for name, dims in held.items()
    }


@pytest.mark.parametrize(
    "name", [name for name, found in stages.registry().items() if isinstance(found, Stage)]
)
def test_every_parameter_and_input_of_a_stage_is_in_its_key(name, store):
    stage = stages.find(name)
    params = {key: 0 if value is inspect.Parameter.empty else value for key, value in stage.params.items()}
    held = {each: Held("one") for each in stage.resources}

    def key(**other: Any) -> str:
        given = {**inputs_of(stage), **params, **held, **other}
        return stage.on(**given).key(store).digest

    for param, value in params.items():
        assert key(**{param: another(value)}) != key(), param
    for each in stage.inputs:
        assert key(**{each: inputs_of(stage, 2.0)[each]}) != key(), each
    for each in held:
        assert key(**{each: Held("other")}) != key(), each


@dataclass(frozen=True)
class Held:
    """A resource of a name."""

    name: str

    def identity(self) -> dict[str, Any]:
        return {"resource": self.name}

    def check(self) -> None:
        """It is what it was."""

    def open(self) -> Any:
        raise NotImplementedError


def test_what_an_encoding_reads_and_how_is_in_its_key(store):
    from mizarr.stages.features.corpus.encode import encode_nodes

    clt = Dictionary.from_pretrained("specimen/clt")
    states = xr.Dataset({clt.layout.read: (("layer", "token", "hidden"), np.zeros((2, 1, clt.d_in), "f4"))})
    states = states.assign_coords(layer=[0, 1])
    source = ConstantNode(states)

    def key(dictionary: Any = clt, layer: int = 0, **options: Any) -> str:
        return encode_nodes(dictionary, source, layers=(layer,), **options)[layer].key(store).digest

    sae = Dictionary(clt.files, replace(clt.layout, settings={"k": 1}), clt._open_layer)
    assert len({key(), key(layer=1), key(zero_positions=1), key(sae)}) == 4
    assert key(device="cpu") == key(), NOT_IN_A_KEY["encode", "device"]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DictionaryLayout)])
def test_what_decides_a_dictionary_is_in_its_identity(field):
    clt = Dictionary.from_pretrained("specimen/clt")
    if (DictionaryLayout, field) in NOT_IN_A_KEY:
        return
    others = {
        "files": clt.layout.files[:-1],
        "settings": {"k": 1},
        "read": "resid_pre",
        "write": "resid_post",
    }
    assert field in others, field
    other = Dictionary(clt.files, replace(clt.layout, **{field: others[field]}), clt._open_layer)
    assert other.identity != clt.identity


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(graph_options.GraphOptions)])
def test_every_setting_of_a_graph_is_in_its_key(field):
    one = graph_options.GraphOptions(targets.TargetChoice(), selection.RowSelection(None, 8))
    others = {
        "targets": targets.TargetChoice(tokens=(1,)),
        "selection": selection.RowSelection(4, 8),
        "arithmetic": "float64",
    }
    value = others.get(field, another(getattr(one, field)))
    assert canonical_json(replace(one, **{field: value}).params()) != canonical_json(one.params())


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (1,)},
        {"most": 3},
        {"probability": 0.5},
        {"directions": (targets.Direction("a", 1.0, VECTOR),)},
        {"directions": (targets.Direction("b", 1.0, VECTOR),)},
        {"directions": (targets.Direction("a", 2.0, VECTOR),)},
        {"directions": (targets.Direction("a", 1.0, VECTOR + 1),)},
    ],
    ids=range(7),
)
def test_every_way_to_choose_targets_is_another_choice(change):
    assert {field.name for field in dataclasses.fields(targets.TargetChoice)} == {
        "tokens",
        "directions",
        "most",
        "probability",
    }
    told = {canonical_json(targets.TargetChoice(**each).canonical()) for each in ({}, change)}
    assert len(told) == 2


# -- payloads

PAYLOADS = {
    "torch": lambda: torch.arange(4.0),
    "bfloat16": lambda: torch.arange(4.0).to(torch.bfloat16),
    "numpy": lambda: np.arange(4, dtype=np.float32),
    "float64": lambda: np.arange(4, dtype=np.float64),
    "list": lambda: [0.0, 1.0, 2.0, 3.0],
    "view": lambda: np.arange(8, dtype=np.float32)[::2],
}


def spoil(value: Any) -> None:
    """Write to whatever somebody still holds."""
    if isinstance(value, dict):
        value.clear()
    elif isinstance(value, list) and value and isinstance(value[0], list | tuple | np.ndarray):
        value.append(value[0])
    else:
        value[0] = 9


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("kind", [Replace, Add])
def test_what_is_written_to_a_payload_later_changes_neither_run_nor_key(kind, payload):
    given = PAYLOADS[payload]()
    change, x = kind(given), torch.ones(1, 3, 4)
    key, value = canonical_json(change.canonical()), change.apply(x, HookPoint.resid_post(0))
    spoil(given)
    assert canonical_json(change.canonical()) == key
    assert torch.equal(change.apply(x, HookPoint.resid_post(0)), value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (AddAtPositions, {"vectors": [(1, VECTOR.copy())]}),
        lambda: (AddAtPositions, {"vectors": {1: VECTOR.copy()}}),
        lambda: (Knockout, {"edges": [(1, 0)]}),
        lambda: (Knockout, {"mask": MASK.copy()}),
        lambda: (Knockout, {"edges": ((1, 0),), "heads": [1]}),
        lambda: (Steer, {"factor": 2.0, "edges": [(1, 0)]}),
        lambda: (SetValue, {"value": 0.5, "edges": [(1, 0)]}),
        lambda: (Scale, {"factor": 2.0, "positions": [1]}),
        lambda: (Zero, {"heads": [1]}),
    ],
)
def test_what_is_written_to_a_container_later_changes_no_key(make):
    kind, given = make()
    change = kind(**given)
    key = canonical_json(change.canonical())
    spoil(next(value for value in reversed(given.values()) if hasattr(value, "__setitem__")))
    assert canonical_json(change.canonical()) == key


@pytest.mark.parametrize("change", [Add(VECTOR), Knockout(mask=MASK)], ids=["payload", "mask"])
def test_a_payload_cannot_be_written_to_through_its_intervention(change):
    held = change.value if isinstance(change, Add) else change.mask
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1


def test_a_list_changed_after_a_stage_was_given_it_changes_nothing(store):
    @stage(version=1, inputs={"states": ("token",)}, outputs={"weighed": ("token",)})
    def weighed(states: xr.DataArray, *, weights: list[float]) -> xr.DataArray:
        return (states * weights[0]).rename("weighed")

    states, weights = xr.DataArray([1.0, 2.0], dims="token", name="states"), [3.0]
    node = weighed.on(states=states, weights=weights)
    weights[0] = 5.0
    run(node, store, quiet=True)
    assert node.open(store)["weighed"].values.tolist() == [3.0, 6.0]
    again = weighed.on(states=states, weights=[3.0])
    run(again, store, quiet=True)
    assert again.open(store)["weighed"].values.tolist() == [3.0, 6.0]


# -- classes and functions of users


def test_an_intervention_of_ones_own_needs_a_version_that_is_its_own():
    @dataclass(frozen=True, eq=False)
    class Doubled(Intervention):
        pass

    with pytest.raises(InterventionError, match="version"):
        Doubled().canonical()

    @dataclass(frozen=True, eq=False)
    class Versioned(Intervention):
        version: ClassVar[int] = 1

    @dataclass(frozen=True, eq=False)
    class Zeroed(Versioned):
        pass

    told = Versioned().canonical()["intervention"]
    assert told[1:] == [
        "test_an_intervention_of_ones_own_needs_a_version_that_is_its_own.<locals>.Versioned",
        1,
    ]
    with pytest.raises(InterventionError, match="Zeroed"):
        Zeroed().canonical()


def test_a_metric_of_ones_own_is_known_by_its_code_or_its_version():
    @dataclass(frozen=True)
    class KL(Metric):
        name: str = "kl"

        def value(self, logits: Any, clean: Any) -> float:
            return 0.0

    @dataclass(frozen=True)
    class Other(KL):
        def value(self, logits: Any, clean: Any) -> float:
            return 1.0

    @dataclass(frozen=True)
    class Versioned(KL):
        version: ClassVar[int] = 1

    Other.__name__ = Other.__qualname__ = Versioned.__name__ = Versioned.__qualname__ = "KL"
    digests = {canonical_json(metric().canonical()) for metric in (KL, Other, Versioned)}
    assert len(digests) == 3


BIAS = 1.0


def biased(logits: np.ndarray) -> float:
    return float(logits[0]) + BIAS


def test_a_metric_that_reads_a_global_is_another_when_it_changes_or_is_refused(monkeypatch):
    try:
        one = Custom(biased).canonical()
        monkeypatch.setitem(globals(), "BIAS", 2.0)
        other = Custom(biased).canonical()
    except StageError:
        return
    assert one != other


# -- processes and orders


def digest_of_all() -> str:
    """Of every kind of intervention, metric and experiment, and of plain values without an order."""
    tables = (INTERVENTIONS, METRICS)
    told = [kind(**given).canonical() for table in tables for kind, (given, _) in table.items()]
    told += [kind(**given).params() for kind, (given, _) in EXPERIMENTS.items()]
    return digest("all", told, {"b", "a", "c"}, {"y": 1, "x": 2}, CONFIG.digest)


def test_digests_are_the_same_in_every_process_whatever_the_hash_seed():
    """Here, and where strings hash otherwise."""
    seed = 1 if os.environ.get("PYTHONHASHSEED") != "1" else 2
    done = subprocess.run(
        [sys.executable, "-c", "from tests.contracts.test_identity import *; print(digest_of_all())"],
        env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest_of_all()
    assert digest("d", {"a": 1, "b": 2}) == digest("d", {"b": 2, "a": 1})


def test_reasons_name_fields_that_exist():
    for kind, field in NOT_IN_A_KEY:
        if not isinstance(kind, str):
            assert field in {each.name for each in dataclasses.fields(kind)}, (kind, field)
