"""One layer's attention or MLP by itself, applied to streams that the caller passes.

The layer is the model's own (`Network.layer`): taps insert what a part reads, record what it computes, and
end the layer there. So norms, rope, biases and windows of every family are the same here as in a pass.

Axes: [row, position, hidden]; a row is a prompt in one of the compared states. Heads: [row, head, position,
…].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..hooks.taps import EarlyStop, Place, StateTaps, Taps
from ..networks.history import STREAM, History
from ..networks.loop import Network

__all__ = [
    "NO_TAPS",
    "PartTaps",
    "SplitNetwork",
    "attended",
    "output_by_head",
    "output_constant",
    "projected",
]


class SplitNetwork(Network, Protocol):
    """A network whose layers are attention and an MLP that add to one stream (see `Layout.of`)."""

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """Output of a layer's MLP, [row, position, hidden], for the stream that it reads.

        Arguments:
            layer: layer index.
            x: stream that the MLP reads, before its norm, [row, position, hidden].
            taps: hook points of the pass.
        """
        ...


class PartTaps:
    """Callbacks of a pass that insert tensors at some hook points and record tensors at others."""

    def __init__(
        self,
        inserted: Mapping[Place, Tensor] | None = None,
        wanted: Collection[Place] = (),
        *,
        ends: bool = False,
    ) -> None:
        """Prepare a pass.

        Arguments:
            inserted: (kind, layer) -> value to continue with there.
            wanted: hook points to record.
            ends: whether to raise EarlyStop once all of them are recorded.
        """
        self._inserted, self._wanted, self._ends = inserted or {}, frozenset(wanted), ends
        self.recorded: dict[Place, Tensor] = {}
        """Values at the wanted hook points, with insertions."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the value to continue with: the inserted tensor, or x; record it where wanted."""
        place = (kind, layer)
        x = self._inserted.get(place, x)
        if place in self._wanted:
            self.recorded[place] = x
            if self._ends and len(self.recorded) == len(self._wanted):
                raise EarlyStop
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Always False: nothing that is computed only for captures is recorded."""
        return False

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether a tensor is inserted at one of these hook points."""
        return any((kind, layer) in self._inserted for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether a tensor is inserted at one of these hook points."""
        return self.changes(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """Always False: scores and patterns are not changed."""
        return False

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Mask of cut attention edges: always None, as no edge is cut.

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the mask.
        """
        return None

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Callbacks for recurrent states: always None, as these layers have none.

        Arguments:
            layer: layer of the recurrence.
            kind: hook point kind of its state sequence.
            length: positions of the prompt.
        """
        return None


NO_TAPS = PartTaps()


def projected(
    network: SplitNetwork, layer: int, stream: Tensor, history: History
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the queries, keys and values that a layer's heads project from a stream, before RoPE.

    Arguments:
        network: the network.
        layer: layer index.
        stream: stream that the heads read, [row, position, hidden].
        history: positions of the rows.

    Returns:
        q [row, head, position, d_head]; k and v [row, kv_head, position, d_head].
    """
    q, k, v = _record(network, layer, stream, history, {}, ("q", "k", "v"))
    return q, k, v


def attended(
    network: SplitNetwork, layer: int, inserted: Mapping[str, Tensor], stream: Tensor, history: History
) -> Tensor:
    """Run a layer's attention on given inputs; returns the output z of each head.

    Arguments:
        network: the network.
        layer: layer index.
        inserted: "q", "k", "v" as `projected` returns them (keys and values may also have a row per query
            head); or "q_input", "k_input", "v_input", the stream that each head reads for them [row, head,
            position, hidden].
        stream: any stream with as many rows; irrelevant where all three are inserted.
        history: positions of the rows.

    Returns:
        z [row, head, position, d_head].
    """
    (z,) = _record(network, layer, stream, history, inserted, ("z",))
    return z


def output_by_head(network: SplitNetwork, layer: int, heads: int) -> Tensor:
    """Matrix of each head that maps its output z to the residual stream, [head, d_head, hidden].

    Arguments:
        network: the network.
        layer: layer index.
        heads: number of query heads.
    """
    by_head: Tensor = network.output_matrix(layer).unflatten(1, (heads, -1))
    return by_head.permute(1, 2, 0)


def output_constant(network: SplitNetwork, layer: int, z: Tensor, history: History) -> Tensor:
    """What attention adds to the stream if all z are 0, [hidden]: the bias of the output, or zeros.

    Arguments:
        network: the network.
        layer: layer index.
        z: any z of this layer, for its shape.
        history: positions of a row.
    """
    stream = z.new_zeros(1, z.shape[2], network.config.hidden_size)
    # With z = 0 only the bias is left, whatever the family does after the output projection.
    (output,) = _record(network, layer, stream, history, {"z": torch.zeros_like(z[:1])}, ("attn_out",))
    return output[0, 0]


def _record(
    network: SplitNetwork,
    layer: int,
    stream: Tensor,
    history: History,
    inserted: Mapping[str, Tensor],
    wanted: Collection[str],
) -> list[Tensor]:
    """Run one layer with tensors inserted at some hook points, and return the values at others."""
    taps = PartTaps(
        {(kind, layer): x for kind, x in inserted.items()}, [(kind, layer) for kind in wanted], ends=True
    )
    try:
        # The model's own layer, so that norms, rope, biases and windows are those of a pass.
        network.layer(layer, {STREAM: stream}, history, taps)
    except EarlyStop:
        return [taps.recorded[kind, layer] for kind in wanted]
    raise AssertionError(f"expected layer {layer} to reach {', '.join(wanted)}, found that it ended before")
