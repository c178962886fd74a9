"""Parquet: a row per token, values and labels as they were, whatever the layout."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import xarray as xr

from mizarr.store import ResultKey, open_store
from mizarr.store.errors import ShapeError
from mizarr.store.exchange import parquet
from mizarr.store.exchange.exports import export, export_key
from tests.store.exchanged import PROMPTS, STATES, TEXTS, put_run, values

IDS = [token for prompt in PROMPTS for token in prompt]
POSITIONS = [i for prompt in PROMPTS for i in range(len(prompt))]
ROWS = [row for row, prompt in enumerate(PROMPTS) for _ in prompt]


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_long_has_a_row_per_layer_and_token(store, tmp_path, dtype):
    has_scale = dtype != "int8"
    entry = put_run(store, dtype, cells=[cell for cell in STATES if has_scale or cell[0] != "ln1_scale"])
    frame = pq.read_table(export_key(store, entry.digest, tmp_path / "a.parquet")).to_pandas()
    assert len(frame) == 3 * len(IDS)
    for layer in (0, 2, 3):
        rows = frame[frame.layer == layer]
        assert rows.token_id.tolist() == IDS and rows.position.tolist() == POSITIONS
        assert rows.prompt.tolist() == ROWS and rows.char_end.tolist() == [p + 1 for p in POSITIONS]
        found = np.stack(rows.resid_post.to_list())
        np.testing.assert_array_equal(found, values("resid_post", layer, dtype).astype(found.dtype))
        assert found.dtype == (np.float16 if dtype == "float16" else np.float32)
        np.testing.assert_array_equal(
            np.stack(rows.embed.to_list()), values("embed", None, dtype).astype("f4")
        )
        assert rows.z.isna().all() == (layer != 2)
        assert not has_scale or rows.ln1_scale.isna().all() == (layer != 0)
    heads = np.stack(frame[frame.layer == 2].z.to_list())
    np.testing.assert_array_equal(heads.reshape(-1, 2, 2), values("z", 2, dtype).astype("f4"))
    assert ("ln1_scale" in frame) == has_scale
    if has_scale:
        scales = frame[frame.layer == 0].ln1_scale.to_numpy()
        np.testing.assert_array_equal(scales, values("ln1_scale", 0, dtype).astype("f4"))


def test_wide_has_a_row_per_token_and_a_column_per_layer(store, tmp_path):
    entry = put_run(store, cells=STATES)
    path = export_key(store, entry.digest, tmp_path / "a.parquet", layout="wide")
    frame = pq.read_table(path).to_pandas()
    assert frame.token_id.tolist() == IDS and frame.prompt.tolist() == ROWS
    for name, layer in STATES:
        column = name if layer is None else f"{name}.{layer}"
        found = np.stack(frame[column].to_list()).reshape(values(name, layer).shape)
        np.testing.assert_array_equal(found, values(name, layer))
    columns = {name if layer is None else f"{name}.{layer}" for name, layer in STATES}
    assert {name for name in frame.columns if name.split(".")[0] in dict(STATES)} == columns


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_small_row_groups_hold_the_same_rows(store, tmp_path, monkeypatch, layout):
    entry = put_run(store, cells=STATES)
    whole = pq.read_table(export_key(store, entry.digest, tmp_path / "whole.parquet", layout=layout))
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 100)
    path = export_key(store, entry.digest, tmp_path / "cut.parquet", layout=layout)
    assert pq.ParquetFile(path).num_row_groups > 3
    cut = pq.read_table(path).to_pandas()
    order = [name for name in ("layer", "prompt", "position") if name in cut]
    cut, whole = (f.sort_values(order, ignore_index=True) for f in (cut, whole.to_pandas()))
    assert cut.columns.tolist() == whole.columns.tolist()
    for name in cut:
        for ours, theirs in zip(cut[name], whole[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_rows_are_labelled_with_their_token_and_their_prompt(store, tmp_path, layout):
    entry = put_run(store, cells=[("embed", None)])
    path = export_key(store, entry.digest, tmp_path / "a.parquet", layout=layout)
    frame = pq.read_table(path).to_pandas()
    assert frame.token_string.tolist() == [f"w{i}" for i in IDS]
    assert frame.text.tolist() == [TEXTS[row] for row in ROWS]
    part = entry.open().mi.prompts([3, 1])
    frame = pq.read_table(export(part, tmp_path / "part.parquet", layout=layout)).to_pandas()
    assert frame.prompt.tolist() == [3] * 3 + [1] * 9, "numbers of the prompts, not of rows of the selection"
    assert frame.text.tolist() == ["four"] * 3 + ["zwei Wörter"] * 9
    np.testing.assert_array_equal(np.stack(frame.embed.to_list())[:3], values("embed", None)[12:])


def test_what_labels_the_whole_is_a_column(store, tmp_path):
    part = put_run(store, cells=[("resid_post", 2)]).open().mi.sel(layer=2)
    frame = pq.read_table(export(part, tmp_path / "a.parquet")).to_pandas()
    assert frame.layer.tolist() == [2] * len(IDS)


def test_one_layer_is_one_row_per_token(store, tmp_path):
    entry = put_run(store, cells=STATES)
    path = export_key(store, entry.key("resid_post", 3).digest, tmp_path / "a.parquet")
    frame = pq.read_table(path).to_pandas()
    assert frame.layer.tolist() == [3] * len(IDS)
    np.testing.assert_array_equal(np.stack(frame.resid_post.to_list()), values("resid_post", 3))


def test_a_run_without_layers_has_no_column_of_them(store, tmp_path):
    entry = put_run(store, cells=[("embed", None)])
    frame = pq.read_table(export_key(store, entry.digest, tmp_path / "a.parquet")).to_pandas()
    assert "layer" not in frame
    np.testing.assert_array_equal(np.stack(frame.embed.to_list()), values("embed", None))


def test_strings_of_tokens_and_missing_numbers_are_kept(tmp_path):
    dataset = xr.Dataset(
        {"loss": ("token", [0.5, np.nan, np.inf])}, {"token_string": ("token", ["a", " ß", "🙂"])}
    )
    table = pq.read_table(export(dataset, tmp_path / "a.parquet"))
    assert table["token_string"].to_pylist() == ["a", " ß", "🙂"]
    np.testing.assert_array_equal(table["loss"].to_numpy(), [0.5, np.nan, np.inf])
    assert table["loss"].null_count == 0, "NaN is a number, not an absent one"


def test_other_results_are_one_row_per_number(store, tmp_path):
    result = xr.Dataset(
        {"recovery": (("layer", "position"), [[0.0, 1.0], [0.25, -2.0]]), "base": ("layer", [3.0, 4.0])},
        {"layer": [1, 4], "position": [0, 1], "name": ("layer", np.array(["x", "y"], object))},
    )
    record = store.put_result(ResultKey("patching", 1, {}, {}), result)
    frame = pq.read_table(export_key(store, record.key, tmp_path / "a.parquet")).to_pandas()
    assert frame.set_index(["layer", "position"]).recovery.to_dict() == {
        (1, 0): 0.0, (1, 1): 1.0, (4, 0): 0.25, (4, 1): -2.0
    }  # fmt: skip
    assert frame.base.tolist() == [3.0, 3.0, 4.0, 4.0] and frame.name.tolist() == ["x", "x", "y", "y"]


def test_a_single_number_is_one_row(tmp_path):
    table = pq.read_table(export(xr.Dataset({"a": ((), 2.5)}), tmp_path / "a.parquet"))
    assert table["a"].to_pylist() == [2.5]


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (xr.Dataset({"pattern": ("pair", [1.0])}), {}, "attention patterns"),
        (xr.Dataset({"a": ("layer", [1.0])}), {"layout": "wide"}, "use --layout long"),
        (xr.Dataset({"a": ("token", [1.0]), "b": ("x", [1.0])}), {}, "'b' has axes"),
    ],
)
def test_what_has_no_rows_is_refused_and_leaves_nothing(tmp_path, dataset, options, says):
    with pytest.raises(ShapeError, match=says):
        export(dataset, tmp_path / "a.parquet", **options)
    assert not list(tmp_path.iterdir())


def test_a_result_of_too_many_rows_is_refused_with_its_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MOST_ROWS", 3)
    with pytest.raises(ShapeError, match=r"need 4 rows, one per number \(x 2, y 2\), and at most 3"):
        export(xr.Dataset({"a": (("x", "y"), np.zeros((2, 2)))}), tmp_path / "a.parquet")
