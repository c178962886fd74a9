"""Knockout and steering specs: which edges are meant, what is refused, which interventions they become."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mizarr.stages.forward.architectures.architecture import Architecture
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.hooks.edge_interventions import Knockout, SetValue, Steer
from mizarr.stages.forward.hooks.edges import KnockoutSpec, SteeringSpec
from mizarr.store.errors import InterventionError

LENGTH = 5
CONFIG = cast(Architecture, SimpleNamespace(num_layers=4, axis_sizes={"head": 3}, looks_ahead=False))
SPECS = [KnockoutSpec(), SteeringSpec.scale(2.0)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_chooses_all_layers_and_heads_until_told_otherwise(spec: Any):
    assert spec.applies_to_layer(99)
    assert spec.applies_to_head(99)
    chosen = spec.layer(1).head(2)
    assert [layer for layer in range(4) if chosen.applies_to_layer(layer)] == [1]
    assert [head for head in range(4) if chosen.applies_to_head(head)] == [2]
    assert spec.chosen_layers is None, "a builder gives a changed copy"


@pytest.mark.parametrize("spec", SPECS)
def test_layers_and_heads_are_replaced_while_edges_add_up(spec: Any):
    built = spec.layer(0).layer_range(1, 3).layers([2, 1, 2]).heads([0, 1]).head(2).edge(3, 0).edge(4, 1)
    assert built.chosen_layers == (1, 2)
    assert built.chosen_heads == (2,)
    assert built.edges == ((3, 0), (4, 1))
    assert spec.layer_range(1, 3).chosen_layers == (1, 2, 3), "both ends belong to a range"


def test_an_edge_named_in_several_ways_is_one_edge():
    spec = SteeringSpec.scale(3.0).edge(4, 0).edge(-1, 0).edge(4, 0)
    assert spec.resolved(LENGTH) == ((4, 0),)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (KnockoutSpec().from_position(2), {(2, 0), (2, 1), (2, 2)}),
        (KnockoutSpec().to_position(3), {(3, 3), (4, 3)}),
        (KnockoutSpec().to_position(3).keep_self(), {(4, 3)}),
        (KnockoutSpec().from_position(2).keep_self(), {(2, 0), (2, 1)}),
        (KnockoutSpec().from_to_positions(-1, [0, -2]), {(4, 0), (4, 3)}),
        (KnockoutSpec().edge(2, 2).keep_self(), {(2, 2)}),
    ],
)
def test_every_position_means_what_a_causal_model_has(spec: KnockoutSpec, expected: set[tuple[int, int]]):
    assert set(spec.resolved(LENGTH)) == expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KnockoutSpec().edge(None, None), "found None for both"),
        (lambda: KnockoutSpec().layer(-1), "counted from 0, found -1"),
        (lambda: KnockoutSpec().heads([]), "at least one head"),
        (lambda: KnockoutSpec().layer_range(3, 1), "found layers 3 to 1; swap"),
        (lambda: KnockoutSpec().hooks(CONFIG, LENGTH), "at least one edge"),
        (lambda: KnockoutSpec().edge(4, 0).layer(4).hooks(CONFIG, LENGTH), r"layers in 0\.\.3, found 4"),
        (lambda: KnockoutSpec().edge(4, 0).head(3).hooks(CONFIG, LENGTH), r"heads in 0\.\.2, found 3"),
        (lambda: KnockoutSpec().edge(5, 0).hooks(CONFIG, LENGTH), r"positions in 0\.\.4 .* found 5"),
        (lambda: KnockoutSpec().edge(-6, 0).hooks(CONFIG, LENGTH), r"\(-6, 0\): .*found -6"),
        (lambda: KnockoutSpec().edge(1, 2).hooks(CONFIG, LENGTH), "a causal model has no weight there"),
        (lambda: KnockoutSpec().from_position(3).hooks(CONFIG, LENGTH), "leaves query 3 no key"),
        (lambda: KnockoutSpec().to_position(0).hooks(CONFIG, LENGTH), r"leaves query 0 no key .*keep_self"),
        (lambda: SteeringSpec.knockout().edge(0, 0).hooks(CONFIG, LENGTH), "leaves query 0 no key"),
        (lambda: KnockoutSpec().from_position(0).keep_self().hooks(CONFIG, LENGTH), "position to itself"),
        (lambda: SteeringSpec.scale(-0.1), "factor >= 0, found -0.1"),
        (lambda: SteeringSpec.scale(float("nan")), "found nan"),
        (lambda: SteeringSpec.scale(float("inf")), "found inf"),
        (lambda: SteeringSpec.set_value(1.1), r"weight in \[0, 1\], found 1.1"),
        (
            lambda: SteeringSpec.set_value(0.6).from_to_positions(4, [0, 1]).hooks(CONFIG, LENGTH),
            "lower the value to 0.5",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(build: Any, message: str):
    with pytest.raises(InterventionError, match=message) as found:
        build()
    assert "\n" not in str(found.value)


def test_all_keys_of_a_late_query_may_be_cut_to_position_0_once_it_keeps_itself():
    spec = KnockoutSpec().to_position(0).keep_self()
    assert spec.resolved(LENGTH) == ((1, 0), (2, 0), (3, 0), (4, 0))
    spec.validate(4, 3, LENGTH)


@pytest.mark.parametrize(
    ("spec", "point", "change"),
    [
        (KnockoutSpec().edge(-1, 0), HookPoint.scores(2), Knockout([(4, 0)], heads=(1,))),
        (SteeringSpec.knockout().edge(4, 0), HookPoint.scores(2), Knockout([(4, 0)], heads=(1,))),
        (SteeringSpec.scale(3).edge(4, 0), HookPoint.pattern(2), Steer([(4, 0)], 3.0, (1,))),
        (SteeringSpec.set_value(0.25).edge(4, 0), HookPoint.pattern(2), SetValue([(4, 0)], 0.25, (1,))),
    ],
)
def test_a_spec_becomes_interventions_in_the_chosen_layers_and_heads(spec: Any, point: Any, change: Any):
    hooks = spec.layers([2, 3]).head(1).hooks(CONFIG, LENGTH)
    assert hooks.num_interventions == 2
    assert hooks.interventions_at(point) == [change]
    assert spec.hooks(CONFIG, LENGTH).num_interventions == 4, "all layers by default"


def test_only_fixed_queries_of_the_prompt_leave_generated_tokens_alone():
    spec = SteeringSpec.scale(2.0)
    assert spec.edge(3, 0).from_position(4).is_prompt_only(LENGTH)
    assert not spec.edge(5, 0).is_prompt_only(LENGTH)
    assert not spec.edge(3, 0).to_position(0).is_prompt_only(LENGTH)
    assert not spec.edge(-1, 0).is_prompt_only(LENGTH), "the last position moves as tokens are added"


def test_the_largest_positions_named_ignore_every_position():
    spec = SteeringSpec.scale(2.0).edge(3, 1).from_position(4).to_position(2)
    assert (spec.max_query, spec.max_key) == (4, 2)
    assert (SteeringSpec.scale(2.0).from_position(1).max_key, KnockoutSpec().max_query) == (None, None)


def test_a_knockout_is_a_kind_of_steering():
    knockout = KnockoutSpec().layer(1).head(2).to_position(1).keep_self()
    steering = SteeringSpec.from_knockout(knockout)
    assert steering.is_knockout
    assert not steering.is_steering
    assert SteeringSpec.scale(1.0).is_steering
    assert steering.hooks(CONFIG, LENGTH) == knockout.hooks(CONFIG, LENGTH)


def test_specs_are_values():
    assert KnockoutSpec().layer(1).edge(2, 0) == KnockoutSpec().edge(2, 0).layer(1)
    assert len({SteeringSpec.scale(2).edge(1, 0), SteeringSpec.scale(2.0).edge(1, 0)}) == 1


def test_specs_are_built_and_checked_without_torch():
    program = (
        "import sys, json\n"
        "sys.modules['torch'] = None\n"
        "from mizarr.stages.forward.hooks.edges import KnockoutSpec\n"
        "spec = KnockoutSpec().to_position(1).keep_self()\n"
        "spec.validate(2, 2, 4)\n"
        "print(json.dumps(spec.resolved(4)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[2, 1], [3, 1]]
