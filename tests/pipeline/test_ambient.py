"""What a program set in torch around a call changes no number: it is put back for as long as the call lasts,
or the call is refused."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import Dictionary, HookSpec, Model, Run
from mizarr.pipeline import Context, Output
from mizarr.pipeline.ambient import OF_PROCESS, OF_THREAD, each_in_plain_torch, plain_torch
from mizarr.pipeline.context import run_one
from mizarr.stages.causal.grids.tracing import embedding_deviation
from mizarr.stages.features.effects.alignment import align
from mizarr.stages.features.effects.injection import written_norm
from mizarr.stages.forward.hooks.interventions import Intervention
from mizarr.stages.forward.runs.experiment import COMPUTING, Experiment
from mizarr.stages.forward.runs.means import mean_activations
from mizarr.stages.graph.interventions import feature_intervention
from mizarr.stages.logits.prompt_test import tokens_to_residual_directions
from mizarr.store.errors import ConfigError

from ..torch_settings import LEFT_ALONE, PUT_BACK, REFUSED, B, attribute, module_hook

DESIGN = Path(__file__).resolve().parents[2] / "pipeline" / "DESIGN.md"
IDS = [[5, 9, 3, 7, 11, 2, 8], [4, 4, 6, 1, 9, 12, 30]]


def named(cases: dict[tuple[str, str], Any]) -> Any:
    ids = [" ".join(case) for case in cases]
    return pytest.mark.parametrize(("setting", "around"), [(case[0], cases[case]) for case in cases], ids=ids)


def settings_now() -> list[Any]:
    """Every setting that a call may put back, as it is now."""
    matmul = B.cuda.matmul
    operations = (matmul, B.cudnn.conv, B.cudnn.rnn, B.mkldnn.matmul, B.mkldnn.conv, B.mkldnn.rnn)
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        *(operation.fp32_precision for operation in operations),
        matmul.allow_fp16_accumulation,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        *(
            getattr(B.cuda, f"{kernel}_sdp_enabled")()
            for kernel in ("flash", "mem_efficient", "math", "cudnn")
        ),
        B.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        sorted(np.geterr().items()),
        float(torch.full((), 1e-40, device="cpu", dtype=torch.float32) * 1),
    ]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("specimen")


def numbers(model: Model, folder: Path, name: str) -> dict[str, Any]:
    """What each door computes, in bits."""
    store = mizarr.open_store(folder / name, durability="process")
    spec = HookSpec().capture("blocks.2.hook_resid_post", "blocks.1.attn.hook_pattern")
    stored = mizarr.capture(model, IDS, spec, store=store, progress=False)
    cache = model.forward(IDS, spec)
    swept = mizarr.run(model, [Run(ids, spec) for ids in IDS])
    text = mizarr.generate(model, IDS[0], max_tokens=5, temperature=0.7, seed=1)
    dictionary = Dictionary.from_pretrained("specimen/clt")
    with torch.device("cpu"):  # as a program prepares its inputs
        states = torch.linspace(-1, 1, 3 * dictionary.d_in, dtype=torch.float32).reshape(3, -1)
    return {
        "capture": stored["resid_post"].values,
        "forward": cache.logits.numpy(),
        "pattern": cache["blocks.1.attn.hook_pattern"].numpy(),
        "run": np.concatenate([each.logits.numpy() for each in swept]),
        "generate": text[0].generated_ids,
        "project": model.project_to_vocab(cache["blocks.2.hook_resid_post"]).numpy(),
        "features": dictionary.layer(dictionary.layers[0]).encode(states).numpy(),
        "loaded": Model.from_pretrained("specimen").forward(IDS).logits.numpy(),
    }


@pytest.fixture(scope="module")
def expected(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return numbers(model, tmp_path_factory.mktemp("plain"), "store")


@named(PUT_BACK)
def test_every_door_gives_the_numbers_of_plain_torch(setting, around, model, expected, tmp_path):
    assert setting in {**OF_PROCESS, **OF_THREAD}
    with around():
        before = settings_now()
        computed = numbers(model, tmp_path, "store")
        assert settings_now() == before, "put back"
    for door, value in expected.items():
        np.testing.assert_array_equal(computed[door], value, err_msg=door)


@named(PUT_BACK)
def test_a_setting_is_another_inside(setting, around):
    begun_with = settings_now()
    with plain_torch():
        plain = settings_now()
    with around():
        assert settings_now() != begun_with, "the test sets what it says"
        with plain_torch():
            inside = settings_now()
    # cuDNN's own convolutions begin as TF32, which no pass uses.
    assert [value for value in inside if value not in ("ieee", "none", "tf32")] == [
        value for value in plain if value not in ("ieee", "none", "tf32")
    ]
    assert "tf32" not in inside and "bf16" not in inside


@named(REFUSED)
@pytest.mark.parametrize("door", ["forward", "capture", "generate", "run"])
def test_what_may_change_anything_is_refused_in_a_line(setting, around, door, model, tmp_path):
    assert setting in {**OF_PROCESS, **OF_THREAD}
    store = mizarr.open_store(tmp_path / "store", durability="process")
    doors = {
        "forward": lambda: model.forward(IDS),
        "capture": lambda: mizarr.capture(model, IDS, "hook_embed", store=store, progress=False),
        "generate": lambda: mizarr.generate(model, IDS[0], max_tokens=1),
        "run": lambda: mizarr.run(model, [Run(IDS[0])]),
    }
    with pytest.raises(ConfigError, match=r"the program uses .*; .* before mizarr computes$"), around():
        doors[door]()
    assert not list(store.records())
    doors[door]()


@named(REFUSED)
@pytest.mark.parametrize("made", PUT_BACK.values(), ids=[" ".join(case) for case in PUT_BACK])
def test_a_call_that_is_refused_leaves_every_setting_as_it_was(setting, around, made, model):
    plain = settings_now()
    with made():
        before = settings_now()
        with pytest.raises(ConfigError, match="cannot be switched off"), around():
            model.forward(IDS)
        assert settings_now() == before
    assert settings_now() == plain


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32 acceleration")
@named(LEFT_ALONE)
def test_what_is_left_alone_changes_no_more_than_last_bits(setting, around, model, expected, tmp_path):
    assert setting not in {**OF_PROCESS, **OF_THREAD}
    with around():
        computed = numbers(model, tmp_path, "store")
    for door, value in expected.items():
        if door == "generate":
            assert computed[door] == value
        else:
            np.testing.assert_allclose(computed[door], value, rtol=1e-4, atol=1e-4, err_msg=door)


def test_the_table_of_the_design_is_that_of_the_code_and_of_these_tests():
    rows = re.findall(r"^\| (\S[^|]*?) +\|[^|]*\| (put back|refused|left alone)", DESIGN.read_text(), re.M)
    expected = {name: "put back" for name, _ in PUT_BACK}
    expected |= {name: "refused" for name, _ in REFUSED} | {name: "left alone" for name, _ in LEFT_ALONE}
    assert dict(rows) == expected
    assert set(OF_PROCESS) | set(OF_THREAD) == {n for n, what in expected.items() if what != "left alone"}


@dataclass(frozen=True, eq=False)
class Watching(Intervention):
    """Notes the settings within a pass."""

    version = 1

    def apply(self, x, point, allowed=None, subset=None):
        SEEN.append((B.cuda.matmul.fp32_precision, B.cudnn.conv.fp32_precision, torch.get_default_dtype()))
        return x


SEEN: list[Any] = []


def test_a_thread_that_ends_puts_nothing_back_that_another_still_needs():
    torch.set_float32_matmul_precision("medium")
    try:
        entered, leave = threading.Event(), threading.Event()

        def other() -> None:
            with plain_torch():
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(10)
        with plain_torch():
            leave.set()
            thread.join()
            assert B.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_whoever_takes_an_item_is_outside_again():
    def items() -> Iterator[bool]:
        for _ in range(2):
            yield torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inside in each_in_plain_torch(items()):
            assert not inside and torch.is_autocast_enabled("cpu")


def of_log_probabilities(model: Model) -> Iterator[Any]:
    from mizarr.stages.evaluation import changed

    return changed.log_probabilities(model, IDS, model.bind(None))


def of_effects(model: Model) -> Iterator[Any]:
    from mizarr.stages.features.effects.words import effects_in_blocks
    from mizarr.stages.forward.models.files import resolve_runnable
    from mizarr.stages.logits.readout import readout_from_files

    dictionary, files = Dictionary.from_pretrained("specimen/clt"), resolve_runnable("specimen")
    features = np.array([[layer, index] for layer in dictionary.layers for index in (0, 3, 5)])
    return effects_in_blocks(
        dictionary, features, readout_from_files(files.checkpoint, files.architecture()), block_bytes=4
    )


STEPPED = {"log_probabilities": of_log_probabilities, "effects_in_blocks": of_effects}


def bits(item: Any) -> list[Any]:
    return [np.asarray(part) for part in item if not isinstance(part, slice)]


@named(PUT_BACK)
@pytest.mark.parametrize("made", STEPPED.values(), ids=STEPPED)
def test_a_generator_gives_the_items_of_plain_torch_whatever_is_set_between_them(
    made, setting, around, model, monkeypatch
):
    monkeypatch.setattr("mizarr.stages.evaluation.changed.LOGIT_BYTES", 4)  # a position at a time
    plain = [bits(item) for item in made(model)]
    assert len(plain) >= 2
    items, computed = made(model), []
    computed.append(bits(next(items)))
    for _ in plain[1:]:
        with around():
            before = settings_now()
            item = next(items)
            assert settings_now() == before, "the consumer's own"
        computed.append(bits(item))
    for one, other in zip(plain, computed, strict=True):
        for part, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(part, same)


@named(REFUSED)
@pytest.mark.parametrize("made", STEPPED.values(), ids=STEPPED)
def test_a_generator_refuses_its_next_item_where_a_call_is_refused(made, setting, around, model, monkeypatch):
    monkeypatch.setattr("mizarr.stages.evaluation.changed.LOGIT_BYTES", 4)
    items = made(model)
    next(items)
    with pytest.raises(ConfigError, match="cannot be switched off"), around():
        next(items)


@pytest.mark.parametrize(
    "around", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode]
)
def test_the_loss_of_a_replacement_is_that_of_plain_torch(around, model):
    from mizarr.stages.features.training.replacement import replacement_loss

    dictionary = Dictionary.from_pretrained("specimen/clt")
    last = dictionary.layers[-1]
    given = ({last: dictionary.layer(last)}, dictionary.layout.read, dictionary.layout.write, IDS)
    plain = replacement_loss(model, *given)
    with around():
        computed = replacement_loss(model, *given)
    xr.testing.assert_identical(plain, computed)


def test_torchs_counter_of_operations_is_no_hook_of_the_callers(model):
    from torch.utils.flop_counter import FlopCounterMode

    plain = model.forward(IDS).logits
    with FlopCounterMode(display=False) as counter:
        logits = model.forward(IDS).logits
        with pytest.raises(ConfigError, match="hooks on all torch modules"), module_hook():
            model.forward(IDS)
    assert torch.equal(logits, plain) and counter.get_total_flops() > 1e5


def test_settings_of_a_gpu_are_put_back_within_a_pass(model):
    SEEN.clear()
    spec = HookSpec().intervene("blocks.0.hook_resid_pre", Watching())
    with attribute(B.cuda.matmul, "allow_tf32", True), attribute(B, "fp32_precision", "tf32"):
        model.forward(IDS, spec)
    assert SEEN and set(SEEN) == {("ieee", "ieee", torch.float32)}


def test_gradients_are_those_of_plain_torch(model):
    from mizarr.stages.causal.grids.patching_metrics import LogitDifference

    spec = HookSpec().capture("grad:blocks.1.hook_resid_post").gradient_of(LogitDifference(1, 2))
    plain = model.forward(IDS[0], spec)["grad:blocks.1.hook_resid_post"]
    for around in (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        with around():
            computed = model.forward(IDS[0], spec)["grad:blocks.1.hook_resid_post"]
        assert torch.equal(computed, plain)


@dataclass(frozen=True)
class Products(Experiment):
    """Does arithmetic in each of its methods, as those of users may."""

    name = "products_for_ambient"
    version = 1
    outputs: ClassVar[dict[str, Output]] = {"product": Output(("run",), "1", "of third parts")}

    def cells(self, config):
        return [{"cell": 0}]

    def prepare(self, model):
        return product()

    def runs(self, prepared, cell):
        assert prepared == EXACT and product() == EXACT
        return [Run(IDS[0]), Run(IDS[1])]

    def measure(self, prepared, cell, result):
        return product()

    def dataset(self, prepared, cell, measured):
        return xr.Dataset({"product": ("run", [*measured, product()])})


def product() -> float:
    """Another number where products are rounded to bfloat16, and no number on the device meta."""
    thirds = torch.full((4, 4), 1 / 3)
    return float((thirds @ thirds)[0, 0])


EXACT = product()
AROUND = [torch.autocast, lambda *_, **__: torch.device("meta"), lambda *_, **__: np.errstate(all="raise")]


@pytest.mark.parametrize("around", AROUND)
def test_methods_of_an_experiment_called_directly_compute_as_torch_does(around, model, tmp_path):
    experiment = Products()
    store = mizarr.open_store(tmp_path / "store", durability="process")
    with around("cpu", dtype=torch.bfloat16):
        prepared = experiment.prepare(model)
        (run, _) = experiment.runs(prepared, {"cell": 0})
        measured = [experiment.measure_run(prepared, {"cell": 0}, 0, model.forward(run.prompt))]
        alone = experiment.joined([experiment.dataset(prepared, {"cell": 0}, measured)])
        node = experiment.on(model)
        node.compute(store, node.cells())
        node.run(store, Context())
    assert prepared == EXACT
    assert alone["product"].values.tolist() == [EXACT] * 2
    assert node.open(store)["product"].values.tolist() == [EXACT] * 3


def test_every_experiment_of_the_package_does_its_arithmetic_in_plain_torch():
    for path in sorted((DESIGN.parents[1] / "stages").rglob("*.py")):
        text = path.read_text()
        if "(Experiment)" in text:
            importlib.import_module(
                "mizarr." + ".".join(path.relative_to(DESIGN.parents[1]).with_suffix("").parts)
            )
    kinds = list(Experiment.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in COMPUTING & vars(kind).keys():
            assert hasattr(vars(kind)[name], "__wrapped__"), f"{kind.__name__}.{name}"
    assert len(kinds) > 10


def test_a_cell_computes_in_plain_torch_on_any_thread():
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_one(lambda *_: found.append(product()), None, None, {})
    assert found == [EXACT]


@pytest.mark.parametrize("around", AROUND)
def test_functions_that_read_a_model_or_a_dictionary_compute_as_torch_does(around, model):
    dictionary = Dictionary.from_pretrained("specimen/clt")
    directions = np.random.default_rng(0).standard_normal((2, dictionary.d_out))
    point = model.config.hook_points[5]

    def found() -> list[Any]:
        intervened = feature_intervention(model, dictionary, IDS[0])
        return [
            embedding_deviation(model),
            mean_activations(model, [point], IDS)[point].numpy().tolist(),
            [(each.feature, each.score) for row in align(dictionary, directions, 3, 4) for each in row],
            written_norm(dictionary, (1, 5)),
            tokens_to_residual_directions(model, [3, 4]).numpy().tolist(),
            intervened.logits.numpy().tolist(),
        ]

    plain = found()
    with around("cpu", dtype=torch.bfloat16):
        assert found() == plain


def test_a_network_that_was_replaced_is_the_one_that_computes(model):
    one, other = Model.from_pretrained("specimen"), Model.from_pretrained("specimen")
    with torch.no_grad():
        other.network.embedding.mul_(2)
    changed = other.forward(IDS).logits
    one.network = other.network
    assert torch.equal(one.forward(IDS).logits, changed)
    assert not torch.equal(changed, model.forward(IDS).logits)
    with pytest.raises(AttributeError):
        one._passes = None


def test_sums_here_have_two_factors():
    """So that the order in which `torch.backends.opt_einsum` takes factors changes nothing."""
    for path in (DESIGN.parents[1] / "stages").rglob("*.py"):
        for equation in re.findall(r"einsum\(\s*f?[\"']([^\"']+?)->", path.read_text()):
            assert equation.count(",") <= 1, f"{path}: {equation}"


def test_errors_of_numpy_are_put_back_where_nobody_imported_torch():
    code = (
        "import numpy as np, sys\nfrom mizarr.pipeline.ambient import plain_torch\n"
        "with np.errstate(all='raise'):\n    with plain_torch():\n        print(np.geterr()['divide'])\n"
        "    print(np.geterr()['divide'], 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["warn", "raise", "False"]
