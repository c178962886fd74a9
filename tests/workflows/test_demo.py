"""The demo, on a small model in place of the specimen."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import mizarr
from mizarr.workflows import build, demo, subject
from tests.torch_free import blocking

FACTS = [
    {"prompt": "it was the age of", "target": "wisdom"},
    {"prompt": "we had everything before", "target": "us"},
]

SETTINGS = dict(demo.DEMO)
"""As shipped; the tests below take others for a model that is smaller."""

AGAIN = (
    blocking("torch", "transformers", "matplotlib", "zarr")
    + """
import pathlib
import mizarr
from mizarr.workflows import demo, subject
subject.SPECIMEN_FOLDER = pathlib.Path(sys.argv[1])
demo.DEMO = json.loads(sys.argv[2])
done = demo.run(mizarr.open_store(sys.argv[3]), pathlib.Path(sys.argv[4]), model=sys.argv[5], quiet=True)
assert done.ran == [], done.ran
"""
)


@pytest.fixture
def shipped(prose_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prose and facts where the demo looks for them, and a demo small enough for a test."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "prose.txt").write_text(prose_file.read_text())
    (folder / "facts.json").write_text(json.dumps(FACTS))
    monkeypatch.setattr(subject, "SPECIMEN_FOLDER", folder)
    monkeypatch.setattr(
        demo,
        "DEMO",
        {"logit_lens": {}, "character_count_helix": {"widths": [20, 27], "components": 3, "min_tokens": 1}},
    )
    return folder


def test_the_demo_is_the_defaults_of_its_workflows():
    for name, settings in SETTINGS.items():
        assert build(name, **settings).settings == build(name).settings


def test_a_second_run_says_all_was_cached_and_needs_neither_torch_zarr_nor_matplotlib(
    shipped, tiny_model, tmp_path
):
    store, folder = mizarr.open_store(tmp_path / "store"), tmp_path / "results"
    out, talk = (Console(record=True, width=100, file=StringIO()) for _ in range(2))
    done = demo.run(store, folder, console=out, talk=talk, model=str(tiny_model), quiet=True)
    assert set(done.ran) == {
        "answer_ranks",
        "capture",
        "readout",
        "logit_lens",
        "count_sums",
        "count_geometry",
        "decodability",
    }
    assert len(done.figures) == 4
    assert all(path.exists() for path in done.figures)
    tables, said = out.export_text(), talk.export_text()
    assert "of 496 general facts" in tables
    assert "shuffled" in tables
    assert "computed capture" in said
    json.dumps(done.to_json(), allow_nan=False)

    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    given = (shipped, json.dumps(demo.DEMO), tmp_path / "store", folder, tiny_model)
    again = subprocess.run(
        [sys.executable, "-c", AGAIN, *map(str, given)], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "of 496 general facts" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
