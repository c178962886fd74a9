"""Arrays of one chunk, read without zarr: what zarr reads is what is read, and damage is told."""

from __future__ import annotations

import json
import pickle
import random

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.store import ResultKey, open_store, results
from mizarr.store.errors import CorruptEntry
from mizarr.store.files import open_folder
from mizarr.store.group.one_chunk import TEXT, OneChunk
from mizarr.store.group.written import write_arrays
from tests.store.group.test_written import CASES

KEY = ResultKey("lens", 1, {}, {})
PARTS = {
    "all": {},
    "slices": {"p": slice(1, None), "q": slice(None, None, 2)},
    "backwards": {"p": slice(None, None, -1)},
    "nothing": {"p": slice(0, 0)},
    "a row": {"p": -1},
    "one": {"p": 0, "q": 1},
    "a list": {"q": [2, 0, 0]},
    "lists": {"p": [1, 0], "q": [0, 2]},
    "of a mask": {"q": [True, False, True]},
    "points": {"p": xr.DataArray([0, 1, 1], dims="at"), "q": xr.DataArray([2, 0, 1], dims="at")},
}


def group(folder, dataset):
    """What describes each array of a dataset that was written there, by name."""
    write_arrays(folder / "g", results.prepare(dataset)[0])
    described = {path.parent.name: path.read_bytes() for path in (folder / "g").glob("*/zarr.json")}
    return described | {"": (folder / "g" / "zarr.json").read_bytes()}


def told(variable):
    """All there is to a variable; values to the bit."""
    values = variable.values
    raw = values.tolist() if values.dtype.kind in "OT" else np.ascontiguousarray(values).tobytes()
    told = {name: variable.encoding[name] for name in sorted(variable.encoding)}
    return variable.dims, values.dtype, values.shape, values.flags.writeable, raw, variable.attrs, told


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_zarr_reads(tmp_path, monkeypatch, case, part):
    described, files = group(tmp_path, CASES[case]), open_folder(tmp_path)
    assert all(OneChunk.from_text(text) for name, text in described.items() if name)

    def read():
        found = results.read_group(files, "g", described, "a result")
        found = found.isel({dim: at for dim, at in PARTS[part].items() if found.sizes.get(dim)})
        return (
            dict(found.attrs),
            sorted(map(str, found.coords)),
            {name: told(variable) for name, variable in found.variables.items()},
        )

    ours = read()
    monkeypatch.setattr(OneChunk, "from_text", lambda text: None)
    assert ours == read()


def test_values_are_read_when_they_are_asked_for_and_where_the_dataset_was_sent(tmp_path):
    described = group(tmp_path, CASES["f4"])
    chunk = tmp_path / "g" / "plain" / "c" / "0" / "0"
    held = chunk.read_bytes()
    chunk.unlink()
    found = pickle.loads(pickle.dumps(results.read_group(open_folder(tmp_path), "g", described, "a result")))
    chunk.write_bytes(held)
    assert np.array_equal(found["plain"], CASES["f4"]["plain"])


CHANGED = {
    "another fill value": {"fill_value": 1.0},
    "no checksum": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
    "several chunks": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 3]}}},
    "a negative size": {"shape": [-1, 3]},
    "a size that is none": {"shape": [2.0, 3]},
    "a truth for a size": {"shape": [True, 3]},
    "another number of dims": {"dimension_names": ["p"]},
    "a dim that is none": {"dimension_names": ["p", None]},
    "a dtype zarr has not": {"data_type": "float128"},
    "a dtype that is an object": {"data_type": "object"},
    "a dtype with fields": {"data_type": {"name": "struct"}},
    "attributes that are none": {"attributes": [1]},
    "one field more": {"more": 1},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_description_in_other_words_is_left_to_zarr(change):
    ours = OneChunk(np.dtype("f4"), (2, 3), ("p", "q"), {"units": "nats"}).text
    assert OneChunk.from_text(ours) is not None
    assert OneChunk.from_text(json.dumps(json.loads(ours) | change, indent=2).encode()) is None


@pytest.mark.parametrize("text", ["7", "[]", "null", '"shape"', "{}", '{"data_type": "int8"}'])
def test_what_describes_no_array_is_left_to_zarr(text):
    assert OneChunk.from_text(text.encode()) is None


def stored(folder):
    """A stored result, and the files of its chunks."""
    store = open_store(folder / "store")
    record = store.put_result(KEY, CASES["text"].assign(x=("p", [1.0, 2.0, 3.0])))
    return store, sorted((folder / "store" / record.data).glob("dataset/*/c/**/0"))


def test_a_flipped_bit_anywhere_in_a_chunk_is_told(tmp_path):
    store, chunks = stored(tmp_path)
    for path in chunks:
        name = path.relative_to(tmp_path).parts[5]
        sound = path.read_bytes()
        for at in range(len(sound)):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
            with pytest.raises(CorruptEntry, match=f"{name} of .*verify"):
                store.open_result(KEY).variables[name].load()
        path.write_bytes(sound)


def test_a_chunk_cut_short_after_the_result_was_opened_is_told(tmp_path):
    store, chunks = stored(tmp_path)
    names = {path: path.relative_to(tmp_path).parts[5] for path in chunks}
    found = store.open_result(KEY)
    for path in [path for path in chunks if names[path] not in found.indexes]:
        sound = path.read_bytes()
        for length in range(len(sound)):
            path.write_bytes(sound[:length])
            with pytest.raises(CorruptEntry):
                _ = found.variables[names[path]].values
        path.write_bytes(sound)


def sealed_chunk(data):
    """Bytes as the chunk of an array, with the checksum they ought to have."""
    from mizarr.store.runs.shards import SUM_BYTES, crc32c

    return data + crc32c(data).to_bytes(SUM_BYTES, "little")


@pytest.mark.parametrize("size", [0, 4, 93, 92, 100, 192])
def test_another_number_of_values_is_refused_whatever_its_checksum(size):
    with pytest.raises(ValueError):
        OneChunk(np.dtype("f4"), (4, 6), ("p", "q"), {}).values(sealed_chunk(bytes(size)))


@given(data=st.binary(max_size=40), size=st.integers(0, 3))
@settings(max_examples=200)
def test_text_of_any_bytes_is_text_or_refused(data, size):
    array = OneChunk(TEXT, (size,), ("p",), {})
    try:
        found = array.values(sealed_chunk(data))
    except ValueError:
        return
    assert found.shape == (size,)
    assert not size or array.chunk(found) in (None, sealed_chunk(data))


def test_text_that_was_written_is_read(tmp_path):
    rng = random.Random(0)
    for size in (1, 2, 50):
        texts = ["".join(rng.choices("aé\U0001f600\x00 ", k=rng.randrange(6))) for _ in range(size)]
        array, values = OneChunk(TEXT, (size,), ("p",), {}), np.array(texts, TEXT)
        assert array.values(array.chunk(values)).tolist() == texts
