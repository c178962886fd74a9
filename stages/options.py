"""Options declared once, as fields of a frozen dataclass.

Keyword arguments of public functions (`takes_options`), options of commands (`workflows/cli/options.py`) and
settings of workflows are made from these fields, so a new option is one new field:

    @dataclass(frozen=True)
    class CaptureOptions:
        batch_tokens: int = option(2048, "Tokens per forward pass.")

    @takes_options(CaptureOptions)
    def capture(model, prompts, hooks, *, store, **options):
        (capture_options,) = split_options("capture", options, CaptureOptions)

Border: dataclass fields; knows no command and no model, never imports torch.
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
    """A dataclass field that callers set by keyword or on the command line.

    Arguments:
        default: Value of an option that is not set.
        description: One sentence, shown by `--help` and in the docstring of functions that take the option.
        choices: Allowed values; empty for no restriction.
        kind: How the command line parses the text, where the type of the default does not decide it: "count"
            (an integer of at least 1), "bytes" (500MB, 2GiB), "folder", "file".
        metavar: Placeholder in `--help`.
    """
    metadata = {"help": description, "choices": tuple(choices), "kind": kind, "metavar": metavar}
    return field(default=default, metadata=metadata)


def options_of(kind: type[Any]) -> list[Field[Any]]:
    """Fields of an options dataclass that were declared by `option`, in order."""
    # Other fields of the class have no such metadata, and are no options.
    return [item for item in fields(kind) if "choices" in item.metadata]


def split_options(function: str, options: Mapping[str, Any], *kinds: type[Any]) -> list[dict[str, Any]]:
    """Sort keyword arguments by the dataclass that declares them.

    Arguments:
        function: Name of the called function, for the message.
        options: Its keyword arguments.
        kinds: Dataclasses of options, which share no field name.

    Returns:
        The keyword arguments of each of `kinds`, in order.

    Raises:
        TypeError: No dataclass declares a keyword; the message has the nearest name.
    """
    names_by_kind = [{item.name for item in options_of(kind)} for kind in kinds]
    for name in options:
        if not any(name in names for names in names_by_kind):
            near = nearest(name, [known for names in names_by_kind for known in names])
            hint = f"; nearest is {near!r}" if near else ""
            # Python's own words, so that callers see the message of a function with plain keywords.
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    return [{name: value for name, value in options.items() if name in names} for names in names_by_kind]


def takes_options(*kinds: type[Any]) -> Callable[[Function], Function]:
    """Decorator that writes the fields of options dataclasses into a function's signature and docstring.

    The function takes them as `**options`; `help`, notebooks and the documentation then list each option.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        # `**options` itself is dropped from the signature: its fields take its place.
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
        # inspect.signature, and with it help() and IPython, reads __signature__ before the code.
        function.__signature__ = signature.replace(parameters=[*plain, *keywords])  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nKeyword Args:\n{lines}\n"
        return function

    return decorate


@dataclass(frozen=True)
class RunOptions:
    """Where the cells of a plan are computed, and how progress is reported; part of no key."""

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
        # store.arrays imports numpy, and `--help`, which imports this module, must start without it.
        from ..store.arrays import require_flag

        require_flag(self.progress, "progress")

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `pipeline.run`."""
        return {
            "cluster": self.cluster,
            "workers": self.workers,
            "quiet": not self.progress,
            "log": self.log,
        }
