"""A workflow that was computed: its settings, its results, and what they were made from."""

from __future__ import annotations

from ...holdings import AskedQuestion, Snapshot
from ...views import Values, View
from .. import addresses
from ..page import Page
from .parts import home, moment, results_table, runs_table, sized

__all__ = ["question_page"]


def question_page(held: Snapshot, asked: AskedQuestion) -> Page:
    """The page of a workflow with its settings: links to each of its results, then to the pieces of these."""
    question = asked.question
    here = addresses.question(question.digest)
    values = [
        ("model", question.model or "none"),
        ("settings", question.settings_line),
        ("asked (UTC)", moment(question.at)),
        ("on disk", sized(asked.bytes)),
    ]
    names = {folder.data: name for name, folder in asked.results.items()}
    runs = [folder for folder in asked.pieces if folder.run is not None]
    pieces = [folder for folder in asked.pieces if folder.run is None]
    views: list[View] = [
        Values(pairs=tuple(values)),
        results_table(held, list(asked.results.values()), here, names=names, title="Results"),
    ]
    if runs:
        views.append(runs_table(runs, here, title="Runs that were read"))
    if pieces:
        views.append(results_table(held, pieces, here, title="Results that were read"))
    return Page(
        address=here,
        title=question.workflow,
        over="computed workflow",
        up=(home(here),),
        views=tuple(views),
    )
