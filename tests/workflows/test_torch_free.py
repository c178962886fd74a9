"""What is stored can be analysed where torch does not exist: the offline student's laptop.

Each test runs a fresh interpreter in which `import torch` raises.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.geometry.pca import pca
from mizarr.workflows import compute
from tests.torch_free import without_torch

PROMPTS = ["it was the season of", "we had nothing before"]
ANSWERS = ["light", "us"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_free") / "store"


@pytest.fixture(scope="module")
def lens(tiny_model: Path, store: Path):
    return compute("logit_lens", store=store, model=str(tiny_model), prompts=PROMPTS, answers=ANSWERS)


def test_the_block_blocks():
    program = (
        "try:\n    import torch\nexcept ImportError as error:\n    print(json.dumps({'said': str(error)}))"
    )
    assert without_torch(program) == {"said": "torch is blocked"}


def test_a_cached_workflow_gives_the_same_answer(lens, tiny_model: Path, store: Path):
    program = """
from mizarr.workflows import compute
done = compute("logit_lens", store=sys.argv[1], model=sys.argv[2], prompts=json.loads(sys.argv[3]),
               answers=json.loads(sys.argv[4]))
print(json.dumps(done.to_json()))
"""
    again = without_torch(program, store, tiny_model, json.dumps(PROMPTS), json.dumps(ANSWERS))
    assert again == json.loads(json.dumps(lens.to_json()))


def test_another_lens_is_computed_from_stored_states_and_readout(lens, tiny_model: Path, store: Path):
    program = """
from mizarr.workflows import compute
done = compute("logit_lens", store=sys.argv[1], model=sys.argv[2], prompts=json.loads(sys.argv[3]), top_k=3)
print(json.dumps(done.to_json()))
"""
    fresh = without_torch(program, store, tiny_model, json.dumps(PROMPTS))
    for ours, theirs in zip(lens.to_json()["results"], fresh["results"], strict=True):
        for mine, other in zip(ours["layers"], theirs["layers"], strict=True):
            assert mine["predictions"][:3] == other["predictions"]


def test_principal_components_of_the_stored_corpus_are_the_same(lens, store: Path):
    program = """
import mizarr
from mizarr.stages.geometry.pca import pca
store = mizarr.open_store(sys.argv[1], mode="r")
states = store.entry(sys.argv[2]).open()["resid_post"]
found = pca(states, n_components=4)
print(json.dumps({name: found[name].values.tolist() for name in found.data_vars}))
"""
    (entry,) = mizarr.open_store(store, mode="r").entries()
    here = pca(entry.open()["resid_post"], n_components=4)
    there = without_torch(program, store, entry.digest)
    for name in here.data_vars:
        np.testing.assert_array_equal(here[name], there[name])


def test_figures_are_drawn_too(lens, tiny_model: Path, store: Path, tmp_path: Path):
    program = """
from pathlib import Path
from mizarr.workflows import compute
done = compute("logit_lens", store=sys.argv[1], model=sys.argv[2], prompts=json.loads(sys.argv[3]),
               answers=json.loads(sys.argv[4]), heatmaps=1)
print(json.dumps({"files": [str(path) for path in done.draw(Path(sys.argv[5]))]}))
"""
    found = without_torch(program, store, tiny_model, json.dumps(PROMPTS), json.dumps(ANSWERS), tmp_path)
    assert [Path(path).name for path in found["files"]] == ["logit_lens_0.png", "logit_lens_answers.png"]
    assert all(Path(path).exists() for path in found["files"])
