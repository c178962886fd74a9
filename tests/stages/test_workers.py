"""Workers share captures, experiments, graphs and stages, and give what one process gives, to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.pipeline.clusters import local, local_workers, threads_per_worker
from mizarr.pipeline.context import Group, selection_of
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.geometry import pca
from mizarr.stages.graph import node as graphs
from mizarr.stages.graph.graph import graph_node
from mizarr.store.errors import PlanError

from .forward.random_models import save_random_model
from .graph.random_transcoders import save_random_transcoders

RESID = "blocks.*.hook_resid_post"
GRAPHED = [3, 9, 27, 81, 5, 14]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random_model(path, "llama", 3)
    return path


@pytest.fixture(scope="module")
def clt(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> mizarr.Dictionary:
    at = tmp_path_factory.mktemp("dictionaries") / "clt"
    model = mizarr.Model.from_pretrained(folder)
    return mizarr.Dictionary.from_pretrained(save_random_transcoders(at, model, "clt-jumprelu"))


def everything(folder, clt, codec=None):
    """A node of each kind that runs a model, and a stage on what is captured. codec: of one capture."""
    drawn = np.random.default_rng(11)
    prompts = [drawn.integers(1, 250, size).tolist() for size in drawn.integers(3, 40, 24)]
    states = CaptureNode(folder, prompts, RESID, segment_tokens=32, codec=codec)
    graph = graph_node(str(folder), clt, GRAPHED)
    small = CaptureNode(folder, prompts, RESID, storage_dtype="int8", segment_tokens=32)
    return [states, small, pca.moments.on(states=states["resid_post"]), patched(folder), graph]


def patched(folder):
    """Layers of two kinds, one cell each."""
    clean, corrupted = (0, 7, 42, 99, 5, 13), (0, 7, 250, 31, 5, 13)
    return ActivationPatching(clean=clean, corrupted=corrupted, kinds=("resid_pre", "z"), metrics=(KL(),)).on(
        str(folder)
    )


def contents(store):
    """Of every key what is stored under it."""
    return {record.key: record.content for record in store.records()}


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of this size are cells, too."""
    monkeypatch.setattr(graphs, "CELL_BYTES", 4000)


@pytest.fixture
def alone(folder, clt, tmp_path, small_cells):
    """What one process gives."""
    store = mizarr.open_store(tmp_path / "alone", durability="process")
    run(everything(folder, clt), store)
    found = contents(store)
    assert sum(record.label.startswith("attribution_graph/cell") for record in store.records()) > 2
    return found


def test_a_cluster_gives_the_same_bits_of_everything(folder, clt, tmp_path, alone, monkeypatch):
    """Two workers in this process: tasks travel as they would, and start at once."""
    from distributed import LocalCluster

    here = {"processes": False, "protocol": "tcp", "host": "127.0.0.1", "dashboard_address": None}
    store = mizarr.open_store(tmp_path / "cluster", durability="process")
    with LocalCluster(n_workers=2, threads_per_worker=1, **here) as cluster:
        *nodes, _ = everything(folder, clt, codec="zstd")  # contents are those of plain files
        run(nodes, store, cluster=cluster.scheduler_address)
        mizarr.attribution_graph(folder, clt, GRAPHED, store=store, cluster=cluster.scheduler_address)
        done = set(cluster.scheduler.task_prefixes)
    assert contents(store) == alone
    # What was told to go there went there, graphs too.
    assert {"capture", "moments", "activation_patching", "attribution_graph"} <= done


@pytest.mark.slow
def test_workers_of_this_machine_give_the_same_bits_of_everything(folder, clt, tmp_path, alone, capfd):
    store = mizarr.open_store(tmp_path / "workers", durability="process")
    run(everything(folder, clt, codec="zstd"), store, workers=2, quiet=False)
    assert {entry.layout("resid_post").codec for entry in store.entries()} == {"zstd", ""}
    assert contents(store) == alone
    said = capfd.readouterr().err
    assert f"2 workers, each with {threads_per_worker(2)} thread" in said
    assert "distributed" not in said  # its log is for its developers


@pytest.mark.slow
def test_workers_are_what_their_shares_say(monkeypatch):
    """Environment and resources of real processes, with GPUs that a driver would have shown; and nothing is
    left of them afterwards."""
    from distributed import Client

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    with local_workers(3) as address, Client(address, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=60)
        seen = client.run(
            lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"], os.getpid())
        )
        about = client.scheduler_info(n_workers=-1)["workers"].values()
    assert sorted(cards for cards, _, _ in seen.values()) == ["", "3", "GPU-a"]
    assert {threads for _, threads, _ in seen.values()} == {"2"}
    assert sorted(each["resources"].get("GPU", 0) for each in about) == [0, 1, 1]
    assert sum(each["memory_limit"] for each in about) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    for _, _, pid in seen.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_work_that_needs_a_gpu_goes_where_one_is(folder, tmp_path):
    """Two workers in this process, one with the resource: every segment is computed there."""
    from distributed import Scheduler, SpecCluster, Worker

    place = {"host": "127.0.0.1", "dashboard": False}
    workers = {
        name: {"cls": Worker, "options": {**place, "nthreads": 1, "resources": resources}}
        for name, resources in {"plain": {}, "card": {"GPU": 1}}.items()
    }
    scheduler = {"cls": Scheduler, "options": {**place, "port": 0}}
    where: set[str] = set()
    with SpecCluster(workers, scheduler, silence_logs=40) as cluster:

        class Seen:
            """Told of every task where it ended."""

            def transition(self, key, start, finish, *args, worker=None, **kwargs):
                if finish == "memory" and str(key).startswith("capture"):
                    where.add(worker)

            async def close(self):
                pass

        from distributed.diagnostics.plugin import SchedulerPlugin

        plugin = type("SeenPlugin", (Seen, SchedulerPlugin), {})()
        cluster.scheduler.add_plugin(plugin)
        states = CaptureNode(folder, [[1, 2, 3]] * 40, RESID, segment_tokens=32)
        run(states, mizarr.open_store(tmp_path), cluster=cluster.scheduler_address)
        assert where == {cluster.workers["card"].address}


def test_every_gpu_is_of_one_worker_and_the_rest_have_none():
    shares = [local.share_of(number, 2, ["0", "MIG-7"]) for number in range(3)]
    assert [share["env"]["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0", "MIG-7", ""]
    assert [share["resources"] for share in shares] == [{"GPU": 1}, {"GPU": 1}, {}]
    assert "CUDA_VISIBLE_DEVICES" not in local.share_of(0, 2, [])["env"]


@pytest.mark.parametrize(
    ("said", "found"), [("0,2", ["0", "2"]), ("", []), ("-1", []), (" 1 , GPU-x", ["1", "GPU-x"])]
)
def test_gpus_are_those_this_process_may_use(said, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert local.visible_gpus() == found


def test_gpus_are_those_of_the_driver_where_nobody_says(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "_GPUS", tmp_path / "gpus")
    assert local.visible_gpus() == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert local.visible_gpus() == ["0", "1"]


def test_threads_are_shared_equally(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert [threads_per_worker(count) for count in (1, 2, 3, 20)] == [8, 4, 2, 1]


def test_cells_of_a_prompt_are_one_task_unless_workers_would_wait(folder):
    """Shares of 24 cells of one prompt; every cell is in one, once, in order."""
    node = patched(folder)
    cells = list(node.cells())
    for width in (1, 2, 3, 7, 100):
        shares = node._worker_groups(cells, width)
        assert [cell for share in shares for cell in share] == cells
        assert len(shares) <= width
        assert max(map(len, shares)) == -(-len(cells) // min(width, len(cells)))


def test_a_group_is_told_by_its_ends():
    group = Group(({"kind": "z", "layer": 0}, {"kind": "z", "layer": 1}, {"kind": "z", "layer": 2}))
    assert selection_of(group) == {"kind": "z", "layer": "0 to 2"}


def test_a_model_in_memory_a_store_in_memory_and_two_kinds_of_workers_are_refused(folder, clt, tmp_path):
    store = mizarr.open_store(tmp_path)
    with pytest.raises(PlanError, match=r"a cluster \('tcp://127\.0\.0\.1:1'\) and 2 workers .*; leave out"):
        run(patched(folder), store, cluster="tcp://127.0.0.1:1", workers=2)
    model = mizarr.Model.from_pretrained(folder)
    with pytest.raises(PlanError, match="expected a model by name"):
        mizarr.capture(model, [[1, 2]], RESID, store=store, workers=2, progress=False)
    with pytest.raises(PlanError, match="found 2 workers"):
        mizarr.capture(folder, [[1, 2]], RESID, store=store, workers=2, order="layer", progress=False)
    with pytest.raises(PlanError, match="expected a model by name"):
        mizarr.attribution_graph(model, clt, GRAPHED, store=store, workers=2)
    with pytest.raises(PlanError, match="expected a store that the workers of"):
        mizarr.attribution_graph(folder, clt, GRAPHED, cluster="tcp://127.0.0.1:1")
    pytest.importorskip("obstore")
    with pytest.raises(PlanError, match="worker processes cannot read the store memory://"):
        run(patched(folder), mizarr.open_store("memory://workers/x"), workers=2)
    assert not list(store.records())
    assert not (tmp_path / "data").exists() or not any((tmp_path / "data").iterdir())
