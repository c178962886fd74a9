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
    """Consecutive positions that one branch computes in a recurrent layer."""

    branch: int
    """Index of the branch."""
    start: int
    """First position."""
    stop: int
    """Position after the last one."""
    token: int
    """Index in the row of the token at position `start`."""


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
    """Run one layer's recurrence over the tokens of all branches, each from the state of its parent.

    Arguments:
        forest: branches of the sweep.
        row: which branch and position each token belongs to.
        taps: captures and interventions of the branches.
        layer: layer index.
        recurrence: the recurrence of the layer.
        tokens: inputs of the recurrence by name, each [1, H, token, width].
        hooks: prefix of its hook points, e.g. "rwkv".
        room: bytes that states may take.

    Returns:
        What each token reads from its state, [1, H, token, V].
    """
    stretches = _stretches_in(forest, row, layer)
    scan = _Scan(forest, row, stretches, taps, layer, recurrence, tokens, hooks)
    # Parents before children, which continue from states of their parents.
    for depth in sorted({int(forest.depth[stretch.branch]) for stretch in stretches}):
        level = [stretch for stretch in stretches if forest.depth[stretch.branch] == depth]
        at_once = max(1, room // scan.bytes_of_a_row)
        for start in range(0, len(level), at_once):
            scan.advance(level[start : start + at_once])
    scan.hand_over()
    return scan.read[None].transpose(1, 2)


def _stretches_in(forest: Forest, row: Row, layer: int) -> list[Stretch]:
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
    """The recurrence of one layer over the tokens of all branches."""

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
            branch: self._changed_positions(branch, changes)
            for branch, changes in taps.changes_of_states(layer, self._sequence).items()
        }
        """Positions of each branch after which an intervention changes the state."""
        self._kept: dict[int, Tensor] = {}
        """Token -> state after its interventions, where captured or needed by a later stretch."""
        self._unchanged: dict[int, Tensor] = {}
        """State after a captured token, before interventions."""
        self._captured_tokens = self._tokens_captured()
        self._watched = np.zeros(len(row), bool)
        """[token], whether its state is captured, or needed by a stretch that begins after it."""
        tokens_before = [self._token_before(stretch) for stretch in stretches if stretch.start]
        self._watched[[*self._captured_tokens, *tokens_before]] = True
        self.read = tokens["v"].new_empty(0)
        """What each token reads, [token, H, V]; allocated by the first piece, which knows the width."""

    @property
    def bytes_of_a_row(self) -> int:
        """Bytes of the states of one stretch: old, new and temporary ones, in float32."""
        k, v = self._tokens["k"], self._tokens["v"]
        float32_bytes, n_states = 4, 4
        return float32_bytes * n_states * k.shape[1] * max(k.shape[-1], 3) * v.shape[-1]

    def advance(self, stretches: Sequence[Stretch]) -> None:
        """Run stretches of branches of one level of the tree, together and to their ends."""
        states: dict[Stretch, Tensor | None] = {}
        for begin, end in self._pieces(stretches):
            rows = [stretch for stretch in stretches if stretch.start <= begin < stretch.stop]
            for stretch in rows:
                if stretch.start == begin:
                    states[stretch] = self._state_before(stretch)
            self._run_piece(rows, begin, end, states)
            for stretch in rows:
                if stretch.stop == end:
                    del states[stretch]

    def _state_before(self, stretch: Stretch) -> Tensor | None:
        """Recurrent state before a stretch, which its parent computed; None at position 0."""
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
            changed_inside = [position for position in changed if stretch.start <= position < stretch.stop]
            # Before and after, so that a changed position is a piece of its own.
            cuts.update(changed_inside, (position + 1 for position in changed_inside))
        return pairwise(sorted(cuts))

    def _changed_positions(self, branch: int, changes: Sequence[Intervention]) -> set[int]:
        length = self._forest.branches[branch].length
        positions: set[int] = set()
        for change in changes:
            touched = change.touched(length)
            positions.update(range(length) if touched is None else touched)
        return positions

    def _run_piece(
        self, rows: Sequence[Stretch], begin: int, end: int, states: dict[Stretch, Tensor | None]
    ) -> None:
        """Run positions [begin, end) of some stretches in one call, and update the state of each."""
        if not rows:
            return
        first_tokens = np.array([stretch.token + begin - stretch.start for stretch in rows])
        indices = torch.from_numpy(first_tokens[:, None] + np.arange(end - begin)).to(self._device)
        inputs = {name: x[0][:, indices].transpose(0, 1) for name, x in self._tokens.items()}
        row_states = [states[stretch] for stretch in rows]
        before = None if begin == 0 else torch.stack([state for state in row_states if state is not None])
        read, after = self._recurrence(inputs, before)
        if self._changed_at:
            read, after = self._with_interventions(rows, begin, end, inputs, before, read, after)
        if not self.read.numel():
            self.read = read.new_zeros(len(self._row), read.shape[1], read.shape[3])
        self.read[indices] = read.transpose(1, 2)
        for number, stretch in enumerate(rows):
            states[stretch] = after[number]
            if self._watched[token := int(first_tokens[number]) + end - begin - 1]:
                self._kept[token] = after[number]

    def _with_interventions(
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
            if token in self._captured_tokens:
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

    def _tokens_captured(self) -> set[int]:
        """Tokens whose state some branch captures, including tokens of its ancestors."""
        tokens: set[int] = set()
        for number in self._taps.readers(self._layer, self._sequence):
            tokens.update(self._row.where[number, : self._forest.branches[number].length].tolist())
        for number in self._taps.readers(self._layer, self._last):
            tokens.add(int(self._row.where[number, self._forest.branches[number].length - 1]))
        return tokens

    def hand_over(self) -> None:
        """Store the states and attention matrices that each branch captures."""
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
        for number in sorted({reader for name in names for reader in taps.readers(layer, name)}):
            indices = torch.from_numpy(self._tokens_of(number)).to(self._device)
            alpha = self._recurrence.weights({name: x[:, :, indices] for name, x in self._tokens.items()})
            for name, value in zip(names, (alpha, effective_attention(alpha)), strict=True):
                taps.give(number, name, layer, value, value)

    def _tokens_of(self, number: int) -> Ints:
        """Row indices of a branch's positions: tokens of the branch or of an ancestor."""
        return self._row.where[number, : self._forest.branches[number].length]
