"""Import: numbers harvested elsewhere open like a run, and are never taken for one computed here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xarray as xr

import mizarr
from mizarr.stages.corpus.token_statistics import token_statistics
from mizarr.stages.geometry.pca import pca
from mizarr.stages.geometry.similarity import layer_cosine
from mizarr.store import open_store
from mizarr.store.errors import (
    ConfigError,
    HookPointNotFound,
    MizarrError,
    PromptError,
    ShapeError,
    SourceChanged,
    StageError,
    WeightsError,
)
from mizarr.store.exchange import imports
from mizarr.store.exchange.exports import export_key
from mizarr.store.identity import require_same_model
from mizarr.store.runs.entries import Entry
from mizarr.workflows import exchange
from tests.memory import PEAK, printed
from tests.store.exchanged import PROMPTS, STATES, TEXTS, put_run, values
from tests.torch_free import TORCH_BLOCKED

IDS = np.array([token for prompt in PROMPTS for token in prompt])
SIZES = np.array([len(prompt) for prompt in PROMPTS])
RNG = np.random.default_rng(0)
NUMBERS = RNG.standard_normal((4, len(IDS), 3)).astype("f4")  # layer, token, hidden
POST = "blocks.{}.hook_resid_post"


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


@pytest.fixture(params=[".safetensors", ".npz"])
def write(request, tmp_path):
    def write(name: str = "states", **arrays: np.ndarray) -> Path:
        path = tmp_path / f"{name}{request.param}"
        whole = {key.replace("__", "."): np.ascontiguousarray(value) for key, value in arrays.items()}
        np.savez(path, **whole) if request.param == ".npz" else safetensors.numpy.save_file(whole, path)
        return path

    return write


def posts(layers=range(4), numbers=NUMBERS) -> dict[str, np.ndarray]:
    return {POST.format(layer): numbers[layer] for layer in layers}


def padded(numbers: np.ndarray, fill: float = np.nan) -> np.ndarray:
    """[token, …] as [prompt, position, …]."""
    block = np.full((len(SIZES), SIZES.max(), *numbers.shape[1:]), fill, numbers.dtype)
    for row, (start, size) in enumerate(zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True)):
        block[row, :size] = numbers[start : start + size]
    return block


# Layouts


def expect_numbers(states: xr.Dataset) -> None:
    assert states.resid_post.dims == ("layer", "token", "hidden")
    assert states.layer.values.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(states.resid_post.values, NUMBERS)
    assert states.row_size.values.tolist() == SIZES.tolist()
    np.testing.assert_array_equal(states.mi.prompt(1).resid_post.values, NUMBERS[:, 1:10])


def test_packed_arrays_named_after_hook_points(write, store):
    states = mizarr.import_activations(
        write(**posts(), token_ids=IDS, row_size=SIZES), model="gpt2", store=store
    )
    expect_numbers(states)
    assert states.token_id.values.tolist() == IDS.tolist()
    assert states.resid_post.attrs["hook"] == POST and states.resid_post.attrs["long_name"]
    np.testing.assert_array_equal(states.mi.hook(POST.format(2)).values, NUMBERS[2])


@pytest.mark.parametrize("how", ["row_size", "attention_mask", "tokens"])
def test_a_padded_batch_loses_its_padding(write, store, how):
    given = {"input_ids": padded(IDS, 0)}
    if how == "row_size":
        given["row_size"] = SIZES
    elif how == "attention_mask":
        given["attention_mask"] = padded(np.ones_like(IDS), 0)
    blocks = {name: padded(array) for name, array in posts().items()}
    if how == "tokens":
        states = mizarr.import_activations(write(**blocks), model="gpt2", store=store, tokens=PROMPTS)
    else:
        states = mizarr.import_activations(write(**blocks, **given), model="gpt2", store=store)
    expect_numbers(states)
    assert states.token_id.values.tolist() == IDS.tolist()


def test_a_full_batch_is_prompts_of_one_length(write, store):
    block = RNG.standard_normal((3, 5, 2)).astype("f4")
    states = mizarr.import_activations(write(**{POST.format(0): block}), model="gpt2", store=store)
    np.testing.assert_array_equal(states.mi.unpack().resid_post.sel(layer=0).values, block)


def test_arrays_of_other_names_are_mapped_by_pattern(write, store):
    arrays = {f"model.layers.{layer}.output": NUMBERS[layer] for layer in range(4)}
    names = {"model.layers.{layer}.output": "blocks.{layer}.hook_resid_post"}
    path = write(**arrays, row_size=SIZES)
    expect_numbers(mizarr.import_activations(path, model="gpt2", store=store, names=names))


def test_names_in_another_order_are_another_run(write, store):
    """The first pattern that fits an array counts, so the order decides what it is stored as."""
    arrays = {"x0_0": NUMBERS[0], "x0_1": NUMBERS[1], "x1_0": NUMBERS[2]}
    path = write(**arrays, row_size=SIZES)
    names = [("x{layer}_0", "blocks.{layer}.hook_resid_pre"), ("x0_{layer}", POST.format("{layer}"))]
    pre, post, again = (
        mizarr.import_activations(path, model="gpt2", store=store, names=dict(pairs))
        for pairs in (names, names[::-1], names)
    )
    np.testing.assert_array_equal(pre.resid_pre.sel(layer=0).values, NUMBERS[0])
    np.testing.assert_array_equal(post.resid_post.sel(layer=0).values, NUMBERS[0])
    assert pre.encoding["run"] == again.encoding["run"] != post.encoding["run"]


def test_a_star_is_an_axis_of_layers(write, store):
    names = {"hidden_states": "blocks.*.hook_resid_post"}
    packed = write(hidden_states=NUMBERS, row_size=SIZES)
    expect_numbers(mizarr.import_activations(packed, model="gpt2", store=store, names=names))
    batch = np.stack([padded(layer) for layer in NUMBERS])
    block = write("batch", hidden_states=batch, row_size=SIZES)
    expect_numbers(mizarr.import_activations(block, model="gpt2", store=store, names=names))


def test_heads_and_numbers_per_token(write, store):
    z, scale, embed = RNG.random((5, 2, 4), "f4"), RNG.random((5, 1), "f4"), RNG.random((5, 3), "f4")
    path = write(**{"blocks.1.attn.hook_z": z, "blocks.0.ln1.hook_scale": scale, "hook_embed": embed})
    states = mizarr.import_activations(path, model="gpt2", store=store, n_layers=6)
    assert states.z.dims[1:] == ("token", "head", "d_head")
    np.testing.assert_array_equal(states.z.values[0], z)
    np.testing.assert_array_equal(states.ln1_scale.values[0], scale[:, 0])
    np.testing.assert_array_equal(states.embed.values, embed)


def test_several_files_are_one_run(write, store):
    files = [write("a", **posts([0, 1]), row_size=SIZES), write("b", **posts([2, 3]))]
    expect_numbers(mizarr.import_activations(files, model="gpt2", store=store))
    # Their order does not matter.
    assert mizarr.import_activations(files[::-1], model="gpt2", store=store).encoding["run"] in {
        entry.digest for entry in store.entries()
    }
    assert len([*store.entries()]) == 1


def test_one_prompt_of_one_token(write, store):
    path = write(**{POST.format(0): NUMBERS[0][:1], "blocks.0.ln1.hook_scale": NUMBERS[0, :1, 0]})
    states = mizarr.import_activations(path, model="gpt2", store=store)
    assert states.sizes["token"] == 1 and states.ln1_scale.shape == (1, 1)
    np.testing.assert_array_equal(states.resid_post.values[0], NUMBERS[0][:1])


# Numbers and labels


def test_nan_and_infinity_are_data(write, store):
    odd = NUMBERS[0].copy()
    odd[0] = np.nan, np.inf, -np.inf
    states = mizarr.import_activations(write(**{POST.format(0): odd}), model="gpt2", store=store)
    np.testing.assert_array_equal(states.resid_post.values[0], odd)


def test_big_endian_and_column_order_are_read(tmp_path, store):
    np.savez(
        tmp_path / "a.npz",
        **{POST.format(0): NUMBERS[0].astype(">f4"), POST.format(1): np.asfortranarray(NUMBERS[1])},
    )
    states = mizarr.import_activations(tmp_path / "a.npz", model="gpt2", store=store)
    np.testing.assert_array_equal(states.resid_post.values, NUMBERS[:2])


def test_compressed_npz_is_read(tmp_path, store):
    np.savez_compressed(tmp_path / "a.npz", **posts(), row_size=SIZES)
    expect_numbers(mizarr.import_activations(tmp_path / "a.npz", model="gpt2", store=store))


def test_bfloat16_of_safetensors_is_stored_so(tmp_path, store):
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in posts().items()}
    safetensors.numpy.save_file(halves, tmp_path / "a.safetensors")
    states = mizarr.import_activations(tmp_path / "a.safetensors", model="gpt2", store=store)
    expected = np.stack([*halves.values()]).astype("f4")
    np.testing.assert_array_equal(states.resid_post.values, expected)
    assert next(store.entries()).dtype == "bfloat16"


@pytest.mark.parametrize("raw", ["u2", "V2"])
def test_bfloat16_of_npz_is_read_when_it_is_said(tmp_path, store, raw):
    halves = NUMBERS[0].astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", **{POST.format(0): halves.view(raw)})
    with pytest.raises(ShapeError, match="bfloat16"):
        mizarr.import_activations(tmp_path / "a.npz", model="gpt2", store=store)
    states = mizarr.import_activations(tmp_path / "a.npz", model="gpt2", store=store, dtype="bfloat16")
    np.testing.assert_array_equal(states.resid_post.values[0], halves.astype("f4"))


def test_without_ids_none_are_shown(write, store):
    states = mizarr.import_activations(write(**posts(), row_size=SIZES), model="gpt2", store=store)
    assert "token_id" not in states.coords and "text" not in states.coords
    again = open_store(store.path, mode="r")[states.encoding["run"]]
    assert "token_id" not in again.coords
    with pytest.raises(PromptError, match="needs token ids"):
        states.mi.sel(token=3)


def test_texts_stand_beside_their_prompts(write, store):
    path = write(**posts(), row_size=SIZES)
    states = mizarr.import_activations(path, model="gpt2", store=store, texts=TEXTS)
    assert states.text.values.tolist() == TEXTS
    np.testing.assert_array_equal(states.mi.prompt("三").resid_post.values, NUMBERS[:, 10:12])


def test_texts_may_be_an_array_of_npz(tmp_path, store):
    np.savez(tmp_path / "a.npz", **posts(), row_size=SIZES, text=np.array(TEXTS))
    states = mizarr.import_activations(tmp_path / "a.npz", model="gpt2", store=store)
    assert states.text.values.tolist() == TEXTS


def test_arrays_are_left_out_by_name_or_glob(write, store):
    path = write(**posts(), row_size=SIZES, loss=np.zeros(3), **{"blocks.0.attn.hook_pattern": np.zeros(3)})
    expect_numbers(
        mizarr.import_activations(path, model="gpt2", store=store, skip=["loss", "*.hook_pattern"])
    )


# There and back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_what_was_exported_comes_back(store, tmp_path, suffix, dtype):
    entry = put_run(store, dtype, cells=STATES)
    path = export_key(store, entry.digest, tmp_path / f"run{suffix}")
    states = mizarr.import_activations(path, model="tiny", store=tmp_path / "other", n_layers=4)
    ours = entry.open()
    assert set(states.variables) == set(ours.variables)
    for name in ours.variables:
        np.testing.assert_array_equal(states[name].values, ours[name].values)
        assert states[name].dims == ours[name].dims
    assert states.resid_post.attrs["hook"] == ours.resid_post.attrs["hook"]
    if suffix == ".safetensors":  # bit by bit; npz has no bfloat16
        back = next(open_store(tmp_path / "other").entries())
        assert back.dtype == dtype and back.tokens == entry.tokens
        for name, layer in STATES:
            for n in range(len(back.segments)):
                here = slice(back.segments[n].start, back.segments[n].stop)
                np.testing.assert_array_equal(back.shard(name, layer, n), values(name, layer, dtype)[here])


def test_ids_that_were_unknown_stay_unknown(write, store, tmp_path):
    first = mizarr.import_activations(write(**posts(), row_size=SIZES), model="gpt2", store=store)
    path = export_key(store, first.encoding["run"], tmp_path / "again.safetensors")
    back = mizarr.import_activations(path, model="gpt2", store=tmp_path / "other")
    assert "token_id" not in back.coords
    expect_numbers(back)


def test_one_prompt_comes_back_as_a_run(store, tmp_path):
    part = put_run(store, cells=STATES).open().mi.prompt(1)
    path = mizarr.export(part, tmp_path / "prompt.npz")
    states = mizarr.import_activations(path, model="tiny", store=tmp_path / "other")
    np.testing.assert_array_equal(states.resid_post.values, part.resid_post.values)
    assert states.token_id.values.tolist() == PROMPTS[1]


def test_a_choice_of_tokens_is_no_run(store, tmp_path):
    part = put_run(store, cells=STATES).open().mi.sel(position=[-1])
    path = mizarr.export(part, tmp_path / "last.npz")
    with pytest.raises(PromptError, match="found gaps in the array 'position'"):
        mizarr.import_activations(path, model="tiny", store=tmp_path / "other")
    assert not (tmp_path / "other").exists()


# Identity


def test_the_same_file_is_stored_once(write, store, tmp_path, monkeypatch):
    path = write(**posts(), row_size=SIZES)
    first = mizarr.import_activations(path, model="gpt2", store=store)
    elsewhere = tmp_path / f"copy{path.suffix}"
    shutil.copy(path, elsewhere)
    monkeypatch.setattr(Entry, "write_segment", lambda *args, **options: pytest.fail("written again"))
    again = mizarr.import_activations(elsewhere, model="gpt2", store=store)
    assert again.encoding["run"] == first.encoding["run"]
    expect_numbers(again)


@pytest.mark.parametrize(
    "other",
    [{"model": "gpt3"}, {"revision": "abc"}, {"numbers": NUMBERS + 1}, {"n_layers": 12}],
    ids=lambda other: next(iter(other)),
)
def test_another_declaration_or_another_file_is_another_run(write, store, other):
    first = mizarr.import_activations(write(**posts(), row_size=SIZES), model="gpt2", store=store)
    path = write("second", **posts(numbers=other.get("numbers", NUMBERS)), row_size=SIZES)
    declared = {name: value for name, value in other.items() if name != "numbers"}
    second = mizarr.import_activations(path, store=store, **{"model": "gpt2"} | declared)
    assert second.encoding["run"] != first.encoding["run"] and len([*store.entries()]) == 2


def test_a_declared_model_is_not_the_computed_one(store, tmp_path):
    entry = put_run(store, cells=STATES)
    computed = entry.open()
    path = export_key(store, entry.digest, tmp_path / "run.npz")
    declared = mizarr.import_activations(path, model="tiny", store=store)
    assert declared.attrs["model_digest"] != computed.attrs["model_digest"]
    assert store.find_prompts(entry.run, entry.tokens, "float32", STATES)[0].digest == entry.digest
    with pytest.raises(StageError, match=r"'mine' of tiny \(\w+\), 'theirs' of tiny as declared \(\w+\)"):
        require_same_model(mine=computed.resid_post, theirs=declared.resid_post)


def test_provenance_says_that_the_model_is_declared(write, store):
    states = mizarr.import_activations(
        write(**posts(), row_size=SIZES), model="gpt2", revision="main", store=store
    )
    record = next(store.records())
    note = store.provenance(record)[0]
    assert (note["model"], note["declared"], note["revision"]) == ("gpt2", True, "main")
    assert len(note["imported"]["files"]) == 1 and states.encoding["run"] == note["entry"]


def test_a_killed_import_goes_on_where_it_was(write, store, monkeypatch):
    monkeypatch.setattr("mizarr.store.store._SHARD_BYTES", 48)  # segments of four tokens
    path = write(**posts(), row_size=SIZES)
    real, written = Entry.write_segment, []

    def killed(self, n, arrays, **options):
        if n == 2 and len(written) == 2:
            raise KeyboardInterrupt
        written.append(n)
        return real(self, n, arrays, **options)

    monkeypatch.setattr(Entry, "write_segment", killed)
    with pytest.raises(KeyboardInterrupt):
        mizarr.import_activations(path, model="gpt2", store=store)
    assert not [*store.records()], "nothing is visible before all is there"
    written.append(-1)
    expect_numbers(mizarr.import_activations(path, model="gpt2", store=store))
    assert written == [0, 1, -1, 2, 3]


# What one does with it


def test_offline_stages_run_on_imported_states(write, store):
    path = write(**posts(), row_size=SIZES, token_ids=IDS)
    states = mizarr.import_activations(path, model="gpt2", store=store)
    wide = NUMBERS.astype("f8")
    centred = wide[3] - wide[3].mean(0)
    variance = np.linalg.eigvalsh(centred.T @ centred)[::-1] / (len(IDS) - 1)
    found = pca(states.resid_post.sel(layer=3), n_components=3)
    np.testing.assert_allclose(found.explained_variance.values, variance, rtol=1e-5)
    norms = np.linalg.norm(wide, axis=-1)
    statistics = token_statistics(states.resid_post)
    np.testing.assert_allclose(statistics.norm.values, norms, rtol=1e-6)
    assert statistics.token_id.values.tolist() == IDS.tolist(), "labelled like what it was made of"
    cosines = np.einsum("ith,jth->ij", wide / norms[..., None], wide / norms[..., None]) / len(IDS)
    np.testing.assert_allclose(layer_cosine(states.resid_post).cosine.values, cosines, atol=1e-6)


TORCH_FREE = (
    TORCH_BLOCKED
    + """
import mizarr
from mizarr.stages.geometry.pca import pca
from mizarr.stages.geometry.similarity import layer_cosine
from mizarr.stages.corpus.token_statistics import token_statistics

states = mizarr.import_activations(sys.argv[1], model="gpt2", store=sys.argv[2])
states = mizarr.open_store(sys.argv[2], mode="r")[states.encoding["run"]].resid_post
found = [
    pca(states.sel(layer=3), n_components=3).explained_variance,
    layer_cosine(states).cosine,
    token_statistics(states).norm,
]
print(json.dumps([array.values.tolist() for array in found]))
"""
)


def test_a_laptop_without_torch_imports_and_analyses(write, store, tmp_path):
    path = write(**posts(), row_size=SIZES, token_ids=IDS)
    done = subprocess.run(
        [sys.executable, "-c", TORCH_FREE, str(path), str(tmp_path / "laptop")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states = mizarr.import_activations(path, model="gpt2", store=store).resid_post
    here = [
        pca(states.sel(layer=3), n_components=3).explained_variance,
        layer_cosine(states).cosine,
        token_statistics(states).norm,
    ]
    for there, array in zip(json.loads(done.stdout.splitlines()[-1]), here, strict=True):
        np.testing.assert_array_equal(there, array.values)


# Bad input


def message(store_path: Path, error: type[MizarrError], *args, **options) -> str:
    with pytest.raises(error) as raised:
        mizarr.import_activations(*args, store=store_path, **{"model": "gpt2"} | options)
    assert not store_path.exists(), "nothing may be left behind"
    return str(raised.value)


ZEROS = np.zeros((6, 4), "f4")
FIRST, SECOND = POST.format(0), POST.format(1)
RAGGED = posts() | {"row_size": SIZES}
BAD = {
    "unknown hook": ({"blocks.0.hook_resid_pst": ZEROS}, {}, HookPointNotFound, "hook_resid_post"),
    "nothing": ({"row_size": SIZES}, {}, HookPointNotFound, "map arrays to their hook points"),
    "pattern": ({"blocks.0.attn.hook_pattern": ZEROS}, {}, ShapeError, "one per pair of positions"),
    "unused name": (posts(), {"names": {"block": FIRST}}, HookPointNotFound, "no array is named 'block'"),
    "unused skip": (posts(), {"skip": ["los"]}, HookPointNotFound, "no array is named 'los'"),
    "row sizes": (posts() | {"row_size": SIZES + 1}, {}, ShapeError, "check token ids and row_size"),
    "float row sizes": (
        posts() | {"row_size": SIZES / 1.0}, {}, PromptError,
        "row_size as a list of integers, the number of tokens of each prompt, found float64",
    ),
    "empty prompt": (
        posts() | {"row_size": np.array([0, 15])}, {}, PromptError,
        "prompt 0 has 0 tokens, expected at least one",
    ),
    "few ids": (RAGGED | {"token_ids": IDS[:-1]}, {}, PromptError, "found ids of shape [14]"),
    "float ids": (RAGGED | {"token_ids": IDS / 2}, {}, PromptError, "array of integers"),
    "huge ids": (RAGGED | {"token_ids": IDS + 2**40}, {}, PromptError, "that fit int32"),
    "negative ids": (RAGGED | {"token_ids": IDS - 5}, {}, PromptError, ">= 0"),
    "few texts": (posts(), {"texts": ["a", "b"]}, PromptError, "one text per prompt"),
    "left padding": (
        {FIRST: ZEROS.reshape(2, 3, 4), "attention_mask": np.array([[0, 1, 1]] * 2)}, {}, PromptError, "right"
    ),
    "too few axes": ({FIRST: ZEROS[0]}, {}, ShapeError, "alike, found shape [4]"),
    "too many axes": ({FIRST: ZEROS.reshape(1, 1, 6, 4)}, {}, ShapeError, "found shape [1, 1, 6, 4]"),
    "batch and packed": ({FIRST: ZEROS.reshape(2, 3, 4), SECOND: ZEROS}, {}, ShapeError, "alike"),
    "lengths": ({FIRST: ZEROS, SECOND: ZEROS[1:]}, {}, ShapeError, "'blocks.1.hook_resid_post' for"),
    "widths": ({FIRST: ZEROS, SECOND: ZEROS[:, 1:]}, {}, ShapeError, "[4] per token, as in the other"),
    "dtypes": ({FIRST: ZEROS, SECOND: ZEROS.astype("f2")}, {}, ShapeError, "float16, float32"),
    "integers": ({FIRST: ZEROS.astype("i4")}, {}, ShapeError, "found int32"),
    "layers": (posts(), {"n_layers": 2}, ShapeError, "layer 3, and n_layers=2"),
    "twice": ({"a": ZEROS, "b": ZEROS}, {"names": {"a": FIRST, "b": FIRST}}, ShapeError, "both for hook"),
    "axes of several models": (
        {POST.format(0): np.zeros((5, 3), "f4"), "hook_embed": np.zeros((5, 4), "f4")}, {}, ShapeError,
        "axis 'hidden' with the same length",
    ),
    "empty axis": ({POST.format(0): np.zeros((5, 0), "f4")}, {}, ShapeError, "at least 1"),
    "a number per layer": (
        {"h": np.ones(2, "f4")}, {"names": {"h": POST.format("*")}}, ShapeError, "alike, found shape []"
    ),
    "no layers": (
        {"h": np.zeros((0, 5, 3), "f4")}, {"names": {"h": POST.format("*")}}, ShapeError,
        "found shape [0, 5, 3]",
    ),
    "too many layers": ({POST.format(10**9): NUMBERS[0]}, {}, ShapeError, "at most 10000 layers"),
    "ids beyond row sizes": (
        posts() | {"row_size": SIZES}, {"tokens": [[1] * (n + 1) for n in SIZES]}, PromptError,
        "found 19 ids in 4 lists",
    ),
    "ids that miss a start token": (
        {POST.format(0): np.zeros((2, 5, 3), "f4")}, {"tokens": [[1] * 4, [1] * 4]}, ShapeError,
        "4 in the longest",
    ),
    "ids of one prompt alone": (posts(), {"tokens": [1, 2, 3]}, PromptError, "one list of ids per prompt"),
    "no ids": (posts(), {"tokens": []}, PromptError, "one list of ids per prompt"),
    "ids of three axes": (
        posts() | {"token_ids": np.zeros((1, 15, 1), int)}, {}, PromptError, "shape [1, 15, 1]"
    ),
    "one span": (posts() | {"char_start": np.arange(15)}, {}, PromptError, "give both or neither"),
    "mask of less": (
        {POST.format(0): np.zeros((2, 5, 3), "f4"), "attention_mask": np.ones((2, 4), int)}, {}, ShapeError,
        "[2, 5], the prompts and positions of array 'blocks.0.hook_resid_post', found [2, 4]",
    ),
    "a layer that no array has": (
        {"a": NUMBERS[0]}, {"names": {"a": "blocks.{layer}.hook_resid_post"}}, HookPointNotFound, "{layer}"
    ),
    "what might be states": (posts() | {"layer_1": NUMBERS[0]}, {}, HookPointNotFound, "skip='layer_1'"),
    "no model": (posts(), {"model": ""}, ConfigError, "name the model"),
    "dtype": (posts(), {"dtype": "float8"}, ConfigError, "'bfloat16' or no dtype"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_and_leaves_nothing(write, tmp_path, case):
    arrays, options, error, says = BAD[case]
    assert says in message(tmp_path / "new", error, write(**arrays), **options)


def test_arrays_in_two_files_are_refused(write, tmp_path):
    files = [write("a", **posts([0])), write("b", **posts([0, 1]))]
    assert "in several files" in message(tmp_path / "new", ConfigError, files)


def test_a_truncated_file_is_told(write, tmp_path):
    path = write(**posts(), row_size=SIZES)
    path.write_bytes(path.read_bytes()[:-100])
    error = WeightsError if path.suffix == ".safetensors" else ConfigError
    assert path.name in message(tmp_path / "new", error, path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.safetensors", None, "found none; check the path"),
        ("a.pt", b"", "files that end in .safetensors or .npz, found 'a.pt'"),
        ("a.npz", b"no zip", "cannot be read"),
    ],
)
def test_files_of_another_kind_are_told(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in message(tmp_path / "new", ConfigError, tmp_path / name)


def test_notes_that_are_none_are_told(tmp_path):
    safetensors.numpy.save_file(posts(), tmp_path / "a.safetensors", {"mizarr": "{"})
    assert "JSON" in message(tmp_path / "new", ConfigError, tmp_path / "a.safetensors")
    safetensors.numpy.save_file(posts(), tmp_path / "b.safetensors", {"mizarr": "[]"})
    assert "JSON object" in message(tmp_path / "new", ConfigError, tmp_path / "b.safetensors")
    np.savez(tmp_path / "a.npz", **posts(), **{"text.json": np.zeros(3, "u1")})
    assert "JSON in text.json" in message(tmp_path / "new", ConfigError, tmp_path / "a.npz")


@pytest.mark.parametrize("moment", ["labels", "key", "digests", "rows"])
@pytest.mark.parametrize("is_old", [False, True], ids=["just written", "of yesterday"])
def test_a_file_that_is_written_over_meanwhile_is_not_stored(
    write, store, monkeypatch, tmp_path, moment, is_old
):
    """Whatever is stored under the key of a file are that file's numbers."""
    path = write(**posts(), row_size=SIZES)
    first = path.read_bytes()
    other = write("other", **posts(numbers=NUMBERS + 1), row_size=SIZES).read_bytes()
    if is_old:
        os.utime(path, (1e9, 1e9))
        monkeypatch.setattr("mizarr.store.files.stamps._SETTLED_SECONDS", -1.0)
    monkeypatch.setattr("mizarr.store.store._SHARD_BYTES", 48)  # segments of four tokens
    place, name = {
        "labels": (exchange, "_split_arrays"),
        "key": (exchange, "declared_run"),
        "digests": (imports.Imported, "digest"),
        "rows": (Entry, "write_segment"),
    }[moment]
    real, calls = getattr(place, name), []

    def written_over(*given, **named):
        calls.append(0)
        if len(calls) == 1:
            path.write_bytes(other)
        return real(*given, **named)

    monkeypatch.setattr(place, name, written_over)
    told = (
        "array 'blocks.0.hook_resid_post' was overwritten while it was being imported; import it again"
        if moment == "rows"
        else f"{path.name} of what is imported changed .* overwritten meanwhile; start again"
    )
    with pytest.raises(SourceChanged, match=told):
        mizarr.import_activations(path, model="gpt2", store=store)
    assert not [*store.records()]
    monkeypatch.undo()
    path.write_bytes(first)
    expect_numbers(mizarr.import_activations(path, model="gpt2", store=store))
    assert not store.verify()


# Size

IMPORT = f"""
import sys
import mizarr
from mizarr.store import open_store
from mizarr.store.exchange import imports
imports._MEMORY_BYTES >>= 3
store = open_store(sys.argv[1], durability="process")
mizarr.import_activations(sys.argv[1] + ".npz", model="gpt2", store=store)
print({PEAK})
"""


@pytest.mark.wide
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Of a file 224 MiB larger no more shows than what is written at once, here 16 MiB, and some slack."""
    peaks = []
    for rows in (512, 4096):
        states = np.ones((rows, 64, 128), "f4")
        np.savez(tmp_path / f"{rows}.npz", **{f"blocks.{i}.hook_resid_post": states for i in (0, 1)})
        peaks.append(printed(IMPORT, str(tmp_path / str(rows))))
    assert peaks[1] - peaks[0] < 64 << 20, [peak >> 20 for peak in peaks]
