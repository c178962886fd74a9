"""The harvest: segments of a corpus through a model and into the store.

The forward pass fills a segment's buffers hook by hook; a writer thread digests and commits them while the
next segment is computed. Where the pass needs every core of the processor it waits until all that is left of
the writing is waiting for the disk: a core that is shared holds up all the others. Memory is a few buffers
whatever the size of the corpus. Any number of harvests may work on one run: claims keep them apart, and if
they do meet, they write the same bits.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from ....store.files import THREADS
from ....store.runs.claims import SegmentClaim
from ....store.runs.committed import VariableLayer
from ....store.runs.entries import Entry
from ....store.runs.packed import MATRICES, PackedTokens, rows_before
from ....store.runs.quantised import QUANTISED
from ..architectures.points import LOGITS
from ..hooks.reductions import MEAN, NORM
from ..hooks.spec import BoundSpec, Capture, KeptCapture
from ..hooks.taps import Sink
from ..models.finite import is_fit, not_finite
from ..models.model import Model
from ..networks.kernels import FEW_ROWS
from .backoff import BatchSize, fits
from .batches import BUFFERS, Piece, PieceBatch, pieces_of, plan_batches
from .of_run import of_run
from .overlap import OverlappedWriter, SegmentBuffer, send
from .reduced import keep_means, norms
from .selected import SelectedRows
from .vocabulary import of_logits

_WAIT = 0.2  # seconds before looking again at segments that others have claimed
Keeper = Callable[[PieceBatch], AbstractContextManager[Sink]]
"""Takes what a batch shows while it is entered; what a batch gives of a run counts when it is left, and not
where an error leaves it."""


@dataclass(frozen=True)
class Job:
    """A filled buffer on its way to disk."""

    segment: int
    cells: tuple[VariableLayer, ...]
    claim: SegmentClaim
    handed_over: threading.Event = field(default_factory=threading.Event)
    """Set when nothing but the disk is waited for."""

    def end(self) -> None:
        """Written, or never to be."""
        self.claim.release()
        self.handed_over.set()


def harvest(
    model: Model,
    entry: Entry,
    spec: BoundSpec,
    *,
    batch: BatchSize,
    segments: Iterable[int] | None = None,
    advance: Callable[[int, int], None] = lambda tokens, written: None,
    stands: Callable[[], Any] = lambda: None,
) -> int:
    """Compute and commit what the entry is missing of a spec's captures; returns the tokens computed.

    batch: lowered where memory runs out. segments: only these; None waits for those others have claimed,
    until nothing is missing. advance: told tokens and bytes committed. stands: called before anything is
    committed; returns when the entry is made, and raises if it is not.
    """
    cells = [kept.cell for kept in spec.kept]
    only = None if segments is None else set(segments)
    total = 0
    while missing := {n: todo for n, todo in entry.missing(cells).items() if only is None or n in only}:
        with explained(model, entry, spec):
            done = _round(model, entry, spec, missing, batch, advance, stands)
        total += done
        if not done:
            time.sleep(_WAIT)
    return total


def _round(
    model: Model,
    entry: Entry,
    spec: BoundSpec,
    missing: dict[int, list[VariableLayer]],
    batch: BatchSize,
    advance: Callable[[int, int], None],
    stands: Callable[[], Any],
) -> int:
    """One pass over the segments that are missing and not somebody else's; returns the tokens computed."""
    cells = list(dict.fromkeys(cell for todo in missing.values() for cell in todo))
    rows = {variable: max(entry.rows(variable, n) for n in missing) for variable, _ in cells}
    shapes = {cell: (rows[cell[0]], *entry.spec(cell[0]).tail) for cell in cells}
    dtypes = {cell: held_as(entry, cell[0]) for cell in cells}

    def write(buffer: SegmentBuffer, job: Job) -> None:
        try:
            stands()
            buffer.wait()
            refuse_unfit(buffer, only(spec, job.cells), entry, job.segment)
            arrays = {
                cell: as_numpy(buffer.view(cell, entry.rows(cell[0], job.segment))) for cell in job.cells
            }
            threads = 1 if shares_cores and job.segment != last else writers
            entry.write_segment(job.segment, arrays, threads=threads, handed_over=job.handed_over.set)
            advance(len(entry.segments[job.segment]), stored_bytes(entry, arrays))
        finally:
            job.end()

    done, last, in_turn = 0, max(missing), needs_every_core(model)
    shares_cores = model.device.type == "cpu" and not in_turn
    writers = min(THREADS, torch.get_num_threads())
    make = partial(SegmentBuffer, shapes, dtypes, model.device)
    with OverlappedWriter(make, write, Job.end, buffers=BUFFERS) as writer:
        for n, todo in missing.items():
            claim = entry.claim(n)
            if not claim.acquire():
                continue
            try:
                if entry.is_recorded(n, todo):  # by somebody else, since this pass began
                    claim.release()
                    continue
                buffer = writer.buffer()
                fill(model, entry, n, only(spec, todo), buffer, batch)
            except BaseException:
                claim.release()
                raise
            job = Job(n, tuple(todo), claim)
            writer.submit(buffer, job)
            if in_turn:
                job.handed_over.wait()
            done += len(entry.segments[n])
    return done


def held_as(entry: Entry, variable: str) -> torch.dtype:
    """What buffers of a variable hold: what is stored, or what int8 is made of when it is written."""
    dtype = entry.spec(variable).dtype
    return torch.float32 if dtype == QUANTISED else getattr(torch, dtype)


def stored_bytes(entry: Entry, arrays: Mapping[VariableLayer, Any]) -> int:
    """Of these rows of each cell on disk."""
    return sum(len(rows) * entry.spec(cell[0]).row_bytes for cell, rows in arrays.items())


def needs_every_core(model: Model) -> bool:
    """Whether a pass computes on all cores this process may use, so that a writer beside it gets in its way.

    Measured on two cores, 8 segments of 33 MB: taking turns is 2 to 3 % faster.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return model.device.type == "cpu" and torch.get_num_threads() >= cores


def fill(model: Model, entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer, size: BatchSize) -> None:
    """Forward passes over one segment's prompts, captured activations copied to their place in the buffer, or
    kept as they are where a pass gives a segment whole."""
    with keeping(model, entry, n, spec, buffer) as keep:
        _pass_by(model, entry, n, spec, size, keep)
    buffer.filled()


def _pass_by(model: Model, entry: Entry, n: int, spec: BoundSpec, size: BatchSize, keep: Keeper) -> None:
    """All batches of a segment, smaller ones where memory runs out."""

    def run(batch: PieceBatch) -> None:
        rows = ids_of(entry, batch)
        with keep(batch) as sink:
            if not spec.gradients:
                model.stream_batch(rows, spec, None, sink)
                return
            _, found = model.differentiate(rows, spec, [piece.prompt for piece in batch.pieces])
            for capture, value in found.items():
                sink(capture, value)

    pieces = pieces_in(model, entry, n, spec)
    while pieces:
        batches = batches_of(model, entry, pieces, spec, size.tokens)
        ran = sum(1 for _ in itertools.takewhile(lambda batch: fits(partial(run, batch)), batches))
        pieces = [piece for batch in batches[ran:] for piece in batch.pieces]
        if pieces:
            size.lower(batches[ran])


def pieces_in(model: Model, entry: Entry, n: int, spec: BoundSpec) -> list[Piece]:
    """What is to be computed of one segment's prompts."""
    tokens = entry.tokens
    whole = _goes_whole(model, entry, spec)
    return pieces_of(entry.segments[n], tokens.row_start, tokens.row_size, whole=whole)


def batches_of(
    model: Model, entry: Entry, pieces: Sequence[Piece], spec: BoundSpec, batch_tokens: int
) -> list[PieceBatch]:
    """The forward passes that these take."""
    # What is left behind a prompt is left behind its padding.
    leaves = any(kept.keep.reduction is None and _axis(entry, kept) == "prompt_id" for kept in spec.kept)
    one_length = _goes_whole(model, entry, spec) or leaves
    fewest = 1 if spec.gradients else FEW_ROWS
    return plan_batches(pieces, batch_tokens=batch_tokens, one_length=one_length, fewest=fewest)


def _goes_whole(model: Model, entry: Entry, spec: BoundSpec) -> bool:
    """Whether prompts must be run to their ends, with others of their length."""
    # A row of a pattern is a sum over as many keys as there are.
    sees_length = bool(spec.interventions or spec.gradients) or any(
        _axis(entry, kept) in MATRICES for kept in spec.kept
    )
    return model.config.lengths_must_match or sees_length


def _axis(entry: Entry, kept: KeptCapture) -> str:
    return entry.spec(kept.variable).packed


def ids_of(entry: Entry, batch: PieceBatch) -> list[list[int]]:
    """Token ids of a batch, padded to its length, as often as it is to be computed."""
    return [_padded(entry.tokens, piece, batch.length) for piece in batch.pieces] * batch.copies


@contextmanager
def keeping(model: Model, entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer) -> Iterator[Keeper]:
    """What takes the activations of each batch to their places in a segment's buffer; of a batch that does
    not come to its end nothing stays there that the next would not write over."""
    tokens, segment = entry.tokens, entry.segments[n]
    wanted: dict[Capture, list[KeptCapture]] = defaultdict(list)
    for kept in spec.kept:
        wanted[kept.capture].append(kept)
    axes = {kept.variable: entry.spec(kept.variable).packed for kept in spec.kept}
    selected = {
        axes[kept.variable]: SelectedRows(entry, n, kept.keep.selection)
        for kept in {kept.variable: kept for kept in spec.kept}.values()
        if kept.keep.selection is not None and axes[kept.variable] != "segment"
    }

    def keep(batch: PieceBatch, kept: KeptCapture, value: Tensor) -> None:
        cell, axis = kept.cell, axes[kept.variable]
        rows = entry.rows(cell[0], n)
        if kept.keep.reduction == MEAN:
            first = int(entry.bounds("prompt_id")[n])
            major = _token_major(value, kept.capture)
            keep_means(major, batch, buffer.view(cell, rows), tokens, first)
            return
        if axis == "segment":
            together.meet(kept, _token_major(value, kept.capture), batch)
            return
        if axis == "prompt_id":
            first = int(entry.bounds("prompt_id")[n])
            _keep_prompts(value, batch, buffer.view(cell, rows), tokens, first)
            return
        if axis in MATRICES:
            _keep_pairs(value, batch, buffer.view(cell, rows), tokens, segment, axis)
            return
        value = _token_major(value, kept.capture)
        put(batch, kept, norms(value) if kept.keep.reduction == NORM else value)

    def put(batch: PieceBatch, kept: KeptCapture, value: Tensor) -> None:
        cell, axis = kept.cell, axes[kept.variable]
        rows = entry.rows(cell[0], n)
        if axis in selected:
            selected[axis].put(value, batch, buffer.view(cell, rows))
        elif _is_segment(value, batch, segment, held_as(entry, cell[0])):
            buffer.take(cell, value.flatten(0, 1))
        else:
            _keep_rows(value, batch, buffer.view(cell, rows))

    @contextmanager
    def of_batch(batch: PieceBatch) -> Iterator[Sink]:
        def sink(capture: Capture, value: Tensor) -> None:
            # What is reduced may hide it: a NaN is no largest number, and no active feature.
            reduced = next((kept for kept in wanted[capture] if kept.keep.reduction is not None), None)
            if reduced is not None and not _are_tokens_fit(capture, value, batch):
                raise UnfitRows(reduced, n)
            if capture.point.kind != LOGITS:
                for kept in wanted[capture]:
                    keep(batch, kept, value)
                return
            asked = {kept: how for kept in wanted[capture] if (how := kept.keep.reduction) is not None}
            made = of_logits(model.network, value, asked.values())
            for kept, reduction in asked.items():
                put(batch, kept, made[reduction])

        try:
            with together.of_batch():
                yield sink
        except BaseException:
            buffer.clear()
            raise

    with of_run(entry, n, spec, buffer) as together:
        yield of_batch


def only(spec: BoundSpec, cells: Collection[VariableLayer]) -> BoundSpec:
    """The spec with what makes these cells alone."""
    wanted = set(cells)
    return spec.only(kept for kept in spec.kept if kept.cell in wanted)


def _padded(tokens: PackedTokens, piece: Piece, length: int) -> list[int]:
    ids = tokens.prompt(piece.prompt)[: piece.run].tolist()
    return [*ids, *[0] * (length - len(ids))]


def _token_major(value: Tensor, capture: Capture) -> Tensor:
    """[batch, position, …] with heads behind positions, as stored; an axis of one is dropped."""
    dims = capture.point.dims
    if dims[-1] == "one":
        value = value.squeeze(-1)
    return value.transpose(1, 2) if dims[2:3] == ("position",) else value


def _keep_rows(value: Tensor, batch: PieceBatch, place: Tensor) -> None:
    """Kept positions of [batch, position, …] to their tokens; neighbours in both go in one copy."""
    pieces = batch.pieces
    first = 0
    while first < len(pieces):
        last = first
        while last + 1 < len(pieces) and _adjoin(pieces[last], pieces[last + 1], batch.length):
            last += 1
        head = pieces[first]
        if last > first:
            block = value[first : last + 1]
            send(block, place[head.at : head.at + block.shape[0] * batch.length].view(block.shape))
        else:
            send(value[first, head.start : head.stop], place[head.at : head.at + head.stop - head.start])
        first = last + 1


def _is_segment(value: Tensor, batch: PieceBatch, segment: range, dtype: torch.dtype) -> bool:
    """Whether [batch, position, …] is the whole segment as it is stored: its tokens, in order, in memory."""
    pieces = batch.pieces
    in_order = pieces[0].at == pieces[0].start == 0 and all(
        _adjoin(one, other, batch.length) for one, other in itertools.pairwise(pieces)
    )
    whole = in_order and pieces[-1].stop == batch.length and len(pieces) * batch.length == len(segment)
    return (
        whole
        and batch.copies == 1
        and value.is_contiguous()
        and value.dtype == dtype
        and value.device.type == "cpu"
    )


def _adjoin(piece: Piece, other: Piece, length: int) -> bool:
    """Whether two whole prompts of a batch lie next to each other in the segment."""
    whole = piece.start == other.start == 0 and piece.stop == other.stop == length
    return whole and other.at == piece.at + length


def _keep_prompts(value: Tensor, batch: PieceBatch, place: Tensor, tokens: PackedTokens, first: int) -> None:
    """[batch, …] behind the last token of each prompt to the prompts that end in a segment, `first` being the
    first of them."""
    for row, piece in enumerate(batch.pieces):
        if piece.stop == int(tokens.row_size[piece.prompt]):
            send(value[row], place[piece.prompt - first])


def _keep_pairs(
    value: Tensor, batch: PieceBatch, place: Tensor, tokens: PackedTokens, segment: range, axis: str
) -> None:
    """Attention matrices [batch, head, query, key] to [pair, head], row by row: on the axis "pair" lower
    triangles, where query q of a prompt owns q + 1 pairs; on "square" all of them."""
    for row, piece in enumerate(batch.pieces):
        if axis == "square":
            pairs = value[row, :, piece.start : piece.stop].flatten(1, 2).transpose(0, 1)
        else:
            places = np.stack(np.tril_indices(piece.stop))
            queries, keys = torch.from_numpy(places[:, places[0] >= piece.start])
            pairs = value[row][:, queries, keys].transpose(0, 1)
        start = _pairs_before(tokens, segment.start, piece, axis)
        send(pairs, place[start : start + len(pairs)])


def _pairs_before(tokens: PackedTokens, segment_start: int, piece: Piece, axis: str) -> int:
    """Pairs of the segment that come before a piece."""
    sizes = tokens.row_size.astype(np.int64)
    first = int(tokens.prompt_of(np.array([segment_start]))[0])
    skipped = segment_start - int(tokens.row_start[first])
    between = sizes[first : piece.prompt]
    own = np.array([piece.start, skipped])
    before, left_out = map(int, rows_before(axis, own, sizes[[piece.prompt, first]]))
    return int(rows_before(axis, between, between).sum()) + before - left_out


def _are_tokens_fit(capture: Capture, value: Tensor, batch: PieceBatch) -> bool:
    """As `is_fit`, whatever stands at the padding of [batch, …]."""
    if is_fit(capture, value):
        return True
    dims = capture.point.dims
    axis = dims.index("position") if "position" in dims else 1
    rows = enumerate(batch.pieces)
    return all(is_fit(capture, value[row].narrow(axis - 1, 0, piece.stop)) for row, piece in rows)


class UnfitRows(Exception):
    """Rows of a segment that hold NaN or infinity; `explained` makes an error for people of it.

    Raised where segments are written, beside passes that go on, in which no pass can be made to look.
    """

    def __init__(self, kept: KeptCapture, segment: int) -> None:
        super().__init__(f"{kept.variable} of segment {segment} is not finite")
        self.kept, self.segment = kept, segment


def refuse_unfit(buffer: SegmentBuffer, spec: BoundSpec, entry: Entry, n: int) -> None:
    """Raise UnfitRows for NaN and infinity in what a segment's buffers hold; masked scores are -inf."""
    for kept in spec.kept:
        rows, reduction = buffer.view(kept.cell, entry.rows(kept.variable, n)), kept.keep.reduction
        if reduction is not None and reduction.combine == "max":  # -inf where a feature is never active
            rows = rows.masked_fill(rows == -torch.inf, 0.0)
        if not is_fit(kept.capture, rows):
            raise UnfitRows(kept, n)


@contextmanager
def explained(model: Model, entry: Entry, spec: BoundSpec) -> Iterator[None]:
    """Within: NotFinite in place of UnfitRows, naming where numbers began to be too large, and what helps."""
    try:
        yield
    except UnfitRows as unfit:
        kept, n = unfit.kept, unfit.segment
        prompts = dict.fromkeys(piece.prompt for piece in pieces_in(model, entry, n, spec))
        batches = ([entry.tokens.prompt(prompt).tolist()] for prompt in prompts)
        raise not_finite(
            model,
            batches,
            spec,
            f"'{kept.capture.name}' ({kept.variable}) in segment {n}",
            stored=entry.spec(kept.variable).dtype,
        ) from None


def as_numpy(rows: Tensor) -> Any:
    """A CPU tensor as a numpy array without a copy; bfloat16 as ml_dtypes' own."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return rows.numpy()
