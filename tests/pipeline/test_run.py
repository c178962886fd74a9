"""What runs, what does not, and what is left when it is interrupted."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import stages_for_tests as lib
import xarray as xr
from dask.delayed import delayed

import mizarr
from mizarr.pipeline import Stage, plan, run
from mizarr.store.errors import PlanError, ReadOnlyStore, ShapeError, SourceChanged, StageError


def bumped(stage: Stage, version: int) -> Stage:
    """The stage as its author would leave it after a new version."""
    return Stage(**{field.name: getattr(stage, field.name) for field in fields(stage)} | {"version": version})


def chain(stage=lib.norm, **source):
    states = lib.source(**source)["resid_post"]
    return lib.largest.on(norm=stage.on(states=states))


# Cached, or not


def test_a_second_run_computes_nothing(store):
    run(chain(), store)
    assert lib.calls() == ["source", "norm", "largest"]
    run(chain(), store)
    assert lib.calls() == ["source", "norm", "largest"]
    expected = lib.norm(lib.states()).max("token").values
    np.testing.assert_array_equal(chain().open(store)["top"], expected)


def test_another_parameter_is_another_result(store):
    states = lib.source()["resid_post"]
    run([lib.norm.on(states=states, power=power) for power in (1.0, 2.0, 2.0)], store)
    assert lib.calls().count("norm") == 2


def test_the_variable_that_is_read_is_part_of_the_key(store):
    both = xr.Dataset({"a": lib.states(), "b": 2 * lib.states()})
    constant = mizarr.pipeline.ConstantNode(both)
    a, b = (lib.norm.on(states=constant[name]) for name in "ab")
    run([a, b], store)
    np.testing.assert_allclose(2 * a.open(store)["norm"], b.open(store)["norm"], rtol=1e-6)


def test_an_upstream_that_gives_the_same_bytes_leaves_downstream_cached(store):
    run(chain(), store)
    run(chain(version=2), store)
    assert lib.calls() == ["source", "norm", "largest", "source"]
    run(chain(stage=bumped(lib.norm, 2), version=2), store)
    assert lib.calls()[4:] == ["norm"]


def test_an_upstream_that_gives_other_bytes_runs_downstream_again(store):
    run(chain(), store)
    run(chain(scale=2.0), store)
    assert lib.calls()[3:] == ["source", "norm", "largest"]


def test_an_array_in_hand_is_known_by_its_content(store):
    run(lib.norm.on(states=lib.states()), store)
    run(lib.norm.on(states=lib.states()), store)
    run(lib.norm.on(states=lib.states() + 1), store)
    assert lib.calls() == ["norm", "norm"]


def test_changing_an_array_after_it_was_given_does_not_change_what_is_computed(store):
    given = lib.states()
    node = lib.norm.on(states=given)
    given.values[:] = 0
    run(node, store)
    np.testing.assert_array_equal(node.open(store)["norm"], lib.norm(lib.states()))


# Cells


def test_each_layer_is_a_cell_and_they_are_stacked(store):
    node = lib.layer_mean.on(states=lib.source()["resid_post"])
    run(node, store)
    assert sorted(lib.calls()) == ["layer-0", "layer-1", "layer-2", "source"]
    np.testing.assert_array_equal(node.open(store)["mean"], lib.states().mean("token"))
    assert node.open(store)["layer"].values.tolist() == [0, 1, 2]


def test_one_more_layer_computes_one_layer(store):
    run(lib.layer_mean.on(states=lib.source(layers=3)["resid_post"]), store)
    more = lib.layer_mean.on(states=lib.source(layers=4)["resid_post"])
    run(lib.source(layers=4), store)
    assert plan(more, store).steps[-1].state == "will run because layer 3 missing"
    run(more, store)
    assert lib.calls()[-1] == "layer-3" and lib.calls().count("layer-0") == 1
    assert more.open(store).sizes["layer"] == 4


def test_each_segment_is_a_cell_and_one_more_segment_computes_one(store):
    weight = xr.Dataset({"w": 2.0})
    eight = lib.states(tokens=8).to_dataset()
    node = lib.total.on(states=lib.Segmented(eight.isel(token=slice(0, 6)), 3), weight=weight)
    run(node, store, threads=1)
    assert lib.calls() == ["segment-3"] * 2
    longer = lib.total.on(states=lib.Segmented(eight, 3), weight=weight)
    assert plan(longer, store).steps[-1].state == "will run because 1 of 3 segments missing"
    run(longer, store)
    assert lib.calls() == ["segment-3"] * 2 + ["segment-2"]
    np.testing.assert_allclose(longer.open(store)["total"], 2 * lib.states(tokens=8).sum("token"))


def test_inputs_without_the_cut_axis_enter_every_cell(store):
    segments = lib.Segmented(lib.states().to_dataset(), 4)
    run(lib.total.on(states=segments, weight=xr.Dataset({"w": 1.0})), store)
    run(lib.total.on(states=segments, weight=xr.Dataset({"w": 3.0})), store)
    assert len(lib.calls()) == 4


def test_cells_of_inputs_with_different_layers_are_refused(store):
    @mizarr.pipeline.stage(
        version=1, inputs={"a": lib.TLH, "b": lib.TLH}, outputs={"d": lib.TLH}, cells="layer"
    )
    def difference(a, b):
        return a - b

    with pytest.raises(ShapeError, match="inputs must have the same layers"):
        run(difference.on(a=lib.states(layers=2), b=lib.states(layers=3)), store)


# Failing, stopping, going on


def test_a_failing_cell_is_named_and_leaves_the_finished_ones(store):
    states = lib.source(layers=4)["resid_post"]
    failing = lib.layer_mean.on(states=states, fail_at=0)
    with pytest.raises(ShapeError, match="stage 'layer_mean' at layer 0 failed: no such layer today"):
        run(failing, store, threads=1)
    done = plan(failing, store).steps[-1].status
    assert done.cells == 4 and done.cells_cached == sum(name.startswith("layer") for name in lib.calls())


def test_errors_that_are_not_ours_become_stage_errors_with_the_cell(store):
    @mizarr.pipeline.stage(version=1, inputs={"x": lib.TLH}, outputs={"y": lib.TLH}, cells="layer")
    def broken(x):
        return 1 / 0

    with pytest.raises(StageError, match=r"stage 'broken' at layer [012] failed: ZeroDivisionError"):
        run(broken.on(x=lib.states()), store)


SWEEP = """
import mizarr, stages_for_tests as lib
from mizarr.pipeline import run
store = mizarr.open_store({store!r}, durability="process")
print("ready", flush=True)
run(lib.layer_mean.on(states=lib.source(layers=8)["resid_post"], delay={delay}), store, threads=2)
"""


def sweep(store, delay: float) -> subprocess.Popen[str]:
    """A sweep of 8 layers in a process of its own."""
    code = SWEEP.format(store=str(store.path), delay=delay)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_layers(count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while sum(name.startswith("layer") for name in lib.calls()) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_an_interrupted_sweep_goes_on_where_it_was(store, how):
    process = sweep(store, 0.4)
    wait_for_layers(5, process)  # the first four are published before the next two start
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else -signal.SIGINT), errors
    node = lib.layer_mean.on(states=lib.source(layers=8)["resid_post"], delay=0.4)
    done = plan(node, store).steps[-1].status
    assert 3 <= done.cells_cached < 8
    before = len(lib.calls())
    run(node, store, threads=4)
    assert len(lib.calls()) - before == 8 - done.cells_cached
    np.testing.assert_array_equal(node.open(store)["mean"], lib.states(8).mean("token"))


# Budgets


def test_a_plan_that_cannot_fit_is_refused_before_anything_runs(store):
    with pytest.raises(PlanError, match=r"norm needs about 768 B of memory at once, and .* allows 700 B"):
        run(lib.norm.on(states=lib.states()), store, memory=700)
    assert lib.calls() == []
    run(lib.norm.on(states=lib.states()), store, memory="1 KiB")
    assert lib.calls() == ["norm"]


def test_a_read_only_store_is_refused_before_anything_runs(store):
    reader = mizarr.open_store(store.path, mode="r")
    with pytest.raises(ReadOnlyStore, match="results of norm are not stored yet"):
        run(lib.norm.on(states=lib.states()), reader)
    assert lib.calls() == []


def test_a_cached_plan_runs_on_a_read_only_store(store):
    run(chain(), store)
    run(chain(), mizarr.open_store(store.path, mode="r"))


# Clusters


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as found:
        yield found


@pytest.mark.slow
def test_a_cluster_gives_the_same_content_as_threads(store, tmp_path, cluster):
    """Two worker processes, found by address, against the threads of this one."""
    here = mizarr.open_store(tmp_path / "here", durability="process")
    layers = lib.layer_mean.on(states=lib.source(layers=6)["resid_post"])
    segments = lib.total.on(states=lib.Segmented(lib.states().to_dataset(), 3), weight=xr.Dataset({"w": 2.0}))
    run([layers, segments], here)
    run([layers, segments], store, cluster=cluster.scheduler_address)
    for node in (layers, segments):
        assert node.record(store).content == node.record(here).content


@pytest.mark.slow
def test_a_failing_cell_on_a_cluster_is_named_and_leaves_the_finished_ones(store, cluster):
    failing = lib.layer_mean.on(states=lib.source(layers=4)["resid_post"], fail_at=3)
    with pytest.raises(ShapeError, match="stage 'layer_mean' at layer 3 failed: no such layer today"):
        run(failing, store, cluster=cluster.scheduler_address)
    fine = lib.layer_mean.on(states=lib.source(layers=4)["resid_post"])
    run(fine, store, cluster=cluster.scheduler_address)
    np.testing.assert_array_equal(fine.open(store)["mean"], lib.states(4).mean("token"))


def test_a_cluster_that_is_not_there_is_told(store, monkeypatch):
    distributed = pytest.importorskip("distributed")

    def refuse(*args, **kwargs):
        raise OSError("Timed out")

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(PlanError, match=r"there is no Dask scheduler at 'tcp://127.0.0.1:1'"):
        run(lib.norm.on(states=lib.states()), store, cluster="tcp://127.0.0.1:1")


def test_an_array_in_hand_travels_as_a_key_not_as_bytes(store):
    big = lib.states(tokens=50_000).to_dataset()
    node = lib.norm.on(states=mizarr.pipeline.ConstantNode(big)["resid_post"])
    node.inputs[0].keep(store)
    sent = pickle.dumps(node)
    assert len(sent) < 5_000 < big.nbytes
    (constant,) = pickle.loads(sent).inputs
    assert constant.open(store).identical(big)
    assert store.lineage(constant.content)["label"] == "constant/1"


def test_a_worker_finds_the_key_of_a_stage_whose_source_it_cannot_make(store):
    """Of a stage of a stage it looks up the one between, down to the source."""
    run(chain(), store)
    sent = pickle.loads(pickle.dumps(chain()))
    assert sent.key(store) == chain().key(store) is not None


def test_no_more_cells_run_at_once_than_fit_the_budget(store):
    running, most = [], []

    def work(job, store, cell):
        running.append(cell)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(cell)

    cells = [{"layer": number} for number in range(12)]
    with mizarr.pipeline.Context(threads=8, memory=25) as context:
        context.map(work, lib.norm, store, cells, peak=10)
    assert len(most) == 12 and max(most) == 2


# What it costs to find that nothing has to run

CACHED = """
import sys, mizarr, stages_for_tests as lib
from mizarr.pipeline import plan, run
store = mizarr.open_store({store!r})
node = lib.largest.on(norm=lib.norm.on(states=lib.source()["resid_post"]))
loaded = set(sys.modules)
run(node, store)
print(sorted({{"torch", "dask", "distributed", "zarr"}} & (set(sys.modules) - loaded)))
"""


def test_a_cached_plan_imports_no_torch_no_dask_no_zarr(store):
    run(chain(), store)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    code = CACHED.format(store=str(store.path))
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_running_stages_never_imports_torch(store):
    code = SWEEP.format(store=str(store.path), delay=0) + "\nimport sys; print('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)
    assert done.stdout.split() == ["ready", "False"], done.stderr


def test_a_long_chain_is_looked_at_once_per_node(store, monkeypatch):
    @mizarr.pipeline.stage(version=1, inputs={"x": lib.TLH}, outputs={"y": lib.TLH})
    def plus_one(x):
        return x + 1

    node = lib.states()
    for _ in range(12):
        node = plus_one.on(x=node)
    run(node, store)
    looks = []
    lookup = type(store).lookup
    monkeypatch.setattr(type(store), "lookup", lambda self, key: looks.append(key) or lookup(self, key))
    assert plan(node, store).is_cached
    assert len(looks) <= 3 * 12


def test_what_changes_between_its_digest_and_its_use_is_refused(store):
    """A lazy array is read again when it is computed with: a file that was written meanwhile is another
    one."""
    held = np.arange(6.0).reshape(1, 2, 3)
    blocks = da.from_delayed(delayed(held.copy)(), held.shape, held.dtype)
    lazy = xr.DataArray(blocks, dims=("layer", "token", "hidden"), coords={"layer": [0]}, name="states")
    node = lib.norm.on(states=lazy)
    held[0, 0, 0] = 100.0
    with pytest.raises(SourceChanged, match="an input array changed while the workflow ran"):
        run(node, store)
    assert not list(store.records())
    run(lib.norm.on(states=lazy), store)
    assert float(lib.norm.on(states=lazy).open(store)["norm"].max()) > 99
