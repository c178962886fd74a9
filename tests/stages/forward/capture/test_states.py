"""What a prompt leaves behind in a recurrent layer is stored per prompt, wherever a segment ends."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
import zarr

from mizarr import HookSpec, Model, capture, open_store
from mizarr.store.errors import ShapeError
from mizarr.store.runs.packed import PackedTokens

from ..random_hybrids import save_random_hybrid
from ..random_rwkv import save_random_rwkv

SIZES = (1, 23, 4, 4, 9, 2, 17)
POINTS = {"rwkv7": "blocks.*.rwkv.hook_state", "falcon_h1": "blocks.*.ssm.hook_state"}


def draw(seed=0, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return PackedTokens.from_lists([rng.integers(1, 50, size).tolist() for size in sizes])


@pytest.fixture(scope="module", params=POINTS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "rwkv7":
        save_random_rwkv(folder, "rwkv7", 7)
    else:
        save_random_hybrid(folder, request.param, 1)
    return Model.from_pretrained(folder), POINTS[request.param]


def alone(model, point, prompt):
    """{layer: state} behind one prompt that runs alone, by the states behind each of its tokens."""
    cache = model.forward([prompt.tolist()], HookSpec().capture(f"{point}_seq"))
    return {each.layer: cache[each][0, :, -1].numpy() for each in cache}


@pytest.mark.parametrize("segment_tokens", [None, 4, 8])
def test_states_are_those_behind_each_prompt_run_alone(model, tmp_path, segment_tokens):
    model, point = model
    tokens, store = draw(), open_store(tmp_path)
    held = capture(
        model, tokens, [point, "blocks.*.hook_resid_post"], store=store, progress=False,
        segment_tokens=segment_tokens, batch_tokens=16,
    )  # fmt: skip
    (name,) = (str(name) for name in held.data_vars if str(name).endswith("state"))
    states = held[name]
    assert states.dims[:2] == ("layer", "prompt_id")
    assert states.sizes["prompt_id"] == len(SIZES)
    for i in range(len(SIZES)):
        expected = alone(model, point, tokens.prompt(i))
        assert states["layer"].values.tolist() == sorted(expected)
        for layer, state in expected.items():
            found = states.sel(layer=layer).isel(prompt_id=i).values
            np.testing.assert_allclose(found, state, atol=1e-5 * abs(state).max(), rtol=0)
    # Whole prompts bring theirs along, in any order; a prompt has its own; a choice of tokens has none.
    some = held.mi.prompts([5, 0, 2])
    np.testing.assert_array_equal(some[name].values, states.values[:, [5, 0, 2]])
    assert some["prompt_id"].values.tolist() == [5, 0, 2]
    np.testing.assert_array_equal(held.mi.prompt(3)[name].values, states.values[:, 3])
    assert name not in held.mi.sel(position=-1)
    assert store.verify() == []


def test_chunked_states_are_the_same_and_other_readers_find_them(model, tmp_path):
    model, point = model
    tokens, store = draw(1), open_store(tmp_path)
    held = capture(model, tokens, point, store=store, progress=False, segment_tokens=4)
    (name,) = map(str, held.data_vars)
    (entry,) = store.entries()
    chunked = entry.open(chunks="segment")
    assert chunked[name].chunks is not None
    np.testing.assert_array_equal(chunked[name].values, held[name].values)
    array = zarr.open_group(store.files.path(entry.path), mode="r")[name]
    bounds, length = array.attrs["prompt_id_bounds"], array.shards[1]
    assert bounds == [sum(np.cumsum(SIZES) <= 4 * n) for n in range(len(bounds) - 1)] + [len(SIZES)]
    layer = int(held["layer"].values[0])
    for n in range(len(bounds) - 1):
        here = array[layer, n * length : (n + 1) * length]
        ends = bounds[n + 1] - bounds[n]
        np.testing.assert_array_equal(here[:ends], held[name].values[0, bounds[n] : bounds[n + 1]])
    with xr.open_zarr(store.files.path(entry.path), consolidated=False) as plain:
        assert "prompt_slot" in plain[name].dims


def test_a_capture_of_fewer_prompts_is_read_from_the_larger_run(model, tmp_path):
    model, point = model
    tokens, store = draw(2), open_store(tmp_path)
    held = capture(model, tokens, point, store=store, progress=False, segment_tokens=8)
    before = sorted(store.files.list("keys"))
    part = capture(model, tokens.select([6, 1]), point, store=store, progress=False)
    (name,) = map(str, held.data_vars)
    np.testing.assert_array_equal(part[name].values, held[name].values[:, [6, 1]])
    assert sorted(store.files.list("keys")) == before


def test_parquet_says_that_states_have_no_token(model, tmp_path):
    from mizarr.store.exchange.exports import export

    model, point = model
    held = capture(model, draw(3), point, store=open_store(tmp_path / "store"), progress=False)
    with pytest.raises(ShapeError, match="prompt_id"):
        export(held, tmp_path / "states.parquet")
