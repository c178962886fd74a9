"""Activations of a stored run at selected hook points, layers and tokens, as rows: one vector per token.

Reads memory-mapped shards of a store's entry. A cell is (hook kind, layer), as in the store. Heads are
concatenated.

Axes: token (packed, as stored), width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ...store.arrays import Bools, Ints, as_indices
from ...store.digest import digest
from ...store.errors import ConfigError, EntryNotFound, PromptError, ShapeError
from ...store.runs.entries import group_attributes
from ...store.runs.quantised import QUANTISED
from .conversion import is_finite

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ...store.arrays import Array
    from ...store.keys import RunKey
    from ...store.runs.committed import VariableLayer
    from ...store.runs.entries import Entry
    from ...store.runs.packed import PackedTokens
    from ...store.runs.quantised import RestoredRows
    from ...store.runs.shards import ShardRows

__all__ = ["Cell", "StoredActivations", "TokenRows"]

Cell = tuple[str, int | None] | tuple[str, int | None, int]
"""(hook kind, layer); for runs side by side also the number of the run."""


class TokenRows(Protocol):
    """Protocol of stored activations, of one run or of several, as rows of selected tokens.

    A block is a range of neighbouring tokens, given by its first token and the token after its last.
    """

    def blocks(self, size: int) -> tuple[Ints, Ints]:
        """(starts, stops) of blocks of at most `size` tokens, without blocks that have no selected prompt."""
        ...

    def counts(self, starts: Ints, stops: Ints) -> Ints:
        """Number of selected tokens in each block, int64 [block]."""
        ...

    def tokens(self, start: int, stop: int) -> Ints:
        """Selected tokens of a block, ascending."""
        ...

    def count(self) -> int:
        """Number of selected tokens."""
        ...

    def width(self, cell: Cell) -> int:
        """Length of a row of the cell: the product of its axes."""
        ...

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Dtype in which rows are returned."""
        ...

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that cells are complete (else EntryNotFound) and have one row per token (else ShapeError)."""
        ...

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected tokens."""
        ...

    def scatter(self, cell: Cell, tokens: Ints, out: Array, places: Ints) -> None:
        """Copy the rows of ascending tokens of one block to `out` [place, width].

        Arguments:
            cell: The cell.
            tokens: Tokens of one block, ascending.
            out: Target array.
            places: Row in `out` for each token.

        Raises:
            ShapeError: A number is not finite; the message names prompt and position.
        """
        ...

    def labels(self, tokens: Ints) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token, int64; token_id is -1 if unknown."""
        ...


@dataclass(frozen=True, eq=False)
class StoredActivations:
    """Selected tokens of a stored run."""

    entry: Entry
    """The stored run."""
    prompts: Bools | None = None
    """Mask of the entry's prompts, bool [prompt]; None for all."""
    skip_positions: int = 0
    """Leading positions of each prompt to exclude."""
    without: tuple[int, ...] = ()
    """Token ids to exclude."""

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompts.shape != (self.entry.tokens.n_prompts,):
            raise ShapeError(
                f"expected a mask over the {self.entry.tokens.n_prompts} prompts of the run, found a mask of "
                f"shape {list(self.prompts.shape)}"
            )
        if self.skip_positions < 0:
            raise ConfigError(f"expected skip_positions to be at least 0, found {self.skip_positions}")

    @classmethod
    def of_run(
        cls, store: Store, run: RunKey, tokens: PackedTokens, dtype: str, cells: Sequence[VariableLayer]
    ) -> StoredActivations:
        """Rows of some prompts of a run, possibly from a larger run that contains them.

        Arguments:
            store: The store.
            run: Key of the run: model, prompts, interventions.
            tokens: The prompts, packed.
            dtype: Dtype in which the run is stored.
            cells: (hook kind, layer) that must be complete.

        Raises:
            EntryNotFound: The cells are not stored completely.
        """
        with suppress(EntryNotFound):
            entry = store.entry(run, dtype)
            if all(entry.record(*cell) for cell in cells):
                return cls(entry)
        larger = store.find_prompts(run, tokens, dtype, cells)
        if larger is None:
            raise EntryNotFound(
                f"the activations of these prompts are not stored in {store.address}; capture them first"
            )
        return cls(larger[0]).of_prompts(larger[1])

    @classmethod
    def of_dataset(cls, dataset: xr.Dataset) -> StoredActivations:
        """Rows of a dataset's prompts, as opened or as selected by `ds.mi.prompts`.

        Raises:
            EntryNotFound: The dataset has no record of its run.
            ShapeError: Single tokens were selected; exclude tokens with the options here instead.
        """
        from ...store.reading.direct import entry_of

        selection = cls(entry_of(dataset))
        sizes = selection.entry.tokens.row_size
        if "prompt_id" not in dataset.coords or "row_size" not in dataset.coords:
            raise ShapeError(
                "expected a dataset of whole prompts, with the coordinates prompt_id and row_size, which "
                "this one lacks; open the run again, and leave tokens out with skip_positions= or without="
            )
        rows = dataset["prompt_id"].values
        is_equal = np.array_equal(sizes[rows], dataset["row_size"].values)
        if not is_equal or dataset.sizes["token"] != sizes[rows].sum():
            raise ShapeError(
                "expected a dataset of whole prompts, found one with only some of their tokens; open the run "
                "again, and leave tokens out with skip_positions= or without="
            )
        return selection if len(rows) == len(sizes) else selection.of_prompts(rows.tolist())

    def of_prompts(self, rows: Sequence[int]) -> StoredActivations:
        """Select prompts of the entry, replacing an earlier selection; the order stays that of the entry."""
        mask = np.zeros(self.entry.tokens.n_prompts, bool)
        mask[list(rows)] = True
        return replace(self, prompts=mask)

    def leaving_out(self, *, positions: int = 0, tokens: Iterable[int] = ()) -> StoredActivations:
        """Exclude the first positions of each prompt, and token ids; replaces earlier exclusions.

        Arguments:
            positions: Number of first positions of each prompt.
            tokens: Token ids.

        Raises:
            ConfigError: The run was imported without token ids.
        """
        excluded_ids = tuple(sorted(set(as_indices(tokens, "token ids"))))
        if excluded_ids and not self._has_ids:
            raise ConfigError(
                f"run {self.entry.digest[:12]} was imported without token ids, so that tokens cannot be left "
                "out by their ids; leave them out by position, with skip_positions="
            )
        return replace(self, skip_positions=positions, without=excluded_ids)

    @property
    def chosen(self) -> Bools:
        """Mask of the selected prompts, bool [prompt of the entry]."""
        return np.ones(self.entry.tokens.n_prompts, bool) if self.prompts is None else self.prompts

    def split(self, share: float, seed: int) -> tuple[StoredActivations, StoredActivations]:
        """Split the selected prompts at random.

        Whole prompts, because neighbouring tokens are similar and would leak between the parts.

        Arguments:
            share: Share of the prompts in the second part, rounded; each part gets at least one.
            seed: Seed of the split.

        Returns:
            (most of the prompts, the others).

        Raises:
            PromptError: There is only one prompt.
        """
        selected = np.flatnonzero(self.chosen)
        if len(selected) < 2:
            raise PromptError(
                "holding out prompts for validation needs at least two prompts, found one; capture more "
                "prompts, or set validation to 0"
            )
        count = min(len(selected) - 1, max(1, round(share * len(selected))))
        drawn = np.random.default_rng([seed, len(selected)]).permutation(selected)[:count]
        out = np.zeros_like(self.chosen)
        out[drawn] = True
        return replace(self, prompts=self.chosen & ~out), replace(self, prompts=out)

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layers of a hook kind that are stored completely.

        Raises:
            EntryNotFound: The run has no such kind; the message suggests the nearest one.
        """
        count = self.entry.spec(kind).layers or 0
        return tuple(layer for layer in range(count) if self.entry.record(kind, layer) is not None)

    def require(self, cells: Iterable[Cell]) -> None:
        """Check that cells are complete (else EntryNotFound) and have one row per token (else ShapeError)."""
        missing: dict[str, list[int | None]] = {}
        for kind, layer, *_ in cells:
            spec = self.entry.spec(kind)
            if spec.packed != "token":
                raise ShapeError(
                    f"training reads variables with one row per token, found {kind} with the axes "
                    f"{list(spec.dims)}; leave it out"
                )
            if self.entry.record(kind, layer) is None:
                missing.setdefault(kind, []).append(layer)
        if missing:
            missing_text = "; ".join(
                f"{kind} of layers {', '.join(map(str, layer_numbers))}"
                for kind, layer_numbers in missing.items()
            )
            raise EntryNotFound(
                f"run {self.entry.digest[:12]} does not hold {missing_text}, or not for all prompts; capture "
                "it first"
            )

    def width(self, cell: Cell) -> int:
        """Length of a row of the cell."""
        return math.prod(self.entry.spec(cell[0]).tail)

    def dtype(self, cell: Cell) -> np.dtype[Any]:
        """Dtype in which rows are returned; int8 is dequantised to float32."""
        return np.dtype(np.float32) if self.entry.dtype == QUANTISED else self.entry.layout(cell[0]).native

    def identity(self, cells: Iterable[Cell]) -> str:
        """Digest of the content of these cells and of the selected prompts."""
        contents = [[kind, layer, self.entry.content(kind, layer)] for kind, layer, *_ in cells]
        return digest("training data", contents, np.flatnonzero(self.chosen).tolist())

    # -- tokens

    def blocks(self, size: int) -> tuple[Ints, Ints]:
        """(starts, stops) of blocks of at most `size` tokens within segments, as in `TokenRows.blocks`."""
        # A segment is a file per cell: a block across two of them would open both for a few rows.
        length, total = self.entry.segment_tokens, self.entry.tokens.n_tokens
        inside = np.arange(0, length, size)
        starts = (np.arange(0, total, length)[:, None] + inside).ravel()
        stops = np.minimum(starts + size, (starts // length + 1) * length).clip(max=total)
        # The last segment may be shorter than the others, and the grid above is a full one.
        is_valid = starts < total
        starts, stops = starts[is_valid], stops[is_valid]
        has_selected = self._before(stops, 0) > self._before(starts, 0)
        return starts[has_selected], stops[has_selected]

    def counts(self, starts: Ints, stops: Ints) -> Ints:
        """Number of selected tokens in each block, int64 [block]."""
        # Without excluded ids, counts follow from prompt lengths, and no ids need to be read.
        if not self.without:
            return self._before(stops, self.skip_positions) - self._before(starts, self.skip_positions)
        sizes = [len(self.tokens(int(a), int(b))) for a, b in zip(starts, stops, strict=True)]
        return np.array(sizes, np.int64)

    def tokens(self, start: int, stop: int) -> Ints:
        """Selected tokens of a block, ascending: of selected prompts, without skipped positions and ids."""
        token_range = np.arange(start, stop)
        prompt, position = self._prompt_and_position(token_range)
        is_kept = self.chosen[prompt] & (position >= self.skip_positions)
        if self.without:
            is_kept &= ~np.isin(self.entry.tokens.ids[start:stop], self.without)
        return token_range[is_kept]

    def count(self) -> int:
        """Number of selected tokens."""
        # Excluded ids have to be looked for, block by block; without them lengths are enough.
        if self.without:
            return int(self.counts(*self.blocks(1 << 20)).sum())
        sizes = self.entry.tokens.row_size[self.chosen]
        return int((sizes - self.skip_positions).clip(min=0).sum())

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids per selected prompt, in order; stops after `most` tokens, None for all."""
        ids_by_prompt: list[list[int]] = []
        total = 0
        for number in np.flatnonzero(self.chosen):
            if most is not None and total >= most:
                break
            ids_by_prompt.append(self.entry.tokens.prompt(int(number)).tolist())
            total += len(ids_by_prompt[-1])
        return ids_by_prompt

    def labels(self, tokens: Ints) -> dict[str, npt.NDArray[Any]]:
        """run, prompt, position and token_id per token, int64; token_id is -1 if unknown."""
        prompt, position = self._prompt_and_position(tokens)
        ids = np.full(len(tokens), -1, np.int64)
        return {
            "run": np.zeros(len(tokens), np.int64),
            "prompt": prompt,
            "position": position,
            "token_id": self.entry.tokens.ids[tokens].astype(np.int64) if self._has_ids else ids,
        }

    # -- rows

    def scatter(self, cell: Cell, tokens: Ints, out: Array, places: Ints) -> None:
        """Copy the rows of ascending tokens to `out` [place, width]. See `TokenRows.scatter`.

        Raises:
            ShapeError: A number is not finite; the message names prompt and position.
        """
        length = self.entry.segment_tokens
        # Where the ascending tokens cross from one segment to the next: each segment is a file.
        edges = np.searchsorted(tokens, np.arange(tokens[0] // length, tokens[-1] // length + 2) * length)
        for begin, end in pairwise(edges.tolist()):
            if begin == end:
                continue
            segment_tokens = tokens[begin:end]
            segment = int(segment_tokens[0]) // length
            shard = self.entry.values(cell[0], cell[1], segment)
            for offset, rows in _row_pieces(shard, segment_tokens - segment * length):
                # Checked here, where prompt and position are known; a NaN in a training would only show as a
                # loss.
                if not is_finite(rows):
                    raise self._not_finite(cell, segment_tokens[offset : offset + len(rows)], rows)
                out[places[begin + offset : begin + offset + len(rows)]] = rows.reshape(len(rows), -1)

    @cached_property
    def _has_ids(self) -> bool:
        """Whether token ids are known; imported activations may lack them."""
        return group_attributes(self.entry.folder, self.entry.path).get("token_ids") != "unknown"

    @cached_property
    def _starts(self) -> Ints:
        """First token of each prompt, int64 [prompt]."""
        return self.entry.tokens.row_start

    def _prompt_and_position(self, tokens: Ints) -> tuple[Ints, Ints]:
        """(index of the prompt, position within the prompt) of each token, int64 [token] each."""
        # side="right" - 1: the last prompt that starts at or before the token.
        prompt = np.searchsorted(self._starts, tokens, side="right") - 1
        return prompt, tokens - self._starts[prompt]

    def _before(self, tokens: Ints, skip: int) -> Ints:
        """Number of selected tokens before each token.

        Arguments:
            tokens: Tokens of the entry, or its end.
            skip: First positions of each prompt that are not counted.
        """
        # Prefix sums over prompts, not over tokens: the result of a corpus needs memory per prompt only.
        kept_tokens = (self.entry.tokens.row_size - skip).clip(min=0) * self.chosen
        sums = np.concatenate([[0], np.cumsum(kept_tokens)])
        prompt = (np.searchsorted(self._starts, tokens, side="right") - 1).clip(min=0)
        within = (tokens - self._starts[prompt] - skip).clip(min=0)
        tokens_before: Ints = sums[prompt] + np.minimum(within, kept_tokens[prompt])
        return tokens_before

    def _not_finite(self, cell: Cell, tokens: Ints, rows: npt.NDArray[Any]) -> ShapeError:
        """Error that names prompt and position of the first row with a NaN or infinity."""
        row = int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))[0])
        prompt, position = (int(values[row]) for values in self._prompt_and_position(tokens))
        return ShapeError(
            f"expected finite activations, found NaN or infinity in {cell[0]} of layer {cell[1]}, prompt "
            f"{prompt}, position {position} of run {self.entry.digest[:12]}; capture it in a wider dtype, or "
            "leave the prompt out"
        )


def _row_pieces(shard: ShardRows | RestoredRows, rows: Ints) -> list[tuple[int, Array]] | Any:
    """(offset, rows) of ascending rows of a shard: views of the memory map if consecutive, else a copy."""
    # Consecutive rows are read through views of the map, and the caller copies them once.
    if rows[-1] - rows[0] + 1 == len(rows):
        return shard.blocks(int(rows[0]), int(rows[-1]) + 1)
    return [(0, shard[rows])]
