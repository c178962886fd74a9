"""Commands that list the analyses of the package: `workflows` and `stages`. Neither imports torch."""

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
"""Columns of the table of `mizarr stages`."""

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
"""Folder below workflows/ -> heading in the list of workflows, in the order of the list."""


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
        # ".readout.logit_lens:LogitLens": the part after the first dot is the folder.
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
    """Print (name, text) pairs under headings, in two columns that are wrapped to the terminal's width."""
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
    exist for some parameters only. USED BY lists the workflows that run the stage with their default
    settings; a stage that none of them runs is called from Python, by the name listed there.
    """
    from ...stages import find
    from ..usage import uses

    if name is not None:
        find(name)  # raises for an unknown name before all workflows are built, which takes seconds
    declared = uses()
    if name is None:
        if as_json:
            print_json([use.to_json() for use in declared.values()])
        else:
            print_table(COLUMNS, [row for use in declared.values() for row in _rows(use)])
    elif as_json:
        print_json(declared[name].to_json())
    else:
        echo(declared[name].declaration.describe())
        echo(f"  use {', '.join(declared[name].doors)}")


def _rows(use: Use) -> list[dict[str, str]]:
    """Table rows of one stage: one row per input, output or user, listed beside each other."""
    declaration = use.declaration
    inputs = [f"{label} [{dims}]" for label, dims in declaration.input_labels.items()]
    outputs = [
        f"{label}{'?' * output.is_optional} {output.shape}" for label, output in declaration.outputs.items()
    ]
    lines = list(zip_longest(inputs, outputs, use.doors, fillvalue=""))
    # Name, kind and version stand in the first row of a stage only.
    heads = [
        (declaration.name, declaration.kind, str(declaration.version)),
        *[("", "", "")] * (len(lines) - 1),
    ]
    return [dict(zip(COLUMNS, (*head, *line), strict=True)) for head, line in zip(heads, lines, strict=True)]
