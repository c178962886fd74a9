"""The command about what analyses are made of: `stages`. Plans workflows; never meets torch."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from ...store.display.terminal import echo
from .options import json_option, print_json, print_table

if TYPE_CHECKING:
    from ..usage import Use

COLUMNS = ("NAME", "KIND", "VERSION", "INPUT", "OUTPUT", "USED BY")


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
    inputs = [f"{label} [{told}]" for label, told in it.told_inputs.items()]
    outputs = [f"{label}{'?' * each.is_optional} {each.shape}" for label, each in it.outputs.items()]
    lines = list(zip_longest(inputs, outputs, use.doors, fillvalue=""))
    heads = [(it.name, it.kind, str(it.version)), *[("", "", "")] * (len(lines) - 1)]
    return [dict(zip(COLUMNS, (*head, *line), strict=True)) for head, line in zip(heads, lines, strict=True)]
