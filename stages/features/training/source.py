"""Rows of activations out of a stored run: which hook points and layers, which tokens.

Border: an entry of a store, its memory-mapped shards; knows nothing of order or batches. A cell is (hook
kind, layer), as in the store. Heads are laid side by side, so that a row is one vector.

Axes: token (packed, as stored), width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....store.digest import digest
from ....store.errors import ConfigError, EntryNotFound, PromptError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from ....store import Store
    from ....store.keys import RunKey
    from ....store.runs.committed import VariableLayer
    from ....store.runs.entries import Entry
    from ....store.runs.packed import PackedTokens

__all__ = ["CellRows", "StoredActivations", "as_tensor"]

Mask = npt.NDArray[np.bool_]
CellRows = dict["VariableLayer", npt.NDArray[Any]]
"""Rows of each cell [row, width] in the stored dtype, aligned; bfloat16 as its bits (uint16)."""


@dataclass(frozen=True, eq=False)
class StoredActivations:
    """Some prompts of a stored run.

    prompts: bool [prompt of the entry], which of them; None for all.
    """

    entry: Entry
    prompts: Mask | None = None

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompts.shape != (self.entry.tokens.n_prompts,):
            raise ShapeError(
                f"expected a mask over {self.entry.tokens.n_prompts} prompts, found shape "
                f"{list(self.prompts.shape)}"
            )

    @classmethod
    def of_run(
        cls, store: Store, run: RunKey, tokens: PackedTokens, dtype: str, cells: Sequence[VariableLayer]
    ) -> StoredActivations:
        """The prompts `tokens` of a run, or of a larger one that holds them, once these cells are stored.

        Raises EntryNotFound before.
        """
        with suppress(EntryNotFound):
            entry = store.entry(run, dtype)
            if all(entry.record(*cell) for cell in cells):
                return cls(entry)
        larger = store.find_prompts(run, tokens, dtype, cells)
        if larger is None:
            raise EntryNotFound(f"these activations are not stored in {store.address}; run the capture first")
        return cls(larger[0]).of_prompts(larger[1])

    def of_prompts(self, rows: Sequence[int]) -> StoredActivations:
        """These prompts only."""
        mask = np.zeros(self.entry.tokens.n_prompts, bool)
        mask[list(rows)] = True
        return StoredActivations(self.entry, mask)

    @property
    def chosen(self) -> Mask:
        """bool [prompt of the entry]."""
        return np.ones(self.entry.tokens.n_prompts, bool) if self.prompts is None else self.prompts

    def split(self, share: float, seed: int) -> tuple[StoredActivations, StoredActivations]:
        """(most of the prompts, about `share` of them), drawn by `seed`; each part has one at least.

        Whole prompts: neighbouring tokens are much alike, and would leak from one part into the other. Raises
        PromptError when there is one prompt only.
        """
        held = np.flatnonzero(self.chosen)
        if len(held) < 2:
            raise PromptError(
                "expected at least two prompts to hold some out, found one; set validation to 0"
            )
        count = min(len(held) - 1, max(1, round(share * len(held))))
        drawn = np.random.default_rng([seed, len(held)]).permutation(held)[:count]
        out = np.zeros_like(self.chosen)
        out[drawn] = True
        return StoredActivations(self.entry, self.chosen & ~out), StoredActivations(self.entry, out)

    def layers(self, kind: str) -> tuple[int, ...]:
        """Layers of which a kind of hook point is stored whole; EntryNotFound names the nearest kind."""
        count = self.entry.spec(kind).layers or 0
        return tuple(layer for layer in range(count) if self.entry.record(kind, layer) is not None)

    def require(self, cells: Iterable[VariableLayer]) -> None:
        """Raise unless these are stored whole (EntryNotFound) and have one row per token (ShapeError)."""
        missing: dict[str, list[int | None]] = {}
        for kind, layer in cells:
            spec = self.entry.spec(kind)
            if spec.packed != "token":
                raise ShapeError(f"expected one row per token, found {kind} with axes {list(spec.dims)}")
            if self.entry.record(kind, layer) is None:
                missing.setdefault(kind, []).append(layer)
        if missing:
            told = "; ".join(
                f"{kind} of layers {', '.join(map(str, held))}" for kind, held in missing.items()
            )
            raise EntryNotFound(f"run {self.entry.digest[:12]} has not all of {told}; capture it first")

    def width(self, kind: str) -> int:
        """Numbers of a row."""
        return math.prod(self.entry.spec(kind).tail)

    def identity(self, cells: Iterable[VariableLayer]) -> str:
        """Digest of what these cells hold and of which prompts are read."""
        contents = [[kind, layer, self.entry.content(kind, layer)] for kind, layer in cells]
        return digest("training data", contents, np.flatnonzero(self.chosen).tolist())

    def blocks(self, size: int) -> list[range]:
        """The token axis in ranges of at most `size` that cross no segment, without those of no chosen
        prompt.
        """
        found = [
            range(start, min(start + size, segment.stop))
            for segment in self.entry.segments
            for start in range(segment.start, segment.stop, size)
        ]
        return [block for block in found if self.keep(block, 0).any()]

    def keep(self, tokens: range, skip_positions: int) -> Mask:
        """bool [token]: which of them are read: of the chosen prompts, behind their first positions."""
        prompt, position = self._places(tokens)
        kept: Mask = self.chosen[prompt] & (position >= skip_positions)
        return kept

    def ids(self, most: int | None = None) -> list[list[int]]:
        """Token ids of the chosen prompts in order, until they are `most` tokens or more."""
        found: list[list[int]] = []
        total = 0
        for number in np.flatnonzero(self.chosen):
            if most is not None and total >= most:
                break
            found.append(self.entry.tokens.prompt(int(number)).tolist())
            total += len(found[-1])
        return found

    def count(self, skip_positions: int) -> int:
        """Tokens that are read."""
        sizes = self.entry.tokens.row_size[self.chosen]
        return int((sizes - skip_positions).clip(min=0).sum())

    def read(self, cells: Iterable[VariableLayer], tokens: range, kept: Mask) -> CellRows:
        """The kept rows of one block of every cell, copied.

        Raises ShapeError naming the prompt where a number is not finite.
        """
        segment = tokens.start // self.entry.segment_tokens
        first = self.entry.segments[segment].start
        chosen = tokens.start - first + np.flatnonzero(kept)
        found: CellRows = {}
        for cell in cells:
            rows = self.entry.shard(*cell, segment)[chosen]
            rows = rows.reshape(len(rows), -1)
            if not np.isfinite(rows).all():
                raise self._not_finite(cell, tokens, kept, rows)
            found[cell] = rows.view(np.uint16) if rows.dtype.name == "bfloat16" else rows
        return found

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return self.entry.tokens.row_start

    def _places(self, tokens: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(prompt, position) of tokens."""
        where = np.arange(tokens.start, tokens.stop)
        prompt = np.searchsorted(self._starts, where, side="right") - 1
        return prompt, where - self._starts[prompt]

    def _not_finite(
        self, cell: VariableLayer, tokens: range, kept: Mask, rows: npt.NDArray[Any]
    ) -> ShapeError:
        row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        prompt, position = self._places(tokens)
        kind, layer = cell
        return ShapeError(
            f"expected finite activations, found NaN or infinity in {kind} of layer {layer}, prompt "
            f"{prompt[kept][row]}, position {position[kept][row]} of run {self.entry.digest[:12]}; capture "
            "it in a wider dtype, or leave the prompt out"
        )


def as_tensor(rows: npt.NDArray[Any]) -> Tensor:
    """Rows as `StoredActivations.read` gives them, float32."""
    import torch

    found = torch.from_numpy(rows)
    return (found.view(torch.bfloat16) if rows.dtype == np.uint16 else found).to(torch.float32)


def every(
    source: StoredActivations,
    cells: Sequence[VariableLayer],
    *,
    skip_positions: int,
    block: int,
    apart: int = 1,
) -> Iterator[dict[VariableLayer, Tensor]]:
    """Rows of a source, block by block in the order of the store: cell -> float32 [row, width].

    apart: every how manieth block; 1 for all rows.
    """
    for tokens in source.blocks(block)[::apart]:
        kept = source.keep(tokens, skip_positions)
        if kept.any():
            yield {cell: as_tensor(rows) for cell, rows in source.read(cells, tokens, kept).items()}


def require_rows(source: StoredActivations, batch: int, skip_positions: int) -> None:
    """Raise ConfigError unless an epoch fills at least one batch."""
    count = source.count(skip_positions)
    if count < batch:
        raise ConfigError(
            f"expected at least one batch of {batch} tokens to train on, found {count}; capture more "
            "prompts, or set a smaller batch"
        )
