"""Every setting of every workflow changes what is computed, or stands below among those that only show it.

What a workflow would compute is told from its graph alone: keys, parameters and constants of all its nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from mizarr.pipeline import StageNode
from mizarr.pipeline.nodes import Node
from mizarr.pipeline.sources import ConstantNode, SourceNode
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.files import ModelFiles
from mizarr.stages.forward.text.library import LibraryTokenizer
from mizarr.store.digest import digest
from mizarr.workflows import WORKFLOWS, build, kind_of


@pytest.fixture(scope="module", autouse=True)
def each_text_is_read_once() -> Iterator[None]:
    """Workflows over shipped facts tokenise all of them, and are built some hundred times here."""
    encoded = functools.cache(LibraryTokenizer._encode)
    own = LibraryTokenizer.ids_of
    ids_of = functools.cache(lambda self, texts, special: own(self, texts, add_special=special))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LibraryTokenizer, "_encode", encoded)
        patch.setattr(
            LibraryTokenizer,
            "_encode_batch",
            lambda self, texts, special: [encoded(self, t, special) for t in texts],
        )
        patch.setattr(
            LibraryTokenizer,
            "ids_of",
            lambda self, texts, *, add_special=False: ids_of(self, tuple(texts), add_special),
        )
        patch.setattr(ModelFiles, "tokenizer", functools.cache(ModelFiles.tokenizer))
        yield


def identity_of(node: Node, seen: dict[int, str]) -> str:
    """Digest of what a node would compute."""
    if id(node) in seen:
        return seen[id(node)]
    if isinstance(node, ConstantNode):
        told: Any = node.content
    elif isinstance(node, SourceNode):
        told = [node.name, node.version, node.params]
    elif isinstance(node, CaptureNode):
        told = [node.run_key.digest, [list(cell) for cell in node.cells], node.dtype]
    elif isinstance(node, StageNode):
        ports = {
            name: [identity_of(port.node, seen), port.variable, getattr(port, "layer", None)]
            for name, port in node.ports.items()
        }
        told = [node.name, node.stage.version, node._key_params, ports]
    else:
        told = node.key(None).digest
    seen[id(node)] = digest("node", told)
    return seen[id(node)]


def identity(name: str, **settings: Any) -> str:
    """Digest of what a workflow would compute."""
    seen: dict[int, str] = {}
    nodes = build(name, **settings).nodes.values()
    return digest("workflow", sorted(identity_of(node, seen) for node in nodes))


at_first = functools.cache(identity)
"""The same, of settings that several tests start from."""
PROMPT = "Two plus two is"
PAIR_OF_PROMPTS = {"prompt": "The capital of France is", "corrupted": ("The capital of China is",)}
SPEAKERS = {
    "prompt": "Vera Lynn, speaker of",
    "corrupted": "Bernard Blier, speaker of",
    "answer": "English",
}
SUBJECT = {"prompt": PROMPT, "target": " the", "subject": "Two"}
SITED = "Two and two at night is"
OTHERS: dict[tuple[str, str], Any] = {
    ("*", "dtype"): "float64",
    ("*", "device"): "cpu",
    ("head_detection", "knocked_out"): 1,
    ("*", "prompt"): PROMPT,
    ("*", "prompts"): (PROMPT,),
    ("*", "query"): 2,
    ("*", "key"): 1,
    ("*", "layer"): 1,
    ("*", "strength"): 1.0,
    ("*", "layers"): (1,),
    ("*", "position"): 1,
    ("*", "context"): 48,
    ("*", "suppress"): ("0:1",),
    ("*", "inject"): "0:2",
    ("*", "inject_word"): " the",
    ("*", "suppress_word"): " the",
    ("*", "widths"): (30, 40),
    ("*", "word"): " the",
    ("*", "head"): "L0:H1",
    ("*", "target"): {"prompt": PROMPT, "target": " the"},
    ("logit_lens", "answers"): {"prompts": (PROMPT,), "answers": (" four",)},
    ("jacobian_lens", "prompts"): {"prompts": (PROMPT,), "answers": (" the",)},
    ("jacobian_lens", "answers"): {"prompts": (PROMPT,), "answers": (" the",)},
    ("logit_attribution", "answers"): {"prompts": (PROMPT,), "answers": (" the",)},
    ("logit_attribution", "against"): {"prompts": (PROMPT,), "against": (" the",)},
    ("generate", "seed"): {"temperature": 1.0, "seed": 1},
    ("generate", "top_k"): {"temperature": 1.0, "top_k": 3},
    ("generate", "top_p"): {"temperature": 1.0, "top_p": 0.5},
    ("generate", "stop"): ("x",),
    ("generate", "cache"): True,
    ("generate", "zero"): ("blocks.0.hook_mlp_out",),
    ("evaluate", "zero"): ("blocks.0.hook_mlp_out",),
    ("evaluate", "mean"): ("blocks.0.hook_mlp_out",),
    ("evaluate", "draws"): {"dictionary": "specimen/clt", "draws": 3},
    ("composition", "modes"): ("V",),
    ("feature_pages", "features"): (3, 5),
    ("feature_pages", "corpus_tokens"): 1000,
    ("feature_pages", "intervals"): 10,
    ("feature_pages", "block"): 100,
    ("ov_qk", "head"): {"layer": 1, "head": 1},
    ("evaluate", "swapped"): 3,
    ("activation_patching", "prompt"): PAIR_OF_PROMPTS,
    ("activation_patching", "kinds"): ("resid_post",),
    ("attribution_patching", "prompt"): SPEAKERS | {"wrong": "French"},
    ("attribution_patching", "wrong"): SPEAKERS | {"wrong": "French"},
    ("attribution_patching", "what"): "states",
    ("feature_attribution", "prompt"): SPEAKERS | {"wrong": "French"},
    ("feature_attribution", "wrong"): SPEAKERS | {"wrong": "French"},
    ("integrated_gradients", "prompt"): SPEAKERS,
    ("state_patching", "prompt"): PAIR_OF_PROMPTS | {"corrupted": ("The capital of Spain is",)},
    ("state_patching", "kinds"): ("resid_post",),
    ("rwkv_inference", "scales"): (0.0, 2.0),
    ("recurrent_feedback", "blocks"): ("3-5",),
    ("recurrent_feedback", "strengths"): (7.0,),
    ("recurrent_feedback", "block"): "3-5",
    ("recurrent_feedback", "strength"): 7.0,
    ("recurrent_feedback", "sustained"): False,
    ("causal_tracing", "prompt"): SUBJECT,
    ("causal_tracing", "target"): SUBJECT,
    ("causal_tracing", "subject"): SUBJECT,
    ("causal_tracing", "kinds"): ("mlp_out",),
    ("causal_tracing", "window"): 2,
    ("*", "tasks"): ("induction",),
    ("*", "method"): "EAP",
    ("*", "selection"): "greedy",
    ("circuit_discovery", "by_position"): {"by_position": True, "tasks": ("copying",)},
    ("circuit_evaluation", "alternative"): "zero",
    ("circuit_discovery", "effects"): False,
    ("path_patching", "back"): 0,
    ("ov_qk", "controls"): 5,
    ("composition", "controls"): 5,
    ("circuit_evaluation", "shares"): (0.01, 0.1),
    ("circuit_evaluation", "share"): 0.01,
    ("path_patching", "receivers"): ("a3.h0<v>",),
    ("path_patching", "mlps"): "held",
    ("character_count_helix", "characters"): 12_000,
    ("character_count_helix", "jsonl"): "lines",
    ("ablation", "how"): "zero",
    ("ablation", "references"): (PROMPT,),
    ("expert_routing", "how"): "mean",
    ("expert_routing", "references"): {"how": "mean", "references": (PROMPT,)},
    ("expert_routing", "texts"): (PROMPT,),
    ("*", "subject"): "last_fact",
    ("head_detection", "controls"): 5,
    ("layer_scan", "end_layer"): 4,
    ("probe", "targets"): ("character_count",),
    ("probe", "point"): "resid_pre",
    ("probe", "penalties"): (0.1, 1.0),
    ("monitor", "examples"): 60,
    ("monitor", "point"): "resid_pre",
    ("monitor", "poolings"): ("mean",),
    ("monitor", "methods"): ("lda",),
    ("monitor", "test_share"): 0.4,
    ("monitor", "false_positives"): 0.1,
    ("patchscopes", "target_prompt"): "cat -> cat; dog -> dog; ?",
    ("patchscopes", "placeholder"): {"target_prompt": "cat -> cat; dog ?", "placeholder": "dog"},
    ("patchscopes", "target_layers"): (1,),
    ("patchscopes", "facts"): 5,
    ("steering", "method"): "pca",
    ("steering", "strengths"): (2.0,),
    ("steering", "pairs"): 5,
    ("steering_dose_response", "doses"): (2.0,),
    ("steering_convergence", "inject_position"): 1,
    ("steering_convergence", "threshold"): 0.5,
    ("steering_convergence", "feature"): "0:128",
    ("planning_pairs", "against"): "none",
    ("couplet_planning", "pairs"): 20,
    ("couplet_planning", "least"): 0.5,
    ("attention_routing", "prompt"): SITED,
    ("correction_test", "prompt"): SITED,
    ("correction_test", "correct"): "0:5",
    ("correction_test", "correct_word"): " the",
    ("correction_test", "correct_from_layer"): 2,
    ("clt_probe", "search"): " the",
    ("attribution_graph", "targets"): (5,),
    ("attribution_graph", "desired_logit_prob"): 0.5,
    ("attribution_graph", "node_threshold"): 0.5,
    ("attribution_graph", "edge_threshold"): 0.5,
    ("attribution_graph", "corpus_tokens"): 64,
    ("attribution_graph", "graph_memory"): "2GiB",
    ("attribution_graph", "arithmetic"): "float64",
    ("stoicheia_inference", "source"): "lcg",
    ("stoicheia_inference", "end_token"): {"model": "specimen-longest-cycle-4", "end_token": True},
    ("stoicheia_analysis", "sigmas"): (0.2,),
    ("stoicheia_analysis", "budgets"): (2000,),
    ("stoicheia_sweep", "hidden"): (3,),
    ("activation_patching", "metric"): "probability",
    ("state_patching", "metric"): "probability",
    ("stoicheia_sweep", "sequences"): (4,),
    ("stoicheia_sweep", "seeds"): (3,),
    ("stoicheia_sweep", "task"): "argmax",
    ("stoicheia_sweep", "trained"): 2**19,
}
"""(workflow or "*", setting) -> another value, where adding one to the default makes none; a mapping where
others have to change with it."""

STARTS: dict[tuple[str, str], dict[str, Any]] = {
    ("activation_patching", "prompt"): {},
    ("attribution_patching", "prompt"): {},
    ("attribution_patching", "wrong"): SPEAKERS | {"wrong": "Spanish"},
    ("feature_attribution", "prompt"): {},
    ("feature_attribution", "wrong"): SPEAKERS | {"wrong": "Spanish"},
    ("integrated_gradients", "prompt"): {},
    ("jacobian_lens", "answers"): {"prompts": (PROMPT,), "answers": (" four",)},
    ("state_patching", "prompt"): {},
    ("causal_tracing", "prompt"): {**SUBJECT, "prompt": SITED},
    ("causal_tracing", "target"): {**SUBJECT, "target": " four"},
    ("causal_tracing", "subject"): {**SUBJECT, "subject": "plus"},
}
"""What to compare with, where a setting cannot be left out of the others given."""

ONLY_SHOWN = {
    ("logit_lens", "heatmaps"): "how many prompts get a figure",
    ("logit_attribution", "figures"): "how many prompts get a figure",
    ("character_count_helix", "show"): "which layer is drawn",
    ("character_count_helix", "stop"): "how many layers one call adds",
    ("character_count_helix", "jsonl"): "where lines of what is stored are written",
    ("ablation", "top"): "rows of a table",
    ("head_detection", "knocked_out"): "heads of the losses that are planned once scores are stored",
    ("circuit_discovery", "listed"): "rows of a table",
    ("circuit_discovery", "drawn"): "edges of a drawing",
    ("circuit_evaluation", "listed"): "rows of a table",
    ("factual_routing", "top_k"): "rows of a table",
    ("rwkv_inference", "layer"): "which of all layers, all of them computed, is told in full",
    ("attention_knockout", "layer"): "which of all layers, all of them computed, is told in full",
    ("attention_patterns", "key"): "which of all keys, all of them stored, is told in full",
    ("attention_patterns", "top_k"): "rows of a table",
    ("head_detection", "top"): "rows of a table",
    ("patchscopes", "controls"): "draws among what is stored",
    ("patchscopes", "seed"): "of draws among what is stored",
    ("layer_scan", "controls"): "draws that rearrange what is stored",
    ("layer_scan", "seed"): "draws that rearrange what is stored",
    ("inspect_weights", "rms"): "which of two stored numbers a table shows",
    ("composition", "top"): "rows of a table",
    ("ov_qk", "top"): "rows of a table",
    ("evaluate", "controls"): "draws that rearrange what is stored",
    ("steering_dose_response", "layer"): "which of all layers, all of them computed, is told in full",
    ("steering_dose_response", "ratio"): "what is read off the stored curve",
    ("steering_dose_response", "sweep"): "whether other layers are shown, where the layer is not named",
    ("ablation", "seed"): "draws among heads that are all stored",
    **{
        (name, "controls"): "draws among what is stored"
        for name in (
            "ablation",
            "activation_patching",
            "attribution_patching",
            "feature_attribution",
            "integrated_gradients",
            "state_patching",
            "attention_knockout",
            "counterfact_patching",
            "couplet_planning",
            "factual_routing",
            "steering_dose_response",
        )
    },
    ("steering_convergence", "threshold"): "what is read off the stored curve",
    **{
        (name, "looked_at"): "how many chances the null counts"
        for name in ("planning_in_poems", "attention_routing", "correction_test", "clt_vs_plt")
    },
    ("correction_test", "correct_looked_at"): "how many chances the null counts",
    ("correction_test", "head"): "which of all heads, all of them stored, is told",
    ("sae_features", "position"): "which of all positions, all of them stored, is told",
    ("causal_tracing", "controls"): "draws among what is stored",
    ("couplet_planning", "least"): "what is said of the stored effects",
    ("clt_probe", "top_k"): "rows of a table",
    ("feature_pages", "top_k"): "rows of a table",
    ("attribution_graph", "top_k"): "rows of a table",
    ("attribution_graph", "graph_memory"): "memory is in no key",
    ("stoicheia_inference", "shown"): "which of the stored inputs is drawn",
    ("stoicheia_analysis", "top"): "rows of a table",
}
"""(workflow, setting) -> why another value computes nothing else; that it computes nothing else is tested."""

IN_NO_KEY = {"device": "where something is computed"}
"""Setting of every workflow -> why another value computes nothing else; tested likewise."""

ELSEWHERE = {
    "model": "identity by content: test_user.py",
    "revision": "identity by content: test_workflow_settings.py",
    "dictionary": "identity by content: test_user.py",
    "per_layer": "identity by content: test_user.py",
    "preset": "names model, dictionary and prompt, which are settings of their own",
    "text": "a file, read before anything is keyed, as prompts: test_user.py",
    "data": "a file, read before anything is keyed, as prompts",
    "corpus": "a file, read before anything is keyed, as prompts",
    "pairs of planning_pairs": "a file, read before anything is keyed: planning/test_pairs.py",
    "labels": "a file, read before anything is keyed, as prompts",
    "batch_file": "a file, read before anything is keyed, as prompts",
    "contrastive": "goes with a prompt of as many tokens; token ids of an experiment: test_identity.py",
    "condition_a": "names a part of a corpus file",
    "condition_b": "names a part of a corpus file",
    "unit": "of positions in a corpus file",
    "corrupted": "goes with a prompt of as many tokens; token ids of an experiment: test_identity.py",
    "answer": "goes with prompts of one's own; tokens of a metric: test_identity.py",
    "wrong of activation_patching": "goes with a prompt of one's own; test_activation_patching.py",
    "wrong of state_patching": "goes with a prompt of one's own; test_activation_patching.py",
    "answer_piece": "goes with prompts of one's own; tokens of a metric: test_identity.py",
    "error_measure": "a parameter of a stage: test_identity.py",
    "kind of probe": "of a file of labels",
    "groups": "names a field of a file of labels: test_probe.py, test_monitor.py",
    "positive": "of a file of labels: test_monitor.py",
    "max_tokens of patchscopes": "of a node that its results add: test_patchscopes.py",
    "transfer": "a file, read before anything is keyed, as prompts",
    "layer of sae_features": "the specimen's autoencoder reads one layer",
    "layer of feature_pages": "the specimen's autoencoder reads one layer",
    "against of feature_pages": "of a crosscoder of two models: test_crosscoder_dictionary.py",
    "task of stoicheia_inference": "has to fit the network: test_model.py",
    "task of stoicheia_analysis": "has to fit the network: test_model.py",
    "chat of generate": "needs a chat template: writing/test_generate.py",
    "steps of generate": "of a model that fills in masks: test_denoising.py",
    "order of generate": "of a model that fills in masks: test_denoising.py",
    "sequence": "has to fit the network: test_model.py",
    "heads": "of a transformer: test_model.py",
    "zoo": "a folder of files: identity by content: test_stoicheia.py",
    "site": "goes with a prompt of one's own; positions of an experiment: test_identity.py",
}
"""Settings that need more than another value, and where what they become is tested."""
NO_GRAPH = ("token_positions",)
"""Workflows that store nothing."""


def settings_of_all() -> list[Any]:
    """(workflow, setting) of all that is tested here."""
    found = []
    for name in WORKFLOWS:
        kind = kind_of(name).settings_type
        for field in dataclasses.fields(kind):
            is_elsewhere = field.name in ELSEWHERE or f"{field.name} of {name}" in ELSEWHERE
            if name not in NO_GRAPH and not is_elsewhere:
                found.append(pytest.param(name, field, id=f"{name}-{field.name}"))
    return found


def other_settings(name: str, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Settings in which one is another."""
    value = OTHERS.get((name, field.name), OTHERS.get(("*", field.name)))
    if value is None:
        assert isinstance(field.default, bool | int | float), (
            f"{name}: give another {field.name}, or a reason"
        )
        value = not field.default if isinstance(field.default, bool) else field.default + 1
    return value if isinstance(value, dict) else {field.name: value}


@pytest.mark.parametrize(("name", "field"), settings_of_all())
def test_every_setting_changes_what_is_computed_or_only_what_is_shown(name, field):
    other = other_settings(name, field)
    without = {key: value for key, value in other.items() if key != field.name}
    same = STARTS.get((name, field.name), without)
    is_shown = (name, field.name) in ONLY_SHOWN or field.name in IN_NO_KEY
    assert (at_first(name, **same) == identity(name, **other)) == is_shown


def test_reasons_name_settings_that_exist():
    known = {(param.values[0], param.values[1].name) for param in settings_of_all()}
    assert set(ONLY_SHOWN) <= known
