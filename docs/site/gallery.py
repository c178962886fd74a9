"""A gallery: every workflow at its defaults on the models that ship, and a page that links their reports.

    python docs/site/gallery.py FOLDER [WORKFLOW ...]

Reports are those of `mizarr report`; what is cached in FOLDER/store is not computed again. A workflow that
cannot be run here - an extra that is missing - is listed with the reason.
"""

from __future__ import annotations

import sys
import time
from html import escape
from pathlib import Path
from typing import NamedTuple

import click

from mizarr import MizarrError, open_store
from mizarr.workflows import WORKFLOWS, build

STYLE = """
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1c2430; background: #fbfcfa;
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
ul { list-style: none; padding: 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
li { border: 1px solid #dde2e6; border-radius: 8px; padding: 0.8rem 1rem; background: #ffffff; }
a { color: #14606f; font-weight: 600; text-decoration: none; }
a:hover, a:focus { text-decoration: underline; }
p { margin: 0.3rem 0 0; } .about { color: #5b6673; font-size: 0.85rem; }
@media (prefers-color-scheme: dark) {
  body { color: #dfe5ea; background: #14181d; } li { background: #1b2128; border-color: #303943; }
  a { color: #6fc3d3; } .about { color: #98a4b0; } }
"""


class Shown(NamedTuple):
    """One workflow: its question, the first sentence of what it found, seconds; why there is no report."""

    name: str
    question: str
    found: str = ""
    seconds: float = 0.0
    reason: str = ""


def show(name: str, folder: Path) -> Shown:
    """Run a workflow at its defaults and write its report."""
    workflow = build(name)
    started = time.perf_counter()
    try:
        workflow.run(open_store(folder / "store"))
        workflow.report(folder / f"{name}.html")
    except MizarrError as error:
        return Shown(name, workflow.question, reason=str(error))
    told = workflow.to_json().get("findings") or [{}]
    seconds = time.perf_counter() - started
    return Shown(name, workflow.question, str(told[0].get("sentence", "")), seconds)


def page(shown: list[Shown]) -> str:
    """The page that links the reports."""
    items = "".join(map(entry, shown))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mizarr: gallery</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>Every workflow, at its defaults</h1>'
        "<p>On the models that ship with mizarr; each report opens offline.</p>"
        f"<ul>{items}</ul></body></html>\n"
    )


def entry(each: Shown) -> str:
    """One workflow on that page."""
    question = escape(each.question)
    title = question if each.reason else f'<a href="{each.name}.html">{question}</a>'
    found = f"<p>{escape(each.found)}</p>" if each.found else ""
    about = f"{each.name}: {each.reason}" if each.reason else f"{each.name}, {each.seconds:.0f} s"
    return f'<li>{title}{found}<p class="about">{escape(about)}</p></li>'


def main(folder: Path, names: list[str]) -> None:
    """Write the gallery."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for name in names or list(WORKFLOWS):
        shown.append(show(name, folder))
        click.echo(f"{name}: {shown[-1].reason or f'{shown[-1].seconds:.1f} s'}")
    (folder / "index.html").write_text(page(shown), "utf-8")
    click.echo(folder / "index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
