"""Forms and resources: what a declaration says of optional inputs, of other dims, and of what is read beside
arrays."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import run, stage
from mizarr.store.errors import ShapeError, SourceChanged, StageError

LAYERS = xr.DataArray(np.arange(6.0).reshape(2, 3), dims=("layer", "token"), coords={"layer": [0, 1]})
WEIGHTS = xr.DataArray(np.array([1.0, 2.0, 3.0]), dims="token")


@dataclass(frozen=True)
class Factor:
    """A number in a file, as a resource."""

    path: str
    said: float

    def identity(self) -> dict[str, float]:
        return {"factor": self.said}

    def check(self) -> None:
        if (found := float(Path(self.path).read_text())) != self.said:
            raise SourceChanged(f"expected {self.said}, found {found}")

    @contextmanager
    def open(self) -> Iterator[float]:
        yield float(Path(self.path).read_text())


FORMS = {
    "total": {"values": ("layer", "token")},
    "weighted_total": {"values": ("layer", "token"), "weights": ("token",)},
}


@stage(version=1, forms=FORMS, outputs={"sum": ("layer",)})
def total(values, weights=None, *, offset=0.0):
    return (values if weights is None else values * weights).sum("token") + offset


@stage(version=1, forms={"flat": {"values": ("token",)}, "deep": {"values": ("layer", "token")}},
       outputs={"sum": ()})  # fmt: skip
def flat(values):
    return values.sum()


@stage(version=1, inputs={"values": ("layer", "token")}, outputs={"scaled": ("layer", "token")},
       resources=("factor",))  # fmt: skip
def scaled(values, *, factor):
    return values * factor


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


@pytest.fixture
def factor(tmp_path):
    path = tmp_path / "factor"
    path.write_text("2.0")
    return Factor(str(path), 2.0)


def opened(node, store):
    run(node, store)
    return node.open(store)


def test_the_form_is_the_one_that_takes_the_inputs_given(store):
    plain, weighted = total.on(values=LAYERS), total.on(values=LAYERS, weights=WEIGHTS, offset=1.0)
    assert (plain.name, weighted.name) == ("total", "weighted_total")
    np.testing.assert_array_equal(opened(plain, store)["sum"], [3.0, 12.0])
    np.testing.assert_array_equal(opened(weighted, store)["sum"], [9.0, 27.0])
    assert {record.label for record in store.records()} == {"total/1", "weighted_total/1"}


def test_forms_that_take_the_same_inputs_are_named(store):
    assert flat.on(values=WEIGHTS).name == "flat"
    node = flat.form("deep").on(values=LAYERS)
    assert node.name == "deep" and float(opened(node, store)["sum"]) == 15.0
    with pytest.raises(StageError, match=r"no form 'steep'; .* flat, deep"):
        flat.form("steep")


def test_a_dim_with_another_name_is_the_same_to_the_function(store):
    @stage(version=1, inputs={"values": ("layer", "token|place")}, outputs={"sum": ("layer",)})
    def either(values):
        assert values.dims == ("layer", "token")
        return values.sum("token")

    placed = LAYERS.rename(token="place").transpose("place", "layer")
    for values in (LAYERS, placed):
        np.testing.assert_array_equal(opened(either.on(values=values), store)["sum"], [3.0, 12.0])
    for wrong in (LAYERS.rename(token="seat"), LAYERS.isel(layer=0), LAYERS.expand_dims("place")):
        with pytest.raises(ShapeError, match=r"expected dims \[layer, token\|place\]"):
            run(either.on(values=wrong), store)


def test_a_form_travels_by_its_name():
    assert pickle.loads(pickle.dumps(total)) is total
    sent = pickle.loads(pickle.dumps(total.form("weighted_total")))
    assert sent.name == "weighted_total" and sent.inputs == FORMS["weighted_total"]


def test_a_declaration_has_inputs_or_forms():
    for given in ({}, {"inputs": {"values": ("token",)}, "forms": FORMS}):
        with pytest.raises(StageError, match="either inputs=… or forms=…"):
            stage(version=1, outputs={"sum": ()}, **given)


def test_a_resource_is_in_the_key_by_its_identity_and_reaches_the_function_open(store, factor, tmp_path):
    node = scaled.on(values=LAYERS, factor=factor)
    np.testing.assert_array_equal(opened(node, store)["scaled"], 2.0 * LAYERS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("2.0")
    assert scaled.on(values=LAYERS, factor=Factor(str(elsewhere), 2.0)).key(store) == node.key(store)
    assert scaled.on(values=LAYERS, factor=Factor(str(elsewhere), 3.0)).key(store) != node.key(store)


def test_a_resource_that_changed_is_refused_before_and_after(store, factor):
    node = scaled.on(values=LAYERS, factor=factor)
    Path(factor.path).write_text("5.0")
    with pytest.raises(SourceChanged, match=r"expected 2.0, found 5.0"):
        node.status(store)

    @stage(version=1, inputs={"values": ("token",)}, outputs={"scaled": ("token",)}, resources=("factor",))
    def changing(values, *, factor):
        Path(path).write_text("7.0")
        return values * factor

    path = factor.path
    Path(path).write_text("2.0")
    with pytest.raises(SourceChanged, match=r"expected 2.0, found 7.0"):
        run(changing.form("changing").on(values=WEIGHTS, factor=factor), store)
    assert not list(store.records())


def test_a_resource_must_be_given_and_be_one(factor):
    with pytest.raises(StageError, match="also needs factor"):
        scaled.on(values=LAYERS)
    with pytest.raises(StageError, match=r"expected argument factor to be a resource, found 2.0; .*identity"):
        scaled.on(values=LAYERS, factor=2.0)


@dataclass(frozen=True)
class Renamed(Factor):
    """One that is identified under the name of a parameter."""

    def identity(self) -> dict[str, float]:
        return {"offset": self.said}


def test_a_parameter_called_as_what_identifies_a_resource_is_refused(factor):
    """One of them would be lost in the key."""

    @stage(version=1, inputs={"values": ("token",)}, outputs={"scaled": ("token",)}, resources=("factor",))
    def moved(values, *, factor, offset=0.0):
        return values * factor + offset

    renamed = Renamed(factor.path, factor.said)
    with pytest.raises(
        StageError, match=r"the parameter offset has the name of a value that identifies the resource factor"
    ):
        moved.form("moved").on(values=WEIGHTS, factor=renamed, offset=3.0)
