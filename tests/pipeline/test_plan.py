"""What `explain` says, and what it costs."""

from __future__ import annotations

import time

import pytest
import stages_for_tests as lib

import mizarr
from mizarr.pipeline import Stage, plan, run
from mizarr.pipeline.memory import measured, setting_up
from mizarr.pipeline.nodes import Estimate, Status
from mizarr.pipeline.plan import Plan, Step, as_bytes, human_bytes, in_order
from mizarr.pipeline.reasons import differences, missing_cells, scaled_seconds
from mizarr.pipeline.sources import SourceNode
from mizarr.store.errors import PlanError


def states_of(nodes, store) -> list[str]:
    return [step.state for step in plan(nodes, store).steps]


def norm_and_source(**params):
    return lib.norm.on(states=lib.source()["resid_post"], **params)


def test_what_never_ran_says_so_and_what_reads_it_waits(store):
    assert states_of(norm_and_source(), store) == [
        "will run because there is no result yet",
        "will run because input source will run",
    ]


def test_what_ran_is_cached(store):
    run(norm_and_source(), store)
    assert states_of(norm_and_source(), store) == ["cached", "cached"]


def test_a_changed_parameter_is_named_with_both_values(store):
    run(norm_and_source(power=2.0), store)
    run(norm_and_source(power=3.0), store)
    found = states_of(norm_and_source(power=4.0), store)
    assert found[1] in (f"will run because parameter power changed {old} -> 4.0" for old in (2.0, 3.0))


def test_a_changed_version_is_named_with_both(store):
    run(lib.source(version=1), store)
    assert states_of(lib.source(version=2), store) == ["will run because version 1 -> 2"]


def test_a_changed_input_is_named(store):
    run(lib.norm.on(states=lib.states()), store)
    changed = lib.norm.on(states=lib.states() + 1)
    assert states_of(changed, store) == ["will run because input states[resid_post] changed"]


def test_a_removed_result_is_named(store):
    node = lib.norm.on(states=lib.states())
    run(node, store)
    store.files.delete(node.record(store).path)
    assert states_of(node, store) == ["will run because there is no result yet"]


def test_cells_that_stand_but_were_never_joined_are_told(store):
    node = lib.layer_mean.on(states=lib.states())
    run(node, store)
    store.files.delete(node.record(store).path)
    assert states_of(node, store) == ["will run because its cells are stored, but not joined yet"]
    run(node, store)
    assert len(lib.calls()) == 3


def test_another_source_at_the_same_version_is_a_warning_not_a_miss(store):
    node = lib.norm.on(states=lib.states())
    run(node, store)
    fields = {**lib.norm.__dict__, "source": "0" * 64}
    edited = Stage(**{name: fields[name] for name in Stage.__dataclass_fields__})
    (state,) = states_of(edited.on(states=lib.states()), store)
    assert (
        state
        == "cached (the source code of norm changed since this result was computed, its version 1 did not)"
    )


def test_explaining_computes_nothing_and_leaves_no_trace(store, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    reader = mizarr.open_store(store.path, mode="r")
    plan(norm_and_source(), reader).to_json()
    assert lib.calls() == []
    assert sorted(tmp_path.rglob("*")) == before


def test_bytes_are_those_of_the_inputs_and_memory_twice_that(store):
    (step,) = plan(lib.norm.on(states=lib.states()), store).steps
    assert step.estimate.bytes_read == lib.states().nbytes
    assert step.estimate.peak_bytes == 2 * lib.states().nbytes


def test_memory_of_a_cut_stage_is_that_of_one_cell(store):
    (step,) = plan(lib.layer_mean.on(states=lib.states(layers=4)), store).steps
    assert step.status.cells == 4
    assert step.estimate.bytes_read == lib.states(layers=4).nbytes
    assert step.estimate.peak_bytes == 2 * lib.states(layers=1).nbytes


def test_seconds_are_known_once_the_stage_has_run_and_scale_with_the_bytes(store):
    assert plan(lib.norm.on(states=lib.states()), store).seconds is None
    node = lib.norm.on(states=lib.states())
    run(node, store)
    took = store.provenance(node.record(store))[0]["seconds"]
    twice = plan(lib.norm.on(states=lib.states(layers=6)), store)
    assert twice.seconds == pytest.approx(2 * took, abs=2e-3)
    assert twice.bytes_written > 0


def test_a_source_is_timed_too_and_told_in_words(store):
    def source(name, read):
        def made():
            return lib.states().to_dataset(name="states")

        return SourceNode("file", 1, {"name": name}, made, Estimate(read, 10, 20))

    assert plan(source("a", 100), store).rows()[0][-1] == "unknown"
    run(source("a", 100), store)
    assert plan(source("a", 100), store).rows()[0][-1] == ""
    (note,) = store.provenance(source("a", 100).record(store))
    found = plan(source("b", 300), store)
    assert found.seconds == pytest.approx(3 * note["seconds"], abs=2e-3)
    assert found.rows()[0][-1].startswith("about ")


def test_lineage_walks_from_a_result_to_what_it_was_made_of(store):
    node = lib.largest.on(norm=norm_and_source())
    run(node, store)
    told = store.lineage(node.record(store).content)
    (norm,) = told["inputs"].values()
    (source,) = norm["inputs"].values()
    assert [told["label"], norm["label"], source["label"]] == ["largest/1", "norm/1", "source/1"]


def test_a_plan_is_a_table_and_json(store):
    found = plan(lib.layer_mean.on(states=lib.states()), store)
    assert found.rows() == [
        ("layer_mean", "will run because there is no result yet", "0/3", "384 B", "", "256 B", "unknown")
    ]
    assert found.to_json()["steps"][0]["cells"] == 3
    assert found.to_json()["peak_bytes"] == 256


def test_nodes_come_after_what_they_read_and_once():
    source = lib.source()
    norm = lib.norm.on(states=source["resid_post"])
    assert in_order([lib.largest.on(norm=norm), norm])[:2] == [source, norm]
    assert len(in_order([norm, norm, source])) == 2


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ([{"layer": 6}, {"layer": 7}, {"layer": 9}], "layers 6-7, 9 missing"),
        ([{"segment": (0, 4)}], "1 of 12 segments missing"),
        (
            [{"layer": 1, "segment": (0, 4)}, {"layer": 2, "segment": (4, 8)}],
            "2 of 12 cells missing (layers 1-2)",
        ),
    ],
)
def test_missing_cells_are_named_by_their_labels(missing, told):
    assert missing_cells(missing, 12) == told


def test_numbers_are_told_as_ranges():
    assert missing_cells([{"layer": layer} for layer in (3, 1, 0, 2, 9)], 12) == "layers 0-3, 9 missing"


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500 MB", 500 * 10**6), ("64", 64), ("1.5kib", 1536), (7, 7), (None, None)],
)
def test_sizes_are_read(text, size):
    assert as_bytes(text) == size


@pytest.mark.parametrize("text", ["much", "", "2 GiBs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(PlanError, match="as a size such as"):
        as_bytes(text)


@pytest.mark.parametrize(("size", "text"), [(0, ""), (5, "5 B"), (1536, "1.5 KiB"), (1 << 41, "2 TiB")])
def test_sizes_are_told(size, text):
    assert human_bytes(size) == text


def test_a_long_parameter_that_differs_at_its_end_is_said_to_have_changed():
    wanted, stored = ({"version": 1, "params": {"ids": [0] * 40 + [n]}, "inputs": {}} for n in (1, 2))
    assert differences(wanted, stored) == ["parameter ids changed"]
    assert differences(wanted, wanted) == ["its stored result was removed"]
    short = {"version": 1, "params": {"ids": [3]}, "inputs": {}}
    assert differences(short, {**short, "params": {}}) == ["parameter ids changed unset -> [3]"]


def test_setup_is_counted_once_and_not_scaled():
    with measured() as outer, measured() as took:
        with setting_up():
            time.sleep(0.05)
        time.sleep(0.02)
    note = took()
    assert 0.05 <= note["setup_seconds"] <= note["seconds"] - 0.02
    assert outer()["setup_seconds"] == note["setup_seconds"]  # of every measurement in progress
    work = note["seconds"] - note["setup_seconds"]
    assert scaled_seconds(note, 10) == pytest.approx(note["setup_seconds"] + 10 * work)
    with measured() as later:
        pass
    assert later()["setup_seconds"] == 0

    waiting = Status(is_cached=False)
    steps = [
        Step("a", waiting, Estimate(seconds=3, setup_seconds=2)),
        Step("b", waiting, Estimate(seconds=5, setup_seconds=2)),
    ]
    assert Plan(tuple(steps)).seconds == 2 + 1 + 3
    assert Plan((*steps, Step("c", waiting, Estimate()))).seconds is None
