"""A recurrence over the tokens of many branches: each goes on from the state its ancestor left.

Which positions a branch computes in a layer are stretches of its prompt. A stretch begins with the state
behind the position before it, which the branch itself does not hold: that of the ancestor's token which
stands for it. So levels of the tree are taken one after another, and all stretches of a level together: cut
at every position where one begins or ends, or where a state is handed on, read or changed, they are a few
calls of the recurrence with as many rows as there are branches.

Axes: token = a place in the row; row = a stretch. States are [row, head, key, value].
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
    """Neighbouring positions [start, stop) of a branch; `token` is the first one's place in the row."""

    branch: int
    start: int
    stop: int
    token: int


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
    """What each token of a row reads, [1, H, token, V], from tokens [1, H, token, width] by name.

    hooks: of the points on the way, "rwkv". room: bytes that states may take.
    """
    stretches = _stretches(forest, row, layer)
    scan = _Scan(forest, row, stretches, taps, layer, recurrence, tokens, hooks)
    for depth in sorted({int(forest.depth[each.branch]) for each in stretches}):
        level = [each for each in stretches if forest.depth[each.branch] == depth]
        at_once = max(1, room // scan.bytes_of_a_row)
        for first in range(0, len(level), at_once):
            scan.advance(level[first : first + at_once])
    scan.hand_over()
    return scan.read[None].transpose(1, 2)


def _stretches(forest: Forest, row: Row, layer: int) -> list[Stretch]:
    found = []
    for number, positions in row.held.items():
        if not forest.branches[number].is_needed(layer, inside=True):
            continue
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        first = row.slices[number].start
        for part in np.split(np.arange(len(positions)), breaks):
            start, stop = int(positions[part[0]]), int(positions[part[-1]]) + 1
            found.append(Stretch(number, start, stop, first + int(part[0])))
    return found


class _Scan:
    """One layer's recurrence under way."""

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
        """Positions of each branch behind which somebody changes the state."""
        self._kept: dict[int, Tensor] = {}
        """State behind a token that is handed on or read, after changes."""
        self._unchanged: dict[int, Tensor] = {}
        """The same before changes, of tokens that are read."""
        self._shown = self._tokens_shown()
        self._watched = np.zeros(len(row), bool)
        """[token], whether its state is shown, or handed on to a stretch that begins behind it."""
        self._watched[[*self._shown, *(self._token_before(each) for each in stretches if each.start)]] = True
        self.read = tokens["v"].new_empty(0)
        """What each token reads, [token, H, V]."""

    @property
    def bytes_of_a_row(self) -> int:
        """Of the states of one stretch: as it was, as it becomes, and what is on the way."""
        k, v = self._tokens["k"], self._tokens["v"]
        return 4 * 4 * k.shape[1] * max(k.shape[-1], 3) * v.shape[-1]

    def advance(self, stretches: Sequence[Stretch]) -> None:
        """Takes stretches of one level to their ends."""
        states: dict[Stretch, Tensor | None] = {}
        for begin, end in self._pieces(stretches):
            rows = [each for each in stretches if each.start <= begin < each.stop]
            for each in rows:
                if each.start == begin:
                    states[each] = self._entering(each)
            self._piece(rows, begin, end, states)
            for each in rows:
                if each.stop == end:
                    del states[each]

    def _entering(self, stretch: Stretch) -> Tensor | None:
        """The state before its first position; None at the beginning of a prompt."""
        if stretch.start == 0:
            return None
        return self._kept[self._token_before(stretch)]

    def _token_before(self, stretch: Stretch) -> int:
        return int(self._row.where[self._forest.parent[stretch.branch], stretch.start - 1])

    def _pieces(self, stretches: Sequence[Stretch]) -> Iterator[tuple[int, int]]:
        """Positions [begin, end) within which no stretch begins or ends and nobody asks for a state."""
        cuts: set[int] = set()
        for each in stretches:
            watched = self._watched[each.token : each.token + each.stop - each.start]
            cuts.update((each.start, each.stop), (each.start + 1 + np.flatnonzero(watched)).tolist())
            changed = self._changed_at.get(each.branch, ())
            cuts.update(p + side for p in changed if each.start <= p < each.stop for side in (0, 1))
        return pairwise(sorted(cuts))

    def _positions_of(self, branch: int, changes: Sequence[Intervention]) -> set[int]:
        length = self._forest.branches[branch].length
        found: set[int] = set()
        for change in changes:
            touched = change.touched(length)
            found.update(range(length) if touched is None else touched)
        return found

    def _piece(
        self, rows: Sequence[Stretch], begin: int, end: int, states: dict[Stretch, Tensor | None]
    ) -> None:
        if not rows:
            return
        first = np.array([each.token + begin - each.start for each in rows])
        places = torch.from_numpy(first[:, None] + np.arange(end - begin)).to(self._device)
        part = {name: x[0][:, places].transpose(0, 1) for name, x in self._tokens.items()}
        held = [states[each] for each in rows]
        before = None if begin == 0 else torch.stack([state for state in held if state is not None])
        read, after = self._recurrence(part, before)
        if self._changed_at:
            read, after = self._changed(rows, begin, end, part, before, read, after)
        if not self.read.numel():
            self.read = read.new_zeros(len(self._row), read.shape[1], read.shape[3])
        self.read[places] = read.transpose(1, 2)
        for number, each in enumerate(rows):
            states[each] = after[number]
            if self._watched[token := int(first[number]) + end - begin - 1]:
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
        """What is read, and the state, once interventions on the state behind the one position are made."""
        new = after
        for number, each in enumerate(rows):
            token = each.token + end - 1 - each.start
            if token in self._shown:
                self._unchanged[token] = after[number]
            if end - begin == 1 and begin in self._changed_at.get(each.branch, ()):
                own = self._taps.changed_state(
                    each.branch, self._layer, self._sequence, after[number : number + 1], begin
                )
                new = torch.cat([new[:number], own, new[number + 1 :]])
        if new is after:
            return read, after
        empty = torch.zeros_like(after) if before is None else before
        return self._recurrence.read(part, empty, new), new

    # -- what somebody wants to see

    def _tokens_shown(self) -> set[int]:
        """Tokens whose state some branch reads, its ancestors' among them."""
        found: set[int] = set()
        for number in self._taps.readers(self._layer, self._sequence):
            found.update(self._row.where[number, : self._forest.branches[number].length].tolist())
        for number in self._taps.readers(self._layer, self._last):
            found.add(int(self._row.where[number, self._forest.branches[number].length - 1]))
        return found

    def hand_over(self) -> None:
        """Gives branches the states and attention they read."""
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
        """Token of every position of a branch, its own or an ancestor's."""
        return self._row.where[number, : self._forest.branches[number].length]
