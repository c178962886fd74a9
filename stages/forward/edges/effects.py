"""Effects: every edge of a prompt changed by itself, exactly.

A destination gets what a source would add in another run in place of what it adds, and it and everything
behind it are computed anew (path patching of one edge; Goldowsky-Dill et al., 2023, equation 2). Before the
destination nothing differs from the clean pass, so all that is computed of an edge is

1. what its destination makes of the changed stream. The queries, keys and values of all heads are made of
   clean + (source's change) at once: a row for each source, not for each edge;
2. the difference this makes to the stream, and from there on the rest of the model: the MLP beside it, later
   layers, the last of them at the last position alone. All edges into a layer go on together.

With a position, the source is changed there alone: earlier positions keep their clean keys and values, and
only later ones are computed.

Border: one prompt; what stands for a source is given.

Axes: S positions, D hidden, source, destination; row = an edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

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
from .prompts import Sources

__all__ = ["changed_edges", "most_rows"]

Found = tuple[Tensor, Tensor, Tensor]
"""Sources, destinations, int [row], and logits [row, token] at the last position."""
MOST_TOKENS = 4096
"""Of a block of rows: at more, products get no faster."""


def changed_edges(
    network: SplitNetwork,
    layout: Layout,
    clean: Sources,
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
    length = change.shape[1]
    first = 0 if position is None else position % length
    if position is not None:
        alone = torch.zeros_like(change)
        alone[:, first] = change[:, first]
        change = alone
    rest = _Rest(network, layout, clean, first, want)
    most = most_rows(network, length - first, want, memory)
    for layer in range(layout.num_layers):
        yield from _into_heads(rest, layer, change, most, memory)
        yield from _into_mlp(rest, layer, change, most)
    for rows in _blocks(torch.arange(len(layout.sources)), most):
        column = torch.full_like(rows, len(layout.destinations) - 1)
        yield rows, column, rest.read(clean.streams.logits[:, -1:] + change[rows, -1:])


def _into_heads(rest: _Rest, layer: int, change: Tensor, most: int, memory: int) -> Iterator[Found]:
    """Edges into the queries, keys and values of a layer."""
    layout, network, clean = rest.layout, rest.network, rest.clean
    stream, length = clean.streams.heads[layer], change.shape[1]
    history = WholePrompts(length, NO_TAPS, stream.device)
    own = projected(network, layer, stream, history)
    weights = output_by_head(network, layer, layout.num_heads)
    every = torch.arange(layout.read_by_heads(layer))
    of_a_source = 6 * layout.num_heads * length * stream.shape[-1] * stream.element_size()
    for chosen in _blocks(every, max(1, min(most, memory // of_a_source))):
        given = projected(network, layer, stream + change[chosen], history)
        for kind, column in zip(KINDS, range(len(KINDS)), strict=True):
            put = [part.expand(len(chosen), *part.shape[1:]) for part in own]
            put[column] = given[column]
            put_in = dict(zip(KINDS, put, strict=True))
            z = attended(network, layer, put_in, stream.expand(len(chosen), -1, -1), history)
            moved = (z - clean.z[layer])[:, :, rest.start(layer) :]
            sources = chosen.repeat_interleave(layout.num_heads)
            columns = torch.arange(len(layout.destinations))[layout.inputs(layer, kind)].repeat(len(chosen))
            for rows in _blocks(torch.arange(len(sources)), most):
                heads = rows % layout.num_heads
                added = torch.bmm(moved.flatten(0, 1)[rows], weights[heads])
                yield sources[rows], columns[rows], rest.behind_heads(layer, added)


def _into_mlp(rest: _Rest, layer: int, change: Tensor, most: int) -> Iterator[Found]:
    """Edges into a layer's MLP."""
    layout, stream = rest.layout, rest.clean.streams.mlps[layer]
    own = rest.network.fed(layer, stream[:, rest.start(layer) :], NO_TAPS)
    for rows in _blocks(torch.arange(layout.read_by_mlp(layer)), most):
        given = (stream + change[rows])[:, rest.start(layer) :]
        added = rest.network.fed(layer, given, NO_TAPS) - own
        column = torch.full_like(rows, layout.mlp_input(layer))
        yield rows, column, rest.behind_layer(layer, added)


class _Rest:
    """The rest of the model behind a change of the clean stream, from the first position that differs on."""

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: Sources, first: int, want: Logits
    ) -> None:
        self.network, self.layout, self.clean = network, layout, clean
        self._want, self._length, self._first = want, clean.added.shape[2], first
        self._history = _Suffixes(self._length, first, clean.keys, layout.num_layers - 1, clean.added.device)

    def start(self, layer: int) -> int:
        """The first position of a layer's output that anyone needs."""
        return self._length - 1 if layer == self.layout.num_layers - 1 else self._first

    def behind_heads(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token], where this is added to the stream by a layer's heads [row, S', D]."""
        if self.layout.parallel[layer]:
            return self.behind_layer(layer, added)
        stream = self.clean.streams.mlps[layer][:, self.start(layer) :] + added
        return self._on(layer, stream + self.network.fed(layer, stream, NO_TAPS))

    def behind_layer(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token], where this is added to what comes out of a layer [row, S', D]."""
        after = [*self.clean.streams.heads[1:], self.clean.streams.logits][layer]
        return self._on(layer, after[:, self.start(layer) :] + added)

    def _on(self, layer: int, stream: Tensor) -> Tensor:
        later = range(layer + 1, self.layout.num_layers)
        return self.read(onwards(self.network, {STREAM: stream}, later, self._history, NO_TAPS, layer))

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
        """From the first on."""
        return torch.arange(self._first, self._length, device=self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """As it is."""
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


def most_rows(network: SplitNetwork, positions: int, want: Logits, memory: int) -> int:
    """Rows of a block: as many as fit half of the memory, and no more than make products fast."""
    itemsize = network.dtype.itemsize
    logits = network.config.vocab_size if want.tokens is None else len(want.tokens)
    of_a_row = network.config.bytes_per_token(itemsize) * positions + 4 * itemsize * logits
    return max(1, min(MOST_TOKENS // positions, memory // 2 // of_a_row))


def _blocks(rows: Tensor, most: int) -> Iterator[Tensor]:
    yield from rows.split(most)
