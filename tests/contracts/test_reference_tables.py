"""README and the tables of docs/reference: what they list is all there is; links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mizarr

ROOT = Path(mizarr.__file__).parent
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = re.compile(r"reference/(api|cards)/|reference/settings\.md|changelog\.md")


def test_every_hook_point_is_in_the_reference():
    from mizarr.stages.forward.architectures.points import KINDS

    wanted = [kind.path.replace("{}", "{i}") for kind in KINDS]
    page = (REFERENCE / "hook-points.md").read_text()
    assert not [name for name in wanted if f"| `{name}` |" not in page]


def test_every_workflow_is_in_the_reference_and_no_other():
    from mizarr.workflows import WORKFLOWS

    rows = [line for line in (REFERENCE / "workflows.md").read_text().splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(told) == sorted(WORKFLOWS)


def test_python_in_the_readme_runs(tmp_path):
    """All blocks in one fresh process, as a reader would paste them one after another."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    command = [sys.executable, "-c", "\n".join(blocks)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    """Also where no site is built. What `make docs` makes is checked there."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)", without_code)
    local = [link for link in links if "://" not in link]
    paths = [(page.parent / link).resolve() for link in local]
    missing = [path for path in paths if not path.exists() and not GENERATED.search(path.as_posix())]
    assert not missing
