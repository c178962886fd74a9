"""Head detection, layer scan, probes and weight norms without torch: from a store, the same numbers.

Both questions to a store are asked in one fresh interpreter in which `import torch` raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mizarr.workflows import compute
from tests.torch_free import without_torch

pytestmark = pytest.mark.wide

PROGRAM = """
from mizarr.workflows import compute
every = [compute(sys.argv[1], store=sys.argv[2], **given) for given in json.loads(sys.argv[3])]
print(json.dumps([done.to_json() for done in every]))
"""
CASES = {
    "head_detection": ({"sequences": 2, "length": 5}, {"error_measure": "abs"}),
    "layer_scan": ({"model": "specimen", "samples": 4}, {"start_layer": 3}),
    "probe": ({"targets": ["character_count"], "examples": 300}, {"examples": 200}),
    "inspect_weights": ({}, {"rms": True}),
    "composition": ({"controls": 2}, {"controls": 3}),
    "ov_qk": ({"controls": 2}, {"layer": 1}),
}
"""Settings, and others that read the same stored activations."""


@pytest.fixture(scope="module", params=CASES)
def stored(request: pytest.FixtureRequest, tiny_model: Path, prose_file: Path, tmp_path_factory):
    """Documents of a workflow that has run, and of another question to its store: without torch, and with."""
    name = request.param
    given, other = CASES[name]
    given = {"model": str(tiny_model), **given}
    if name == "probe":
        given |= {"text": str(prose_file), "context": 30}
    store = tmp_path_factory.mktemp(name) / "store"
    done = compute(name, store=store, **given)
    cached, answered = without_torch(PROGRAM, name, store, json.dumps([given, given | other]))
    here = compute(name, store=store.parent / "fresh", **given | other)
    return (cached, done), (answered, here)


def plain(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


def test_a_cached_workflow_gives_the_same_answer(stored):
    there, done = stored[0]
    assert there == plain(done.to_json())


def test_another_question_is_answered_from_what_is_stored(stored):
    """The stages run in the interpreter without torch; here the answer is computed with it."""
    fresh, done = stored[1]
    here = done.to_json()
    for document in (fresh, here):
        del document["total_time_secs"], document["peak_memory_bytes"]
    assert fresh == plain(here)
