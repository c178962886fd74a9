"""Effects: every edge of a prompt changed by itself, exactly.

A destination gets what a source would add in another run in place of what it adds, and it and everything
behind it are computed anew (path patching of one edge; Goldowsky-Dill et al., 2023, equation 2). Before the
destination nothing differs from the clean pass, so all that is computed of an edge is

1. what its destination makes of the changed stream. The queries, keys and values of all heads are made of
   clean + (source's change) at once: a row for each source, not for each edge;
2. the difference this makes to the stream, and from there on the rest of the model: the MLP beside it, later
   layers, the last of them at the last position alone. All edges into a layer go on together.

Positions before the first at which anything differs - that of the source's change, where prompts begin alike
or only one position is asked for; of what a head has read, as the first query sees its own key alone - keep
their clean keys and values, and only later ones are computed.

Border: one prompt; what stands for a source is given.

Axes: S positions, D hidden, source, destination; row = an edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ....pipeline.ambient import steps_in_plain_torch
from ..architectures.architecture import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.wants import Logits
from ..networks.attention import attend, causal
from ..networks.history import STREAM, Carried
from ..networks.loop import onwards
from ..networks.rope import rope_tables
from ..passes.plain import WholePrompts
from .layout import KINDS, Layout
from .parts import NO_TAPS, SplitNetwork, attended, output_by_head, projected
from .prompts import EdgeSources

__all__ = ["alone_at", "changed_edges", "most_rows"]

Found = tuple[Tensor, Tensor, Tensor]
"""Sources, destinations, int [row], and logits [row, token] at the last position."""
MOST_TOKENS = 4096
"""Of a block of rows: at more, products get no faster."""


@steps_in_plain_torch
def changed_edges(
    network: SplitNetwork,
    layout: Layout,
    clean: EdgeSources,
    change: Tensor,
    want: Logits,
    *,
    position: int | None = None,
    memory: int,
) -> Iterator[Found]:
    """Logits at the last position of a prompt, for each of its edges changed by itself.

    clean: of one prompt (B = 1). change: what each source adds in the other run, less what it adds in this
    one, [source, S, D]. want: which tokens' logits. position: the only one that is changed; None for all.
    memory: bytes that may be taken beside what is given.
    """
    change = alone_at(change, position)
    first, rest = _first_that_differs(change), _Rest(network, layout, clean, want, memory)
    for layer in range(layout.num_layers):
        yield from _into_heads(rest, layer, change, first, memory)
        yield from _into_mlp(rest, layer, change, first)
    for rows in _blocks(torch.arange(len(layout.sources)), rest.most_rows(first)):
        column = torch.full_like(rows, len(layout.destinations) - 1)
        yield rows, column, rest.read(clean.streams.logits[:, -1:] + change[rows, -1:])


def _into_heads(rest: _Rest, layer: int, change: Tensor, first: int, memory: int) -> Iterator[Found]:
    """Edges into the queries, keys and values of a layer. first: the first position that is changed."""
    layout, network, clean = rest.layout, rest.network, rest.clean
    stream, length = clean.streams.heads[layer], change.shape[1]
    history = WholePrompts(length, NO_TAPS, stream.device)
    own = projected(network, layer, stream, history)
    weights = output_by_head(network, layer, layout.num_heads)
    every = torch.arange(layout.read_by_heads(layer))
    of_a_source = 6 * layout.num_heads * length * stream.shape[-1] * stream.element_size()
    for chosen in _blocks(every, max(1, min(rest.most_rows(first), memory // of_a_source))):
        given = projected(network, layer, stream + change[chosen], history)
        for kind, column in zip(KINDS, range(len(KINDS)), strict=True):
            put = [part.expand(len(chosen), *part.shape[1:]) for part in own]
            put[column] = given[column]
            put_in = dict(zip(KINDS, put, strict=True))
            z = attended(network, layer, put_in, stream.expand(len(chosen), -1, -1), history)
            moved = z - clean.z[layer]
            differs = max(first, _first_that_differs(moved))
            moved = moved[:, :, rest.start(layer, differs) :]
            sources = chosen.repeat_interleave(layout.num_heads)
            columns = torch.arange(len(layout.destinations))[layout.inputs(layer, kind)].repeat(len(chosen))
            for rows in _blocks(torch.arange(len(sources)), rest.most_rows(differs)):
                heads = rows % layout.num_heads
                added = torch.bmm(moved.flatten(0, 1)[rows], weights[heads])
                yield sources[rows], columns[rows], rest.behind_heads(layer, added)


def _into_mlp(rest: _Rest, layer: int, change: Tensor, first: int) -> Iterator[Found]:
    """Edges into a layer's MLP. first: the first position that is changed."""
    layout, start = rest.layout, rest.start(layer, first)
    stream = rest.clean.streams.mlps[layer][:, start:]
    own = rest.network.fed(layer, stream, NO_TAPS)
    for rows in _blocks(torch.arange(layout.read_by_mlp(layer)), rest.most_rows(first)):
        given = stream + change[rows, start:]
        added = rest.network.fed(layer, given, NO_TAPS) - own
        column = torch.full_like(rows, layout.mlp_input(layer))
        yield rows, column, rest.behind_layer(layer, added)


class _Rest:
    """The rest of the model behind a change of the clean stream at its last positions, S' of them."""

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: EdgeSources, want: Logits, memory: int
    ) -> None:
        self.network, self.layout, self.clean = network, layout, clean
        self._want, self._memory, self._length = want, memory, clean.added.shape[2]
        self._histories: dict[int, _Suffixes] = {}

    def start(self, layer: int, first: int) -> int:
        """The first position of a layer's output that anyone needs. first: the first that differs."""
        return self._length - 1 if layer == self.layout.num_layers - 1 else first

    def most_rows(self, first: int) -> int:
        """Rows of a block that differ from a position on."""
        return most_rows(self.network, self._length - first, self._want, self._memory)

    def behind_heads(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token], where this is added to the stream by a layer's heads [row, S', D]."""
        if self.layout.parallel[layer]:
            return self.behind_layer(layer, added)
        stream = self.clean.streams.mlps[layer][:, -added.shape[1] :] + added
        return self._on(layer, stream + self.network.fed(layer, stream, NO_TAPS))

    def behind_layer(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token], where this is added to what comes out of a layer [row, S', D]."""
        after = [*self.clean.streams.heads[1:], self.clean.streams.logits][layer]
        return self._on(layer, after[:, -added.shape[1] :] + added)

    def _on(self, layer: int, stream: Tensor) -> Tensor:
        last, first = self.layout.num_layers - 1, self._length - stream.shape[1]
        if first not in self._histories:
            keys, device = self.clean.keys, stream.device
            self._histories[first] = _Suffixes(self._length, first, keys, last, device)
        later, history = range(layer + 1, last + 1), self._histories[first]
        return self.read(onwards(self.network, {STREAM: stream}, later, history, NO_TAPS, layer))

    def read(self, stream: Tensor) -> Tensor:
        """Last residual states [row, 1, D] -> logits [row, token]."""
        return self.network.unembed(self.network.final_norm(stream[:, -1]), self._want)


class _Suffixes(WholePrompts):
    """The positions of prompts from one on (`History`), which see keys and values of one prompt before it; in
    the last layer, nothing but the last position is needed."""

    def __init__(
        self,
        length: int,
        first: int,
        keys: Mapping[int, tuple[Tensor, Tensor]],
        last_layer: int,
        device: torch.device,
    ) -> None:
        super().__init__(length, NO_TAPS, device)
        self._first, self._keys, self._last, self._is_last = first, keys, last_layer, False
        self._tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """See `History`: those from the first on, [S']."""
        return torch.arange(self._first, self._length, device=self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """What is carried enters every layer as it is."""
        self._is_last = layer == self._last
        return carried

    def kept(self, x: Tensor) -> Tensor:
        """All of them; in the last layer the last."""
        return x[..., -1:, :] if self._is_last else x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `History`."""
        if rope not in self._tables:
            cos, sin = rope_tables(rope, self._length, self._device, dtype)
            self._tables[rope] = cos[self._first :], sin[self._first :]
        return self._tables[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """See `History`."""
        if self._first:
            before = (part[:, :, : self._first].expand(len(k), -1, -1, -1) for part in self._keys[layer])
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        queries, keys = q.shape[2], k.shape[2]
        is_plain = queries == keys and (how.window is None or how.window >= keys)
        seen = (
            None
            if is_plain
            else causal(keys, how.window, q.device, newest=queries, is_chunked=how.is_chunked)
        )
        return attend(q, k, v, seen, how, layer, NO_TAPS)


def _first_that_differs(change: Tensor) -> int:
    """The first position at which any of some changes [..., S, D] is not 0; the last where none is."""
    places = change.ne(0).any(-1).flatten(0, -2).any(0).nonzero()
    return int(places[0]) if len(places) else change.shape[-2] - 1


def alone_at(change: Tensor, position: int | None) -> Tensor:
    """Changes [source, S, D] at one position and nowhere else; all of them for None."""
    if position is None:
        return change
    alone = torch.zeros_like(change)
    alone[:, position] = change[:, position]
    return alone


def most_rows(network: SplitNetwork, positions: int, want: Logits, memory: int) -> int:
    """Rows of a block: as many as fit half of the memory, and no more than make products fast."""
    itemsize = network.dtype.itemsize
    logits = network.config.vocab_size if want.tokens is None else len(want.tokens)
    of_a_row = network.config.bytes_per_token(itemsize) * positions + 4 * itemsize * logits
    return max(1, min(MOST_TOKENS // positions, memory // 2 // of_a_row))


def _blocks(rows: Tensor, most: int) -> Iterator[Tensor]:
    yield from rows.split(most)
