"""Files of named arrays that somebody else wrote: every length in them is compared with the file's own."""

from __future__ import annotations

import json
import struct
import zipfile

import numpy as np
import pytest

from mizarr.store.errors import ConfigError, WeightsError
from mizarr.store.exchange.tensors import read_header, read_npz, read_safetensors

SIX = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write_safetensors(path, header, data=bytes(24)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


RANGES = {
    "empty": {"a": SIX, "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 0]}},
    "empty behind": {"a": SIX, "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 24]}},
    "negative": {"a": SIX, "b": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
    "backwards": {"a": SIX, "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 8]}},
    "overlapping": {"a": SIX, "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}},
    "gap": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}},
    "late": {"a": {"dtype": "F32", "shape": [6], "data_offsets": [24, 48]}},
    "short": {"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}},
    "long": {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 24]}},
    "unlike dtypes of one size": {"a": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 24]}},
    "odd bits": {"a": {"dtype": "F4", "shape": [7], "data_offsets": [0, 3]}},
    "unknown dtype": {"a": {"dtype": "F99", "shape": [6], "data_offsets": [0, 24]}},
    "no dtype": {"a": {"shape": [2, 3], "data_offsets": [0, 24]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 24]}},
    "no range": {"a": {"dtype": "F32", "shape": [2, 3]}},
    "one offset": {"a": SIX | {"data_offsets": [24]}},
    "a fraction": {"a": SIX | {"data_offsets": [0.0, 24.0]}},
    "truth": {"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 24]}},
    "texts": {"a": SIX | {"data_offsets": ["0", "24"]}},
    "negative sizes": {"a": SIX | {"shape": [-2, -3]}},
    "shape that wraps": {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}},
    "huge beside an empty axis": {"a": {"dtype": "U8", "shape": [0, 2**50, 2**50], "data_offsets": [0, 0]}},
    "no entry": {"a": 3},
    "metadata that are no texts": {"a": SIX, "__metadata__": {"a": 1}},
    "metadata that are no names": {"a": SIX, "__metadata__": ["a"]},
    "a list": [1],
    "nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge integer": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5_000 + b'], "data_offsets": [0, 24]}}',
    "no JSON": b"{{{{",
    "no text": b"\xff\xfe\xfd",
}  # fmt: skip


@pytest.mark.parametrize("reader", [read_header, read_safetensors])
@pytest.mark.parametrize("header", RANGES.values(), ids=RANGES)
def test_an_entry_of_safetensors_is_as_long_as_its_shape_and_shares_no_byte(header, reader, tmp_path):
    with pytest.raises(WeightsError) as caught:
        reader(write_safetensors(tmp_path / "a.safetensors", header))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_safetensors_is_no_longer_than_its_file(length, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(WeightsError, match="safetensors file"):
        read_header(tmp_path / "a.safetensors")


def test_empty_and_scalar_tensors_are_read(tmp_path):
    header = {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [4, 4]},
        "row": {"dtype": "I64", "shape": [2], "data_offsets": [4, 20]},
    }
    data = np.float32(2.5).tobytes() + np.arange(2).tobytes()
    arrays, _ = read_safetensors(write_safetensors(tmp_path / "a.safetensors", header, data))
    assert arrays["scalar"] == 2.5 and arrays["empty"].shape == (0, 5) and arrays["row"].tolist() == [0, 1]


def write_member(path, header, data=bytes(24), *, method=zipfile.ZIP_STORED, version=1, names=("a.npy",)):
    text = header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            archive.writestr(name, b"\x93NUMPY" + bytes([version, 0]) + length + text + data)
    return path


def npy(shape, descr="'<f4'", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n"


HEADERS = {
    "huge": npy("(1152921504606846976, 4)"),
    "wraps": npy("(4294967296, 4294967296)"),
    "negative": npy("(-2, -3)"),
    "one negative": npy("(-1,)"),
    "long": npy("(3, 3)"),
    "short": npy("(2, 2)"),
    "an integer of 5,000 digits": npy(f"({'9' * 5000},)"),
    "fractions": npy("(2.0, 3.0)"),
    "objects": npy("(3,)", "'|O'"),
    "no dtype": npy("(2, 3)", "'spam'"),
    "dtype of another kind": npy("(2, 3)", "{}"),
    "no order": npy("(2, 3)", fortran="3"),
    "unhashable": "{[]: 1}\n",
    "nested": "(" * 4000 + ")" * 4000 + "\n",
    "open": "{'descr': '''\n",
    "nothing": "",
    "code": "__import__('os')\n",
    "huge beside an empty axis": npy("(0, 1152921504606846976, 1152921504606846976)"),
}


@pytest.mark.filterwarnings("ignore")  # numpy's, of headers it parses a second time
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_an_array_of_npz_is_as_long_as_its_shape(header, version, method, tmp_path):
    path = write_member(tmp_path / "a.npz", header, method=method, version=version)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_npz(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_byte_of_npz_that_differs_from_its_checksum_is_refused(save, tmp_path):
    path = tmp_path / "a.npz"
    save(path, a=np.random.default_rng(0).standard_normal((50, 7)), b=np.arange(3))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("a.npy")
    for at in (150, 400, member.compress_size - 1):
        content = bytearray(whole)
        content[member.header_offset + at] ^= 1
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_npz(path)


def lying(path, **fields):
    """The file with other lengths in its list of members."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    for name, value in fields.items():
        struct.pack_into("<I", content, at + {"packed": 20, "size": 24, "offset": 42}[name], value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "fields",
    [{"size": 2**31}, {"packed": 2**31}, {"packed": 2**31, "size": 2**31}, {"offset": 2**31}],
    ids=str,
)
def test_members_of_npz_lie_in_the_file(fields, method, tmp_path):
    path = write_member(tmp_path / "a.npz", npy("(2, 3)"), method=method)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_npz(lying(path, **fields))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "options", [{"names": ("a.npy", "a.npy")}, {"method": zipfile.ZIP_BZIP2}, {"method": zipfile.ZIP_LZMA}]
)
def test_archives_that_numpy_does_not_write_are_refused(options, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_npz(write_member(tmp_path / "a.npz", npy("(2, 3)"), **options))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whole_files_give_their_arrays(save, tmp_path):
    arrays = {
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3)),
        "rows": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "texts": np.array(["a", "bc"]),
        "zeros": np.zeros(300_000),
    }
    save(tmp_path / "a.npz", **arrays)
    for name, array in read_npz(tmp_path / "a.npz").items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.shape == arrays[name].shape and array.dtype == arrays[name].dtype
