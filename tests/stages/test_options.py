"""Options declared once: what functions and commands are made of."""

from __future__ import annotations

import inspect

import pytest

import mizarr
from mizarr.stages.forward.capture.options import CaptureOptions
from mizarr.stages.forward.models.reference import ModelRef
from mizarr.stages.options import RunOptions, options_of, split_options
from mizarr.store.errors import ConfigError
from mizarr.workflows.cli.runs import capture

CAPTURE = (ModelRef, CaptureOptions, RunOptions)


def names(*kinds: type) -> list[str]:
    return [item.name for kind in kinds for item in options_of(kind)]


def test_a_function_shows_the_options_it_takes():
    parameters = list(inspect.signature(mizarr.capture).parameters)
    assert parameters == ["model", "prompts", "hooks", "store", *names(*CAPTURE)]
    for item in (item for kind in CAPTURE for item in options_of(kind)):
        assert f"{item.name}: {item.metadata['help'][:20]}" in (mizarr.capture.__doc__ or "")


def test_a_command_has_the_options_of_the_function_but_for_its_bar():
    held = {parameter.name for parameter in capture.params}
    assert set(names(*CAPTURE)) - held == {"progress"}


def test_options_go_to_the_dataclass_that_declares_them():
    loading, storing, running = split_options("f", {"dtype": "float16", "workers": 2}, *CAPTURE)
    assert (loading, storing, running) == ({"dtype": "float16"}, {}, {"workers": 2})


def test_no_two_dataclasses_of_one_function_share_a_name():
    assert len(set(names(*CAPTURE))) == len(names(*CAPTURE))


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        TypeError, match=r"f\(\) got an unexpected keyword argument 'dtyp'; nearest is 'dtype'"
    ):
        split_options("f", {"dtyp": 1}, *CAPTURE)


def test_a_reference_is_changed_by_options_and_checks_them():
    reference = ModelRef.of("specimen", dtype="float16")
    assert ModelRef.of(reference, device="cpu") == ModelRef("specimen", dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="expected trust_layout=True or trust_layout=False, found 'x'"):
        ModelRef("specimen", trust_layout="x")  # type: ignore[arg-type]
