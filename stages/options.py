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
    """Declare a dataclass field as an option, which callers set by keyword or on the command line.

    Arguments:
        default: value of an option that is not set.
        description: one sentence, shown by `--help` and in the docstring of functions that take the option.
        choices: allowed values; empty for no restriction.
        kind: how the command line parses the text, where the type of the default does not decide it: "count"
            (an integer of at least 1), "bytes" (500MB, 2GiB), "folder", "file".
        metavar: placeholder in `--help`, e.g. "NAME".
    """
    metadata = {"help": description, "choices": tuple(choices), "kind": kind, "metavar": metavar}
    return field(default=default, metadata=metadata)


def options_of(kind: type[Any]) -> list[Field[Any]]:
    """The fields of a dataclass that `option` declares, in order."""
    # Other fields of the class have no such metadata, and are no options.
    return [item for item in fields(kind) if "choices" in item.metadata]


def split_options(function: str, options: Mapping[str, Any], *kinds: type[Any]) -> list[dict[str, Any]]:
    """Sort the keyword arguments of a function by the options dataclass that declares them.

    Arguments:
        function: name of the function, for the message.
        options: its keyword arguments.
        kinds: dataclasses of options, which share no field name.

    Returns:
        The keyword arguments of each of `kinds`, in order.

    Raises:
        TypeError: for a keyword that no dataclass declares; names the nearest one.
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
        own_parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        options = [option_field for kind in kinds for option_field in options_of(kind)]
        option_parameters = [
            inspect.Parameter(
                option_field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if option_field.default is MISSING else option_field.default,
                annotation=option_field.type,
            )
            for option_field in options
        ]
        lines = "\n".join(
            textwrap.fill(
                f"{option_field.name}: {option_field.metadata['help']}",
                110,
                initial_indent=" " * 4,
                subsequent_indent=" " * 8,
            )
            for option_field in options
        )
        # inspect.signature, and with it help() and IPython, reads __signature__ before the code.
        parameters = [*own_parameters, *option_parameters]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nKeyword Args:\n{lines}\n"
        return function

    return decorate


@dataclass(frozen=True)
class RunOptions:
    """Where a plan is computed (threads, processes or a cluster), and how progress is reported.

    These options are part of no key.
    """

    cluster: str | None = option(
        None,
        "Address of a Dask scheduler, such as tcp://127.0.0.1:8786; default threads of this process.",
        metavar="ADDRESS",
    )
    workers: int = option(
        0,
        "Number of worker processes on this machine, with one GPU each where there are GPUs; 0 and 1: none.",
        metavar="N",
    )
    progress: bool = option(True, "Show a progress bar on stderr.")
    log: str | Path | None = option(
        None,
        "File to which a JSON line is written for every stored segment: tokens, bytes, rate, time left.",
        kind="file",
    )

    def __post_init__(self) -> None:
        # store.arrays imports numpy, and `--help`, which imports this module, must start without it.
        from ..store.arrays import require_flag

        require_flag(self.progress, "progress")

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments of `pipeline.run`."""
        return {
            "cluster": self.cluster,
            "workers": self.workers,
            "quiet": not self.progress,
            "log": self.log,
        }
