"""Attributes of results read back as they were stored, and decode nothing, whatever they are called."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import xarray as xr

from mizarr.store import open_store
from mizarr.store.attributes import SHIELD, attribute_record, plain, shielded, unshielded
from mizarr.store.content import content_of
from mizarr.store.errors import ShapeError
from mizarr.store.exchange.exports import export
from mizarr.store.keys import ResultKey

KEY = ResultKey("attributes", 1, {}, {})
ATTRIBUTES: list[dict[str, Any]] = [
    {"dtype": "bool"},
    {"dtype": "timedelta64[s]", "units": "seconds"},
    {"scale_factor": 10.0},
    {"scale_factor": 10.0, "add_offset": 3.0},
    {"add_offset": 3},
    {"_FillValue": 1},
    {"missing_value": 1},
    {"missing_value": 1.0, "_FillValue": 2.0},
    {"_Unsigned": "true"},
    {"_Unsigned": "false"},
    {"_Encoding": "utf-8"},
    {"_ARRAY_DIMENSIONS": ["token"]},
    {"units": "days since 2000-01-01"},
    {"units": "days since 2000-01-01", "calendar": "noleap", "bounds": "other"},
    {"units": "sincerity"},
    {"units": "seconds"},
    {"units": "nanoseconds"},
    {"units": ["days"]},
    {"calendar": "noleap"},
    {"coordinates": "other"},
    {"coordinates": "nowhere"},
    {"coordinates": None},
    {"coordinates": 5},
    {"bounds": "other"},
    {"bounds": 5},
    {"grid_mapping": "other"},
    {"grid_mapping": "other: token"},
    {"grid_mapping": 5},
    {"climatology": "other", "geometry": "other", "node_coordinates": "other", "node_count": "other"},
    {"cell_measures": "area: other", "formula_terms": "a: other"},
    {"char_dim_name": "token"},
    {"CLASS": "DIMENSION_SCALE", "NAME": "token", "DIMENSION_LIST": "token", "REFERENCE_LIST": "token"},
    {"mizarr": "mine"},
    {"escaped": "mine"},
    {SHIELD: {"dtype": "bool"}},
    {SHIELD: "text"},
    {"mizarr:coordinates": ["x"]},
    {"float": "nan", "nested": {"float": "1"}, "one": {"float": "nan"}},
    {"one": {"dict": {"float": "nan"}}, "other": {"str": "0x1p+0"}},
    {"number": math.nan, "list": [math.inf, -math.inf, -0.0, 0.0], "zero": -0.0},
    {"text": "", "empty": [], "nothing": None, "true": True, "one": 1, "real": 1.0, "hex": "0x1.8p+0"},
    {"é": "ü \U0001f600", "with space": "x", "a/b": "c", "nul": "a\0b"},
]


def dataset(attrs: dict[str, Any], dtype: str) -> xr.Dataset:
    values = np.array([0, 1, 2, 3]).astype(dtype)
    return xr.Dataset(
        {"x": ("token", values, attrs), "other": ("token", values + 1 if dtype != "bool" else values)},
        coords={
            "token": ("token", np.arange(4), attrs),
            "name": ("token", np.array(["a", "b", "", "d"]), attrs),
            "with space": ("token", np.arange(4.0), attrs),
            "number": ((), np.float32(2.0), attrs),
        },
        attrs=attrs,
    )


def same(found: Any, wanted: Any) -> bool:
    """Equal as JSON values are: 1, 1.0 and True apart, -0.0 and 0.0 apart, NaN equal to NaN."""
    return repr(found) == repr(plain({"value": wanted})["value"])


def expect_values(found: xr.Dataset, wanted: xr.Dataset) -> None:
    assert set(found.variables) == set(wanted.variables)
    for name, variable in wanted.variables.items():
        read = found.variables[name]
        if variable.dtype.kind == "U":
            assert read.values.tolist() == variable.values.tolist()
        else:
            assert read.dtype == variable.dtype, name
            np.testing.assert_array_equal(read.values, variable.values, str(name))


def expect(found: xr.Dataset, wanted: xr.Dataset) -> None:
    assert set(found.coords) == set(wanted.coords)
    expect_values(found, wanted)
    assert same(found.attrs, wanted.attrs)
    for name, variable in wanted.variables.items():
        assert same(found.variables[name].attrs, variable.attrs), name


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32", "int64", "bool"])
@pytest.mark.parametrize("attrs", ATTRIBUTES, ids=lambda attrs: "-".join(map(str, attrs)).replace("\0", "0"))
def test_attributes_read_back_as_they_were_stored(attrs, dtype, tmp_path):
    wanted = dataset(attrs, dtype)
    before = json.dumps(plain(wanted["x"].attrs))
    store, other = (open_store(tmp_path / name, durability="process") for name in ("store", "other"))
    record = store.put_result(KEY, wanted)
    assert json.dumps(plain(wanted["x"].attrs)) == before  # what was given is as it was
    assert record.content == content_of(wanted)
    store.copy_to(other)
    folder = store.path / record.data / "dataset"
    for opened in (
        store.open_result(KEY),
        other.open_result(KEY),
        xr.open_dataset(folder, engine="mizarr"),
        xr.open_dataset(folder, engine="mizarr", chunks={}),
    ):
        expect(opened, wanted)
        assert content_of(opened) == record.content
    assert store.verify() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plainly = xr.open_zarr(folder, consolidated=False)
        expect_values(plainly, wanted)
    # Through a second store: what was opened is stored again.
    again = other.put_result(ResultKey("attributes", 2, {}, {}), store.open_result(KEY))
    assert again.content == record.content


@pytest.mark.parametrize("attrs", ATTRIBUTES, ids=lambda attrs: "-".join(map(str, attrs)).replace("\0", "0"))
def test_exported_files_hold_the_same_values(attrs, tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    for dtype in ("int8", "float32"):
        wanted = dataset(attrs, dtype)
        store.put_result(key := ResultKey("attributes", 1, {"dtype": dtype}, {}), wanted)
        found = store.open_result(key)
        for suffix, read in ((".zarr", xr.open_zarr), (".nc", xr.open_dataset)):
            path = export(found, tmp_path / f"{dtype}{suffix}")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with read(path) as opened:
                    expect_values(opened, wanted)
                    assert json.loads(opened.attrs["mizarr"])["format"] == 1
        tables = pytest.importorskip("pyarrow.parquet")
        table = tables.read_table(export(found, tmp_path / f"{dtype}.parquet"))
        assert table["x"].to_pylist() == wanted["x"].values.tolist()
        note = json.loads(table.schema.metadata[b"mizarr"])
        assert same(note["attrs"], wanted.attrs)


@pytest.mark.parametrize("attrs", ATTRIBUTES, ids=lambda attrs: "-".join(map(str, attrs)).replace("\0", "0"))
def test_shielding_and_back_is_nothing(attrs):
    wanted = dataset(attrs, "float32")
    expect(unshielded(shielded(wanted)), wanted)


def test_attributes_that_differ_have_contents_that_differ():
    values = [0.0, -0.0, 0, False, None, "", [], {}, "0", 1, 1.0, True, "1", "0x1.0000000000000p+0", [1],
              [1.0], {"a": 1}, [["a", 1]], math.nan, "nan", {"float": "nan"}, {"str": "0x1p"}, "0x1p",
              {"dict": {"float": "nan"}}, math.inf, -math.inf]  # fmt: skip
    contents = {content_of(xr.Dataset({"x": ("a", [1.0])}, attrs={"value": value})) for value in values}
    assert len(contents) == len(values)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"a", "convert it"),
        (2**53 + 1, "2\\*\\*53"),
        ({1: 2, "1": 3}, "have the same name as text; rename one"),
        (np.datetime64("2000-01-01"), "convert it"),
        (1j, "convert it"),
        ({1, 2}, "convert it"),
        (object(), "convert it"),
        ("\ud800", "UTF-8"),
        ({"a": [b"b"]}, "convert it"),
    ],
)
def test_attributes_that_cannot_be_stored_are_refused_in_a_line(value, words, tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    for bad in (
        xr.Dataset({"x": ("a", [1.0])}, attrs={"value": value}),
        xr.Dataset({"x": ("a", [1.0], {"value": value})}),
    ):
        with pytest.raises(ShapeError, match=words) as error:
            store.put_result(KEY, bad)
        assert "\n" not in str(error.value)
        assert store.lookup(KEY) is None


def test_records_are_json():
    for attrs in ATTRIBUTES:
        json.dumps(attribute_record(plain(attrs)), allow_nan=False)
