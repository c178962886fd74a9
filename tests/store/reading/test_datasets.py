"""Stored runs as labelled datasets: every way in gives the values that were written."""

import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import EntryNotFound, PromptError, ShapeError
from mizarr.store.runs.entries import ArraySpec

HIDDEN, LAYERS, HEADS = 3, 4, 2
PROMPTS = [
    [7],
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [5, 6],
    [4, 4, 4],
]  # one token; longer than two segments; ragged end


def packed(prompts=PROMPTS):
    return PackedTokens.from_lists(
        prompts,
        texts=[f"text {i}" for i in range(len(prompts))],
        offsets=[[(2 * t, 2 * t + 1) for t in range(len(p))] for p in prompts],
    )


def resid(dtype="float32", layers=LAYERS, variable="resid_post"):
    dims = ("layer", "token", "hidden")
    name = "residual stream after the block"
    return ArraySpec(variable, "blocks.{}.hook_resid_post", dims, {"hidden": HIDDEN}, dtype, layers, name)


EMBED = ArraySpec("embed", "hook_embed", ("token", "hidden"), {"hidden": HIDDEN}, "float32", None)
PATTERN = ArraySpec(
    "pattern", "blocks.{}.attn.hook_pattern", ("layer", "pair", "head"), {"head": HEADS}, "float32", LAYERS
)


def run_of(tokens, model="m"):
    return RunKey(model, tokens.digest, "none")


def values(layer, tokens, dtype="float32"):
    """What the fake model writes at a layer: the layer, the token id and its packed index, + 0.5, 0, 0."""
    columns = [np.full(tokens.n_tokens, layer + 0.5), tokens.ids, np.arange(tokens.n_tokens)]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return np.stack(columns, axis=1).astype(kind)


def patterns(layer, tokens):
    """Lower triangles: query * 10 + key + layer * 100 + prompt * 1000, negative for head 1."""
    rows = [
        q * 10 + k + layer * 100 + i * 1000.0
        for i, n in enumerate(tokens.row_size) for q in range(n) for k in range(q + 1)
    ]  # fmt: skip
    return np.stack([rows, np.negative(rows)], axis=1).astype("f4")


def fill(entry, tokens, cells, dtype="float32"):
    for n, segment in enumerate(entry.segments):
        arrays = {}
        for variable, layer in cells:
            if variable == "pattern":
                at = slice(entry.bounds("pair")[n], entry.bounds("pair")[n + 1])
                arrays[variable, layer] = patterns(layer, tokens)[at]
            else:
                arrays[variable, layer] = values(layer or 0, tokens, dtype)[segment.start : segment.stop]
        entry.write_segment(n, {cell: np.ascontiguousarray(rows) for cell, rows in arrays.items()})
    return entry.publish(cells)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


@pytest.fixture(params=[1, 4, 64])
def entry(request, store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [resid(), EMBED], segment_tokens=request.param)
    fill(entry, tokens, [("resid_post", 0), ("resid_post", 2), ("resid_post", 3), ("embed", None)])
    return entry


def expected(tokens, layers):
    return np.stack([values(layer, tokens) for layer in layers])


@pytest.mark.parametrize("chunks", ["segment", None])
def test_every_value_comes_back_under_its_labels(entry, chunks):
    ds = entry.open(chunks=chunks)
    tokens = packed()
    assert ds["resid_post"].dims == ("layer", "token", "hidden") and ds["embed"].dims == ("token", "hidden")
    assert ds["layer"].values.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(ds["resid_post"].values, expected(tokens, [0, 2, 3]))
    np.testing.assert_array_equal(ds["embed"].values, values(0, tokens))
    assert ds["token_id"].values.tolist() == tokens.ids.tolist()
    assert ds["prompt"].values.tolist() == [0] + [1] * 9 + [2] * 2 + [3] * 3
    assert ds["position"].values.tolist() == [0, *range(9), 0, 1, 0, 1, 2]
    assert ds["char_start"].values.tolist() == (2 * ds["position"].values).tolist()
    assert ds["text"].values.tolist() == ["text 0", "text 1", "text 2", "text 3"]
    assert ds["row_start"].values.tolist() == [0, 1, 10, 12] and ds["row_size"].values.tolist() == [
        1,
        9,
        2,
        3,
    ]
    assert ds["row_size"].attrs["sample_dimension"] == "token"
    assert ds["resid_post"].attrs["long_name"] == "residual stream after the block"


def test_a_chunk_is_one_layer_of_one_segment(entry):
    chunks = entry.open(chunks="segment")["resid_post"].chunks
    assert chunks[0] == (1, 1, 1)
    assert chunks[1] == tuple(len(segment) for segment in entry.segments)


@pytest.mark.parametrize(
    "key",
    [
        (slice(None), slice(2, 9), slice(None)),
        (1, slice(None, None, 3), slice(1, None)),
        (slice(None, None, -1), slice(11, 2, -2), 0),
        ([2, 0], [14, 0, 5, 5, 3], [2, 1]),
        (0, 10, slice(None)),
        (slice(1, 3), -1, 2),
        ([1], slice(5, 5), slice(None)),
        (slice(0, 2), [13], 1),
    ],
)
def test_any_orthogonal_indexing_gives_what_numpy_gives(entry, key):
    lazy = entry.open(chunks=None)["resid_post"]
    whole = expected(packed(), [0, 2, 3])
    for axis in (2, 1, 0):
        whole = whole[(slice(None),) * axis + (key[axis],)]
    got = lazy[tuple(key)]
    assert got.shape == whole.shape
    np.testing.assert_array_equal(got.values, whole)


def test_layers_are_chosen_by_their_real_index(entry):
    ds = entry.open(["resid_post"], layers=[3, 0])
    assert ds["layer"].values.tolist() == [3, 0]
    np.testing.assert_array_equal(ds["resid_post"].values, expected(packed(), [3, 0]))
    np.testing.assert_array_equal(ds["resid_post"].sel(layer=3).values, values(3, packed()))


def test_asking_for_what_is_not_there_names_what_is(entry):
    with pytest.raises(EntryNotFound, match="most similar is 'resid_post'"):
        entry.open(["resid_pst"])
    with pytest.raises(EntryNotFound, match="at layers 0, 2-3, not at layers 1"):
        entry.open(["resid_post"], layers=[0, 1])


def test_variables_of_other_layers_get_their_own_layer_axis(store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [resid(), resid(variable="mlp_out")])
    fill(entry, tokens, [("resid_post", 0), ("resid_post", 1), ("mlp_out", 1)])
    ds = entry.open()
    assert ds["resid_post"].dims[0] == "layer" and ds["layer"].values.tolist() == [0, 1]
    assert ds["mlp_out"].dims[0] == "layer_mlp_out" and ds["layer_mlp_out"].values.tolist() == [1]
    assert entry.open(["mlp_out"])["mlp_out"].dims[0] == "layer"


def test_bfloat16_is_presented_as_float32_and_stored_as_it_came(store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [resid("bfloat16")], segment_tokens=4)
    fill(entry, tokens, [("resid_post", 1)], "bfloat16")
    ds = entry.open(chunks=None)
    assert ds["resid_post"].dtype == np.float32
    np.testing.assert_array_equal(ds["resid_post"].values[0], values(1, tokens, "bfloat16").astype("f4"))
    assert ds["resid_post"].isel(layer=0, token=3).values.dtype == np.float32
    assert ds["resid_post"].mean("token").dtype == np.float32
    assert ds.mi.numpy("resid_post", 1, 2).dtype == ml_dtypes.bfloat16


def test_what_is_not_published_is_not_seen(store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [resid()], segment_tokens=4)
    entry.write_segment(0, {("resid_post", 0): values(0, tokens)[:4]})
    assert entry.publish([("resid_post", 0)]) == []
    assert list(entry.open().data_vars) == []
    assert store.lookup(entry.key("resid_post", 0)) is None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_xarray_and_zarr_read_the_same_labelled_values(store, dtype):
    import zarr

    tokens = packed()
    spec = resid(dtype)
    entry = store.create_entry(run_of(tokens), tokens, [spec], segment_tokens=4)
    fill(entry, tokens, [("resid_post", 0), ("resid_post", 2)], dtype)
    folder = store.path / entry.path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = xr.open_zarr(folder, consolidated=False)
        raw = zarr.open_array(folder / "resid_post", mode="r")[:]
    ours = entry.open(chunks=None)
    assert set(plain.data_vars) == {"resid_post"}
    np.testing.assert_array_equal(plain["resid_post"].sel(layer=[0, 2]).values, ours["resid_post"].values)
    assert np.isnan(plain["resid_post"].sel(layer=1).values).all()
    np.testing.assert_array_equal(raw[2], values(2, tokens, dtype))
    for name in ("token_id", "prompt", "position", "char_start", "char_end", "row_start", "row_size"):
        assert name in plain.coords
        np.testing.assert_array_equal(plain[name].values, ours[name].values, err_msg=name)
    assert plain["text"].values.tolist() == ours["text"].values.tolist()
    np.testing.assert_array_equal(
        plain.mi.prompt(1)["resid_post"].sel(layer=2).values, values(2, tokens)[1:10]
    )


def test_a_lazy_dataset_travels_as_paths_to_another_process(entry):
    ds = entry.open(chunks="segment")
    far = pickle.loads(pickle.dumps(ds))
    assert len(pickle.dumps(entry.open(chunks=None)["resid_post"].variable)) < 2000
    np.testing.assert_array_equal(far["resid_post"].values, ds["resid_post"].values)


def test_opening_maps_no_shard(entry, monkeypatch):
    def touched(*_):
        raise AssertionError("opening read a shard")

    monkeypatch.setattr(type(entry), "shard", touched)
    entry.open(chunks="segment")
    repr(entry.open(chunks=None))


def test_a_prompt_is_read_from_the_segments_it_straddles(entry):
    ds = entry.open(chunks=None)
    tokens = packed()
    part = ds.mi.prompt(1)
    assert part["resid_post"].dims == ("layer", "position", "hidden")
    assert part["position"].values.tolist() == list(range(9))
    assert part["token_id"].values.tolist() == PROMPTS[1]
    assert str(part["text"].values) == "text 1"
    np.testing.assert_array_equal(part["resid_post"].values, expected(tokens, [0, 2, 3])[:, 1:10])
    np.testing.assert_array_equal(ds.mi.prompt(-1)["embed"].values, values(0, tokens)[12:])
    with pytest.raises(PromptError, match="numbered 0 to 3"):
        ds.mi.prompt(4)


def test_token_strings_appear_once_the_store_knows_the_vocabulary(store):
    tokens = packed()
    entry = store.create_entry(
        run_of(tokens), tokens, [resid()], attrs={"tokenizer": "sha256:tok", "model": "m"}
    )
    fill(entry, tokens, [("resid_post", 0)])
    assert "token_string" not in entry.open().mi.prompt(2).coords
    store.put_vocabulary("sha256:tok", [f"<{i}>" for i in range(6)])
    part = store.entry(entry.digest).open().mi.prompt(2)
    assert part["token_string"].values.tolist() == ["<5>", "<6>"]  # 6 is beyond the vocabulary
    assert float(part["resid_post"].set_xindex("token_string").sel(layer=0, token_string="<5>")[1]) == 5


def test_padding_is_nan_and_masked(entry):
    block = entry.open(chunks="segment").mi.pad()
    assert block["resid_post"].dims == ("layer", "prompt", "position", "hidden")
    assert block["mask"].values.sum(axis=1).tolist() == [1, 9, 2, 3]
    np.testing.assert_array_equal(block["resid_post"].values[1, 1], values(2, packed())[1:10])
    assert np.isnan(block["resid_post"].values[:, 0, 1:]).all()
    with pytest.raises(ShapeError, match="the longest prompt has 9"):
        entry.open().mi.pad(4)
    short = entry.open().mi.pad(4, cut=True)
    np.testing.assert_array_equal(short["embed"].values[1], values(0, packed())[1:5])


def test_scattered_tokens_are_gathered_in_the_order_asked(entry):
    at = [14, 0, 7, 7, 3]
    for chunks in ("segment", None):
        got = entry.open(chunks=chunks).mi.tokens(at)
        np.testing.assert_array_equal(got["resid_post"].values, expected(packed(), [0, 2, 3])[:, at])
        assert got["token_id"].values.tolist() == packed().ids[at].tolist()


def test_a_changed_dataset_gives_its_own_values_and_not_the_stored_ones(entry):
    for ds in (entry.open(chunks="segment"), entry.open(chunks=None)):
        doubled = ds.assign(resid_post=ds["resid_post"] * 2)
        want = 2 * expected(packed(), [0, 2, 3])[:, [14, 3]]
        np.testing.assert_array_equal(doubled.mi.tokens([14, 3])["resid_post"].values, want)
        part = ds.sel(layer=[3]).mi.tokens([14, 3])["resid_post"].values
        np.testing.assert_array_equal(part, want[2:] / 2)


def test_stored_arrays_seen_through_dask_are_gathered_from_the_shards(entry, monkeypatch):
    import dask.array

    ds = entry.open(chunks="segment")
    monkeypatch.setattr(dask.array.Array, "__getitem__", None)  # a gather through dask would now fail
    got = ds[["resid_post", "embed"]].drop_vars(["prompt", "position", "token_id", "char_start", "char_end"])
    assert got.mi.tokens([14, 3])["resid_post"].shape == (3, 2, 3)


def test_a_reduced_run_is_a_result_and_keeps_its_prompts(entry, store):
    norm = entry.open(chunks="segment")["resid_post"].mean("hidden").to_dataset(name="mean")
    norm = norm.assign_coords(row_size=entry.open()["row_size"], prompt_id=entry.open()["prompt_id"])
    store.put_result(ResultKey("mean", 1), norm)
    back = store.open_result(ResultKey("mean", 1))
    want = values(2, packed())[1:10].mean(axis=1)
    np.testing.assert_allclose(back.mi.prompt(1)["mean"].sel(layer=2).values, want)


def test_chosen_prompts_are_packed_anew_with_their_labels(entry):
    part = entry.open(chunks=None).mi.prompts([3, 1])
    chosen = packed().select([3, 1])
    assert part["token_id"].values.tolist() == chosen.ids.tolist()
    assert part["prompt_id"].values.tolist() == [3, 1] and part["row_start"].values.tolist() == [0, 3]
    assert part["prompt"].values.tolist() == [0] * 3 + [1] * 9
    np.testing.assert_array_equal(
        part.mi.prompt(1)["resid_post"].values, entry.open(chunks=None).mi.prompt(1)["resid_post"].values
    )


def test_a_cut_token_axis_is_refused_with_the_way_out(entry):
    with pytest.raises(ShapeError, match=r"mi\.prompts"):
        entry.open().isel(token=slice(0, 3)).mi.prompt(0)


def test_numpy_is_the_mapped_shard_itself(entry):
    array = entry.open(chunks="segment").mi.numpy("resid_post", 2, 0)
    assert not array.flags.writeable and not array.flags.owndata
    np.testing.assert_array_equal(array, values(2, packed())[: len(entry.segments[0])])


@pytest.mark.parametrize("segment_tokens", [1, 4, 64])
def test_attention_patterns_come_back_as_lower_triangles(store, segment_tokens):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [resid(), PATTERN], segment_tokens=segment_tokens)
    fill(entry, tokens, [("resid_post", 0), ("pattern", 0), ("pattern", 3)])
    ds = entry.open(chunks=None)
    square = entry.open(["pattern"]).mi.attn(1)
    assert square.dims == ("layer", "head", "query_position", "key_position")
    query, key = np.indices((9, 9))
    want = np.where(key <= query, query * 10 + key + 1000.0, 0)
    np.testing.assert_array_equal(square.sel(layer=3, head=0).values, np.where(key <= query, want + 300, 0))
    np.testing.assert_array_equal(square.sel(layer=0, head=1).values, -want)
    assert ds.mi.attn(0).values.shape == (2, 2, 1, 1)
    np.testing.assert_array_equal(ds.mi.prompts([2, 0]).mi.attn(0).values, ds.mi.attn(2).values)
    with pytest.raises(EntryNotFound, match="most similar is 'pattern'"):
        ds.mi.attn(0, "patern")


def test_patterns_of_one_segment_are_readable_by_plain_xarray(store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [PATTERN])
    fill(entry, tokens, [("pattern", 1)])
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    start, size = int(plain["pair_start"][3]), 3
    part = plain["pattern"].sel(layer=1).isel(pair=slice(start, start + 6), head=0)
    assert part.values.tolist() == [3100, 3110, 3111, 3120, 3121, 3122] and size == 3


def test_many_texts_are_read_a_chunk_at_a_time(store, monkeypatch):
    monkeypatch.setattr("mizarr.store.runs.coordinates._TEXTS_PER_CHUNK", 4)
    tokens = PackedTokens.from_lists([[i] for i in range(10)], texts=[f"é{i}" for i in range(10)])
    entry = store.create_entry(run_of(tokens), tokens, [EMBED])
    fill(entry, tokens, [("embed", None)])
    ds = store.entry(entry.digest).open(chunks=None)
    assert ds["text"].values.tolist() == tokens.texts
    assert ds["text"][7].item() == "é7" and ds["text"][2:5].values.tolist() == ["é2", "é3", "é4"]
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    assert plain["text"].values.tolist() == tokens.texts


def test_corpora_do_not_spell_out_prompt_and_position(store, monkeypatch):
    monkeypatch.setattr("mizarr.store.runs.coordinates.SPELLED_OUT", 5)
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [EMBED])
    fill(entry, tokens, [("embed", None)])
    assert not (store.path / entry.path / "prompt").exists()
    assert entry.open()["position"].values.tolist() == tokens.position_of(slice(None)).tolist()


def test_patterns_alone_come_in_chunks_of_their_pairs(store):
    tokens = packed()
    entry = store.create_entry(run_of(tokens), tokens, [PATTERN], segment_tokens=4)
    fill(entry, tokens, [("pattern", layer) for layer in range(LAYERS)])
    chunked, whole = entry.open(chunks="segment"), entry.open(chunks=None)
    assert len(chunked["pattern"].chunksizes["pair"]) == len(entry.segments)
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(chunked.mi.attn(i), whole.mi.attn(i))
