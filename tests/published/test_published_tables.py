"""Numbers published for real models, ready for a machine that has their weights: pytest -m network.

What they are, and of which models, stands in workflows/replications.py. float32 throughout. That every one
can be read out of a document is checked on the specimen, without a network.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.workflows.replications import GEMMA, LLAMA, REPLICATIONS, STARCODER, Path as Place, PrintedNumber

pytestmark = pytest.mark.wide

REVISION = "main"
FILES = Path(__file__).parents[2] / ".." / "shared" / "reference" / "published"

KNOCKOUT = "attention-knockout"
CLAIMS = [(name, claim) for name, each in REPLICATIONS.items() for claim in each.claims]


def told(value: Any) -> str:
    """A test's name."""
    return value if isinstance(value, str) else f"{value.model.rpartition('/')[2]}-{value.place}"


@functools.cache
def loaded(model: str) -> mizarr.Model:
    if model in ("specimen", "specimen-rwkv"):
        return mizarr.Model.from_pretrained(model)
    from mizarr.stages.forward.models.download import fetch

    fetch(model, REVISION)
    return mizarr.Model.from_pretrained(model, revision=REVISION, dtype="float32")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory):
    """(model, workflow) -> its document, computed once."""
    store = tmp_path_factory.mktemp("published") / "store"

    @functools.cache
    def compute(model: str, name: str, settings: str) -> dict[str, Any]:
        done = mizarr.compute(name, store=store, model=loaded(model), **json.loads(settings))
        return done.to_json()

    return lambda model, workflow, settings: compute(model, workflow, json.dumps(settings))


def at(document: Any, path: Place, *, clip: bool = False) -> Any:
    """The value at a path of names and places; clip: places beyond the end are the last one."""
    for step in path:
        document = document[min(step, len(document) - 1) if clip and isinstance(step, int) else step]
    return document


@pytest.mark.network
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "claim"), CLAIMS, ids=told)
def test_the_published_number(name: str, claim: PrintedNumber, document):
    asked = REPLICATIONS[name]
    found = at(document(claim.model, asked.workflow, asked.settings), claim.path)
    if isinstance(claim.value, str):
        assert found == claim.value
    else:
        assert found == pytest.approx(claim.value, abs=claim.tolerance)


@pytest.mark.network
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FILES.is_dir(), reason="needs the published documents in ../shared")
@pytest.mark.parametrize(("model", "file", "tolerance"), [
    (GEMMA, "gemma-2-2b.json", 1e-3), (STARCODER, "starcoder2-3b.json", 1e-3), (LLAMA, "llama-3.2-1b.json",
    1e-2),
])  # fmt: skip
def test_the_tokens_a_knockout_changes_most(model: str, file: str, tolerance: float, document):
    theirs = json.loads((FILES / "attention_knockout" / file).read_text())["top_changed"]
    asked = REPLICATIONS[KNOCKOUT]
    ours = document(model, asked.workflow, asked.settings)["top_changed"]
    assert [row["token_id"] for row in ours[:3]] == [row["token_id"] for row in theirs[:3]]
    for name in ("baseline_prob", "ablated_prob"):
        np.testing.assert_allclose(
            [row[name] for row in ours[:3]], [row[name] for row in theirs[:3]], rtol=0, atol=tolerance
        )


# What the specimen's own tokens ask for in place of the published prompts; None for its defaults.
ON_SPECIMEN: dict[str, dict[str, Any]] = {
    "attention_knockout": {"target": " d"},
    "steering_dose_response": {},
    "activation_patching": {},
    "attention_patterns": {},
    "logit_lens": {"answers": (" d",)},
    "steering_convergence": {"prompt": None, "target": None},
    "recurrent_feedback": {"preset": "specimen", "limit": 2, "max_tokens": 4},
    "planning_in_poems": {"preset": "specimen", "controls": 1},
    "attention_routing": {"preset": "specimen", "controls": 1},
    "clt_vs_plt": {"preset": "specimen", "controls": 1},
    "sae_features": {"prompt": None, "dictionary": None},
    "rwkv_inference": {"prompt": None, "target": None, "facts": 2, "controls": 1},
}
ON_MODEL = {"rwkv_inference": "specimen-rwkv"}


@pytest.mark.parametrize(("name", "claim"), CLAIMS, ids=told)
def test_a_claim_can_be_read_from_a_document(name: str, claim: PrintedNumber, document):
    asked = REPLICATIONS[name]
    settings = {**asked.settings, **ON_SPECIMEN[asked.workflow]}
    settings = {key: value for key, value in settings.items() if value is not None}
    on = ON_MODEL.get(asked.workflow, "specimen")
    found = at(document(on, asked.workflow, settings), claim.path, clip=True)
    kinds = (str,) if isinstance(claim.value, str) else (int, float)
    # The answer may be nowhere among the likely ten, and no layer absorb the push: null is an answer.
    # Transcoders without a linear skip project nothing through one.
    optional = claim.path[-1] in (
        "answer_first_top10",
        "best_injection_layer",
        "w_skip_projection_at_spike",
    )
    assert isinstance(found, kinds) or (optional and found is None)
