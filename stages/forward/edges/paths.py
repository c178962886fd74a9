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

Border: one prompt; what stands for a source is given.

Axes: S positions, D hidden, source, destination; row = a set of senders.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .prompts import Sources

__all__ = ["patched_paths"]


def patched_paths(
    network: SplitNetwork,
    layout: Layout,
    clean: Sources,
    change: Tensor,
    senders: Tensor,
    receivers: Sequence[int],
    want: Logits,
    *,
    mlps_held: bool = False,
    position: int | None = None,
    memory: int,
) -> Tensor:
    """Logits at the last position of a prompt, [row, token], of paths from each set of senders.

    clean: of one prompt (B = 1). change: what each source adds in the other run, less what it adds in this
    one, [source, S, D]. senders: bool [row, source]. receivers: destinations; the logits by themselves, or
    any of the others. position: the only one at which senders are changed; None for all. memory: bytes that
    may be taken beside what is given.
    """
    if position is not None:
        alone = torch.zeros_like(change)
        alone[:, position] = change[:, position]
        change = alone
    most = most_rows(network, change.shape[1], want, memory)
    passes = (_Second(network, layout, clean, change, rows, mlps_held) for rows in senders.split(most))
    if receivers[0] == len(layout.destinations) - 1:
        return torch.cat([network.unembed(network.final_norm(each.final()), want) for each in passes])
    first = min(map(layout.layer_of, receivers))
    return torch.cat([_third(network, layout, clean, each.kept(receivers), first, want) for each in passes])


Kept = dict[Place, tuple[list[int], Tensor]]
"""Of a place, which heads (none of an MLP) have been kept, and what they are [row, head, S, d_head]."""


class _Second:
    """The pass in which senders are changed and other heads held, as what the stream differs by."""

    def __init__(
        self,
        network: SplitNetwork,
        layout: Layout,
        clean: Sources,
        change: Tensor,
        senders: Tensor,
        mlps_held: bool,
    ) -> None:
        self._network, self._layout, self._clean, self._mlps_held = network, layout, clean, mlps_held
        self._change, self._weights = change, senders.to(change)
        self._history = WholePrompts(change.shape[1], NO_TAPS, change.device)

    def final(self) -> Tensor:
        """What the final norm reads at the last position, [row, D]."""
        moved = self._sent(slice(0, 1))
        for layer in range(self._layout.num_layers):
            moved = self._behind(layer, moved)
        return self._clean.streams.logits[:, -1] + moved[:, -1]

    def kept(self, receivers: Sequence[int]) -> Kept:
        """What receivers make of the stream they read in this pass."""
        layout, moved, found = self._layout, self._sent(slice(0, 1)), Kept()
        for layer in range(max(map(layout.layer_of, receivers)) + 1):
            inputs = {kind: layout.inputs(layer, kind) for kind in KINDS}
            heads = {
                kind: [each - place.start for each in receivers if place.start <= each < place.stop]
                for kind, place in inputs.items()
            }
            if any(heads.values()):
                stream = self._clean.streams.heads[layer] + moved
                made = projected(self._network, layer, stream, self._history)
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
        behind = moved + self._sent(self._layout.heads(layer)) + self._sent(slice(mlp, mlp + 1))
        if self._mlps_held:
            return behind
        is_sender = self._weights[:, mlp, None, None] > 0
        answer = self._fed(layer, moved) - self._clean.added[:, mlp]
        return behind + answer.masked_fill(is_sender, 0.0)

    def _fed(self, layer: int, moved: Tensor) -> Tensor:
        """What an MLP adds [row, S, D]. moved: by what the stream before its layer differs."""
        if not self._layout.parallel[layer]:
            moved = moved + self._sent(self._layout.heads(layer))
        return self._network.fed(layer, self._clean.streams.mlps[layer] + moved, NO_TAPS)

    def _sent(self, sources: slice) -> Tensor:
        """What senders among some sources add beyond what they add in the clean run, [row, S, D]."""
        found: Tensor = torch.tensordot(self._weights[:, sources], self._change[sources], dims=1)
        return found


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
    network: SplitNetwork, layout: Layout, clean: Sources, kept: Kept, first: int, want: Logits
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
