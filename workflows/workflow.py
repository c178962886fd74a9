"""What every workflow is: settings, a graph of stages, and ways to show what came out.

Border: composes nodes and hands them to the pipeline; computes nothing itself.

A workflow answers one question about a model. Its settings are a frozen dataclass whose defaults run offline
on the specimen; building it touches no weights, so that `mizarr explain` can print the whole graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..stages.extras import is_installed, require
from ..store.arrays import as_path
from ..store.digest import digest
from ..store.errors import ConfigError, nearest
from ..store.upkeep.questions import note_question
from ..store.version import __version__
from .report.reported import NO_CLAIM
from .settings import as_given
from .subject import Need, Subject

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console
    from rich.table import Table

    from ..pipeline.nodes import ResultNode
    from ..stages.forward.models.model import Model
    from ..stages.forward.runs.experiment import Experiment
    from ..store import Store
    from .claim import Claim
    from .settings import ModelSettings
    from .views import Findings, View

__all__ = ["ModelWorkflow", "Nodes", "Workflow", "loaded"]

Nodes = dict[str, "ResultNode"]
"""What a question computes: nodes by the names of their results."""


class Workflow:
    """A question, the graph that answers it, and, once `run`, the answer."""

    name: ClassVar[str]
    question: ClassVar[str]
    settings_type: ClassVar[type[Any]]

    descriptive: ClassVar[str] = ""
    """What it describes, of a question that makes no causal claim and has no `Findings`: one sentence."""

    needs: ClassVar[Need] = "any model"
    """What a model must have for the question to make sense."""

    extra: ClassVar[str] = ""
    """The optional part without which it cannot be computed (stages/extras.py); empty for none."""

    settings: Any
    nodes: Nodes
    """What is computed, by name; the graph below hangs on their inputs."""
    store: Store | None = None
    """Where the results lie, once `run`."""

    def __init__(self, settings: Any, model: Model | None = None) -> None:
        """model: a loaded one to use in place of the one `settings` names."""
        self.settings = settings
        self._results: dict[str, xr.Dataset] = {}
        self._keys: dict[str, str] = {}
        self._seconds = 0.0
        self._memory: dict[str, int] = {}

    def run(self, store: Store, **options: Any) -> Self:
        """Compute what is not stored yet and open the results.

        options: those of `pipeline.run` (cluster, workers, threads, memory, quiet).
        Raises MissingExtra, before anything is computed, where an optional part is missing.
        """
        from ..pipeline import run

        if self.extra:
            self.require(self.extra, store)
        if first := self.first_nodes():
            run(first.values(), store, **options)
        self.settle(store)
        run(self.nodes.values(), store, **options)
        self.open_results(store)
        note_question(store, self.name, self.model_name, self._chosen_settings(), self._keys)
        return self

    def open_results(self, store: Store) -> Self:
        """Open the results of all nodes, which are stored."""
        from ..pipeline.memory import highest_peaks
        from ..pipeline.nodes import one_look

        self.store = store
        with one_look():
            self._results = {name: node.open(store) for name, node in self.nodes.items()}
            keys = {name: node.key(store) for name, node in self.nodes.items()}
        self._keys = {name: key.digest for name, key in keys.items() if key is not None}
        told = [note for key in self._keys.values() for note in store.provenance(key)]
        self._seconds = sum(note.get("seconds", 0.0) for note in told)
        self._memory = highest_peaks(told)
        return self

    @property
    def model_name(self) -> str:
        """The model that the question is about, as it was named; "" where it is about none."""
        subject = self._subject
        return str(getattr(self.settings, "model", "") or "") if subject is None else subject.files.name

    @property
    def _subject(self) -> Subject | None:
        subject: Subject | None = getattr(self, "subject", None)
        return subject

    def _chosen_settings(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as plain values, without the model and the device."""
        given = as_given(self.settings)
        default = as_given(type(self.settings)())
        return {
            name: value
            for name, value in given.items()
            if name not in ("model", "device") and value != default[name]
        }

    def first_nodes(self) -> Nodes:
        """Nodes whose results decide which of the others are computed at all; `run` computes them first."""
        return {}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """Leave out of `nodes` what is not needed, as the stored results of `first_nodes` say.

        refuses: whether to raise ConfigError where nothing is left that is worth showing; one revision of
        several is never refused.
        """
        return self

    def require(self, extra: str, store: Store) -> None:
        """Raise MissingExtra where an optional part is missing and something is left to compute."""
        from ..pipeline import plan

        if not is_installed(extra) and not plan(self.nodes.values(), store).is_cached:
            require(extra, self.name if extra == self.extra else f"drawing the figures of {self.name}")

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
        from ..stages.forward.models.files import TRUSTED

        names = (getattr(self.settings, "model", ""), self.model_name)
        name = next((name for name in names if name.endswith(TRUSTED)), None)
        return "" if name is None else f"{name}: not checked against transformers"

    @property
    def trained_with_help(self) -> str:
        """What stands on every answer about a model whose training asked something of its inside; empty for
        all others."""
        subject = self._subject
        told = "" if subject is None else subject.files.trained_with_help
        return f"{subject.name}: {told}" if subject is not None and told else ""

    @property
    def footer(self) -> str:
        """Which results a figure was drawn from, and what a reader must know of the model."""
        keys = " · ".join(f"{name} {key[:12]}" for name, key in self._keys.items())
        told = (f"mizarr {__version__}", self.name, keys, self.caution, self.trained_with_help)
        return " · ".join(filter(None, told))

    @property
    def spoken(self) -> tuple[str, ...]:
        """What figures show beside settings and results: labels that people gave, which are in no key."""
        return ()

    def header(self) -> dict[str, Any]:
        """What every JSON document starts with: question, settings, the keys of the results, and how long
        they took when they were computed, in how much memory."""
        return {
            "workflow": self.name,
            "question": self.question,
            "settings": as_given(self.settings),
            **({"descriptive": self.descriptive} if self.descriptive else {}),
            **({"caution": self.caution} if self.caution else {}),
            **({"trained_with_help": self.trained_with_help} if self.trained_with_help else {}),
            "provenance": {"mizarr": __version__, "keys": self._keys},
            "total_time_secs": round(self._seconds, 3),
            "peak_memory_bytes": self._memory,
        }

    # -- the claims

    claim_sources: tuple[str, ...] = ()
    """Names of the results that the claims are read from; empty for all."""

    @property
    def not_claimed(self) -> str:
        """Why nothing is claimed, in a sentence; empty where something is."""
        return ""

    def claims(self) -> Iterable[Claim]:
        """The claims, the most important first. A question makes claims where it defines this method."""
        raise NotImplementedError

    def claims_caption(self) -> str:
        """How the causes of the claims were chosen, in a sentence."""
        return ""

    @cached_property
    def findings(self) -> Findings:
        """The claims as a view, or the reason why nothing is claimed."""
        from .views import Findings

        if self.not_claimed:
            return self.unclaimed()
        sources = self.claim_sources or tuple(self.nodes)
        return Findings.of(*self.claims(), caption=self.claims_caption(), sources=sources)

    def unclaimed(self) -> Findings:
        """The view that gives the reason why nothing is claimed."""
        from .views import Findings

        return Findings.none(self.not_claimed, self.claim_sources or tuple(self.nodes))

    @property
    def makes_claims(self) -> bool:
        """Whether the answer begins with claims."""
        return type(self).claims is not Workflow.claims

    # -- the answer

    def views(self) -> Iterable[View]:
        """The answer in the order in which it is read, without its claims (views/).

        A terminal prints the tables, values and notes of it, a page shows all but figures among its results
        and figures after them, `draw` writes figures, a JSON document has what each view says under `json`.
        """
        raise NotImplementedError

    @cached_property
    def shown(self) -> tuple[View, ...]:
        """The claims, if the question makes any, and the views; made once."""
        return (*([self.findings] if self.makes_claims else []), *self.views())

    def figure(self, path: Path, draw: Callable[[], Any]) -> Path:
        """`draw()` as a PNG at `path`, unless the file there was drawn from the same results."""
        from .views import paper

        asked = dataclasses.asdict(self.settings)
        recipe = digest("figure", paper.DRAWING, path.name, asked, self._keys, *self.spoken)
        if not is_drawn(path, recipe):
            paper.save(draw(), path, recipe=recipe, footer=self.footer)
        return path

    def tables(self) -> list[Table]:
        """What came out, for a terminal."""
        return [table for view in self.shown if (table := view.rich()) is not None]

    def draw(self, folder: str | Path) -> list[Path]:
        """What came out, as PNG files in `folder`; files drawn from the same results are kept."""
        from .report.page import check_output
        from .views import Figure

        folder = as_path(folder, "the folder of figures")
        check_output(folder / "figure.png")
        return [
            self.figure(folder / f"{view.name}.png", partial(view.compose, self.footer))
            for view in self.shown
            if isinstance(view, Figure)
        ]

    def to_json(self) -> dict[str, Any]:
        """What came out as plain JSON values, with the settings and the keys of the results."""
        from .views.blocks import listed

        found = self.header()
        for view in self.shown:
            twice = found.keys() & view.json.keys()
            assert not twice, f"{self.name} says {', '.join(sorted(twice))} twice"
            found |= listed(view.json)
        return found

    def __repr__(self) -> str:
        """The question, settings other than the defaults, and the variables of each result."""
        chosen = [
            f"{field.name}={getattr(self.settings, field.name)!r:.80}"
            for field in dataclasses.fields(self.settings)
            if getattr(self.settings, field.name) != field.default
        ]
        lines = [f"{type(self).__name__}({', '.join(chosen)})", f"  {self.question}"]
        for name, result in self._results.items():
            sizes = ", ".join(f"{axis}: {size}" for axis, size in result.sizes.items())
            lines.append(f"  result({name!r}): {', '.join(map(str, result.data_vars))} ({sizes})")
        if not self._results:
            lines.append("  has not run yet")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For a notebook: the question, and every view but those that a figure holds."""
        title = f"<h3>{escape(self.question)}</h3>"
        if not self._results:
            return f"{title}<p>{escape(self.name)} has not run yet.</p>"
        held = {id(panel) for view in self.shown for panel in getattr(view, "panels", ())}
        shown = (view for view in self.shown if view.kind != "data" and id(view) not in held)
        return title + "".join(view._repr_html_() for view in shown)

    def report(self, path: str | Path) -> Path:
        """One self-contained HTML page at `path`, to be opened offline; a page of the same results is kept.

        Raises ConfigError for a path that cannot become a file.
        """
        from .report.page import write

        return write(self, as_path(path, "the page"))

    def render(self, console: Console, folder: Path | None = None) -> list[Path]:
        """Print the tables, and write figures into `folder` unless it is None; returns the files."""
        from .views import paper

        if self.caution:
            console.print(self.caution, style="bold red", highlight=False)
        if self.trained_with_help:
            console.print(f"{self.trained_with_help}.", style="dim", highlight=False, markup=False)
        if self.descriptive:
            console.print(f"{self.descriptive} {NO_CLAIM}", style="dim", highlight=False)
        for table in self.tables():
            # Rich folds titles to the width of the table, which may be much narrower than the terminal.
            title, caption, table.title, table.caption = table.title, table.caption, None, None
            console.print(title, style="bold", highlight=False)
            console.print(paper.fitted(table, console.width))
            console.print(f"[dim]{caption}[/dim]\n" if caption else "", highlight=False)
        return [] if folder is None else self.draw(folder)


class ModelWorkflow(Workflow):
    """A question about one model, which its settings name: `plan` says what is computed.

    subject: the model without its weights.  model: its name, or the loaded one to use instead.
    """

    settings: ModelSettings

    def __init__(self, settings: ModelSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.model: str | Model = model or settings.model
        self.subject = Subject(settings.reference(model))
        self.subject.require(self.needs, self.name)
        self.nodes = self.plan()

    def plan(self) -> Nodes:
        """What is computed, by name. Raises ConfigError for settings that this model cannot meet."""
        raise NotImplementedError

    def on_model(self, experiment: Experiment) -> ResultNode:
        """The node that does an experiment on the model."""
        return self.subject.on_model(experiment)


def loaded(name: str) -> cached_property[xr.Dataset]:
    """An attribute of a workflow: one of its results, in memory."""
    return cached_property(lambda workflow: workflow.result(name).load())


def is_drawn(path: Path, recipe: str) -> bool:
    """Whether the PNG at `path` says in its metadata that this recipe made it; needs no imaging library."""
    try:
        with path.open("rb") as file:
            return recipe.encode() in file.read(4096)
    except FileNotFoundError:
        return False
