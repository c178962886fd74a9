"""Spread: tokens of many branches side by side in one row, and how they see each other.

A layer is linear algebra on single tokens, and attention, or a recurrence (branch_scan.py). For the first it
does not matter which branch a token belongs to: all tokens of all branches lie in one row, in as large a
matrix product as memory allows. For attention each query gathers the keys of its own branch; where the branch
does not hold a position, an index says which ancestor's token stands for it, so that no key is ever computed
or kept twice.

Axes: branch, position; token = a place in the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ....store.arrays import Ints
from ..architectures.architecture import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..networks.attention import attend, by_hand, is_by_hand, keys_by_hand, keys_filled, over, within
from ..networks.history import Carried
from ..networks.pairs.parts import seen_of
from ..networks.recurrences.recurrence import Recurrence
from ..networks.rope import rope_tables
from .branch_scan import scan_branches
from .branch_taps import BranchTaps
from .forest import AttentionGroup, Forest, Row

RAGGED = 0.75
"""Branches whose numbers of queries differ by no more share an attention call, padded."""


class BranchHistory:
    """The history of a sweep (`History`): the tokens of many branches, each seeing those of its own branch
    and of the ancestors it has left."""

    def __init__(self, forest: Forest, taps: BranchTaps, *, room: int, device: torch.device) -> None:
        """room: bytes that gathered keys and scores may take."""
        self._forest, self._taps, self._room, self._device = forest, taps, room, device
        self._dropped: set[int] = set()
        self._chosen: Tensor | None = None
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self.row = self._row_of(0)
        """The tokens that enter the layer under way."""
        self._kept = self.row

    def ids(self) -> Tensor:
        """Tokens [1, token] of what enters the first layer."""
        forest, row = self._forest, self.row
        tokens = np.zeros((len(forest.branches), forest.longest), np.int64)
        for number, branch in enumerate(forest.branches):
            tokens[number, : branch.length] = branch.tokens
        return torch.from_numpy(tokens[row.branch, row.position])[None].to(self._device)

    @property
    def positions(self) -> Tensor:
        """See `History`."""
        return torch.from_numpy(self.row.position).to(self._device)

    @property
    def starts(self) -> Tensor | None:
        """See `History`."""
        begun = self._starts()
        return None if begun is None else torch.from_numpy(begun[self.row.branch])[None].to(self._device)

    def _starts(self) -> Ints | None:
        """Where the targets of branches begin, [branch]."""
        branches = self._forest.branches
        if branches[0].architecture.target_start is None:
            return None
        size = branches[0].architecture.vocab_size
        return np.array([np.argmax(np.array(b.tokens) >= size) for b in branches], np.int64)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """See `History`."""
        of_branch = np.array(
            [np.mean(np.array(b.tokens) == token) for b in self._forest.branches], np.float32
        )
        return torch.from_numpy(of_branch[self.row.branch])[None].to(self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The tokens of every branch that takes part: its own, or those of the ancestor it leaves here."""
        branches = self._forest.branches
        row = self.row
        if layer:
            unmoved = (n for n in self._taps.unmoved() if branches[n].parent is not None)
            self._dropped.update(n for n in unmoved if branches[n].ends_changing(layer - 1))
            row = self._row_of(layer)
            source = torch.from_numpy(self._kept.where[row.branch, row.position]).to(self._device)
            carried = {name: x.index_select(1, source) for name, x in carried.items()}
        inside = {n: branches[n].kept(layer) for n in row.held if branches[n].is_needed(layer, inside=True)}
        is_behind = layer == branches[0].n_layers
        if inside and not is_behind and branches[0].architecture.layers[layer].mixer.kind == "in turn":
            inside = row.held  # A mixer reads at every token what the one before it gives.
        self.row, self._kept = row, row if is_behind else Row(self._forest, inside)
        self._taps.begin(self.row, self._kept, is_last=not inside)
        self._chosen = None
        if len(self._kept) < len(row):
            self._chosen = torch.from_numpy(row.where[self._kept.branch, self._kept.position]).to(
                self._device
            )
        self._rotations.clear()
        return carried

    def kept(self, x: Tensor) -> Tensor:
        """x [..., token, width] at the tokens whose output is needed."""
        return x if self._chosen is None else x.index_select(-2, self._chosen)

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `History`."""
        if rope not in self._rotations:
            self._rotations[rope] = _tables(rope, self._forest, self.row, self._device, dtype)
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """q [1, H, kept token, dh], k and v [1, Hk, token, dh] -> z [1, H, kept token, dh]."""
        z = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        of_a_key = q.element_size() * (k.shape[1] * (k.shape[3] + v.shape[3]))
        of_a_score = 3 * q.element_size() * q.shape[1]
        # Of keys and values of different widths torch has no fused kernel, but steps that go by sizes.
        is_narrow = q.shape[3] != v.shape[3] and q.device.type == "cpu"
        for found in self._groups(layer, how, of_a_key, of_a_score):
            queries = torch.from_numpy(found.queries).to(self._device)
            given = q[0][:, queries].transpose(0, 1)
            # What the kernel would be filled up with is gathered at once.
            size = found.keys.shape[1]
            steps = is_by_hand(q, how) or self._taps.reads_attention(found.branches[0], layer) or is_narrow
            group = found.with_keys(keys_by_hand(given, size, how)) if steps else found
            size = group.keys.shape[1]
            more = 0 if steps else keys_filled(given, size) - size
            keys = torch.from_numpy(np.pad(group.keys, ((0, 0), (0, more)))).to(self._device)
            wide_k, wide_v = (x[0][:, keys].transpose(0, 1) for x in (k, v))
            weigh = over(wide_k, wide_v) if more else by_hand if is_narrow else None
            allowed = self._allowed(group, how)
            places = torch.from_numpy(group.positions).to(self._device)
            looked_at = self._taps.of_group(group, self._kept, layer, how.room)
            mixed = attend(
                given, wide_k[:, :, :size], wide_v[:, :, :size], allowed, how, layer, looked_at, weigh, places
            )
            real = np.arange(queries.shape[1]) < np.array(group.counts)[:, None]
            own = torch.from_numpy(real).to(self._device)
            z[queries[own]] = mixed.transpose(1, 2)[own]
        self._taps.attention_done(layer, self._kept)
        return z.transpose(0, 1)[None]

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """x [1, token, width] -> the rows before each token in its branch, its own or an ancestor's,
        [1, token, count, width]."""
        places = self.row.position[:, None] - np.arange(count, 0, -1)
        tokens = self.row.where[self.row.branch[:, None], np.maximum(places, 0)]
        found = x[:, torch.from_numpy(tokens).to(self._device)]
        outside = torch.from_numpy(places < 0).to(self._device)
        return found.masked_fill(outside[None, :, :, None], 0)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """See `History`."""
        return scan_branches(self._forest, self.row, self._taps, layer, recurrence, tokens, room, self._room)

    def _row_of(self, layer: int) -> Row:
        taking_part = (
            (n, branch)
            for n, branch in enumerate(self._forest.branches)
            if n not in self._dropped and branch.is_needed(layer, inside=False)
        )
        return Row(self._forest, {n: branch.held(layer) for n, branch in taking_part})

    def _allowed(self, group: AttentionGroup, how: AttentionMixer) -> Tensor | None:
        """Bool [row, 1, query, key]; None where attention is plainly causal, or sees all there is."""
        size, window = group.keys.shape[1], how.window
        if how.part is not None:
            begun = self._starts()
            starts = None if begun is None else torch.from_numpy(begun[group.branches]).to(self._device)
            keys = torch.arange(size, device=self._device)
            queries = torch.from_numpy(group.positions).to(self._device)[:, None, :, None]
            lengths = torch.tensor(group.lengths, device=self._device)[:, None, None, None]
            column = None if starts is None else starts[:, None, None, None]
            return seen_of(how.part, queries, keys, column) & (keys < lengths)
        if group.is_whole and (window is None or window >= size):
            return None
        keys = torch.arange(size, device=self._device)
        queries = torch.from_numpy(group.positions).to(self._device)[:, None, :, None]
        seen = queries >= keys
        if how.is_bidirectional:
            lengths = torch.tensor(group.lengths, device=self._device)[:, None, None, None]
            seen = (keys < lengths).expand_as(seen)
        return within(queries, keys, seen, window, is_chunked=how.is_chunked)

    def _groups(
        self, layer: int, how: AttentionMixer, of_a_key: int, of_a_score: int
    ) -> Iterator[AttentionGroup]:
        """Branches by whether their patterns are touched, then by number of queries, as fit the room.

        of_a_key: bytes of a key and value gathered; of_a_score: of the scores of a query and a key.
        """
        for is_read in (False, True):
            chosen = [b for b in self._kept.held if self._taps.reads_attention(b, layer) == is_read]
            chosen.sort(key=lambda b: (-len(self._kept.held[b]), self._forest.branches[b].length))
            start = 0
            while start < len(chosen):
                most = len(self._kept.held[chosen[start]])
                materialised = of_a_score * (
                    is_read or how.is_capped or how.relative is not None or how.part is not None
                )
                stop, longest = start, 0
                while stop < len(chosen) and len(self._kept.held[chosen[stop]]) >= RAGGED * most:
                    longest = max(longest, self._forest.branches[chosen[stop]].length)
                    cost = longest * (of_a_key + most * (materialised + 1))  # of a row, its mask included
                    if (stop + 1 - start) * cost > self._room and stop > start:
                        break
                    stop += 1
                yield self._group(chosen[start:stop])
                start = stop

    def _group(self, branches: list[int]) -> AttentionGroup:
        counts = [len(self._kept.held[b]) for b in branches]
        last = np.array(counts)[:, None] - 1
        place = np.minimum(np.arange(max(counts)), last)
        starts = np.array([self._kept.slices[b].start for b in branches])[:, None]
        queries = starts + place
        lengths = [self._forest.branches[b].length for b in branches]
        keys = self.row.where[branches, : max(lengths)]
        return AttentionGroup(branches, counts, queries, self._kept.position[queries], keys, lengths)


def _tables(
    rope: RopeConfig, forest: Forest, row: Row, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos, sin [token, half head]; each token's by the length of its own prompt where that matters."""
    position = torch.from_numpy(row.position).to(device)
    if not rope.depends_on_length:
        cos, sin = rope_tables(rope, forest.longest, device, dtype)
        return cos[position], sin[position]
    lengths = np.array([branch.length for branch in forest.branches])[row.branch]
    parts = {length: rope_tables(rope, int(length), device, dtype) for length in np.unique(lengths)}
    first = next(iter(parts.values()))[0]
    cos, sin = first.new_empty(len(row), first.shape[1]), first.new_empty(len(row), first.shape[1])
    for length, tables in parts.items():
        mine = torch.from_numpy(np.flatnonzero(lengths == length)).to(device)
        cos[mine], sin[mine] = tables[0][position[mine]], tables[1][position[mine]]
    return cos, sin
