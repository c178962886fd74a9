"""The harvest of a model larger than memory: a corpus through layer l before layer l + 1 is read.

As many neighbouring layers as there is room for are read; every segment goes through them, batch by batch;
what they capture is committed, and what comes out of the last of them is spooled (spool.py) for the layers
that are read next. So every weight is read once for a corpus of any size, and memory is that of some layers,
a batch and a few buffers. Batches are those of harvest.py, taps and layers as well: the numbers are the same,
bit by bit on one machine. Where memory runs out a batch goes through in parts, and is spooled as one. Logits
are made in a step of their own, behind all layers, where the LM head comes and goes as they do: so it is read
once, too, and takes no layer's place.

A harvest that was killed goes on, segment by segment, from the last layer whose spool stands and from which
all can be had that is missing; what a segment still needs of layers before is computed from its tokens.

One process goes through a run at a time: a second waits, and computes what is left.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ....store.digest import digest
from ....store.errors import StoreFull
from ....store.files import THREADS, free_bytes_at
from ....store.runs.claims import SegmentClaim
from ....store.runs.committed import VariableLayer
from ....store.runs.entries import Entry
from ..architectures.points import LOGITS
from ..hooks.spec import BoundSpec, Capture
from ..models.model import Model
from ..models.residency import EMBEDDING
from ..networks.history import Carried
from ..networks.kernels import FEW_ROWS
from ..networks.transfer import to_device
from .backoff import BatchSize, fits
from .batches import BUFFERS, PieceBatch, halves
from .harvest import (
    Keeper,
    as_numpy,
    batches_of,
    explained,
    held_as,
    ids_of,
    keeping,
    needs_every_core,
    only,
    pieces_in,
    refuse_unfit,
    stored_bytes,
)
from .overlap import OverlappedWriter, SegmentBuffer
from .spool import VERSION, Spool, SpoolFile

__all__ = ["harvest_by_layers"]

_WAIT = 0.2  # seconds before looking again at a run that another process goes through
_CLAIM = "layers"


@dataclass
class Course:
    """One segment on its way through the layers.

    spec: of what it is to give. of: digest of all that its spool depends on. places: positions computed. at:
    the layer it enters next; None where its tokens are to be embedded. last: how many layers it goes through,
    the LM head counted as one where it comes and goes.
    """

    n: int
    spec: BoundSpec
    of: str
    tokens: int
    places: int
    at: int | None
    last: int

    def __post_init__(self) -> None:
        self._begun = self.at or 0

    def enter(self, layer: int) -> int:
        """Go on there; returns the tokens that the way amounts to."""
        way = self.last - self._begun
        before, after = ((at - self._begun) * self.tokens // way for at in (self.at or 0, layer))
        self.at = layer
        return after - before

    def within(self, group: Sequence[int]) -> Sequence[int]:
        """Which of these layers it has still to go through."""
        return range(max(self.at or 0, group[0]), min(self.last, group[-1] + 1))

    def met(self, layers: Sequence[int]) -> list[VariableLayer]:
        """What it is to give that a pass through these layers shows."""
        shown = range(layers[0], layers[-1] + (2 if self.ends_with(layers) else 1))
        return [kept.cell for kept in self.spec.kept if _entered(kept.capture, self.last) in shown]

    def ends_with(self, layers: Sequence[int]) -> bool:
        """Whether nothing is missing behind these."""
        return layers[-1] + 1 == self.last


def harvest_by_layers(
    model: Model,
    entry: Entry,
    spec: BoundSpec,
    *,
    batch: BatchSize,
    advance: Callable[[int, int], None] = lambda tokens, written: None,
) -> int:
    """Compute and commit what the entry is missing of a spec's captures, layer by layer; returns the tokens
    computed.

    spec: without gradients. batch: lowered where memory runs out. advance: told tokens, each counted by the
    share of its layers that it has gone through, and bytes committed. Raises StoreFull where the disk has no
    room for the spool, PlanError where memory has none for a single prompt.
    """
    cells = [kept.cell for kept in spec.kept]
    claim = SegmentClaim(entry.folder, f"{entry.path}/seg/{_CLAIM}.claim")
    total, batch_tokens = 0, batch.tokens
    while entry.missing(cells):
        if not claim.acquire():
            time.sleep(_WAIT)
            continue
        try:
            spool = Spool(entry.folder, f"{entry.path}/seg")
            way = _Way(model, entry, spec, batch_tokens, batch, spool, advance)
            with explained(model, entry, spec):
                total += _through(way, entry.missing(cells))
        finally:
            claim.release()
    return total


def _through(way: _Way, missing: dict[int, list[VariableLayer]]) -> int:
    """All segments with something missing through the layers; returns their tokens."""
    model = way.model
    courses = [way.course(n, only(way.spec, todo)) for n, todo in missing.items()]
    final, last = model.config.num_layers, max(course.last for course in courses)
    layers = range(min(course.at or 0 for course in courses), min(last, final))
    weights = model.streamed
    groups = [layers] if weights is None else list(weights.window.groups(layers, way.buffers(courses)))
    if weights is not None and last > final:
        weights.window.expect_room(weights.head)
        groups.append(range(final, last))
    if len(groups) > 1:
        way.expect_room(courses)
    if weights is not None and weights.embeds_whole:
        weights.window.keep_only([EMBEDDING])
        for course in courses:
            if course.at is None:
                way.embed(course)
    for group in groups:
        if weights is not None:
            weights.window.keep_only(group if group[0] < final else [weights.head])
        way.through(courses, group)
    for course in courses:
        way.spool.clear(course.n)
    return sum(course.tokens for course in courses)


def _entered(capture: Capture, final: int) -> int:
    """The layer on whose way in, or in which, a capture is met; `final` for what lies behind all of them."""
    point = capture.point
    if point.layer is None:
        return 0 if point.kind == "embed" else final
    return point.layer + (point.kind == "resid_post")


def _behind(capture: Capture, final: int, *, apart: bool) -> int:
    """How many layers a pass goes through to meet a capture, the LM head counted as one where it is
    `apart`."""
    point = capture.point
    if point.layer is None:
        return 0 if point.kind == "embed" else final + (apart and point.kind == LOGITS)
    return point.layer + 1


@dataclass(frozen=True)
class LayerJob:
    """A filled buffer on its way to disk, and what was spooled before these layers, needed no more once it is
    there."""

    course: Course
    cells: tuple[VariableLayer, ...]
    entered: SpoolFile | None
    tokens: int
    handed_over: threading.Event = field(default_factory=threading.Event)
    """Set when nothing but the disk is waited for."""


@dataclass(frozen=True)
class _Layers:
    """What batches go through at once, and what takes what is seen there; `ends`: nothing comes out."""

    layers: Sequence[int]
    spec: BoundSpec
    keep: Keeper
    ends: bool


@dataclass(frozen=True)
class _Way:
    """What every step of a harvest reads.

    batch_tokens: of batches as they are planned and spooled. size: of what goes through at once.
    """

    model: Model
    entry: Entry
    spec: BoundSpec
    batch_tokens: int
    size: BatchSize
    spool: Spool
    advance: Callable[[int, int], None]

    def course(self, n: int, spec: BoundSpec) -> Course:
        """Where a segment begins: at the last spooled layer before which nothing is missing."""
        batches, final = self._batches(n, spec), self.model.config.num_layers
        pieces = [[[piece.prompt, piece.run] for piece in batch.pieces] for batch in batches]
        of = digest("spool", VERSION, self.entry.run.digest, self.entry.segment_tokens, pieces)
        apart = self.model.streamed is not None
        last = max(1, *(_behind(capture, final, apart=apart) for capture in spec.captures))
        first = min(_entered(capture, final) for capture in spec.captures)
        spooled = [layer for layer in self.spool.layers(n, of) if layer <= first and layer < last]
        places = sum(len(batch.pieces) * batch.length * batch.copies for batch in batches)
        at = max(spooled, default=None)
        return Course(n, spec, of, len(self.entry.segments[n]), places, at, last)

    def expect_room(self, courses: Sequence[Course]) -> None:
        """Raise StoreFull where the disk has no room for what is carried: of all segments, of one twice."""
        of_place = self.model.config.hidden_size * max(4, self.model.dtype.itemsize)
        places = [course.places for course in courses]
        needed, folder = of_place * (sum(places) + max(places)), self.entry.folder
        place = folder.scratch(self.entry.path)
        if needed > (free := free_bytes_at(place)):
            raise StoreFull(
                f"expected {needed} bytes of room in {place} for what is carried from layer to layer, "
                f"found {free}; capture fewer prompts at once, or free some space (mizarr gc)"
            )

    def buffers(self, courses: Sequence[Course]) -> dict[int, int]:
        """Bytes that what is given by each layer takes in buffers."""
        found: dict[int, int] = {}
        entry = self.entry
        for cell in {kept.cell for course in courses for kept in course.spec.kept}:
            rows = max(entry.rows(cell[0], course.n) for course in courses)
            itemsize = held_as(entry, cell[0]).itemsize
            size = BUFFERS * itemsize * rows * math.prod(entry.spec(cell[0]).tail)
            layer = cell[1] or 0
            found[layer] = found.get(layer, 0) + size
        return found

    def embed(self, course: Course) -> None:
        """What enters the first layer, spooled."""
        with self._spooled(course, 0).written() as spooled:
            for batch, entering in self._entering(course):
                through = _Layers((), BoundSpec(), lambda part: contextlib.nullcontext(_nothing), ends=False)
                spooled.put(self._carried(batch, entering, through))
        course.enter(0)

    def through(self, courses: Sequence[Course], group: Sequence[int]) -> None:
        """Every segment through some layers: what they give committed, what comes out of them spooled."""
        entry = self.entry
        ways = [(course, layers) for course in courses if (layers := course.within(group))]
        cells = list(dict.fromkeys(cell for course, layers in ways for cell in course.met(layers)))
        rows = {name: max(entry.rows(name, course.n) for course, _ in ways) for name, _ in cells}
        shapes = {cell: (rows[cell[0]], *entry.spec(cell[0]).tail) for cell in cells}
        dtypes = {cell: held_as(entry, cell[0]) for cell in cells}
        in_turn, device = needs_every_core(self.model), self.model.device
        threads = min(THREADS, torch.get_num_threads()) if in_turn or device.type != "cpu" else 1

        def write(buffer: SegmentBuffer, job: LayerJob) -> None:
            n = job.course.n
            try:
                buffer.wait()
                refuse_unfit(buffer, only(self.spec, job.cells), entry, n)
                arrays = {cell: as_numpy(buffer.view(cell, entry.rows(cell[0], n))) for cell in job.cells}
                if arrays:
                    entry.write_segment(n, arrays, threads=threads, handed_over=job.handed_over.set)
                if job.entered is not None:
                    job.entered.remove()
                self.advance(job.tokens, stored_bytes(entry, arrays))
            finally:
                job.handed_over.set()

        def drop(job: LayerJob) -> None:
            job.handed_over.set()

        make = partial(SegmentBuffer, shapes, dtypes, device)
        with OverlappedWriter(make, write, drop, buffers=BUFFERS) as writer:
            for course, layers in ways:
                buffer = writer.buffer()
                entered = None if course.at is None else self._spooled(course, course.at)
                wanted = only(self.spec, course.met(layers))
                self._fill(course, layers, wanted, buffer)
                buffer.filled()
                given = tuple(kept.cell for kept in wanted.kept)
                job = LayerJob(course, given, entered, course.enter(layers[-1] + 1))
                writer.submit(buffer, job)
                if in_turn:
                    job.handed_over.wait()

    def _fill(self, course: Course, layers: Sequence[int], spec: BoundSpec, buffer: SegmentBuffer) -> None:
        """All batches of a segment through some layers."""
        ends = course.ends_with(layers)
        held = [layer for layer in layers if layer < self.model.config.num_layers]
        with contextlib.ExitStack() as stack:
            spooled = None
            if not ends:
                spooled = stack.enter_context(self._spooled(course, layers[-1] + 1).written())
            keep = stack.enter_context(keeping(self.model, self.entry, course.n, spec, buffer))
            through = _Layers(held, spec, keep, ends)
            for batch, entering in self._entering(course):
                carried = self._carried(batch, entering, through)
                if spooled is not None:
                    spooled.put(carried)

    def _carried(self, batch: PieceBatch, entering: list[list[int]] | Carried, through: _Layers) -> Carried:
        """A batch through some layers, in halves of halves where memory runs out: what comes out, as if of
        one pass."""
        given: list[Carried] = []

        def run(part: PieceBatch, rows: slice) -> None:
            taken: list[list[int]] | Carried
            if isinstance(entering, dict):
                # A copy, always: a pass may write over what it is given, and memory run out behind that.
                own = {name: tensor[rows].repeat(part.copies, 1, 1) for name, tensor in entering.items()}
                taken = {name: to_device(tensor, self.model.device) for name, tensor in own.items()}
            else:
                taken = entering[rows] * part.copies
            with through.keep(part) as sink:
                carried = self.model.stream_layers(
                    taken, through.layers, through.spec, sink, ends=through.ends
                )
            given.append(carried if part is batch else _once(carried, len(part.pieces)))

        waiting, first = [batch], 0
        while waiting:
            part = waiting.pop(0)
            rows = slice(first, first + len(part.pieces))
            if self.size.allows(part):
                if fits(partial(run, part, rows)):
                    first = rows.stop
                    continue
                self.size.lower(part)
            waiting[:0] = halves(part, fewest=FEW_ROWS)
        if len(given) == 1:
            return given[0]
        whole = {name: torch.cat([part[name] for part in given]) for name in given[0]}
        return {name: tensor.repeat(batch.copies, 1, 1) for name, tensor in whole.items()}

    def _entering(self, course: Course) -> Iterator[tuple[PieceBatch, list[list[int]] | Carried]]:
        """Each batch with what enters the layers that come next: its ids, or what was spooled."""
        batches = self._batches(course.n, course.spec)
        if course.at is None:
            yield from ((batch, ids_of(self.entry, batch)) for batch in batches)
        else:
            yield from zip(batches, self._spooled(course, course.at).batches(), strict=True)

    def _batches(self, n: int, spec: BoundSpec) -> list[PieceBatch]:
        pieces = pieces_in(self.model, self.entry, n, spec)
        return batches_of(self.model, self.entry, pieces, spec, self.batch_tokens)

    def _spooled(self, course: Course, layer: int) -> SpoolFile:
        return self.spool.file(course.n, layer, course.of)


def _once(carried: Carried, count: int) -> Carried:
    """Of rows computed several times over the first, in memory."""
    return {name: tensor[:count].cpu() for name, tensor in carried.items()}


def _nothing(capture: Capture, value: Tensor) -> None:
    """Takes what no pass shows."""
