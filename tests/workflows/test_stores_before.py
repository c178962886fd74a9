"""Stores of days before open, verify, are full cache hits, and take more.

before/store_2026-11-22.tar.xz was written by mizarr as it stood on 22 November 2026, 15:12 UTC (commit
4fd2c13), the other by that of 23 November, 11:42 UTC (afd5c17); both called themselves 0.1.0. What they hold
is in stores_before.py, which wrote them and is asked here. To write one again, with the libraries that
constraints.txt names:

    git worktree add CHECKOUT 4fd2c13 && mkdir LINKS OUT && ln -s $PWD/CHECKOUT LINKS/mizarr
    PYTHONPATH=LINKS python tests/workflows/stores_before.py 2026-11-22 OUT

On another processor numbers may differ in last bits. Families that came on 22 November itself are not in the
first store: what they are called in keys settled that evening.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr

from mizarr.pipeline import plan, run
from mizarr.pipeline.nodes import Node
from mizarr.stages.forward.architectures.known import SECOND_NAMES
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.source import ModelSource
from mizarr.store import Store, open_store
from mizarr.workflows import build
from tests.torch_free import without_torch

from . import stores_before as asked

PACKED = Path(__file__).with_name("before")

RUN_AGAIN = {
    "float64": "since 22 November, 17:53, models in float64 attend as the reference does: other numbers, so "
    "another model",
    "attention_patterns": "version 2 of attention_flow has the largest weight of all heads for one key's",
    "inspect_weights": "version 2 reads checkpoints of any format, and of packed ones what is packed",
}
"""What of the first store is no hit, on purpose, and why."""

TOLERANCE = {"bfloat16": 2**-7, "int8": 2**-6}
"""Of the largest number of an array, by the capture; of all others 1e-5, as between batches and devices.

Measured where they were written: captures of the second store, but for gradients, are computed today to the
same bits. Those of the first differ by up to 4e-7, since sums have one order for every batch (changelog: "the
same to the last bit in any batch"); gradients, experiments and what reads these captures by up to 2e-6, since
experiments have one for every number of threads, too. What takes fewer bits may fall to either side.
"""


class Before(NamedTuple):
    """A store of a day before, and the models it was written from."""

    day: str
    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def open(self) -> Store:
        return open_store(self.folder / "store", durability="process")

    @property
    def captures(self) -> dict[str, CaptureNode]:
        return asked.captures(self.models, self.day)

    @property
    def nodes(self) -> dict[str, list[Node]]:
        """All that is asked: captures, stages and experiments, and what workflows compute."""
        captured = self.captures
        single = {**captured, **asked.downstream(self.models, self.day, captured)}
        settings = asked.questions(self.models, self.day)
        whole = {name: list(build(name, **given).nodes.values()) for name, given in settings.items()}
        return {name: [node] for name, node in single.items()} | whole

    @property
    def hits(self) -> dict[str, list[Node]]:
        """Those whose numbers are what they were."""
        return {name: nodes for name, nodes in self.nodes.items() if name not in RUN_AGAIN}


def unpacked(day: str, folder: Path) -> Before:
    with tarfile.open(PACKED / f"store_{day}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Before(day, folder)


@pytest.fixture(params=asked.DAYS)
def before(request: pytest.FixtureRequest, tmp_path: Path) -> Before:
    return unpacked(request.param, tmp_path)


def files_of(store: Store) -> dict[str, tuple[int, bytes]]:
    """Time and bytes of every file but the index, which is made of the others."""
    found = sorted(
        path for path in Path(store.path).rglob("*") if path.is_file() and path.name != "index.sqlite"
    )
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models whose weights were loaded."""
    found: list[str] = []
    load = ModelSource.load

    def counted(self: ModelSource, **how: Any) -> Any:
        found.append(self.name)
        return load(self, **how)

    monkeypatch.setattr(ModelSource, "load", counted)
    return found


PROGRAM = """
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import stores_before as asked
from mizarr.pipeline import plan, run
from mizarr.store import open_store
from mizarr.workflows import build

day, folder, left_out = sys.argv[2], Path(sys.argv[3]), sys.argv[4].split()
store = open_store(folder / "store", durability="process")
damage, notes = store.verify(), sum(len(store.provenance(record)) for record in store.records())
captured = asked.captures(folder / "models", day)
nodes, said = {**captured, **asked.downstream(folder / "models", day, captured)}, {}
for name, node in nodes.items():
    if name not in left_out:
        said[name] = plan(node, store).is_cached
        run(node, store, quiet=True)
        said[name] = said[name] and node.open(store).load().nbytes > 0
for name, settings in asked.questions(folder / "models", day).items():
    if name not in left_out:
        workflow = build(name, **settings)
        said[name] = plan(workflow.nodes.values(), store).is_cached and len(workflow.run(store).to_json()) > 0
assert "torch" not in sys.modules
print(json.dumps([list(map(str, damage)), notes, said]))
"""


def test_it_opens_verifies_and_answers_without_torch(before):
    here = Path(asked.__file__).parent
    damage, notes, said = without_torch(PROGRAM, here, before.day, before.folder, " ".join(RUN_AGAIN))
    assert damage == [] and notes > 0
    assert said == dict.fromkeys(before.hits, True)


def test_a_full_cache_hit_loads_no_weights_and_writes_nothing(before, loads):
    store = before.open()
    held = files_of(store)
    for name, nodes in before.hits.items():
        for step in plan(nodes, store).steps:
            assert step.status.is_cached, (name, step.name, step.state)
        run(nodes, store, quiet=True)
    assert loads == [] and files_of(store) == held


def test_values_are_those_computed_today(before, tmp_path, loads):
    store, fresh = before.open(), open_store(tmp_path / "fresh", durability="process")
    for name, nodes in before.hits.items():
        run(nodes, fresh, quiet=True)
        for node in nodes:
            then, now = (node.open(where).load() for where in (store, fresh))
            require_alike(then, now, TOLERANCE.get(name, 1e-5), f"{name}, {node.name}")
    assert loads, "they were computed"


def require_alike(then: xr.Dataset, now: xr.Dataset, tolerance: float, where: str) -> None:
    """The same names, dims, labels and text, and numbers within the tolerance."""
    assert set(then.variables) == set(now.variables) and then.sizes == now.sizes, where
    for name in then.variables:
        one, other, about = then[name], now[name], f"{where}: {name}"
        assert (one.dims, one.dtype) == (other.dims, other.dtype), about
        if one.dtype.kind == "f" or one.dtype.name == "bfloat16":
            numbers = one.values.astype(np.float64)
            scale = np.nanmax(np.abs(numbers), initial=0.0)
            np.testing.assert_allclose(
                other.values.astype(np.float64), numbers, rtol=0, atol=tolerance * scale, err_msg=about
            )
        else:
            np.testing.assert_array_equal(one.values, other.values, err_msg=about)


def test_a_further_layer_is_added_beside_what_is_there(before, loads):
    """Of a variable of which the run holds some layers: those are neither computed nor written again."""
    store, held, name = before.open(), before.captures["whole"], asked.PARTLY[before.day]
    stored = sorted(layer for variable, layer in held.cells if variable == name)
    files, old = files_of(store), held.open(store)[name].values
    more = CaptureNode(held.source.name, list(asked.PROMPTS), f"blocks.*.hook_{name}")
    assert len(stored) < more.source.config.num_layers and more.run_key == held.run_key
    (step,) = plan(more, store).steps
    assert (step.status.is_cached, step.status.cells_cached) == (False, len(stored))
    run(more, store, quiet=True)
    assert loads == [more.source.name]
    found = more.open(store)[name].load()
    assert found["layer"].values.tolist() == list(range(more.source.config.num_layers))
    np.testing.assert_array_equal(found.sel(layer=stored).values, old)
    assert np.isfinite(found.values).all()
    now = files_of(store)
    assert {path: now.get(path) for path in files} == files and len(now) > len(files)
    again = open_store(store.path, mode="r")
    assert again.verify() == [] and plan([more, held], again).is_cached


def test_prompts_are_found_in_the_larger_run_of_then_and_others_are_computed(before, loads):
    store, held = before.open(), before.captures["whole"]
    model, hooks = held.source.name, "blocks.*.hook_resid_post"
    one, other = (CaptureNode(model, [text], hooks) for text in (asked.PROMPTS[1], "w9 w2"))
    assert plan(one, store).is_cached and not plan(other, store).is_cached
    run([one, other], store, quiet=True)
    assert loads == [model] and store.verify() == []
    words = [node.open(store).mi.prompt(0)["token_string"].values.tolist() for node in (one, other)]
    assert words == [[" w6", " w7", " w1"], [" w9", " w2"]]


def test_a_lost_index_is_filled_again_from_what_was_written_then(before):
    (before.folder / "store" / "index.sqlite").unlink()
    store, held = before.open(), before.captures["whole"]
    one = CaptureNode(held.source.name, [asked.PROMPTS[1]], "blocks.*.hook_resid_post")
    assert plan(held, store).is_cached and not plan(one, store).is_cached
    store.rebuild_index()
    assert plan(one, store).is_cached


@pytest.fixture
def first(tmp_path: Path) -> Before:
    return unpacked(asked.FIRST, tmp_path)


def test_what_is_computed_otherwise_now_says_why_and_stands_beside_what_was(first):
    store, nodes = first.open(), first.nodes
    held = files_of(store)
    (facts,) = plan(nodes["inspect_weights"], store).steps
    assert facts.state == "will run because version 1 -> 2"
    (wide,) = nodes["float64"]
    assert (
        wide.source.identity.attention == "eager"
        and first.captures["bfloat16"].source.identity.attention == "sdpa"
    )
    assert plan(wide, store).steps[0].state == "will run because this run is not stored yet"
    runs = len(list(store.entries()))
    for name in RUN_AGAIN:
        run(nodes[name], store, quiet=True)
    now = files_of(store)
    assert {name: now[name] for name in held} == held and len(list(store.entries())) == runs + 1
    assert store.verify() == []


def test_every_family_is_called_in_keys_what_it_was(tmp_path):
    """But for what is read today and was not then."""
    then = json.loads((unpacked(asked.SECOND, tmp_path).models / asked.ARCHITECTURES).read_text())
    now = asked.architectures()
    told = {(family, n): each for family, found in then.items() for n, each in enumerate(found) if each}
    # Second names of keys, which are read by now, or refused where they contradict the first.
    renamed = {
        (family, n)
        for family, names in SECOND_NAMES.items()
        for n, sizes in enumerate(asked.SIZES)
        if set(names) & set(sizes)
    }
    assert len(told) > 250
    # Their rope turned hidden_size / heads numbers of a head, whatever head_dim said.
    mended = {(family, 1) for family in ("lfm2", "lfm2_moe", "lfm2_vl")}
    # A head_dim beside another qk_rope_head_dim is refused: the reference makes the angles of head_dim.
    refused = {("youtu", 1)}
    assert all(now[family][n] is None for family, n in refused)
    told = {place: each for place, each in told.items() if place not in renamed | mended | refused}
    assert len(told) > 180
    assert {(family, n): now[family][n] for family, n in told} == told
