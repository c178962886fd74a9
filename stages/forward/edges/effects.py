"""Exact effects of single edges: every edge of a prompt changed by itself.

A destination reads what a source adds in another run instead of what it adds in this one; it and everything
after it are recomputed (path patching of one edge; Goldowsky-Dill et al., 2023, equation 2). Before the
destination nothing differs from the clean pass, so for an edge only this is computed:

1. the output of its destination on the changed stream. Queries, keys and values of all heads are computed
   from clean + (change of the source) at once: a row per source, not per edge;
2. the change of the stream by this, and the rest of the model: the MLP of the layer, later layers, and of the
   last layer only the last position. All edges into a layer continue together.

Positions before the first difference keep their clean keys and values, and only later ones are computed. For
a source's change that is the first position at which prompts differ, or the only one that is changed; for a
head's output it may be later, as the first query attends to its own key alone.

Axes: S positions, D hidden, source, destination; row = an edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ....pipeline.ambient import steps_in_plain_torch
from ..architectures.layer_summaries import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.wants import Logits
from ..networks.attention import attend, causal
from ..networks.history import STREAM, Carried
from ..networks.loop import run_to_end
from ..passes.plain import WholePrompts
from ..passes.planner import MOST_TOKENS
from .layout import KINDS, Layout
from .parts import NO_TAPS, SplitNetwork, attended, output_by_head, projected
from .prompts import EdgeSources

__all__ = ["alone_at", "changed_edges", "most_rows"]

EdgeLogits = tuple[Tensor, Tensor, Tensor]
"""(sources int [row], destinations int [row], logits at the last position [row, token])."""


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
) -> Iterator[EdgeLogits]:
    """Logits at the last position of a prompt, for each of its edges changed by itself.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        clean: clean run of one prompt (B = 1).
        change: what each source adds in the other run minus what it adds in this one, [source, S, D].
        want: tokens whose logits are computed.
        position: only position that is changed; None for all.
        memory: bytes that may be allocated beside the arguments.

    Yields:
        Sources, destinations and logits of blocks of edges.
    """
    # Before the first difference nothing is recomputed: positions there keep their clean keys and values.
    change = alone_at(change, position)
    first_position, downstream = (
        _first_that_differs(change),
        _Downstream(network, layout, clean, want, memory),
    )
    for layer in range(layout.num_layers):
        yield from _into_heads(downstream, layer, change, first_position, memory)
        yield from _into_mlp(downstream, layer, change, first_position)
    for rows in torch.arange(len(layout.sources)).split(downstream.most_rows(first_position)):
        column = torch.full_like(rows, len(layout.destinations) - 1)
        yield rows, column, downstream.read(clean.streams.logits[:, -1:] + change[rows, -1:])


def _into_heads(
    downstream: _Downstream, layer: int, change: Tensor, first_position: int, memory: int
) -> Iterator[EdgeLogits]:
    """Edges into queries, keys and values of a layer; `first_position` is the first changed position."""
    layout, network, clean = downstream.layout, downstream.network, downstream.clean
    stream, length = clean.streams.heads[layer], change.shape[1]
    history = WholePrompts(length, NO_TAPS, stream.device)
    # Computed once per layer: all edges into it differ from these in one of the three only.
    clean_qkv = projected(network, layer, stream, history)
    weights = output_by_head(network, layer, layout.num_heads)
    readable = torch.arange(layout.read_by_heads(layer))
    source_bytes = 6 * layout.num_heads * length * stream.shape[-1] * stream.element_size()
    for block in readable.split(max(1, min(downstream.most_rows(first_position), memory // source_bytes))):
        changed_qkv = projected(network, layer, stream + change[block], history)
        for kind, column in zip(KINDS, range(len(KINDS)), strict=True):
            qkv = [part.expand(len(block), *part.shape[1:]) for part in clean_qkv]
            qkv[column] = changed_qkv[column]
            put_in = dict(zip(KINDS, qkv, strict=True))
            z = attended(network, layer, put_in, stream.expand(len(block), -1, -1), history)
            difference = z - clean.z[layer]
            differs = max(first_position, _first_that_differs(difference))
            # The first query attends to its own key alone, so a changed q or k leaves its output as it is.
            difference = difference[:, :, downstream.start(layer, differs) :]
            sources = block.repeat_interleave(layout.num_heads)
            columns = torch.arange(len(layout.destinations))[layout.inputs(layer, kind)].repeat(len(block))
            for rows in torch.arange(len(sources)).split(downstream.most_rows(differs)):
                # Rows are ordered source by source, each with all heads of the layer.
                heads = rows % layout.num_heads
                added = torch.bmm(difference.flatten(0, 1)[rows], weights[heads])
                yield sources[rows], columns[rows], downstream.after_heads(layer, added)


def _into_mlp(
    downstream: _Downstream, layer: int, change: Tensor, first_position: int
) -> Iterator[EdgeLogits]:
    """Edges into a layer's MLP; `first_position` is the first changed position."""
    layout, start = downstream.layout, downstream.start(layer, first_position)
    stream = downstream.clean.streams.mlps[layer][:, start:]
    clean_output = downstream.network.fed(layer, stream, NO_TAPS)
    for rows in torch.arange(layout.read_by_mlp(layer)).split(downstream.most_rows(first_position)):
        changed = stream + change[rows, start:]
        added = downstream.network.fed(layer, changed, NO_TAPS) - clean_output
        column = torch.full_like(rows, layout.mlp_input(layer))
        yield rows, column, downstream.after_layer(layer, added)


class _Downstream:
    """The rest of the model after a change of the clean stream at its last S' positions."""

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: EdgeSources, want: Logits, memory: int
    ) -> None:
        self.network, self.layout, self.clean = network, layout, clean
        self._want, self._memory, self._length = want, memory, clean.added.shape[2]
        self._histories: dict[int, _Suffixes] = {}

    def start(self, layer: int, first_position: int) -> int:
        """First position of a layer's output that is needed; `first_position` is the first that differs."""
        # In the last layer nothing mixes positions any more, and only the last one is read.
        return self._length - 1 if layer == self.layout.num_layers - 1 else first_position

    def most_rows(self, first_position: int) -> int:
        """Rows per block, for rows that differ from a position on."""
        return most_rows(self.network, self._length - first_position, self._want, self._memory)

    def after_heads(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token] where heads of a layer add this to the stream, [row, S', D]."""
        if self.layout.parallel[layer]:
            return self.after_layer(layer, added)
        stream = self.clean.streams.mlps[layer][:, -added.shape[1] :] + added
        return self._on(layer, stream + self.network.fed(layer, stream, NO_TAPS))

    def after_layer(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token] where this is added to the output of a layer, [row, S', D]."""
        after = [*self.clean.streams.heads[1:], self.clean.streams.logits][layer]
        return self._on(layer, after[:, -added.shape[1] :] + added)

    def _on(self, layer: int, stream: Tensor) -> Tensor:
        last, first_position = self.layout.num_layers - 1, self._length - stream.shape[1]
        # Rope tables and expanded keys depend on the first position only, and many blocks share it.
        if first_position not in self._histories:
            keys, device = self.clean.keys, stream.device
            self._histories[first_position] = _Suffixes(self._length, first_position, keys, last, device)
        later, history = range(layer + 1, last + 1), self._histories[first_position]
        return self.read(run_to_end(self.network, {STREAM: stream}, later, history, NO_TAPS, layer))

    def read(self, stream: Tensor) -> Tensor:
        """Final stream [row, 1, D] -> logits [row, token]."""
        return self.network.unembed(self.network.final_norm(stream[:, -1]), self._want)


class _Suffixes(WholePrompts):
    """`History` of the last positions of many rows, which share the earlier keys and values of one prompt.

    In the last layer only the last position is computed.
    """

    def __init__(
        self,
        length: int,
        first_position: int,
        keys: Mapping[int, tuple[Tensor, Tensor]],
        last_layer: int,
        device: torch.device,
    ) -> None:
        super().__init__(length, NO_TAPS, device)
        self._first, self._keys, self._last, self._is_last = first_position, keys, last_layer, False

    @property
    def positions(self) -> Tensor:
        """Positions from the first one on, [S']."""
        return torch.arange(self._first, self._length, device=self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The carried tensors unchanged."""
        self._is_last = layer == self._last
        return carried

    def needed(self, x: Tensor) -> Tensor:
        """x unchanged; in the last layer its last position."""
        return x[..., -1:, :] if self._is_last else x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `History`."""
        cos, sin = super().rotation(rope, dtype)
        return cos[self._first :], sin[self._first :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """See `History`."""
        if self._first:
            # Positions before the first difference are those of the clean run, whatever the edge.
            before = (part[:, :, : self._first].expand(len(k), -1, -1, -1) for part in self._keys[layer])
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        queries, keys = q.shape[2], k.shape[2]
        # Fused kernels have a causal flag for square attention; any other shape needs a mask.
        is_plain = queries == keys and (mixer.window is None or mixer.window >= keys)
        seen = (
            None
            if is_plain
            else causal(keys, mixer.window, q.device, newest=queries, is_chunked=mixer.is_chunked)
        )
        return attend(q, k, v, seen, mixer, layer, NO_TAPS)


def _first_that_differs(change: Tensor) -> int:
    """First position with a nonzero change in [..., S, D]; the last position if all changes are zero."""
    positions = change.ne(0).any(-1).flatten(0, -2).any(0).nonzero()
    return int(positions[0]) if len(positions) else change.shape[-2] - 1


def alone_at(change: Tensor, position: int | None) -> Tensor:
    """Changes [source, S, D] at one position, 0 elsewhere; unchanged for None.

    Arguments:
        change: changes of all sources, [source, S, D].
        position: the position to keep; None for all.
    """
    if position is None:
        return change
    alone = torch.zeros_like(change)
    alone[:, position] = change[:, position]
    return alone


def most_rows(network: SplitNetwork, positions: int, want: Logits, memory: int) -> int:
    """Rows per block: as many as fit into half of the memory, and no more than speed up matrix products.

    Arguments:
        network: the network.
        positions: positions that are computed of each row.
        want: logits that are computed of each row.
        memory: bytes that may be allocated beside the arguments.
    """
    itemsize = network.dtype.itemsize
    logits = network.config.vocab_size if want.tokens is None else len(want.tokens)
    row_bytes = network.config.bytes_per_token(itemsize) * positions + 4 * itemsize * logits
    # The other half of the memory holds changed streams and projections of the block.
    return max(1, min(MOST_TOKENS // positions, memory // 2 // row_bytes))
