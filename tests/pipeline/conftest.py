from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mizarr

# Workers and killed subprocesses import the same small stages by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """Where the stages of these tests note their calls."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"
