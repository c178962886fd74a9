"""Workflows by name, and their settings as the command line or JSON gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from mizarr.store.errors import ConfigError
from mizarr.workflows import build
from mizarr.workflows.settings import Count, Share, read_settings, setting


@dataclass(frozen=True)
class Settings:
    widths: tuple[int, ...] = setting((20, 30), "line widths")
    scale: float = setting(1.0, "a number")
    layer: int | None = setting(None, "a layer")
    centre: bool = setting(True, "a switch")
    text: str = setting("", "a file")
    rank: Count | None = setting(None, "at least 1")
    part: Share = setting(0.5, "from 0 to 1")
    kind: Literal["mean", "zero"] = setting("mean", "one of two")
    place: int | tuple[int | str, ...] = setting(0, "one, or several")


def read(**given: object) -> Settings:
    return read_settings(Settings, "demo", given)


def test_defaults_hold_where_nothing_is_given():
    assert read() == Settings()


def test_json_values_are_taken_as_the_fields_say():
    found = read(widths=[1, 2], scale=3, layer=4, centre=False, text="a")
    assert found == Settings((1, 2), 3.0, 4, False, "a")
    assert isinstance(found.scale, float)
    assert read(widths=7).widths == (7,)
    assert read(layer=None).layer is None
    assert read(rank=2, part=1, kind="zero").part == 1.0
    assert read(place=["a", 3]).place == ("a", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("widths", ["a"]),
        ("widths", "20,30"),
        ("scale", "1"),
        ("layer", 1.5),
        ("layer", True),
        ("centre", 1),
        ("text", 3),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object):
    with pytest.raises(ConfigError, match=f"expected {name} to be"):
        read(**{name: value})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rank": 0}, "expected rank to be int of at least 1 | None, found 0 (int)"),
        ({"part": 1.5}, "expected part to be float of at least 0 and at most 1, found 1.5 (float)"),
        ({"kind": "zer"}, "expected kind to be mean or zero, found 'zer' (str); did you mean 'zero'?"),
        ({"layer": 2.0}, "expected layer to be int | None, found 2.0 (float)"),
    ],
)
def test_a_value_out_of_bounds_is_told_what_was_expected_and_the_nearest(given, complaint):
    with pytest.raises(ConfigError) as told:
        read(**given)
    assert str(told.value) == complaint


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'widths'"):
        read(width=3)


def test_an_unknown_workflow_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'logit_lens'"):
        build("logitlens")


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("logit_lens", {"top_k": 0}, "top_k"),
        ("logit_lens", {"prompts": ["a", "b", "c"], "answers": ["x", "y"]}, "one answer, or one per prompt"),
        ("character_count_helix", {"widths": [1]}, "line widths"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(name, given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build(name, **given)
