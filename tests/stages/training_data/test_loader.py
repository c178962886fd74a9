"""The loader: values of the store, labels, places to go on from, workers, other processes, bounded memory."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mizarr
from mizarr.stages.training_data.conversion import as_float32
from mizarr.stages.training_data.normalisation import Normalisation, state_statistics
from mizarr.store.errors import ConfigError, CorruptEntry, EntryNotFound, ShapeError
from tests.memory import PEAK, printed
from tests.stored_rows import write_rows
from tests.torch_free import without_torch

SMALL = {"batch": 96, "buffer_tokens": 512, "block_tokens": 64}


def random_run(folder, seed, dtype="float16", tokens=1500):
    """Ragged prompts, two layers of one variable and one of another, far from zero in one dimension."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 50, 200)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), tokens))]
    count = int(sizes.sum())
    prompts = [draw.integers(0, 9, size).tolist() for size in sizes]
    far = 30 * (np.arange(6) == 0)
    rows = {
        "resid_post": {layer: draw.standard_normal((count, 6)) + far for layer in (1, 3)},
        "mlp_out": {2: draw.standard_normal((count, 6))},
    }
    return write_rows(folder, rows, prompts, segment=256, dtype=dtype)


@pytest.fixture
def entry(tmp_path):
    return random_run(tmp_path / "store", 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_those_that_the_dataset_has_at_their_labels(tmp_path, dtype, seed):
    states = random_run(tmp_path / "store", seed, dtype).open()
    loader = mizarr.ActivationLoader(states, **SMALL, seed=seed, labels=True)
    seen = 0
    for batch in loader:
        assert batch["resid_post"].dtype == np.float32
        assert batch["resid_post"].shape[1:] == (2, 6)
        assert batch["mlp_out"].shape[1:] == (1, 6)
        where = states.row_start.values[batch["prompt"]] + batch["position"]
        here = states.isel(token=where)
        for name in ("resid_post", "mlp_out"):
            assert np.array_equal(batch[name], here[name].transpose("token", ...).values.astype("f4"))
        assert np.array_equal(batch["token_id"], here["token_id"].values)
        seen += len(where)
    assert seen == states.sizes["token"] == loader.rows


def test_one_layer_and_stored_numbers_can_be_asked_for(entry):
    loader = mizarr.ActivationLoader(entry.open(), "resid_post", 3, dtype="stored", **SMALL)
    found = np.concatenate([batch["resid_post"].copy() for batch in loader])
    assert found.dtype == np.float16
    stored = entry.open().resid_post.sel(layer=3).values
    assert np.array_equal(np.sort(found, axis=0), np.sort(stored, axis=0))


def test_prompts_and_layers_selected_before_are_what_is_read(entry):
    states = entry.open(variables=["resid_post"]).mi.prompts([1, 4, 5])
    loader = mizarr.ActivationLoader(states.mi.sel(layer=[3]), "resid_post", batch=8, labels=True)
    batches = list(loader)
    assert {int(n) for batch in batches for n in batch["prompt"]} == {1, 4, 5}
    assert batches[0]["resid_post"].shape[1:] == (1, 6)
    with pytest.raises(ShapeError, match="whole prompts"):
        mizarr.ActivationLoader(entry.open().mi.sel(position=[0]), batch=1)
    with pytest.raises(ShapeError, match="expected a dataset of whole prompts"):
        mizarr.ActivationLoader(entry.open().isel(token=slice(0, 500)), batch=1)


def test_every_half_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)][:, None]
    assert np.array_equal(as_float32(finite).view(np.uint32), finite.astype("f4").view(np.uint32))


@pytest.mark.parametrize("taken", [0, 1, 7, 15, 20])
def test_a_loader_taken_up_in_the_middle_goes_on_as_if_undisturbed(entry, taken):
    options = {**SMALL, "epochs": 2, "skip_positions": 1, "without": [3]}
    whole = [batch["resid_post"] for batch in mizarr.ActivationLoader(entry.open(), **options)]
    first = mizarr.ActivationLoader(entry.open(), **options)
    assert len(first) == len(whole)
    for _ in zip(range(taken), first, strict=False):
        pass
    first.position = taken  # zip takes one more before it stops
    state = json.loads(json.dumps(first.state_dict()))
    second = mizarr.ActivationLoader(entry.open(), **options).load_state_dict(state)
    rest = [batch["resid_post"] for batch in second]
    assert len(rest) == len(whole) - taken
    assert all(np.array_equal(a, b) for a, b in zip(rest, whole[taken:], strict=True))


def test_a_place_in_other_rows_is_refused(tmp_path, entry):
    state = mizarr.ActivationLoader(entry.open(), **SMALL).state_dict()
    other = random_run(tmp_path / "other", 1).open()
    for states, changed in ((other, {}), (entry.open(), {"seed": 1}), (entry.open(), {"without": [2]})):
        with pytest.raises(ConfigError, match="belongs to a loader of other activations"):
            mizarr.ActivationLoader(states, **SMALL, **changed).load_state_dict(state)


def test_a_loader_at_its_end_says_so(entry):
    loader = mizarr.ActivationLoader(entry.open(), **SMALL)
    list(loader)
    with pytest.raises(
        ConfigError,
        match=r"all \d+ batches of the loader's 1 epochs were taken; make .*, or set loader.position = 0",
    ):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_torch_gets_the_same_batches_from_any_number_of_workers(entry, workers):
    options = {**SMALL, "epochs": 2}
    expected = [batch["resid_post"] for batch in mizarr.ActivationLoader(entry.open(), **options)]
    loader = mizarr.ActivationLoader(entry.open(), **options)
    loader.position = 3
    them = DataLoader(loader.to_torch(), batch_size=None, num_workers=workers)
    found = [batch["resid_post"] for batch in them]
    assert len(found) == len(expected) - 3
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, expected[3:], strict=True))


def test_a_worker_goes_on_behind_what_it_handed_out(entry):
    """The protocol of torchdata's StatefulDataLoader, outside of any worker."""
    dataset = mizarr.ActivationLoader(entry.open(), **SMALL).to_torch()
    whole = [batch["mlp_out"] for batch in dataset]
    them = iter(dataset)
    for _ in range(4):
        next(them)
    again = mizarr.ActivationLoader(entry.open(), **SMALL).to_torch()
    again.load_state_dict(dataset.state_dict())
    assert all(torch.equal(a["mlp_out"], b) for a, b in zip(again, whole[4:], strict=True))


def test_stored_bfloat16_is_torchs(tmp_path):
    states = random_run(tmp_path / "store", 0, "bfloat16").open()
    loader = mizarr.ActivationLoader(states, "resid_post", 1, dtype="stored", **SMALL)
    (batch, *_) = loader.to_torch()
    loader.position = 0
    assert batch["resid_post"].dtype == torch.bfloat16
    assert np.array_equal(batch["resid_post"].float().numpy(), next(iter(loader))["resid_post"].astype("f4"))


def test_another_process_draws_the_same_batches_without_torch(tmp_path, entry):
    program = """
import hashlib, mizarr
store = mizarr.open_store(sys.argv[1], mode="r")
states = store.entry(sys.argv[2]).open()
loader = mizarr.ActivationLoader(states, batch=96, buffer_tokens=512, block_tokens=64)
found = hashlib.sha256()
for batch in loader:
    found.update(batch["resid_post"].tobytes())
print(json.dumps(found.hexdigest()))
"""
    here = hashlib.sha256()
    for batch in mizarr.ActivationLoader(entry.open(), **SMALL):
        here.update(batch["resid_post"].tobytes())
    assert without_torch(program, tmp_path / "store", entry.digest) == here.hexdigest()


def test_a_loader_sent_to_another_process_draws_the_same(entry):
    loader = mizarr.ActivationLoader(entry.open(), **SMALL)
    sent = pickle.loads(pickle.dumps(loader))
    assert all(np.array_equal(a["resid_post"], b["resid_post"]) for a, b in zip(loader, sent, strict=True))


def test_states_imported_without_token_ids_have_none(tmp_path):
    np.savez(tmp_path / "s.npz", states=np.ones((10, 4), "f4"), row_size=[4, 6])
    names = {"states": "blocks.0.hook_resid_post"}
    states = mizarr.import_activations(tmp_path / "s.npz", model="m", store=tmp_path / "st", names=names)
    (batch,) = mizarr.ActivationLoader(states, batch=10, labels=True)
    assert batch["token_id"].tolist() == [-1] * 10
    with pytest.raises(ConfigError, match="imported without token ids"):
        mizarr.ActivationLoader(states, batch=10, without=[0])


def test_several_runs_are_read_as_one(tmp_path):
    runs = [random_run(tmp_path / str(n), n) for n in range(2)]
    loader = mizarr.ActivationLoader([run.open() for run in runs], "resid_post", labels=True, **SMALL)
    counts = np.zeros(2, int)
    for batch in loader:
        counts += np.bincount(batch["run"], minlength=2)
    assert counts.tolist() == [run.tokens.n_tokens for run in runs]


@pytest.mark.parametrize("how", ["expected_average_only_in", "centred", "standard"])
def test_normalised_rows_are_what_the_name_says(entry, how):
    states = entry.open()
    found = state_statistics(states.resid_post, skip_positions=1)
    loader = mizarr.ActivationLoader(
        states, "resid_post", normalise=how, statistics=found, skip_positions=1, **SMALL
    )
    rows = np.concatenate([batch["resid_post"].copy() for batch in loader]).astype("f8")
    lengths, mean = np.linalg.norm(rows, axis=2).mean(0), rows.mean(0)
    if how == "expected_average_only_in":
        assert lengths == pytest.approx([6**0.5] * 2, rel=1e-5)
    else:
        assert mean == pytest.approx(np.zeros((2, 6)), abs=1e-5)
        spread = rows.std(0) if how == "standard" else np.sqrt((rows**2).mean((0, 2)))
        assert spread == pytest.approx(np.ones_like(spread), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_statistics_of_segments_are_those_of_all_rows_far_from_zero_too(tmp_path, seed):
    entry = random_run(tmp_path / "store", seed, "float32")
    states = entry.open(chunks="segment").resid_post
    behind = states.values[:, states.position.values >= 1].astype("f8")
    for held in (states, states.compute()):
        found = state_statistics(held, skip_positions=1)
        assert found["n"].values.tolist() == [behind.shape[1]] * 2
        np.testing.assert_allclose(found["mean"], behind.mean(1), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["variance"], behind.var(1), rtol=1e-9)
        norms = np.linalg.norm(behind, axis=2)
        np.testing.assert_allclose(found["norm"], norms.mean(1), rtol=1e-12)
        np.testing.assert_allclose(found["largest_norm"], norms.max(1), rtol=1e-12)


def test_statistics_join_exactly_over_any_cuts(tmp_path):
    states = random_run(tmp_path / "store", 4, "float32").open().resid_post
    cuts = [0, 1, 200, 201, 777, states.sizes["token"]]
    parts = [state_statistics(states.isel(token=slice(a, b)), skip_positions=2) for a, b in pairwise(cuts)]
    joined, whole = state_statistics.combine(parts), state_statistics(states, skip_positions=2)
    for name in whole.data_vars:
        np.testing.assert_allclose(joined[name], whole[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"batch": 0}, ConfigError, "batch of at least 1"),
        ({"buffer_tokens": 10}, ConfigError, "buffer_tokens to be at least block_tokens"),
        ({"variables": "resid_pots"}, EntryNotFound, "resid_post"),
        ({"variables": "resid_post", "layers": [0]}, EntryNotFound, "resid_post of layers 0"),
        ({"skip_positions": -1}, ConfigError, "skip_positions to be at least 0"),
        ({"skip_positions": 1000}, ConfigError, "expected stored activations of at least one batch"),
        ({"normalise": "centred"}, ConfigError, "statistics= belong together"),
        ({"dtype": "float64"}, ConfigError, "'float32' or 'stored'"),
    ],
)
def test_what_does_not_fit_is_told(entry, changed, error, said):
    with pytest.raises(error, match=said):
        mizarr.ActivationLoader(entry.open(), **(SMALL | changed))


def test_an_unknown_normalisation_is_told_with_the_nearest(entry):
    with pytest.raises(ConfigError, match=r"found 'centered'; did you mean 'centred'\?"):
        Normalisation.of(state_statistics(entry.open().resid_post), 1, "centered")


def test_a_flipped_byte_is_found_when_its_batch_is_read(entry):
    path = entry.folder.path(f"{entry.path}/{entry.layout('resid_post').path('resid_post', 3, 1)}")
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[40] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptEntry, match="crc32c"):
        list(mizarr.ActivationLoader(entry.open(), "resid_post", **SMALL))


def test_a_run_in_place_of_no_store_is_an_error_of_one_line(tmp_path):
    with pytest.raises(EntryNotFound, match="not opened from a stored run"):
        mizarr.ActivationLoader(random_run(tmp_path / "s", 0).open().drop_encoding(), **SMALL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_two_buffers_and_not_by_the_run(tmp_path):
    """A run of 256 MiB through two buffers of 8 MiB; beside a process that opens it and reads nothing."""
    rows = {"resid_post": {0: np.ones((1 << 18, 512), "f2")}}
    entry = write_rows(tmp_path / "s", rows, [[1] * 64] * (1 << 12), segment=4096, dtype="float16")
    script = """
import sys, mizarr
store = mizarr.open_store(sys.argv[1], mode="r")
loader = mizarr.ActivationLoader(
    store.entry(sys.argv[2]).open(), batch=1024, buffer_tokens=8192, block_tokens=512, dtype="stored"
)
for _ in loader if sys.argv[3] == "read" else []:
    pass
"""
    idle, read = (
        printed(f"{script}print({PEAK})", str(tmp_path / "s"), entry.digest, what)
        for what in ("idle", "read")
    )
    # Pages of mapped shards count as well: at most 96 MiB of them (store/runs/mapped.py).
    assert read - idle < (96 + 4 * 8 + 8) << 20
