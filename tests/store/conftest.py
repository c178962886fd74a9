"""Tests are no package: folders with what they share, contracts and a writer to kill, have to be named."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "contracts")]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The entry that crash_writer.py harvests, by one process that nobody kills; only read."""
    from crash_writer import harvest, open_entry

    root = tmp_path_factory.mktemp("undisturbed")
    harvest(root, "undisturbed")
    return open_entry(root)
