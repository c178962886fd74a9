"""BranchHistory: attention over the tokens of many branches that share one row.

A layer is per-token linear algebra, plus attention or a recurrence (branch_scan.py). Per-token operations do
not depend on the branch, so all tokens of all branches form one row, and matrix products are as large as
memory allows. For attention, each query gathers the keys of its own branch; where the branch does not compute
a position, an index names the token of an ancestor, so that no key is computed or stored twice.

Axes: branch, position; token = an index in the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ....store.arrays import Ints
from ..architectures.layer_summaries import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..networks.attention import (
    Weigh,
    attend,
    fused_over_padded,
    limit_to_window,
    needs_unfused,
    padded_keys,
    padded_keys_unfused,
    unfused_attention,
)
from ..networks.history import Carried
from ..networks.pairs import seen_of
from ..networks.recurrences.recurrence import Recurrence
from ..networks.rope import rope_tables
from .branch_scan import scan_branches
from .branch_taps import BranchTaps
from .forest import AttentionGroup, Forest, Row

RAGGED = 0.75
"""Branches whose query counts differ by no more than this ratio share one attention call, padded."""


class BranchHistory:
    """Positions and attention of a sweep over many branches, whose tokens are computed side by side.

    Each token attends to the tokens of its own branch, and of its ancestors where the branch computes none.
    """

    def __init__(self, forest: Forest, taps: BranchTaps, *, room: int, device: torch.device) -> None:
        """Prepare a sweep.

        Arguments:
            forest: branches of the sweep.
            taps: hook points of the branches.
            room: bytes that gathered keys and scores may take.
            device: device of the network.
        """
        self._forest, self._taps, self._room, self._device = forest, taps, room, device
        self._dropped: set[int] = set()
        self._kept_tokens: Tensor | None = None
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self.row = self._row_of(0)
        """Tokens that enter the current layer."""
        self._kept = self.row

    def ids(self) -> Tensor:
        """Token ids [1, token] of the row that enters the first layer."""
        forest, row = self._forest, self.row
        tokens = np.zeros((len(forest.branches), forest.longest), np.int64)
        for number, branch in enumerate(forest.branches):
            tokens[number, : branch.length] = branch.tokens
        return torch.from_numpy(tokens[row.branch, row.position])[None].to(self._device)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its prompt, int [token]."""
        return torch.from_numpy(self.row.position).to(self._device)

    @property
    def starts(self) -> Tensor | None:
        """Position at which the target begins in each token's prompt, [1, token]; None without targets."""
        starts = self._starts()
        return None if starts is None else torch.from_numpy(starts[self.row.branch])[None].to(self._device)

    def _starts(self) -> Ints | None:
        """Position at which the target of each branch begins, [branch]; None without encoder-decoder."""
        branches = self._forest.branches
        if branches[0].architecture.target_start is None:
            return None
        size = branches[0].architecture.vocab_size
        # Ids of a target are shifted past the vocabulary, so that the first such id marks its beginning.
        return np.array([np.argmax(np.array(b.tokens) >= size) for b in branches], np.int64)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """Share of a token id among the tokens of each token's prompt, [1, token]."""
        shares = [np.mean(np.array(branch.tokens) == token) for branch in self._forest.branches]
        share_of_branch = np.array(shares, np.float32)
        return torch.from_numpy(share_of_branch[self.row.branch])[None].to(self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The tensors that enter a layer, for the tokens that every branch computes in it.

        Where a branch computes a position for the first time, it gets a copy of its parent's values.

        Arguments:
            layer: layer index; the number of layers for the final norm.
            carried: output of the layer before, by name, [1, token, width].
        """
        # `row`: tokens that enter this layer; `self._kept` is still the row of tokens that left the layer
        # before.
        row = self.row
        if layer:
            self._drop_unchanged(layer)
            row = self._row_of(layer)
            source = self._tokens_in(self._kept, row)
            carried = {name: x.index_select(1, source) for name, x in carried.items()}
        output_positions = self._output_positions(layer, row)
        is_final_norm = layer == self._forest.branches[0].n_layers
        self.row, self._kept = row, row if is_final_norm else Row(self._forest, output_positions)
        self._taps.begin(self.row, self._kept, is_last=not output_positions)
        # None: all tokens that enter the layer also leave it.
        self._kept_tokens = self._tokens_in(row, self._kept) if len(self._kept) < len(row) else None
        # Other tokens may be in the row of this layer, so tables by token are no longer valid.
        self._rotations.clear()
        return carried

    def _drop_unchanged(self, layer: int) -> None:
        """Stop computing branches whose interventions, all made before `layer`, changed no value: they equal
        their parents."""
        for number in self._taps.unmoved():
            branch = self._forest.branches[number]
            if branch.parent is not None and branch.ends_changing(layer - 1):
                self._dropped.add(number)

    def _output_positions(self, layer: int, row: Row) -> dict[int, Ints]:
        """Branch -> positions whose output of a layer is needed, of the branches that compute the layer.

        Arguments:
            layer: layer index; the number of layers for the final norm.
            row: tokens that enter the layer.
        """
        branches = self._forest.branches
        positions = {
            number: branches[number].kept(layer)
            for number in row.held
            if branches[number].is_needed(layer, inside=True)
        }
        is_final_norm = layer == branches[0].n_layers
        if positions and not is_final_norm and branches[0].architecture.layers[layer].mixer.kind == "in turn":
            # The second of two mixers in turn reads the first one's output at every token.
            return row.held
        return positions

    def _tokens_in(self, source: Row, row: Row) -> Tensor:
        """Token of `source` with the values of each token of `row`: of the same branch and position, or of
        the nearest ancestor that computes the position, int [token]."""
        return torch.from_numpy(source.where[row.branch, row.position]).to(self._device)

    def needed(self, x: Tensor) -> Tensor:
        """Select the tokens of x [..., token, width] whose output of this layer is needed."""
        return x if self._kept_tokens is None else x.index_select(-2, self._kept_tokens)

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE tables (cos, sin) of the tokens that enter the layer, [token, half head]."""
        if rope not in self._rotations:
            self._rotations[rope] = _rope_tables_by_token(rope, self._forest, self.row, self._device, dtype)
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention of query tokens to keys of their own branch and its ancestors.

        Arguments:
            layer: layer index.
            q: queries [1, H, kept token, dh].
            k: keys [1, Hk, token, dh].
            v: values [1, Hk, token, dh].
            mixer: parameters of the layer's attention.

        Returns:
            z [1, H, kept token, dh].
        """
        z = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        key_bytes = q.element_size() * (k.shape[1] * (k.shape[3] + v.shape[3]))
        score_bytes = 3 * q.element_size() * q.shape[1]
        # torch has no fused kernel for keys and values of different widths; its fallback picks steps by size.
        is_narrow = q.shape[3] != v.shape[3] and q.device.type == "cpu"
        for unpadded_group in self._groups(layer, mixer, key_bytes, score_bytes):
            queries = torch.from_numpy(unpadded_group.queries).to(self._device)
            group_q = q[0][:, queries].transpose(0, 1)
            # Padding that the kernel would add is gathered with the keys, which saves a second copy.
            n_keys = unpadded_group.keys.shape[1]
            is_unfused = (
                needs_unfused(q, mixer)
                or self._taps.reads_attention(unpadded_group.branches[0], layer)
                or is_narrow
            )
            group = unpadded_group
            if is_unfused:
                group = unpadded_group.with_keys(padded_keys_unfused(group_q, n_keys, mixer))
            n_keys = group.keys.shape[1]
            n_padding = 0 if is_unfused else padded_keys(group_q, n_keys) - n_keys
            keys = torch.from_numpy(np.pad(group.keys, ((0, 0), (0, n_padding)))).to(self._device)
            padded_k, padded_v = (x[0][:, keys].transpose(0, 1) for x in (k, v))
            weigh: Weigh | None = unfused_attention if is_narrow else None
            if n_padding:
                weigh = fused_over_padded(padded_k, padded_v)
            group_k, group_v = padded_k[:, :, :n_keys], padded_v[:, :, :n_keys]
            allowed = self._allowed(group, mixer)
            positions = torch.from_numpy(group.positions).to(self._device)
            taps = self._taps.of_group(group, self._kept, layer, mixer.room)
            group_z = attend(group_q, group_k, group_v, allowed, mixer, layer, taps, weigh, positions)
            # Padding repeats the last query, whose copies are dropped here.
            is_real = np.arange(queries.shape[1]) < np.array(group.counts)[:, None]
            is_query = torch.from_numpy(is_real).to(self._device)
            z[queries[is_query]] = group_z.transpose(1, 2)[is_query]
        self._taps.attention_done(layer, self._kept)
        return z.transpose(0, 1)[None]

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """The `count` rows before each token in its own branch, [1, token, count, width]; 0 before the start.

        Arguments:
            layer: layer index.
            name: name of the rows in the layer.
            x: rows of all tokens, [1, token, width].
            count: number of rows before each token.
        """
        positions_before = self.row.position[:, None] - np.arange(count, 0, -1)
        tokens = self.row.where[self.row.branch[:, None], np.maximum(positions_before, 0)]
        rows_before = x[:, torch.from_numpy(tokens).to(self._device)]
        is_outside = torch.from_numpy(positions_before < 0).to(self._device)
        return rows_before.masked_fill(is_outside[None, :, :, None], 0)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """Run a recurrence over the tokens of all branches, each from the state that its parent left.

        Arguments:
            layer: layer index.
            recurrence: the recurrence of the layer.
            tokens: inputs of the recurrence by name, each [1, H, token, width].
            room: prefix of its hook point kinds, e.g. "rwkv".
        """
        return scan_branches(self._forest, self.row, self._taps, layer, recurrence, tokens, room, self._room)

    def _row_of(self, layer: int) -> Row:
        """The tokens that all branches compute in a layer, side by side."""
        needed = {
            number: branch.held(layer)
            for number, branch in enumerate(self._forest.branches)
            if number not in self._dropped and branch.is_needed(layer, inside=False)
        }
        return Row(self._forest, needed)

    def _allowed(self, group: AttentionGroup, mixer: AttentionMixer) -> Tensor | None:
        """Attention mask, bool [row, 1, query, key]; None where it would hide only later keys, or nothing."""
        n_keys, window = group.keys.shape[1], mixer.window
        if mixer.part is not None:
            target_starts = self._starts()
            starts = (
                None
                if target_starts is None
                else torch.from_numpy(target_starts[group.branches]).to(self._device)
            )
            keys = torch.arange(n_keys, device=self._device)
            queries = torch.from_numpy(group.positions).to(self._device)[:, None, :, None]
            lengths = torch.tensor(group.lengths, device=self._device)[:, None, None, None]
            row_starts = None if starts is None else starts[:, None, None, None]
            return seen_of(mixer.part, queries, keys, row_starts) & (keys < lengths)
        if group.is_whole and (window is None or window >= n_keys):
            return None
        keys = torch.arange(n_keys, device=self._device)
        queries = torch.from_numpy(group.positions).to(self._device)[:, None, :, None]
        visible = queries >= keys
        if mixer.is_bidirectional:
            lengths = torch.tensor(group.lengths, device=self._device)[:, None, None, None]
            visible = (keys < lengths).expand_as(visible)
        return limit_to_window(queries, keys, visible, window, is_chunked=mixer.is_chunked)

    def _groups(
        self, layer: int, mixer: AttentionMixer, key_bytes: int, score_bytes: int
    ) -> Iterator[AttentionGroup]:
        """Group branches into attention calls that fit in memory.

        Branches whose scores are captured or changed are grouped separately. In a group, numbers of queries
        differ little.

        Arguments:
            layer: layer index.
            mixer: parameters of the layer's attention.
            key_bytes: bytes of one gathered key with its value.
            score_bytes: bytes of the scores of one query and one key, where they are materialised.
        """
        for is_read in (False, True):
            branches = [b for b in self._kept.held if self._taps.reads_attention(b, layer) == is_read]
            # Neighbours in this order differ little in their number of queries, which keeps padding small.
            branches.sort(key=lambda b: (-len(self._kept.held[b]), self._forest.branches[b].length))
            # Only these kinds of attention hold the scores of all pairs in memory.
            has_scores = is_read or mixer.is_capped or mixer.relative is not None or mixer.part is not None
            bytes_per_pair = score_bytes * has_scores + 1  # with a byte of the mask
            start = 0
            while start < len(branches):
                n_queries = len(self._kept.held[branches[start]])
                stop, longest = start, 0
                while stop < len(branches) and len(self._kept.held[branches[stop]]) >= RAGGED * n_queries:
                    longest = max(longest, self._forest.branches[branches[stop]].length)
                    row_bytes = longest * (key_bytes + n_queries * bytes_per_pair)
                    if (stop + 1 - start) * row_bytes > self._room and stop > start:
                        break
                    stop += 1
                yield self._group(branches[start:stop])
                start = stop

    def _group(self, branches: list[int]) -> AttentionGroup:
        """Lay out branches as rows of one attention call; rows with fewer queries repeat their last one."""
        counts = [len(self._kept.held[b]) for b in branches]
        last = np.array(counts)[:, None] - 1
        column = np.minimum(np.arange(max(counts)), last)
        starts = np.array([self._kept.slices[b].start for b in branches])[:, None]
        queries = starts + column
        lengths = [self._forest.branches[b].length for b in branches]
        keys = self.row.where[branches, : max(lengths)]
        return AttentionGroup(branches, counts, queries, self._kept.position[queries], keys, lengths)


def _rope_tables_by_token(
    rope: RopeConfig, forest: Forest, row: Row, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RoPE tables (cos, sin) of each token, [token, half head].

    If the scaling depends on the length of the prompt, each token has the tables of its own prompt.
    """
    position = torch.from_numpy(row.position).to(device)
    if not rope.depends_on_length:
        cos, sin = rope_tables(rope, forest.longest, device, dtype)
        return cos[position], sin[position]
    lengths = np.array([branch.length for branch in forest.branches])[row.branch]
    parts = {length: rope_tables(rope, int(length), device, dtype) for length in np.unique(lengths)}
    example = next(iter(parts.values()))[0]
    cos = example.new_empty(len(row), example.shape[1])
    sin = torch.empty_like(cos)
    for length, tables in parts.items():
        tokens = torch.from_numpy(np.flatnonzero(lengths == length)).to(device)
        cos[tokens], sin[tokens] = tables[0][position[tokens]], tables[1][position[tokens]]
    return cos, sin
