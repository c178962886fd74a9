"""Scores of a trained probe, stored in place of states: those of the states, however the capture is cut."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr import HookSpec, capture, open_store
from mizarr.stages.forward.architectures.points import as_point
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.monitors.trained import TrainedProbe
from mizarr.store.errors import HookPointNotFound, StageError

from ..random_models import save_random_model

RESID = "blocks.1.hook_resid_post"
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}
POOLINGS = ("token", "last", "mean", "max")


@pytest.fixture(scope="module")
def states(model, tokens, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("states"), durability="process")
    return capture(model, tokens, RESID, store=store, **OPTIONS)["resid_post"].load()


def probe_of(subject, pooling, **fields):
    rng = np.random.default_rng(POOLINGS.index(pooling))
    weight = rng.normal(size=subject.config.hidden_size)
    return TrainedProbe(
        **{"name": "mine", "point": as_point(RESID), "weight": weight, "bias": 0.5} | fields, pooling=pooling
    )


def scored(model, tokens, folder, probe, **options):
    store = open_store(folder, durability="process")
    found = capture(model, tokens, HookSpec().capture(RESID, reduce=probe), store=store, **OPTIONS | options)
    (name,) = found.data_vars
    assert store.verify() == []
    return found[name].load()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_are_those_of_the_stored_states(model, tokens, states, tmp_path, pooling):
    probe = probe_of(model, pooling)
    rows = states.sel(layer=1).values.astype(float)
    pool = {
        "last": lambda part: part[-1],
        "mean": lambda part: part.mean(0),
        "max": lambda part: part.max(0),
    }
    if pooling != "token":
        ends = np.cumsum(tokens.row_size)
        rows = np.stack(
            [pool[pooling](rows[end - n : end]) for end, n in zip(ends, tokens.row_size, strict=True)]
        )
    found = scored(model, tokens, tmp_path, probe)
    assert found.dims == ("layer", "token" if pooling == "token" else "prompt_id")
    np.testing.assert_allclose(found.values[0], rows @ probe.weight + 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_bits_do_not_depend_on_batches_and_segments(model, tokens, tmp_path, another_way, pooling):
    probe = probe_of(model, pooling)
    expected = scored(model, tokens, tmp_path / "a", probe)
    found = scored(model, tokens, tmp_path / "b", probe, **another_way)
    xr.testing.assert_identical(found.drop_attrs(), expected.drop_attrs())


def test_two_probes_of_one_point_are_two_arrays_of_one_run(model, tokens, tmp_path):
    first, second = probe_of(model, "mean"), probe_of(model, "max")
    store = open_store(tmp_path, durability="process")
    spec = HookSpec().capture(RESID, reduce=first).capture(RESID, reduce=second)
    assert len(capture(model, tokens, spec, store=store, **OPTIONS).data_vars) == 2
    assert len(list(store.entries())) == 1
    renamed = probe_of(model, "mean", name="other")
    node = CaptureNode(model, tokens, HookSpec().capture(RESID, reduce=renamed), segment_tokens=16)
    assert node.status(store).is_cached
    moved = probe_of(model, "mean", bias=0.25)
    node = CaptureNode(model, tokens, HookSpec().capture(RESID, reduce=moved), segment_tokens=16)
    assert not node.status(store).is_cached


def test_a_probe_scores_the_model_and_the_point_it_was_trained_on(model, tokens, tmp_path):
    own = probe_of(model, "mean", model=CaptureNode(model, tokens, RESID).source.identity.digest)
    assert CaptureNode(model, tokens, HookSpec().capture(RESID, reduce=own))
    save_random_model(tmp_path, "llama", 4)
    with pytest.raises(StageError, match=r"states of width 64, on which it was trained, found width \d+"):
        CaptureNode(str(tmp_path), tokens, HookSpec().capture(RESID, reduce=own))
    other = probe_of(model, "mean", model="sha256:" + "0" * 64)
    with pytest.raises(StageError, match="expected the model of its training states") as caught:
        CaptureNode(model, tokens, HookSpec().capture(RESID, reduce=other))
    assert "\n" not in str(caught.value)
    narrow = probe_of(model, "mean", weight=own.weight[:-1])
    with pytest.raises(StageError, match=f"width {len(own.weight) - 1}, on which it was trained"):
        CaptureNode(model, tokens, HookSpec().capture(RESID, reduce=narrow))
    with pytest.raises(HookPointNotFound, match="expected the hook point of this probe"):
        CaptureNode(model, tokens, HookSpec().capture("blocks.*.hook_resid_post", reduce=own))
    with pytest.raises(HookPointNotFound, match="all tokens of a prompt"):
        CaptureNode(model, tokens, HookSpec().capture(RESID, positions="last", reduce=own))
