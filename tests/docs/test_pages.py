"""Every block of code of docs/ runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mizarr
from tests.docs.pages import Block, blocks, difference, is_close, matches, needed_models, run_block
from tests.docs.real_pages import link_models, page_param

pytestmark = pytest.mark.wide

ROOT = Path(mizarr.__file__).parent
GENERATED = (
    "reference/api/",
    "reference/cards/",
    "reference/settings.md",
    "changelog.md",
    "real-models.md",
)
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if not page.relative_to(ROOT / "docs").as_posix().startswith(GENERATED)
]
WITH_CODE = [page for page in PAGES if blocks(page)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [page_param(page, relative(page)) for page in WITH_CODE])
def test_the_code_of_a_page_runs_and_prints_what_stands_below_it(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link_models(page, tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.not_run:
            continue
        said = run_block(block, namespace)
        if block.expected is not None:
            differs = difference(block.expected, said)
            assert not differs, f"{block}: {differs}\n--- all of it:\n{said}"


def test_what_is_not_run_says_why():
    held = [block for page in WITH_CODE for block in blocks(page) if block.not_run]
    assert all(len(block.not_run.split()) >= 3 for block in held)
    assert len(held) <= 24, "a page whose code does not run is a promise"


def test_a_page_names_the_model_that_it_needs(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- needs: small.gguf -->\n\nWords.\n")
    assert needed_models(page) == ["small.gguf"]
    monkeypatch.setenv("MIZARR_REAL_MODELS", str(tmp_path / "models"))
    with pytest.raises(pytest.skip.Exception, match=r"small\.gguf"):
        link_models(page, tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.gguf").write_text("weights")
    link_models(page, tmp_path)
    assert (tmp_path / "small.gguf").read_text() == "weights"


def test_blocks_are_read_with_what_they_print(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\nx = 1\nx + 1\n```\n\n```text\n2\n```\n\nwords\n\n```text\nnot output\n```\n"
        "<!-- not run: takes a cluster -->\n```bash\nmizarr ls\n```\n"
    )
    python, bash = blocks(page)
    assert python == Block("page.md", 4, "python", "x = 1\nx + 1", "2", "")
    assert (bash.language, bash.expected, bash.not_run) == ("bash", None, "takes a cluster")
    assert run_block(python, {}) == "2\n"


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("12 tokens", "12 tokens", True),
        ("12 tokens", "13 tokens", False),
        ("share 0.81", "share 0.83", True),
        ("share 0.81", "share 0.84", False),
        ("share 0.81", "share   0.8100001", True),
        ("[0.1 -0.2]", "[ 0.1 -0.2 ]", True),
        ("key 3f…", "key 3fa0c", True),
        ("key 3f…, 2 layers", "key 3fa0c, 3 layers", False),
        ("1.0e-05", "1.2e-05", True),
        ("a+b", "aab", False),
    ],
)
def test_numbers_may_differ_by_two_of_their_last_digit(expected, found, same):
    assert matches(expected, found) == same


def test_lines_more_and_less_are_told():
    assert difference("a\nb", "a\n") == "expected 'b', found nothing more"
    assert difference("a", "a\nb") == "found 'b' beyond what is expected"
    assert difference("a\n…", "a\nb\nc") == ""
    assert is_close("1,000", "1000") and not is_close("1", "1.4")


def test_counts_of_a_graph_are_what_code_prints():
    """Words beside it go on saying what a graph had when its model was another one."""
    counted = re.compile(r"\d[\d,]* (?:nodes|active features)\b")
    for page in PAGES:
        words = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
        assert counted.findall(words) == [], relative(page)
