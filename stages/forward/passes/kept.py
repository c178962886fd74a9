"""Reading on: a pass over the newest positions of a sequence, with the keys and values of the others kept
from when those were read, or the state they left.

Border: token ids, taps and tensors; which token comes next is decided elsewhere.

Interventions are applied to each position once, when it is new; its keys and values stay what they were
then. Keys are kept as rope has turned them; where a longer sequence turns them otherwise, nothing kept is
true of it, and whoever reads on clears the cache first.

Of the S positions of a sequence so far the last ones are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError, InterventionError
from ..architectures.architecture import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.taps import PassTaps
from ..hooks.wants import LAST_LOGITS
from ..networks.attention import attend, causal, is_by_hand, keys_filled, over
from ..networks.history import Carried
from ..networks.loop import Network, through_layers
from ..networks.pairs.parts import CrossTaps, seen_of, starts_of
from ..networks.recurrences.recurrence import Recurrence
from ..networks.rope import rope_tables
from ..networks.transfer import to_device
from .states import show_derived, through_sequence, windows

__all__ = ["Cache", "NewestPositions", "read_on"]

_SMALLEST = 64
"""Positions room is made for at first; it doubles when it is full."""
_BEHIND = 18
"""Positions there is room for behind the newest: what attention is filled up with, finite numbers all."""


def read_on(network: Network, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
    """Logits [B, V] at the last position of sequences of one length, which begin with what the cache holds;
    afterwards it holds all of them."""
    start, length = cache.length, len(rows[0])
    ids = to_device(torch.tensor([row[start:] for row in rows], dtype=torch.long), network.device)
    x = through_layers(
        network, ids, NewestPositions(cache, length, taps, ids.device, starts_of(ids, network.config)), taps
    )
    cache.length = length
    return network.unembed(network.finish(x, taps, LAST_LOGITS), LAST_LOGITS)[:, 0]


class Cache:
    """Keys, as rotated, and values of the positions read so far, of each layer [B, Hk, S, dh]; of layers that
    recur the state behind them [B, H, K, V], and of those that shift tokens the last of these."""

    def __init__(self) -> None:
        self.length = 0
        """Positions read in every layer."""
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        """Of layers that recur, the state behind the last position read."""
        self._rows: dict[tuple[int, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, room for positions to come included, and of states and shifted rows."""
        pairs = (part for held in self._held.values() for part in held)
        return sum(part.nbytes for part in (*pairs, *self.states.values(), *self._rows.values()))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer with new ones [B, Hk, new, dh] behind them; views, valid until the next
        call. They count once every layer has its own and `length` says so."""
        end = self.length + k.shape[2]
        held = self._held.get(layer)
        if torch.is_grad_enabled():
            # A backward pass may read earlier keys again: nothing is written beside them.
            self._held[layer] = held = (self._joined(k, held and held[0]), self._joined(v, held and held[1]))
            return held
        if held is None or held[0].shape[2] < end + _BEHIND:
            held = self._grown(k, held and held[0], end), self._grown(v, held and held[1], end)
            self._held[layer] = held
        for room, new in zip(held, (k, v), strict=True):
            room[:, :, self.length : end] = new
        keys, values = (room[:, :, :end] for room in held)
        return keys, values

    def newest(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that had so many new ones in this pass; views, as of `append`."""
        keys, values = (room[:, :, : self.length + count] for room in self._held[layer])
        return keys, values

    def stretch(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a layer from a position on, with numbers of no meaning behind the newest; None
        where there is no room for so many. Views, as of `append`."""
        keys, values = (room[:, :, first : first + count] for room in self._held[layer])
        return (keys, values) if keys.shape[2] == count else None

    def continued(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """x [B, new, width] behind the `count` rows before it, zeros before the beginning; its last rows are
        kept for the next call."""
        held = self._rows.get((layer, name))
        whole = F.pad(x, (0, 0, count, 0)) if held is None else torch.cat([held, x], dim=1)
        self._rows[layer, name] = whole[:, -count:].clone()
        return whole

    def rotation(
        self, rope: RopeConfig, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rope tables of at least `length` positions; of more, where longer ones hold for shorter ones."""
        if rope.depends_on_length:
            return rope_tables(rope, length, device, dtype)
        found = self._rotations.get(rope)
        if found is None or len(found[0]) < length:
            found = self._rotations[rope] = rope_tables(rope, max(_SMALLEST, 2 * length), device, dtype)
        return found

    def keep(self, rows: Sequence[int]) -> None:
        """Only these prompts of the batch."""
        chosen = list(rows)
        self._held = {layer: (k[chosen], v[chosen]) for layer, (k, v) in self._held.items()}
        self.states = {layer: state[chosen] for layer, state in self.states.items()}
        self._rows = {place: rows[chosen] for place, rows in self._rows.items()}

    def clear(self) -> None:
        """Forget everything read: what comes next is at position 0."""
        self.length = 0
        self._held, self.states, self._rows = {}, {}, {}

    def _joined(self, new: Tensor, held: Tensor | None) -> Tensor:
        return new if held is None else torch.cat([held[:, :, : self.length], new], dim=2)

    def _grown(self, like: Tensor, held: Tensor | None, end: int) -> Tensor:
        size = _SMALLEST
        while size < end + _BEHIND:
            size *= 2
        room = like.new_zeros(*like.shape[:2], size, like.shape[3])
        if held is not None:
            room[:, :, : self.length] = held[:, :, : self.length]
        return room


class NewestPositions:
    """The history of a sequence that is read on (`History`): its newest tokens see themselves and what is
    kept."""

    def __init__(
        self, cache: Cache, length: int, taps: PassTaps, device: torch.device, starts: Tensor | None = None
    ) -> None:
        """length: of the sequence with its new positions. starts: where targets begin, [B, 1], of pairs, of
        which nothing is kept."""
        self.starts = starts
        self._cache, self._length, self._taps, self._device = cache, length, taps, device
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """Those behind what is kept."""
        return torch.arange(self._cache.length, self._length, device=self._device)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """Not known: what is kept was embedded when the text was shorter. Raises ConfigError."""
        raise ConfigError(
            f"expected a model that embeds each token by itself, found one that goes by the share of token "
            f"{token} in its prompt; read all positions anew"
        )

    def enter(self, layer: int, carried: Carried) -> Carried:
        """As it is: the same tokens in every layer."""
        return carried

    def kept(self, x: Tensor) -> Tensor:
        """All that came: every new token goes on to the next layer."""
        return x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `History`."""
        if rope not in self._rotations:
            new = slice(self._cache.length, self._length)
            cos, sin = self._cache.rotation(rope, self._length, self._device, dtype)
            self._rotations[rope] = cos[new], sin[new]
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """See `History`; keys and values are kept on the way, by the layer that makes them."""
        if how.source is None:
            keys, values = self._cache.append(layer, k, v)
        else:
            keys, values = self._cache.newest(how.source, k.shape[2])
        new, total = q.shape[2], keys.shape[2]
        if how.part is not None:
            return self._attend_in_pair(layer, q, keys, values, how)
        window = None if how.window is None or how.window >= total else how.window
        by_hand = is_by_hand(q, how) or self._taps.touches(layer, "scores", "attn_scores", "pattern")
        if new == 1 and not by_hand:
            # One query sees all that its window, or chunk, holds: no mask.
            width = (total - 1) % window + 1 if window and how.is_chunked else window
            first = 0 if width is None else max(total - width, 0)
            wide = self._cache.stretch(
                layer if how.source is None else how.source, first, keys_filled(q, total - first)
            )
            weigh = None if wide is None else over(*wide)
            seen = keys[:, :, first:], values[:, :, first:]
            return attend(q, *seen, None, how, layer, self._taps, weigh)
        plain = new == total and window is None and not by_hand
        allowed = None if plain else causal(total, window, q.device, newest=new, is_chunked=how.is_chunked)
        return attend(q, keys, values, allowed, how, layer, self._taps)

    def _attend_in_pair(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """As `attend`, of all positions of pairs."""
        assert how.part is not None
        taps = CrossTaps(self._taps) if how.part == "cross" else self._taps
        starts = None if self.starts is None else self.starts[:, :, None, None]
        seen = seen_of(how.part, self.positions[:, None], self.positions, starts)
        return attend(q, k, v, seen, how, layer, taps, None, self.positions)

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """See `History`; the newest are kept on the way."""
        return windows(self._cache.continued(layer, name, x, count), count)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """See `History`; goes on from the state that was left, and leaves its own.

        Raises InterventionError where attention to earlier tokens is asked for, of which the state alone is
        kept.
        """
        asked = f"{room}_alpha_raw", f"{room}_effective_attn"
        if self._cache.length and self._taps.captures(layer, *asked):
            raise InterventionError(
                f"expected no captures of 'blocks.{layer}.{room}.hook_effective_attn' while reading on, "
                "as only states of earlier tokens are kept; generate first, then capture over the whole text"
            )
        states = self._taps.of_states(layer, f"{room}_state_seq", self._length)
        before = self._cache.states.get(layer)
        read, state = through_sequence(recurrence, tokens, before, states, start=self._cache.length)
        self._cache.states[layer] = state
        show_derived(layer, recurrence, tokens, state, room, self._taps)
        return read
