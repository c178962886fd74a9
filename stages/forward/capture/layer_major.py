"""The harvest of a model larger than memory: the whole corpus runs through layer l before layer l + 1 is
read.

As many consecutive layers as fit in memory are loaded, and every segment runs through them batch by batch.
Their captures are committed; the output of the last of them is spooled to disk (spool.py) as the input of the
next group of layers. So every weight is read once for a corpus of any size, and memory holds one group of
layers, one batch and a few buffers. Batches, taps and layers are those of harvest.py, so the numbers are
bit-identical on one machine. A batch that does not fit in memory runs in parts and is spooled as one. Logits
are computed in a separate step after all layers, in which only the LM head is in memory: so it, too, is read
once, and takes the place of no layer.

A killed harvest resumes each segment at its last complete spool, provided that all missing captures lie
behind it; otherwise the segment is computed from its tokens again.

One process at a time works on a run. A second one waits, and then computes what is still missing.
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
    BatchSink,
    batches_of,
    buffer_dtype,
    buffer_maker,
    explain_non_finite,
    filled_arrays,
    ids_of,
    needs_every_core,
    pieces_in,
    segment_sink,
    spec_for_cells,
    stored_bytes,
)
from .overlap import OverlappedWriter, SegmentBuffer
from .spool import VERSION, Spool, SpoolFile

__all__ = ["harvest_by_layers"]

_WAIT = 0.2  # seconds before looking again at a run that another process goes through
_CLAIM = "layers"


@dataclass
class SegmentPass:
    """How far one segment has run through the layers, and what it still has to capture."""

    n: int
    """Number of the segment."""
    spec: BoundSpec
    """Interventions, and the captures that the segment still lacks."""
    spool_digest: str
    """Digest of everything that its activations between groups of layers depend on."""
    tokens: int
    """Number of tokens of the segment."""
    positions: int
    """Number of positions that are computed, padding and copies included."""
    next_layer: int | None
    """Layer that runs next; None before the tokens are embedded."""
    end_layer: int
    """Number of layers that run; the LM head counts as one if weights are streamed."""

    def __post_init__(self) -> None:
        self._start_layer = self.next_layer or 0

    def enter(self, layer: int) -> int:
        """Note that the segment now runs next through `layer`.

        Returns:
            The progress in tokens: the tokens of the segment times the share of its layers that it passed.
        """
        n_layers = self.end_layer - self._start_layer
        # Whole numbers, so that the progress of all groups adds up to the tokens of the segment.
        before, after = (
            (reached - self._start_layer) * self.tokens // n_layers
            for reached in (self.next_layer or 0, layer)
        )
        self.next_layer = layer
        return after - before

    def remaining(self, group: Sequence[int]) -> Sequence[int]:
        """The layers of a group that the segment has not run through."""
        return range(max(self.next_layer or 0, group[0]), min(self.end_layer, group[-1] + 1))

    def captured_in(self, layers: Sequence[int]) -> list[VariableLayer]:
        """(variable, layer) of the captures that these layers compute."""
        points = range(layers[0], layers[-1] + (2 if self.ends_with(layers) else 1))
        return [
            kept_capture.cell
            for kept_capture in self.spec.kept
            if _first_layer(kept_capture.capture, self.end_layer) in points
        ]

    def ends_with(self, layers: Sequence[int]) -> bool:
        """Whether the last of these layers is the last that the segment needs."""
        return layers[-1] + 1 == self.end_layer


def harvest_by_layers(
    model: Model,
    entry: Entry,
    spec: BoundSpec,
    *,
    batch: BatchSize,
    advance: Callable[[int, int], None] = lambda tokens, written: None,
) -> int:
    """Compute the captures that a stored run lacks, layer by layer, and commit them.

    All segments run through one group of layers before the next group is read from disk.

    Arguments:
        model: computes the activations.
        entry: the stored run that is completed.
        spec: captures to store, without gradients, and the interventions of the run.
        batch: positions per batch; lowered if memory runs out.
        advance: called after each commit with tokens and bytes committed. A token counts by the share of its
            layers that have run.

    Returns:
        Number of tokens computed by this call.

    Raises:
        NotFinite: if an activation is NaN or infinite.
        StoreFull: if the disk is too small for the activations between groups of layers.
        PlanError: if one prompt does not fit in memory.
    """
    cells = [kept_capture.cell for kept_capture in spec.kept]
    # One claim for the whole run, because its spools belong to one process at a time.
    claim = SegmentClaim(entry.folder, f"{entry.path}/seg/{_CLAIM}.claim")
    total, batch_tokens = 0, batch.tokens
    while entry.missing(cells):
        if not claim.acquire():
            time.sleep(_WAIT)
            continue
        try:
            spool = Spool(entry.folder, f"{entry.path}/seg")
            sweep = _LayerSweep(model, entry, spec, batch_tokens, batch, spool, advance)
            with explain_non_finite(model, entry, spec):
                total += _run_segments(sweep, entry.missing(cells))
        finally:
            claim.release()
    return total


def _run_segments(sweep: _LayerSweep, missing: dict[int, list[VariableLayer]]) -> int:
    """Run every segment with missing captures through the layers; returns the tokens of these segments."""
    model = sweep.model
    passes = [sweep.start(n, spec_for_cells(sweep.spec, cells)) for n, cells in missing.items()]
    num_layers, end_layer = model.config.num_layers, max(segment_pass.end_layer for segment_pass in passes)
    layers = range(min(segment_pass.next_layer or 0 for segment_pass in passes), min(end_layer, num_layers))
    weights = model.streamed
    groups = [layers] if weights is None else list(weights.window.groups(layers, sweep.buffers(passes)))
    if weights is not None and end_layer > num_layers:
        weights.window.expect_room(weights.head)
        groups.append(range(num_layers, end_layer))
    # A single group hands nothing on to another, so nothing is spooled.
    if len(groups) > 1:
        sweep.expect_room(passes)
    # Such a matrix would otherwise take the place of layers during the whole first group.
    if weights is not None and weights.embeds_whole:
        weights.window.keep_only([EMBEDDING])
        for segment_pass in passes:
            if segment_pass.next_layer is None:
                sweep.embed(segment_pass)
    for group in groups:
        if weights is not None:
            weights.window.keep_only(group if group[0] < num_layers else [weights.head])
        sweep.run_layers(passes, group)
    for segment_pass in passes:
        sweep.spool.clear(segment_pass.n)
    return sum(segment_pass.tokens for segment_pass in passes)


def _first_layer(capture: Capture, end_layer: int) -> int:
    """The first layer from whose input a capture can be computed; `end_layer` for points after all layers."""
    point = capture.point
    if point.layer is None:
        return 0 if point.kind == "embed" else end_layer
    return point.layer + (point.kind == "resid_post")


def _n_layers_needed(capture: Capture, num_layers: int, *, head_counts: bool) -> int:
    """Number of layers that run before a capture is complete.

    Arguments:
        capture: the capture.
        num_layers: layers of the model.
        head_counts: whether the LM head counts as one more layer, for captures of logits.
    """
    point = capture.point
    if point.layer is None:
        return 0 if point.kind == "embed" else num_layers + (head_counts and point.kind == LOGITS)
    return point.layer + 1


@dataclass(frozen=True)
class LayerJob:
    """Which captures of one segment and one group of layers the writer thread is to write."""

    segment_pass: SegmentPass
    """Segment, and its progress through the layers."""
    cells: tuple[VariableLayer, ...]
    """(variable, layer) of each array to write."""
    input_spool: SpoolFile | None
    """File from which the layers read their input, removed once the captures are written; None for layers
    that read tokens."""
    tokens: int
    """Tokens to report as progress."""
    handed_over: threading.Event = field(default_factory=threading.Event)
    """Set when the writer has finished computing and only waits for the disk."""


@dataclass(frozen=True)
class _LayerGroup:
    """Consecutive layers that a batch runs through in one call, with what is captured in them."""

    layers: Sequence[int]
    """Numbers of the layers; empty for the embedding, or the LM head."""
    spec: BoundSpec
    """Captures of these layers, and all interventions."""
    batch_sink: BatchSink
    """Opens, for one batch, the function that stores a capture."""
    is_last: bool
    """Whether no later layer runs, so that the output of these layers is not needed."""


@dataclass(frozen=True)
class _LayerSweep:
    """A capture of a whole corpus in layer order: all segments through one group of layers after another."""

    model: Model
    """Computes the activations."""
    entry: Entry
    """The stored run."""
    spec: BoundSpec
    """All captures and interventions of the run."""
    batch_tokens: int
    """Most positions per batch of the plan; constant, so that a capture that is resumed has equal batches."""
    size: BatchSize
    """Most positions computed at once; lowered if memory runs out."""
    spool: Spool
    """Files with the activations between two groups of layers."""
    advance: Callable[[int, int], None]
    """Called with tokens and bytes committed."""

    def start(self, n: int, spec: BoundSpec) -> SegmentPass:
        """Decide at which layer segment `n` starts.

        It starts at the last layer whose input is on disk and that no missing capture precedes, or else at
        its tokens.

        Arguments:
            n: number of the segment.
            spec: captures that the segment lacks, and interventions.
        """
        batches, num_layers = self._batches(n, spec), self.model.config.num_layers
        pieces = [[[piece.prompt, piece.run] for piece in batch.pieces] for batch in batches]
        spool_digest = digest("spool", VERSION, self.entry.run.digest, self.entry.segment_tokens, pieces)
        head_counts = self.model.streamed is not None
        # At least 1: a segment that lacks only `embed` still enters the first layer, whose taps see it.
        end_layer = max(
            1,
            *(_n_layers_needed(capture, num_layers, head_counts=head_counts) for capture in spec.captures),
        )
        first_layer = min(_first_layer(capture, num_layers) for capture in spec.captures)
        spooled_layers = [
            layer
            for layer in self.spool.layers(n, spool_digest)
            if layer <= first_layer and layer < end_layer
        ]
        positions = sum(len(batch.pieces) * batch.length * batch.copies for batch in batches)
        next_layer = max(spooled_layers, default=None)
        n_tokens = len(self.entry.segments[n])
        return SegmentPass(n, spec, spool_digest, n_tokens, positions, next_layer, end_layer)

    def expect_room(self, passes: Sequence[SegmentPass]) -> None:
        """Raise StoreFull if the disk is too small for the activations of all segments between two layers.

        The largest segment counts twice: its input is deleted only when its output is complete.
        """
        # At least 4 bytes: some families carry the stream in float32 whatever they compute in.
        position_bytes = self.model.config.hidden_size * max(4, self.model.dtype.itemsize)
        positions = [segment_pass.positions for segment_pass in passes]
        # Twice: the input spool of a segment is removed only after its output spool is complete.
        needed = position_bytes * (sum(positions) + max(positions))
        folder = self.entry.folder.scratch(self.entry.path)
        if needed > (free := free_bytes_at(folder)):
            raise StoreFull(
                f"expected {needed} bytes of free disk space in {folder} for activations between layers, "
                f"found {free}; capture fewer prompts at once, or delete files (mizarr gc)"
            )

    def buffers(self, passes: Sequence[SegmentPass]) -> dict[int, int]:
        """Layer -> bytes of the segment buffers for its captures."""
        bytes_by_layer: dict[int, int] = {}
        entry = self.entry
        for cell in {kept_capture.cell for segment_pass in passes for kept_capture in segment_pass.spec.kept}:
            rows = max(entry.rows(cell[0], segment_pass.n) for segment_pass in passes)
            itemsize = buffer_dtype(entry, cell[0]).itemsize
            size = BUFFERS * itemsize * rows * math.prod(entry.spec(cell[0]).tail)
            layer = cell[1] or 0
            bytes_by_layer[layer] = bytes_by_layer.get(layer, 0) + size
        return bytes_by_layer

    def embed(self, segment_pass: SegmentPass) -> None:
        """Embed the tokens of a segment, and write the input of the first layer to disk."""
        with self._spool_file(segment_pass, 0).written() as writer:
            for batch, inputs in self._inputs(segment_pass):
                group = _LayerGroup(
                    (), BoundSpec(), lambda part: contextlib.nullcontext(_ignore), is_last=False
                )
                writer.put(self._run_batch(batch, inputs, group))
        segment_pass.enter(0)

    def run_layers(self, passes: Sequence[SegmentPass], group: Sequence[int]) -> None:
        """Run every segment through a group of layers; commit captures, and write the output to disk."""
        entry = self.entry
        remaining = [
            (segment_pass, layers) for segment_pass in passes if (layers := segment_pass.remaining(group))
        ]
        cells = {cell for segment_pass, layers in remaining for cell in segment_pass.captured_in(layers)}
        # Then computing and writing take turns: a shared core would delay all others.
        takes_turns, device = needs_every_core(self.model), self.model.device
        threads = min(THREADS, torch.get_num_threads()) if takes_turns or device.type != "cpu" else 1

        def write(buffer: SegmentBuffer, job: LayerJob) -> None:
            n = job.segment_pass.n
            try:
                arrays = filled_arrays(buffer, spec_for_cells(self.spec, job.cells), entry, n)
                if arrays:
                    entry.write_segment(n, arrays, threads=threads, handed_over=job.handed_over.set)
                if job.input_spool is not None:
                    job.input_spool.remove()
                self.advance(job.tokens, stored_bytes(entry, arrays))
            finally:
                job.handed_over.set()

        def drop(job: LayerJob) -> None:
            job.handed_over.set()

        make = buffer_maker(entry, cells, [segment_pass.n for segment_pass, _ in remaining], device)
        with OverlappedWriter(make, write, drop, buffers=BUFFERS) as writer:
            for segment_pass, layers in remaining:
                buffer = writer.buffer()
                input_spool = None
                if segment_pass.next_layer is not None:
                    input_spool = self._spool_file(segment_pass, segment_pass.next_layer)
                group_spec = spec_for_cells(self.spec, segment_pass.captured_in(layers))
                self._fill(segment_pass, layers, group_spec, buffer)
                buffer.mark_copies_queued()
                written = tuple(kept_capture.cell for kept_capture in group_spec.kept)
                # The input spool goes only after the write: at any moment one of the two stands, for a
                # harvest that resumes.
                job = LayerJob(segment_pass, written, input_spool, segment_pass.enter(layers[-1] + 1))
                writer.submit(buffer, job)
                if takes_turns:
                    job.handed_over.wait()

    def _fill(
        self, segment_pass: SegmentPass, layers: Sequence[int], spec: BoundSpec, buffer: SegmentBuffer
    ) -> None:
        """Run all batches of a segment through some layers; fill the buffer, and write the output to disk."""
        is_last = segment_pass.ends_with(layers)
        # A number past the last layer stands for the LM head, which is no layer of the network.
        network_layers = [layer for layer in layers if layer < self.model.config.num_layers]
        with contextlib.ExitStack() as stack:
            writer = None
            if not is_last:
                writer = stack.enter_context(self._spool_file(segment_pass, layers[-1] + 1).written())
            batch_sink = stack.enter_context(
                segment_sink(self.model, self.entry, segment_pass.n, spec, buffer)
            )
            group = _LayerGroup(network_layers, spec, batch_sink, is_last)
            for batch, inputs in self._inputs(segment_pass):
                carried = self._run_batch(batch, inputs, group)
                if writer is not None:
                    writer.put(carried)

    def _run_batch(self, batch: PieceBatch, inputs: list[list[int]] | Carried, group: _LayerGroup) -> Carried:
        """Run a batch through a group of layers; returns their output.

        A batch that does not fit in memory is halved, repeatedly; the outputs of its parts are joined.
        """
        outputs: list[Carried] = []

        def run_part(part: PieceBatch, rows: slice) -> None:
            part_inputs: list[list[int]] | Carried
            if isinstance(inputs, dict):
                # Always a copy: a pass may overwrite its inputs and then run out of memory.
                copied = {name: tensor[rows].repeat(part.copies, 1, 1) for name, tensor in inputs.items()}
                part_inputs = {name: to_device(tensor, self.model.device) for name, tensor in copied.items()}
            else:
                part_inputs = inputs[rows] * part.copies
            with group.batch_sink(part) as sink:
                carried = self.model.stream_layers(
                    part_inputs, group.layers, group.spec, sink, ends=group.is_last
                )
            outputs.append(carried if part is batch else _without_copies(carried, len(part.pieces)))

        waiting, start = [batch], 0
        while waiting:
            part = waiting.pop(0)
            rows = slice(start, start + len(part.pieces))
            if self.size.allows(part):
                if fits(partial(run_part, part, rows)):
                    start = rows.stop
                    continue
                self.size.lower(part)
            # In front, so that outputs stay in the order of the rows.
            waiting[:0] = halves(part, fewest=FEW_ROWS)
        if len(outputs) == 1:
            return outputs[0]
        # Spooled as the batch was planned, so that a later group reads whole batches.
        whole = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        return {name: tensor.repeat(batch.copies, 1, 1) for name, tensor in whole.items()}

    def _inputs(self, segment_pass: SegmentPass) -> Iterator[tuple[PieceBatch, list[list[int]] | Carried]]:
        """Each batch of a segment with the input of its next layer: token ids, or activations from disk."""
        batches = self._batches(segment_pass.n, segment_pass.spec)
        if segment_pass.next_layer is None:
            yield from ((batch, ids_of(self.entry, batch)) for batch in batches)
        else:
            spool_file = self._spool_file(segment_pass, segment_pass.next_layer)
            yield from zip(batches, spool_file.batches(), strict=True)

    def _batches(self, n: int, spec: BoundSpec) -> list[PieceBatch]:
        pieces = pieces_in(self.model, self.entry, n, spec)
        return batches_of(self.model, self.entry, pieces, spec, self.batch_tokens)

    def _spool_file(self, segment_pass: SegmentPass, layer: int) -> SpoolFile:
        return self.spool.file(segment_pass.n, layer, segment_pass.spool_digest)


def _without_copies(carried: Carried, count: int) -> Carried:
    """The first `count` rows of each tensor, on the CPU; the other rows are copies of them."""
    return {name: tensor[:count].cpu() for name, tensor in carried.items()}


def _ignore(capture: Capture, value: Tensor) -> None:
    """Receives the captures of a pass that has none."""
