"""What several commands share: the store option, sizes and durations, settings, and printing.

Knows no command and no science.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

store_option = click.option(
    "--store",
    "store_path",
    envvar="MIZARR_STORE",
    default="activations",
    show_default=True,
    show_envvar=True,
    metavar="PATH",
    help="Directory or URL of the store.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress bars.")


class Size(click.ParamType):
    """A number of bytes written as 500MB, 2GiB, 1.5e9."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes, as dask reads them."""
        if isinstance(value, int):
            return value
        from dask.utils import parse_bytes

        try:
            # dask reads "MB" and "" as one of them
            found = int(parse_bytes(value)) if value[:1].isdigit() else 0
        except ValueError:
            found = 0
        if found <= 0:
            self.fail(f"expected a size such as 500MB or 2GiB, found {value!r}", param, ctx)
        return found


class Duration(click.ParamType):
    """A time span written as 90s, 24h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, as dask reads them."""
        if isinstance(value, (int, float)):
            return float(value)
        from dask.utils import parse_timedelta

        try:
            found = float(parse_timedelta(value, default=False)) if value[:1].isdigit() else -1.0
        except (ValueError, KeyError, TypeError):
            found = -1.0
        if found < 0:
            self.fail(f"expected a duration such as 90s, 24h or 7d, found {value!r}", param, ctx)
        return found


def settings(ctx: click.Context, param: click.Parameter, pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as a dict; a value is read as JSON where it is JSON, else as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"expected name=value, found {pair!r}", ctx, param)
        if name in found:
            raise click.BadParameter(f"{name!r} is set twice", ctx, param)
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Aligned columns on stdout, one header line: made to be read, and to be cut by awk."""
    lines = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def human_bytes(count: float | None) -> str:
    """2.1 GiB for people; '-' where the count is unknown."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
