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
    """Change each edge of a prompt by itself, and compute the logits at the last position.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        clean: clean run of one prompt (B = 1).
        change: what each source adds in the other run minus what it adds in the clean run, [source, S, D].
        want: tokens whose logits are computed.
        position: only position that is changed; None for all.
        memory: bytes that may be allocated beside the arguments.

    Yields:
        (sources int [row], destinations int [row], logits [row, token]) of a block of edges.
    """
    # Before the first difference nothing is recomputed: positions there keep their clean keys and values.
    change = alone_at(change, position)
    first_position = _first_changed_position(change)
    downstream = _Downstream(network, layout, clean, want, memory)
    for layer in range(layout.num_layers):
        yield from _edges_into_heads(downstream, layer, change, first_position, memory)
        yield from _edges_into_mlp(downstream, layer, change, first_position)
    for sources in torch.arange(len(layout.sources)).split(downstream.most_rows(first_position)):
        logits_column = torch.full_like(sources, len(layout.destinations) - 1)
        yield sources, logits_column, downstream.read(clean.streams.logits[:, -1:] + change[sources, -1:])


def _edges_into_heads(
    downstream: _Downstream, layer: int, change: Tensor, first_position: int, memory: int
) -> Iterator[EdgeLogits]:
    """Change each edge into the queries, keys and values of a layer's heads.

    Arguments:
        downstream: the rest of the model.
        layer: layer index.
        change: change of the stream by each source, [source, S, D].
        first_position: first position that any source changes.
        memory: bytes that may be allocated beside the arguments.
    """
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
        for number, kind in enumerate(KINDS):
            # Of q, k and v one is changed, the other two are those of the clean run.
            qkv = [part.expand(len(block), *part.shape[1:]) for part in clean_qkv]
            qkv[number] = changed_qkv[number]
            inserted = dict(zip(KINDS, qkv, strict=True))
            z = attended(network, layer, inserted, stream.expand(len(block), -1, -1), history)
            difference = z - clean.z[layer]
            # The first query attends to its own key alone, so a changed q or k leaves its output as it is.
            first_changed = max(first_position, _first_changed_position(difference))
            difference = difference[:, :, downstream.start(layer, first_changed) :]
            sources = block.repeat_interleave(layout.num_heads)
            columns = torch.arange(len(layout.destinations))[layout.inputs(layer, kind)].repeat(len(block))
            for rows in torch.arange(len(sources)).split(downstream.most_rows(first_changed)):
                # Rows are ordered source by source, each with all heads of the layer.
                heads = rows % layout.num_heads
                added = torch.bmm(difference.flatten(0, 1)[rows], weights[heads])
                yield sources[rows], columns[rows], downstream.after_heads(layer, added)


def _edges_into_mlp(
    downstream: _Downstream, layer: int, change: Tensor, first_position: int
) -> Iterator[EdgeLogits]:
    """Change each edge into a layer's MLP; `first_position` is the first position that any source changes."""
    layout, start = downstream.layout, downstream.start(layer, first_position)
    stream = downstream.clean.streams.mlps[layer][:, start:]
    clean_output = downstream.network.fed(layer, stream, NO_TAPS)
    for rows in torch.arange(layout.read_by_mlp(layer)).split(downstream.most_rows(first_position)):
        changed = stream + change[rows, start:]
        added = downstream.network.fed(layer, changed, NO_TAPS) - clean_output
        column = torch.full_like(rows, layout.mlp_input(layer))
        yield rows, column, downstream.after_layer(layer, added)


class _Downstream:
    """Computes the logits after a change of the clean residual stream at its last S' positions."""

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: EdgeSources, want: Logits, memory: int
    ) -> None:
        self.network, self.layout, self.clean = network, layout, clean
        self._want, self._memory, self._length = want, memory, clean.added.shape[2]
        self._histories: dict[int, _Suffixes] = {}

    def start(self, layer: int, first_position: int) -> int:
        """First position at which the output of a layer is needed.

        Arguments:
            layer: layer index.
            first_position: first position at which the output differs from the clean run.
        """
        # In the last layer nothing mixes positions any more, and only the last one is read.
        return self._length - 1 if layer == self.layout.num_layers - 1 else first_position

    def most_rows(self, first_position: int) -> int:
        """Most rows per computation, for rows that equal the clean run before `first_position`."""
        return most_rows(self.network, self._length - first_position, self._want, self._memory)

    def after_heads(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token] after a change of the output of a layer's heads.

        Arguments:
            layer: layer index.
            added: the change, [row, S', D].
        """
        if self.layout.parallel[layer]:
            return self.after_layer(layer, added)
        stream = self.clean.streams.mlps[layer][:, -added.shape[1] :] + added
        return self._logits_from(layer, stream + self.network.fed(layer, stream, NO_TAPS))

    def after_layer(self, layer: int, added: Tensor) -> Tensor:
        """Logits [row, token] after a change of the residual stream that leaves a layer.

        Arguments:
            layer: layer index.
            added: the change, [row, S', D].
        """
        after = [*self.clean.streams.heads[1:], self.clean.streams.logits][layer]
        return self._logits_from(layer, after[:, -added.shape[1] :] + added)

    def _logits_from(self, layer: int, stream: Tensor) -> Tensor:
        """Run the layers after `layer` on the stream [row, S', D] that leaves it."""
        last, first_position = self.layout.num_layers - 1, self._length - stream.shape[1]
        # Rope tables and expanded keys depend on the first position only, and many blocks share it.
        if first_position not in self._histories:
            keys, device = self.clean.keys, stream.device
            self._histories[first_position] = _Suffixes(self._length, first_position, keys, last, device)
        later, history = range(layer + 1, last + 1), self._histories[first_position]
        return self.read(run_to_end(self.network, {STREAM: stream}, later, history, NO_TAPS, layer))

    def read(self, stream: Tensor) -> Tensor:
        """Apply final norm and LM head to the final stream [row, 1, D]; returns logits [row, token]."""
        return self.network.unembed(self.network.final_norm(stream[:, -1]), self._want)


class _Suffixes(WholePrompts):
    """Positions and attention of the last positions of many rows, which share one prompt's earlier keys.

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
        """The computed positions, int [S']: from the first changed position to the end."""
        return torch.arange(self._first, self._length, device=self._device)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The carried tensors unchanged."""
        self._is_last = layer == self._last
        return carried

    def needed(self, x: Tensor) -> Tensor:
        """x unchanged; in the last layer its last position."""
        return x[..., -1:, :] if self._is_last else x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE tables (cos, sin) of the computed positions, [S', half head]."""
        cos, sin = super().rotation(rope, dtype)
        return cos[self._first :], sin[self._first :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention of queries to the clean keys of earlier positions and their own keys; returns z."""
        if self._first:
            # Positions before the first difference are those of the clean run, whatever the edge.
            before = (part[:, :, : self._first].expand(len(k), -1, -1, -1) for part in self._keys[layer])
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        queries, keys = q.shape[2], k.shape[2]
        # Fused kernels have a causal flag for square attention; any other shape needs a mask.
        is_plain = queries == keys and (mixer.window is None or mixer.window >= keys)
        mask = None
        if not is_plain:
            mask = causal(keys, mixer.window, q.device, newest=queries, is_chunked=mixer.is_chunked)
        return attend(q, k, v, mask, mixer, layer, NO_TAPS)


def _first_changed_position(change: Tensor) -> int:
    """First position with a nonzero change in [..., S, D]; the last position if all changes are zero."""
    positions = change.ne(0).any(-1).flatten(0, -2).any(0).nonzero()
    return int(positions[0]) if len(positions) else change.shape[-2] - 1


def alone_at(change: Tensor, position: int | None) -> Tensor:
    """Restrict changes to one position: they become zero at all others.

    Arguments:
        change: changes of all sources, [source, S, D].
        position: the position to keep; None returns `change` itself.
    """
    if position is None:
        return change
    alone = torch.zeros_like(change)
    alone[:, position] = change[:, position]
    return alone


def most_rows(network: SplitNetwork, positions: int, want: Logits, memory: int) -> int:
    """Number of rows to compute at a time: what fits into half of the memory and speeds up matrix products.

    Arguments:
        network: the network.
        positions: number of positions that are computed in each row.
        want: logits that are computed of each row.
        memory: bytes that may be allocated beside the arguments.
    """
    itemsize = network.dtype.itemsize
    logits = network.config.vocab_size if want.tokens is None else len(want.tokens)
    row_bytes = network.config.bytes_per_token(itemsize) * positions + 4 * itemsize * logits
    # The other half of the memory holds changed streams and projections of the block.
    return max(1, min(MOST_TOKENS // positions, memory // 2 // row_bytes))
