"""Functions without a version: a change to anything they read is another key, or they are refused."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import functions_for_tests as lib
import numpy as np
import pytest
import stages_for_tests
import xarray as xr
from hypothesis import given, strategies as st

from mizarr.pipeline import run, stage, stage_node
from mizarr.pipeline.code import code_version
from mizarr.store.errors import StageError

SCRIPT = Path(lib.__file__)


def elsewhere(folder: Path, how: str, seed: int) -> dict[str, list]:
    """Every case in a fresh process, on empty stores, in another folder, under another hash seed."""
    folder.mkdir()
    env = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, str(SCRIPT), str(folder), how]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What processes of their own say: as it is, after the change, in another order and on other lines."""
    ways = ("unchanged", "changed", "moved")
    return {
        how: elsewhere(tmp_path_factory.mktemp(how) / "there", how, seed) for seed, how in enumerate(ways)
    }


@pytest.fixture
def case(request, tmp_path, monkeypatch):
    """The modules of a case, in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(statistics, "median", statistics.median)  # a case replaces it
    return request.param, *lib.modules(tmp_path, f"{request.param} here", *texts(request.param))


def texts(name: str) -> tuple[str, str]:
    if name in lib.REFUSED:
        return lib.REFUSED[name], "K = 5"
    return lib.CASES[name].mine, lib.CASES[name].other


# Changes


@pytest.mark.parametrize("case", lib.CASES, indirect=True)
def test_after_a_change_the_answer_is_that_of_a_fresh_process(case, store, processes):
    name, mine, other = case
    function = lib.declared(mine)
    before, version = lib.answer(function, store), function.key_version
    assert lib.answer(function, store) == before == processes["unchanged"][name][0]
    exec(lib.CASES[name].change, {"mine": mine, "other": other})
    assert function.key_version != version
    assert lib.answer(function, store) == processes["changed"][name][0] != before


@pytest.mark.parametrize("name", lib.CASES)
def test_what_is_unchanged_keeps_its_key_in_another_process_and_place(name, processes):
    assert processes["unchanged"][name] == processes["moved"][name]
    assert processes["unchanged"][name][1] != processes["changed"][name][1]


@pytest.mark.parametrize("case", lib.REFUSED, indirect=True)
def test_what_has_no_identity_is_refused_where_it_is_used(case):
    _, mine, _ = case
    function = lib.declared(mine)
    refusal = r"stage 'f' has no version.* can be keyed, found .* declare version="
    with pytest.raises(StageError, match=refusal):
        function.on(x=xr.DataArray([1.0], dims="n"))


@pytest.mark.parametrize("case", lib.REFUSED, indirect=True)
def test_a_declared_version_needs_no_identity(case):
    _, mine, _ = case
    function = stage(version=3, inputs={"x": ("n",)}, outputs={"y": ("n",)})(mine.f)
    assert function.on(x=xr.DataArray([1.0], dims="n")).stage.key_version == 3


def test_a_refusal_names_the_variable_and_the_function():
    source = np.random.default_rng(0)

    def helper():
        return source.random()

    with pytest.raises(
        StageError, match=r"numpy.random.*Generator.* in closure 'source' of function '.*helper'"
    ):
        code_version("metric 'm'", lambda x: x * helper())


def test_comments_and_places_do_not_count_but_constants_do():
    def made(text: str):
        space: dict = {"__name__": "mine"}
        exec(text, space)
        return space["f"]

    plain = code_version("it", made("def f(x): return x * 5"))
    assert code_version("it", made("# why\n\ndef f(x):\n    # what\n    return x * 5")) == plain
    assert code_version("it", made("def f(x): return x * 5.0")) != plain
    assert code_version("it", made("def f(x): return x * True")) != code_version(
        "it", made("def f(x): return x * 1")
    )


def test_two_lambdas_on_one_line_are_told_apart():
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert code_version("it", one) != code_version("it", two)


def test_a_file_edited_after_it_was_loaded_is_not_what_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mine, _ = lib.modules(tmp_path, "edited", "def f(x): return x * 5")
    before = lib.declared(mine).key_version
    Path(mine.__file__).write_text("def f(x): return x * 7\n")
    assert lib.declared(mine).key_version == before


def test_what_a_library_holds_counts_by_name():
    def calling(function):
        return lambda x: function(x) + 0

    functions = [
        np.mean,
        np.median,
        np.add,
        xr.dot,
        statistics.median,
        len,
        str.upper,
        np.ndarray.mean,
        math.sqrt,
    ]
    versions = [code_version("it", calling(each)) for each in functions]
    assert len(set(versions)) == len(functions)
    assert [code_version("it", calling(each)) for each in functions] == versions


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text("ab"), inner)
    ),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_plain_values_are_equal_exactly_where_they_are_spelled_alike(one, other):
    def reading(value):
        return lambda x: (x, value)

    same = code_version("it", reading(one)) == code_version("it", reading(other))
    assert same == (repr(one) == repr(other))
    assert code_version("it", reading(one)) == code_version("it", reading(copy.deepcopy(one)))


def test_tensors_count_by_content():
    import torch

    held = torch.arange(6.0).reshape(2, 3)

    def read(x):
        return x * held

    before = code_version("it", read)
    held[1, 2] = 7
    after = code_version("it", read)
    held = held.T.contiguous().T
    assert before != after == code_version("it", read)
    held = held.double()
    assert code_version("it", read) != after


# Between planning and publishing

K = 5


def scaled(x):
    """Reads a global of this module."""
    return x * K


def nodes():
    function = stage(inputs={"x": ("n",)}, outputs={"y": ("n",)})(scaled)
    return function.on(x=xr.DataArray([1.0], dims="n", name="x"))


def test_a_change_between_planning_and_running_publishes_nothing(store, monkeypatch):
    node = nodes()
    (cell,) = node.cells(store)
    monkeypatch.setitem(globals(), "K", 7)
    with pytest.raises(
        StageError,
        match=r"code of stage 'scaled', or a value that it reads, changed since the run was planned \(code:",
    ):
        stage_node.run_cell(node, store, cell)
    assert not list(store.records())
    run(node, store)
    assert node.open(store)["y"].item() == 7


@pytest.mark.parametrize("lazy", [False, True])
def test_a_function_that_changes_what_it_reads_publishes_nothing(lazy, store, monkeypatch):
    seen: list[float] = []

    def grow(block):
        seen.append(1.0)
        return block * len(seen)

    def f(x):
        return x.copy(data=x.chunk().data.map_blocks(grow, meta=np.empty(0))) if lazy else grow(x)

    monkeypatch.setattr(stage_node, "LOADED", -1)
    node = stage(inputs={"x": ("n",)}, outputs={"y": ("n",)})(f).on(x=xr.DataArray([1.0], dims="n", name="x"))
    with pytest.raises(StageError, match="is changed by the function itself"):
        run(node, store)
    assert not list(store.records())


def test_a_change_by_another_thread_while_it_runs_publishes_nothing(store):
    scale = [5.0]

    def f(x):
        product = x * scale[0]
        time.sleep(0.3)
        return product

    node = stage(inputs={"x": ("n",)}, outputs={"y": ("n",)})(f).on(x=xr.DataArray([1.0], dims="n", name="x"))
    (cell,) = node.cells(store)
    thread = threading.Timer(0.1, lambda: scale.__setitem__(0, 7.0))
    thread.start()
    with pytest.raises(StageError, match="changed since the run was planned"):
        stage_node.run_cell(node, store, cell)
    thread.join()
    assert not list(store.records())


# Other processes

AS_MAIN = """
import sys
import cloudpickle, xarray as xr, mizarr
from mizarr.pipeline import stage
K = {"a": [5.0]}
class C:
    k = 2
    def m(self, x): return x * self.k * K["a"][0]
@stage(inputs={"x": ("n",)}, outputs={"y": ("n",)})
def f(x, *, add: float = 1.0): return C().m(x) + add
node = f.on(x=xr.DataArray([1.0], dims="n", name="x"))
store = mizarr.open_store(sys.argv[1])
node.inputs[0].keep(store)
sys.stdout.buffer.write(cloudpickle.dumps((node, node.cells(store)[0], f.key_version)))
"""


def test_a_function_of_a_notebook_is_the_same_one_on_a_worker(tmp_path, store):
    command = [sys.executable, "-c", AS_MAIN, str(store.path)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    node, cell, version = pickle.loads(ended.stdout)
    assert node.stage.key_version == version
    stage_node.run_cell(node, store, cell)
    assert node.open(store)["y"].item() == 11


def test_a_worker_that_finds_other_code_under_the_name_publishes_nothing(store, monkeypatch):
    function = stages_for_tests.halved
    node = function.on(x=xr.DataArray([1.0], dims="n", name="x"))
    node.inputs[0].keep(store)
    sent = pickle.dumps((node, node.cells(store)[0]))
    held = len(list(store.records()))
    monkeypatch.setattr(stages_for_tests, "DIVISOR", 3)
    came, cell = pickle.loads(sent)
    with pytest.raises(StageError, match="or differs on this worker"):
        stage_node.run_cell(came, store, cell)
    assert len(list(store.records())) == held


def test_asking_for_a_version_imports_no_torch():
    code = (
        "import sys, numpy as np\n"
        "from mizarr.pipeline.code import code_version\n"
        "def f(x):\n"
        "    import torch\n"
        "    from torch.nn.functional import relu\n"
        "    return relu(torch.tensor(np.asarray(x)))\n"
        "assert code_version('f', f).startswith('code:')\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_values_nested_too_deep_are_refused_without_naming_one_of_their_places():
    """The walk ends in the middle; the place that it had reached says nothing about the value."""
    nested: dict[str, object] = {}
    for _ in range(sys.getrecursionlimit()):
        nested = {"inner": nested}
    with pytest.raises(StageError, match="nested too deep to be read, in its declaration;"):
        code_version("it", nested)
