"""A process in which torch cannot be imported gives the same numbers, for every stage that reads a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mizarr
from mizarr.pipeline import Stage, run
from mizarr.stages import registry
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.logits.component_weights import component_weights_node
from mizarr.stages.logits.readout import readout_node
from tests.torch_free import TORCH_BLOCKED

from .attribution_corpus import FAMILIES, HOOKS, POST, PROMPTS
from .forward.random_models import save_random_model
from .offline_studies import POST_NORM, STUDIES, material, studied

BLOCKED = (
    TORCH_BLOCKED
    + """
import runpy
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch" not in sys.modules
"""
)
READING_OTHERS = tuple(f"mizarr.stages.{room}." for room in ("features", "graph", "algzoo", "weights"))
"""Stages over features and graphs, whose inputs come from a dictionary, over networks of AlgZoo, and over a
checkpoint's matrices; they have tests of their own."""

WITH_TORCH = {"tuned_lens_fit", "sentence_embedding"}
"""Stages that compute with torch: a training, and the layers of a sentence encoder."""


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A store with one run of a random model and its tables, and the tables' keys."""
    folder = tmp_path_factory.mktemp(request.param)
    post = request.param == "gemma2"
    save_random_model(folder, request.param, 3, **FAMILIES[request.param])
    store = mizarr.open_store(folder / "store", durability="process")
    hooks = [*HOOKS, "blocks.*.attn.hook_pattern", *(POST if post else ())]
    # Prompts enough for a split by prompt.
    prompts = PROMPTS + [[0, *range(start, start + 9)] for start in range(10, 100, 10)]
    mizarr.capture(str(folder), prompts, hooks, store=store, progress=False)
    files = resolve(str(folder))
    nodes = {"readout": readout_node(files)}
    nodes |= {part: component_weights_node(files, part) for part in ("attention", "mlp")}
    for node in nodes.values():
        run(node, store)
    return store.path, {name: node.key(store).digest for name, node in nodes.items()}


def test_every_stage_over_stored_activations_is_studied():
    studied_here = {name for name in STUDIES | POST_NORM if name != "residual_parts"}
    assert (
        studied_here
        == {
            name
            for name, found in registry().items()
            if isinstance(found, Stage) and not found.function.__module__.startswith(READING_OTHERS)
        }
        - WITH_TORCH
    )


def test_numbers_are_the_same_without_torch(stored, tmp_path: Path):
    path, keys = stored
    # One thread in both: the last bits of a product depend on how many share it.
    with threadpool_limits(1, "blas"):
        here = studied(material(path, keys))
    program = str(Path(__file__).with_name("offline_studies.py"))
    command = [sys.executable, "-c", BLOCKED, program, str(path), json.dumps(keys), str(tmp_path)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    assert done.returncode == 0, done.stderr
    for study, arrays in here.items():
        there = np.load(tmp_path / f"{study}.npz", allow_pickle=True)
        assert set(there.files) == set(arrays), study
        for name, values in arrays.items():
            assert values.size, (study, name)
            np.testing.assert_array_equal(there[name], values, err_msg=f"{study}/{name}")
            if values.dtype.kind == "f":
                assert np.isfinite(values).any(), (study, name)
