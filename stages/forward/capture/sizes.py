"""How captures are stored (dims, dtype), their bytes on disk and in buffers, and the length of segments.

Nothing is read or written here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....store.errors import PlanError
from ....store.runs.committed import VariableLayer
from ....store.runs.entries import ArraySpec
from ....store.runs.packed import PackedTokens
from ....store.runs.quantised import QUANTISED
from ..architectures.architecture import Architecture
from ..architectures.points import BY_NAME
from ..hooks.spec import KeptCapture, capture_name
from .batches import BUFFERS

__all__ = ["Sizes", "array_spec"]

OVERLAP = 8
"""Fewest segments of a corpus, so that writing one segment overlaps with computing the next."""
LONGEST = 1 << 20
"""Most tokens of a segment if only run reductions are stored; a killed capture recomputes at most one."""
SMALLEST_SHARD = 4 << 20
"""Bytes below which shards are not made smaller to gain overlap, because each shard costs a sync."""
_WIDE = 8
"""A capture more than this many times as wide as the residual stream determines the segment length."""
VOCABULARY = 1 << 11
"""Tokens of the vocabulary whose logits are computed at a time for reductions of logits."""
VOCABULARY_BYTES = 24 * VOCABULARY
"""Bytes per token of such a block: logits, sort keys, and exp in float64."""
_REDUCED = {QUANTISED: "float32"}
"""Storage dtype of the run -> dtype of its reductions, where they differ."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """Bytes that captures take on disk and in buffers; each array is a (variable, layer) pair."""

    specs: Mapping[str, ArraySpec]
    """Variable -> axes and dtype with which it is stored."""
    tokens: PackedTokens
    """Prompts of the run."""

    def row_bytes(self, cells: Sequence[VariableLayer]) -> int:
        """Bytes on disk of one row of each array, added up.

        Arguments:
            cells: (variable, layer) of each array.
        """
        return sum(self.specs[name].row_bytes for name, _ in cells)

    def stored(self, cells: Sequence[VariableLayer]) -> float:
        """Bytes on disk per token of all arrays together; the mean for arrays without one row per token.

        Arguments:
            cells: (variable, layer) of each array.
        """
        return sum(self.specs[name].row_bytes * self._rows_per_token(name) for name, _ in cells)

    def buffered(self, cells: Sequence[VariableLayer]) -> float:
        """Bytes in segment buffers per token of all arrays together; int8 arrays are float32 there.

        Arguments:
            cells: (variable, layer) of each array.
        """
        return sum(self._buffer_row_bytes(self.specs[name]) * self._rows_per_token(name) for name, _ in cells)

    def written(self, cells: Sequence[VariableLayer], tokens: int, segments: int) -> int:
        """Bytes on disk that some tokens take, divided into segments.

        Arguments:
            cells: (variable, layer) pairs.
            tokens: number of tokens.
            segments: number of segments; each has one row of every run reduction.
        """
        run_cells, token_cells = self._split_run_reductions(cells)
        return math.ceil(self.stored(token_cells) * tokens) + self.row_bytes(run_cells) * segments

    def buffer(self, cells: Sequence[VariableLayer], tokens: int) -> int:
        """Bytes of the buffer for one segment.

        Arguments:
            cells: (variable, layer) pairs.
            tokens: number of tokens of the segment.
        """
        run_cells, token_cells = self._split_run_reductions(cells)
        return math.ceil(self.buffered(token_cells) * tokens) + self.row_bytes(run_cells)

    def segment_tokens(self, cells: Sequence[VariableLayer], width: int, memory: int, *, of_run: bool) -> int:
        """Choose the number of tokens per segment: the store's default, or less for memory and overlap.

        A corpus has at least `OVERLAP` segments, as long as its largest shards stay above `SMALLEST_SHARD`.
        Sizes are those of the residual stream, unless a capture is much wider: so two stores that capture
        different points first still cut a run alike.

        Arguments:
            cells: captures that are buffered.
            width: numbers per token of the residual stream.
            memory: bytes of the segment buffers.
            of_run: whether only run reductions are stored, which have one row per segment: segments are then
                longer.

        Raises:
            PlanError: if one token does not fit in `memory`.
        """
        from ....store.store import default_segment_tokens

        fitting_memory = int(memory // (BUFFERS * self.buffered(cells)))
        if fitting_memory < 1:
            raise PlanError(
                f"memory: expected at least {math.ceil(self.stored(cells))} bytes, for one token of "
                f"{len(cells)} captures, found {memory}; raise it (--memory), or capture fewer hook points"
            )
        specs = list(self.specs.values())
        dtype = specs[0].run_dtype or specs[0].dtype
        stream = ArraySpec("stream", "", ("token", "hidden"), {"hidden": width}, dtype, None)
        largest = max(self.stored([(name, None)]) for name in self.specs)
        if not of_run and largest <= _WIDE * stream.row_bytes:
            largest, specs = stream.row_bytes, [stream]
        for_overlap = max(self.tokens.n_tokens // OVERLAP, int(SMALLEST_SHARD // largest), 1)
        longest = min(fitting_memory, for_overlap, *([LONGEST] if of_run else []))
        # A power of two, so that inner chunks of a power of two divide it.
        return min(default_segment_tokens(self.tokens, specs), 1 << (longest.bit_length() - 1))

    def _split_run_reductions(
        self, cells: Sequence[VariableLayer]
    ) -> tuple[list[VariableLayer], list[VariableLayer]]:
        """(arrays with one row per segment, all other arrays), each by (variable, layer)."""
        run_cells = [cell for cell in cells if self.specs[cell[0]].packed == "segment"]
        return run_cells, [cell for cell in cells if cell not in run_cells]

    def _rows_per_token(self, variable: str) -> float:
        return self.specs[variable].rows_per_token(self.tokens)

    def _buffer_row_bytes(self, spec: ArraySpec) -> float:
        # int8 is quantised when it is written: buffers hold the float32 numbers.
        return 4 * math.prod(spec.tail) if spec.dtype == QUANTISED else spec.row_bytes


_NONZERO_AHEAD = ("scores", "attn_scores")
"""Attention matrices of a causal model that are not zero above the diagonal: raw scores have any value there,
masked scores -inf. Gradients are not zero there either: that of a zero weight need not be."""


def array_spec(
    kept_capture: KeptCapture,
    config: Architecture,
    dtype: str,
    over: int | None = None,
    *,
    looks_ahead: bool = False,
) -> ArraySpec:
    """Decide with which axes and dtype a capture is stored.

    Batch and position are packed into one token axis, followed by head; an axis of length one is dropped.
    Activations without a position have one row per prompt. Attention matrices that are zero above the
    diagonal are stored as lower triangles, others in full.

    Arguments:
        kept_capture: the capture with its token selection or reduction.
        config: architecture of the model.
        dtype: storage dtype of the run.
        over: number of tokens that a run reduction covers; None without one.
        looks_ahead: whether interventions let positions attend to later ones.
    """
    capture, selection = kept_capture.capture, kept_capture.keep.selection
    kind = BY_NAME[capture.point.kind]
    # All layers share one array: an axis that is wider in some of them is an error here.
    sized = ((axis, config.axis_sizes.get(axis)) for axis in kind.dims if axis != "one")
    sizes = {axis: size for axis, size in sized if size is not None}
    is_triangle = kind.name not in _NONZERO_AHEAD and not capture.is_gradient
    matrix = "pair" if is_triangle and not (config.looks_ahead or looks_ahead) else "square"
    packed_dims = {"position": "token", "query_position": matrix}
    packed = next((axis for dim, axis in packed_dims.items() if dim in kind.dims), "prompt_id")
    if selection is not None:
        packed = selection.axis
    tail, meaning = tuple(dim for dim in kind.dims if dim in sizes), kind.meaning
    reduction, array_dtype = kept_capture.keep.reduction, dtype
    if reduction is not None:
        # Reductions are small: the scales of int8 would cost as many bytes as int8 saves.
        dims, array_dtype = reduction.dims(kind), reduction.dtype or _REDUCED.get(dtype, dtype)
        sizes |= dict(reduction.axes)
        packed = packed if "position" in dims else "segment" if reduction.is_of_run else "prompt_id"
        tail, meaning = tuple(dim for dim in dims if dim in sizes), f"{reduction.meaning} {meaning}"
    if kind.name.endswith("attn_scores") and not capture.is_gradient:
        array_dtype = _REDUCED.get(dtype, dtype)  # int8 cannot hold -inf: its scale would be infinite
    layer_dims = ("layer",) if kind.per_layer else ()
    hook_name = capture_name(kind.path, capture.is_gradient)
    return ArraySpec(
        kept_capture.variable,
        f"{hook_name}{kept_capture.keep.suffix.replace('__', '@', 1)}",
        (*layer_dims, packed, *tail),
        {dim: sizes[dim] for dim in tail},
        array_dtype,
        config.num_layers if kind.per_layer else None,
        f"gradient at: {meaning}" if capture.is_gradient else meaning,
        "1",
        selection if packed not in ("segment", "prompt_id") else None,
        None if array_dtype == dtype else dtype,
        over,
        None if reduction is None else reduction.combine,
    )
