"""Paths: what some sources say to some destinations, and to nobody else (path patching).

Three passes over a prompt (Wang et al., Interpretability in the Wild, 2023, section 3.1 and appendix B;
Goldowsky-Dill et al., Localizing Model Behavior with Path Patching, 2023):

1. the other run, and the clean one: what every source adds in both;
2. the clean run, senders put to what they add in the other one, every other head held at what it adds in the
   clean one, MLPs and norms computed anew - or MLPs held too: what the receivers make of that is kept;
3. the clean run, in which receivers are what was kept, and all else behind them is computed anew.

So a change goes from senders to receivers through the stream and, unless they are held, MLPs, never through
another head. A receiver is the queries, keys or values of one head, an MLP, or the logits; these end the
path, and are read off pass 2. With MLPs held, one sender and one receiver this is the edge between them by
itself (effects.py).

The change that a sender makes is the other run's (`Senders`), or any that is given (`Changes`): random ones
as long, for a null.

Border: one prompt; what stands for a source is given.

Axes: S positions, D hidden, source, destination; row = senders and what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..hooks.taps import Place
from ..hooks.wants import Logits
from ..networks.history import STREAM
from ..networks.loop import onwards
from ..passes.plain import WholePrompts
from .effects import most_rows
from .layout import KINDS, Layout
from .parts import NO_TAPS, PartTaps, SplitNetwork, projected
from .prompts import EdgeSources

__all__ = ["Changes", "Senders", "Sent", "patched_paths"]


class Sent(Protocol):
    """What rows of senders say beyond what they say in the clean run."""

    @property
    def first(self) -> int:
        """The first source that any row changes."""
        ...

    def of(self, sources: slice) -> Tensor:
        """Summed over some sources, [row, S, D]."""
        ...

    def is_sender(self, source: int) -> Tensor:
        """In which rows a source is changed, bool [row]."""
        ...

    def split(self, most: int) -> Iterator[Self]:
        """The same in blocks of at most so many rows, in their order."""
        ...

    def last(self) -> Self:
        """The same of the last position alone."""
        ...


@dataclass(frozen=True)
class Senders:
    """Sets of senders, each put to what it adds in the other run.

    change: what each source adds there, less what it adds here, [source, S, D]. chosen: bool [row, source].
    """

    change: Tensor
    chosen: Tensor

    @property
    def first(self) -> int:
        """See `Sent`."""
        return int(self.chosen.any(0).nonzero()[0])

    def of(self, sources: slice) -> Tensor:
        """See `Sent`."""
        weights = self.chosen[:, sources].to(self.change)
        found: Tensor = torch.tensordot(weights, self.change[sources], dims=1)
        return found

    def is_sender(self, source: int) -> Tensor:
        """See `Sent`."""
        return self.chosen[:, source].to(self.change.device)

    def split(self, most: int) -> Iterator[Self]:
        """See `Sent`."""
        return (type(self)(self.change, rows) for rows in self.chosen.split(most))

    def last(self) -> Self:
        """See `Sent`."""
        return type(self)(self.change[:, -1:], self.chosen)


@dataclass(frozen=True)
class Changes:
    """One sender, put to several changes of what it adds in the clean run, [row, S, D]."""

    source: int
    change: Tensor

    @property
    def first(self) -> int:
        """See `Sent`."""
        return self.source

    def of(self, sources: slice) -> Tensor:
        """See `Sent`."""
        return self.change if sources.start <= self.source < sources.stop else torch.zeros_like(self.change)

    def is_sender(self, source: int) -> Tensor:
        """See `Sent`."""
        return torch.full((len(self.change),), source == self.source, device=self.change.device)

    def split(self, most: int) -> Iterator[Self]:
        """See `Sent`."""
        return (type(self)(self.source, rows) for rows in self.change.split(most))

    def last(self) -> Self:
        """See `Sent`."""
        return type(self)(self.source, self.change[:, -1:])


def patched_paths(
    network: SplitNetwork,
    layout: Layout,
    clean: EdgeSources,
    sent: Sent,
    receivers: Sequence[int],
    want: Logits,
    *,
    mlps_held: bool = False,
    memory: int,
) -> Tensor:
    """Logits at the last position of a prompt, [row, token], of paths from each row of senders.

    clean: of one prompt (B = 1). receivers: destinations; the logits by themselves, or any of the others.
    memory: bytes that may be taken beside what is given.
    """
    most = most_rows(network, clean.added.shape[2], want, memory)
    passes = (_Second(network, layout, clean, rows, mlps_held) for rows in sent.split(most))
    if receivers[0] == len(layout.destinations) - 1:
        return torch.cat([network.unembed(network.final_norm(each.final()), want) for each in passes])
    first = min(map(layout.layer_of, receivers))
    return torch.cat([_third(network, layout, clean, each.kept(receivers), first, want) for each in passes])


Kept = dict[Place, tuple[list[int], Tensor]]
"""Of a place, which heads (none of an MLP) have been kept, and what they are [row, head, S, d_head]."""


class _Second:
    """The pass in which senders are changed and other heads held, as what the stream differs by."""

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: EdgeSources, sent: Sent, mlps_held: bool
    ) -> None:
        self._network, self._layout, self._clean, self._mlps_held = network, layout, clean, mlps_held
        self._sent = sent

    def final(self) -> Tensor:
        """What the final norm reads at the last position, [row, D]. Nothing but heads sees other positions,
        and all of them are held: the last one goes by itself."""
        self._sent = self._sent.last()
        moved = self._sent.of(slice(0, 1))
        for layer in range(self._layout.num_layers):
            moved = self._behind(layer, moved)
        return self._clean.streams.logits[:, -1] + moved[:, -1]

    def kept(self, receivers: Sequence[int]) -> Kept:
        """What receivers make of the stream they read in this pass."""
        layout, moved, found = self._layout, self._sent.of(slice(0, 1)), Kept()
        history = WholePrompts(moved.shape[1], NO_TAPS, moved.device)
        for layer in range(max(map(layout.layer_of, receivers)) + 1):
            inputs = {kind: layout.inputs(layer, kind) for kind in KINDS}
            heads = {
                kind: [each - place.start for each in receivers if place.start <= each < place.stop]
                for kind, place in inputs.items()
            }
            if any(heads.values()):
                stream = self._clean.streams.heads[layer] + moved
                made = projected(self._network, layer, stream, history)
                for kind, x in zip(KINDS, made, strict=True):
                    if heads[kind]:
                        found[kind, layer] = heads[kind], _for_each_head(x, layout)[:, heads[kind]]
            if layout.mlp_input(layer) in receivers:
                found["mlp_out", layer] = [], self._fed(layer, moved)
            moved = self._behind(layer, moved)
        return found

    def _behind(self, layer: int, moved: Tensor) -> Tensor:
        """What the stream differs by behind a layer, of what it differs by before it, [row, S, D]."""
        mlp = self._layout.mlp(layer)
        if mlp < self._sent.first:
            return moved  # nobody has said anything yet
        behind = moved + self._sent.of(self._layout.heads(layer)) + self._sent.of(slice(mlp, mlp + 1))
        if self._mlps_held:
            return behind
        answer = self._fed(layer, moved) - self._clean.added[:, mlp, -moved.shape[1] :]
        return behind + answer.masked_fill(self._sent.is_sender(mlp)[:, None, None], 0.0)

    def _fed(self, layer: int, moved: Tensor) -> Tensor:
        """What an MLP adds [row, S, D]. moved: by what the stream before its layer differs."""
        if not self._layout.parallel[layer]:
            moved = moved + self._sent.of(self._layout.heads(layer))
        stream = self._clean.streams.mlps[layer][:, -moved.shape[1] :]
        return self._network.fed(layer, stream + moved, NO_TAPS)


class _ReceiverTaps(PartTaps):
    """Puts in what receivers have kept, and leaves other heads what they are in this pass."""

    def __init__(self, layout: Layout, kept: Kept) -> None:
        super().__init__({place: x for place, (heads, x) in kept.items() if not heads})
        self._layout = layout
        self._heads = {place: kept[place] for place in kept if kept[place][0]}
        self._apart = {layer for _, layer in self._heads}

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `Taps`. Where one head of several that share keys or values receives, each gets its own."""
        if kind in KINDS and layer in self._apart:
            x = _for_each_head(x, self._layout)
            if (kind, layer) in self._heads:
                heads, values = self._heads[kind, layer]
                x = x.clone()
                x[:, heads] = values
        return super().__call__(kind, layer, x, allowed)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """See `Taps`."""
        return any((kind, layer) in self._heads for kind in kinds) or super().changes(layer, *kinds)


def _third(
    network: SplitNetwork, layout: Layout, clean: EdgeSources, kept: Kept, first: int, want: Logits
) -> Tensor:
    """Logits [row, token] where receivers are what was kept; first: the first layer of one."""
    rows = len(next(iter(kept.values()))[1])
    taps = _ReceiverTaps(layout, kept)
    stream = clean.streams.heads[first].expand(rows, -1, -1)
    history = WholePrompts(stream.shape[1], taps, stream.device)
    layers = range(first, layout.num_layers)
    final = onwards(network, {STREAM: stream}, layers, history, taps, first - 1 if first else None)
    return network.unembed(network.final_norm(final[:, -1]), want)


def _for_each_head(x: Tensor, layout: Layout) -> Tensor:
    """Keys or values [row, kv_head, S, d_head] for each head that reads them, [row, head, S, d_head]."""
    return x.repeat_interleave(layout.num_heads // x.shape[1], dim=1)
