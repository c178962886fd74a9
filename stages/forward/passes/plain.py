"""A plain pass: every position of a batch of prompts of one length.

Border: token ids, taps and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.architecture import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.taps import EverythingHeld, PassTaps
from ..hooks.wants import Logits
from ..networks.attention import attend, in_tiles, visible
from ..networks.gradients import is_recorded
from ..networks.history import STREAM, Carried, share_of
from ..networks.loop import Network, onwards, part_way, through_layers
from ..networks.pairs.network import TARGET
from ..networks.pairs.parts import CrossTaps, seen_of, starts_of
from ..networks.recurrences.recurrence import Recurrence
from ..networks.rope import rope_tables
from .states import show_derived, through_sequence, windows

__all__ = ["WholePrompts", "forward", "forward_part"]


def forward(
    network: Network,
    ids: Tensor,
    taps: PassTaps,
    want: Logits | None,
    order: Sequence[int] | None = None,
) -> Tensor | None:
    """ids: int [B, S]. order: see `through_layers`. Returns the logits wanted, [B, positions, tokens], or
    None if none are.

    Taps made with ``stop_early`` end the pass at the last wanted hook point.
    """
    history = WholePrompts(ids.shape[1], taps, ids.device, starts_of(ids, network.config))
    try:
        x = through_layers(network, ids, history, taps, order)
        x = network.finish(x, taps, want)
        return None if want is None else network.unembed(x, want)
    except EverythingHeld:
        return None


def forward_part(
    network: Network, entering: Tensor | Carried, layers: Sequence[int], taps: PassTaps, *, ends: bool
) -> Carried:
    """A pass through some layers, in order, that another one goes on from; empty where it ends here.

    entering: token ids [B, S], or what came out of the layer before these. What is carried is shown to the
    taps by the pass that goes on from it. ends: go to the end of what is wanted, past the final norm; without
    layers, from what came out of the last of all.
    """
    first = entering if isinstance(entering, Tensor) else entering[STREAM]
    if isinstance(entering, Tensor):
        starts = starts_of(entering, network.config)
    else:
        starts = _starts_in(entering)
    history = WholePrompts(first.shape[1], taps, first.device, starts)
    if isinstance(entering, Tensor):
        carried = network.embed(entering, history.positions, history.shares, history.starts)
    else:
        carried = entering
    left = layers[0] - 1 if layers and layers[0] else None
    if not ends:
        return part_way(network, carried, layers, history, taps, left)
    last = network.config.num_layers - 1
    try:
        x = onwards(network, carried, layers, history, taps, left if layers else last)
        if not layers or layers[-1] == last:
            network.finish(x, taps, None)
    except EverythingHeld:
        pass
    return {}


def _starts_in(carried: Carried) -> Tensor | None:
    """Where targets begin, of what a layer gave, [B, 1]."""
    return (carried[TARGET] < 0.5).sum(1) if TARGET in carried else None


class WholePrompts:
    """The history of a plain pass (`History`): each token sees those before it in its prompt, or all."""

    def __init__(
        self, length: int, taps: PassTaps, device: torch.device, starts: Tensor | None = None
    ) -> None:
        """starts: where targets begin, [B, 1], where prompts are pairs."""
        self.starts = starts
        self._length, self._taps, self._device = length, taps, device
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, bool, bool], Tensor | None] = {}
        """Bool [query, key], True where attention may look, by window, whether it looks ahead, and whether
        windows are chunks."""

    @property
    def positions(self) -> Tensor:
        """Where its tokens stand: every position of the prompt, in order."""
        return torch.arange(self._length, device=self._device)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """See `History`."""
        return share_of(token, ids)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """As it is: the same tokens in every layer."""
        return carried

    def kept(self, x: Tensor) -> Tensor:
        """All that came: every token goes on to the next layer."""
        return x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `History`."""
        if rope not in self._rotations:
            self._rotations[rope] = rope_tables(rope, self._length, self._device, dtype)
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """See `History`; in tiles, but for what looks ahead, gradients, float64, whose softmax is rounded as
        the reference rounds it, and other devices, which have kernels of their own."""
        is_float64 = q.dtype == torch.float64
        plain = how.is_bidirectional or is_float64 or is_recorded(q, k, v) or q.device.type != "cpu"
        weigh = None if plain else in_tiles
        if how.part is not None:
            taps = CrossTaps(self._taps) if how.part == "cross" else self._taps
            starts = None if self.starts is None else self.starts[:, :, None, None]
            seen = seen_of(how.part, self.positions[:, None], self.positions, starts)
            return attend(q, k, v, seen, how, layer, taps, None, self.positions)
        return attend(q, k, v, self._mask(how), how, layer, self._taps, weigh, self.positions)

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """See `History`."""
        return windows(F.pad(x, (0, 0, count, 0)), count)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """See `History`; states begin at zero."""
        states = self._taps.of_states(layer, f"{room}_state_seq", self._length)
        read, state = through_sequence(recurrence, tokens, None, states)
        show_derived(layer, recurrence, tokens, state, room, self._taps)
        return read

    def _mask(self, how: AttentionMixer) -> Tensor | None:
        """See `visible`."""
        kind = how.window, how.is_bidirectional, how.is_chunked
        if kind not in self._masks:
            self._masks[kind] = visible(self._length, how, self._device)
        return self._masks[kind]
