"""What a run gives by a plan, and what an experiment stores, are the same to the last bit whatever else is
planned: other runs, cells that workers share, cells that stand already."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookPoint, HookSpec, Model, Run
from mizarr.pipeline import run
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.causal.knockout import EdgeKnockout
from mizarr.stages.causal.steering import DoseResponse
from mizarr.stages.forward.runs.run import stream
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model
from tests.stages.forward.random_runs import draw_runs

pytest.importorskip("transformers")
THREADS = torch.get_num_threads()
FEW = ("llama", "gemma2", "mixtral", "deepseek_v2")
MANY = ("qwen3", "gpt2", "gpt_oss", "phi3", "falcon", "nemotron", "qwen2_moe", "gemma3_text", "opt", "jetmoe")
SHORT, LONG = (5, 17, 40), (9, 8, 77, 31, 4, 60, 12, 200, 33, 90, 41, 7, 150)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(THREADS)


def saved(folder: Path, family: str, seed: int, **axes: Any) -> Path:
    (save_random_model if family in FAMILIES else save_random_hybrid)(folder, family, seed, **axes)
    return folder


def expect_same(found: mizarr.HookCache, expected: mizarr.HookCache, what: str) -> None:
    assert found.has_logits == expected.has_logits
    if found.has_logits:
        np.testing.assert_array_equal(found.logits.float(), expected.logits.float(), err_msg=what)
    for point in expected:
        for when in ("before", "after"):
            one, other = (cache.get(point, when=when) for cache in (found, expected))
            if other is not None:
                np.testing.assert_array_equal(one.float(), other.float(), err_msg=f"{what}: {point} {when}")


@pytest.mark.parametrize("family", [*FEW, *(pytest.param(each, marks=pytest.mark.wide) for each in MANY)])
def test_a_run_gives_the_same_bits_alone_and_beside_others(family, tmp_path):
    expect_alone_as_beside(Model.from_pretrained(saved(tmp_path, family, 4)), seeds=3)


def expect_alone_as_beside(model: Model, seeds: int) -> None:
    """Random runs, on one thread by themselves, on one to three beside different others."""
    for seed in range(seeds):
        runs = draw_runs(random.Random(seed), model, 16)
        torch.set_num_threads(1)
        alone = [found for each in runs for _, found in stream(model, [each])]
        for count, chosen in (
            (1, range(len(runs))),
            (2, range(0, len(runs), 2)),
            (3, range(1, len(runs), 3)),
        ):
            torch.set_num_threads(count)
            for index, found in stream(model, [runs[i] for i in chosen]):
                expect_same(found, alone[chosen[index]], f"run {chosen[index]} of seed {seed}")


@pytest.mark.wide
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_bfloat16_too(family, tmp_path):
    model = Model.from_pretrained(saved(tmp_path, family, 6), dtype="bfloat16")
    expect_alone_as_beside(model, seeds=2)


def test_large_weights_too_which_elsewhere_one_of_two_libraries_multiplies(tmp_path):
    """A head of 4 million weights: of powers of two of rows the other one would be asked."""
    wide = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8448}
    folder = saved(tmp_path, "llama", 5, **wide, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    model = Model.from_pretrained(folder)
    one = torch.ones(512)
    runs = [
        Run(prompt, HookSpec().intervene(HookPoint.mlp_out(0), mizarr.Add(one * scale, positions=-1)))
        for prompt in (SHORT, LONG)
        for scale in (0.5, 1.0, 2.0)
    ]
    together = dict(stream(model, runs))
    for number, each in enumerate(runs):
        ((_, alone),) = stream(model, [each])
        expect_same(together[number], alone, f"run {number}")


def experiments() -> list[Any]:
    other = (*LONG[:4], 99, *LONG[5:])
    pair = {"clean": LONG, "corrupted": other, "metrics": (KL(),)}
    return [
        ActivationPatching(**pair, kinds=("resid_post", "mlp_out")),
        ActivationPatching(**pair, kinds=("attn_out",), over="layer"),
        ActivationPatching(**pair, kinds=("z",), over="head"),
        EdgeKnockout(LONG, edges=((-1, 2), (7, 3)), target=(17, 40)),
        DoseResponse(LONG, edges=((-1, 2),), doses=(0.5, 3.0)),
    ]


@pytest.mark.parametrize(
    "family", [*FEW[:3], *(pytest.param(each, marks=pytest.mark.wide) for each in MANY[:3])]
)
def test_an_experiment_stores_the_same_bits_however_its_cells_are_shared_and_resumed(family, tmp_path):
    """Cells of each worker of very many, and of a killed process that had stored one."""
    folder = saved(tmp_path / "model", family, 7)

    def contents(name: str) -> dict[Any, str]:
        store = mizarr.open_store(tmp_path / name, durability="process")
        for experiment in experiments():
            node = experiment.on(str(folder))
            if name == "resumed":
                node.compute(store, node.missing(store)[1:2])
            for cells in node._worker_groups(node.missing(store), 100) if name == "shared" else ():
                node.compute(store, cells)
            run(node, store)
        return {record.key: record.content for record in store.records()}

    at_once = contents("at once")
    assert contents("shared") == at_once
    torch.set_num_threads(3)
    assert contents("resumed") == at_once
