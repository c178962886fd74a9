"""What a program set in torch around a call changes no number: it is put back for as long as the call lasts,
or the call is refused."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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

DESIGN = Path(__file__).resolve().parents[2] / "pipeline" / "DESIGN.md"
IDS = [[5, 9, 3, 7, 11, 2, 8], [4, 4, 6, 1, 9, 12, 30]]


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def called(function: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def module_hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def vmapped() -> Iterator[None]:
    from torch._C._functorch import _vmap_decrement_nesting, _vmap_increment_nesting

    _vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        _vmap_decrement_nesting()


B = torch.backends
PUT_BACK: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("autocast", "bfloat16 on the CPU"): lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ("autocast", "float16 on the CPU"): lambda: torch.autocast("cpu", dtype=torch.float16),
    ("default device", "meta"): lambda: called(torch.set_default_device, "meta", None),
    ("default device", "a context"): lambda: torch.device("meta"),
    ("inference mode", "on"): torch.inference_mode,
    ("flush denormal", "on"): lambda: called(torch.set_flush_denormal, True, False),
    ("numpy errors", "raise"): lambda: np.errstate(all="raise"),
    ("numpy errors", "call"): lambda: np.errstate(all="call", call=lambda *_: None),
    ("default dtype", "float64"): lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
    ("default dtype", "bfloat16"): lambda: called(torch.set_default_dtype, torch.bfloat16, torch.float32),
    ("float32 precision", "medium"): lambda: called(torch.set_float32_matmul_precision, "medium", "highest"),
    ("float32 precision", "high"): lambda: called(torch.set_float32_matmul_precision, "high", "highest"),
    ("float32 precision", "tf32 everywhere"): lambda: attribute(B, "fp32_precision", "tf32"),
    ("float32 precision", "allow_tf32"): lambda: attribute(B.cuda.matmul, "allow_tf32", True),
    ("float32 precision", "bfloat16 in oneDNN"): lambda: attribute(B.mkldnn, "fp32_precision", "bf16"),
    ("reduced precision", "float16 sums"): lambda: attribute(B.cuda.matmul, "allow_fp16_accumulation", True),
    ("reduced precision", "no bfloat16 reductions"): lambda: attribute(
        B.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    ("reduced precision", "no float16 reductions"): lambda: attribute(
        B.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    ("attention kernels", "math alone"): lambda: sdpa_kernel(SDPBackend.MATH),
    ("attention kernels", "without flash"): lambda: called(B.cuda.enable_flash_sdp, False, True),
    ("attention kernels", "reduced math"): lambda: called(
        B.cuda.allow_fp16_bf16_reduction_math_sdp, True, False
    ),
}
"""(Setting, variant) -> a context in which a program has made it."""
REFUSED: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("function modes", "that doubles"): Doubling,
    ("dispatch modes", "that rounds"): Rounding,
    ("function transforms", "vmap"): vmapped,
    ("saved-tensor hooks", "that halve"): lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x / 2, lambda x: x
    ),
    ("module hooks", "forward"): module_hook,
}
LEFT_ALONE: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("gradient mode", "off"): torch.no_grad,
    ("gradient mode", "on"): torch.enable_grad,
    ("deterministic algorithms", "on"): lambda: called(torch.use_deterministic_algorithms, True, False),
    ("anomaly detection", "on"): torch.autograd.detect_anomaly,
    ("oneDNN", "off"): lambda: B.mkldnn.flags(enabled=False),
    ("linear algebra library", "chosen"): lambda: called(
        B.cuda.preferred_linalg_library, "default", "default"
    ),
    ("cuDNN", "benchmark"): lambda: attribute(B.cudnn, "benchmark", True),
    ("threads", "one"): lambda: called(torch.set_num_threads, 1, torch.get_num_threads()),
    ("threads", "three"): lambda: called(torch.set_num_threads, 3, torch.get_num_threads()),
    ("compile stance", "eager"): lambda: torch.compiler.set_stance("force_eager"),
    ("fast path of attention modules", "off"): lambda: called(B.mha.set_fastpath_enabled, False, True),
    ("order of contractions", "off"): lambda: attribute(B.opt_einsum, "enabled", False),
    ("NNPACK", "off"): lambda: B.nnpack.flags(enabled=False),
    ("forward-mode derivatives", "on"): torch.autograd.forward_ad.dual_level,
    ("threads of backward passes", "one"): lambda: torch.autograd.set_multithreading_enabled(False),
    ("random state", "another seed"): lambda: called(torch.manual_seed, 5, 0),
    ("print options", "short"): lambda: called(lambda n: torch.set_printoptions(precision=n), 1, 4),
}


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
    plain = settings_now()
    with around():
        assert settings_now() != plain, "the test sets what it says"
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
    with pytest.raises(ConfigError, match=r"expected torch without .*; .* before mizarr computes$"), around():
        doors[door]()
    assert not list(store.records())
    doors[door]()


@named(REFUSED)
@pytest.mark.parametrize("made", PUT_BACK.values(), ids=[" ".join(case) for case in PUT_BACK])
def test_a_call_that_is_refused_leaves_every_setting_as_it_was(setting, around, made, model):
    plain = settings_now()
    with made():
        before = settings_now()
        with pytest.raises(ConfigError, match="expected torch without"), around():
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

    def apply(self, x, point, allowed=None, held=None):
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
