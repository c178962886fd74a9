"""What every workflow is: settings, a graph of stages, and ways to show what came out.

Border: composes nodes and hands them to the pipeline; computes nothing itself.

A workflow answers one question about a model. Its settings are a frozen dataclass whose defaults run offline
on the specimen; building it touches no weights, so that `mizarr explain` can print the whole graph.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .. import __version__
from ..store.digest import digest
from ..store.errors import ConfigError, nearest

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from ..pipeline.nodes import ResultNode
    from ..stages.forward.model import Model
    from ..store import Store
    from .report import Element

__all__ = ["Workflow", "read_settings", "setting"]


def setting(default: Any, description: str) -> Any:
    """A field of a settings dataclass: its default, and one line on what it does."""
    return dataclasses.field(default=default, metadata={"help": description})


class Workflow:
    """A question, the graph that answers it, and, once `run`, the answer."""

    name: ClassVar[str]
    question: ClassVar[str]
    settings_type: ClassVar[type[Any]]

    settings: Any
    nodes: Mapping[str, ResultNode]
    """What is computed, by name; the graph below hangs on their inputs."""
    store: Store | None = None
    """Where the results lie, once `run`."""

    def __init__(self, settings: Any, model: Model | None = None) -> None:
        """model: a loaded one to use in place of the one `settings` names."""
        self.settings = settings
        self._results: dict[str, xr.Dataset] = {}
        self._keys: dict[str, str] = {}
        self._seconds = 0.0

    def run(self, store: Store, **options: Any) -> Self:
        """Compute what is not stored yet and open the results.

        options: those of `pipeline.run` (cluster, threads, memory, quiet).
        """
        from ..pipeline import run

        run(self.nodes.values(), store, **options)
        self.store = store
        self._results = {name: node.open(store) for name, node in self.nodes.items()}
        keys = {name: node.key(store) for name, node in self.nodes.items()}
        self._keys = {name: key.digest for name, key in keys.items() if key is not None}
        told = (note for key in self._keys.values() for note in store.provenance(key))
        self._seconds = sum(note.get("seconds", 0.0) for note in told)
        return self

    def result(self, name: str) -> xr.Dataset:
        """One of the results, lazy and labelled; ConfigError before `run`, or for a name there is not."""
        if not self._results:
            raise ConfigError(f"{self.name} has not run yet; call .run(store) first")
        if name not in self._results:
            near = nearest(name, self._results)
            raise ConfigError(
                f"{self.name} has no result {name!r}; expected one of {', '.join(self._results)}"
                + (f", nearest is {near!r}" if near else "")
            )
        return self._results[name]

    @property
    def caution(self) -> str:
        """What stands on every answer about a model whose layout was trusted; empty for all others."""
        from ..stages.forward.files import TRUSTED

        subject = getattr(self, "subject", None)
        names = (getattr(self.settings, "model", ""), "" if subject is None else subject.files.name)
        name = next((name for name in names if name.endswith(TRUSTED)), None)
        return "" if name is None else f"{name}: not checked against transformers"

    @property
    def footer(self) -> str:
        """Which results a figure was drawn from."""
        keys = " · ".join(f"{name} {key[:12]}" for name, key in self._keys.items())
        caution = f" · {self.caution}" if self.caution else ""
        return f"mizarr {__version__} · {self.name} · {keys}{caution}"

    def header(self) -> dict[str, Any]:
        """What every JSON document starts with: question, settings, the keys of the results, and how long
        they took when they were computed."""
        return {
            "workflow": self.name,
            "question": self.question,
            "settings": dataclasses.asdict(self.settings),
            **({"caution": self.caution} if self.caution else {}),
            "provenance": {"mizarr": __version__, "keys": self._keys},
            "total_time_secs": round(self._seconds, 3),
        }

    def figure(self, path: Path, draw: Callable[[], Figure]) -> Path:
        """`draw()` as a PNG at `path`, unless the file there was drawn from the same results."""
        from . import figures

        recipe = digest("figure", figures.DRAWING, path.name, dataclasses.asdict(self.settings), self._keys)
        if not is_drawn(path, recipe):
            figures.save(draw(), path, recipe=recipe, footer=self.footer)
        return path

    def tables(self) -> list[Table]:
        """What came out, for a terminal."""
        raise NotImplementedError

    def draw(self, folder: Path) -> list[Path]:
        """What came out, as PNG files in `folder`; files drawn from the same results are kept."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """What came out as plain JSON values, with the settings and the keys of the results."""
        raise NotImplementedError

    def elements(self) -> list[Element]:
        """What came out, for a page: the tables, unless a workflow has more to look into. Figures and how
        it all was made are added by the page itself (report/DESIGN.md)."""
        from .report import from_rich

        return [from_rich(table) for table in self.tables()]

    def report(self, path: str | Path) -> Path:
        """One self-contained HTML page at `path`, to be opened offline; a page of the same results is kept.

        Raises ConfigError for a path that cannot become a file.
        """
        from .report.page import write

        return write(self, Path(path))

    def render(self, console: Console, folder: Path | None = None) -> list[Path]:
        """Print the tables, and write figures into `folder` unless it is None; returns the files."""
        if self.caution:
            console.print(self.caution, style="bold red", highlight=False)
        for table in self.tables():
            # Rich folds titles to the width of the table, which may be much narrower than the terminal.
            title, caption, table.title, table.caption = table.title, table.caption, None, None
            console.print(title, style="bold", highlight=False)
            console.print(table)
            console.print(f"[dim]{caption}[/dim]\n" if caption else "", highlight=False)
        return [] if folder is None else self.draw(folder)


def is_drawn(path: Path, recipe: str) -> bool:
    """Whether the PNG at `path` says in its metadata that this recipe made it; needs no imaging library."""
    try:
        with path.open("rb") as file:
            return recipe.encode() in file.read(4096)
    except FileNotFoundError:
        return False


def read_settings(kind: type[Any], name: str, given: Mapping[str, Any]) -> Any:
    """A settings dataclass from `name=value` pairs as the command line or JSON has them.

    Lists become tuples. Raises ConfigError for an unknown setting (with the nearest name) and a value of the
    wrong type; what a value may be, the dataclass itself checks.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            near = nearest(key, fields)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(fields)}"
            raise ConfigError(f"workflow {name!r} has no setting {key!r}; {hint}")
        values[key] = _as(hints[key], value, key)
    return kind(**values)


def _as(hint: Any, value: Any, key: str) -> Any:
    """`value` as the annotation says; an int is taken for a float, a list or a single value for a tuple."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            try:
                return _as(option, value, key)
            except ConfigError:
                continue
    elif hint is type(None):
        if value is None:
            return None
    elif origin is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, (list, tuple)):
            return tuple(_as(inner, item, key) for item in value)
        return (_as(inner, value, key),)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    readable = str(hint).removeprefix("<class '").removesuffix("'>")
    raise ConfigError(f"expected {key} to be {readable}, found {value!r} ({type(value).__name__})")
