"""How often each feature of a dictionary is active over a run, and how strongly, without its activations."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import Dictionary, HookSpec, Model, capture, open_store
from mizarr.stages.features.corpus.encode import encode_corpus
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.capture.run_reductions import count_features
from mizarr.stages.forward.hooks.reductions import features
from mizarr.store.errors import HookPointNotFound, SourceChanged
from mizarr.store.runs.packed import PackedTokens
from mizarr.store.runs.run_sums import mean_of_parts
from mizarr.workflows.cli.group import run

OPTIONS = {"segment_tokens": 64, "batch_tokens": 96, "progress": False}


@pytest.fixture(scope="module")
def model():
    return Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def dictionary():
    return Dictionary.from_pretrained("specimen/plt")


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(3)
    return PackedTokens.from_lists(
        [rng.integers(1, 250, size).tolist() for size in (20, 33, 1, 64, 40, 8, 40)]
    )


def spec_of(dictionary, layers=(1, 2), **how):
    return HookSpec().capture(*map(dictionary.read_hook, layers), reduce=dictionary, **how)


def counts(model, tokens, folder, spec, **options):
    store = open_store(folder, durability="process")
    return store, capture(model, tokens, spec, store=store, **{**OPTIONS, **options})


def figures(found, dictionary, prefix=None):
    """(count, sum, max) of the variables."""
    kind = prefix or dictionary.layout.read
    name = f"{kind}__{features(dictionary).name.removesuffix('_count')}"
    return tuple(found[f"{name}_{figure}"] for figure in ("count", "sum", "max"))


def by_hand(model, dictionary, tokens, layer, first=0):
    """Of activations as the encoder's definition gives them, float64: (count, sum, max)."""
    it, hook = dictionary.layer(layer), dictionary.read_hook(layer)
    spec = HookSpec().capture(hook)
    states = torch.cat([model.forward(ids.tolist(), spec)[hook][0][first:] for ids in tokens]).double()
    pre = states @ it.W_enc.double().T + (0 if it.b_enc is None else it.b_enc.double())
    active = it.activation(pre).numpy()
    return (active != 0).sum(0), active.sum(0), active.max(0)


def test_figures_are_those_of_the_activations(model, dictionary, tokens, tmp_path):
    store, found = counts(model, tokens, tmp_path, spec_of(dictionary))
    count, total, largest = figures(found, dictionary)
    assert count.dims == total.dims == largest.dims == ("layer", "feature")
    assert (count.dtype, total.dtype, largest.dtype) == (np.int64, np.float64, np.float32)
    assert count.attrs["tokens"] == tokens.n_tokens
    for layer in (1, 2):
        expected = by_hand(model, dictionary, tokens, layer)
        here = (figure.sel(layer=layer) for figure in (count, total, largest))
        assert expected[0].sum() > 0
        for got, wanted in zip(here, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    never = count.values == 0
    assert never.any()
    assert not largest.values[never].any()
    assert store.verify() == []
    (entry,) = store.entries()
    assert {name.split("__")[1][:9] for name, _ in entry.published()} == {"features_"}


def test_they_agree_with_the_statistics_of_an_encoded_corpus(model, dictionary, tokens, tmp_path):
    """Counts to the last one, sums to the rounding of float64."""
    _, found = counts(model, tokens, tmp_path / "a", spec_of(dictionary))
    store = open_store(tmp_path / "b", durability="process")
    for layer in (1, 2):
        encoded = encode_corpus(dictionary, model, tokens, store=store, layers=[layer], progress=False)
        size = dictionary.n_features
        count = np.bincount(encoded["feature"], minlength=size)
        total = np.bincount(encoded["feature"], weights=encoded["activation"], minlength=size)
        ours = [figure.sel(layer=layer).values for figure in figures(found, dictionary)]
        np.testing.assert_array_equal(ours[0], count)
        np.testing.assert_allclose(ours[1], total, rtol=1e-6)


def test_a_selection_counts_its_tokens_alone(model, dictionary, tokens, tmp_path):
    _, found = counts(model, tokens, tmp_path, spec_of(dictionary, positions="1:"))
    ours = figures(found, dictionary, f"{dictionary.layout.read}__from_1")
    longer = [ids for ids in tokens if len(ids) > 1]
    expected = by_hand(model, dictionary, longer, 1, first=1)
    np.testing.assert_array_equal(ours[0].sel(layer=1), expected[0])
    np.testing.assert_allclose(ours[1].sel(layer=1), expected[1], rtol=1e-4, atol=1e-4)
    assert ours[0].attrs["tokens"] == tokens.n_tokens - tokens.n_prompts


@pytest.mark.parametrize(
    "options",
    [
        {"segment_tokens": 32},
        {"segment_tokens": 256},
        {"batch_tokens": 33},
        {"batch_tokens": 4096},
        {"order": "layer"},
        {"storage_dtype": "bfloat16"},
        {"storage_dtype": "float16"},  # -inf of what is never active is no overflow
    ],
)
def test_bits_do_not_depend_on_batches_and_segments(model, dictionary, tokens, tmp_path, options):
    spec = spec_of(dictionary)
    _, expected = counts(model, tokens, tmp_path / "a", spec)
    _, found = counts(model, tokens, tmp_path / "b", spec, **options)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_bits_do_not_depend_on_threads_nor_on_what_else_is_captured(
    model, dictionary, tokens, tmp_path, set_threads
):
    found = []
    specs = spec_of(dictionary), spec_of(dictionary, (0, 1, 2)).capture("blocks.*.hook_resid_post")
    for threads, spec in enumerate(specs, 1):
        set_threads(threads)
        found.append(counts(model, tokens, tmp_path / str(threads), spec)[1])
    for one, other in zip(*(figures(each, dictionary) for each in found), strict=True):
        dim = "layer" if "layer" in other.dims else next(d for d in other.dims if str(d).startswith("layer"))
        np.testing.assert_array_equal(one, other.sel({dim: [1, 2]}))


def test_features_below_zero_count_and_have_a_largest_activation():
    class Layer:
        layer, n_features = 0, 3

        def active(self, rows):
            row, feature = rows.nonzero(as_tuple=True)
            return row, feature, rows[row, feature]

    rows = torch.tensor([[-2.0, 0.0, 1.0], [-1.0, 0.0, -4.0], [9.0, 9.0, 9.0]])
    made = count_features(Layer(), rows, torch.tensor([True, True, False]))
    assert made["count"].tolist() == [2, 0, 2]
    assert mean_of_parts(made["sum"].numpy()[None], 1).tolist() == [-3.0, 0.0, -3.0]
    assert made["max"].tolist() == [-1.0, -np.inf, 1.0]


def test_two_dictionaries_of_one_run_stand_beside_each_other(model, dictionary, tokens, tmp_path):
    other = Dictionary.from_pretrained("specimen/clt")
    spec = spec_of(dictionary).extend(spec_of(other))
    store, found = counts(model, tokens, tmp_path, spec)
    assert len(found.data_vars) == 6
    for each in (dictionary, other):
        expected = by_hand(model, each, tokens, 1)[0]
        np.testing.assert_array_equal(figures(found, each)[0].sel(layer=1), expected)
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)  # each has an axis of its own
    ours = figures(found, other)[0]
    np.testing.assert_array_equal(plain[ours.name].sum("segment").sel(layer=[1, 2]), ours)


def test_a_dictionary_in_another_place_is_the_same_and_another_is_not(model, dictionary, tokens, tmp_path):
    store, _ = counts(model, tokens, tmp_path / "s", spec_of(dictionary))
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in (Path(mizarr.__file__).parent / "stages/features/specimen/plt").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    moved = Dictionary.from_pretrained(copy, read=dictionary.layout.read, write=dictionary.layout.write)
    node = CaptureNode(model, tokens, spec_of(moved), segment_tokens=64)
    assert node.status(store).is_cached
    clt = Dictionary.from_pretrained("specimen/clt")
    assert not CaptureNode(model, tokens, spec_of(clt), segment_tokens=64).status(store).is_cached
    for file in copy.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(SourceChanged):
        node.status(store)


def test_the_spec_travels_and_says_which_dictionary_is_meant(dictionary):
    bound = spec_of(dictionary).bind([dictionary.read_hook(layer) for layer in (1, 2)], stored=True)
    assert pickle.loads(pickle.dumps(bound)) == bound
    told = bound.canonical()["captures"][0][2]
    assert told["dictionary"] == features(dictionary).identity
    assert told["reduce"].startswith(f"features_{told['dictionary'][:16]}")
    assert "features:specimen/plt" in repr(spec_of(dictionary))


KILLED = """
import os, signal, sys
import numpy as np
from mizarr import Dictionary, HookSpec, capture, open_store
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.packed import PackedTokens

folder, sizes, ids = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
write, count = Entry.write_segment, [0]

def dying(self, *arguments, **options):
    count[0] += 1
    if count[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments, **options)

Entry.write_segment = dying
plt = Dictionary.from_pretrained("specimen/plt")
spec = HookSpec().capture(plt.read_hook(1), plt.read_hook(2), reduce=plt)
tokens = PackedTokens(np.array(ids, np.int32), np.array(sizes))
store = open_store(folder, durability="process")
capture("specimen", tokens, spec, store=store, segment_tokens=64, batch_tokens=96, progress=False)
"""


def test_a_killed_harvest_goes_on_to_the_same_bits_and_a_copy_has_them(model, dictionary, tokens, tmp_path):
    _, expected = counts(model, tokens, tmp_path / "undisturbed", spec_of(dictionary))
    folder, arguments = tmp_path / "killed", [str(tokens.row_size.tolist()), str(tokens.ids.tolist())]
    command = [sys.executable, "-c", KILLED, str(folder), *arguments]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    store, found = counts(model, tokens, folder, spec_of(dictionary))
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())
    other = open_store(tmp_path / "copy", durability="process")
    store.copy_to(other)
    (entry,) = other.entries()
    copied = xr.open_dataset(other.path / entry.path, engine="mizarr")
    for figure in figures(found, dictionary):
        np.testing.assert_array_equal(copied[figure.name], figure)
    assert other.verify() == []


def test_what_features_do_not_read_is_refused_in_one_line(model, dictionary, tokens, tmp_path, capsys):
    store = open_store(tmp_path)
    with pytest.raises(HookPointNotFound, match="expected a hook point that this dictionary reads"):
        capture(model, tokens, HookSpec().capture("hook_embed", reduce=dictionary), store=store, **OPTIONS)
    with pytest.raises(HookPointNotFound, match=r"expected one of norm, .*, found '3'"):
        HookSpec().capture("hook_embed", reduce=3)  # type: ignore[arg-type]
    asked = ["capture", "specimen", "a b", "--text", "--hooks", "hook_embed", "--store", str(tmp_path)]
    assert run([*asked, "--reduce", "features:specimen/none"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_command_line_counts_features(dictionary, tmp_path, capsys):
    hook = str(dictionary.read_hook(1))
    asked = ["capture", "specimen", "the cat sat", "--text", "--hooks", hook, "--store", str(tmp_path)]
    assert run([*asked, "--reduce", "features:specimen/plt"]) == 0
    capsys.readouterr()
    assert run(["ls", "--store", str(tmp_path)]) == 0
    assert f"{features(dictionary).name}" in capsys.readouterr().out
