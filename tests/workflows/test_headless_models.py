"""Every question asked of models without a language head: answered, or refused in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import WORKFLOWS, compute
from tests.stages.forward.random_heads import save
from tests.stages.forward.random_models import save_tokenizer
from tests.workflows.test_recurrent_models import ASKED, PROMPT

ANSWERED = (
    "character_count_helix",
    "attention_patterns",
    "head_detection",
    "probe",
    "monitor",
    "inspect_weights",
    "composition",
    "token_positions",
)
"""Workflows that ask about states, attention, weights or the tokenizer."""
NEEDS_MORE = (
    "layer_scan",
    "expert_routing",
    "rwkv_inference",
    "state_patching",
    "planning_in_poems",
    "planning_pairs",
    "attention_routing",
    "correction_test",
    "sae_features",
    "feature_pages",
    "clt_probe",
    "clt_vs_plt",
    "attribution_graph",
    "stoicheia_inference",
    "stoicheia_analysis",
    "stoicheia_sweep",
)
"""Workflows that refuse small Llamas without a dictionary for other reasons first."""
SAME_LENGTH = {"corrupted": [PROMPT.replace("Danielle", "Danielke")]}
CLASSES = {
    "base": ("LlamaModel", "found LlamaModel, which has no head; ask about"),
    "sequence": ("LlamaForSequenceClassification", "which has a head for 3 labels; ask about"),
}


@pytest.fixture(scope="module", params=CLASSES)
def asked_model(request, tmp_path_factory) -> tuple[Path, str]:
    """A random Llama without a language head, and how it is refused."""
    name, refusal = CLASSES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    save(folder, "llama", request.param, name)
    save_tokenizer(folder)
    return folder, refusal


def _asked(name: str, folder: Path) -> dict[str, Any]:
    settings = ASKED[name][0] | (SAME_LENGTH if "corrupted" in ASKED[name][0] else {})
    return settings if name == "token_positions" else settings | {"model": str(folder)}


def _assert_refused(name: str, folder: Path, refusal: str, store: Path) -> None:
    with pytest.raises(ConfigError, match=refusal) as error:
        compute(name, store=store, **_asked(name, folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["logit_lens", "generate"])
def test_questions_about_the_next_token_name_what_can_be_asked_instead(name, asked_model, tmp_path):
    _assert_refused(name, *asked_model, tmp_path)


def test_attention_patterns_are_those_of_any_model(asked_model, tmp_path):
    folder, _ = asked_model
    done = compute("attention_patterns", store=tmp_path, **_asked("attention_patterns", folder))
    assert json.dumps(done.to_json(), allow_nan=False)


@pytest.mark.wide
@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_workflow_answers_or_says_in_one_line_why_not(name, asked_model, tmp_path):
    folder, refusal = asked_model
    if name in ANSWERED:
        assert compute(name, store=tmp_path, **_asked(name, folder)).to_json()
    elif name in NEEDS_MORE:
        with pytest.raises(MizarrError) as error:
            compute(name, store=tmp_path, **_asked(name, folder))
        assert "\n" not in str(error.value)
    else:
        _assert_refused(name, folder, refusal, tmp_path)
