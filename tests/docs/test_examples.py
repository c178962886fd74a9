"""docs/examples: a short script for each program of candle-mi, run, and held to what it says it prints."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

import mizarr
from tests.docs.pages import Block, difference, run_block

ROOT = Path(mizarr.__file__).parent
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
SLOW = {"character_count_helix"}
"""Over all of the shipped prose: half a minute."""
BY_COMMAND = {
    "fast_download": "needs the hub",
    "counterfact_patching": "mizarr compute",
    "factual_routing": "mizarr compute",
    "figure13_planning_poems": "mizarr compute planning_in_poems",
    "reproduce_pipeline": "mizarr replicate",
    "attention_routing": "mizarr compute",
    "correction_test": "mizarr compute",
    "clt_vs_plt": "mizarr compute",
    "stoicheia_analysis": "mizarr compute",
    "stoicheia_sweep": "mizarr compute",
    "logit_attribution": "the third chapter of the tutorial",
    "layer_scan_universal": "mizarr compute layer_scan",
}
"""Programs without a script, and where they are: each a workflow, which docs/seed.md tells in full."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in EXAMPLES
    ],
)
def test_an_example_prints_what_it_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = path.read_text("utf-8")
    about = ast.get_docstring(ast.parse(code))
    assert about and "Prints:" in about
    expected = textwrap.dedent(about.split("Prints:\n\n")[1])
    said = run_block(Block(path.name, 1, "python", code, expected, ""), {"__name__": "__main__"})
    assert not (differs := difference(expected, said)), f"{differs}\n--- all of it:\n{said}"


def test_every_program_of_the_seed_has_an_example_or_a_place():
    programs = re.findall(r"^## `(\w+)`", (ROOT / "docs" / "seed.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(programs) == sorted({*(path.stem for path in EXAMPLES), *BY_COMMAND})
