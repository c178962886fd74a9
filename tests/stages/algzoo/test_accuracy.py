"""Counts over blocks: right, the same however they are made, and resumed after a kill."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.algzoo import accuracy, samples
from mizarr.stages.algzoo.accuracy import accuracy_of, rmse_of, sampled_accuracy, sampled_accuracy_node
from mizarr.stages.algzoo.files import write_tensors
from mizarr.stages.algzoo.model import load_model
from mizarr.stages.algzoo.samples import drawn
from mizarr.store.errors import ConfigError, ShapeError, StageError
from tests.memory import PEAK, printed

from .reference import CLASSES, file_of, needs_reference, random_rnn, told

ABOUT = {"task": "2nd_argmax", "sequence": 3}


def blocks(*sizes: int) -> xr.DataArray:
    return xr.DataArray(np.array(sizes), {"block": np.arange(len(sizes))}, "block")


def test_counts_are_those_of_the_samples():
    model = load_model("specimen-2nd-argmax-3")
    found = sampled_accuracy(model.weights, blocks(25_300), **ABOUT, seed=4, dtype="float64")
    x = drawn(model.task, 3, 25_300, seed=4)
    said, target = model.outputs(x).argmax(1), model.task.targets(x)
    assert accuracy_of(found) == np.mean(said == target)
    assert found["samples"].values.tolist() == [1000] * 25 + [300]
    assert int(found["right"][3]) == int((said == target)[3000:4000].sum())
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (target, said), 1)
    np.testing.assert_array_equal(found["confusion"], confusion)


def test_errors_of_numbers_are_those_of_the_samples(tmp_path):
    model = load_model(write_tensors(tmp_path / "median_h3_n4.pth", random_rnn(2, 3, 1)))
    found = sampled_accuracy(model.weights, blocks(5000), task="median", sequence=4, dtype="float64")
    x = drawn(model.task, 4, 5000)
    expected = np.sqrt(np.mean((model.outputs(x)[:, 0] - np.median(x.astype(float), axis=1)) ** 2))
    assert rmse_of(found) == pytest.approx(expected, rel=1e-12)


@needs_reference
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "handcrafted_h4_n3"])
def test_accuracy_on_normal_samples_is_the_reference(name):
    expected, model = told(name), load_model(file_of(name))
    found = sampled_accuracy(model.weights, blocks(100_000), task=model.task.name, sequence=model.sequence)
    p = expected["accuracy_normal200k"]
    assert abs(accuracy_of(found) - p) < 5 * np.sqrt(max(p * (1 - p), 1e-5) * (1 / 100_000 + 1 / 200_000))


@needs_reference
@pytest.mark.parametrize("name", CLASSES)
def test_accuracy_on_the_reference_s_own_normal_samples_is_its_number(name):
    expected, model = told(name), load_model(file_of(name))
    x = np.random.default_rng(20240601).standard_normal((200_000, model.sequence)).astype(np.float32)
    found = np.mean(model.outputs(x).argmax(1) == model.task.targets(x))
    assert found == pytest.approx(expected["accuracy_normal200k"], abs=2e-5)


@needs_reference
def test_exhaustive_accuracy_is_the_reference(tmp_path):
    expected, model = told("longest_cycle_h8_n4"), load_model(file_of("longest_cycle_h8_n4"))
    store = mizarr.open_store(tmp_path)
    node = sampled_accuracy_node(
        model.weights_node(), task="longest_cycle", sequence=4, samples=5, exhaustive=True
    )
    run(node, store)
    found = node.open(store)
    assert accuracy_of(found) == expected["accuracy_exhaustive"]
    assert int(found["samples"].sum()) == expected["n_exhaustive"]
    assert found["confusion"].sum("output").values.tolist() == expected["target_histogram"]


@pytest.fixture
def in_small_blocks(monkeypatch):
    for module in (samples, accuracy):
        monkeypatch.setattr(module, "BLOCK", 20_000)


def counts(store, many: int, **options) -> xr.Dataset:
    model = load_model("specimen-2nd-argmax-3")
    node = sampled_accuracy_node(model.weights_node(), **ABOUT, samples=many)
    run(node, store, **options)
    return node.open(store).load()


def cells(store) -> int:
    return sum(record.label == "sampled_accuracy/cell/1" for record in store.records())


def test_threads_and_order_do_not_matter_and_more_samples_go_on(in_small_blocks, tmp_path):
    one, other = (mizarr.open_store(tmp_path / name) for name in ("one", "other"))
    alone = counts(one, 100_000, threads=1)
    xr.testing.assert_identical(alone, counts(other, 100_000, threads=4))
    assert cells(one) == 5
    more = counts(one, 140_000, threads=2)
    assert cells(one) == 7, "five blocks were there"
    np.testing.assert_array_equal(more["right"][:100], alone["right"])


def test_a_killed_count_goes_on_where_it_was(in_small_blocks, tmp_path, monkeypatch):
    store, whole = mizarr.open_store(tmp_path / "killed"), mizarr.open_store(tmp_path / "whole")
    scored, calls = accuracy._sample_scores, []

    def dying(*args):
        calls.append(1)
        if len(calls) > 7:  # three slices are a block
            raise KeyboardInterrupt
        return scored(*args)

    monkeypatch.setattr(accuracy, "_sample_scores", dying)
    with pytest.raises(KeyboardInterrupt):
        counts(store, 100_000, threads=1)
    assert cells(store) == 2
    monkeypatch.setattr(accuracy, "_sample_scores", scored)
    xr.testing.assert_identical(counts(store, 100_000, threads=1), counts(whole, 100_000, threads=1))


def test_what_does_not_fit_is_one_clear_line(tmp_path):
    model = load_model("specimen-2nd-argmax-3")
    with pytest.raises(ConfigError, match="needs a network with 4 outputs, found a network with 3"):
        sampled_accuracy(model.weights, blocks(10), task="argmax", sequence=4)
    with pytest.raises(
        ShapeError, match="expected 1 to 1,000,000 samples to count in block 0, found 2,000,000"
    ):
        sampled_accuracy(model.weights, blocks(2_000_000), **ABOUT)
    with pytest.raises(ConfigError, match="only the inputs of a task on integers can be enumerated"):
        sampled_accuracy_node(model.weights_node(), **ABOUT, samples=1, exhaustive=True)
    node = sampled_accuracy_node(model.weights_node(), **ABOUT, samples=10, dtype="float16")
    with pytest.raises(
        (ConfigError, StageError),
        match="expected float32 or float64 as the dtype of the forward pass, found 'float16'",
    ):
        run(node, mizarr.open_store(tmp_path))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_samples(tmp_path):
    """Of 12 million samples of 16 neurons and ten numbers, against one: the numbers alone would be 480 MB
    more."""
    path = write_tensors(tmp_path / "2nd_argmax_16_10.safetensors", random_rnn(0, 16, 10))
    script = f"""
import sys
import mizarr
from mizarr.pipeline import run
from mizarr.stages.algzoo.accuracy import sampled_accuracy_node
from mizarr.stages.algzoo.model import load_model
model = load_model(sys.argv[1])
many = int(sys.argv[2])
node = sampled_accuracy_node(model.weights_node(), task="2nd_argmax", sequence=10, samples=many)
run(node, mizarr.open_store(sys.argv[3] + sys.argv[2]), threads=2)
print({PEAK})
"""
    few, many = (
        printed(script, str(path), str(count), str(tmp_path / "store")) for count in (10**6, 12 * 10**6)
    )
    assert many < few + 80_000_000
