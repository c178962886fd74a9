"""Expected seconds of passes: what is counted, and when an earlier run is believed."""

from __future__ import annotations

import math

import pytest

from mizarr.stages.forward.models.reference import ModelRef
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.runs import duration
from mizarr.stages.forward.runs.duration import PassWork, expected_duration, load_seconds, pass_seconds

RATE = 1e11


@pytest.fixture(autouse=True)
def known_rate(monkeypatch):
    """Operations per second of an imagined machine."""
    monkeypatch.setattr(duration, "product_rate", lambda: RATE)


def test_products_are_those_of_the_weights_that_a_token_meets():
    source = ModelSource(ModelRef("specimen", device="cpu"))
    config = source.config
    sizes = {name: shape for name, shape in config.tensors.shapes.items() if len(shape) > 1}
    inside = sum(a * b for name, (a, b) in sizes.items() if ".layers." in name)
    moved = 4 * duration.ACTIVATION_PASSES * config.hidden_size * config.num_layers
    each = 2 * inside / RATE + moved / duration.BANDWIDTH
    assert pass_seconds(source, PassWork(1000 * config.num_layers)) == pytest.approx(1000 * each)
    assert pass_seconds(source, PassWork(500 * config.num_layers)) == pytest.approx(500 * each)
    logits = 2 * config.vocab_size * config.hidden_size / RATE
    assert pass_seconds(source, PassWork(0, 7)) == pytest.approx(7 * logits)
    assert pass_seconds(source, PassWork(0, 0, duration.WRITE_RATE)) == pytest.approx(1)


def test_experts_that_a_token_does_not_choose_are_not_counted():
    source = ModelSource(ModelRef("specimen-experts", device="cpu"))
    config = source.config
    everything = sum(
        math.prod(shape)
        for name, shape in config.tensors.shapes.items()
        if len(shape) > 1 and name not in {stored.name for stored in config.tensors.outside.values()}
    )
    of_experts = sum(
        math.prod(shape)
        for name, shape in config.tensors.shapes.items()
        if ".experts." in name and len(shape) > 1
    )
    experts = config.blocks[0].channel_mixer
    expected = everything - of_experts * (1 - experts.chosen / experts.count)
    assert config.weight_counts.in_layers == pytest.approx(expected)
    assert 0 < of_experts < everything


def test_an_earlier_run_of_the_size_is_believed_and_a_small_one_bounds():
    source = ModelSource(ModelRef("specimen", device="cpu"))
    work = PassWork(6 * 1e6)
    counted = pass_seconds(source, work)
    earlier = {"seconds": 5.0, "setup_seconds": 3.0}
    assert expected_duration(source, work, earlier, 4).seconds == pytest.approx(3 + 2 * 4)
    assert expected_duration(source, work, earlier, 1e6).seconds == pytest.approx(3 + counted, abs=1e-3)
    quick = {"seconds": 3.0001, "setup_seconds": 3.0}  # faster than is counted
    assert expected_duration(source, work, quick, 100).seconds == pytest.approx(3.01)
    first = expected_duration(source, work, None, 1.0)
    assert first.seconds == pytest.approx(load_seconds(source) + counted, abs=1e-3)
    assert first.setup_seconds == load_seconds(source) > 0


def test_on_a_gpu_only_earlier_runs_are_believed():
    source = ModelSource(ModelRef("specimen", device="cuda"))
    assert expected_duration(source, PassWork(100), None, 1.0).seconds is None
    assert expected_duration(source, PassWork(100), {"seconds": 1.0}, 100).seconds == pytest.approx(100)
