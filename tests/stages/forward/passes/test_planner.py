"""Planned runs give what plain forward passes give, and cost what they change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import mizarr
from mizarr import Add, HookPoint, HookSpec, Knockout, MizarrError, Model, Replace, Run, Scale, Zero
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.networks.composed import ComposedNetwork
from mizarr.stages.forward.runs.run import plan, resolve, stream
from mizarr.stages.forward.runs.stored_runs import GROUP, stored
from mizarr.store.errors import InterventionError, NotFinite, PlanError
from tests.memory import PEAK, printed
from tests.stages.forward.random_attending import AXES
from tests.stages.forward.random_encoders import AXES as ENCODERS, save_random_encoder
from tests.stages.forward.random_gemmas import GEMMAS
from tests.stages.forward.random_hybrids import HYBRIDS, save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model
from tests.stages.forward.random_runs import draw_runs
from tests.stages.forward.random_rwkv import GENERATIONS, save_random_rwkv

RECURRENT = (*GENERATIONS, *HYBRIDS)
SAVED_BY = {
    **dict.fromkeys(FAMILIES, save_random_model),
    **dict.fromkeys(GENERATIONS, save_random_rwkv),
    **dict.fromkeys((*HYBRIDS, *AXES, *GEMMAS), save_random_hybrid),
    **dict.fromkeys(ENCODERS, save_random_encoder),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family: str, seed: int, dtype: str = "float32") -> Model:
        if (family, seed, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{seed}")
            SAVED_BY[family](folder, family, seed)
            made[family, seed, dtype] = Model.from_pretrained(folder, dtype=dtype)
        return made[family, seed, dtype]

    return model


def told(index: int, run: Run, at: object) -> str:
    """What is compared; spelled out where it fails, as tensors take longer to print than to compute."""
    return f"run {index}: {run.hooks!r}, want {run.want} at {at}"


def assert_same(
    found: torch.Tensor, expected: torch.Tensor, what: tuple[int, Run, object], bound: float
) -> None:
    """Equal to a share of the scale of what is expected; infinities (masked scores) in the same places."""
    assert found.shape == expected.shape, told(*what)
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite()), told(*what)
    if finite.any():
        scale = max(float(expected[finite].abs().max()), 1.0)
        assert float((found - expected)[finite].abs().max()) <= bound * scale, told(*what)


def check(model: Model, runs: list[Run], bound: float = 1e-5, **options) -> None:
    seen = []
    for index, planned in stream(model, runs, **options):
        seen.append(index)
        run = runs[index]
        plain = model.forward(run.prompt, run.hooks, want=run.want)
        assert planned.tokens == plain.tokens
        assert planned.has_logits == plain.has_logits
        if plain.has_logits:
            assert_same(planned.logits, plain.logits, (index, run, "logits"), bound)
        assert list(planned) == list(plain)
        for point in plain:
            for when in ("after", "before"):
                found, expected = (cache.get(point, when=when) for cache in (planned, plain))
                if expected is not None:
                    # Shares of a sum that may be next to nothing: what is divided is held to the bound.
                    is_share = point.kind.endswith("effective_attn")
                    assert_same(found, expected, (index, run, point), max(bound, 1e-5) if is_share else bound)
    assert sorted(seen) == list(range(len(runs)))


@pytest.mark.parametrize("family", [*FAMILIES, *AXES, *GEMMAS, *ENCODERS])
@given(seed=st.integers(0, 10**6), config=st.integers(0, 3))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_planned_runs_equal_plain_forward_passes(models, family, seed, config):
    rng = random.Random(seed)
    model = models(family, config)
    check(model, draw_runs(rng, model, 14), memory=rng.choice([None, 700_000]))


@pytest.mark.parametrize("family", RECURRENT)
@given(seed=st.integers(0, 10**6), config=st.integers(0, 3))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_planned_runs_of_states_equal_plain_forward_passes(models, family, seed, config):
    """In float64, but for RMS norms, which never leave float32: interventions may leave a recurrence so that
    float32 alone differs from itself by more than 1e-5 (a stream of zeros, whose norm is rounding)."""
    rng = random.Random(seed)
    model = models(family, config, "float64")
    check(model, draw_runs(rng, model, 14), 1e-6, memory=rng.choice([None, 1_200_000]))


@pytest.mark.parametrize("family", RECURRENT)
def test_planned_runs_of_states_in_float32(models, family):
    """The same to 1e-5, of runs that are drawn once for all."""
    rng, model = random.Random(5), models(family, 1)
    for _ in range(2):
        runs = [run for run in draw_runs(rng, model, 14) if is_finite(model, run)]
        assert len(runs) >= 10
        check(model, runs)


def is_finite(model: Model, run: Run) -> bool:
    """Whether a drawn run can be computed: some set what a norm divides by to 0."""
    try:
        model.forward(run.prompt, run.hooks, want=run.want)
    except NotFinite:
        return False
    return True


# What it costs


def grid(model: Model, prompt: list[int], kind: str, layers=None) -> list[Run]:
    """Patch every (layer, position) of a kind with noise."""
    generator = torch.Generator().manual_seed(0)
    runs = []
    for layer in layers or range(model.config.num_layers):
        for position in range(len(prompt)):
            noise = torch.randn(model.config.hidden_size, generator=generator)
            spec = HookSpec().intervene(HookPoint(kind, layer), Replace(noise, positions=(position,)))
            runs.append(Run(prompt, spec))
    return runs


def test_a_branch_holds_only_what_its_interventions_reach(models):
    model, prompt = models("llama", 0), list(range(2, 12))
    layers, length = model.config.num_layers, len(prompt)
    planned = plan(model, grid(model, prompt, "resid_pre"))
    plain = layers * length  # the unpatched run, whose keys and values the branches read
    cone = sum((layers - layer) * (length - p) for layer in range(layers) for p in range(length))
    assert planned.positions == plain + cone
    assert planned.naive == layers * length * layers * length
    # After keys and values are made, a patch reaches later positions in the next layer only.
    planned = plan(model, grid(model, prompt, "mlp_out"))
    cone = sum(1 + (layers - layer - 1) * (length - p) for layer in range(layers) for p in range(length))
    assert planned.positions == plain + cone


def test_reading_raw_scores_widens_a_branch_and_the_plan_says_so(models):
    model, prompt = models("llama", 0), list(range(2, 12))
    patch = Replace(torch.zeros(model.config.hidden_size), positions=(8,))
    narrow = HookSpec().intervene(HookPoint.resid_pre(1), patch)
    reading = HookSpec().extend(narrow).capture(HookPoint.scores(1))
    planned = plan(model, [Run(prompt), Run(prompt, reading)])
    assert planned.positions - plan(model, [Run(prompt), Run(prompt, narrow)]).positions == 8
    assert "; 1 compute every position, as raw scores are captured" in planned.describe()
    assert "compute every position" not in plan(model, [Run(prompt), Run(prompt, narrow)]).describe()


def test_nothing_runs_above_the_last_thing_wanted(models):
    model, prompt = models("llama", 0), [5, 6, 7]
    spec = HookSpec().capture("blocks.0.hook_resid_post")
    assert plan(model, [Run(prompt, spec, None)]).positions == len(prompt)


def test_equal_runs_are_one_and_shared_prefixes_are_computed_once(models):
    model, prompt = models("llama", 0), [5, 6, 7, 8]
    first = (HookPoint.mlp_out(0), Zero())
    specs = [
        HookSpec().intervene(*first).intervene(HookPoint.resid_pre(1), Scale(f)) for f in (2.0, 3.0, 2.0)
    ]
    planned = plan(model, [Run(prompt, spec) for spec in specs])
    layers, length = model.config.num_layers, len(prompt)
    assert planned.branches == 2
    # One root with the shared intervention (nobody asks for the plain run), two branches from layer 1 on.
    assert planned.positions == layers * length + 2 * (layers - 1) * length


def test_interventions_that_change_nothing_are_not_computed_further(models, monkeypatch):
    model, prompt = models("llama", 0), [5, 6, 7, 8, 9]
    rows, layer = [], ComposedNetwork.layer

    def counted(self, number, carried, *rest):
        rows.append(carried["stream"].shape[1])
        return layer(self, number, carried, *rest)

    monkeypatch.setattr(ComposedNetwork, "layer", counted)
    nothing = [Scale(1.0), Add(torch.zeros(model.config.hidden_size)), Scale(1.0, positions=(2,))]
    specs = [HookSpec().intervene("blocks.0.hook_resid_mid", change) for change in nothing]
    results = mizarr.run(model, [Run(prompt), *(Run(prompt, spec) for spec in specs)])
    assert all(torch.equal(result.logits, results[0].logits) for result in results)
    assert rows[0] == 5 + 5 + 5 + 1
    assert set(rows[1:]) == {len(prompt)}


@pytest.mark.parametrize("memory", ["1MiB", "300KiB"])
def test_a_smaller_budget_takes_more_sweeps_and_gives_the_same(models, memory):
    model, prompt = models("mistral", 0), list(range(2, 18))
    runs = grid(model, prompt, "resid_pre")
    assert len(plan(model, runs).blocks) == 1
    planned = plan(model, runs, memory=memory)
    assert len(planned.blocks) > 1
    check(model, runs, memory=memory)


def test_a_run_that_does_not_fit_is_refused_before_anything_runs(models):
    with pytest.raises(PlanError, match=r"memory: expected .* bytes for a run of 3 tokens, found only 1,000"):
        plan(models("llama", 0), [Run([1, 2, 3])], memory=1000)


def test_bad_runs_are_refused_before_anything_runs(models, monkeypatch):
    model = models("llama", 0)
    monkeypatch.setattr(ComposedNetwork, "layer", None)
    good = Run([1, 2, 3])
    for bad, message in [
        (Run([1, 2, 3], HookSpec().capture("blocks.99.hook_resid_post")), "99"),
        (Run([1, 2, 3], HookSpec().intervene(HookPoint.resid_pre(0), Zero(positions=(3,)))), "found 3"),
        (Run([1, 2, 10**6]), "found 1000000"),
        (Run([1, 2, 3], None, Logits((3,))), "found 3"),
    ]:
        with pytest.raises(MizarrError, match=message):
            next(stream(model, [good, bad]))


def test_a_fully_cut_row_is_an_error_that_says_so(models):
    model = models("llama", 0)
    spec = HookSpec().intervene(HookPoint.scores(0), Knockout(edges=[(2, None)]))
    for runs in ([Run([1, 2, 3], spec)], [Run([1, 2, 3]), Run([1, 2, 3], spec)]):
        with pytest.raises(InterventionError, match="leaves query 2 of head 0 no key to attend to"):
            list(stream(model, runs))


# With a store


def test_runs_are_read_from_the_store_and_only_missing_ones_are_computed(models, tmp_path, monkeypatch):
    model, prompt = models("qwen2", 0), list(range(2, 12))
    store = mizarr.open_store(tmp_path)
    runs = grid(model, prompt, "resid_pre")
    for index, each in enumerate(runs[:3]):
        runs[index] = replace(each, hooks=each.hooks.capture("blocks.1.attn.hook_z", "hook_embed"))
    first = mizarr.run(model, runs, store=store)
    assert [tuple(result.logits.shape) for result in first] == [(1, 1, model.config.vocab_size)] * len(runs)
    with monkeypatch.context() as nothing_runs:
        nothing_runs.setattr(ComposedNetwork, "layer", None)
        again = mizarr.run(model, runs, store=store)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert list(one) == list(other)
        assert all(torch.equal(one[point], other[point]) for point in one)
    more = mizarr.run(model, [*runs, Run(prompt)], store=store)
    assert_same(more[-1].logits, model.forward(prompt, want=Logits((-1,))).logits, "the appended run", 1e-5)


def test_results_in_bfloat16_come_back_from_the_store_as_they_were(models, tmp_path):
    source = models("llama", 0)
    model = Model.from_pretrained(source.name, dtype="bfloat16")
    runs = [Run([3, 4, 5], HookSpec().capture("blocks.0.hook_resid_post"))]
    store = mizarr.open_store(tmp_path)
    (first,), (again,) = mizarr.run(model, runs, store=store), mizarr.run(model, runs, store=store)
    assert again.logits.dtype == torch.bfloat16
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first["blocks.0.hook_resid_post"], again["blocks.0.hook_resid_post"])


def test_a_killed_list_of_runs_goes_on_where_it_was(models, tmp_path):
    model, prompt = models("llama", 0), list(range(2, 50))
    store = mizarr.open_store(tmp_path)
    runs = grid(model, prompt, "resid_pre")
    assert len(runs) > GROUP
    wanted = [resolve(model, each) for each in runs]

    def killed(missing):
        for number, result in stream(model, [runs[i] for i in missing]):
            if missing[number] == GROUP + 3:
                raise KeyboardInterrupt
            yield number, result

    with pytest.raises(KeyboardInterrupt):
        stored(model, wanted, store, killed)
    asked = []
    stored(
        model,
        wanted,
        store,
        lambda missing: asked.extend(missing) or stream(model, [runs[i] for i in missing]),
    )
    assert asked == list(range(GROUP, len(runs)))


MEASURED = """
import json, torch
from mizarr import HookSpec, Model, Replace, Run
from mizarr.stages.forward.runs.run import stream

torch.set_num_threads(1)
model = Model.from_pretrained({folder!r})
prompt, hidden, POINT = list(range(2, 66)), model.config.hidden_size, "blocks.0.hook_resid_pre"
peaks = []
for samples, memory in ((1, "24MiB"), (12, "24MiB"), (12, "1GiB")):
    runs = [
        Run(prompt, HookSpec().intervene(POINT, Replace(i + torch.zeros(hidden), positions=(p,))))
        for i in torch.arange(samples) / 100
        for p in range(len(prompt))
    ]
    total = sum(float(result.logits.sum()) for _, result in stream(model, runs, memory=memory))
    peaks.append({peak})
print(json.dumps(peaks))
"""


def test_peak_memory_follows_the_budget_not_the_number_of_runs(tmp_path):
    save_random_model(tmp_path, "llama", 0, num_hidden_layers=4, hidden_size=192, intermediate_size=1024)

    few, many, unbounded = printed(MEASURED.format(folder=str(tmp_path), peak=PEAK))
    told = (
        f"{few >> 20} MiB for 64 runs, {many >> 20} MiB for 768; {unbounded >> 20} MiB with a larger budget"
    )
    assert many - few < 24 << 20, told
    assert unbounded - many > 24 << 20, told
