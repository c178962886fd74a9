"""Parts: one layer's attention or MLP by itself, over streams that are given to it.

The layer is the model's own (`Network.layer`); taps put in what a part is to read, take out what it gives,
and end the layer there. So whatever a family does with norms, rope, biases or windows is done here as well.

Border: tensors and taps; which streams are given, others decide.

Axes: [row, position, hidden]; a row is a prompt in one of the states compared. Heads: [row, head, position,
…].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..hooks.taps import EverythingHeld, Place, StateTaps, Taps
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
    """A network whose layers are an attention and an MLP that add to one stream (`Layout.of` says which)."""

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """What the MLP of a layer adds [row, position, hidden], of the stream that it reads."""
        ...


class PartTaps:
    """Taps that put tensors in at some places and take them out at others (`PassTaps`).

    ends: raise EverythingHeld once all that is wanted was met.
    """

    def __init__(
        self,
        given: Mapping[Place, Tensor] | None = None,
        wanted: Collection[Place] = (),
        *,
        ends: bool = False,
    ) -> None:
        self._given, self._wanted, self._ends = given or {}, frozenset(wanted), ends
        self.found: dict[Place, Tensor] = {}
        """What stood at the places wanted, behind what was put in."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `Taps`."""
        place = (kind, layer)
        x = self._given.get(place, x)
        if place in self._wanted:
            self.found[place] = x
            if self._ends and len(self.found) == len(self._wanted):
                raise EverythingHeld
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """See `Taps`: nothing that is worked out for who asks."""
        return False

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """See `Taps`."""
        return any((kind, layer) in self._given for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """See `Taps`."""
        return self.changes(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """See `AttentionTaps`: never."""
        return False

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """See `AttentionTaps`: no edge between positions is."""
        return None

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """See `PassTaps`: there are no states."""
        return None


NO_TAPS = PartTaps()


def projected(
    network: SplitNetwork, layer: int, stream: Tensor, history: History
) -> tuple[Tensor, Tensor, Tensor]:
    """q [row, head, position, d_head], k and v [row, kv_head, position, d_head] that a layer makes of a
    stream, before rope."""
    q, k, v = _met(network, layer, stream, history, {}, ("q", "k", "v"))
    return q, k, v


def attended(
    network: SplitNetwork, layer: int, given: Mapping[str, Tensor], stream: Tensor, history: History
) -> Tensor:
    """z [row, head, position, d_head], of what is put in: "q", "k", "v" as `projected` gives them (keys and
    values also of each head its own), or "q_input", "k_input", "v_input", the stream that each head reads for
    them [row, head, position, hidden].

    stream: any, of as many rows: nothing of it is left where all three are put in.
    """
    (z,) = _met(network, layer, stream, history, given, ("z",))
    return z


def output_by_head(network: SplitNetwork, layer: int, heads: int) -> Tensor:
    """What a head's z is multiplied by where it is added to the stream, [head, d_head, hidden]."""
    by_head: Tensor = network.output_matrix(layer).unflatten(1, (heads, -1))
    return by_head.permute(1, 2, 0)


def output_constant(network: SplitNetwork, layer: int, z: Tensor, history: History) -> Tensor:
    """What attention adds to the stream whatever its heads read, [hidden]: the bias of its output, or zeros.

    z: of any one row.
    """
    stream = z.new_zeros(1, z.shape[2], network.config.hidden_size)
    (made,) = _met(network, layer, stream, history, {"z": torch.zeros_like(z[:1])}, ("attn_out",))
    return made[0, 0]


def _met(
    network: SplitNetwork,
    layer: int,
    stream: Tensor,
    history: History,
    given: Mapping[str, Tensor],
    wanted: Collection[str],
) -> list[Tensor]:
    """What stands at some hook points of a layer, with others put in."""
    taps = PartTaps(
        {(kind, layer): x for kind, x in given.items()}, [(kind, layer) for kind in wanted], ends=True
    )
    try:
        network.layer(layer, {STREAM: stream}, history, taps)
    except EverythingHeld:
        return [taps.found[kind, layer] for kind in wanted]
    raise AssertionError(f"layer {layer} met none of {', '.join(wanted)}")
