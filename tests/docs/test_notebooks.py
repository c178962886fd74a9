"""Notebooks of the tutorial: in step with its pages, well formed, and they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.notebooks import FOLDER, TUTORIAL, notebook, path_of
from tests.docs.pages import blocks
from tests.docs.real_pages import link_models, page_param

pages = pytest.mark.parametrize("page", TUTORIAL, ids=lambda path: path.stem)


def cells(page: Path, kind: str) -> list[str]:
    held = json.loads(path_of(page).read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in held if cell["cell_type"] == kind]


@pages
def test_a_notebook_is_made_of_its_page(page):
    assert path_of(page).read_text("utf-8") == notebook(page), "make notebooks"


@pages
def test_a_notebook_has_the_code_of_its_page_and_no_outputs(page):
    assert cells(page, "code") == [block.code for block in blocks(page) if block.language == "python"]
    held = json.loads(path_of(page).read_text("utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in held)
    assert len({cell["id"] for cell in held}) == len(held)
    printed = [block.expected for block in blocks(page) if block.expected]
    assert not [text for text in printed if f"```text\n{text}" in "\n".join(cells(page, "markdown"))]


def test_there_is_no_notebook_without_a_page():
    assert sorted(FOLDER.iterdir()) == [path_of(page) for page in TUTORIAL]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page_param(page, page.stem) for page in TUTORIAL])
def test_a_notebook_runs_from_start_to_end_in_a_process_of_its_own(page, tmp_path):
    link_models(page, tmp_path)
    code = "\n".join(cells(page, "code"))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
