"""Options declared once, as fields of a frozen dataclass.

Keyword arguments of public functions (`takes_options`), options of commands (`workflows/cli/options.py`) and
settings of workflows are made from these fields, so that a new option is one field:

    @dataclass(frozen=True)
    class CaptureOptions:
        batch_tokens: int = option(2048, "Tokens per forward pass.")

    @takes_options(CaptureOptions)
    def capture(model, prompts, hooks, *, store, **options):
        (given,) = split_options("capture", options, CaptureOptions)

Knows no command and no model; never imports torch.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..store.errors import nearest

__all__ = ["RunOptions", "option", "options_of", "split_options", "takes_options"]

Function = TypeVar("Function", bound=Callable[..., Any])


def option(
    default: Any,
    description: str,
    *,
    choices: Sequence[str] = (),
    kind: str = "",
    metavar: str = "",
) -> Any:
    """A dataclass field that callers may set by keyword or on the command line.

    Args:
        default: value where the caller gives none.
        description: one sentence, shown by `--help` and in the docstring of functions that take the option.
        choices: the values there are; empty for any.
        kind: how a command reads its text where the type of the default does not say it: "count" (a whole
            number of at least 1), "bytes" (500MB, 2GiB), "folder", "file".
        metavar: placeholder in `--help`.
    """
    about = {"help": description, "choices": tuple(choices), "kind": kind, "metavar": metavar}
    return field(default=default, metadata=about)


def options_of(kind: type[Any]) -> list[Field[Any]]:
    """Fields of an options dataclass that were declared by `option`, in order."""
    return [item for item in fields(kind) if "choices" in item.metadata]


def split_options(function: str, given: Mapping[str, Any], *kinds: type[Any]) -> list[dict[str, Any]]:
    """Keyword arguments sorted by the dataclass that declares them, one dict for each of `kinds`.

    Args:
        function: name of the called function, for the message.
        given: its keyword arguments.
        kinds: dataclasses of options, which share no field name.

    Raises:
        TypeError: for a keyword that none of them declares, with the nearest name.
    """
    names = [{item.name for item in options_of(kind)} for kind in kinds]
    for name in given:
        if not any(name in known for known in names):
            near = nearest(name, [known for group in names for known in group])
            hint = f"; nearest is {near!r}" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    return [{name: value for name, value in given.items() if name in known} for known in names]


def takes_options(*kinds: type[Any]) -> Callable[[Function], Function]:
    """Show the fields of these dataclasses in the signature and docstring of a function whose `**options`
    they are, so that `help`, notebooks and the documentation list them."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        plain = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        declared = [item for kind in kinds for item in options_of(kind)]
        keywords = [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if item.default is MISSING else item.default,
                annotation=item.type,
            )
            for item in declared
        ]
        lines = "\n".join(
            textwrap.fill(
                f"{item.name}: {item.metadata['help']}",
                110,
                initial_indent=" " * 4,
                subsequent_indent=" " * 8,
            )
            for item in declared
        )
        function.__signature__ = signature.replace(parameters=[*plain, *keywords])  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nKeyword Args:\n{lines}\n"
        return function

    return decorate


@dataclass(frozen=True)
class RunOptions:
    """Where the cells of a plan are computed, and what is reported meanwhile; part of no key."""

    cluster: str | None = option(
        None,
        "Address of a Dask scheduler, such as tcp://127.0.0.1:8786; default threads here.",
        metavar="ADDRESS",
    )
    workers: int = option(
        0,
        "Number of processes of this machine that share the work, a GPU each where there are GPUs; 0 and 1: "
        "none.",
        metavar="N",
    )
    progress: bool = option(True, "Show a progress bar on stderr.")
    log: str | Path | None = option(
        None,
        "File that gets a JSON line for every segment committed: tokens, bytes, rate, time left.",
        kind="file",
    )

    def __post_init__(self) -> None:
        from ..store.arrays import require_flag  # numpy comes with it: not for --help

        require_flag(self.progress, "progress")

    @property
    def keywords(self) -> dict[str, Any]:
        """As `pipeline.run` takes them."""
        return {
            "cluster": self.cluster,
            "workers": self.workers,
            "quiet": not self.progress,
            "log": self.log,
        }
