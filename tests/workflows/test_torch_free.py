"""What is stored can be analysed where torch does not exist: the offline student's laptop.

Each test runs a fresh interpreter in which `import torch` raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def told(lens, tiny_model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process without torch makes of the store."""
    program = """
from pathlib import Path
import mizarr
from mizarr.stages.geometry.pca import pca
from mizarr.workflows import compute
asked = json.loads(sys.argv[1])
answers = asked.pop("answers")
(entry,) = mizarr.open_store(asked["store"], mode="r").entries()
found = pca(entry.open()["resid_post"], n_components=4)
done = compute("logit_lens", answers=answers, heatmaps=1, **asked)
print(json.dumps({
    "pca": {name: found[name].values.tolist() for name in found.data_vars},
    "same": compute("logit_lens", answers=answers, **asked).to_json(),
    "other": compute("logit_lens", top_k=3, **asked).to_json(),
    "files": [str(path) for path in done.draw(Path(sys.argv[2]))],
}))
"""
    asked = {"store": str(store), "model": str(tiny_model), "prompts": PROMPTS, "answers": ANSWERS}
    return without_torch(program, json.dumps(asked), tmp_path_factory.mktemp("figures"))


def test_a_cached_workflow_gives_the_same_answer(lens, told):
    assert told["same"] == json.loads(json.dumps(lens.to_json()))


def test_another_lens_is_computed_from_stored_states_and_readout(lens, told):
    for ours, theirs in zip(lens.to_json()["results"], told["other"]["results"], strict=True):
        for mine, other in zip(ours["layers"], theirs["layers"], strict=True):
            assert mine["predictions"][:3] == other["predictions"]


def test_principal_components_of_the_stored_corpus_are_the_same(lens, told, store: Path):
    (entry,) = mizarr.open_store(store, mode="r").entries()
    here = pca(entry.open()["resid_post"], n_components=4)
    for name in here.data_vars:
        np.testing.assert_array_equal(here[name], told["pca"][name])


def test_figures_are_drawn_too(told):
    assert [Path(path).name for path in told["files"]] == ["logit_lens_0.png", "logit_lens_answers.png"]
    assert all(Path(path).exists() for path in told["files"])
