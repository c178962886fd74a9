"""Arrays of a foreign store in other chunks: opened rightly, or refused in a line, at no cost."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import mizarr
from mizarr.store import open_store
from mizarr.store.digest import content_digest
from mizarr.store.errors import CorruptEntry
from mizarr.store.keys import ResultKey
from mizarr.store.runs.coordinates import metadata_record
from mizarr.store.sealed import sealed, unsealed

KEY = ResultKey("stage", 1, {}, {})
VALUES = np.arange(24.0).reshape(6, 4)
BUDGET = 64 << 20  # bytes; the array has 192


def told(path: Path) -> list[Any]:
    data = path.read_bytes()
    return [len(data), content_digest(data)]


def result(root: Path) -> Path:
    """A store with a result; returns the folder of its array."""
    open_store(root, durability="process").put_result(KEY, xr.Dataset({"x": (("i", "j"), VALUES)}))
    (folder,) = root.glob("data/*/*/dataset/x")
    return folder


def recorded(folder: Path) -> None:
    """Record a result's files as they are now, soundly."""
    data = folder.parents[1]
    path = data / "manifest.json"
    fields = unsealed("manifest", path.read_bytes(), ("content", "files"))
    files = {str(file.relative_to(data)): told(file) for file in data.glob("dataset/**/*") if file.is_file()}
    path.write_bytes(sealed({**fields, "files": files}))


SHARDS = {
    "name": "sharding_indexed",
    "configuration": {
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    },
}


def described(shape: Any = (6, 4), chunks: Any = (6, 4), inner: Any = None) -> dict[str, Any]:
    """What is put in place of an array's description."""
    fields: dict[str, Any] = {
        "shape": list(shape),
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunks) if isinstance(chunks, tuple) else chunks},
        },
    }
    if inner is not None:
        configuration = {**SHARDS["configuration"], "chunk_shape": list(inner)}
        fields["codecs"] = [{**SHARDS, "configuration": configuration}]
    return fields


LARGE = 2**40
IMPOSSIBLE = {
    "long chunks": described(chunks=(LARGE, 4)),
    "wide chunks": described(chunks=(6, LARGE)),
    "chunks beyond 64 bits": described(chunks=(2**70, 1)),
    "chunks of 0": described(chunks=(0, 4)),
    "chunks of nothing": described(chunks=(0, 0)),
    "negative chunks": described(chunks=(-1, 4)),
    "chunks of fractions": described(chunks=(6.5, 4)),
    "no chunks": described(chunks=None),
    "chunks that are a text": described(chunks="6"),
    "chunks of one axis": described(chunks=(6,)),
    "another grid": {"chunk_grid": {"name": "rectangular", "configuration": {}}},
    "no dtype": {"data_type": None},
    "an unknown dtype": {"data_type": "float33"},
    "no codecs": {"codecs": None},
    "empty codecs": {"codecs": []},
    "an unknown codec": {"codecs": [{"name": "magic"}]},
    "a long array": described(shape=(LARGE, 4)),
    "a large array": described(shape=(2**20, 2**20)),
    "a large array of one chunk": described(shape=(LARGE, 2**20), chunks=(LARGE, 2**20)),
    "a negative array": described(shape=(-6, 4)),
    "many chunks of a shard": described(chunks=(LARGE, 4), inner=(1, 1)),
    "a shard that is one chunk": described(chunks=(LARGE, 4), inner=(LARGE, 4)),
    "a shard in chunks of 0": described(inner=(0, 1)),
    "a shard in longer chunks": described(inner=(LARGE, 1)),
}


@pytest.mark.parametrize("are_there", [True, False], ids=["with chunks", "without"])
@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.timeout(60)
def test_a_result_that_its_files_cannot_hold_is_refused(kind, are_there, tmp_path):
    folder = result(tmp_path / "store")
    path = folder / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | IMPOSSIBLE[kind]))
    if not are_there:
        shutil.rmtree(folder / "c")
    recorded(folder)
    store = open_store(tmp_path / "store", mode="r")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptEntry) as refused:
            store[KEY]["x"].load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value) and peak < BUDGET


@pytest.mark.parametrize(
    "options", [{"chunks": (3, 2)}, {"chunks": (1, 4)}, {"chunks": (4, 3), "shards": (8, 3)}]
)
def test_a_result_that_was_stored_again_in_other_chunks_is_what_it_was(options, tmp_path):
    folder = result(tmp_path / "store")
    zarr.create_array(folder, data=VALUES, overwrite=True, dimension_names=("i", "j"), **options)
    recorded(folder)
    np.testing.assert_array_equal(open_store(tmp_path / "store", mode="r")[KEY]["x"].values, VALUES)


@pytest.fixture(scope="module")
def run_of_segments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A store with a run of several segments of 8 tokens, and its states."""
    root = tmp_path_factory.mktemp("run") / "store"
    store = open_store(root, durability="process")
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 3, 5, 7, 9, 2]]
    found = mizarr.capture(
        "specimen", prompts, "blocks.*.hook_resid_post", store=store, segment_tokens=8, progress=False
    )
    return root, found["resid_post"].values


RECHUNKED = {
    "inner chunks of 2": {"chunks": (1, 2, 4), "shards": (1, 8, 0)},
    "no shards": {"chunks": (1, 8, 0)},
    "shorter shards": {"chunks": (1, 4, 0)},
    "longer shards": {"chunks": (1, 16, 0)},
    "two layers in a chunk": {"chunks": (2, 8, 0)},
}
"""How the array of a run is stored again by somebody else's zarr; 0 stands for the width of the stream."""


@pytest.mark.parametrize("kind", RECHUNKED)
def test_a_run_whose_array_was_stored_again_is_refused(kind, run_of_segments, tmp_path):
    source, _ = run_of_segments
    shutil.copytree(source, tmp_path / "store")
    (folder,) = (tmp_path / "store").glob("data/*/*/resid_post")
    old = zarr.open_array(folder, mode="r")
    values, names, attributes = old[:], old.metadata.dimension_names, dict(old.attrs)
    sizes = {name: tuple(n or values.shape[-1] for n in shape) for name, shape in RECHUNKED[kind].items()}
    again = zarr.create_array(
        folder, data=values, overwrite=True, dimension_names=names, fill_value=np.nan, **sizes
    )
    again.attrs.update(attributes)
    record = folder.parent / metadata_record("resid_post")
    record.write_bytes(sealed({"files": {"resid_post/zarr.json": told(folder / "zarr.json")}}))
    store = open_store(tmp_path / "store", mode="r")
    (entry,) = store.entries()
    with pytest.raises(CorruptEntry, match="rewritten with other codecs or chunks"):
        entry.open()["resid_post"].load()


@pytest.mark.parametrize("shape", [[1, 0, 4], [1, LARGE, 4], [0, 0, 0], None, "x", [1, 8], [1, 8.5, 4]])
@pytest.mark.timeout(60)
def test_a_run_in_impossible_chunks_is_refused(shape, run_of_segments, tmp_path):
    shutil.copytree(run_of_segments[0], tmp_path / "store")
    (folder,) = (tmp_path / "store").glob("data/*/*/resid_post")
    path = folder / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = shape
    path.write_text(json.dumps(metadata))
    record = folder.parent / metadata_record("resid_post")
    record.write_bytes(sealed({"files": {"resid_post/zarr.json": told(path)}}))
    (entry,) = open_store(tmp_path / "store", mode="r").entries()
    with pytest.raises(CorruptEntry) as refused:
        entry.open()["resid_post"].load()
    assert "\n" not in str(refused.value)
