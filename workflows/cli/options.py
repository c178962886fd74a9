"""What several commands share: options, groups that suggest, sizes and durations, settings, printing.

Knows no command and no science.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...store.display.terminal import echo, escaped
from ...store.errors import PlanError, nearest

if TYPE_CHECKING:
    from ...store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
_NARROWEST = 12
"""Characters below which no column of a table is narrowed to fit a terminal."""

store_option = click.option(
    "--store",
    "store_path",
    envvar="MIZARR_STORE",
    default="activations",
    show_default=True,
    show_envvar=True,
    metavar="PATH",
    help="Directory of the store, or its URL: s3://, gs:// or az:// and BUCKET/PREFIX.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Show no progress bars.")


@dataclass(frozen=True)
class Declared:
    """Fields of an options dataclass as options of a command. The dataclass is imported when the command is
    used, so that the help of other commands does not wait for it."""

    module: str
    """Where the dataclass is, below the package."""
    kind: str
    """Name of the dataclass."""
    names: tuple[str, ...] = ()
    """Its fields that the command takes; empty for all."""

    def only(self, *names: str) -> Declared:
        """Some of these options."""
        return replace(self, names=names)

    def fields(self) -> list[dataclasses.Field[Any]]:
        """The fields, in the order of the command's options."""
        from ...stages.options import options_of

        package = __name__.partition(".workflows.")[0]
        kind = getattr(importlib.import_module(f"{package}.{self.module}"), self.kind)
        known = {item.name: item for item in options_of(kind)}
        return [known[name] for name in self.names or known]


LOADING = Declared("stages.forward.models.reference", "ModelRef")
STORING = Declared("stages.forward.capture.options", "CaptureOptions")
RUNNING = Declared("stages.options", "RunOptions", ("cluster", "workers", "log"))
PLACE = RUNNING.only("cluster", "workers")
NAMED = LOADING.only("trust_layout", "backend", "adapter")
"""How a model that is named elsewhere is run."""


def _option_of(item: dataclasses.Field[Any]) -> click.Option:
    """A dataclass field as an option of the command line; left out it is the default of the field, or None
    for a size in bytes."""
    about, flag = item.metadata, f"--{item.name.replace('_', '-')}"
    how: dict[str, Any] = {"help": about["help"]}
    if item.default is not None and about["kind"] != "bytes":
        how |= {"default": item.default, "show_default": True}
    if about["metavar"]:
        how["metavar"] = about["metavar"]
    if isinstance(item.default, bool):
        return click.Option([flag], **how | {"is_flag": True, "show_default": False})
    if about["choices"]:
        how["type"] = click.Choice(about["choices"])
    elif about["kind"] == "bytes":
        how |= {"callback": size, "metavar": "SIZE"}
    elif about["kind"] == "folder":
        how["type"] = click.Path(exists=True, file_okay=False)
    elif about["kind"] == "file":
        how |= {"type": click.Path(dir_okay=False), "metavar": "FILE"}
    elif about["kind"] == "count" or isinstance(item.default, int):
        how["type"] = click.IntRange(min=1 if about["kind"] == "count" else 0)
    return click.Option([flag], **how)


def declares(*declared: Declared) -> Callable[[Command], Command]:
    """Give a command the options of dataclasses; see `command`."""

    def decorate(function: Command) -> Command:
        function.declared = (*getattr(function, "declared", ()), *declared)  # type: ignore[attr-defined]
        return function

    return decorate


class DeclaredCommand(click.Command):
    """A command that takes, besides its own options, those its function `declares`."""

    _awaited: tuple[Declared, ...] = ()

    @property
    def params(self) -> list[click.Parameter]:
        """All options; those of dataclasses are made at the first use."""
        if self._awaited:
            groups, self._awaited = self._awaited, ()
            # The list itself grows: click appends to it and takes away from it.
            self._params += [_option_of(item) for group in groups for item in group.fields()]
        return self._params

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._params = own
        self._awaited = getattr(self.callback, "declared", ())


command = functools.partial(click.command, cls=DeclaredCommand)


def given_options(options: Mapping[str, Any], *declared: Declared) -> dict[str, Any]:
    """Keyword arguments of what was said on the command line: options that were left out are left out."""
    names = {item.name for group in declared for item in group.fields()}
    return {name: value for name, value in options.items() if name in names and value is not None}


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """A command with options, in the order in which its help lists them."""
    for option in reversed(options):
        command = option(command)
    return command


class SuggestingGroup(click.Group):
    """Offers the nearest name for a command it does not have; alone, it prints its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help of a group that is called without a command, and exit with 0; click exits with 2."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but in the same words for every version of click."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = nearest(args[0], self.commands)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(self.commands)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        _require_no_empty(args, ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use, not of the alphabet."""
        return list(self.commands)


def _require_no_empty(args: Sequence[str], ctx: click.Context) -> None:
    """Raise UsageError for an option with an empty value: most commands would take it for an option left out,
    and answer for everything."""
    for place, text in enumerate(args):
        if text == "--":  # behind it are arguments, whatever they begin with
            break
        is_of_option = text == "" and place and args[place - 1].startswith("-")
        if is_of_option or (text.startswith("--") and text.endswith("=")):
            name = text.rstrip("=") or args[place - 1]
            raise click.UsageError(
                f"expected a value behind {name!r}, found an empty text; leave it out", ctx
            )


def existing_store(path: str) -> Store:
    """The store at a path, to be changed: a command that changes what is there makes no new one."""
    from ...store import open_store

    open_store(path, mode="r")
    return open_store(path)


def size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Bytes of a size written as 500MB, 2GiB or 1.5e9; None where none was given."""
    if text is None:
        return None
    from ...pipeline.plan import as_bytes

    with contextlib.suppress(PlanError):
        if (count := as_bytes(text)) and count > 0:
            return count
    raise click.BadParameter(f"expected a size such as 500MB or 2GiB, found {text!r}", ctx, param)


def positions(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """Tokens to keep, as `HookSpec.capture` takes them; a name that ends in .npy is that of a mask."""
    if text is None or not text.endswith(".npy"):
        return text
    import numpy as np

    try:
        return np.load(text, allow_pickle=False)
    except FileNotFoundError:
        raise click.BadParameter(f"expected a mask in {text!r}, found no such file", ctx, param) from None
    except (OSError, ValueError, EOFError):
        raise click.BadParameter(
            f"expected an array of numpy in {text!r}, found none; write it with np.save", ctx, param
        ) from None


def duration(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Seconds of a time span written as 90s, 24h or 7d."""
    from dask.utils import parse_timedelta

    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        if text[:1].isdigit():
            return float(parse_timedelta(text, default=False))
    raise click.BadParameter(f"expected a duration such as 90s, 24h or 7d, found {text!r}", ctx, param)


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
            found[name] = json_or_text(text)
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}", ctx, param) from None
    return found


def json_or_text(text: str) -> Any:
    """A value as JSON where it is JSON, else the text as it stands.

    Raises ValueError for a text that begins as a list, an object or a string of JSON and is none: one
    character was forgotten, and its text is not what is meant.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("[", "{", '"')):
            return text
        raise ValueError(
            f"expected JSON, as {text.lstrip()[0]} begins it, found {text!r} ({error.msg} at character "
            f"{error.pos}); mend it, or quote a text as JSON: {json.dumps(text, ensure_ascii=False)}"
        ) from error
    except ValueError as error:
        raise ValueError("expected numbers of a few digits, found one of thousands") from error
    except RecursionError as error:
        raise ValueError("expected JSON, found lists that nest without end") from error


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Aligned columns on stdout under a header line.

    In a terminal long cells are wrapped, so that the table fits its width; elsewhere each row is one line, to
    be cut by awk.
    """
    lines = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    if sys.stdout.isatty():
        widths = _fitted(widths, shutil.get_terminal_size().columns)
    for line in lines:
        wrapped = [
            textwrap.wrap(cell, width) if len(cell) > width else [cell]
            for cell, width in zip(line, widths, strict=True)
        ]
        for cells in itertools.zip_longest(*wrapped, fillvalue=""):
            echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _fitted(widths: Sequence[int], total: int) -> list[int]:
    """Widths of columns that fit into `total` characters: the widest are narrowed."""
    fitted = list(widths)
    while sum(fitted) + 2 * (len(fitted) - 1) > total and max(fitted) > _NARROWEST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _cell(value: Any) -> str:
    return "-" if value is None else escaped(str(value), one_line=True)
