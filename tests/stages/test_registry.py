"""The table of stages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import mizarr.stages
from mizarr.pipeline import Stage
from mizarr.stages import STAGES, find
from mizarr.store.errors import StageError


@pytest.mark.parametrize("name", STAGES)
def test_every_entry_is_a_stage_of_that_name_with_a_version(name: str):
    stage = find(name)
    assert stage.name == name
    assert isinstance(stage.version, int)


def test_every_stage_of_the_room_is_in_the_table():
    folder = Path(mizarr.stages.__file__).parent
    declared = set()
    for path in folder.rglob("[a-z]*.py"):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"mizarr.stages.{name}")
        declared |= {
            form
            for value in vars(module).values()
            if isinstance(value, Stage) and value.function.__module__ == module.__name__
            for form in value.forms
        }
    assert declared == set(STAGES)


def test_an_unknown_stage_names_the_nearest():
    with pytest.raises(StageError, match="did you mean 'logit_lens'"):
        find("logit_lenses")
