"""Pretrained models: which heads do what is known of them, and facts are known. Needs their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mizarr.store.errors import DownloadError
from tests.real.asking import Asked
from tests.real.models import GEMMA3, MODELS, SMOLLM2, RealModel, fetch
from tests.real.page import LIMIT
from tests.real.processes import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

FOLDER = Path(os.environ.get("REAL") or ROOT / "build" / "real")
"""Folder of `make real`, whose stored answers are read; what is not there is computed."""


@pytest.fixture(scope="session")
def asked():
    """Asked of a model; skips where its file cannot be fetched."""

    def of(model: RealModel) -> Asked:
        try:
            return Asked(FOLDER, str(fetch(model)), LIMIT)
        except DownloadError as error:
            pytest.skip(str(error))

    return of


@pytest.fixture(scope="session")
def smollm2(asked) -> Asked:
    return asked(SMOLLM2)


def best_heads(asked: Asked, kind: str, count: int) -> list[str]:
    """The heads with the highest scores of a kind, by name."""
    assert asked.ask("head_detection").outcome == "answered"
    best = asked.answer("head_detection")["kinds"][kind]["best"]
    return [f"L{row['layer']}H{row['head']}" for row in best[:count]]


def test_smollm2_has_its_induction_heads_in_the_middle(smollm2):
    assert best_heads(smollm2, "induction_head", 3) == ["L18H6", "L17H3", "L17H4"]


def test_smollm2_has_heads_that_attend_to_the_previous_token(smollm2):
    assert best_heads(smollm2, "previous_token_head", 2) == ["L16H0", "L11H1"]


@pytest.mark.parametrize(
    ("model", "least"), [(SMOLLM2, 300), (GEMMA3, 200)], ids=lambda value: str(value)[:20]
)
def test_general_facts_are_known(asked, model, least):
    subject = asked(model)
    assert subject.ask("logit_lens").outcome == "answered"
    known, of = (int(word) for word in subject.answer("logit_lens")["knowledge"].split() if word.isdigit())
    assert of > 450 and known >= least


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.file)
@pytest.mark.parametrize("workflow", ["generate", "attention_patterns"])
def test_workflows_answer(asked, model, workflow):
    assert asked(model).ask(workflow).outcome == "answered"
