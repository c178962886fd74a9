"""Helpers shared by the subcommands: common options, parsers of sizes, durations and settings, printing.

Options that are fields of a dataclass (`ModelRef`, `CaptureOptions`, `RunOptions`) are derived from those
fields and their metadata, see `declares`.
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
"""Minimum width, in characters, of a table column that is narrowed to fit the terminal."""

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
    """Fields of a dataclass, such as `ModelRef`, that become options of a command.

    The dataclass is imported when the command is used, so that the help of other commands does not wait for
    the import.
    """

    module: str
    """Module of the dataclass, relative to the package `mizarr`, such as "stages.options"."""
    kind: str
    """Name of the dataclass."""
    names: tuple[str, ...] = ()
    """Names of the fields that become options, in this order; empty for all fields."""

    def only(self, *names: str) -> Declared:
        """A copy of which only these dataclass fields become options, in this order."""
        return replace(self, names=names)

    def fields(self) -> list[dataclasses.Field[Any]]:
        """The dataclass fields, in the order of the command's options. Imports the dataclass."""
        from ...stages.options import options_of

        package = __name__.partition(".workflows.")[0]
        kind = getattr(importlib.import_module(f"{package}.{self.module}"), self.kind)
        fields = {item.name: item for item in options_of(kind)}
        return [fields[name] for name in self.names or fields]


LOADING = Declared("stages.forward.models.reference", "ModelRef")
"""All options of how a model is loaded: revision, device, dtype, backend, ..."""
STORING = Declared("stages.forward.capture.options", "CaptureOptions")
"""Options of how activations are stored: dtype, memory of the buffers, codec, ..."""
RUNNING = Declared("stages.options", "RunOptions", ("cluster", "workers", "log"))
"""Options of how stages are executed: Dask cluster, number of worker processes, log file."""
PLACE = RUNNING.only("cluster", "workers")
"""Options of where stages are executed: in this process, or on workers of a Dask cluster."""
NAMED = LOADING.only("trust_layout", "backend", "adapter")
"""Loading options of workflow commands; further loading options, such as the device, are workflow
settings."""


def _option_of(item: dataclasses.Field[Any]) -> click.Option:
    """Build the command-line option of a dataclass field from the field's name, default and metadata.

    The metadata holds help, kind, metavar and choices. An omitted option has the default of the field. An
    omitted size in bytes is None: `given_options` leaves it out, and the dataclass applies its default.
    """
    metadata, flag = item.metadata, f"--{item.name.replace('_', '-')}"
    kwargs: dict[str, Any] = {"help": metadata["help"]}
    if item.default is not None and metadata["kind"] != "bytes":
        kwargs |= {"default": item.default, "show_default": True}
    if metadata["metavar"]:
        kwargs["metavar"] = metadata["metavar"]
    # Before the test for int: bool is a subclass of int.
    if isinstance(item.default, bool):
        return click.Option([flag], **kwargs | {"is_flag": True, "show_default": False})
    if metadata["choices"]:
        kwargs["type"] = click.Choice(metadata["choices"])
    elif metadata["kind"] == "bytes":
        kwargs |= {"callback": size, "metavar": "SIZE"}
    elif metadata["kind"] == "folder":
        kwargs["type"] = click.Path(exists=True, file_okay=False)
    elif metadata["kind"] == "file":
        kwargs |= {"type": click.Path(dir_okay=False), "metavar": "FILE"}
    elif metadata["kind"] == "count" or isinstance(item.default, int):
        kwargs["type"] = click.IntRange(min=1 if metadata["kind"] == "count" else 0)
    return click.Option([flag], **kwargs)


def declares(*declared: Declared) -> Callable[[Command], Command]:
    """Decorator that gives a command function options for the fields of dataclasses.

    It only notes them on the function: a `DeclaredCommand` adds the options.
    """

    def decorate(function: Command) -> Command:
        function.declared = (*getattr(function, "declared", ()), *declared)  # type: ignore[attr-defined]
        return function

    return decorate


class DeclaredCommand(click.Command):
    """A click command whose parameters include the options that its function `declares`."""

    _pending: tuple[Declared, ...] = ()
    """Dataclasses whose options are not yet in `_params`; empty once they were imported."""

    @property
    def params(self) -> list[click.Parameter]:
        """All parameters; the options of dataclasses are created at the first access."""
        if self._pending:
            groups, self._pending = self._pending, ()
            # Extended in place: click holds this list, appends to it and removes from it.
            self._params += [_option_of(item) for group in groups for item in group.fields()]
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params = params
        # click.Command assigns `callback` before `params`: the function is known here.
        self._pending = getattr(self.callback, "declared", ())


command = functools.partial(click.command, cls=DeclaredCommand)
"""Decorator like `click.command`, for functions with `declares`."""


def given_options(options: Mapping[str, Any], *declared: Declared) -> dict[str, Any]:
    """Select the command options that are fields of dataclasses; options with the value None are omitted.

    Arguments:
        options: Name -> value of all options of the command.
        declared: Dataclasses whose fields are selected.

    Returns:
        Keyword arguments for the dataclasses.
    """
    names = {item.name for group in declared for item in group.fields()}
    return {name: value for name, value in options.items() if name in names and value is not None}


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Apply option decorators to a command function, so that `--help` lists them in this order."""
    # Decorators apply from the bottom up: the option that help lists first is applied last.
    for option in reversed(options):
        command = option(command)
    return command


class SuggestingGroup(click.Group):
    """A click group that suggests the nearest name for an unknown command, and prints help without one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; without arguments print the help and exit with 0, where click exits with 2.

        Arguments:
            ctx: Context of the group.
            args: Words of the command line after the group.
        """
        # click parses in resilient mode for shell completion, which must not print.
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look the subcommand up; UsageError for an unknown name or an option with an empty value.

        Arguments:
            ctx: Context of the group.
            args: Words from the subcommand on.
        """
        # Not left to click, whose message differs between its versions.
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = nearest(args[0], self.commands)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(self.commands)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        _require_no_empty(args, ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the subcommands in the order they were added; click would sort them by name."""
        return list(self.commands)


def _require_no_empty(args: Sequence[str], ctx: click.Context) -> None:
    """Raise UsageError for an option with an empty value, such as `--runs ""` from an unset shell variable.

    Most commands would read it as an omitted option, and apply to everything.
    """
    for index, text in enumerate(args):
        if text == "--":  # the texts after it are arguments, even if they begin with "-"
            break
        is_empty_value = text == "" and index and args[index - 1].startswith("-")
        if is_empty_value or (text.startswith("--") and text.endswith("=")):
            name = text.rstrip("=") or args[index - 1]
            raise click.UsageError(
                f"option {name} has an empty text as its value; give it a value, or leave the option out", ctx
            )


def existing_store(path: str) -> Store:
    """Open an existing store for writing; StoreError if there is none at this path or URL."""
    from ...store import open_store

    # mode="r" raises for a missing store; the writable mode would create one.
    open_store(path, mode="r")
    return open_store(path)


def size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Click callback: bytes of a size such as 500MB, 2GiB or 1.5e9; None if the option is omitted.

    Arguments:
        ctx: Context of the command.
        param: The option.
        text: Its value.
    """
    if text is None:
        return None
    from ...pipeline.plan import as_bytes

    with contextlib.suppress(PlanError):
        if (count := as_bytes(text)) and count > 0:
            return count
    raise click.BadParameter(f"expected a size such as 500MB or 2GiB, found {text!r}", ctx, param)


def positions(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """Click callback: the `positions` argument of `HookSpec.capture`.

    Arguments:
        ctx: Context of the command.
        param: The option.
        text: Its value.

    Returns:
        The array of the file if `text` ends in .npy, else `text` unchanged; None if the option is omitted.
    """
    if text is None or not text.endswith(".npy"):
        return text
    import numpy as np

    try:
        # Loading a pickle can run code of whoever wrote the file.
        return np.load(text, allow_pickle=False)
    except FileNotFoundError:
        message = f"expected a file with a mask of tokens, found no file {text!r}; check the path"
        raise click.BadParameter(message, ctx, param) from None
    except (OSError, ValueError, EOFError):
        message = f"expected a numpy array in the file {text!r}, found none; write the file with np.save"
        raise click.BadParameter(message, ctx, param) from None


def duration(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Click callback: seconds of a time span such as 90s, 24h or 7d.

    Arguments:
        ctx: Context of the command.
        param: The option.
        text: Its value.
    """
    from dask.utils import parse_timedelta

    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        # dask reads "h" as one hour, and a minus sign: a number is required first.
        if text[:1].isdigit():
            # default=False: dask refuses a number without a unit instead of reading seconds.
            return float(parse_timedelta(text, default=False))
    raise click.BadParameter(f"expected a duration such as 90s, 24h or 7d, found {text!r}", ctx, param)


def settings(ctx: click.Context, param: click.Parameter, pairs: Sequence[str]) -> dict[str, Any]:
    """Click callback: `name=value` pairs as a dict. A value that is JSON is decoded, any other is text.

    Arguments:
        ctx: Context of the command.
        param: The option.
        pairs: Values of the option.

    Raises:
        click.BadParameter: A pair without a name or "=", a name given twice, or broken JSON.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"expected name=value, found {pair!r}", ctx, param)
        if name in values:
            raise click.BadParameter(f"setting {name!r} is given twice; keep one of them", ctx, param)
        try:
            values[name] = json_or_text(text)
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}", ctx, param) from None
    return values


def json_or_text(text: str) -> Any:
    """Decode a text as JSON; a text that is not JSON is returned unchanged.

    Raises:
        ValueError: The text begins as a JSON list, object or string but is not valid JSON (a bracket or quote
            is missing), or its numbers or nesting are too long to decode.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("[", "{", '"')):
            return text
        raise ValueError(
            f"expected valid JSON, because the value begins with {text.lstrip()[0]}, found {text!r} "
            f"({error.msg} at character {error.pos}); correct it, or, if it is meant as text, write it as a "
            f"JSON string: {json.dumps(text, ensure_ascii=False)}"
        ) from error
    # Python refuses integers of more than 4300 digits (sys.set_int_max_str_digits).
    except ValueError as error:
        raise ValueError("expected numbers of at most 4300 digits, found a longer one") from error
    except RecursionError as error:
        raise ValueError("expected JSON, found lists or objects nested too deeply to be read") from error


def print_json(value: Any) -> None:
    """Print a value as one JSON document on stdout; values that JSON does not know are printed by `str`."""
    echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print aligned columns under a header line on stdout.

    In a terminal long cells are wrapped, so that the table fits its width; in a pipe or file each row is one
    line, so that awk and cut can read it.

    Arguments:
        columns: Names of the columns, in order; they are the header line.
        rows: Column name -> value of each row; None or a missing name is printed as "-".
    """
    lines = [list(columns), *([_cell_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    if sys.stdout.isatty():
        widths = _narrowed(widths, shutil.get_terminal_size().columns)
    for line in lines:
        wrapped = [
            textwrap.wrap(cell, width) if len(cell) > width else [cell]
            for cell, width in zip(line, widths, strict=True)
        ]
        for cells in itertools.zip_longest(*wrapped, fillvalue=""):
            echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _narrowed(widths: Sequence[int], total: int) -> list[int]:
    """Column widths, in characters, reduced until the table fits into `total` characters.

    The widest columns are narrowed first, but none below _NARROWEST.
    """
    narrowed = list(widths)
    # 2: the spaces between two columns.
    while sum(narrowed) + 2 * (len(narrowed) - 1) > total and max(narrowed) > _NARROWEST:
        narrowed[narrowed.index(max(narrowed))] -= 1
    return narrowed


def _cell_text(value: Any) -> str:
    """Text of a table cell on one line; "-" for None."""
    # Escaped: stored text must not send control sequences to the terminal.
    return "-" if value is None else escaped(str(value), one_line=True)
