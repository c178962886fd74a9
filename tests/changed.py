"""Which tests look at what changed: printed for `make check`, one path per line.

A test file that changed is one of them; of a module, the file in the mirrored room that is named after it,
and the tests of its room that import it by name (for workflows/, of any folder of it); of a page of docs/
those that run its blocks. Changed is what differs from the last commit, or, where nothing does, what that
commit changed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = "tests/contracts/test_house.py"
QUESTIONS = "workflows/"
"""A room whose folders share what lies beside them: material, views, settings."""


def changed() -> list[str]:
    """Paths that differ from the last commit, or that it changed; relative to the repository."""
    now = [*_git("diff", "--name-only", "HEAD"), *_git("ls-files", "--others", "--exclude-standard")]
    return now or _git("show", "--name-only", "--format=", "HEAD")


def tests_of(path: str) -> Iterator[str]:
    """Test files that look at one changed path."""
    changed_file = Path(path)
    if path.startswith("docs/") and changed_file.suffix == ".md":
        yield from (
            "tests/docs/test_pages.py",
            "tests/docs/test_notebooks.py",
            "tests/contracts/test_reference_tables.py",
        )
    if changed_file.suffix != ".py":
        return
    if path.startswith("tests/"):
        yield from [path] if changed_file.name.startswith("test_") else _importing(changed_file)
        return
    mirrored = Path("tests") / changed_file.parent / f"test_{changed_file.stem}.py"
    yield str(mirrored)
    near = (mirrored.parent, mirrored.parent.parent)
    any_folder = path.startswith(QUESTIONS)
    yield from (
        found
        for found in _importing(changed_file)
        if Path(found).parent in near or (any_folder and found.startswith(f"tests/{QUESTIONS}"))
    )


def _importing(path: Path) -> Iterator[str]:
    name = path.with_suffix("").as_posix().replace("/", ".")
    wanted = re.compile(rf"\b(mizarr\.)?{re.escape(name)}\b")
    for test in ROOT.glob("tests/**/test_*.py"):
        if wanted.search(test.read_text()):
            yield str(test.relative_to(ROOT))


def _git(*arguments: str) -> list[str]:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


if __name__ == "__main__":
    chosen = dict.fromkeys([ALWAYS, *(test for path in changed() for test in tests_of(path))])
    print("\n".join(test for test in chosen if (ROOT / test).exists()))
