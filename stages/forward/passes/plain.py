"""A plain pass: every position of a batch of prompts of one length, for token ids and taps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.layer_summaries import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.taps import EarlyStop, PassTaps
from ..hooks.wants import Logits
from ..networks.attention import attend, tiled_attention, window_mask
from ..networks.gradients import is_recorded
from ..networks.history import STREAM, Carried, share_of
from ..networks.loop import Network, final_state, run_layers, run_to_end
from ..networks.pairs import TARGET, attend_sides, starts_of
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
    """Run prompts of one length through a network.

    Arguments:
        network: the network.
        ids: token ids, int [B, S].
        taps: called at every hook point; with ``stop_early`` they end the pass after the last capture.
        want: which logits to compute; None for none.
        order: layers in execution order; None for each layer once.

    Returns:
        Logits [B, positions, tokens]; None where none are wanted or the taps ended the pass.
    """
    history = WholePrompts(ids.shape[1], taps, ids.device, starts_of(ids, network.config))
    try:
        # The whole pass in one place; other passes go `through_layers` with a history of their own.
        layers = range(network.config.num_layers) if order is None else order
        carried = network.embed(ids, history.positions, history.shares, history.starts)
        carried = run_layers(network, carried, layers, history, taps)
        x = network.finish(final_state(network, carried, layers[-1], history, taps), taps, want)
        return None if want is None else network.unembed(x, want)
    except EarlyStop:
        return None


def forward_part(
    network: Network, entering: Tensor | Carried, layers: Sequence[int], taps: PassTaps, *, ends: bool
) -> Carried:
    """Run prompts through some consecutive layers, so that another call can continue with the next layers.

    Arguments:
        network: the network.
        entering: token ids [B, S], or the output of the previous call.
        layers: consecutive layers; empty to run only the final norm on the output of the last layer.
        taps: called at every hook point of these layers; the taps of the next call are called with the
            output of the last one.
        ends: whether no call follows; the final norm is then computed after the last layer of the model.

    Returns:
        Output of the last of these layers, by name; empty where `ends` is set.
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
    # The layer whose output enters here: its `resid_post` taps were left to this call.
    previous = layers[0] - 1 if layers and layers[0] else None
    if not ends:
        return run_layers(network, carried, layers, history, taps, previous)
    last = network.config.num_layers - 1
    try:
        # Without layers, the input comes from the last one: its taps and the final norm are left.
        x = run_to_end(network, carried, layers, history, taps, previous if layers else last)
        if not layers or layers[-1] == last:
            network.finish(x, taps, None)
    except EarlyStop:
        pass
    return {}


def _starts_in(carried: Carried) -> Tensor | None:
    """Position at which the target begins in each prompt of an encoder-decoder, [B, 1]; None otherwise."""
    return (carried[TARGET] < 0.5).sum(1) if TARGET in carried else None


class WholePrompts:
    """Positions and attention of a pass over whole prompts of one length.

    Tokens attend to earlier tokens of their prompt, or to all of them in a model without causal mask.
    """

    def __init__(
        self, length: int, taps: PassTaps, device: torch.device, starts: Tensor | None = None
    ) -> None:
        """Prepare a pass.

        Arguments:
            length: positions of the prompts.
            taps: hook points of the pass.
            device: device of its tensors.
            starts: positions at which targets begin, [B, 1], in an encoder-decoder; None otherwise.
        """
        self.starts = starts
        self._length, self._taps, self._device = length, taps, device
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self._sides: dict[str, Tensor] = {}
        """Attention masks of an encoder-decoder by `AttentionMixer.part`."""
        self._masks: dict[tuple[int | None, bool, bool], Tensor | None] = {}
        """Attention masks, bool [query, key], True where attention may look, by (window, is bidirectional, is
        chunked); None for a plain causal mask."""

    @property
    def positions(self) -> Tensor:
        """Positions of all tokens, 0 to length - 1."""
        return torch.arange(self._length, device=self._device)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """Share of a token id among the tokens of each prompt."""
        return share_of(token, ids)

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The tensors that enter a layer, unchanged: every layer computes the same tokens."""
        return carried

    def needed(self, x: Tensor) -> Tensor:
        """x unchanged: the next layer needs every token."""
        return x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE tables (cos, sin) of all positions, [position, half head]."""
        if rope not in self._rotations:
            # Layers share a few rope configurations (local and global attention), so tables are cached by
            # configuration.
            self._rotations[rope] = rope_tables(rope, self._length, self._device, dtype)
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention of the prompts, returning z [B, H, S, dh]; in tiles on the CPU, else with torch's kernel.

        Arguments:
            layer: layer index.
            q: queries after RoPE, [B, H, S, dh].
            k: keys after RoPE, [B, Hk, S, dh].
            v: values, [B, Hk, S, dh].
            mixer: parameters of the layer's attention.
        """
        is_float64 = q.dtype == torch.float64
        # Tiles are for causal masks and inference: they record no gradient. In float64 the reference rounds
        # its softmax otherwise, and other devices have faster kernels of their own.
        plain = mixer.is_bidirectional or is_float64 or is_recorded(q, k, v) or q.device.type != "cpu"
        weigh = None if plain else tiled_attention
        if mixer.part is not None:
            return attend_sides(layer, q, k, v, mixer, self, self._taps, self._sides)
        return attend(q, k, v, self._mask(mixer), mixer, layer, self._taps, weigh, self.positions)

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """The `count` rows before each token, [B, S, count, width]; zeros before the first token.

        Arguments:
            layer: layer index.
            name: name of the rows in the layer.
            x: rows of all tokens, [B, S, width].
            count: number of rows before each token.
        """
        return windows(F.pad(x, (0, 0, count, 0)), count)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """Run a recurrence over the prompts from a state of zero; returns what tokens read, [B, H, S, V].

        Arguments:
            layer: layer index.
            recurrence: the recurrence of the layer.
            tokens: inputs of the recurrence by name, each [B, H, S, width].
            room: prefix of its hook point kinds, e.g. "rwkv".
        """
        states = self._taps.of_states(layer, f"{room}_state_seq", self._length)
        read, state = through_sequence(recurrence, tokens, None, states)
        show_derived(layer, recurrence, tokens, state, room, self._taps)
        return read

    def _mask(self, mixer: AttentionMixer) -> Tensor | None:
        """Attention mask, bool [query, key], cached by kind of layer; None for a plain causal mask."""
        kind = mixer.window, mixer.is_bidirectional, mixer.is_chunked
        if kind not in self._masks:
            self._masks[kind] = window_mask(self._length, mixer, self._device)
        return self._masks[kind]
