"""Head detection, layer scan, probes and weight norms without torch: from a store, the same numbers.

Each test runs a fresh interpreter in which `import torch` raises.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mizarr.workflows import compute
from tests.torch_free import TORCH_BLOCKED

PROGRAM = (
    TORCH_BLOCKED
    + """
from mizarr.workflows import compute
done = compute(sys.argv[1], store=sys.argv[2], **json.loads(sys.argv[3]))
print(json.dumps(done.to_json()))
"""
)
CASES = {
    "head_detection": ({"sequences": 2, "length": 5}, {"error_measure": "abs"}),
    "layer_scan": ({"model": "specimen", "samples": 4}, {"start_layer": 3}),
    "probe": ({"targets": ["character_count"], "examples": 300}, {"examples": 200}),
    "inspect_weights": ({}, {"rms": True}),
}
"""Settings, and others that read the same stored activations."""


def without_torch(name: str, store: Path, given: dict) -> dict:
    command = [sys.executable, "-c", PROGRAM, name, str(store), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=CASES)
def stored(request: pytest.FixtureRequest, tiny_model: Path, prose_file: Path, tmp_path_factory):
    """A workflow that has run, its name, settings and store."""
    name = request.param
    given, other = CASES[name]
    given = {"model": str(tiny_model), **given}
    if name == "probe":
        given |= {"text": str(prose_file), "context": 30}
    store = tmp_path_factory.mktemp(name) / "store"
    return compute(name, store=store, **given), name, given, other, store


def test_a_cached_workflow_gives_the_same_answer(stored):
    done, name, given, _, store = stored
    assert without_torch(name, store, given) == json.loads(json.dumps(done.to_json(), allow_nan=False))


def test_another_question_is_answered_from_what_is_stored(stored, tiny_model):
    """The stages run in the interpreter without torch; here the answer is computed with it."""
    _, name, given, other, store = stored
    fresh = without_torch(name, store, given | other)
    here = compute(name, store=store.parent / "fresh", **given | other).to_json()
    for document in (fresh, here):
        del document["total_time_secs"], document["peak_memory_bytes"]
    assert fresh == json.loads(json.dumps(here))
