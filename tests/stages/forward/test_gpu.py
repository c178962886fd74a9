"""What a GPU computes is what the CPU computes, and it is not waited for while it does.

pytest -m gpu on a machine that has one; on any other, `-p tests.pretend_cuda` has the CPU play it.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookSpec, Model
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.hooks.spec import BoundSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.passes.plain import forward
from mizarr.workflows.cli.group import run

from .random_encoders import save_random_encoder
from .random_hybrids import save_random_hybrid
from .random_models import save_random_model
from .random_runs import draw_runs
from .random_rwkv import save_random_rwkv

pytestmark = pytest.mark.gpu
BOUND = 1e-4
"""Of the scale of what is compared: float32 in another order, through layers of random weights."""
EVERYTHING = HookSpec().capture("*")
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3"), save_random_model),
    **dict.fromkeys(("gpt2", "gemma3_text", "mixtral", "bloom", "deepseek_v3"), save_random_hybrid),
    **dict.fromkeys(("falcon_h1", "jamba", "qwen3_next"), save_random_hybrid),
    "bert": save_random_encoder,
    "rwkv7": save_random_rwkv,
}
DENSE = ("llama", "qwen3", "gpt2", "gemma3_text", "bloom", "bert", "falcon_h1", "qwen3_next")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a family."""
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("models") / request.param
    made.mkdir()
    FAMILIES[request.param](made, request.param, 3)
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Model, Model]:
    """The same on the CPU and on the GPU."""
    return Model.from_pretrained(folder, device="cpu"), Model.from_pretrained(folder, device="cuda")


@pytest.fixture(scope="module")
def specimens() -> tuple[Model, Model]:
    """The same of the model that ships with mizarr."""
    return Model.from_pretrained("specimen", device="cpu"), Model.from_pretrained("specimen", device="cuda")


@pytest.fixture
def prompts(models: tuple[Model, Model]) -> list[list[int]]:
    """Ragged ones."""
    rng = np.random.default_rng(1)
    vocabulary = min(60, models[0].config.vocab_size)
    return [rng.integers(2, vocabulary, size).tolist() for size in (19, 19, 7, 32)]


@pytest.fixture
def little_memory() -> Iterator[Any]:
    """Has the GPU hold so many bytes more than now, until the end."""

    def leave(size: int) -> None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + size) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def assert_near(found: Any, expected: Any) -> None:
    """Infinite in the same places, and near elsewhere."""
    found, expected = (
        np.asarray(each.cpu().float() if isinstance(each, torch.Tensor) else each)
        for each in (found, expected)
    )
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0.0)))
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=BOUND * scale)


def test_every_hook_point_holds_what_it_holds_on_the_cpu(models, prompts):
    cpu, gpu = (model.forward(prompts[:2], EVERYTHING) for model in models)
    assert gpu.logits.device.type == "cuda"
    assert_near(gpu.logits, cpu.logits)
    for point in models[0].hook_points:
        if point in cpu:
            assert_near(gpu[point], cpu[point])


def test_a_plain_pass_waits_for_nothing(models, prompts, request):
    model, name = models[1], request.node.callspec.params["folder"]
    if name not in DENSE:
        pytest.skip("asks how many tokens an expert has, or how far decays are from 1")
    spec = EVERYTHING.bind(model.hook_points, model.name)
    found: dict[Any, torch.Tensor] = {}

    def once() -> None:
        taps = RunTaps(spec, found.__setitem__, stop_early=True)
        with torch.no_grad():
            forward(model.network, torch.full((2, 19), 3, device="cuda"), taps, None)

    once()  # libraries wait while they start
    try:
        with warnings.catch_warnings():
            # That the mode does not see every wait. As an error it would leave the mode on for later tests.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found


def test_an_edited_weight_is_noticed_and_its_return_too(folder):
    model = Model.from_pretrained(folder, device="cuda")
    loaded = model.identity
    weight: torch.Tensor = model.network.weights.embed
    before = weight[3, 1].item()
    weight[3, 1] += 1
    assert model.identity != loaded
    weight[3, 1] = before
    assert model.identity == loaded


def test_texts_go_on_with_the_same_tokens(models, prompts):
    if models[0].config.looks_ahead:
        pytest.skip("a model that looks ahead continues nothing")
    cpu, gpu = (mizarr.generate(model, prompts[0], max_tokens=6, eos=()) for model in models)
    assert cpu[0].token_ids == gpu[0].token_ids


def test_runs_that_are_planned_together_give_what_they_give_on_the_cpu(models):
    runs = draw_runs(random.Random(5), models[0], 12)
    for cpu, gpu in zip(*(mizarr.run(model, runs) for model in models), strict=True):
        if cpu.has_logits:
            assert_near(gpu.logits, cpu.logits)


def test_a_store_written_on_a_gpu_is_whole_and_keyed_as_on_the_cpu(models, prompts, tmp_path):
    stores = [mizarr.open_store(tmp_path / name) for name in ("cpu", "gpu")]
    cpu, gpu = (
        mizarr.capture(model, prompts, EVERYTHING, store=store, progress=False, segment_tokens=32)
        for model, store in zip(models, stores, strict=True)
    )
    for name, array in cpu.data_vars.items():
        if array.dtype.kind == "f":
            assert_near(gpu[name].values, array.values)
    assert stores[1].verify() == []
    keys = [{record.key for record in store.records()} for store in stores]
    assert keys[0] == keys[1]
    again = mizarr.capture(models[0], prompts, EVERYTHING, store=stores[1], progress=False)
    assert all(np.array_equal(again[name], gpu[name], equal_nan=True) for name in gpu.data_vars)


@pytest.mark.parametrize("order", ["batch", "layer"])
@pytest.mark.parametrize(
    ("positions", "reduce"),
    [(None, None), ("::5", None), ("last", None), (None, "mean"), ("1:", "norm"), (None, "run_mean")],
)
def test_what_is_kept_of_a_pass_has_arrived_when_it_is_written(specimens, tmp_path, positions, reduce, order):
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 100, size).tolist() for size in (12, 12, 24, 64, 24, 7, 48, 9)]
    spec = HookSpec().capture("blocks.*.hook_resid_post", positions=positions, reduce=reduce)
    cpu, gpu = (
        mizarr.capture(
            model,
            prompts,
            spec,
            store=mizarr.open_store(tmp_path / model.device.type),
            segment_tokens=64,
            order=order,
            progress=False,
        )
        for model in specimens
    )
    for name, array in cpu.data_vars.items():
        assert_near(gpu[name].values, array.values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_what_is_stored_narrower_is_near_too(specimens, tmp_path, dtype):
    prompts = [list(range(3, 40)), list(range(5, 70))]
    cpu, gpu = (
        mizarr.capture(
            model,
            prompts,
            "blocks.*.hook_resid_post",
            store=mizarr.open_store(tmp_path / model.device.type),
            storage_dtype=dtype,
            progress=False,
        )["resid_post"]
        for model in specimens
    )
    step = {"float16": 1e-3, "bfloat16": 8e-3, "int8": 2e-2}[dtype]
    expected = np.asarray(cpu, np.float32)
    np.testing.assert_allclose(
        np.asarray(gpu, np.float32), expected, rtol=0, atol=step * np.abs(expected).max()
    )


def test_gradients_are_those_of_the_cpu(specimens, tmp_path):
    metric = LogitDifference(3, 7)
    spec = HookSpec().capture("grad:blocks.*.hook_resid_post").gradient_of(metric)
    found = []
    for model in specimens:
        bound = spec.bind(model.hook_points, model.name)
        _, gradients = model.differentiate([list(range(3, 20))], bound, [0])
        found.append({str(capture): value for capture, value in gradients.items()})
    assert found[0]
    for name, expected in found[0].items():
        assert_near(found[1][name], expected)


def test_a_batch_that_does_not_fit_is_halved_and_the_rest_as_before(
    specimens, tmp_path, little_memory, capfd
):
    model = specimens[1]
    prompts = [[3 + n % 50] * 256 for n in range(64)]
    hooks = "blocks.*.hook_resid_post"
    expected = mizarr.capture(
        model, prompts, hooks, store=mizarr.open_store(tmp_path / "a"), batch_tokens=1024, progress=False
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.stream_batch(prompts[:16], bound_of(model, hooks), None, lambda capture, value: None)
    little_memory(torch.cuda.max_memory_allocated() - before)
    store = mizarr.open_store(tmp_path / "b")
    found = mizarr.capture(model, prompts, hooks, store=store, segment_tokens=1 << 14, batch_tokens=1 << 14)
    assert_near(found["resid_post"].values, expected["resid_post"].values)
    assert "out of memory with" in capfd.readouterr().err
    (note,) = [note for note in store.provenance(next(store.records())) if "batch_tokens_lowered_to" in note]
    assert note["batch_tokens_lowered_to"] < 1 << 14


def bound_of(model: Model, hooks: str) -> BoundSpec:
    """Hooks of a model."""
    return HookSpec().capture(hooks).bind(model.hook_points, model.name)


WORKFLOWS = ("logit_lens", "activation_patching", "attribution_graph", "circuit_discovery")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_says_what_it_says_on_the_cpu(name, tmp_path, capsys):
    told = []
    for device in ("cpu", "cuda"):
        command = ["compute", name, "--set", f"device={device}", "--store", str(tmp_path / device), "--json"]
        assert run(command) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert numbers(told[0]) and len(numbers(told[0])) == len(numbers(told[1]))
    assert_near(np.array(numbers(told[1])), np.array(numbers(told[0])))


def numbers(told: Any) -> list[float]:
    """All fractions of an answer, in order, but for how long it took."""
    if isinstance(told, dict):
        return [number for key in sorted(told) if key != "total_time_secs" for number in numbers(told[key])]
    if isinstance(told, list):
        return [number for each in told for number in numbers(each)]
    return [told] if isinstance(told, float) else []
