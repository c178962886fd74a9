"""What planned runs and generated tokens give is the same to the last bit for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookPoint, HookSpec
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.forward.architectures.layer_summaries import AttentionMixer
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.networks.attention import fused_over_padded, padded_keys, weighted_values
from mizarr.stages.forward.runs.run import Run, stream

from .random_models import save_random_model

pytest.importorskip("transformers")
THREADS = torch.get_num_threads()
OTHERS = (2, 3, 5)
WANT = Logits(positions=(-2, -1))
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 48}
KINDS = ("llama", pytest.param("gemma2", marks=pytest.mark.slow), "qwen3")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_random_model(path, request.param, 1, **SIZES, intermediate_size=64, num_hidden_layers=3)
    return path


@pytest.mark.parametrize("length", [13, pytest.param(31, marks=pytest.mark.slow)])
def test_grids_are_the_same_for_any_number_of_threads(folder, length, tmp_path):
    drawn = np.random.default_rng(length)
    clean, corrupted = (tuple(drawn.integers(1, 250, length).tolist()) for _ in range(2))
    grid = ActivationPatching(clean=clean, corrupted=corrupted, kinds=("resid_pre", "z"), metrics=(KL(),))

    def contents(count: int) -> dict[Any, str]:
        torch.set_num_threads(count)
        store = mizarr.open_store(tmp_path / str(count), durability="process")
        mizarr.pipeline.run([grid.on(str(folder))], store)
        return {record.key: record.content for record in store.records()}

    alone = contents(1)
    assert all(contents(count) == alone for count in OTHERS)


def test_generated_tokens_have_the_same_logits_for_any_number_of_threads(folder):
    model = mizarr.Model.from_pretrained(folder)
    ids = torch.arange(5, 36)[None]

    def logits(count: int) -> tuple[float, ...]:
        torch.set_num_threads(count)
        return generate(model, ids, HookSpec(), max_tokens=5, eos=())[0].logprobs

    alone = logits(1)
    assert all(logits(count) == alone for count in OTHERS)


def test_what_a_branch_gives_does_not_depend_on_how_long_the_prompts_beside_it_are(folder):
    """Of two positions; of a single row, products have another kernel."""
    model = mizarr.Model.from_pretrained(folder)
    drawn = np.random.default_rng(3)
    prompts = [drawn.integers(1, 250, length).tolist() for length in (30, 31, 33, 37, 40)]
    point, one = HookPoint.resid_post(0), torch.ones(48)
    runs = [
        Run(prompt, HookSpec().intervene(point, mizarr.Add(one, positions=at)), WANT)
        for prompt in prompts
        for at in ((9,), (20,), (12, 25))
    ]
    together = dict(stream(model, runs))
    for number, run in enumerate(runs):
        ((_, alone),) = stream(model, [run])
        assert torch.equal(alone.logits, together[number].logits)


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 12, 31, 40])
def test_the_fused_kernel_gives_a_query_the_same_bits_beside_others(queries):
    """Whatever the threads, the prompts in the batch, and the keys behind those that are seen."""
    how = AttentionMixer(scale=0.25)
    torch.manual_seed(queries)
    for size in range(queries, queries + 40, 3):
        q, k, v = (torch.randn(3, 4, count, 16) for count in (queries, size, size))
        seen = torch.rand(3, 1, queries, size) < 0.7
        seen[..., 0] = True
        torch.set_num_threads(1)
        alone = weighted_values(q, k, v, seen, how)
        wide = [torch.nn.functional.pad(x, (0, 0, 0, padded_keys(q, size) - size), value=3.0) for x in (k, v)]
        for count in OTHERS:
            torch.set_num_threads(count)
            assert torch.equal(weighted_values(q, k, v, seen, how), alone)
            assert torch.equal(fused_over_padded(*wide)(q, k, v, seen, how), alone)
        assert torch.equal(weighted_values(q[1:2], k[1:2], v[1:2], seen[1:2], how), alone[1:2])
        more = [torch.nn.functional.pad(x, (0, 0, 0, 21), value=2.0) for x in (k, v)]
        hidden = torch.nn.functional.pad(seen, (0, 21))
        assert torch.equal(weighted_values(q, *more, hidden, how), alone)
