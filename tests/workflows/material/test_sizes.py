"""Sizes of defaults: all for a small model, fewer for a large one, never fewer than a claim needs."""

from __future__ import annotations

import dataclasses

import pytest

from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.runs.duration import PassWork
from mizarr.workflows import build
from mizarr.workflows.material.sizes import (
    CHARACTERS_PER_TOKEN,
    OPERATIONS,
    affordable,
    affordable_characters,
)


@pytest.fixture(scope="module")
def config():
    return resolve("specimen").architecture()


def test_items_are_as_many_as_their_operations_allow():
    assert affordable(OPERATIONS / 20, 50) == 20
    assert affordable(OPERATIONS / 20, 12) == 12, "no more than there are"
    assert affordable(OPERATIONS / 3, 50) == 8 and affordable(OPERATIONS * 9, 50, least=2) == 2
    assert affordable(OPERATIONS * 9, 1, least=0) == 0


def test_operations_are_two_for_each_weight_and_token(config):
    counts = config.weight_counts
    work = PassWork(layer_positions=5 * config.num_layers, logit_rows=2)
    assert work.operations(config) == pytest.approx(2 * (5 * counts.in_layers + 2 * counts.head))


def test_a_text_is_cut_to_its_tokens_and_a_model_a_hundred_times_as_large_reads_a_hundredth(config):
    assert affordable_characters(config, 24_000, times=6) == 24_000
    whole = affordable_characters(config, 10**9)
    assert whole == pytest.approx(
        CHARACTERS_PER_TOKEN * OPERATIONS / PassWork(config.num_layers).operations(config), rel=1e-3
    )
    larger = dataclasses.replace(config, blocks=config.blocks * 100)
    assert affordable_characters(larger, 10**9) == pytest.approx(whole / 100, rel=0.01)


@pytest.mark.parametrize("model", ["specimen", "specimen-guided", "specimen-rwkv"])
def test_models_that_ship_read_all_of_the_default_prose(model):
    whole = build("character_count_helix", model=model, characters=24_000).tokens
    assert len(build("character_count_helix", model=model).tokens.ids) == len(whole.ids)
