"""What analyses there are, and what they are made of: `workflows` and `stages`. Never imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from ...store.display.terminal import echo
from .. import WORKFLOWS, kind_of
from .completion import workflow_names
from .options import json_option, print_json, print_table

if TYPE_CHECKING:
    from ..usage import Use

COLUMNS = ("NAME", "KIND", "VERSION", "INPUT", "OUTPUT", "USED BY")


SUBJECTS = {
    "readout": "Reading the residual stream",
    "writing": "What the model says",
    "causal": "Causal interventions",
    "gradients": "Attribution by gradients",
    "circuits": "Circuits",
    "attention": "Attention",
    "weights": "Weights",
    "evaluation": "Evaluation",
    "steering": "Steering",
    "recurrent": "Recurrent models",
    "planning": "Planning ahead",
    "features": "Dictionary features",
    "feature_exchange": "Exchanging features",
    "algzoo": "Tiny networks of AlgZoo",
}
"""Headings of the list of workflows, by the folder that a workflow lies in."""


@click.command(epilog="Example: mizarr workflows logit_lens")
@click.argument("name", required=False, shell_complete=workflow_names)
@json_option
@click.pass_context
def workflows(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """List the questions that mizarr answers, or the settings of NAME.

    Each is run by mizarr compute NAME, settings are given as --set SETTING=VALUE.
    """
    if name is not None:
        kind = kind_of(name)
        fields = dataclasses.fields(kind.settings_type)
        if as_json:
            settings = {field.name: field.metadata.get("help", "") for field in fields}
            print_json({"name": name, "question": kind.question, "settings": settings})
            return
        echo(kind.question)
        echo()
        _print_definitions(ctx, {"Settings": [(f.name, f.metadata.get("help", "")) for f in fields]})
        echo()
        echo(f"mizarr compute {name} answers it; mizarr explain {name} shows defaults and costs.")
        return
    by_subject: dict[str, list[tuple[str, str]]] = {title: [] for title in SUBJECTS.values()}
    for label, module in WORKFLOWS.items():
        by_subject[SUBJECTS[module.split(".")[1]]].append((label, kind_of(label).question))
    if as_json:
        print_json(
            [
                {"name": label, "subject": title, "question": question}
                for title, listed in by_subject.items()
                for label, question in listed
            ]
        )
        return
    _print_definitions(ctx, by_subject)
    echo()
    echo("mizarr workflows NAME lists the settings of one, mizarr compute NAME answers it.")


def _print_definitions(ctx: click.Context, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Names and texts in two columns, wrapped to the width of the terminal, under headings."""
    formatter = ctx.make_formatter()
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(list(rows))
    echo(formatter.getvalue().strip("\n"))


@click.command(epilog="Example: mizarr stages logit_lens")
@click.argument("name", required=False)
@json_option
def stages(name: str | None, as_json: bool) -> None:
    """List stages and experiments, or describe NAME.

    A stage reads stored arrays; an experiment runs a model. OUTPUT has dims and unit; "dim?" and "output?"
    are there for some parameters only. USED BY are the workflows that have it in their graph at their
    defaults; what none of them has is called from Python, under the name given.
    """
    from ...stages import find
    from ..usage import uses

    if name is not None:
        find(name)  # an unknown one is told at once
    found = uses()
    if name is None:
        if as_json:
            print_json([use.to_json() for use in found.values()])
        else:
            print_table(COLUMNS, [row for use in found.values() for row in _rows(use)])
    elif as_json:
        print_json(found[name].to_json())
    else:
        echo(found[name].declaration.describe())
        echo(f"  use {', '.join(found[name].doors)}")


def _rows(use: Use) -> list[dict[str, str]]:
    """The lines of one stage: inputs, outputs and users beside each other."""
    it = use.declaration
    inputs = [f"{label} [{told}]" for label, told in it.input_labels.items()]
    outputs = [f"{label}{'?' * each.is_optional} {each.shape}" for label, each in it.outputs.items()]
    lines = list(zip_longest(inputs, outputs, use.doors, fillvalue=""))
    heads = [(it.name, it.kind, str(it.version)), *[("", "", "")] * (len(lines) - 1)]
    return [dict(zip(COLUMNS, (*head, *line), strict=True)) for head, line in zip(heads, lines, strict=True)]
