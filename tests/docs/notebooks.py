"""The tutorial as notebooks, made of the same pages: `make notebooks` writes them into docs/notebooks.

Code becomes code cells without outputs, all else Markdown. Written as JSON (nbformat 4.5), byte for byte the
same for the same page.

    python -m tests.docs.notebooks
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.pages import parts

ROOT = Path(__file__).parents[2]
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
FOLDER = ROOT / "docs" / "notebooks"


def notebook(page: Path) -> str:
    """A page as the text of an .ipynb file."""
    cells: list[dict[str, Any]] = []
    prose: list[str] = []
    after_code = False
    for kind, _, text in parts(page.read_text("utf-8")):
        if kind == "python":
            _add_prose(cells, prose)
            cells.append(_cell(len(cells), "code", text))
        elif kind == "prose":
            prose.append(text)
        elif not (kind == "text" and after_code):
            prose.append(f"```{kind}\n{text}\n```")
        if text.strip():
            after_code = kind in ("python", "bash")
    _add_prose(cells, prose)
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    held = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(held, indent=1, ensure_ascii=False) + "\n"


def _add_prose(cells: list[dict[str, Any]], prose: list[str]) -> None:
    text = "\n\n".join(part.strip() for part in prose if part.strip())
    prose.clear()
    if text:
        cells.append(_cell(len(cells), "markdown", text))


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, **code} | {
        "source": text.splitlines(keepends=True)
    }


def path_of(page: Path) -> Path:
    """Where the notebook of a page lies."""
    return FOLDER / f"{page.stem}.ipynb"


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for page in TUTORIAL:
        path_of(page).write_text(notebook(page), "utf-8")


if __name__ == "__main__":
    main()
