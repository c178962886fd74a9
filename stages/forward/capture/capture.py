"""Capture: run prompts through a model once, and store the activations.

`capture` is the function users call; `CaptureNode` does the same as the source node of a workflow. Both plan
without torch: the key of the run, which captures are stored, and the cost of the missing ones. The model is
loaded only if something is missing. Adding layers or hook points to a stored run computes only those.
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
from ....store.runs.shards import DTYPES
from ....store.store import require_store
from ....store.upkeep.questions import note_capture
from ....store.upkeep.recoding import PLAINLY
from ...options import RunOptions, split_options, takes_options
from ..architectures.points import LOGITS
from ..hooks.keeps import Keep
from ..hooks.reductions import Encoder, Reduction
from ..hooks.spec import BoundSpec, HookSpec, as_spec, layers_by_variable
from ..models.reference import ModelRef
from ..models.source import ModelSource
from ..runs.duration import PassWork, expected_duration
from ..text.corpora.corpus import Corpus
from ..text.prompts import pack
from .batches import BUFFERS
from .options import CaptureOptions
from .order import WorkingMemory, goes_by_layers, load_for, resolve_order
from .sizes import VOCABULARY_BYTES, Sizes, array_spec
from .stored_run import StoredRun

if TYPE_CHECKING:
    import xarray as xr

    from ....pipeline import Context
    from ....pipeline.nodes import Node
    from ....pipeline.pinned import Pinned
    from ....store import Store
    from ..models.model import Model

WORTH_A_LOOK = 1 << 16
"""Fewest tokens of a new run for which the store is searched for a run that starts with the same prompts."""


@takes_options(ModelRef, CaptureOptions, RunOptions)
def capture(
    model: Model | ModelRef | str | Path,
    prompts: Any,
    hooks: HookSpec | str | Sequence[str],
    *,
    store: Store,
    **options: Any,
) -> xr.Dataset:
    """Store activations of prompts at hook points, and open them as a labelled, lazy Dataset.

    Stored activations are not computed again; a killed capture continues where it stopped.

    Arguments:
        model: a loaded model, or its name. A model given by name is loaded only if something is missing;
            workers and clusters always load it by name.
        prompts: texts, token ids, PackedTokens, or a Corpus, whose labels become coordinates.
        hooks: hook points or globs to capture, or a HookSpec.
        store: store of the activations, from `mizarr.open_store`.
        options: options for loading, storing and running, listed below.

    Raises:
        PromptError, HookPointNotFound, ConfigError, PlanError: for an invalid request, before anything is
            computed.
        StoreFull: when the disk is full; committed segments stay.
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
    """Pipeline node that captures the activations of some prompts at some hook points.

    node["resid_post"] is the output of one variable, for other nodes to read. Stages may read the activations
    by layer, and by segment of the token axis.
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
        """Check the request of a capture; activations are computed when the node runs.

        Arguments:
            model: a loaded model, a reference to one, or its name.
            prompts: texts, token ids or PackedTokens.
            hooks: hook points or globs to capture, or a HookSpec.
            name: name of the node in plans and progress.
            options: options for loading the model and for storing activations.

        Raises:
            PromptError, HookPointNotFound, ConfigError, StageError: for an invalid request.
        """
        loading, storing = split_options("CaptureNode", options, ModelRef, CaptureOptions)
        self.options = CaptureOptions(**storing)
        self.name = name
        self.source = ModelSource.of(model, **loading)
        self.dtype = self.options.storage_dtype or self.source.dtype
        self._lowered: dict[str, Any] = {}
        self.spec = self._bind(hooks)
        self._require_logits()
        self._require_fit()
        # Before the prompts are tokenised, which may take long.
        self.order = resolve_order(self.options.order, self.source.config, self.spec, self.source.name)
        self._over: dict[str, int] = {}
        self.tokens = pack(prompts, self.source.tokenizer, self.source.config, self.source.name)
        for kept_capture in self.spec.keeps:
            selection, reduction = kept_capture.keep.selection, kept_capture.keep.reduction
            if selection is not None:
                selection.check(self.tokens)
                self._require_tokens_to_pool(kept_capture.keep)
            if reduction is not None and reduction.is_of_run:
                n_tokens = self.tokens.n_tokens if selection is None else selection.counts(self.tokens).sum()
                self._over[kept_capture.variable] = int(n_tokens)
        # Called for its error: int8 stores no variable with one number per row.
        with_scales(self.specs)
        if self.spec.gradients:
            lengths = self.tokens.row_size.tolist()
            self.spec.require_objective().check(lengths, self.source.config.n_logits)

    def __repr__(self) -> str:
        return f"CaptureNode({self.source.name}, {self.tokens!r}, {len(self.spec.captures)} captures)"

    def require_other_names(self, labels: Iterable[Any]) -> None:
        """Raise PromptError for a prompt label with the name of a captured variable or of one of its axes.

        Arguments:
            labels: names of the labels.
        """
        reserved = {name for spec in self.specs for name in (spec.variable, *spec.dims)}
        if conflicts := sorted(reserved.intersection(map(str, labels))):
            raise PromptError(
                f"expected label columns with other names than captures and their axes, found "
                f"{conflicts[0]!r}; rename this column"
            )

    def take_texts(self, store: Store, corpus: Corpus, about: xr.Dataset) -> None:
        """Read the texts of the prompts from their corpus, to be stored with a run that the store lacks.

        Arguments:
            store: store that the run may be in.
            corpus: the documents that the tokens of this node were read from.
            about: document numbers and labels [prompt_id], as `Corpus.read` returned them with the tokens.
        """
        # Texts are larger than token ids, and reading them tokenises every file again.
        if self._find(store) is None:
            self.tokens = corpus.with_texts(self.tokens, about, self.source.tokenizer)

    def note_asked(self, store: Store) -> None:
        """Note in the store that a user captured this run directly, so that `mizarr ls` lists it."""
        note_capture(store, self._stored(store).entry.path)

    def keep_labels(self, store: Store, about: xr.Dataset) -> None:
        """Store labels of prompts, coordinates [prompt_id], with the run; they are no part of its key.

        Warns (UserWarning) if they are too large, and then stores none.

        Arguments:
            store: store with the run.
            about: coordinates [prompt_id] of the prompts.
        """
        entry = self._stored(store).entry
        columns = {str(name): column.values for name, column in about.coords.items()}
        if not put_prompt_labels(store.files, entry.path, columns):
            warnings.warn(
                f"the labels of {self.tokens.n_prompts:,} prompts are too large to be stored with the run; "
                "name fewer label columns, or read the labels from the dataset that mizarr.capture returns",
                UserWarning,
                stacklevel=2,
            )

    def _require_logits(self) -> None:
        """Raise ConfigError for reductions of logits that the model cannot compute.

        These are all reductions of logits of a model that transformers runs, and a top-k larger than the
        vocabulary.
        """
        config, reductions = self.source.config, self._logit_reductions
        if reductions and not config.is_differentiable:
            raise ConfigError(
                "to store reductions of logits, expected a model whose LM head mizarr runs, found "
                f"{self.source.name}, which transformers runs; choose a model of a supported family"
            )
        for reduction in reductions:
            if reduction.ranks > config.vocab_size:
                raise ConfigError(
                    f"expected at most the {config.vocab_size} logits of {self.source.name}, found "
                    f"reduce={reduction.request!r}; set a smaller number"
                )

    def _require_fit(self) -> None:
        """Raise DictionaryError or StageError for a dictionary or probe that does not fit the model."""
        config, model = self.source.config, self.source.name
        for encoder in self._encoders:
            encoder.resource.require_fit(config, model)
        for scorer in (reduction.scorer for reduction in self._reductions):
            if scorer is not None:
                scorer.require_fit(config, model, self.source.identity.digest)

    def _require_tokens_to_pool(self, keep: Keep) -> None:
        """Raise PromptError for a prompt of which a reduction over positions would cover no token."""
        if keep.selection is None or keep.reduction is None or keep.reduction.over != "position":
            return
        counts = keep.selection.counts(self.tokens)
        if not counts.all():
            prompt = int(counts.argmin())
            raise PromptError(
                f"reduce={keep.reduction.request!r}: expected a token of each prompt, found none of prompt "
                f"{prompt} ({int(self.tokens.row_size[prompt])} tokens) at {keep.selection}; leave this "
                "prompt out, or choose other positions"
            )

    # -- identity ------------------------------------------------------------------------------------------

    @cached_property
    def run_key(self) -> RunKey:
        """Key of the stored run: model, tokens and interventions; for gradients also the metric."""
        prompts = self.tokens.digest
        return RunKey(self.source.identity.digest, prompts, self.spec.digest_over(prompts))

    @cached_property
    def cells(self) -> tuple[VariableLayer, ...]:
        """(variable, layer) of every captured array; layer None for a point outside the layers."""
        return tuple(kept.cell for kept in self.spec.kept)

    @cached_property
    def specs(self) -> list[ArraySpec]:
        """Axes and dtype with which each captured variable is stored."""
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
    def _logit_reductions(self) -> list[Reduction]:
        """Reductions of the logits, such as top-k."""
        return [reduction for reduction in self._reductions if reduction.is_of_logits]

    @property
    def _encoders(self) -> list[Encoder]:
        """Dictionaries whose features are counted, without duplicates."""
        encoders = {
            reduction.identity: reduction.encoder
            for reduction in self._reductions
            if reduction.encoder is not None
        }
        return list(encoders.values())

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Files that must not change meanwhile: the dictionaries whose features are counted.

        The files of the model are checked when it is loaded.
        """
        return [encoder.resource for encoder in self._encoders]

    # -- planning ------------------------------------------------------------------------------------------

    def status(self, store: Store) -> Status:
        """Whether every capture is stored; if not, which are missing.

        Arguments:
            store: store that is searched.

        Raises:
            SourceChanged: if the files of the model or a dictionary have changed since this node was created.
        """
        cells, stored = len(self.cells), self._find(store)
        missing = [cell for cell in self.cells if stored is None or not stored.is_published(cell)]
        # Before saying "cached": a replaced file would otherwise get the results of the old one.
        self.source.expect(served=not missing)
        check_pinned(self)
        if stored is None:
            return Status(False, "this run is not stored yet", cells)
        reason = f"{_name_cells(missing)} missing" if missing else ""
        return Status(not missing, reason, cells, cells - len(missing))

    def estimate(self, store: Store) -> Estimate:
        """Expected cost of the captures that a store lacks: bytes on disk, peak bytes of buffers, seconds."""
        stored = self._find(store)
        missing = [cell for cell in self.cells if stored is None or not stored.is_published(cell)]
        segment = stored.entry.segment_tokens if stored is not None else self._segment_tokens()
        sizes, tokens = self._sizes, self.tokens.n_tokens
        written = sizes.written(missing, tokens, math.ceil(tokens / segment))
        peak = BUFFERS * sizes.buffer(missing, min(segment, tokens))
        expected = self._duration(store, missing, 1.0) if missing else Estimate()
        return replace(expected, bytes_written=written, peak_bytes=peak)

    def expected_seconds(self, store: Store, times: float = 1.0) -> float | None:
        """Expected seconds of these captures if none were stored; None if unknown.

        Taken from the newest timed run of this model with such captures, or else from an operation count.

        Arguments:
            store: searched for timed runs.
            times: factor on the number of prompts.
        """
        return self._duration(store, self.cells, times).seconds

    def _duration(self, store: Store, missing: Sequence[VariableLayer], times: float) -> Estimate:
        # As a provenance note read back from JSON has it: tuples are lists there.
        identity = json.loads(json.dumps(self.source.identity.request()))

        def is_same_model(note: Mapping[str, Any]) -> bool:
            return bool(note.get("identity") == identity and note.get("tokens"))

        tokens, layers = self.tokens.n_tokens * times, self.source.config.num_layers
        deepest = max(layers if layer is None else layer + 1 for _, layer in missing)
        with_logits = any(variable == LOGITS for variable, _ in missing)
        written = self._sizes.stored(missing) * tokens
        work = PassWork(tokens * min(deepest, layers), tokens if with_logits else 0, written)
        # Provenance is found by the name of any captured variable.
        timed = last_timed(self.cells[0][0], store, is_same_model)
        return expected_duration(self.source, work, timed, tokens / timed["tokens"] if timed else 1.0)

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Labels by which a stage can read the activations part by part.

        Arguments:
            store: store with the run.
            axis: "layer" or "segment".

        Returns:
            For "layer" the captured layers of the first variable that has layers; for "segment" the (start,
            stop) token range of each segment, empty if the run is not stored.
        """
        if axis == "layer":
            return next(iter(self._layers.values()), [])
        stored = self._find(store)
        return [] if stored is None else stored.segments

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """The stored activations of one variable, of one layer and segment if these are selected.

        Arguments:
            store: store with the run.
            variable: name of a captured variable; None for all.
            selection: "layer" -> layer, "segment" -> (start, stop); an absent key selects everything.

        Raises:
            StageError: for a variable or layer that is not captured.
            EntryNotFound: if the run is not stored.
        """
        stored = self._stored(store)
        layer = selection.get("layer")
        cells = [cell for cell in self.cells if variable in (None, cell[0]) and layer in (None, cell[1])]
        if not cells:
            near = nearest(variable or "", {name for name, _ in self.cells})
            hint = f"; nearest is {near!r}" if near else ""
            raise StageError(
                f"expected a variable and layer that the node {self.name!r} captures, found {variable!r} at "
                f"layer {layer}{hint}"
            )
        segment = selection.get("segment")
        contents = stored.contents(cells, segment)

        def load() -> xr.Dataset:
            return stored.open(cells, segment)

        rows = stored.n_tokens if segment is None else segment[1] - segment[0]
        content = digest("activations", self.run_key.prompt, stored.rows, segment, contents)
        parents = [stored.content(cell) for cell in cells]
        return Part(content, load, self._sizes.row_bytes(cells) * rows, parents)

    # -- running -------------------------------------------------------------------------------------------

    def require_workers(self, context: Context) -> None:
        """Raise PlanError if workers cannot compute this capture.

        That is with order "layer", and for a loaded model, which they cannot load by name.

        Arguments:
            context: cluster or number of workers.
        """
        if self.order == "layer":
            processes = "a cluster" if context.cluster is not None else f"{context.workers} workers"
            raise PlanError(
                f'order="layer" runs in one process: expected no workers, found {processes}; '
                'leave out either order="layer" or the workers'
            )
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Compute and store the missing captures, in this process or on workers.

        Arguments:
            store: where to publish.
            context: progress, workers and cluster.
        """
        # Selections of an array that is stored whole need no pass; the rest is an ordinary capture.
        if (stored := self._find(store)) is not None and stored.views:
            self._without(stored.views).run(store, context)
            return
        # Creating an entry waits for the disk many times: computing starts meanwhile, with the planned entry.
        with measured() as took, ThreadPoolExecutor(1) as background:
            model: Model | None = None
            if not context.has_workers and self.status(store).cells_cached < len(self.cells):
                model = self._load(context)  # before the store is touched, as loading may fail
            beginning = self._find_beginning(store)
            if beginning is None:
                self._expect_room(store)
            created = background.submit(self._create_entry, store, beginning)
            # Workers open the entry by its key, and layer by layer nothing waits for it (`await_entry`).
            may_start_early = (
                not context.has_workers and beginning is None and not goes_by_layers(self.order, model)
            )
            planned = self._planned_entry(store) if may_start_early else None
            total = 0
            if planned is not None:
                loaded = model or self._load(context)
                # If another process created the run with other segments, all is computed below instead.
                with suppress(_OtherSegments):
                    total = self._harvest(
                        loaded, planned, context, lambda: _expect_same_segments(created.result(), planned)
                    )
            entry = created.result()
            if beginning is not None:
                # What a segment holds follows from its prompts, so shards of the shorter run are linked, not
                # computed.
                entry.take_over(beginning, self.cells)
                self._expect_room(store)
            # Asked of the disk: the early harvest and other processes may have committed some meanwhile.
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
            provenance = background.submit(put_provenance, store.files, entry.path, note)
            entry.publish(self.cells)
            provenance.result()

    def _load(self, context: Context) -> Model:
        limit = as_bytes(self.options.memory_limit)
        return load_for(self.source, self.order, limit, self._working_memory(), context.progress.say)

    def _working_memory(self) -> WorkingMemory:
        """Bytes that this capture needs in addition to the weights."""
        itemsize, longest = DTYPES[self.source.dtype].itemsize, int(self.tokens.row_size.max(initial=0))
        token_bytes = self.source.config.bytes_per_token(itemsize)
        token_bytes += VOCABULARY_BYTES * bool(self._logit_reductions)
        batch = token_bytes * max(self.options.batch_tokens, longest)
        length = min(self._segment_tokens(), self.tokens.n_tokens)
        by_layer: dict[int | None, list[VariableLayer]] = {}
        for cell in self.cells:
            by_layer.setdefault(cell[1], []).append(cell)
        sizes = self._sizes
        largest_layer = max(sizes.buffer(cells, length) for cells in by_layer.values())
        return WorkingMemory(batch, BUFFERS * sizes.buffer(self.cells, length), BUFFERS * largest_layer)

    def _without(self, views: Mapping[str, View]) -> CaptureNode:
        """A copy without the variables that can be read through views of stored arrays."""
        spec = self.spec.only(
            kept_capture for kept_capture in self.spec.kept if kept_capture.variable not in views
        )
        # Past __init__, which would tokenise the prompts again.
        node = CaptureNode.__new__(CaptureNode)
        # The cached properties `cells` and `specs` depend on the spec.
        fields = {name: value for name, value in vars(self).items() if name not in ("cells", "specs")}
        vars(node).update(fields, spec=spec)
        return node

    def _harvest(
        self,
        model: Model,
        entry: LabelledEntry,
        context: Context,
        await_entry: Callable[[], Any] = lambda: None,
    ) -> int:
        """Compute and commit the missing captures in this process; returns the tokens computed."""
        from .backoff import BatchSize
        from .harvest import harvest
        from .layer_major import harvest_by_layers

        total = sum(len(entry.segments[n]) for n in entry.missing(self.cells))
        task = context.progress.task(self.name, total=total, unit="tokens")
        batch = BatchSize(self.options.batch_tokens, context.progress.say)
        try:
            if goes_by_layers(self.order, model):
                return harvest_by_layers(model, entry, self.spec, batch=batch, advance=task.advance)
            # Every batch would read every streamed layer from disk again.
            model.require_all_weights('a capture with order="batch"')
            return harvest(
                model, entry, self.spec, batch=batch, advance=task.advance, await_entry=await_entry
            )
        finally:
            # Also where the harvest fails: a retry of this node keeps the note.
            self._lowered |= batch.note()

    def open(self, store: Store) -> xr.Dataset:
        """Open the stored activations as a labelled, lazy Dataset.

        Raises:
            EntryNotFound: if the run is not stored.
        """
        return self._stored(store).open(self.cells)

    def records(self, store: Store) -> tuple[LabelledEntry, list[tuple[VariableLayer, Record]]]:
        """What the store records of each captured array: its content digest, size and origin.

        Returns:
            (the stored run, ((variable, layer), record) of each capture that is stored). A token selection
            that is read from a stored array of all tokens has the record of that array.

        Raises:
            EntryNotFound: if the run is not stored.
        """
        stored = self._stored(store)
        records = [(cell, stored.record(cell)) for cell in self.cells]
        return stored.entry, [(cell, record) for cell, record in records if record is not None]

    def provenance(self) -> dict[str, Any]:
        """Model, hooks, dictionaries and batch size, for the provenance record; no part of any key."""
        objective, prompts = self.spec.objective, self.run_key.prompt
        return {
            **self.source.provenance(),
            "hooks": self.spec.canonical(),
            **({} if objective is None else {"gradient_of": objective.canonical(prompts)}),
            **(
                {"dictionaries": [encoder.name for encoder in encoders]}
                if (encoders := self._encoders)
                else {}
            ),
            "batch_tokens": self.options.batch_tokens,
        }

    # -- helpers -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Workers get names and digests only; they read token ids and weights from disk.
        # The key is computed here, because it needs the token ids that stay behind.
        return {**vars(self), "tokens": None, "run_key": self.run_key}

    def _bind(self, hooks: HookSpec | str | Sequence[str]) -> BoundSpec:
        spec = as_spec(hooks).bind(self.source.config.hook_points, self.source.name, stored=True)
        if not spec.captures:
            raise StageError(
                "expected a HookSpec that captures something, found none; add "
                ".capture('blocks.*.hook_resid_post')"
            )
        if any(capture.point.kind == LOGITS for capture in spec.captures):
            self.source.config.require_vocabulary()
        if spec.gradients:
            self.source.config.require_gradients()
            self.source.config.require_head()
            spec.require_objective()
            for capture in spec.captures:
                if not capture.is_gradient:
                    raise StageError(
                        "gradients are stored as a separate run: expected only gradients in the HookSpec, "
                        f"found {capture.name!r} and {spec.gradients[0].name!r}; capture activations in a "
                        "second call, with another HookSpec"
                    )
        return spec

    @cached_property
    def _layers(self) -> dict[str, list[int]]:
        """Captured layers of each variable that has a layer axis."""
        by_variable = layers_by_variable(self.cells)
        return {name: sorted(layers) for name, layers in by_variable.items() if layers}

    @remembered
    def _find(self, store: Store) -> StoredRun | None:
        """This run in the store, or a larger run that contains all its prompts; None if neither is stored."""
        entry = self._entry(store)
        stored = None if entry is None else StoredRun(entry, views=self._views(entry))
        if stored is not None and all(map(stored.is_published, self.cells)):
            return stored
        # None after pickling (`__getstate__`).
        if self.tokens is not None and self._has_one_token_axis:
            larger = store.find_prompts(self.run_key, self.tokens, self.dtype, self.cells)
            if larger is not None:
                return StoredRun(*larger)
        return stored

    @property
    def _has_one_token_axis(self) -> bool:
        """Whether the prompts could be read from a larger run, by selecting tokens along one axis.

        Not for run reductions: those of a larger run cover its other prompts, too.
        """
        axes = {spec.packed for spec in self.specs}
        return "segment" not in axes and len(axes - {"pair", "square", "prompt_id"}) < 2

    def _views(self, entry: LabelledEntry) -> dict[str, View]:
        """Variable -> view, for token selections that are not stored but whose run has all tokens stored."""
        views: dict[str, View] = {}
        for name in dict.fromkeys(kept_capture.variable for kept_capture in self.spec.keeps):
            layers = [kept_capture for kept_capture in self.spec.keeps if kept_capture.variable == name]
            if all(entry.record(*kept_capture.cell) for kept_capture in layers):
                continue
            has_all_tokens = all(entry.record(*kept_capture.capture.cell) for kept_capture in layers)
            selection, reduction = layers[0].keep.selection, layers[0].keep.reduction
            if reduction is None and selection is not None and has_all_tokens:
                views[name] = layers[0].capture.variable, selection
        return views

    def _entry(self, store: Store) -> LabelledEntry | None:
        try:
            return store.entry(self.run_key, self.dtype)
        except EntryNotFound:
            return None

    def _stored(self, store: Store) -> StoredRun:
        stored = self._find(store)
        if stored is None:
            raise EntryNotFound(
                f"expected the activations of this capture in {store.address}, found none; run the capture "
                "first: mizarr.capture, or mizarr capture"
            )
        return stored

    def _find_beginning(self, store: Store) -> LabelledEntry | None:
        """A stored run of the first prompts of this run, e.g. of a corpus that has grown; None without."""
        # The search reads every run of the store: for a small run computing again is cheaper.
        if self.tokens.n_tokens < WORTH_A_LOOK or self._entry(store) is not None:
            return None
        return store.find_start(self.run_key, self.tokens, self.dtype)

    def _expect_room(self, store: Store) -> None:
        """Raise StoreFull if the disk of the store has too few free bytes for the missing captures."""
        entry, sizes, tokens = self._entry(store), self._sizes, self.tokens.n_tokens
        if entry is None:
            needed = sizes.written(self.cells, tokens, math.ceil(tokens / self._segment_tokens()))
        else:
            missing = entry.missing(self.cells).items()
            needed = sum(sizes.written(cells, len(entry.segments[n]), 1) for n, cells in missing)
        free = store.files.free_bytes
        if free is not None and needed > free:
            raise StoreFull(
                f"expected {needed} bytes of free disk space in {store.address} for the missing captures, "
                f"found {free}; capture fewer hook points or prompts, or delete files (mizarr gc)"
            )

    def _create_entry(self, store: Store, beginning: LabelledEntry | None = None) -> LabelledEntry:
        """Create the run in the store.

        Arguments:
            store: the store.
            beginning: stored run of the first prompts, whose segment length and compression are taken over;
                None without.
        """
        tokenizer = self.source.tokenizer
        about = {
            "model": self.source.name,
            **({"tokenizer": tokenizer.digest} if tokenizer is not None else {}),
        }
        # A reader of the store can then show tokens without the model.
        if tokenizer is not None and store.vocabulary(tokenizer.digest) is None:
            store.put_vocabulary(tokenizer.digest, tokenizer.vocabulary)
        return store.create_entry(
            self.run_key,
            self.tokens,
            self.specs,
            segment_tokens=self._segment_tokens() if beginning is None else beginning.segment_tokens,
            attrs=about,
            codec=self._codec(beginning),
        )

    def _codec(self, beginning: LabelledEntry | None) -> str:
        """Compression of new arrays: as the user set it, else as in the run that is extended; "" for none."""
        if self.options.codec is not None or beginning is None:
            return "" if self.options.codec in (None, PLAINLY) else str(self.options.codec)
        names = beginning.specs.keys() & {spec.variable for spec in self.specs}
        return next((codec for name in sorted(names) if (codec := beginning.layout(name).codec)), "")

    def _planned_entry(self, store: Store) -> LabelledEntry | None:
        """The run as `_create_entry` will create it, not yet on disk; None if the run is already stored."""
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
        # Workers of one machine share its threads; nodes of a cluster are taken to be like this one.
        shared = context.workers if context.cluster is None else 1
        return WorkerJob(*job, max(1, torch.get_num_threads() // shared))


class _OtherSegments(Exception):
    """Another process has just created the run in the store, with another segment length."""


def _expect_same_segments(created: LabelledEntry, planned: LabelledEntry) -> None:
    if created.segment_tokens != planned.segment_tokens:
        raise _OtherSegments


@dataclass(frozen=True)
class WorkerJob:
    """Names and digests with which a worker computes a segment; no arrays."""

    name: str
    """Name of the node."""
    source: ModelSource
    """The model, to be loaded by name."""
    run: RunKey
    """Key of the run."""
    dtype: str
    """Storage dtype of the run."""
    spec: BoundSpec
    """Captures and interventions."""
    batch_tokens: int
    """Most positions per batch."""
    threads: int
    """Torch threads per worker. Sums that torch splits over threads depend on it in the last bits, so workers
    of a cluster use the number of the process that plans; workers of one machine share its threads."""


def harvest_segment(job: WorkerJob, store: Store, cell: Mapping[str, int]) -> None:
    """Compute one segment of a capture on a worker, and commit it to the store.

    Arguments:
        job: the model by name, the run, its captures and options.
        store: store in which the run was created.
        cell: {"segment": number of the segment}.
    """
    import torch

    from .backoff import BatchSize
    from .harvest import harvest

    # Last bits may depend on the number of threads, so all workers use the same.
    torch.set_num_threads(job.threads)
    entry, model = store.entry(job.run, job.dtype), job.source.load()
    model.require_all_weights("single segments, on a cluster")
    batch = BatchSize(job.batch_tokens)
    harvest(model, entry, job.spec, batch=batch, segments=[cell["segment"]])


def _name_cells(cells: Sequence[VariableLayer]) -> str:
    """(variable, layer) pairs in words, e.g. "layers 6-11 of resid_post"."""
    parts = []
    for variable, layers in layers_by_variable(cells).items():
        is_range = len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1
        span = f"{layers[0]}-{layers[-1]}" if is_range else ", ".join(map(str, layers))
        parts.append(f"layer{'s' if len(layers) > 1 else ''} {span} of {variable}" if layers else variable)
    return "; ".join(parts)
