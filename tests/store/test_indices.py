"""Positions, layers, heads and the like are read exactly as they are written, or refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import Add, AddAtPositions, HookPoint, HookSpec, Scale, Zero
from mizarr.stages.attention.head_detection import head_pairs
from mizarr.stages.causal.effects import layers_of
from mizarr.stages.causal.grids.patching_grid import in_range
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.features.layers.layout import FeatureId
from mizarr.stages.forward.hooks.edge_interventions import Knockout, SetValue, Steer
from mizarr.stages.forward.hooks.edges import KnockoutSpec, SteeringSpec
from mizarr.stages.forward.hooks.recurrent import RecurrentPass
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec
from mizarr.store.arrays import as_index, as_indices
from mizarr.store.errors import MizarrError
from mizarr.store.reading.selection import in_prompt
from mizarr.store.runs.selections import as_selection

ONE: dict[str, Callable[[Any], Any]] = {
    "edge": lambda one: KnockoutSpec().edge(one, 0),
    "key of an edge": lambda one: SteeringSpec.scale(2.0).edge(None, one),
    "Knockout edges": lambda one: Knockout([(one, 0)]),
    "Steer edges": lambda one: Steer([(None, one)], 2.0),
    "SetValue edges": lambda one: SetValue([(one, 0)], 0.5),
    "AddAtPositions": lambda one: AddAtPositions([(one, [1.0])]),
    "AddAtPositions of a dict": lambda one: AddAtPositions(
        {one: [1.0]} if not isinstance(one, slice) else [(one, [1.0])]
    ),
    "feedback": lambda one: RecurrentPass(0, 1, feedback=[(one, [1.0], 1.0)]),
    "loop": lambda one: RecurrentPass(0, one),
    "layer of a spec": lambda one: KnockoutSpec().layer(one),
    "last of layers": lambda one: KnockoutSpec().layer_range(0, one),
    "position of a write": lambda one: StateKnockoutSpec().position(one),
    "at": lambda one: HookSpec().gradient_of(LogitDifference(1, 2), at=one),
    "layer of a point": lambda one: HookPoint("resid_post", one),
    "feature": lambda one: FeatureId(one, 0),
    "index of a feature": lambda one: FeatureId(0, one),
    "head of a pair": lambda one: head_pairs([(0, one)]),
    "index": lambda one: as_index(one, "something"),
}
"""Doors that take one number."""
MANY: dict[str, Callable[[Any], Any]] = {
    **{
        f"{kind.__name__} {name}": (
            lambda many, kind=kind, given=given, name=name: kind(*given, **{name: many})
        )
        for kind, given in ((Zero, ()), (Scale, (2.0,)), (Add, ([1.0],)))
        for name in ("positions", "heads", "neurons", "experts")
    },
    "Knockout heads": lambda many: Knockout([(1, 0)], heads=many),
    "Steer heads": lambda many: Steer([(1, 0)], 2.0, many),
    "layers of a spec": lambda many: KnockoutSpec().layers(many),
    "heads of a spec": lambda many: StateSteeringSpec.scale(2.0).heads(many),
    "keys of edges": lambda many: KnockoutSpec().from_to_positions(1, many),
    "positions of writes": lambda many: StateKnockoutSpec().positions(many),
    "logits": mizarr.logits,
    "tokens of logits": lambda many: mizarr.logits(-1, many),
    "Logits": lambda many: Logits(positions=many),
    "layers of experiments": lambda many: layers_of(many, 8),
    "a grid": lambda many: in_range("grid", "head", many, 8),
    "heads of layers": lambda many: head_pairs({0: many}),
    "indices": lambda many: as_indices(many, "something"),
}
"""Doors that take several."""
SELECTIONS: dict[str, Callable[[Any], Any]] = {
    "positions of a store": as_selection,
    "positions of a prompt": lambda many: in_prompt(many, 8),
}
WRONG: dict[str, Any] = {
    "float": 1.7,
    "whole float": 1.0,
    "numpy float": np.float32(1.5),
    "true": True,
    "numpy true": np.True_,
    "tensor of bool": torch.tensor(True),
    "tensor of float": torch.tensor(1.0),
    "text": "1",
    "bytes": b"1",
    "slice": slice(1, 3),
    "dict": {1: 2},
    "nan": float("nan"),
    "array": np.array([[1, 2]]),
}


def refused(door: Callable[[], Any]) -> str:
    """The one line in which a door refuses."""
    with pytest.raises(MizarrError) as error:
        door()
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    assert "expected" in message
    return message


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("door", ONE)
def test_one_that_is_no_whole_number_is_refused(door, wrong):
    if door == "AddAtPositions of a dict" and WRONG[wrong].__hash__ is None:
        return
    refused(lambda: ONE[door](WRONG[wrong]))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("door", MANY)
def test_some_that_are_no_whole_numbers_are_refused(door, wrong):
    refused(lambda: MANY[door](WRONG[wrong]))
    if wrong != "array":
        refused(lambda: MANY[door]((0, WRONG[wrong])))
        refused(lambda: MANY[door]([WRONG[wrong], 0]))


@pytest.mark.parametrize("mask", [[True, False], np.array([True, False]), torch.tensor([True, False])])
@pytest.mark.parametrize("door", MANY)
def test_a_mask_is_refused_and_the_remedy_named(door, mask):
    assert "np.flatnonzero(mask)" in refused(lambda: MANY[door](mask))


@pytest.mark.parametrize("floats", [(0.5, 1.0), np.array([0.0, 1.0]), torch.tensor([0.0, 1.0]), [0, 1.5]])
@pytest.mark.parametrize("door", MANY | SELECTIONS)
def test_floats_are_refused_everywhere(door, floats):
    refused(lambda: (MANY | SELECTIONS)[door](floats))


def test_positions_of_a_store_are_no_mixture():
    refused(lambda: as_selection([True, 2]))


RIGHT = [
    (0, 2),
    [0, 2],
    range(0, 4, 2),
    np.array([0, 2]),
    np.array([0, 2], np.uint8),
    torch.tensor([0, 2]),
    (np.int64(0), torch.tensor(2)),
    {2, 0},
    (index for index in (0, 2)),
]


@pytest.mark.parametrize("values", RIGHT[:-1], ids=lambda values: type(values).__name__)
@pytest.mark.parametrize("door", MANY)
def test_whole_numbers_of_every_library_are_the_same_numbers(door, values):
    found, expected = MANY[door](values), MANY[door]((0, 2))
    assert repr(found) == repr(expected)
    if hasattr(found, "canonical"):
        assert found.canonical() == expected.canonical()


def test_what_is_given_once_is_read_once():
    assert as_indices(RIGHT[-1], "something") == (0, 2)
    for one in (3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        assert as_index(one, "something") == 3
        assert as_indices(one, "something") == (3,)
        assert type(as_index(one, "something")) is int
        assert HookPoint("resid_post", one) == HookPoint.resid_post(3)
        assert Zero(positions=one) == Zero(positions=(3,))


def test_the_remedy_of_a_slice_is_a_range():
    assert "write range(1, 3)" in refused(lambda: Zero(positions=slice(1, 3)))
    assert "write range(0, 8, 2)" in refused(lambda: Zero(positions=slice(None, 8, 2)))
    assert "write a range, or a list" in refused(lambda: Zero(positions=slice(1, None)))
    assert Zero(positions=range(1, 3)).positions == (1, 2)
