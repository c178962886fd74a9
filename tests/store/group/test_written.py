"""Small results, written without zarr: every file is the one that xarray and zarr write."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from mizarr.store import results
from mizarr.store.attributes import unshielded
from mizarr.store.content import content_of
from mizarr.store.files import open_folder
from mizarr.store.group.written import are_plain, write_arrays

NUMBERS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "b1"]


def numbers(dtype: str) -> xr.Dataset:
    """Of one dtype: plain, of other strides, all fill, of no axis and of no element, a coordinate."""
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(2, 3)) * 50).astype(dtype)
    found = {
        "plain": (("p", "q"), values, {"units": "nats"}),
        "columns": (("p", "q"), np.asfortranarray(values)),
        "backwards": (("p", "q"), values[:, ::-1]),
        "zeros": (("p", "q"), np.zeros((2, 3), dtype)),
        "one_zero": ((), np.zeros((), dtype)),
        "one": ((), values[0, 0]),
        "four": (("a", "p", "b", "q"), values[None, :, None]),
        "none": (("empty", "q"), np.zeros((0, 3), dtype)),
    }
    label = {} if dtype == "f2" else {"q": values[0]}  # pandas has no index of float16
    return xr.Dataset(found, coords={**label, "beside": ("q", values[1]), "alone": ("r", values[0, :2])})


def special() -> xr.Dataset:
    """Values that no equality tells apart."""
    found = {}
    for dtype in ("f2", "f4", "f8", "c8", "c16"):
        found[f"{dtype}_nan"] = ("p", np.full(3, np.nan, dtype))
        found[f"{dtype}_odd"] = ("p", -np.full(3, np.nan, dtype))
        found[f"{dtype}_minus"] = ("p", -np.zeros(3, dtype))
        found[f"{dtype}_mixed"] = ("p", np.array([np.nan, np.inf, -0.0], dtype))
    return xr.Dataset(found)


def text() -> xr.Dataset:
    return xr.Dataset(
        {
            "objects": ("p", np.array(["a", "", "é\U0001f600"], object)),
            "wide": ("p", np.array(["a", "bb", "c"])),
            "empty": ("p", np.array(["", "", ""])),
            "one": "hello",
            "one_empty": "",
            "none": ("q", np.array([], object)),
        },
        coords={"p": np.array(["The", " é", ""]), "note": ("p", ["x", "y", "z"])},
    )


def labelled() -> xr.Dataset:
    """Names and attributes that are not the usual ones."""
    attributes = {
        "u": "é",
        "i": np.float32(2),
        "l": (1, 2),
        "d": {"b": 1, "a": [None, True]},
        "r": np.arange(3),
    }
    names = {name: ("p", [1, 2]) for name in ("a b", "é", "x.", "c", "with.dot")}
    return xr.Dataset(
        {"a": (("p", "q"), np.ones((2, 3)), attributes), **names},
        coords={"p": [1, 2], "both": (("p", "q"), np.zeros((2, 3), int)), "scalar": 2.5, "r": ("r", [True])},
        attrs={"x": 3.5, "y": None, "z": "ß"},
    )


CASES = {
    **{dtype: numbers(dtype) for dtype in NUMBERS},
    "special": special(),
    "text": text(),
    "labelled": labelled(),
    "nothing": xr.Dataset(),
    "attributes": xr.Dataset(attrs={"a": 1}),
    "units": xr.Dataset({"w": ("run", [1.0, 2.0], {"units": "seconds", "dtype": "x"})}),
}


def files(place: Path) -> dict[str, bytes | None]:
    found = {str(path.relative_to(place)): path for path in place.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_xarray_and_zarr_byte_for_byte(tmp_path, case):
    dataset, encoding = results.prepare(CASES[case])
    dataset.to_zarr(
        tmp_path / "zarr", zarr_format=3, consolidated=False, encoding=encoding, align_chunks=True
    )
    dataset, _ = results.prepare(CASES[case])
    assert are_plain(dataset, 1 << 20)
    write_arrays(tmp_path / "ours", dataset)
    assert files(tmp_path / "ours") == files(tmp_path / "zarr")


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_to_be_read_back_is_what_zarr_reads(tmp_path, case):
    dataset, _ = results.prepare(CASES[case])
    said = xr.decode_cf(write_arrays(tmp_path / "g", dataset), mask_and_scale=False, decode_times=False)
    said = unshielded(said)
    described = {path.parent.name: path.read_bytes() for path in (tmp_path / "g").glob("*/zarr.json")}
    described[""] = (tmp_path / "g" / "zarr.json").read_bytes()
    read = results.read_group(open_folder(tmp_path), "g", described, "a result")
    assert content_of(said) == content_of(read)
    plain = xr.open_zarr(tmp_path / "g", consolidated=False, mask_and_scale=False)
    assert set(plain.coords) == set(read.coords) and dict(plain.sizes) == dict(read.sizes)


@pytest.mark.parametrize(
    "dataset",
    [
        xr.Dataset({"a": ("p", np.arange(4.0))}).chunk({"p": 2}),
        xr.Dataset({"a": ("p", np.arange(200.0))}),
        xr.Dataset({"a": ("p", np.arange(3, dtype=">f4"))}),
        xr.Dataset({"..": ("p", [1, 2])}),
        xr.Dataset({7: ("p", [1, 2])}),
    ],
    ids=["chunks", "large", "bytes the other way", "no name of a folder", "no name"],
)
def test_what_is_not_small_and_plain_is_left_to_zarr(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not are_plain(dataset, 1000)
