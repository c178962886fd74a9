"""Capture: prompts through a model, activations into a store, once.

`capture` is the function users call; `CaptureNode` the same thing as the source of a workflow's graph. Both
are planned without torch: which run it is, what of it is stored, what the rest will cost. A model is loaded
only when something is missing. Asking for more layers or hook points of a stored run computes just those.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....pipeline.context import Selection
from ....pipeline.memory import measured
from ....pipeline.nodes import Estimate, Part, Ports, Status, check_pinned, remembered
from ....pipeline.plan import as_bytes
from ....pipeline.reasons import last_timed
from ....store.digest import digest
from ....store.errors import (
    ConfigError,
    EntryNotFound,
    PlanError,
    PromptError,
    StageError,
    StoreFull,
    nearest,
)
from ....store.keys import RunKey
from ....store.provenance import put_provenance
from ....store.reading.labelled import LabelledEntry
from ....store.records import Record
from ....store.runs.committed import VariableLayer
from ....store.runs.entries import ArraySpec, with_scales
from ....store.runs.prompt_labels import put_prompt_labels
from ....store.runs.selections import View
from ....store.store import require_store
from ....store.upkeep.questions import note_capture
from ....store.upkeep.recoding import PLAINLY
from ...options import RunOptions, split_options, takes_options
from ..architectures.points import LOGITS
from ..hooks.reductions import Encoder, Reduction
from ..hooks.spec import BoundSpec, HookSpec, as_spec, layers_by_variable
from ..models.reference import ModelRef
from ..models.source import ModelSource
from ..runs.duration import PassWork, expected_duration
from ..text.corpora.corpus import Corpus
from ..text.prompts import pack
from .batches import BUFFERS
from .found import Found
from .options import CaptureOptions
from .order import Beside, goes_by_layers, load_for, order_of
from .sizes import ITEMSIZE, VOCABULARY_BYTES, Sizes, array_spec

if TYPE_CHECKING:
    import xarray as xr

    from ....pipeline import Context
    from ....pipeline.nodes import Node
    from ....pipeline.pinned import Pinned
    from ....store import Store
    from ..models.model import Model

WORTH_A_LOOK = 1 << 16
"""Tokens of a new run from which it is asked whether another one begins with the same prompts."""


@takes_options(ModelRef, CaptureOptions, RunOptions)
def capture(
    model: Model | ModelRef | str | Path,
    prompts: Any,
    hooks: HookSpec | str | Sequence[str],
    *,
    store: Store,
    **options: Any,
) -> xr.Dataset:
    """Store activations of prompts at the hook points of a spec, and open them: labelled, lazy.

    What is stored already is not computed again; a killed capture continues where it stopped.

    Args:
        model: a loaded model, or the name of one, which is loaded only if something is missing. A cluster
            and workers load it by its name.
        prompts: texts, token ids, PackedTokens, or a Corpus, whose labels become coordinates.
        hooks: hook points or globs, or a HookSpec.
        store: see `mizarr.open_store`.
        options: see below.

    Raises:
        PromptError, HookPointNotFound, ConfigError, PlanError: for a request that makes no sense, before
            anything is computed.
        StoreFull: when the disk is full; what was committed stays.
    """
    from ....pipeline import run

    require_store(store)
    loading, storing, running = split_options("capture", options, ModelRef, CaptureOptions, RunOptions)
    source, where = ModelSource.of(model, **loading), RunOptions(**running)
    corpus, about = prompts if isinstance(prompts, Corpus) else None, None
    if corpus is not None:
        prompts, about = corpus.read(source.tokenizer, store, quiet=not where.progress)
    node = CaptureNode(source, prompts, hooks, **storing)
    if corpus is not None and about is not None:
        node.require_other_names(about.coords)
        node.take_texts(store, corpus, about)
    with source.just_identified():
        run(node, store, **where.keywords)
    node.note_asked(store)
    if about is not None:
        node.keep_labels(store, about)
    return node.open(store) if about is None else node.open(store).assign_coords(about.coords)


class CaptureNode(Ports):
    """The activations of some prompts at some hook points, as a node of a workflow's graph.

    node["resid_post"] is the port of one variable. Cells: layers, and segments of the token axis.
    """

    inputs: tuple[Node, ...] = ()

    @takes_options(ModelRef, CaptureOptions)
    def __init__(
        self,
        model: Model | ModelRef | ModelSource | str | Path,
        prompts: Any,
        hooks: HookSpec | str | Sequence[str],
        *,
        name: str = "capture",
        **options: Any,
    ) -> None:
        loading, storing = split_options("CaptureNode", options, ModelRef, CaptureOptions)
        self.options = CaptureOptions(**storing)
        self.name = name
        self.source = ModelSource.of(model, **loading)
        self.dtype = self.options.storage_dtype or self.source.dtype
        self._lowered: dict[str, Any] = {}
        self.spec = self._bind(hooks)
        self._require_logits()
        self._require_dictionaries()
        self.order = order_of(self.options.order, self.source.config, self.spec, self.source.name)
        self._over: dict[str, int] = {}
        self.tokens = pack(prompts, self.source.tokenizer, self.source.config, self.source.name)
        for kept in self.spec.keeps:
            selection, reduction = kept.keep.selection, kept.keep.reduction
            if selection is not None:
                selection.check(self.tokens)
            if reduction is not None and reduction.is_of_run:
                every = self.tokens.n_tokens if selection is None else selection.counts(self.tokens).sum()
                self._over[kept.variable] = int(every)
        with_scales(self.specs)
        if self.spec.gradients:
            lengths = self.tokens.row_size.tolist()
            self.spec.require_objective().check(lengths, self.source.config.vocab_size)

    def __repr__(self) -> str:
        return f"CaptureNode({self.source.name}, {self.tokens!r}, {len(self.spec.captures)} captures)"

    def require_other_names(self, labels: Iterable[Any]) -> None:
        """Raise PromptError for labels of prompts that are named as what is captured, or an axis of it."""
        own = {name for spec in self.specs for name in (spec.variable, *spec.dims)}
        if taken := sorted(own.intersection(map(str, labels))):
            raise PromptError(
                f"expected labels by names of their own, found {taken[0]!r}, which is captured; rename it"
            )

    def take_texts(self, store: Store, corpus: Corpus, about: xr.Dataset) -> None:
        """Read the texts of the prompts from their corpus, to be stored with a run that the store lacks.

        corpus: the documents that the tokens of this node were read from.
        about: document numbers and labels [prompt_id], as `Corpus.read` returned them with the tokens.
        """
        if self._find(store) is None:
            self.tokens = corpus.with_texts(self.tokens, about, self.source.tokenizer)

    def note_asked(self, store: Store) -> None:
        """Note beside the stored run that it was captured for its own sake, so that `mizarr ls` lists it."""
        note_capture(store, self._stored(store).entry.path)

    def keep_labels(self, store: Store, about: xr.Dataset) -> None:
        """Keep labels of prompts, coordinates [prompt_id], with the stored run, which opens with them; warn
        where they are too large. They decide no key."""
        entry = self._stored(store).entry
        columns = {str(name): column.values for name, column in about.coords.items()}
        if not put_prompt_labels(store.files, entry.path, columns):
            warnings.warn(
                f"the labels of {self.tokens.n_prompts:,} prompts are too large to be kept with the run; "
                "keep fewer columns, or take them from mizarr.capture, which gives them beside it",
                UserWarning,
                stacklevel=2,
            )

    def _require_logits(self) -> None:
        """Raise ConfigError for logits of what computes its own, and for more of them than there are."""
        config, of_logits = self.source.config, self._of_logits
        if of_logits and not config.is_differentiable:
            raise ConfigError(
                f"expected a model whose LM head is computed here to keep reductions of logits, found "
                f"{self.source.name}, which transformers computes; choose a model of a supported family"
            )
        for each in of_logits:
            if each.ranks > config.vocab_size:
                raise ConfigError(
                    f"expected at most the {config.vocab_size} logits of {self.source.name}, found "
                    f"{each.request!r}; ask for fewer"
                )

    def _require_dictionaries(self) -> None:
        """Raise DictionaryError for a dictionary that does not fit the model."""
        for encoder in self._encoders:
            encoder.resource.require_fit(self.source.config, self.source.name)

    # -- identity ------------------------------------------------------------------------------------------

    @cached_property
    def run_key(self) -> RunKey:
        """Which run this is: model, tokens, interventions; of gradients, what they are of."""
        prompts = self.tokens.digest
        return RunKey(self.source.identity.digest, prompts, self.spec.digest_over(prompts))

    @cached_property
    def cells(self) -> tuple[VariableLayer, ...]:
        """(variable, layer) of every capture."""
        return tuple(kept.cell for kept in self.spec.kept)

    @cached_property
    def specs(self) -> list[ArraySpec]:
        """How each captured variable is stored."""
        variables = {kept.variable: kept for kept in self.spec.kept}
        config, over, ahead = self.source.config, self._over, self.spec.may_look_ahead
        return [
            array_spec(kept, config, self.dtype, over.get(name), looks_ahead=ahead)
            for name, kept in variables.items()
        ]

    @property
    def _sizes(self) -> Sizes:
        return Sizes({spec.variable: spec for spec in self.specs}, self.tokens)

    @property
    def _reductions(self) -> list[Reduction]:
        return [kept.keep.reduction for kept in self.spec.keeps if kept.keep.reduction is not None]

    @property
    def _of_logits(self) -> list[Reduction]:
        """What is kept of the logits."""
        return [reduction for reduction in self._reductions if reduction.is_of_logits]

    @property
    def _encoders(self) -> list[Encoder]:
        """Dictionaries whose features are counted, each once."""
        found = {each.identity: each.encoder for each in self._reductions if each.encoder is not None}
        return list(found.values())

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionaries whose features are counted; the model is looked at when it is loaded."""
        return [encoder.resource for encoder in self._encoders]

    # -- planning ------------------------------------------------------------------------------------------

    def status(self, store: Store) -> Status:
        """Cached when every capture is published; else what is missing. Raises SourceChanged when the model
        is no longer the one this node was made for."""
        cells, found = len(self.cells), self._find(store)
        missing = [cell for cell in self.cells if found is None or not found.is_published(cell)]
        self.source.expect(served=not missing)
        check_pinned(self)
        if found is None:
            return Status(False, "this run is not stored yet", cells)
        reason = f"{_name_cells(missing)} missing" if missing else ""
        return Status(not missing, reason, cells, cells - len(missing))

    def estimate(self, store: Store) -> Estimate:
        """Bytes that missing captures will take on disk, and in buffers while they are computed; seconds."""
        found = self._find(store)
        missing = [cell for cell in self.cells if found is None or not found.is_published(cell)]
        segment = found.entry.segment_tokens if found is not None else self._segment_tokens()
        sizes, tokens = self._sizes, self.tokens.n_tokens
        written = sizes.written(missing, tokens, math.ceil(tokens / segment))
        peak = BUFFERS * sizes.buffer(missing, min(segment, tokens))
        expected = self._duration(store, missing, 1.0) if missing else Estimate()
        return replace(expected, bytes_written=written, peak_bytes=peak)

    def expected_seconds(self, store: Store, times: float = 1.0) -> float | None:
        """Seconds that these captures would take of `times` as many prompts of the kind, if none were stored.

        As long as the newest run of this model with such captures took, or as counted; None where neither is
        known.
        """
        return self._duration(store, self.cells, times).seconds

    def _duration(self, store: Store, missing: Sequence[VariableLayer], times: float) -> Estimate:
        own = json.loads(json.dumps(self.source.identity.request()))

        def fits(note: Mapping[str, Any]) -> bool:
            return bool(note.get("identity") == own and note.get("tokens"))

        tokens, layers = self.tokens.n_tokens * times, self.source.config.num_layers
        deepest = max(layers if layer is None else layer + 1 for _, layer in missing)
        with_logits = any(variable == LOGITS for variable, _ in missing)
        written = self._sizes.stored(missing) * tokens
        work = PassWork(tokens * min(deepest, layers), tokens if with_logits else 0, written)
        last = last_timed(self.cells[0][0], store, fits)
        return expected_duration(self.source, work, last, tokens / last["tokens"] if last else 1.0)

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Captured layers of the first variable that has them; (start, stop) of each segment."""
        if axis == "layer":
            return next(iter(self._layers.values()), [])
        found = self._find(store)
        return [] if found is None else found.segments

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """Stored activations of one variable (or all), of one layer, of one segment."""
        found = self._stored(store)
        layer = selection.get("layer")
        cells = [cell for cell in self.cells if variable in (None, cell[0]) and layer in (None, cell[1])]
        if not cells:
            near = nearest(variable or "", {name for name, _ in self.cells})
            hint = f"; nearest is {near!r}" if near else ""
            raise StageError(f"{self.name} does not capture {variable!r} at layer {layer}{hint}")
        segment = selection.get("segment")
        contents = found.contents(cells, segment)

        def load() -> xr.Dataset:
            return found.open(cells, segment)

        rows = found.n_tokens if segment is None else segment[1] - segment[0]
        content = digest("activations", self.run_key.prompt, found.rows, segment, contents)
        parents = [found.content(cell) for cell in cells]
        return Part(content, load, self._sizes.row_bytes(cells) * rows, parents)

    # -- running -------------------------------------------------------------------------------------------

    def require_workers(self, context: Context) -> None:
        """PlanError for one layer after another, and for a model that other processes cannot load."""
        if self.order == "layer":
            others = "a cluster" if context.cluster is not None else f"{context.workers} workers"
            raise PlanError(
                f'expected one process for order="layer", which reads each weight once, found {others}; '
                "leave out one of them"
            )
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Compute and store what is missing, here or on the workers of a cluster."""
        if (found := self._find(store)) is not None and found.views:
            self._without(found.views).run(store, context)
            return
        # Making an entry waits for the disk many times: a new one is computed for meanwhile.
        with measured() as took, ThreadPoolExecutor(1) as aside:
            model: Model | None = None
            if not context.has_workers and self.status(store).cells_cached < len(self.cells):
                model = self._load(context)  # one that cannot be loaded must leave the store untouched
            begun = self._begun(store)
            if begun is None:
                self._expect_room(store)
            made = aside.submit(self._made, store, begun)
            may_begin = not context.has_workers and begun is None and not goes_by_layers(self.order, model)
            planned = self._planned(store) if may_begin else None
            total = 0
            if planned is not None:
                held = model or self._load(context)
                with suppress(_Outrun):
                    total = self._harvest(
                        held, planned, context, lambda: _expect_same(made.result(), planned)
                    )
            entry = made.result()
            if begun is not None:
                entry.take_over(begun, self.cells)
                self._expect_room(store)
            missing = entry.missing(self.cells)
            if context.has_workers:
                total = sum(len(entry.segments[n]) for n in missing)
                segments = [{"segment": n} for n in missing]
                context.map(
                    harvest_segment, self._for_workers(context), store, segments, needs=self.source.needs
                )
            elif missing:
                model = model or self._load(context)
                total += self._harvest(model, entry, context)
            order = {"order": "layer" if goes_by_layers(self.order, model) else "batch"}
            note = {**self.provenance(), **order, **self._lowered, "tokens": total, **took()}
            noted = aside.submit(put_provenance, store.files, entry.path, note)
            entry.publish(self.cells)
            noted.result()

    def _load(self, context: Context) -> Model:
        limit = as_bytes(self.options.memory_limit)
        return load_for(self.source, self.order, limit, self._beside(), context.progress.say)

    def _beside(self) -> Beside:
        itemsize, longest = ITEMSIZE[self.source.dtype], int(self.tokens.row_size.max(initial=0))
        of_place = self.source.config.bytes_per_token(itemsize) + VOCABULARY_BYTES * bool(self._of_logits)
        of_pass = of_place * max(self.options.batch_tokens, longest)
        length = min(self._segment_tokens(), self.tokens.n_tokens)
        by_layer: dict[int | None, list[VariableLayer]] = {}
        for cell in self.cells:
            by_layer.setdefault(cell[1], []).append(cell)
        sizes = self._sizes
        of_layer = max(sizes.buffer(cells, length) for cells in by_layer.values())
        return Beside(of_pass, BUFFERS * sizes.buffer(self.cells, length), BUFFERS * of_layer)

    def _without(self, views: Mapping[str, View]) -> CaptureNode:
        """The same without what can be seen in stored arrays already."""
        spec = self.spec.only(kept for kept in self.spec.kept if kept.variable not in views)
        rest = CaptureNode.__new__(CaptureNode)
        kept = {name: value for name, value in vars(self).items() if name not in ("cells", "specs")}
        vars(rest).update(kept, spec=spec)
        return rest

    def _harvest(
        self, model: Model, entry: LabelledEntry, context: Context, stands: Callable[[], Any] = lambda: None
    ) -> int:
        """Compute and commit what is missing, in this process; returns the tokens computed."""
        from .backoff import BatchSize
        from .harvest import harvest
        from .layer_major import harvest_by_layers

        total = sum(len(entry.segments[n]) for n in entry.missing(self.cells))
        task = context.progress.task(self.name, total=total, unit="tokens")
        batch = BatchSize(self.options.batch_tokens, context.progress.say)
        try:
            if goes_by_layers(self.order, model):
                return harvest_by_layers(model, entry, self.spec, batch=batch, advance=task.advance)
            model.require_all_weights('a capture with order="batch"')
            return harvest(model, entry, self.spec, batch=batch, advance=task.advance, stands=stands)
        finally:
            self._lowered |= batch.note()

    def open(self, store: Store) -> xr.Dataset:
        """The stored activations, labelled and lazy; EntryNotFound while something is missing."""
        return self._stored(store).open(self.cells)

    def records(self, store: Store) -> tuple[LabelledEntry, list[tuple[VariableLayer, Record]]]:
        """The run that holds the captures, and what is published of each: its own record, or that of the
        array it is seen in; EntryNotFound while something is missing."""
        found = self._stored(store)
        told = [(cell, found.record(cell)) for cell in self.cells]
        return found.entry, [(cell, record) for cell, record in told if record is not None]

    def provenance(self) -> dict[str, Any]:
        """What a person will want to know, and no key holds."""
        objective, prompts = self.spec.objective, self.run_key.prompt
        return {
            **self.source.provenance(),
            "hooks": self.spec.canonical(),
            **({} if objective is None else {"gradient_of": objective.canonical(prompts)}),
            **({"dictionaries": [each.name for each in encoders]} if (encoders := self._encoders) else {}),
            "batch_tokens": self.options.batch_tokens,
        }

    # -- helpers -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a worker a node is names and digests: whoever needs ids or weights there reads them from
        # disk.
        return {**vars(self), "tokens": None, "run_key": self.run_key}

    def _bind(self, hooks: HookSpec | str | Sequence[str]) -> BoundSpec:
        spec = as_spec(hooks).bind(self.source.config.hook_points, self.source.name, stored=True)
        if not spec.captures:
            raise StageError(
                "expected a HookSpec that captures something, found none; add "
                ".capture('blocks.*.hook_resid_post')"
            )
        if spec.gradients:
            self.source.config.require_gradients()
            spec.require_objective()
            for capture in spec.captures:
                if not capture.is_gradient:
                    raise StageError(
                        f"expected gradients alone, which are a run of their own, found {capture.name!r} "
                        f"beside {spec.gradients[0].name!r}; capture activations by a HookSpec of their own"
                    )
        return spec

    @cached_property
    def _layers(self) -> dict[str, list[int]]:
        """Captured layers of each variable that has a layer axis."""
        found = layers_by_variable(self.spec.kept)
        return {
            name: sorted(n for n in held if n is not None) for name, held in found.items() if None not in held
        }

    @remembered
    def _find(self, store: Store) -> Found | None:
        """This run in the store, or a larger one that holds all these prompts; None when neither is there."""
        entry = self._entry(store)
        found = None if entry is None else Found(entry, views=self._views(entry))
        if found is not None and all(map(found.is_published, self.cells)):
            return found
        if self.tokens is not None and self._has_one_token_axis:
            larger = store.find_prompts(self.run_key, self.tokens, self.dtype, self.cells)
            if larger is not None:
                return Found(*larger)
        return found

    @property
    def _has_one_token_axis(self) -> bool:
        """Whether prompts can be picked from a larger run by one choice of tokens; what is kept of a run as a
        whole is of that one."""
        axes = {spec.packed for spec in self.specs}
        return "segment" not in axes and len(axes - {"pair", "square", "prompt_id"}) < 2

    def _views(self, entry: LabelledEntry) -> dict[str, View]:
        """The variables of a selection that are not stored, and of which the run has all tokens."""
        views: dict[str, View] = {}
        for name in dict.fromkeys(kept.variable for kept in self.spec.keeps):
            kept = [each for each in self.spec.keeps if each.variable == name]
            if all(entry.record(*each.cell) for each in kept):
                continue
            selection, reduction = kept[0].keep.selection, kept[0].keep.reduction
            if (
                reduction is None
                and selection is not None
                and all(entry.record(*each.capture.cell) for each in kept)
            ):
                views[name] = kept[0].capture.variable, selection
        return views

    def _entry(self, store: Store) -> LabelledEntry | None:
        try:
            return store.entry(self.run_key, self.dtype)
        except EntryNotFound:
            return None

    def _stored(self, store: Store) -> Found:
        found = self._find(store)
        if found is None:
            raise EntryNotFound(f"these activations are not stored in {store.address}; run the capture first")
        return found

    def _begun(self, store: Store) -> LabelledEntry | None:
        """A run that holds the beginning of this one, as a corpus that has grown since has; looked for where
        that is worth a look at every run."""
        if self.tokens.n_tokens < WORTH_A_LOOK or self._entry(store) is not None:
            return None
        return store.find_start(self.run_key, self.tokens, self.dtype)

    def _expect_room(self, store: Store) -> None:
        """Raise StoreFull where the disk has less room than what is missing will take."""
        entry, sizes, tokens = self._entry(store), self._sizes, self.tokens.n_tokens
        if entry is None:
            needed = sizes.written(self.cells, tokens, math.ceil(tokens / self._segment_tokens()))
        else:
            missing = entry.missing(self.cells).items()
            needed = sum(sizes.written(cells, len(entry.segments[n]), 1) for n, cells in missing)
        free = store.files.free_bytes
        if free is not None and needed > free:
            raise StoreFull(
                f"expected {needed} bytes of room in {store.address} for what is missing, found {free}; "
                "capture fewer hook points or prompts, or free some space (mizarr gc)"
            )

    def _made(self, store: Store, begun: LabelledEntry | None = None) -> LabelledEntry:
        tokenizer = self.source.tokenizer
        about = {
            "model": self.source.name,
            **({"tokenizer": tokenizer.digest} if tokenizer is not None else {}),
        }
        if tokenizer is not None and store.vocabulary(tokenizer.digest) is None:
            store.put_vocabulary(tokenizer.digest, tokenizer.vocabulary)
        return store.create_entry(
            self.run_key,
            self.tokens,
            self.specs,
            segment_tokens=self._segment_tokens() if begun is None else begun.segment_tokens,
            attrs=about,
            codec=self._codec(begun),
        )

    def _codec(self, begun: LabelledEntry | None) -> str:
        """Of arrays that are new: as was asked, or as the run has them that this one goes on from."""
        if self.options.codec is not None or begun is None:
            return "" if self.options.codec in (None, PLAINLY) else str(self.options.codec)
        names = begun.specs.keys() & {spec.variable for spec in self.specs}
        return next((found for name in sorted(names) if (found := begun.layout(name).codec)), "")

    def _planned(self, store: Store) -> LabelledEntry | None:
        """The entry as it will be, where there is none yet."""
        if self._entry(store) is not None:
            return None
        return store.planned_entry(self.run_key, self.tokens, self.specs, self._segment_tokens())

    def _segment_tokens(self) -> int:
        if self.options.segment_tokens is not None:
            return self.options.segment_tokens
        width = self.source.config.hidden_size
        of_run = all(spec.packed == "segment" for spec in self.specs)
        return self._sizes.segment_tokens(self.cells, width, self.options.buffer_bytes, of_run=of_run)

    def _for_workers(self, context: Context) -> Any:
        import torch

        job = (
            self.name,
            self.source.for_workers(),
            self.run_key,
            self.dtype,
            self.spec,
            self.options.batch_tokens,
        )
        shared = context.workers if context.cluster is None else 1
        return WorkerJob(*job, max(1, torch.get_num_threads() // shared))


class _Outrun(Exception):
    """Somebody else has just made the entry, with segments of another length."""


def _expect_same(made: LabelledEntry, planned: LabelledEntry) -> None:
    if made.segment_tokens != planned.segment_tokens:
        raise _Outrun


@dataclass(frozen=True)
class WorkerJob:
    """What a worker needs to know to compute a segment: names and digests, no arrays."""

    name: str
    source: ModelSource
    run: RunKey
    dtype: str
    spec: BoundSpec
    batch_tokens: int
    threads: int
    """Of torch, as in the process that asks, as some sums are split over threads, and another number gives
    other last bits; workers of one machine share them."""


def harvest_segment(job: WorkerJob, store: Store, cell: Mapping[str, int]) -> None:
    """Compute and commit one segment; a Dask task."""
    import torch

    from .backoff import BatchSize
    from .harvest import harvest

    torch.set_num_threads(job.threads)
    entry, model = store.entry(job.run, job.dtype), job.source.load()
    model.require_all_weights("segments by themselves, on a cluster")
    batch = BatchSize(job.batch_tokens)
    harvest(model, entry, job.spec, batch=batch, segments=[cell["segment"]])


def _name_cells(cells: Sequence[VariableLayer]) -> str:
    """Cells for people: "layers 6-11 of resid_post"."""
    by_variable: dict[str, list[int | None]] = {}
    for variable, layer in cells:
        by_variable.setdefault(variable, []).append(layer)
    parts = []
    for variable, layers in by_variable.items():
        numbers = [layer for layer in layers if layer is not None]
        span = (
            f"{numbers[0]}-{numbers[-1]}"
            if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
            else ", ".join(map(str, numbers))
        )
        parts.append(f"layer{'s' if len(numbers) > 1 else ''} {span} of {variable}" if numbers else variable)
    return "; ".join(parts)
