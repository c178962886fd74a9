"""Which heads look where: previous-token, duplicate-token and induction heads.

Border: stored attention patterns and the token ids they belong to; knows no model and never imports torch.

Scores are those of TransformerLens' `detect_head`: how well a head's pattern A matches a lower-triangular
matrix P of the prompt, 1 where such a head would look. A previous-token head looks one position back (Elhage
et al. 2021, "A Mathematical Framework for Transformer Circuits"); an induction head at the token behind an
earlier occurrence of the current one, which on repeated random tokens is the prefix matching score of Olsson
et al. 2022, "In-context Learning and Induction Heads"; a duplicate-token head at that occurrence itself (Wang
et al. 2022, "Interpretability in the Wild").

"mul": sum(A * P) / sum(A), the share of its attention that goes there. "abs":
1 - round(sum |A - P| / length, 3), also for P of other values. A list of prompts is averaged. One difference:
a head with nothing left to compare once BOS and the current token are excluded scores 0 ("mul"), where
TransformerLens gives NaN.

Memory: patterns stay packed as the store holds them and are read a block of query rows at a time, so that
neither the number of prompts nor the length of one matters.

Axes: layer, pair (lower triangles of all prompts end to end, row by row), head, prompt, token; kind = what is
looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, as_index, as_indices
from ...store.errors import ConfigError, EntryNotFound, ShapeError, nearest
from .rows import HEAD, PatternRows, RowBlock, by_layer, head_coords

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "KINDS",
    "MEASURES",
    "detect_head",
    "detection_pattern",
    "displaced_scores",
    "head_scores",
    "head_pairs",
    "pattern_scores",
]

Heads = Sequence[tuple[int, int]] | Mapping[int, Sequence[int]]

KINDS = ("previous_token_head", "duplicate_token_head", "induction_head")
"""What is looked for, by TransformerLens' names."""
MEASURES = ("mul", "abs")
UNSELECTED = -1.0
"""Score of a head that was not asked about."""
CAPTURE = "capture it: mizarr capture MODEL PROMPTS --hooks 'blocks.*.attn.hook_pattern'"


def detect_head(
    states: xr.Dataset,
    pattern: str | Array = "induction_head",
    heads: Heads | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> xr.DataArray:
    """Scores [layer, head] of the heads of stored prompts, as TransformerLens' function of that name gives
    them.

    states: captured, with `pattern` [layer, pair, head], e.g. an entry's `open()`.  pattern: one of `KINDS`,
    or a lower-triangular matrix [length, length] for prompts of that length.  heads: (layer, head) pairs, or
    layer -> heads; all others score -1.  exclude_bos: leave out attention to the first position, whatever
    token stands there.  exclude_current_token: leave out the diagonal.
    Raises EntryNotFound where no patterns are stored, PromptError for prompts of one token.
    """
    import xarray as xr

    if "pattern" not in states or "row_size" not in states.coords:
        held = ", ".join(map(str, states.data_vars)) or "none"
        raise EntryNotFound(f"expected attention patterns ('pattern'), found {held}; {CAPTURE}")
    held_pattern = by_layer(states["pattern"])
    layers = held_pattern["layer"].values.tolist()
    pairs = head_pairs(heads)
    if strange := [layer for layer, _ in pairs or () if layer not in layers]:
        raise EntryNotFound(f"expected heads in layers {layers}, found layer {strange[0]}; {CAPTURE}")
    asked = {
        "heads": pairs,
        "exclude_bos": exclude_bos,
        "exclude_current_token": exclude_current_token,
        "error_measure": error_measure,
    }
    given = {"pattern": held_pattern, "row_size": states["row_size"]}
    if isinstance(pattern, str):
        found = head_scores(**given, token_id=states["token_id"], kinds=(pattern,), **asked)
        named: xr.DataArray = found["score"].isel(kind=0, drop=True)
        return named
    wanted = xr.DataArray(np.asarray(pattern), dims=("query_position", "key_position"))
    scored: xr.DataArray = pattern_scores(**given, detection_pattern=wanted, **asked)["score"]
    return scored


def detection_pattern(kind: str, token_id: Sequence[int] | Array) -> Array:
    """The matrix [query, key], float32, 1 where a head of this kind looks in a prompt of these tokens.

    >>> detection_pattern("induction_head", [7, 8, 7]).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    ids = np.asarray(token_id)
    square = np.zeros((len(ids), len(ids)), np.float32)
    query, key = np.tril_indices(len(ids))
    square[query, key] = _looks(kind, ids, query, query, key)
    return square


@stage(
    version=1,
    inputs={"pattern": ("layer", "pair", HEAD), "token_id": ("token",), "row_size": ("prompt",)},
    outputs={
        "score": Output(
            ("kind", "layer", "head"), "1", "match with the detection pattern, mean over prompts"
        ),
        "spread": Output(("kind", "layer", "head"), "1", "its standard deviation over prompts"),
    },
    cells="layer",
    memory=1.0,
)
def head_scores(
    pattern: xr.DataArray,
    token_id: xr.DataArray,
    row_size: xr.DataArray,
    *,
    kinds: Sequence[str] = KINDS,
    heads: Sequence[tuple[int, int]] | None = None,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
    first_query: int = 0,
) -> xr.Dataset:
    """How much of every head's attention goes where heads of some kinds look; see the module for formulae.

    pattern: [layer, pair, head], any float dtype, lazy or not.  token_id: int [token], what stands where the
    kinds look for it: the prompts' own ids.  row_size: int [prompt], tokens of each.  heads: (layer, head)
    pairs, all others score -1; None for all.  first_query: earlier queries of every prompt take no part
    (TransformerLens: 0); in repeated sequences, those that can have found nothing yet.
    Returns float64; spread is 0 for a single prompt.
    Raises PromptError for prompts without two tokens or without a query left, ShapeError for pairs that are
    not those of the prompts, ConfigError for an unknown kind or measure.
    """
    for kind in kinds:
        if kind not in KINDS:
            near = nearest(kind, KINDS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"expected kinds among {', '.join(KINDS)}, found {kind!r}{hint}")
    rows = PatternRows.of(row_size, pattern, first_query)
    ids = _ids(token_id, rows)

    def wanted(block: RowBlock) -> list[Array]:
        return [_looks(kind, ids, block.token, block.query, block.key) for kind in kinds]

    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    return _scores(pattern, rows, wanted, kinds, measure, heads)


@stage(
    version=1,
    inputs={"pattern": ("layer", "pair", HEAD), "token_id": ("token",), "row_size": ("prompt",)},
    outputs={
        "score": Output(
            ("displacement", "layer", "head"), "1", "match with looking so far behind an earlier occurrence"
        ),
        "spread": Output(("displacement", "layer", "head"), "1", "its standard deviation over prompts"),
    },
    cells="layer",
    memory=1.0,
)
def displaced_scores(
    pattern: xr.DataArray,
    token_id: xr.DataArray,
    row_size: xr.DataArray,
    *,
    displacements: Sequence[int],
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
    first_query: int = 0,
) -> xr.Dataset:
    """As `head_scores`, for heads that look so many tokens behind an earlier occurrence of the current one.

    displacements: 1 is an induction head; others are what such a head is held against.
    """
    rows = PatternRows.of(row_size, pattern, first_query)
    ids = _ids(token_id, rows)

    def wanted(block: RowBlock) -> list[Array]:
        start = block.token - block.query
        return [
            ((ids[block.token] == ids[start + block.key - far]) & (block.key >= far)).astype(np.float32)
            for far in displacements
        ]

    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    found = _scores(pattern, rows, wanted, [str(far) for far in displacements], measure, None)
    return found.rename(kind="displacement").assign_coords(displacement=list(displacements))


@stage(
    version=1,
    inputs={
        "pattern": ("layer", "pair", HEAD),
        "detection_pattern": ("query_position", "key_position"),
        "row_size": ("prompt",),
    },
    outputs={
        "score": Output(("layer", "head"), "1", "match with the detection pattern, mean over prompts"),
        "spread": Output(("layer", "head"), "1", "its standard deviation over prompts"),
    },
    cells="layer",
    memory=1.0,
)
def pattern_scores(
    pattern: xr.DataArray,
    detection_pattern: xr.DataArray,
    row_size: xr.DataArray,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
    first_query: int = 0,
) -> xr.Dataset:
    """As `head_scores`, for a detection pattern of one's own: a lower-triangular matrix, the prompts all of
    its length.

    Raises ShapeError for a matrix that is not square, not lower-triangular, or not of the prompts' length.
    """
    matrix = np.asarray(detection_pattern.values, np.float32)
    rows = PatternRows.of(row_size, pattern, first_query)
    if matrix.shape[0] != matrix.shape[1] or (np.triu(matrix, 1) != 0).any():
        raise ShapeError(
            f"expected a square lower-triangular detection pattern, found {matrix.shape}"
            f"{' with values above the diagonal' if matrix.shape[0] == matrix.shape[1] else ''}; "
            "rows are queries, columns keys: numpy.tril cuts the rest"
        )
    lengths = np.unique(rows.sizes)
    if lengths.tolist() != [len(matrix)]:
        raise ShapeError(
            f"expected prompts of {len(matrix)} tokens, as the detection pattern, found "
            f"{lengths.min()} to {lengths.max()}; select prompts of one length: dataset.mi.prompts([…])"
        )
    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    found = _scores(pattern, rows, lambda block: [matrix[block.query, block.key]], ("own",), measure, heads)
    return found.isel(kind=0, drop=True)


def _ids(token_id: xr.DataArray, rows: PatternRows) -> Array:
    """The token ids [token]; ShapeError unless there is one per token of the rows."""
    ids = np.asarray(token_id.values)
    if len(ids) != rows.tokens:
        raise ShapeError(f"expected one token id per token ({rows.tokens}), found {len(ids)}")
    return ids


def head_pairs(heads: Heads | None) -> list[tuple[int, int]] | None:
    """Heads as (layer, head) pairs, however they were given."""
    if heads is None:
        return None
    if isinstance(heads, Mapping):
        pairs = [(layer, head) for layer, chosen in heads.items() for head in as_indices(chosen, "heads")]
    else:
        pairs = list(heads)
    return [(as_index(layer, "layers of heads"), as_index(head, "heads")) for layer, head in pairs]


@dataclass(frozen=True)
class _Measure:
    """How a match is measured, and which pairs count."""

    name: str
    exclude_bos: bool
    exclude_current_token: bool
    first_query: int

    def __post_init__(self) -> None:
        if self.name not in MEASURES:
            raise ConfigError(f"expected error_measure 'mul' or 'abs', found {self.name!r}")

    def counts(self, block: RowBlock) -> Array:
        """Which pairs of a block take part, bool [pair]."""
        found = block.query >= self.first_query
        if self.exclude_bos:
            found &= block.key > 0
        if self.exclude_current_token:
            found &= block.key < block.query
        return found

    def matched(self, weights: Array, wanted: Array) -> Array:
        """What is summed where `wanted` is not 0, [pair, head]; "abs": on top of the weights themselves, as
        |A - 0| = A."""
        wanted = wanted[:, None]
        return weights * wanted if self.name == "mul" else np.abs(weights - wanted) - weights

    def score(self, matched: Array, total: Array, queries: Array) -> Array:
        """Scores [prompt, head] from sums over the pairs of each prompt; queries: [prompt]."""
        if self.name == "mul":
            share: Array = np.divide(matched, total, out=np.zeros_like(matched), where=total != 0)
            return share
        error: Array = np.round((matched + total) / queries[:, None], 3)
        return 1 - error


def _scores(
    pattern: xr.DataArray,
    rows: PatternRows,
    wanted: Callable[[RowBlock], list[Array]],
    kinds: Sequence[str],
    measure: _Measure,
    heads: Sequence[tuple[int, int]] | None,
) -> xr.Dataset:
    """score and spread [kind, layer, head] over all prompts; layers without a selected head are not read."""
    import xarray as xr

    chosen = _selected(pattern, heads)
    n_prompts = len(rows.sizes)
    sums = np.zeros((2, len(kinds), *chosen.shape))
    for layer in np.flatnonzero(chosen.any(axis=1)).tolist():
        for _, score in _by_prompt(rows, pattern.isel(layer=layer), wanted, measure):
            sums[0, :, layer] += score.sum(1)
            sums[1, :, layer] += np.square(score).sum(1)
    mean = sums[0] / n_prompts
    variance = (sums[1] - n_prompts * mean**2) / max(n_prompts - 1, 1)
    spread = np.sqrt(np.maximum(variance, 0))
    dims = ("kind", "layer", "head")
    data = {
        "score": (dims, np.where(chosen, mean, UNSELECTED)),
        "spread": (dims, np.where(chosen, spread, 0.0)),
    }
    return xr.Dataset(data, coords={"kind": list(kinds), **head_coords(pattern)})


def _by_prompt(
    rows: PatternRows, pattern: xr.DataArray, wanted: Callable[[RowBlock], list[Array]], measure: _Measure
) -> Iterator[tuple[int, Array]]:
    """Scores of some prompts at a time: (the first of them, [kind, prompt, head]), each prompt once.

    A prompt whose rows are spread over blocks comes with the last of them.
    """
    carried: Array | None = None
    for block in rows.blocks(pattern):
        counts = measure.counts(block)
        first, last = int(block.prompt[0]), int(block.prompt[-1])
        shape = (last - first + 1, block.weights.shape[1])
        parts = []
        for looks in wanted(block):
            hits = np.flatnonzero((looks != 0) & counts)
            values = measure.matched(block.weights[hits], looks[hits])
            parts.append(_grouped(values, block.prompt[hits] - first, shape))
        parts.append(_grouped(block.weights[counts], block.prompt[counts] - first, shape))
        found = np.stack(parts, axis=1)
        if carried is not None:
            found[0] += carried
            carried = None
        if block.query[-1] + 1 < rows.sizes[last]:
            carried, found = found[-1], found[:-1]
        if len(found):
            queries = rows.sizes[first : first + len(found)] - measure.first_query
            matched, total = found[:, :-1], found[:, -1]
            scores = [measure.score(matched[:, kind], total, queries) for kind in range(matched.shape[1])]
            yield first, np.stack(scores)


def _looks(kind: str, ids: Array, token: Array, query: Array, key: Array) -> Array:
    """Where heads of a kind look: float32 [pair], 1 or 0.

    ids: [token], all prompts.  token: packed index of each pair's query; query, key: positions in its prompt.
    """
    if kind == "previous_token_head":
        found: Array = key == query - 1
    elif kind == "duplicate_token_head":
        found = (ids[token] == ids[token - query + key]) & (key < query)
    else:
        # Behind an earlier occurrence of the current token: the duplicates, one key to the right. At key 0
        # the index is that of another prompt's token, or wraps around; the second condition discards it.
        found = (ids[token] == ids[token - query + key - 1]) & (key > 0)
    return found.astype(np.float32)


def _selected(pattern: xr.DataArray, heads: Sequence[tuple[int, int]] | None) -> Array:
    """Which heads are asked about, bool [layer, head]."""
    layers = head_coords(pattern)["layer"].tolist()
    n_heads = pattern.sizes["head"]
    if heads is None:
        return np.ones((len(layers), n_heads), bool)
    found = np.zeros((len(layers), n_heads), bool)
    for layer, head in heads:
        if not 0 <= head < n_heads:
            raise ConfigError(f"expected heads in 0..{n_heads - 1}, found {head} (layer {layer})")
        if layer in layers:  # a cell holds one layer; the others are in other cells
            found[layers.index(layer), head] = True
    return found


def _grouped(values: Array, group: Array, shape: tuple[int, int]) -> Array:
    """Sums of the rows of each group, float64 [group, head]; `group` ascends."""
    found = np.zeros(shape)
    if len(values):
        present, starts = np.unique(group, return_index=True)
        found[present] = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return found
