"""Base classes of workflows: settings, a graph of stages, and the views of its results.

A workflow answers one question about a model. Its settings are a frozen dataclass whose defaults run offline
on the specimen. Building a workflow reads no weights, so that `mizarr explain` can print the whole graph.

Border: builds nodes and passes them to the pipeline; computes nothing itself.
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
from .general_facts import GENERAL_NODE
from .report.reported import NO_CLAIM
from .settings import as_given
from .subject import FEWEST_KNOWN, Need, Subject

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
"""Nodes of a workflow's graph, by the names of their results."""


class Workflow:
    """Base class of workflows: a question about a model, the graph of stages that answers it and, after
    `run`, the results."""

    name: ClassVar[str]
    """Name of the workflow, as in `WORKFLOWS` and on the command line."""
    question: ClassVar[str]
    """The question that the workflow answers, in one sentence."""
    settings_type: ClassVar[type[Any]]
    """Dataclass of the workflow's settings."""

    descriptive: ClassVar[str] = ""
    """For a workflow that makes no causal claims: one sentence on what its results describe; else empty."""

    needs: ClassVar[Need] = "any model"
    """What the workflow needs of a model, such as "attention"."""

    extra: ClassVar[str] = ""
    """Optional dependency that the workflow needs to compute (stages/extras.py); empty for none."""

    settings: Any
    """Settings of this instance."""
    nodes: Nodes
    """Nodes of the results, by name; their inputs form the rest of the graph."""
    store: Store | None = None
    """Store of the results; None before `run`."""

    def __init__(self, settings: Any, model: Model | None = None) -> None:
        """Create a workflow without running it; model: a loaded model to use instead of the named one."""
        self.settings = settings
        self._results: dict[str, xr.Dataset] = {}
        self._keys: dict[str, str] = {}
        self._seconds = 0.0
        self._memory: dict[str, int] = {}

    def run(self, store: Store, **options: Any) -> Self:
        """Compute the results that are not stored yet, and open all results.

        Arguments:
            store: store to read and write.
            options: options of `pipeline.run` (cluster, workers, threads, memory, quiet).

        Raises:
            MissingExtra: an optional dependency is missing; raised before any computation.
        """
        from ..pipeline import run

        if self.extra:
            self.require(self.extra, store)
        if fact_nodes := self.fact_nodes():
            run(fact_nodes.values(), store, **options)
            self.choose_facts(store)
        # Their results tell which other nodes are needed: a question about facts that the model does not know
        # runs no controls.
        if first_nodes := self.first_nodes():
            run(first_nodes.values(), store, **options)
        self.settle(store)
        run(self.nodes.values(), store, **options)
        self.open_results(store)
        note_question(store, self.name, self.model_name, self._chosen_settings(), self._keys)
        return self

    def open_results(self, store: Store) -> Self:
        """Open the stored results of all nodes, which must have been computed."""
        from ..pipeline.memory import highest_peaks
        from ..pipeline.nodes import one_look

        self.store = store
        with one_look():
            # `one_look`: keys are looked up once for all nodes, as many of them share their inputs.
            self._results = {name: node.open(store) for name, node in self.nodes.items()}
            keys = {name: node.key(store) for name, node in self.nodes.items()}
        self._keys = {name: key.digest for name, key in keys.items() if key is not None}
        notes = [note for key in self._keys.values() for note in store.provenance(key)]
        self._seconds = sum(note.get("seconds", 0.0) for note in notes)
        self._memory = highest_peaks(notes)
        return self

    @property
    def model_name(self) -> str:
        """Name of the workflow's model; "" for a workflow without one."""
        subject = self._subject
        return str(getattr(self.settings, "model", "") or "") if subject is None else subject.files.name

    @property
    def _subject(self) -> Subject | None:
        subject: Subject | None = getattr(self, "subject", None)
        return subject

    def _chosen_settings(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as plain values; without model and device."""
        values = as_given(self.settings)
        default = as_given(type(self.settings)())
        return {
            name: value
            for name, value in values.items()
            if name not in ("model", "device") and value != default[name]
        }

    def fact_nodes(self) -> Nodes:
        """Node that ranks the answers of general facts, if it is not known yet which of them the model knows;
        `run` computes it before all others."""
        return {}

    def choose_facts(self, store: Store) -> None:
        """Plan the nodes anew for those general facts that the model knows, by the stored result of
        `fact_nodes`."""

    def first_nodes(self) -> Nodes:
        """Nodes whose results decide which other nodes there are; `run` computes them first."""
        return {}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """Add to `nodes` what the stored results of `first_nodes` ask for, and remove what they make
        unnecessary.

        Arguments:
            store: the store of the results.
            refuses: whether to raise ConfigError if no meaningful result is left; False for one of several
                revisions.
        """
        return self

    def require(self, extra: str, store: Store) -> None:
        """Raise MissingExtra if an optional dependency is missing and not all results are stored.

        Arguments:
            extra: name of the dependency.
            store: store of the results.
        """
        from ..pipeline import plan

        if not is_installed(extra) and not plan(self.nodes.values(), store).is_cached:
            require(extra, self.name if extra == self.extra else f"drawing the figures of {self.name}")

    def result(self, name: str) -> xr.Dataset:
        """Result of a node by name, as a lazy labelled dataset. Raises ConfigError before `run`, and for an
        unknown name."""
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
        """Warning shown with all results of a model whose layout was trusted without a check; else empty."""
        from ..stages.forward.models.files import TRUSTED

        names = (getattr(self.settings, "model", ""), self.model_name)
        name = next((name for name in names if name.endswith(TRUSTED)), None)
        return "" if name is None else f"{name}: not checked against transformers"

    @property
    def trained_with_help(self) -> str:
        """Note shown with all results of a model whose training loss included its internals; else empty."""
        subject = self._subject
        note = "" if subject is None else subject.files.trained_with_help
        return f"{subject.name}: {note}" if subject is not None and note else ""

    @property
    def knowledge(self) -> str:
        """Sentence on how many of the general facts the model knows; empty if it was not asked about any."""
        return ""

    @property
    def summary(self) -> str:
        """Sentence with the main numbers of the results that claims do not state; may be empty."""
        return ""

    @property
    def footer(self) -> str:
        """Footer of figures: version, workflow, keys of the results, and notes on the model."""
        keys = " · ".join(f"{name} {key[:12]}" for name, key in self._keys.items())
        parts = (f"mizarr {__version__}", self.name, keys, self.caution, self.trained_with_help)
        return " · ".join(filter(None, parts))

    @property
    def spoken(self) -> tuple[str, ...]:
        """Texts drawn in figures that are neither in settings nor in results, such as feature labels by
        people; figures with other ones are drawn anew."""
        return ()

    def header(self) -> dict[str, Any]:
        """First fields of every JSON document: question, settings, keys of the results, and time and memory
        of their computation."""
        # A workflow without nodes, such as token_positions, has its answer at once.
        has_run = bool(self._results) or not self.nodes
        return {
            "workflow": self.name,
            "question": self.question,
            "settings": as_given(self.settings),
            **({"descriptive": self.descriptive} if self.descriptive else {}),
            **({"caution": self.caution} if self.caution else {}),
            **({"trained_with_help": self.trained_with_help} if self.trained_with_help else {}),
            **({"knowledge": self.knowledge} if self.knowledge else {}),
            **({"summary": summary} if has_run and (summary := self.summary) else {}),
            "provenance": {"mizarr": __version__, "keys": self._keys},
            "total_time_secs": round(self._seconds, 3),
            "peak_memory_bytes": self._memory,
        }

    # -- the claims

    claim_sources: tuple[str, ...] = ()
    """Names of the results that claims are computed from; empty for all."""

    @property
    def not_claimed(self) -> str:
        """Sentence on why nothing is claimed; empty if there are claims."""
        return ""

    def claims(self) -> Iterable[Claim]:
        """Claims about the results, the most important first. Only workflows that make claims override this
        method."""
        raise NotImplementedError

    def claims_caption(self) -> str:
        """Caption of the claims: how their causes were selected, in sentences."""
        return ""

    @cached_property
    def findings(self) -> Findings:
        """View of the claims, or of the reason why nothing is claimed."""
        from .views import Findings

        if self.not_claimed:
            return self.unclaimed()
        sources = self.claim_sources or tuple(self.nodes)
        return Findings.of(*self.claims(), caption=self.claims_caption(), sources=sources)

    def unclaimed(self) -> Findings:
        """View with the reason why nothing is claimed."""
        from .views import Findings

        return Findings.none(self.not_claimed, self.claim_sources or tuple(self.nodes))

    @property
    def makes_claims(self) -> bool:
        """Whether the workflow makes claims, which then come first in its output."""
        return type(self).claims is not Workflow.claims

    # -- the answer

    def views(self) -> Iterable[View]:
        """Views of the results in reading order, without the claims (views/).

        A terminal prints tables, values and notes; a page shows figures after all other views; `draw` writes
        figures; a JSON document contains the `json` of each view.
        """
        raise NotImplementedError

    @cached_property
    def shown(self) -> tuple[View, ...]:
        """The claims, if the workflow makes any, followed by its views; cached."""
        return (*([self.findings] if self.makes_claims else []), *self.views())

    def figure(self, path: Path, draw: Callable[[], Any]) -> Path:
        """Write a figure as PNG, unless the file was drawn from the same results.

        Arguments:
            path: the file.
            draw: returns the figure.
        """
        from .views import paper

        settings = dataclasses.asdict(self.settings)
        recipe = digest("figure", paper.DRAWING, path.name, settings, self._keys, *self.spoken)
        if not is_drawn(path, recipe):
            paper.save(draw(), path, recipe=recipe, footer=self.footer)
        return path

    def tables(self) -> list[Table]:
        """All result tables, formatted for a terminal."""
        return [table for view in self.shown if (table := view.rich()) is not None]

    def draw(self, folder: str | Path) -> list[Path]:
        """Write the figures as PNG files into a folder; files drawn from the same results are kept."""
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
        """The results as plain JSON values, with settings and keys."""
        from .views.blocks import listed

        document = self.header()
        for view in self.shown:
            twice = document.keys() & view.json.keys()
            assert not twice, f"{self.name} says {', '.join(sorted(twice))} twice"
            document |= listed(view.json)
        return document

    def __repr__(self) -> str:
        """The question, settings that differ from the defaults, and the variables of each result."""
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
        """HTML for a notebook: the question and all views; panels that a figure contains are not repeated."""
        title = f"<h3>{escape(self.question)}</h3>"
        if not self._results:
            return f"{title}<p>{escape(self.name)} has not run yet.</p>"
        # By identity, as `==` of views would compare their arrays cell by cell.
        panels = {id(panel) for view in self.shown for panel in getattr(view, "panels", ())}
        shown = (view for view in self.shown if view.kind != "data" and id(view) not in panels)
        return title + "".join(view._repr_html_() for view in shown)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, which can be read offline; a page of the same results is kept.

        Raises:
            ConfigError: no file can be written at the path.
        """
        from .report.page import write

        return write(self, as_path(path, "the page"))

    def render(self, console: Console, folder: Path | None = None) -> list[Path]:
        """Print notes and tables, and write figures.

        Arguments:
            console: console to print to.
            folder: folder of the figures; None to write none.

        Returns:
            Paths of the figures.
        """
        from .views import paper

        if self.caution:
            console.print(self.caution, style="bold red", highlight=False)
        if self.trained_with_help:
            console.print(f"{self.trained_with_help}.", style="dim", highlight=False, markup=False)
        if self.knowledge:
            console.print(self.knowledge, style="dim", highlight=False, markup=False)
        if self.descriptive:
            console.print(f"{self.descriptive} {NO_CLAIM}", style="dim", highlight=False)
        if summary := self.summary:
            console.print(summary, highlight=False, markup=False)
        for table in self.tables():
            # Printed separately: Rich wraps titles to the width of the table, which may be much narrower than
            # the terminal.
            title, caption, table.title, table.caption = table.title, table.caption, None, None
            console.print(title, style="bold", highlight=False)
            console.print(paper.fitted(table, console.width))
            console.print(f"[dim]{caption}[/dim]\n" if caption else "", highlight=False)
        return [] if folder is None else self.draw(folder)


class ModelWorkflow(Workflow):
    """Base class of workflows about one model, which the settings name; subclasses define their nodes in
    `plan`."""

    settings: ModelSettings
    """Settings of this instance."""
    subject: Subject
    """Files, config and tokenizer of the model."""
    model: str | Model
    """Name of the model, or the loaded model to use instead."""

    def __init__(self, settings: ModelSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.model = model or settings.model
        self.subject = Subject(settings.reference(model))
        self.subject.require(self.needs, self.name)
        self.nodes = self._planned()

    def _planned(self) -> Nodes:
        """Nodes of `plan`; if it asked for general facts, also the node that ranks their answers."""
        nodes = self.plan()
        if not self.subject.asks_general:
            return nodes
        return {GENERAL_NODE: self.subject.general_ranks, **nodes}

    def fact_nodes(self) -> Nodes:
        """Node that ranks the answers of general facts, if `plan` asked for them and it is not known yet
        which the model knows."""
        is_open = self.subject.asks_general and self.subject.known_facts is None
        return {GENERAL_NODE: self.nodes[GENERAL_NODE]} if is_open else {}

    def choose_facts(self, store: Store) -> None:
        """Plans the nodes anew for those general facts that the model knows."""
        ranks = self.subject.general_ranks.open(store)["rank"].values
        self.subject.known_facts = (ranks == 0).tolist()
        for name in list(vars(self)):
            # Computed while planning for all general facts.
            if isinstance(getattr(type(self), name, None), cached_property):
                del vars(self)[name]
        self.nodes = self._planned()

    def plan(self) -> Nodes:
        """Nodes of the results, by name. Raises ConfigError for settings that do not fit the model."""
        raise NotImplementedError

    @property
    def knowledge(self) -> str:
        """Sentence on how many of the general facts the model knows; empty if it was not asked about any."""
        known = self.subject.known_facts
        if known is None or not self.subject.asks_general:
            return ""
        count = sum(known)
        asked = "it is asked about these" if count >= FEWEST_KNOWN else "it is asked about all of them"
        return f"{self.subject.name} knows {count} of {len(known)} general facts; {asked}."

    def on_model(self, experiment: Experiment) -> ResultNode:
        """The node that runs an experiment on the model."""
        return self.subject.on_model(experiment)


def loaded(name: str) -> cached_property[xr.Dataset]:
    """Descriptor for a workflow's attribute that holds a result by name, loaded into memory at first
    access."""
    return cached_property(lambda workflow: workflow.result(name).load())


def is_drawn(path: Path, recipe: str) -> bool:
    """Whether a PNG file was drawn by a recipe, which its metadata then contains; needs no imaging library.

    Arguments:
        path: path of the PNG.
        recipe: the recipe.
    """
    try:
        with path.open("rb") as file:
            # The metadata of a PNG precedes its pixels.
            return recipe.encode() in file.read(4096)
    except FileNotFoundError:
        return False
