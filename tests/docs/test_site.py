"""What the site is made of beside its pages: the reference, drawings, and one page without torch."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mizarr
from mizarr.stages import registry
from mizarr.workflows import WORKFLOWS
from tests.docs.pages import blocks, run_block
from tests.torch_free import blocking

ROOT = Path(mizarr.__file__).parent
DOCS = ROOT / "docs"
HAS_SPHINX = all(importlib.util.find_spec(name) for name in ("sphinx", "furo", "myst_parser"))


@cache
def loaded(name: str) -> Any:
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def api() -> dict[str, str]:
    return loaded("reference").api_pages()


def documented() -> set[str]:
    """Full names of functions and classes that have an entry."""
    found = set()
    for page in api().values():
        entries = re.findall(r"\{py:(?:function|class)\} (\w+).*\n:module: (\S+)", page)
        found |= {f"{module}.{name}" for name, module in entries}
    return found


def test_every_public_name_has_an_entry():
    values = {name: getattr(mizarr, name) for name in mizarr._HOME}
    homes = {name: f"{value.__module__}.{name}" for name, value in values.items()}
    assert not {name: home for name, home in homes.items() if home not in documented()}
    assert all(f"mizarr.{name} <" in api()["mizarr"] for name in homes)


def test_every_stage_and_experiment_has_an_entry():
    homes = {name: found.declaration().home for name, found in registry().items()}
    assert not {name: home for name, home in homes.items() if home not in documented()}


NAMED = {
    "logits": ["decompose_resid", "logit_attrs"],
    "geometry": ["pca"],
    "attention": ["detect_head"],
    "causal": ["ContrastiveVectors", "Null", "DonorPatching", "PatchTable"],
    "grids": ["block_every", "head_all_pos_every", "head_by_pos_every"],
    "graph": ["feature_intervention"],
}


@pytest.mark.parametrize("name", [name for names in NAMED.values() for name in names])
def test_what_works_is_named(name):
    assert any(entry.endswith(f".{name}") for entry in documented())


def test_every_workflow_has_its_settings_on_a_page():
    page = loaded("reference").settings_page()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(WORKFLOWS)
    assert "| `controls` | `50` | number of random causes" in page


def test_docstrings_become_markdown():
    made = loaded("reference")
    assert made.markdown("Points blocks.*.hook_z of all.") == "Points `blocks.*.hook_z` of all."
    assert made.markdown("Of `kv_head,\nssm_head` or a_b.") == "Of `kv_head,\nssm_head` or a\\_b."
    assert made.markdown("One.\n\n    a  b") == "One.\n\n```text\na  b\n```"
    assert made.markdown("Is:\n>>> 1 + 1\n2") == "Is:\n\n```pycon\n>>> 1 + 1\n2\n```"
    node = ast.parse('def f(a, b):\n    """Sum.\n\n    a, b: numbers [n]. Returns [n]."""').body[0]
    assert made.by_parameter(node) == "Sum.\n\n`a, b`: numbers [n].\n\nReturns [n]."


def test_drawings_are_those_of_their_script(monkeypatch, tmp_path):
    drawings = loaded("drawings")
    monkeypatch.setattr(drawings, "FIGURES", tmp_path)
    for draw in (drawings.keys, drawings.planner, drawings.segments, drawings.cutoff):
        draw()
    for made in tmp_path.iterdir():
        assert made.read_text() == (DOCS / "figures" / made.name).read_text(), "make docs"
    assert len(list(tmp_path.iterdir())) == len(list((DOCS / "figures").glob("*.svg"))) == 4


def test_pages_fetch_nothing():
    """No script, font or picture from elsewhere: links only."""
    sources = [*DOCS.rglob("*.md"), *(DOCS / "site").rglob("*.css"), *(DOCS / "figures").glob("*.svg")]
    fetched = re.compile(
        r"!\[[^\]]*\]\(\s*https?:|<(?:script|img|link|iframe)\b[^>]*https?:|url\(\s*['\"]?https?:"
    )
    assert not [path for path in sources if fetched.search(path.read_text("utf-8"))]


def test_a_store_is_studied_without_torch(tmp_path, monkeypatch):
    """Everything on that page but its first block, in a process in which torch cannot be imported."""
    monkeypatch.chdir(tmp_path)
    page = DOCS / "how-to" / "without-torch.md"
    first, *rest = (block for block in blocks(page) if not block.not_run)
    run_block(first, {})
    code = "\n".join(block.code for block in rest if block.language == "python")
    program = [sys.executable, "-c", blocking("torch", "transformers") + "import mizarr\n" + code]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SPHINX, reason="needs the extra docs: pip install 'mizarr[docs]'")
def test_the_site_is_built_without_a_warning(tmp_path):
    """And offline: no page of it names a script, a style or a picture of another host."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    run = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    pages = [path.read_text("utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 60
    assert not [
        page for page in pages if re.search(r'<(?:script|link|img)\b[^>]*(?:src|href)="https?:', page)
    ]


def test_the_gallery_links_the_reports_of_what_ran_and_says_what_did_not(tmp_path, monkeypatch):
    gallery = loaded("gallery")
    monkeypatch.setattr("mizarr.stages.extras.missing_modules", lambda extra: ["sklearn"])
    gallery.main(tmp_path, ["token_positions", "probe"])
    page = (tmp_path / "index.html").read_text("utf-8")
    assert re.findall(r'href="([^"]+)"', page) == ["token_positions.html"]
    assert (tmp_path / "token_positions.html").stat().st_size > 10_000
    assert "mizarr[probing]" in page
    assert gallery.page([gallery.Shown("a", "1 < 2?")]).count("1 &lt; 2?") == 1
