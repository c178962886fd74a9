"""The largest logits of each token, and the log of the sum of exp of all: what transformers gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import xarray as xr

from mizarr import HookSpec, Model, capture, open_store
from mizarr.stages.forward.capture import vocabulary
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.networks.loop import Network
from mizarr.store.errors import ConfigError, HookPointNotFound
from mizarr.workflows.cli.group import run

from ..random_encoders import save_random_encoder
from ..random_models import VOCAB, save_random_model

RESID, LOGITS = "blocks.*.hook_resid_post", "hook_logits"
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}
K = 7


@pytest.fixture(autouse=True)
def narrow_blocks(monkeypatch):
    """Vocabularies of these models are one block otherwise."""
    monkeypatch.setattr(vocabulary, "_BLOCK", 96)


def both(**how):
    return HookSpec().capture(LOGITS, reduce=f"topk:{K}", **how).capture(LOGITS, reduce="logsumexp", **how)


def reduced(model, tokens, folder, spec=None, **options):
    store = open_store(folder, durability="process")
    return store, capture(model, tokens, spec or both(), store=store, **{**OPTIONS, **options})


def ordered(logits, k):
    """Ids [token, k], equal logits by smaller id."""
    return np.stack([np.lexsort((np.arange(len(row)), -row))[:k] for row in logits])


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def compared(request, tmp_path_factory):
    """A model, and the one of transformers it was made of: plain, and with soft-capped logits."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    capped = {"final_logit_softcapping": 5.0} if request.param == "gemma2" else {}
    reference = save_random_model(folder, request.param, 4, **capped)
    return Model.from_pretrained(folder), reference


def test_what_is_kept_is_what_transformers_gives(compared, tokens, tmp_path):
    model, reference = compared
    _, found = reduced(model, tokens, tmp_path)
    with torch.no_grad():
        rows = [reference(torch.tensor(ids.tolist())[None]).logits[0] for ids in tokens]
    logits = torch.cat(rows).double().numpy()
    largest, ids = found[f"logits__topk_{K}"], found[f"logits__topk_{K}_ids"]
    assert largest.dims == ids.dims == ("token", "rank")
    assert (largest.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(largest, -np.sort(-logits)[:, :K], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(logits, ids.values, 1), largest, atol=1e-4)
    assert all(len(set(row)) == K for row in ids.values.tolist())
    sums = found["logits__logsumexp"]
    np.testing.assert_allclose(sums, torch.from_numpy(logits).logsumexp(-1), atol=1e-4)
    logprobs = largest - sums
    expected = torch.from_numpy(logits).log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, ids.values, 1), atol=1e-4)


def test_an_encoder_has_logits_behind_the_transform_of_its_head(tokens, tmp_path):
    pytest.importorskip("transformers")
    save_random_encoder(tmp_path / "model", "bert", 1)
    model = Model.from_pretrained(tmp_path / "model")
    _, found = reduced(model, tokens, tmp_path / "store")
    logits = np.concatenate([model.forward(ids.tolist()).logits[0].numpy() for ids in tokens])
    np.testing.assert_allclose(found[f"logits__topk_{K}"], -np.sort(-logits)[:, :K], atol=1e-5)


def test_of_the_models_own_logits_order_and_sums_are_exact(model, tokens, tmp_path):
    """Ranked as numpy ranks them; the log of the sum correctly rounded, but for one float32 in doubt."""
    _, found = reduced(model, tokens, tmp_path)
    logits = np.concatenate([model.forward(ids.tolist()).logits[0].numpy() for ids in tokens])
    np.testing.assert_array_equal(found[f"logits__topk_{K}_ids"], ordered(logits, K))
    by_hand = torch.from_numpy(logits).double().logsumexp(-1).float().numpy()
    np.testing.assert_allclose(found["logits__logsumexp"], by_hand, rtol=2.0**-23)


class Given:
    """A network whose logits are given: row i of a matrix at position i."""

    def __init__(self, logits):
        self.logits = logits
        self.config = type("Config", (), {"vocab_size": logits.shape[1]})

    def unembed(self, x, want):
        assert len(want.tokens) <= vocabulary._BLOCK  # never the whole vocabulary at once
        return self.logits[None, :, want.tokens.start : want.tokens.stop]


def of(logits, *asked) -> list[np.ndarray]:
    from mizarr.stages.forward.hooks.reductions import as_reduction

    found = [each for told in asked for each in (as_reduction(told), *as_reduction(told).companions)]
    network: Network = Given(torch.from_numpy(logits))  # type: ignore[assignment]
    made = vocabulary.reduce_logits(network, torch.empty(1, len(logits), 1), found)
    return [made[each][0].numpy() for each in found]


@pytest.mark.parametrize("seed", range(6))
def test_equal_logits_stand_by_their_ids_over_blocks(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 400))
    logits = rng.choice([-2.0, -0.0, 0.0, 1.0, 3.5, -np.inf], (50, width)).astype(np.float32)
    k = int(rng.integers(1, width + 1))
    values, ids = of(logits, f"topk:{k}")
    np.testing.assert_array_equal(ids, ordered(logits, k))
    np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, 1))


def test_large_small_and_missing_numbers():
    logits = np.full((4, 200), -np.inf, np.float32)
    logits[0, 150], logits[1, [0, 199]] = 3e38, (-1e30, 2.0)
    logits[2], logits[3, 5] = 1e4, np.nan
    values, ids, sums = of(logits, "topk:2", "logsumexp")
    assert ids[0, 0] == 150
    assert ids[1].tolist() == [199, 0]
    assert ids[3].tolist() == [0, 1]  # NaN is no largest number
    np.testing.assert_array_equal(sums[:2], np.float32([3e38, 2.0]))
    assert sums[2] == np.float32(1e4 + np.log(200))
    assert np.isnan(sums[3])
    assert values[0].tolist() == [np.float32(3e38), -np.inf]


def test_bits_do_not_depend_on_batches_and_segments(model, tokens, tmp_path, another_way):
    _, expected = reduced(model, tokens, tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "b", **another_way)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_bits_do_not_depend_on_threads_nor_on_what_else_is_captured(model, tokens, tmp_path, set_threads):
    found = []
    for threads, spec in ((1, both()), (2, both().capture(RESID).capture(LOGITS, reduce="topk:3"))):
        set_threads(threads)
        found.append(reduced(model, tokens, tmp_path / str(threads), spec)[1].load())
    alone, beside = found
    for name in ("logits__logsumexp", f"logits__topk_{K}", f"logits__topk_{K}_ids"):
        np.testing.assert_array_equal(beside[name], alone[name])
    assert beside["logits__topk_3"].dims == ("token", "rank_3")
    np.testing.assert_array_equal(beside["logits__topk_3"], alone[f"logits__topk_{K}"][:, :3])
    assert beside["rank_3"].values.tolist() == [0, 1, 2]


def test_logits_of_a_selection_are_those_of_its_tokens(model, tokens, tmp_path):
    _, every = reduced(model, tokens, tmp_path / "a")
    _, found = reduced(model, tokens, tmp_path / "b", both(positions="last"))
    last = np.cumsum(tokens.row_size) - 1
    for end in ("logsumexp", f"topk_{K}", f"topk_{K}_ids"):
        np.testing.assert_array_equal(found[f"logits__last__{end}"], every[f"logits__{end}"][last])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_they_are_float32_beside_activations_of_half_the_bytes(model, tokens, tmp_path, dtype):
    spec = both().capture(RESID)
    store, found = reduced(model, tokens, tmp_path / "a", spec, storage_dtype=dtype)
    _, expected = reduced(model, tokens, tmp_path / "b")
    (entry,) = store.entries()
    assert (entry.dtype, entry.spec("logits__logsumexp").dtype) == (dtype, "float32")
    for name in expected.data_vars:
        np.testing.assert_array_equal(found[name], expected[name])
    assert store.verify() == []


def test_what_is_missing_is_added_to_a_run_and_keys_stay(model, tokens, tmp_path):
    store, _ = reduced(model, tokens, tmp_path, HookSpec().capture(RESID))
    (entry,) = store.entries()
    before = {cell: entry.record(*cell) for cell in entry.published()}
    reduced(model, tokens, tmp_path)
    (entry,) = store.entries()
    assert {cell: entry.record(*cell) for cell in before} == before
    assert {name for name, _ in entry.published()} == {
        *("resid_post", "logits__logsumexp", f"logits__topk_{K}", f"logits__topk_{K}_ids")
    }
    node = CaptureNode(model, tokens, both(), segment_tokens=16)
    assert node.status(store).is_cached
    assert node.estimate(store).bytes_written == 0


def test_the_estimate_is_what_is_written(model, tokens, tmp_path):
    node = CaptureNode(model, tokens, both(), segment_tokens=16)
    store = open_store(tmp_path, durability="process")
    assert node.estimate(store).bytes_written == tokens.n_tokens * (4 + 8 * K)


def test_plain_readers_another_process_and_a_copy_see_the_same(model, tokens, tmp_path):
    store, found = reduced(model, tokens, tmp_path / "a")
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    for name in found.data_vars:
        np.testing.assert_array_equal(plain[name].values, found[name].values)
    other = open_store(tmp_path / "b", durability="process")
    reduced(model, tokens, tmp_path / "b", HookSpec().capture(RESID))
    store.copy_to(other)
    program = (
        "import sys, xarray as xr\n"
        f"ds = xr.open_dataset({str(other.path / entry.path)!r}, engine='mizarr')\n"
        f"logprobs = ds['logits__topk_{K}'] - ds['logits__logsumexp']\n"
        "print(float(logprobs.astype('f8').sum()), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split()[1] == "False"
    expected = float((found[f"logits__topk_{K}"] - found["logits__logsumexp"]).astype("f8").sum())
    assert float(told.split()[0]) == pytest.approx(expected, rel=1e-12)
    assert other.verify() == []


def test_some_prompts_of_a_larger_run_are_found_in_it(model, tokens, tmp_path):
    store, every = reduced(model, tokens, tmp_path)
    some = tokens.select([3, 1])
    assert CaptureNode(model, some, both(), segment_tokens=16).status(store).is_cached
    _, found = reduced(model, some, tmp_path)
    at = tokens.tokens_of([3, 1])
    np.testing.assert_array_equal(found[f"logits__topk_{K}_ids"], every[f"logits__topk_{K}_ids"][at])


KILLED = """
import os, signal, sys
import numpy as np
from mizarr import HookSpec, Model, capture, open_store
from mizarr.stages.forward.capture import vocabulary
from mizarr.store.runs.entries import Entry
from mizarr.store.runs.packed import PackedTokens

model, folder, sizes, ids = sys.argv[1], sys.argv[2], eval(sys.argv[3]), eval(sys.argv[4])
write, count = Entry.write_segment, [0]

def dying(self, *arguments, **options):
    count[0] += 1
    if count[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments, **options)

Entry.write_segment, vocabulary._BLOCK = dying, 96
spec = HookSpec().capture("hook_logits", reduce="topk:7").capture("hook_logits", reduce="logsumexp")
tokens = PackedTokens(np.array(ids, np.int32), np.array(sizes))
store = open_store(folder, durability="process")
capture(model, tokens, spec, store=store, segment_tokens=16, batch_tokens=32, progress=False)
"""


def test_a_killed_harvest_goes_on_to_the_same_bits(model, tokens, tmp_path):
    _, expected = reduced(model, tokens, tmp_path / "undisturbed")
    folder, arguments = tmp_path / "killed", [str(tokens.row_size.tolist()), str(tokens.ids.tolist())]
    command = [sys.executable, "-c", KILLED, model.name, str(folder), *arguments]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (entry,) = open_store(folder).entries()
    assert 0 < len(entry.missing([("logits__logsumexp", None)])) < len(entry.segments)
    _, found = reduced(model, tokens, folder)
    xr.testing.assert_identical(found.drop_attrs().load(), expected.drop_attrs().load())


def test_what_cannot_be_kept_is_refused_in_one_line(model, tokens, tmp_path, capsys):
    store = open_store(tmp_path / "s")
    for spec, said in [
        (HookSpec().capture(RESID, reduce="topk:3"), "'topk:3': expected hook point 'hook_logits'"),
        (HookSpec().capture(LOGITS, reduce="norm"), "expected reduce='topk:10'"),
        (HookSpec().capture(LOGITS), "'hook_logits' is too large to store in full"),
        (HookSpec().capture(f"grad:{LOGITS}", reduce="logsumexp"), "hook point that later operations read"),
    ]:
        with pytest.raises(HookPointNotFound, match=said):
            capture(model, tokens, spec, store=store, **OPTIONS)
    with pytest.raises(ConfigError, match=f"at most the {VOCAB} logits"):
        reduced(model, tokens, tmp_path / "s", HookSpec().capture(LOGITS, reduce=f"topk:{VOCAB + 1}"))
    with pytest.raises(HookPointNotFound, match=r"cache\.logits"):
        model.forward([1, 2], HookSpec().capture(LOGITS, reduce="logsumexp"))
    for how in ("topk:0", "topk", "topk:-1", "topk:x"):
        with pytest.raises(HookPointNotFound, match="topk:10"):
            HookSpec().capture(LOGITS, reduce=how)
    capsys.readouterr()
    assert run(["capture", "specimen", "a b", "--text", "--hooks", LOGITS, "--reduce", "top"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert list(store.entries()) == []


def test_the_command_line_keeps_the_largest(tmp_path, capsys):
    store = tmp_path / "store"
    asked = ["capture", "specimen", "the cat sat", "--text", "--hooks", LOGITS, "--store", str(store)]
    assert run([*asked, "--reduce", "topk:10", "--dry-run"]) == 0
    assert not store.exists()
    assert run([*asked, "--reduce", "topk:10"]) == 0
    capsys.readouterr()
    assert run(["ls", "--store", str(store)]) == 0
    told = capsys.readouterr().out
    assert "logits__topk_10" in told
    assert "logits__topk_10_ids" in told
