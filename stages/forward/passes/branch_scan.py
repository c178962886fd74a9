"""Recurrent layers over the tokens of many branches, each continuing from its parent's state.

The positions that a branch computes in a layer form stretches. A stretch starts from the state after the
position before it, which an ancestor's token has. So the levels of the tree run one after another, all
stretches of a level together. They are cut wherever one begins or ends and wherever a state is handed on,
captured or changed; each piece is one call of the recurrence with a row per branch.

Axes: token = an index in the row; row = a stretch. States are [row, head, key, value].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ....store.arrays import Ints
from ..hooks.interventions import Intervention
from ..networks.recurrences.effective import effective_attention
from ..networks.recurrences.recurrence import Recurrence
from .branch_taps import BranchTaps
from .forest import Forest, Row

__all__ = ["scan_branches"]


@dataclass(frozen=True)
class Stretch:
    """Consecutive positions of one branch."""

    branch: int
    """Index of the branch."""
    start: int
    """First position."""
    stop: int
    """Position after the last one."""
    token: int
    """Index of the first position's token in the row."""


def scan_branches(
    forest: Forest,
    row: Row,
    taps: BranchTaps,
    layer: int,
    recurrence: Recurrence,
    tokens: Mapping[str, Tensor],
    hooks: str,
    room: int,
) -> Tensor:
    """Run one layer's recurrence over all branches.

    Arguments:
        forest: branches of the sweep.
        row: tokens of the row.
        taps: hook points of the branches.
        layer: layer index.
        recurrence: the recurrence of the layer.
        tokens: its inputs by name, each [1, H, token, width].
        hooks: prefix of its hook points, e.g. "rwkv".
        room: bytes that states may take.

    Returns:
        What each token reads, [1, H, token, V].
    """
    stretches = _stretches(forest, row, layer)
    scan = _Scan(forest, row, stretches, taps, layer, recurrence, tokens, hooks)
    for depth in sorted({int(forest.depth[stretch.branch]) for stretch in stretches}):
        level = [stretch for stretch in stretches if forest.depth[stretch.branch] == depth]
        at_once = max(1, room // scan.bytes_of_a_row)
        for start in range(0, len(level), at_once):
            scan.advance(level[start : start + at_once])
    scan.hand_over()
    return scan.read[None].transpose(1, 2)


def _stretches(forest: Forest, row: Row, layer: int) -> list[Stretch]:
    stretches = []
    for number, positions in row.held.items():
        if not forest.branches[number].is_needed(layer, inside=True):
            continue
        # A branch may skip positions that no intervention reaches: each gap ends a stretch.
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        first_token = row.slices[number].start
        for part in np.split(np.arange(len(positions)), breaks):
            start, stop = int(positions[part[0]]), int(positions[part[-1]]) + 1
            stretches.append(Stretch(number, start, stop, first_token + int(part[0])))
    return stretches


class _Scan:
    """The recurrence of one layer during a sweep."""

    def __init__(
        self,
        forest: Forest,
        row: Row,
        stretches: Sequence[Stretch],
        taps: BranchTaps,
        layer: int,
        recurrence: Recurrence,
        tokens: Mapping[str, Tensor],
        hooks: str,
    ) -> None:
        self._forest, self._row, self._taps, self._layer = forest, row, taps, layer
        self._recurrence, self._tokens, self._hooks = recurrence, tokens, hooks
        self._sequence, self._last = f"{hooks}_state_seq", f"{hooks}_state"
        self._device = tokens["v"].device
        self._changed_at = {
            branch: self._positions_of(branch, changes)
            for branch, changes in taps.changes_of_states(layer, self._sequence).items()
        }
        """Positions of each branch after which an intervention changes the state."""
        self._kept: dict[int, Tensor] = {}
        """Token -> state after its interventions, where captured or needed by a later stretch."""
        self._unchanged: dict[int, Tensor] = {}
        """State after a captured token, before interventions."""
        self._shown = self._tokens_shown()
        self._watched = np.zeros(len(row), bool)
        """[token], whether its state is captured, or handed on to a stretch that begins after it."""
        self._watched[[*self._shown, *(self._token_before(s) for s in stretches if s.start)]] = True
        self.read = tokens["v"].new_empty(0)
        """What each token reads, [token, H, V]; allocated by the first piece, which knows the width."""

    @property
    def bytes_of_a_row(self) -> int:
        """Bytes of the states of one stretch: old, new and temporary ones, in float32."""
        k, v = self._tokens["k"], self._tokens["v"]
        return 4 * 4 * k.shape[1] * max(k.shape[-1], 3) * v.shape[-1]

    def advance(self, stretches: Sequence[Stretch]) -> None:
        """Run stretches of one level to their ends."""
        states: dict[Stretch, Tensor | None] = {}
        for begin, end in self._pieces(stretches):
            rows = [stretch for stretch in stretches if stretch.start <= begin < stretch.stop]
            for stretch in rows:
                if stretch.start == begin:
                    states[stretch] = self._entering(stretch)
            self._piece(rows, begin, end, states)
            for stretch in rows:
                if stretch.stop == end:
                    del states[stretch]

    def _entering(self, stretch: Stretch) -> Tensor | None:
        """Recurrent state before a stretch; None at position 0."""
        if stretch.start == 0:
            return None
        return self._kept[self._token_before(stretch)]

    def _token_before(self, stretch: Stretch) -> int:
        return int(self._row.where[self._forest.parent[stretch.branch], stretch.start - 1])

    def _pieces(self, stretches: Sequence[Stretch]) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) of positions in which no stretch begins or ends and no state is needed."""
        cuts: set[int] = set()
        for stretch in stretches:
            watched = self._watched[stretch.token : stretch.token + stretch.stop - stretch.start]
            cuts.update((stretch.start, stretch.stop), (stretch.start + 1 + np.flatnonzero(watched)).tolist())
            changed = self._changed_at.get(stretch.branch, ())
            cuts.update(p + side for p in changed if stretch.start <= p < stretch.stop for side in (0, 1))
        return pairwise(sorted(cuts))

    def _positions_of(self, branch: int, changes: Sequence[Intervention]) -> set[int]:
        length = self._forest.branches[branch].length
        positions: set[int] = set()
        for change in changes:
            touched = change.touched(length)
            positions.update(range(length) if touched is None else touched)
        return positions

    def _piece(
        self, rows: Sequence[Stretch], begin: int, end: int, states: dict[Stretch, Tensor | None]
    ) -> None:
        if not rows:
            return
        first_tokens = np.array([stretch.token + begin - stretch.start for stretch in rows])
        places = torch.from_numpy(first_tokens[:, None] + np.arange(end - begin)).to(self._device)
        part = {name: x[0][:, places].transpose(0, 1) for name, x in self._tokens.items()}
        row_states = [states[stretch] for stretch in rows]
        before = None if begin == 0 else torch.stack([state for state in row_states if state is not None])
        read, after = self._recurrence(part, before)
        if self._changed_at:
            read, after = self._changed(rows, begin, end, part, before, read, after)
        if not self.read.numel():
            self.read = read.new_zeros(len(self._row), read.shape[1], read.shape[3])
        self.read[places] = read.transpose(1, 2)
        for number, stretch in enumerate(rows):
            states[stretch] = after[number]
            if self._watched[token := int(first_tokens[number]) + end - begin - 1]:
                self._kept[token] = after[number]

    def _changed(
        self,
        rows: Sequence[Stretch],
        begin: int,
        end: int,
        part: Mapping[str, Tensor],
        before: Tensor | None,
        read: Tensor,
        after: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Apply interventions to the state at the end of a piece; returns the read-out and the state.

        A piece with a changed state has one position (`_pieces` cuts before and after it).
        """
        new = after
        for number, stretch in enumerate(rows):
            token = stretch.token + end - 1 - stretch.start
            if token in self._shown:
                self._unchanged[token] = after[number]
            if end - begin == 1 and begin in self._changed_at.get(stretch.branch, ()):
                changed = self._taps.changed_state(
                    stretch.branch, self._layer, self._sequence, after[number : number + 1], begin
                )
                new = torch.cat([new[:number], changed, new[number + 1 :]])
        if new is after:
            return read, after
        # Reading again needs the state before the piece; at position 0 that is zero.
        empty = torch.zeros_like(after) if before is None else before
        return self._recurrence.read(part, empty, new), new

    # -- captures

    def _tokens_shown(self) -> set[int]:
        """Tokens whose state some branch captures, those of its ancestors included."""
        tokens: set[int] = set()
        for number in self._taps.readers(self._layer, self._sequence):
            tokens.update(self._row.where[number, : self._forest.branches[number].length].tolist())
        for number in self._taps.readers(self._layer, self._last):
            tokens.add(int(self._row.where[number, self._forest.branches[number].length - 1]))
        return tokens

    def hand_over(self) -> None:
        """Give branches the states and attention matrices that they capture."""
        taps, layer = self._taps, self._layer
        for number in taps.readers(layer, self._sequence):
            tokens = self._tokens_of(number).tolist()
            after = torch.stack([self._kept[token] for token in tokens], 1)[None]
            before = torch.stack([self._unchanged.get(token, self._kept[token]) for token in tokens], 1)[None]
            taps.give(number, self._sequence, layer, before, after)
        for number in taps.readers(layer, self._last):
            state = self._kept[int(self._tokens_of(number)[-1])][None]
            taps.give(number, self._last, layer, state, state)
        names = f"{self._hooks}_alpha_raw", f"{self._hooks}_effective_attn"
        for number in sorted({n for name in names for n in taps.readers(layer, name)}):
            places = torch.from_numpy(self._tokens_of(number)).to(self._device)
            alpha = self._recurrence.weights({name: x[:, :, places] for name, x in self._tokens.items()})
            for name, value in zip(names, (alpha, effective_attention(alpha)), strict=True):
                taps.give(number, name, layer, value, value)

    def _tokens_of(self, number: int) -> Ints:
        """Row indices of a branch's positions: tokens of the branch or of an ancestor."""
        return self._row.where[number, : self._forest.branches[number].length]
