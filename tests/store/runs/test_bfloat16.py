"""bfloat16 through plain zarr: every bit comes back, sharded or not."""

import subprocess
import sys
from importlib.metadata import entry_points

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.core.dtype import data_type_registry

from mizarr.store.runs.bfloat16 import BFloat16

NATIVE = np.dtype(ml_dtypes.bfloat16)
EVERY_VALUE = np.arange(2**16, dtype="u2").view(NATIVE)


@pytest.mark.parametrize("shards", [None, (2**14,)])
def test_every_bit_pattern_comes_back(tmp_path, shards):
    array = zarr.create_array(
        tmp_path / "a",
        shape=(2**16,),
        dtype=BFloat16(),
        chunks=(2**12,),
        shards=shards,
        compressors=None,
        # Else zarr compares with the fill value, at which numpy warns of signalling NaNs.
        config={"write_empty_chunks": True},
    )
    array[:] = EVERY_VALUE
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.dtype == NATIVE
    np.testing.assert_array_equal(again[:].view("u2"), EVERY_VALUE.view("u2"))


def test_what_is_not_written_reads_as_the_fill_value(tmp_path):
    for fill in (0, -1.5, float("nan"), float("inf")):
        array = zarr.create_array(tmp_path / str(fill), shape=(3,), dtype=BFloat16(), fill_value=fill)
        again = zarr.open_array(array.store_path, mode="r")
        np.testing.assert_array_equal(again[:].astype("f4"), np.full(3, fill, "f4"))


def test_the_name_on_disk_is_the_one_other_readers_know(tmp_path):
    zarr.create_array(tmp_path / "a", shape=(3,), dtype=BFloat16())
    assert '"data_type": "bfloat16"' in (tmp_path / "a" / "zarr.json").read_text()


def test_numpy_arrays_of_bfloat16_find_their_type():
    assert data_type_registry.match_dtype(NATIVE) == BFloat16()


def test_zarr_format_2_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bfloat16"):
        zarr.create_array(tmp_path / "a", shape=(3,), dtype=BFloat16(), zarr_format=2)


def test_the_declared_entry_point_is_the_type():
    (found,) = entry_points(group="zarr.data_type", name="mizarr.bfloat16")
    assert found.load() is BFloat16


def test_importing_the_module_is_all_another_process_needs(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(3,), dtype=BFloat16())
    array[:] = np.array([1, 2, 3], NATIVE)
    code = "import sys, zarr, mizarr.store.runs.bfloat16; print(zarr.open_array(sys.argv[1], mode='r')[:].tolist())"
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[1.0, 2.0, 3.0]"
