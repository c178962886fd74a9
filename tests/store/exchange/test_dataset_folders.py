"""Folders of Hugging Face `datasets`: rows hold the numbers of the store, at the tokens they are of."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from mizarr.store import open_store
from mizarr.store.errors import ConfigError, ShapeError
from mizarr.store.exchange.exports import export, export_key
from tests.stored_rows import write_rows

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "int8": 0.5001 / 127}
"""Of the largest number of a row, how much a number may move when it is stored."""


def random_rows(tokens):
    """Of two layers: layer -> [token, hidden]."""
    draw = np.random.default_rng(0)
    return {layer: draw.standard_normal((tokens, 5)) for layer in (0, 2)}


def random_states(folder, sizes, dtype="float16"):
    """Two layers of one variable over prompts of these sizes, ids counted through all of them."""
    ids = iter(range(sum(sizes)))
    prompts = [[next(ids) for _ in range(size)] for size in sizes]
    rows = {"resid_post": random_rows(sum(sizes))}
    return write_rows(folder, rows, prompts, segment=64, dtype=dtype).open()


def table(folder):
    """All rows, by pyarrow alone."""
    (name,) = [each["filename"] for each in json.loads((folder / "state.json").read_text())["_data_files"]]
    with pa.memory_map(str(folder / name)) as file:
        return pa.ipc.open_stream(file).read_all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_a_row_per_context_has_the_states_of_its_tokens(tmp_path, dtype):
    states = random_states(tmp_path / "s", [3, 9, 8, 17, 4], dtype)
    folder = export(states, tmp_path / "out", format="saelens", context=4)
    found = table(folder)
    ids = np.array(found["token_ids"].to_pylist())
    # Whole contexts from the start of each prompt: 0, 2, 2, 4, 1 of them.
    assert ids[:, 0].tolist() == [3, 7, 12, 16, 20, 24, 28, 32, 37]
    assert (np.diff(ids, axis=1) == 1).all()
    for layer in (0, 2):
        rows = np.array(found[f"blocks.{layer}.hook_resid_post"].to_pylist(), np.float64)
        assert np.array_equal(rows, states.resid_post.sel(layer=layer).values[ids].astype(np.float64))
        drawn = random_rows(41)[layer][ids]
        room = np.abs(drawn).max(-1, keepdims=True) * ROUNDING[dtype]
        assert (np.abs(rows - drawn) <= room).all()
    info = json.loads((folder / "dataset_info.json").read_text())["features"]
    kept = "float32" if dtype in ("bfloat16", "int8") else dtype
    assert info["blocks.2.hook_resid_post"] == {"shape": [4, 5], "dtype": kept, "_type": "Array2D"}


def test_a_row_per_prompt_is_as_long_as_the_prompt(tmp_path):
    sizes = [3, 9, 1, 17]
    states = random_states(tmp_path / "s", sizes)
    found = table(export(states, tmp_path / "out", format="datasets"))
    assert [len(ids) for ids in found["input_ids"].to_pylist()] == sizes
    rows = found["blocks.2.hook_resid_post"].to_pylist()
    flat = np.concatenate([np.array(row, np.float16) for row in rows])
    assert np.array_equal(flat, states.resid_post.sel(layer=2).values)


def test_many_batches_are_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr("mizarr.store.exchange.dataset_folders._BATCH_BYTES", 100)
    states = random_states(tmp_path / "s", [6, 6, 6, 6])
    found = table(export(states, tmp_path / "out", format="saelens"))
    assert np.array(found["token_ids"].to_pylist()).ravel().tolist() == list(range(24))


def test_sparsify_gets_the_ids_alone(tmp_path):
    states = random_states(tmp_path / "s", [6, 9])
    found = table(export(states, tmp_path / "out", format="sparsify", context=3))
    assert found.column_names == ["input_ids"]
    assert found["input_ids"].to_pylist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]


def test_a_run_is_exported_by_its_key_and_says_where_it_is_from(tmp_path):
    random_states(tmp_path / "s", [6, 6])
    store = open_store(tmp_path / "s")
    (run,) = {record.data.rpartition("/")[2] for record in store.records()}
    folder = export_key(store, run, tmp_path / "out", format="saelens", layers=[2])
    assert table(folder).column_names == ["blocks.2.hook_resid_post", "token_ids"]
    told = json.loads(json.loads((folder / "dataset_info.json").read_text())["description"])
    assert told["format"] == 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"format": "saelens"},
            ShapeError,
            "rows of format saelens have one length, and the prompts have 3 to 9 tokens",
        ),
        (
            {"format": "saelens", "context": 10},
            ShapeError,
            "no prompt has the 10 tokens of a row, the longest has 9",
        ),
        ({"format": "datasets", "context": 3}, ConfigError, "has no meaning; leave"),
        ({"format": "zarr", "context": 3}, ConfigError, "is for formats saelens and sparsify"),
        ({"format": "saelns"}, ConfigError, "did you mean 'saelens'"),
    ],
)
def test_what_cannot_be_written_is_told_and_nothing_is_left(tmp_path, options, error, said):
    states = random_states(tmp_path / "s", [3, 9])
    with pytest.raises(error, match=said):
        export(states, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
