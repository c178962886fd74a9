"""Extras: as pyproject.toml has them, and asked for before work begins."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mizarr
from mizarr.stages.extras import EXTRAS, is_installed, require
from mizarr.store.errors import MissingExtra

PROJECT = tomllib.loads((Path(mizarr.__file__).parent / "pyproject.toml").read_text())["project"]
DEVELOPMENT = {"test", "docs"}
IMPORTED_AS = {"scikit-learn": "sklearn"}


def test_extras_are_those_of_the_package_and_take_what_they_install():
    offered = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(offered) - DEVELOPMENT
    for name, extra in EXTRAS.items():
        installed = [canonicalize_name(Requirement(line).name) for line in offered[name]]
        assert list(extra.modules) == [IMPORTED_AS.get(each, each) for each in installed]


def test_a_missing_one_is_named_with_its_command(monkeypatch):
    assert is_installed("probing")
    require("probing", "anything")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert not is_installed("probing")
    with pytest.raises(MissingExtra, match=r"^probe needs sklearn, .* pip install 'mizarr\[probing\]'$"):
        require("probing", "probe")
