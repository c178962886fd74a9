"""How what is captured is stored, and what that takes: bytes of a token on disk and in buffers, and segments.

Border: hook points and tokens in, numbers out; nothing is read or written.
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

__all__ = ["ITEMSIZE", "Sizes", "array_spec"]

OVERLAP = 8
"""Segments a corpus is cut into at least, so that writing one hides behind computing the next."""
LONGEST = 1 << 20
"""Tokens of a segment at most where nothing is kept of each: no more than that is ever computed again."""
SMALLEST_SHARD = 4 << 20
"""Bytes below which shards are not made smaller for the sake of overlap: each costs a sync."""
_WIDE = 8
"""A capture this many times as wide as the residual stream says by itself how a run is cut."""
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes of a number of what is computed."""
VOCABULARY = 1 << 11
"""Columns of the vocabulary of which logits are made at a time, for a store that keeps reductions of them."""
VOCABULARY_BYTES = 24 * VOCABULARY
"""Bytes a token takes meanwhile: logits, their order, and exp in float64."""
_REDUCED = {QUANTISED: "float32"}
"""In what reductions are kept where the run is stored otherwise."""
_WIDENED = {QUANTISED: 4}
"""Bytes of a number in a buffer that holds it wider than it is stored."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """What tokens of a run take. specs: variable -> how it is stored."""

    specs: Mapping[str, ArraySpec]
    tokens: PackedTokens

    def row_bytes(self, cells: Sequence[VariableLayer]) -> int:
        """Bytes of one row of each of some cells on disk."""
        return sum(self.specs[name].row_bytes for name, _ in cells)

    def stored(self, cells: Sequence[VariableLayer]) -> float:
        """Bytes of one token over some cells on disk; what is packed otherwise by the mean."""
        return sum(self.specs[name].row_bytes * self._rows(name) for name, _ in cells)

    def held(self, cells: Sequence[VariableLayer]) -> float:
        """Bytes of one token over some cells in a buffer, where int8 is not yet made."""
        return sum(self._held_row(self.specs[name]) * self._rows(name) for name, _ in cells)

    def written(self, cells: Sequence[VariableLayer], tokens: int, segments: int) -> int:
        """Bytes of so many tokens of a run, in so many segments, on disk."""
        of_run, others = self._apart(cells)
        return math.ceil(self.stored(others) * tokens) + self.row_bytes(of_run) * segments

    def buffer(self, cells: Sequence[VariableLayer], tokens: int) -> int:
        """Bytes of one segment of so many tokens in a buffer."""
        of_run, others = self._apart(cells)
        return math.ceil(self.held(others) * tokens) + self.row_bytes(of_run)

    def segment_tokens(self, cells: Sequence[VariableLayer], width: int, memory: int, *, of_run: bool) -> int:
        """Tokens of a segment: as many as the store likes, but no more than memory allows, nor so many that
        nothing overlaps.

        While a segment is written the next is computed: a corpus is cut into at least `OVERLAP` of them, as
        long as its largest shards stay above a few MiB. Sizes are those of the residual stream, `width`
        numbers a token, whatever is captured first, unless that is much wider: so two stores cut a run alike.
        of_run: whether all that is kept are figures of the run, which every segment has: of those there are
        fewer then. Raises PlanError where no token fits the memory.
        """
        from ....store.store import default_segment_tokens

        affordable = int(memory // (BUFFERS * self.held(cells)))
        if affordable < 1:
            raise PlanError(
                f"a token of {len(cells)} captures needs {math.ceil(self.stored(cells))} bytes, more than "
                f"the memory of {memory}; capture fewer points, or raise memory="
            )
        own = list(self.specs.values())
        dtype = own[0].run_dtype or own[0].dtype
        stream = ArraySpec("stream", "", ("token", "hidden"), {"hidden": width}, dtype, None)
        largest = max(self.stored([(name, None)]) for name in self.specs)
        if not of_run and largest <= _WIDE * stream.row_bytes:
            largest, own = stream.row_bytes, [stream]
        overlapping = max(self.tokens.n_tokens // OVERLAP, int(SMALLEST_SHARD // largest), 1)
        longest = min(affordable, overlapping, *([LONGEST] if of_run else []))
        return min(default_segment_tokens(self.tokens, own), 1 << (longest.bit_length() - 1))

    def _apart(self, cells: Sequence[VariableLayer]) -> tuple[list[VariableLayer], list[VariableLayer]]:
        """Those that have a row for each segment, and the others."""
        of_run = [cell for cell in cells if self.specs[cell[0]].packed == "segment"]
        return of_run, [cell for cell in cells if cell not in of_run]

    def _rows(self, variable: str) -> float:
        return self.specs[variable].rows_per_token(self.tokens)

    def _held_row(self, spec: ArraySpec) -> float:
        return math.prod(spec.tail) * _WIDENED[spec.dtype] if spec.dtype in _WIDENED else spec.row_bytes


_NONZERO_AHEAD = ("scores", "attn_scores")
"""Attention matrices that are not zero above the diagonal of a causal model: raw scores are any number there,
masked ones -inf. Nor are gradients: a weight of zero may have one."""


def array_spec(
    kept: KeptCapture,
    config: Architecture,
    dtype: str,
    over: int | None = None,
    *,
    looks_ahead: bool = False,
) -> ArraySpec:
    """How a captured activation is stored: token-major, batch and positions packed, heads behind tokens, an
    axis of one dropped. What has no position is of a prompt. Attention matrices that are zero above the
    diagonal are kept as lower triangles, others as they are.

    over: tokens that what is kept of a run is of. looks_ahead: whether interventions let positions see later
    ones.
    """
    capture, selection = kept.capture, kept.keep.selection
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
    rest, meaning = tuple(dim for dim in kind.dims if dim in sizes), kind.meaning
    reduction, own_dtype = kept.keep.reduction, dtype
    if reduction is not None:
        # A few numbers made of many are kept as they are: scales would cost what int8 saves.
        left, own_dtype = reduction.dims(kind), reduction.dtype or _REDUCED.get(dtype, dtype)
        sizes |= dict(reduction.axes)
        packed = packed if "position" in left else "segment" if reduction.is_of_run else "prompt_id"
        rest, meaning = tuple(dim for dim in left if dim in sizes), f"{reduction.meaning} {meaning}"
    if kind.name.endswith("attn_scores") and not capture.is_gradient:
        own_dtype = _REDUCED.get(dtype, dtype)  # -inf has no scale
    front = ("layer",) if kind.per_layer else ()
    return ArraySpec(
        kept.variable,
        f"{capture_name(kind.path, capture.is_gradient)}{kept.keep.suffix.replace('__', '@', 1)}",
        (*front, packed, *rest),
        {dim: sizes[dim] for dim in rest},
        own_dtype,
        config.num_layers if kind.per_layer else None,
        f"gradient at: {meaning}" if capture.is_gradient else meaning,
        "1",
        selection if packed != "segment" else None,
        None if own_dtype == dtype else dtype,
        over,
        None if reduction is None else reduction.combine,
    )
