"""Path patching: the effect of some sources on some destinations, along no other paths.

Three passes over a prompt (Wang et al., Interpretability in the Wild, 2023, section 3.1 and appendix B;
Goldowsky-Dill et al., Localizing Model Behavior with Path Patching, 2023):

1. the corrupted and the clean run: what every source adds to the stream in both;
2. the clean run with senders set to what they add in the corrupted one, every other head frozen at its clean
   output, and MLPs and norms recomputed (or MLPs frozen as well): the inputs that receivers get are recorded;
3. the clean run with receivers set to the recorded inputs, and everything after them recomputed.

So a change travels from senders to receivers through the stream and, unless they are frozen, MLPs, but never
through another head. A receiver is the queries, keys or values of one head, an MLP, or the logits; the logits
end the path and are read off pass 2. With frozen MLPs, one sender and one receiver, this is the effect of the
single edge between them (effects.py).

A sender changes to its output in the corrupted run (`Senders`), or to any given output (`Changes`), such as
random ones of the same length for a null distribution. Works on one prompt.

Axes: S positions, D hidden, source, destination; row = a set of senders and their changes.
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
from ..networks.loop import run_to_end
from ..passes.plain import WholePrompts
from .effects import most_rows
from .layout import KINDS, Layout
from .parts import NO_TAPS, PartTaps, SplitNetwork, projected
from .prompts import EdgeSources

__all__ = ["Changes", "Senders", "Sent", "patched_paths"]


class Sent(Protocol):
    """What the senders of path patching add to the residual stream, minus what they add in the clean run.

    Each row is one set of senders and changes, patched by itself.
    """

    @property
    def first_source(self) -> int:
        """Index of the first source (embedding, head or MLP) that any row changes."""
        ...

    def of(self, sources: slice) -> Tensor:
        """Summed change of the residual stream by a range of sources, [row, S, D]."""
        ...

    def is_sender(self, source: int) -> Tensor:
        """Whether each row changes a source, bool [row]."""
        ...

    def split(self, most: int) -> Iterator[Self]:
        """Split the rows into blocks of at most `most` rows, in order."""
        ...

    def last(self) -> Self:
        """The same changes at the last position only, [row, 1, D]."""
        ...


@dataclass(frozen=True)
class Senders:
    """Sets of senders in path patching, each sender changed to its output in the corrupted run."""

    change: Tensor
    """Output of each source in the corrupted run minus its output in the clean run, [source, S, D]."""
    chosen: Tensor
    """Whether each source is a sender in each row, bool [row, source]."""

    @property
    def first_source(self) -> int:
        """Index of the first source that is a sender in any row."""
        return int(self.chosen.any(0).nonzero()[0])

    def of(self, sources: slice) -> Tensor:
        """Summed change of the residual stream by the senders among a range of sources, [row, S, D]."""
        weights = self.chosen[:, sources].to(self.change)
        change: Tensor = torch.tensordot(weights, self.change[sources], dims=1)
        return change

    def is_sender(self, source: int) -> Tensor:
        """Whether a source is a sender in each row, bool [row]."""
        return self.chosen[:, source].to(self.change.device)

    def split(self, most: int) -> Iterator[Self]:
        """Split the rows into blocks of at most `most` rows, in order."""
        return (type(self)(self.change, rows) for rows in self.chosen.split(most))

    def last(self) -> Self:
        """The same senders with their changes at the last position only."""
        return type(self)(self.change[:, -1:], self.chosen)


@dataclass(frozen=True)
class Changes:
    """One sender of path patching with several changes of its output, e.g. random ones for a null."""

    source: int
    """Index of the sender among the sources."""
    change: Tensor
    """Output of the sender in each row minus its output in the clean run, [row, S, D]."""

    @property
    def first_source(self) -> int:
        """Index of the sender among the sources."""
        return self.source

    def of(self, sources: slice) -> Tensor:
        """Change of the residual stream by a range of sources, [row, S, D]; zero without the sender."""
        return self.change if sources.start <= self.source < sources.stop else torch.zeros_like(self.change)

    def is_sender(self, source: int) -> Tensor:
        """Whether a source is the sender, bool [row]; the same for all rows."""
        return torch.full((len(self.change),), source == self.source, device=self.change.device)

    def split(self, most: int) -> Iterator[Self]:
        """Split the rows into blocks of at most `most` rows, in order."""
        return (type(self)(self.source, rows) for rows in self.change.split(most))

    def last(self) -> Self:
        """The same sender with its changes at the last position only."""
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
    """Patch the paths from each set of senders to the receivers, and return the logits at the last position.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        clean: clean run of one prompt (B = 1).
        sent: changes of the senders, one set of senders per row.
        receivers: indices of destinations; either the logits alone, or any others.
        want: tokens whose logits are computed.
        mlps_held: whether MLPs are frozen at their clean output in pass 2.
        memory: bytes that may be allocated beside the arguments.

    Returns:
        Logits [row, token].
    """
    most = most_rows(network, clean.added.shape[2], want, memory)
    passes = (_SenderPass(network, layout, clean, rows, mlps_held) for rows in sent.split(most))
    # The logits end the path: they are read off pass 2, without a pass 3.
    if receivers[0] == len(layout.destinations) - 1:
        return torch.cat(
            [network.unembed(network.final_norm(sender_pass.final()), want) for sender_pass in passes]
        )
    # Below the first receiver, pass 3 equals the clean run.
    first_layer = min(map(layout.layer_of, receivers))
    return torch.cat(
        [
            _receiver_pass(network, layout, clean, sender_pass.receiver_inputs(receivers), first_layer, want)
            for sender_pass in passes
        ]
    )


ReceiverInputs = dict[Place, tuple[list[int], Tensor]]
"""(kind, layer) -> (receiving heads, empty for an MLP; inputs [row, head, S, d_head], or [row, S, D])."""


class _SenderPass:
    """Pass 2 of path patching (see the top of this file): senders changed, other heads frozen.

    It computes differences of the residual stream to the clean run.
    """

    def __init__(
        self, network: SplitNetwork, layout: Layout, clean: EdgeSources, sent: Sent, mlps_held: bool
    ) -> None:
        self._network, self._layout, self._clean, self._mlps_held = network, layout, clean, mlps_held
        self._sent = sent

    def final(self) -> Tensor:
        """Residual stream that enters the final norm at the last position, [row, D]."""
        # Only heads mix positions and all of them are frozen, so the last position can be computed alone.
        self._sent = self._sent.last()
        change = self._sent.of(slice(0, 1))
        for layer in range(self._layout.num_layers):
            change = self._after_layer(layer, change)
        return self._clean.streams.logits[:, -1] + change[:, -1]

    def receiver_inputs(self, receivers: Sequence[int]) -> ReceiverInputs:
        """Queries, keys, values and MLP outputs of the receivers in this pass."""
        layout, change, recorded = self._layout, self._sent.of(slice(0, 1)), ReceiverInputs()
        history = WholePrompts(change.shape[1], NO_TAPS, change.device)
        for layer in range(max(map(layout.layer_of, receivers)) + 1):
            inputs = {kind: layout.inputs(layer, kind) for kind in KINDS}
            heads = {
                kind: [
                    receiver - destinations.start
                    for receiver in receivers
                    if destinations.start <= receiver < destinations.stop
                ]
                for kind, destinations in inputs.items()
            }
            if any(heads.values()):
                stream = self._clean.streams.heads[layer] + change
                projections = projected(self._network, layer, stream, history)
                for kind, x in zip(KINDS, projections, strict=True):
                    if heads[kind]:
                        recorded[kind, layer] = heads[kind], _repeat_for_heads(x, layout)[:, heads[kind]]
            if layout.mlp_input(layer) in receivers:
                recorded["mlp_out", layer] = [], self._mlp_output(layer, change)
            change = self._after_layer(layer, change)
        return recorded

    def _after_layer(self, layer: int, change: Tensor) -> Tensor:
        """Difference of the stream to the clean run after a layer, [row, S, D].

        Arguments:
            layer: layer index.
            change: the difference before the layer, [row, S, D].
        """
        mlp = self._layout.mlp(layer)
        # Saves the MLP of every layer below the first sender.
        if mlp < self._sent.first_source:
            return change  # no sender has written yet
        after = change + self._sent.of(self._layout.heads(layer)) + self._sent.of(slice(mlp, mlp + 1))
        if self._mlps_held:
            return after
        response = self._mlp_output(layer, change) - self._clean.added[:, mlp, -change.shape[1] :]
        # A sending MLP adds its given change and does not respond as well.
        return after + response.masked_fill(self._sent.is_sender(mlp)[:, None, None], 0.0)

    def _mlp_output(self, layer: int, change: Tensor) -> Tensor:
        """Output of an MLP, [row, S, D].

        Arguments:
            layer: layer index.
            change: difference of the stream to the clean run before the layer, [row, S, D].
        """
        if not self._layout.parallel[layer]:
            change = change + self._sent.of(self._layout.heads(layer))
        stream = self._clean.streams.mlps[layer][:, -change.shape[1] :]
        return self._network.fed(layer, stream + change, NO_TAPS)


class _ReceiverTaps(PartTaps):
    """Sets receivers to their recorded inputs in pass 3 (`_receiver_pass`); all else is as computed there."""

    def __init__(self, layout: Layout, inputs: ReceiverInputs) -> None:
        super().__init__({place: x for place, (heads, x) in inputs.items() if not heads})
        self._layout = layout
        self._heads = {place: inputs[place] for place in inputs if inputs[place][0]}
        self._per_head_layers = {layer for _, layer in self._heads}

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the value to continue with: the recorded input of a receiver, or x."""
        # Heads of a group share keys and values: where one of them receives, each needs its own.
        if kind in KINDS and layer in self._per_head_layers:
            x = _repeat_for_heads(x, self._layout)
            if (kind, layer) in self._heads:
                heads, values = self._heads[kind, layer]
                x = x.clone()
                x[:, heads] = values
        return super().__call__(kind, layer, x, allowed)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether a receiver is set at one of these hook points."""
        return any((kind, layer) in self._heads for kind in kinds) or super().changes(layer, *kinds)


def _receiver_pass(
    network: SplitNetwork,
    layout: Layout,
    clean: EdgeSources,
    inputs: ReceiverInputs,
    first_layer: int,
    want: Logits,
) -> Tensor:
    """Pass 3 of path patching (see the top of this file): run the clean prompt with the receivers set to the
    inputs that pass 2 recorded, and return logits [row, token] at the last position.

    Arguments:
        network: the network.
        layout: sources and destinations of the model.
        clean: clean run of one prompt.
        inputs: recorded inputs of the receivers.
        first_layer: first layer with a receiver.
        want: tokens whose logits are computed.
    """
    # All receivers have one recorded input per row, so any of them gives the number of rows.
    rows = next(len(values) for _, values in inputs.values())
    taps = _ReceiverTaps(layout, inputs)
    # Layers below the first receiver equal the clean run.
    stream = clean.streams.heads[first_layer].expand(rows, -1, -1)
    history = WholePrompts(stream.shape[1], taps, stream.device)
    final = run_to_end(
        network,
        {STREAM: stream},
        range(first_layer, layout.num_layers),
        history,
        taps,
        previous=first_layer - 1 if first_layer else None,
    )
    return network.unembed(network.final_norm(final[:, -1]), want)


def _repeat_for_heads(x: Tensor, layout: Layout) -> Tensor:
    """Keys or values [row, kv_head, S, d_head], repeated for each query head, [row, head, S, d_head]."""
    return x.repeat_interleave(layout.num_heads // x.shape[1], dim=1)
