"""Detect previous-token, duplicate-token and induction heads from stored attention patterns.

The scores are those of TransformerLens' `detect_head`: how well a head's pattern A matches a lower-triangular
matrix P, which is 1 where such a head attends.

- previous-token head: to the previous position (Elhage et al. 2021, "A Mathematical Framework for Transformer
  Circuits");
- induction head: to the token after an earlier occurrence of the current token; on repeated random tokens
  this is the prefix matching score of Olsson et al. 2022, "In-context Learning and Induction Heads";
- duplicate-token head: to that occurrence itself (Wang et al. 2022, "Interpretability in the Wild").

Measures: "mul" is sum(A * P) / sum(A), the share of attention that matches; "abs" is 1 - round(sum |A - P| /
length, 3), also for P with other values. Several prompts are averaged. One difference: a head without any
attention left after BOS and the current token are excluded scores 0 ("mul"); TransformerLens gives NaN.

Memory: patterns stay packed and are read in blocks of query rows, whatever the number and length of prompts.

Axes: layer, pair (lower triangles of all prompts end to end, row by row), head, prompt, token; kind (of
head). Needs no model and no torch.
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
"""A selection of heads: (layer, head) pairs, or layer -> heads."""
KINDS = ("previous_token_head", "duplicate_token_head", "induction_head")
"""Kinds of heads, by TransformerLens' names."""
MEASURES = ("mul", "abs")
"""Measures of how well a pattern matches, by TransformerLens' names; formulae in the module docstring."""
UNSELECTED = -1.0
"""Score of heads that were not selected, as in TransformerLens."""
CAPTURE = "capture it: mizarr capture MODEL PROMPTS --hooks 'blocks.*.attn.hook_pattern'"
"""Next step in messages about missing patterns."""


def detect_head(
    states: xr.Dataset,
    pattern: str | Array = "induction_head",
    heads: Heads | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> xr.DataArray:
    """Detection scores [layer, head] for the heads of a stored run; the counterpart of TransformerLens'
    `detect_head`.

    Arguments:
        states: Opened run with attention patterns, the variable `pattern` [layer, pair, head].
        pattern: One of `KINDS`, or a lower-triangular matrix [length, length] for prompts of that length.
        heads: (layer, head) pairs, or layer -> heads; all others score -1. None for all.
        exclude_bos: Whether to ignore attention to the first position, whatever its token.
        exclude_current_token: Whether to ignore the diagonal.
        error_measure: "mul" or "abs", see the module docstring.

    Raises:
        EntryNotFound: No patterns are stored, or not for these layers.
        PromptError: A prompt has only one token.
    """
    import xarray as xr

    if "pattern" not in states or "row_size" not in states.coords:
        stored_variables = ", ".join(map(str, states.data_vars)) or "none"
        raise EntryNotFound(
            f"this run has no attention patterns (variable 'pattern'), only {stored_variables}; {CAPTURE}"
        )
    stored_pattern = by_layer(states["pattern"])
    layers = stored_pattern["layer"].values.tolist()
    pairs = head_pairs(heads)
    if absent := [layer for layer, _ in pairs or () if layer not in layers]:
        raise EntryNotFound(
            f"a head of layer {absent[0]} was selected, but the run has patterns of layers {layers} only; "
            f"{CAPTURE}"
        )
    options = {
        "heads": pairs,
        "exclude_bos": exclude_bos,
        "exclude_current_token": exclude_current_token,
        "error_measure": error_measure,
    }
    inputs = {"pattern": stored_pattern, "row_size": states["row_size"]}
    if isinstance(pattern, str):
        scores = head_scores(**inputs, token_id=states["token_id"], kinds=(pattern,), **options)
        score: xr.DataArray = scores["score"].isel(kind=0, drop=True)
        return score
    matrix = xr.DataArray(np.asarray(pattern), dims=("query_position", "key_position"))
    scored: xr.DataArray = pattern_scores(**inputs, detection_pattern=matrix, **options)["score"]
    return scored


def detection_pattern(kind: str, token_id: Sequence[int] | Array) -> Array:
    """Detection matrix of a prompt, float32 [query, key]: 1 where a head of this kind attends, else 0.

    Arguments:
        kind: One of `KINDS`.
        token_id: Token ids of the prompt.

    >>> detection_pattern("induction_head", [7, 8, 7]).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    ids = np.asarray(token_id)
    square = np.zeros((len(ids), len(ids)), np.float32)
    # A causal head attends to no later position.
    query, key = np.tril_indices(len(ids))
    square[query, key] = _detection_mask(kind, ids, query, query, key)
    return square


@stage(
    version=1,
    inputs={"pattern": ("layer", "pair", HEAD), "token_id": ("token",), "row_size": ("prompt",)},
    outputs={
        "score": Output(
            ("kind", "layer", "head"), "1", "match with the detection pattern, mean over prompts"
        ),
        "spread": Output(("kind", "layer", "head"), "1", "standard deviation of the score over prompts"),
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
    """How well every head's attention matches that of each kind of head; formulae in the module docstring.

    Arguments:
        pattern: Packed patterns, [layer, pair, head], any float dtype, lazy or not.
        token_id: Token ids in which earlier occurrences are looked for, int [token]; usually those of the
            prompts.
        row_size: Number of tokens of each prompt, int [prompt].
        kinds: Kinds of heads, from `KINDS`.
        heads: (layer, head) pairs to score, all others score -1; None for all.
        exclude_bos: Whether to ignore attention to the first position, whatever its token.
        exclude_current_token: Whether to ignore attention of a position to itself.
        error_measure: "mul" or "abs", see the module docstring.
        first_query: First query position that counts (TransformerLens: 0). For repeated sequences, the start
            of the first repetition, as earlier queries have nothing to find.

    Returns:
        Scores and their standard deviations over prompts, float64; the deviation is 0 for a single prompt.

    Raises:
        PromptError: A prompt has fewer than two tokens or no query that counts.
        ShapeError: The pairs are not those of the prompts.
        ConfigError: Unknown kind or measure.
    """
    for kind in kinds:
        if kind not in KINDS:
            near = nearest(kind, KINDS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"expected kinds among {', '.join(KINDS)}, found {kind!r}{hint}")
    rows = PatternRows.of(row_size, pattern, first_query)
    ids = _ids(token_id, rows)

    def masks(block: RowBlock) -> list[Array]:
        return [_detection_mask(kind, ids, block.token, block.query, block.key) for kind in kinds]

    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    return _scores(pattern, rows, masks, kinds, measure, heads)


@stage(
    version=1,
    inputs={"pattern": ("layer", "pair", HEAD), "token_id": ("token",), "row_size": ("prompt",)},
    outputs={
        "score": Output(
            ("displacement", "layer", "head"),
            "1",
            "match with attention this many tokens after an earlier occurrence, mean over prompts",
        ),
        "spread": Output(
            ("displacement", "layer", "head"), "1", "standard deviation of the score over prompts"
        ),
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
    """How well every head attends a given number of tokens after an earlier occurrence of the current token.

    Arguments:
        pattern: Packed patterns, [layer, pair, head], any float dtype, lazy or not.
        token_id: Token ids in which earlier occurrences are looked for, int [token].
        row_size: Number of tokens of each prompt, int [prompt].
        displacements: Numbers of tokens; 1 is an induction head, others serve as its null distribution.
        exclude_bos: Whether to ignore attention to the first position, whatever its token.
        exclude_current_token: Whether to ignore attention of a position to itself.
        error_measure: "mul" or "abs", see the module docstring.
        first_query: First query position that counts.
    """
    rows = PatternRows.of(row_size, pattern, first_query)
    ids = _ids(token_id, rows)

    def masks(block: RowBlock) -> list[Array]:
        prompt_start = block.token - block.query
        current = ids[block.token]
        return [
            # Keys below the displacement index into the previous prompt; the second condition discards them.
            ((current == ids[prompt_start + block.key - shift]) & (block.key >= shift)).astype(np.float32)
            for shift in displacements
        ]

    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    scores = _scores(pattern, rows, masks, [str(shift) for shift in displacements], measure, None)
    return scores.rename(kind="displacement").assign_coords(displacement=list(displacements))


@stage(
    version=1,
    inputs={
        "pattern": ("layer", "pair", HEAD),
        "detection_pattern": ("query_position", "key_position"),
        "row_size": ("prompt",),
    },
    outputs={
        "score": Output(("layer", "head"), "1", "match with the detection pattern, mean over prompts"),
        "spread": Output(("layer", "head"), "1", "standard deviation of the score over prompts"),
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
    """How well every head's attention matches a detection matrix that the caller provides.

    Arguments:
        pattern: Packed patterns, [layer, pair, head], any float dtype, lazy or not.
        detection_pattern: Lower-triangular matrix [query_position, key_position] for prompts of this length.
        row_size: Number of tokens of each prompt, int [prompt].
        heads: (layer, head) pairs to score, all others score -1; None for all.
        exclude_bos: Whether to ignore attention to the first position, whatever its token.
        exclude_current_token: Whether to ignore attention of a position to itself.
        error_measure: "mul" or "abs", see the module docstring.
        first_query: First query position that counts.

    Raises:
        ShapeError: The matrix is not square, not lower-triangular, or not of the prompts' length.
    """
    matrix = np.asarray(detection_pattern.values, np.float32)
    rows = PatternRows.of(row_size, pattern, first_query)
    if matrix.shape[0] != matrix.shape[1] or (np.triu(matrix, 1) != 0).any():
        raise ShapeError(
            f"expected a square lower-triangular detection pattern, found shape {matrix.shape}"
            f"{' with values above the diagonal' if matrix.shape[0] == matrix.shape[1] else ''}; rows are "
            "queries and columns keys, and numpy.tril sets the values above the diagonal to 0"
        )
    lengths = np.unique(rows.sizes)
    if lengths.tolist() != [len(matrix)]:
        raise ShapeError(
            f"expected prompts of {len(matrix)} tokens, the size of the detection pattern, found prompts of "
            f"{lengths.min()} to {lengths.max()} tokens; select prompts of that length with "
            "dataset.mi.prompts([…])"
        )
    measure = _Measure(error_measure, exclude_bos, exclude_current_token, first_query)
    scores = _scores(pattern, rows, lambda block: [matrix[block.query, block.key]], ("own",), measure, heads)
    return scores.isel(kind=0, drop=True)


def _ids(token_id: xr.DataArray, rows: PatternRows) -> Array:
    """Token ids as an array [token]; ShapeError unless there is one for each token of the patterns."""
    ids = np.asarray(token_id.values)
    if len(ids) != rows.tokens:
        raise ShapeError(
            f"expected a token id for each of the {rows.tokens} tokens of the attention patterns, found "
            f"{len(ids)} ids"
        )
    return ids


def head_pairs(heads: Heads | None) -> list[tuple[int, int]] | None:
    """Convert a selection of heads to a list of (layer, head) pairs; None stays None and means all heads."""
    if heads is None:
        return None
    if isinstance(heads, Mapping):
        pairs = [
            (layer, head)
            for layer, head_numbers in heads.items()
            for head in as_indices(head_numbers, "heads")
        ]
    else:
        pairs = list(heads)
    return [(as_index(layer, "layers of heads"), as_index(head, "heads")) for layer, head in pairs]


@dataclass(frozen=True)
class _Measure:
    """How a score is computed: the error measure, and which (query, key) pairs count."""

    name: str
    """"mul" or "abs"."""
    exclude_bos: bool
    """Whether pairs with key position 0 are ignored."""
    exclude_current_token: bool
    """Whether pairs of a position with itself are ignored."""
    first_query: int
    """First query position that counts."""

    def __post_init__(self) -> None:
        if self.name not in MEASURES:
            raise ConfigError(f"expected 'mul' or 'abs' as error_measure, found {self.name!r}")

    def counts(self, block: RowBlock) -> Array:
        """Whether each (query, key) pair of a block enters the score, bool [pair]: `first_query`,
        `exclude_bos` and `exclude_current_token` leave pairs out."""
        counted = block.query >= self.first_query
        if self.exclude_bos:
            counted &= block.key > 0
        if self.exclude_current_token:
            counted &= block.key < block.query
        return counted

    def matched(self, weights: Array, target: Array) -> Array:
        """Summands of the score at pairs where the detection matrix is not 0, [pair, head].

        For "abs" the weights are subtracted from |A - P|, because `score` adds the weights of all pairs.

        Arguments:
            weights: Attention weights A, [pair, head].
            target: Entries of the detection matrix P, [pair].
        """
        # |A - P| is A wherever P is 0: so only the few pairs with P != 0 are visited, and sum A is added
        # later.
        target = target[:, None]
        return weights * target if self.name == "mul" else np.abs(weights - target) - weights

    def score(self, matched: Array, total: Array, queries: Array) -> Array:
        """Score of each head on each prompt, [prompt, head].

        Arguments:
            matched: Sum of `matched` over the pairs of each prompt, [prompt, head].
            total: Sum of the weights over the pairs that count, [prompt, head].
            queries: Number of queries of each prompt that count, [prompt].
        """
        # If no weight counts, the score is 0, not 0 / 0: one NaN would hide the mean over a corpus.
        if self.name == "mul":
            share: Array = np.divide(matched, total, out=np.zeros_like(matched), where=total != 0)
            return share
        # Rounded to 3 digits as in TransformerLens, whose numbers are reproduced.
        error: Array = np.round((matched + total) / queries[:, None], 3)
        return 1 - error


def _scores(
    pattern: xr.DataArray,
    rows: PatternRows,
    masks: Callable[[RowBlock], list[Array]],
    kinds: Sequence[str],
    measure: _Measure,
    heads: Sequence[tuple[int, int]] | None,
) -> xr.Dataset:
    """Mean and standard deviation of scores over prompts, [kind, layer, head].

    Arguments:
        pattern: Packed patterns, [layer, pair, head]; layers without a selected head are not read.
        rows: Layout of the patterns.
        masks: Function from a block to the entries [pair] of each kind's detection matrix.
        kinds: Names of the kinds.
        measure: Error measure, and the pairs that count.
        heads: (layer, head) pairs to score; None for all.
    """
    import xarray as xr

    selected = _selected_heads(pattern, heads)
    n_prompts = len(rows.sizes)
    total, total_of_squares = np.zeros((2, len(kinds), *selected.shape))
    for layer in np.flatnonzero(selected.any(axis=1)).tolist():
        for _, score in _scores_by_prompt(rows, pattern.isel(layer=layer), masks, measure):
            total[:, layer] += score.sum(1)
            total_of_squares[:, layer] += np.square(score).sum(1)
    mean = total / n_prompts
    # From sums, so that scores of single prompts need not be kept; float64 makes the cancellation harmless.
    variance = (total_of_squares - n_prompts * mean**2) / max(n_prompts - 1, 1)
    # Rounding may leave a variance of -1e-17.
    spread = np.sqrt(np.maximum(variance, 0))
    dims = ("kind", "layer", "head")
    data = {
        "score": (dims, np.where(selected, mean, UNSELECTED)),
        "spread": (dims, np.where(selected, spread, 0.0)),
    }
    return xr.Dataset(data, coords={"kind": list(kinds), **head_coords(pattern)})


def _scores_by_prompt(
    rows: PatternRows, pattern: xr.DataArray, masks: Callable[[RowBlock], list[Array]], measure: _Measure
) -> Iterator[tuple[int, Array]]:
    """Yield (index of the first prompt, scores [kind, prompt, head]) for successive groups of prompts.

    A prompt whose query rows are in several blocks is yielded with the last of them. Arguments as in
    `_scores`, with the pattern of one layer, [pair, head].
    """
    sums_of_unfinished_prompt: Array | None = None
    for block in rows.blocks(pattern):
        counts = measure.counts(block)
        first_prompt, last_prompt = int(block.prompt[0]), int(block.prompt[-1])
        shape = (last_prompt - first_prompt + 1, block.weights.shape[1])
        parts = []
        for mask in masks(block):
            hits = np.flatnonzero((mask != 0) & counts)
            values = measure.matched(block.weights[hits], mask[hits])
            parts.append(_sums_by_group(values, block.prompt[hits] - first_prompt, shape))
        # The last part is the total weight, the denominator of "mul".
        parts.append(_sums_by_group(block.weights[counts], block.prompt[counts] - first_prompt, shape))
        sums = np.stack(parts, axis=1)
        if sums_of_unfinished_prompt is not None:
            sums[0] += sums_of_unfinished_prompt
            sums_of_unfinished_prompt = None
        # The last prompt continues in the next block, to which its sums are added.
        if block.query[-1] + 1 < rows.sizes[last_prompt]:
            sums_of_unfinished_prompt, sums = sums[-1], sums[:-1]
        if len(sums):
            queries = rows.sizes[first_prompt : first_prompt + len(sums)] - measure.first_query
            matched, total = sums[:, :-1], sums[:, -1]
            scores = [measure.score(matched[:, kind], total, queries) for kind in range(matched.shape[1])]
            yield first_prompt, np.stack(scores)


def _detection_mask(kind: str, ids: Array, token: Array, query: Array, key: Array) -> Array:
    """Entries of the detection matrix of a kind of head at (query, key) pairs, float32 [pair], 1 or 0.

    Arguments:
        kind: One of `KINDS`.
        ids: Token ids of all prompts [token].
        token: Token index of each pair's query.
        query: Position of the query in its prompt.
        key: Position of the key.
    """
    if kind == "previous_token_head":
        attends: Array = key == query - 1
    elif kind == "duplicate_token_head":
        attends = (ids[token] == ids[token - query + key]) & (key < query)
    else:
        # The key after an earlier occurrence of the current token. For key 0 the index reaches into the
        # previous prompt or wraps around; the second condition discards it.
        attends = (ids[token] == ids[token - query + key - 1]) & (key > 0)
    return attends.astype(np.float32)


def _selected_heads(pattern: xr.DataArray, heads: Sequence[tuple[int, int]] | None) -> Array:
    """Whether each head of the pattern is selected, bool [layer, head]; `heads` None selects all.

    Raises:
        ConfigError: A head number is out of range.
    """
    layers = head_coords(pattern)["layer"].tolist()
    n_heads = pattern.sizes["head"]
    if heads is None:
        return np.ones((len(layers), n_heads), bool)
    selected = np.zeros((len(layers), n_heads), bool)
    for layer, head in heads:
        if not 0 <= head < n_heads:
            raise ConfigError(
                f"expected head numbers from 0 to {n_heads - 1}, found head {head} of layer {layer}"
            )
        # The stage is computed layer by layer: `pattern` may lack layers of the selection.
        if layer in layers:
            selected[layers.index(layer), head] = True
    return selected


def _sums_by_group(values: Array, group: Array, shape: tuple[int, int]) -> Array:
    """Sums of values over the rows of each group, float64 [group, head].

    Arguments:
        values: Values [row, head].
        group: Index of the group of each row, ascending, [row].
        shape: (number of groups, number of heads).
    """
    sums = np.zeros(shape)
    if len(values):
        present, starts = np.unique(group, return_index=True)
        # reduceat needs no index array of the size of values, unlike np.add.at, and is much faster.
        sums[present] = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return sums
