"""Page of a computed workflow: its settings, its results, and the runs and results these were computed
from."""

from __future__ import annotations

from ...holdings import AskedQuestion, Snapshot
from ...views import Values, View
from .. import addresses
from ..page import Page
from .parts import home, moment, results_table, runs_table, sized

__all__ = ["question_page"]


def question_page(snapshot: Snapshot, computed: AskedQuestion) -> Page:
    """Page of a computed workflow: its settings, its results, and what these were computed from.

    Arguments:
        snapshot: Content of the store.
        computed: The workflow with its settings and results.
    """
    question = computed.question
    address = addresses.question(question.digest)
    values = [
        ("model", question.model or "none"),
        ("settings", question.settings_line),
        ("requested (UTC)", moment(question.at)),
        ("on disk", sized(computed.bytes)),
    ]
    names = {folder.data: name for name, folder in computed.results.items()}
    runs = [folder for folder in computed.pieces if folder.run is not None]
    intermediate_results = [folder for folder in computed.pieces if folder.run is None]
    views: list[View] = [
        Values(pairs=tuple(values)),
        results_table(snapshot, list(computed.results.values()), address, names=names, title="Results"),
    ]
    if runs:
        views.append(runs_table(runs, address, title="Runs that were read"))
    if intermediate_results:
        views.append(results_table(snapshot, intermediate_results, address, title="Results that were read"))
    return Page(
        address=address,
        title=question.workflow,
        over="computed workflow",
        up=(home(address),),
        views=tuple(views),
    )
