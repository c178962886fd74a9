"""Harvest: runs a corpus through a model segment by segment, and commits captured activations to the store.

The forward pass fills the buffers of a segment hook by hook; a writer thread digests and commits them while
the next segment is computed. If the pass uses every CPU core, it first waits until the writer only waits for
the disk, because one core that is shared delays all others. Memory is a few segment buffers, whatever the
size of the corpus. Several harvests may work on one run: claims give each its segments, and two harvests that
compute the same segment write the same bits.
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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....store.files import THREADS
from ....store.runs.claims import SegmentClaim
from ....store.runs.committed import VariableLayer
from ....store.runs.entries import Entry
from ....store.runs.packed import MATRICES, PackedTokens, rows_before
from ....store.runs.quantised import QUANTISED
from ..architectures.points import LOGITS
from ..checkpoints.checkpoint import as_array
from ..hooks.reductions import NORM
from ..hooks.spec import BoundSpec, Capture, KeptCapture
from ..hooks.taps import Sink
from ..models.finite import is_fit, not_finite
from ..models.model import Model
from ..networks.kernels import FEW_ROWS
from .backoff import BatchSize, fits
from .batches import BUFFERS, Piece, PieceBatch, pieces_of, plan_batches
from .overlap import OverlappedWriter, SegmentBuffer, send
from .reduced import norms, token_scores, write_pooled, write_prompt_scores
from .run_reductions import open_run_reductions
from .selected import SelectedRows
from .vocabulary import reduce_logits

_WAIT = 0.2  # seconds before looking again at segments that others have claimed
BatchSink = Callable[[PieceBatch], AbstractContextManager[Sink]]
"""Context manager for one batch, which gives the function that stores its captures.

Reductions over the whole run are added when the block ends, and discarded if it ends with an error.
"""


@dataclass(frozen=True)
class WriteJob:
    """Which arrays of a filled segment buffer the writer thread is to write."""

    segment: int
    """Number of the segment."""
    cells: tuple[VariableLayer, ...]
    """(variable, layer) of each array to write."""
    claim: SegmentClaim
    """Claim that keeps other processes from computing the segment; released when the job ends."""
    handed_over: threading.Event = field(default_factory=threading.Event)
    """Set when the writer has finished computing and only waits for the disk."""

    def end(self) -> None:
        """Release the claim, whether the segment was written or the job was dropped."""
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
    await_entry: Callable[[], Any] = lambda: None,
) -> int:
    """Compute the captures that a stored run lacks, and commit them segment by segment.

    Arguments:
        model: computes the activations.
        entry: the stored run that is completed.
        spec: captures to store, and the interventions of the run.
        batch: positions per batch; lowered if memory runs out.
        segments: numbers of the segments to compute. None computes all missing segments, and waits for those
            that other processes have claimed.
        advance: called after each commit with the tokens and bytes committed.
        await_entry: called before each commit; returns once the entry exists on disk, and raises if it could
            not be created.

    Returns:
        Number of tokens computed by this call.

    Raises:
        NotFinite: if an activation is NaN or infinite.
        PlanError: if one prompt does not fit in memory.
    """
    cells = [kept_capture.cell for kept_capture in spec.kept]
    selected = None if segments is None else set(segments)
    total = 0
    while missing := {
        n: segment_cells
        for n, segment_cells in entry.missing(cells).items()
        if selected is None or n in selected
    }:
        with explain_non_finite(model, entry, spec):
            n_tokens = _harvest_unclaimed(model, entry, spec, missing, batch, advance, await_entry)
        total += n_tokens
        # Other processes have claimed every missing segment: their leases end, or the segments are committed.
        if not n_tokens:
            time.sleep(_WAIT)
    return total


def _harvest_unclaimed(
    model: Model,
    entry: Entry,
    spec: BoundSpec,
    missing: dict[int, list[VariableLayer]],
    batch: BatchSize,
    advance: Callable[[int, int], None],
    await_entry: Callable[[], Any],
) -> int:
    """Compute the missing segments that no other process has claimed; returns the number of tokens computed.

    Arguments:
        model: computes the activations.
        entry: the stored run.
        spec: captures and interventions.
        missing: segment number -> (variable, layer) of each array that the segment lacks.
        batch: positions per batch.
        advance: called with tokens and bytes committed.
        await_entry: returns once the entry is on disk.
    """

    def write(buffer: SegmentBuffer, job: WriteJob) -> None:
        """Write a filled buffer to the store, on the writer thread."""
        try:
            await_entry()
            arrays = filled_arrays(buffer, spec_for_cells(spec, job.cells), entry, job.segment)
            # One core for writing beside a running pass; nothing is computed beside the last segment.
            threads = 1 if shares_cores and job.segment != last_segment else writers
            entry.write_segment(job.segment, arrays, threads=threads, handed_over=job.handed_over.set)
            advance(len(entry.segments[job.segment]), stored_bytes(entry, arrays))
        finally:
            job.end()

    n_tokens, last_segment = 0, max(missing)
    # Then computing and writing take turns: a shared core would delay all others.
    takes_turns = needs_every_core(model)
    shares_cores = model.device.type == "cpu" and not takes_turns
    writers = min(THREADS, torch.get_num_threads())
    cells = {cell for segment_cells in missing.values() for cell in segment_cells}
    make_buffer = buffer_maker(entry, cells, missing, model.device)
    with OverlappedWriter(make_buffer, write, WriteJob.end, buffers=BUFFERS) as writer:
        for n, segment_cells in missing.items():
            claim = entry.claim(n)
            if not claim.acquire():
                continue
            try:
                if entry.is_recorded(n, segment_cells):  # committed by another process since this pass began
                    claim.release()
                    continue
                buffer = writer.buffer()
                fill(model, entry, n, spec_for_cells(spec, segment_cells), buffer, batch)
            except BaseException:
                claim.release()
                raise
            job = WriteJob(n, tuple(segment_cells), claim)
            writer.submit(buffer, job)
            if takes_turns:
                job.handed_over.wait()
            n_tokens += len(entry.segments[n])
    return n_tokens


def buffer_dtype(entry: Entry, variable: str) -> torch.dtype:
    """Dtype of a stored variable while it is buffered: its stored dtype, but float32 for int8.

    Arguments:
        entry: the stored run.
        variable: name of a stored variable.
    """
    dtype = entry.spec(variable).dtype
    return torch.float32 if dtype == QUANTISED else getattr(torch, dtype)


def buffer_maker(
    entry: Entry, cells: Collection[VariableLayer], segments: Collection[int], device: torch.device
) -> Callable[[], SegmentBuffer]:
    """Make the function, without arguments, that creates an empty segment buffer.

    Arguments:
        entry: the stored run.
        cells: (variable, layer) of each array in the buffer.
        segments: numbers of the segments that it must hold; the longest sets the size.
        device: device that computes the activations.
    """
    rows = {variable: max(entry.rows(variable, n) for n in segments) for variable, _ in cells}
    shapes = {cell: (rows[cell[0]], *entry.spec(cell[0]).tail) for cell in cells}
    dtypes = {cell: buffer_dtype(entry, cell[0]) for cell in cells}
    return partial(SegmentBuffer, shapes, dtypes, device)


def filled_arrays(
    buffer: SegmentBuffer, spec: BoundSpec, entry: Entry, n: int
) -> dict[VariableLayer, npt.NDArray[Any]]:
    """Arrays of a filled segment buffer, without a copy; waits until the GPU has copied everything into it.

    Arguments:
        buffer: the filled buffer.
        spec: captures that the buffer holds.
        entry: the stored run.
        n: number of the segment.

    Returns:
        (variable, layer) -> rows of the segment.

    Raises:
        NonFiniteRows: for NaN or infinity; masked scores may be -inf.
    """
    buffer.wait()
    arrays = {}
    for kept_capture in spec.kept:
        rows = buffer.view(kept_capture.cell, entry.rows(kept_capture.variable, n))
        reduction = kept_capture.keep.reduction
        # The maximum of a feature that is never active is -inf.
        is_maximum = reduction is not None and reduction.combine == "max"
        checked = rows.masked_fill(rows == -torch.inf, 0.0) if is_maximum else rows
        if not is_fit(kept_capture.capture, checked):
            raise NonFiniteRows(kept_capture, n)
        arrays[kept_capture.cell] = as_array(rows)
    return arrays


def stored_bytes(entry: Entry, arrays: Mapping[VariableLayer, Any]) -> int:
    """Number of bytes of the given rows on disk.

    Arguments:
        entry: the stored run.
        arrays: (variable, layer) -> rows.
    """
    return sum(len(rows) * entry.spec(cell[0]).row_bytes for cell, rows in arrays.items())


def needs_every_core(model: Model) -> bool:
    """Whether a pass computes on all CPU cores of this process, so that a concurrent writer slows it down.

    Measured on two cores, 8 segments of 33 MB: taking turns is 2 to 3 % faster.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return model.device.type == "cpu" and torch.get_num_threads() >= cores


def fill(model: Model, entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer, size: BatchSize) -> None:
    """Run forward passes over the prompts of segment `n`, and fill a buffer with the captured activations.

    A tensor that is the whole segment in stored order is used as the buffer, without a copy.

    Arguments:
        model: computes the activations.
        entry: the stored run.
        n: number of the segment.
        spec: captures that the segment lacks; interventions.
        buffer: takes the captured activations.
        size: positions per batch; lowered if memory runs out.
    """
    with segment_sink(model, entry, n, spec, buffer) as batch_sink:
        _run_batches(model, entry, n, spec, size, batch_sink)
    buffer.mark_copies_queued()


def _run_batches(
    model: Model, entry: Entry, n: int, spec: BoundSpec, size: BatchSize, batch_sink: BatchSink
) -> None:
    """Run all batches of segment `n`; a batch that runs out of memory is run again as smaller batches."""

    def run_batch(batch: PieceBatch) -> None:
        """Run one batch, and write its activations or gradients to the buffer."""
        rows = ids_of(entry, batch)
        with batch_sink(batch) as sink:
            if not spec.gradients:
                model.stream_batch(rows, spec, None, sink)
                return
            _, gradients = model.differentiate(rows, spec, [piece.prompt for piece in batch.pieces])
            for capture, value in gradients.items():
                sink(capture, value)

    pieces = pieces_in(model, entry, n, spec)
    while pieces:
        batches = batches_of(model, entry, pieces, spec, size.tokens)
        n_done = 0
        while n_done < len(batches) and fits(partial(run_batch, batches[n_done])):
            n_done += 1
        # The batch that did not fit, and the batches after it, are planned again with a lower size.
        pieces = [piece for batch in batches[n_done:] for piece in batch.pieces]
        if pieces:
            size.lower(batches[n_done])


def pieces_in(model: Model, entry: Entry, n: int, spec: BoundSpec) -> list[Piece]:
    """Piece of each prompt inside segment `n`, with the number of positions to compute.

    Arguments:
        model: model of the run.
        entry: the stored run.
        n: number of the segment.
        spec: captures and interventions, which decide whether prompts run whole.
    """
    tokens = entry.tokens
    whole = _needs_whole_prompts(model, entry, spec)
    return pieces_of(entry.segments[n], tokens.row_start, tokens.row_size, whole=whole)


def batches_of(
    model: Model, entry: Entry, pieces: Sequence[Piece], spec: BoundSpec, batch_tokens: int
) -> list[PieceBatch]:
    """Group the prompts of a segment into batches of at most `batch_tokens` computed positions.

    Arguments:
        model: model of the run.
        entry: the stored run.
        pieces: the part of each prompt that lies in the segment.
        spec: captures and interventions, which decide which prompts may share a batch.
        batch_tokens: most positions of a batch.
    """
    # A final state (one row per prompt) is read after the last position, so no padding may follow it.
    has_final_states = any(
        kept_capture.keep.reduction is None and _packed_axis(entry, kept_capture) == "prompt_id"
        for kept_capture in spec.kept
    )
    one_length = _needs_whole_prompts(model, entry, spec) or has_final_states
    # A repeated prompt would run its backward pass once per copy; gradients promise no equal last bits.
    fewest = 1 if spec.gradients else FEW_ROWS
    return plan_batches(pieces, batch_tokens=batch_tokens, one_length=one_length, fewest=fewest)


def _needs_whole_prompts(model: Model, entry: Entry, spec: BoundSpec) -> bool:
    """Whether each prompt must be run to its end, in batches of prompts of one length."""
    # The last bits of an attention pattern depend on the number of keys: each row is a sum over all of them.
    depends_on_length = bool(spec.interventions or spec.gradients) or any(
        _packed_axis(entry, kept_capture) in MATRICES for kept_capture in spec.kept
    )
    return model.config.lengths_must_match or depends_on_length


def _packed_axis(entry: Entry, kept_capture: KeptCapture) -> str:
    """Name of the axis on which the stored array has its rows: tokens, prompts, segments or pairs."""
    return entry.spec(kept_capture.variable).packed


def ids_of(entry: Entry, batch: PieceBatch) -> list[list[int]]:
    """Token ids [row][position] of a batch, padded with 0 on the right to the length of the batch.

    All rows are repeated `batch.copies` times.

    Arguments:
        entry: the stored run.
        batch: one batch of its prompts.
    """
    return [_padded(entry.tokens, piece, batch.length) for piece in batch.pieces] * batch.copies


@contextmanager
def segment_sink(
    model: Model, entry: Entry, n: int, spec: BoundSpec, buffer: SegmentBuffer
) -> Iterator[BatchSink]:
    """In this block, write the captured activations of batches into the buffer of segment `n`.

    A batch that fails may be run again: its rows are overwritten, and its share of run reductions is dropped.

    Arguments:
        model: its LM head computes logits, where these are captured.
        entry: the stored run.
        n: number of the segment.
        spec: captures of the segment.
        buffer: takes the captured activations.

    Yields:
        A context manager for each batch, which gives the function to call with each captured activation.
    """
    tokens, segment = entry.tokens, entry.segments[n]
    by_capture: dict[Capture, list[KeptCapture]] = defaultdict(list)
    for kept_capture in spec.kept:
        by_capture[kept_capture.capture].append(kept_capture)
    axes = {kept_capture.variable: _packed_axis(entry, kept_capture) for kept_capture in spec.kept}
    # One for each axis: the captures of all layers select the same rows.
    selections = {
        axes[kept_capture.variable]: SelectedRows(entry, n, kept_capture.keep.selection)
        for kept_capture in {item.variable: item for item in spec.kept}.values()
        if kept_capture.keep.selection is not None
        and axes[kept_capture.variable] not in ("segment", "prompt_id")
    }

    def write_capture(batch: PieceBatch, kept_capture: KeptCapture, value: Tensor) -> None:
        """Write an activation in the form that `kept_capture` states: reduced, or as rows of its axis."""
        cell, axis = kept_capture.cell, axes[kept_capture.variable]
        rows = entry.rows(cell[0], n)
        reduction = kept_capture.keep.reduction
        if reduction is not None and reduction.over == "position":
            first_prompt = int(entry.bounds("prompt_id")[n])
            major = _token_major(value, kept_capture.capture)
            write_pooled(major, kept_capture.keep, batch, buffer.view(cell, rows), tokens, first_prompt)
            return
        scorer = None if reduction is None else reduction.scorer
        if scorer is not None and axis == "prompt_id":
            first_prompt = int(entry.bounds("prompt_id")[n])
            write_prompt_scores(value, scorer, batch, buffer.view(cell, rows), tokens, first_prompt)
            return
        if axis == "segment":
            run_reductions.add(kept_capture, _token_major(value, kept_capture.capture), batch)
            return
        if axis == "prompt_id":
            first_prompt = int(entry.bounds("prompt_id")[n])
            _write_final_states(value, batch, buffer.view(cell, rows), tokens, first_prompt)
            return
        if axis in MATRICES:
            _write_pairs(value, batch, buffer.view(cell, rows), tokens, segment, axis)
            return
        value = _token_major(value, kept_capture.capture)
        if reduction == NORM:
            value = norms(value)
        elif scorer is not None:
            value = token_scores(value, scorer)
        write_tokens(batch, kept_capture, value)

    def write_tokens(batch: PieceBatch, kept_capture: KeptCapture, value: Tensor) -> None:
        """Write one row per token, or per selected token."""
        cell, axis = kept_capture.cell, axes[kept_capture.variable]
        rows = entry.rows(cell[0], n)
        if axis in selections:
            selections[axis].put(value, batch, buffer.view(cell, rows))
        elif _is_segment(value, batch, segment, buffer_dtype(entry, cell[0])):
            buffer.adopt(cell, value.flatten(0, 1))
        else:
            _write_rows(value, batch, buffer.view(cell, rows))

    @contextmanager
    def batch_sink(batch: PieceBatch) -> Iterator[Sink]:
        """Give the function that a pass over one batch calls with each captured activation.

        If the pass fails, the buffer drops the tensors that it took over without a copy (`adopt`), and the
        run reductions drop what the batch added.
        """

        def sink(capture: Capture, value: Tensor) -> None:
            """Write a captured activation to the buffer, once for each form in which the run keeps it."""
            # Activations are checked before they are reduced, as a reduction can hide NaN: a comparison with
            # NaN is false, so that NaN becomes neither a maximum nor an active feature.
            reduced = next((item for item in by_capture[capture] if item.keep.reduction is not None), None)
            if reduced is not None and not _are_tokens_finite(capture, value, batch):
                raise NonFiniteRows(reduced, n)
            if capture.point.kind != LOGITS:
                for kept_capture in by_capture[capture]:
                    write_capture(batch, kept_capture, value)
                return
            # `value` is the input of the LM head: logits [batch, position, vocab] are never held whole.
            reductions = {
                kept_capture: reduction
                for kept_capture in by_capture[capture]
                if (reduction := kept_capture.keep.reduction) is not None
            }
            values = reduce_logits(model.network, value, reductions.values())
            for kept_capture, reduction in reductions.items():
                write_tokens(batch, kept_capture, values[reduction])

        try:
            with run_reductions.batch():
                yield sink
        except BaseException:
            # Tensors that the buffer took over without a copy belong to the failed pass and hold its memory.
            buffer.clear()
            raise

    with open_run_reductions(entry, n, spec, buffer) as run_reductions:
        yield batch_sink


def spec_for_cells(spec: BoundSpec, cells: Collection[VariableLayer]) -> BoundSpec:
    """A spec with the same interventions that captures only what the given arrays need.

    Arguments:
        spec: captures and interventions of the run.
        cells: (variable, layer) of stored arrays.
    """
    cells = set(cells)
    return spec.only(kept_capture for kept_capture in spec.kept if kept_capture.cell in cells)


def _padded(tokens: PackedTokens, piece: Piece, length: int) -> list[int]:
    """Token ids that a prompt's row computes, padded with 0 on the right to `length`."""
    ids = tokens.prompt(piece.prompt)[: piece.run].tolist()
    return [*ids, *[0] * (length - len(ids))]


def _token_major(value: Tensor, capture: Capture) -> Tensor:
    """Move axes to stored order, [batch, position, head, …], and drop a last axis of length one."""
    dims = capture.point.dims
    if dims[-1] == "one":
        value = value.squeeze(-1)
    return value.transpose(1, 2) if dims[2:3] == ("position",) else value


def _write_rows(value: Tensor, batch: PieceBatch, buffer: Tensor) -> None:
    """Copy positions of [batch, position, …] that lie in the segment to their rows of buffer [token, …].

    Prompts that are adjacent in the batch and in the segment are copied together.
    """
    pieces = batch.pieces
    first = 0
    while first < len(pieces):
        last = first
        while last + 1 < len(pieces) and _are_adjacent(pieces[last], pieces[last + 1], batch.length):
            last += 1
        piece = pieces[first]
        if last > first:
            block = value[first : last + 1]
            send(block, buffer[piece.at : piece.at + block.shape[0] * batch.length].view(block.shape))
        else:
            rows = buffer[piece.at : piece.at + piece.stop - piece.start]
            send(value[first, piece.start : piece.stop], rows)
        first = last + 1


def _is_segment(value: Tensor, batch: PieceBatch, segment: range, dtype: torch.dtype) -> bool:
    """Whether [batch, position, …] is the whole segment as it is stored: all tokens, in order, on the CPU."""
    pieces = batch.pieces
    in_order = pieces[0].at == pieces[0].start == 0 and all(
        _are_adjacent(piece, successor, batch.length) for piece, successor in itertools.pairwise(pieces)
    )
    whole = in_order and pieces[-1].stop == batch.length and len(pieces) * batch.length == len(segment)
    return (
        whole
        and batch.copies == 1
        and value.is_contiguous()
        and value.dtype == dtype
        and value.device.type == "cpu"
    )


def _are_adjacent(piece: Piece, successor: Piece, length: int) -> bool:
    """Whether two prompts lie whole in the segment, with this length, the second right after the first."""
    whole = piece.start == successor.start == 0 and piece.stop == successor.stop == length
    return whole and successor.at == piece.at + length


def _write_final_states(
    value: Tensor, batch: PieceBatch, buffer: Tensor, tokens: PackedTokens, first_prompt: int
) -> None:
    """Copy the state [batch, …] after the last token of each prompt to buffer [prompt, …].

    The rows of the buffer are the prompts that end in the segment, from number `first_prompt` on.
    """
    for row, piece in enumerate(batch.pieces):
        if piece.stop == int(tokens.row_size[piece.prompt]):
            send(value[row], buffer[piece.prompt - first_prompt])


def _write_pairs(
    value: Tensor, batch: PieceBatch, buffer: Tensor, tokens: PackedTokens, segment: range, axis: str
) -> None:
    """Copy attention matrices [batch, head, query, key] to buffer [pair, head], query by query.

    Arguments:
        value: attention matrices [batch, head, query, key].
        batch: the prompts of `value`.
        buffer: (query, key) pairs of the segment, [pair, head].
        tokens: prompts of the run.
        segment: token range of the segment.
        axis: "pair" stores lower triangles, where query q has q + 1 keys; "square" stores every key.
    """
    for row, piece in enumerate(batch.pieces):
        if axis == "square":
            pairs = value[row, :, piece.start : piece.stop].flatten(1, 2).transpose(0, 1)
        else:
            # Row by row, as the store keeps triangles: query q comes before q + 1.
            triangle = np.stack(np.tril_indices(piece.stop))
            is_in_segment = triangle[0] >= piece.start
            queries, keys = torch.from_numpy(triangle[:, is_in_segment])
            pairs = value[row][:, queries, keys].transpose(0, 1)
        start = _pairs_before(tokens, segment.start, piece, axis)
        send(pairs, buffer[start : start + len(pairs)])


def _pairs_before(tokens: PackedTokens, segment_start: int, piece: Piece, axis: str) -> int:
    """Number of (query, key) pairs stored in the segment before the first pair of the piece's prompt."""
    sizes = tokens.row_size.astype(np.int64)
    first_prompt = int(tokens.prompt_of(np.array([segment_start]))[0])
    skipped = segment_start - int(tokens.row_start[first_prompt])
    prompts_between = sizes[first_prompt : piece.prompt]
    starts = np.array([piece.start, skipped])
    before_piece, before_segment = map(int, rows_before(axis, starts, sizes[[piece.prompt, first_prompt]]))
    return int(rows_before(axis, prompts_between, prompts_between).sum()) + before_piece - before_segment


def _are_tokens_finite(capture: Capture, value: Tensor, batch: PieceBatch) -> bool:
    """Whether a captured activation [batch, …] is finite at all tokens; padded positions do not matter.

    Masked attention scores may be -inf.
    """
    if is_fit(capture, value):
        return True
    dims = capture.point.dims
    axis = dims.index("position") if "position" in dims else 1
    rows = enumerate(batch.pieces)
    return all(is_fit(capture, value[row].narrow(axis - 1, 0, piece.stop)) for row, piece in rows)


class NonFiniteRows(Exception):
    """Captured activations of a segment contain NaN or infinity; `explain_non_finite` makes it a user error.

    Raised on the writer thread while the forward loop goes on: the forward pass that locates the first
    non-finite value must run later, on the main thread.
    """

    def __init__(self, kept_capture: KeptCapture, segment: int) -> None:
        """Name the capture and the segment with the non-finite value.

        Arguments:
            kept_capture: the capture.
            segment: number of the segment.
        """
        super().__init__(
            f"expected finite numbers in {kept_capture.variable} of segment {segment}, found NaN or infinity"
        )
        self.kept_capture, self.segment = kept_capture, segment


@contextmanager
def explain_non_finite(model: Model, entry: Entry, spec: BoundSpec) -> Iterator[None]:
    """In this block, NonFiniteRows becomes NotFinite, which names the first non-finite hook point.

    Arguments:
        model: runs the pass that finds the first non-finite hook point.
        entry: the stored run.
        spec: captures and interventions of the run.
    """
    try:
        yield
    except NonFiniteRows as error:
        kept_capture, n = error.kept_capture, error.segment
        prompts = dict.fromkeys(piece.prompt for piece in pieces_in(model, entry, n, spec))
        batches = ([entry.tokens.prompt(prompt).tolist()] for prompt in prompts)
        raise not_finite(
            model,
            batches,
            spec,
            f"'{kept_capture.capture.name}' ({kept_capture.variable}) in segment {n}",
            stored=entry.spec(kept_capture.variable).dtype,
        ) from None
