"""Cache and read_on: a pass over the newest positions of a sequence, with cached keys, values and states.

Interventions apply to each position once, when it is new; its keys and values then stay as they were. Keys
are cached after rope. Where a longer sequence would rotate them otherwise (length-dependent rope scaling),
the caller clears the cache first. Which token comes next is decided elsewhere.

Of the S positions of a sequence so far, the last ones are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError, InterventionError
from ..architectures.layer_summaries import AttentionMixer
from ..architectures.transformer import RopeConfig
from ..hooks.taps import PassTaps
from ..hooks.wants import LAST_LOGITS
from ..networks.attention import attend, causal, fused_over_padded, needs_unfused, padded_keys
from ..networks.history import Carried
from ..networks.loop import Network, through_layers
from ..networks.pairs import attend_sides, starts_of
from ..networks.recurrences.recurrence import Recurrence
from ..networks.rope import rope_tables
from ..networks.transfer import to_device
from .states import show_derived, through_sequence, windows

__all__ = ["Cache", "NewestPositions", "read_on"]

_SMALLEST = 64
"""Positions allocated at first; the allocation doubles when it is full."""
_BEHIND = 18
"""Positions allocated past the newest, so that attention kernels can be padded with finite numbers."""


def read_on(network: Network, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
    """Compute the tokens of sequences that the cache lacks, and return the next-token logits.

    Arguments:
        network: the network.
        rows: token ids of whole sequences; the first `cache.length` of each are cached.
        cache: extended in place by the new positions.
        taps: called at every hook point of the new positions, to capture or change the value there.

    Returns:
        Logits [B, V] at the last position.
    """
    start, length = cache.length, len(rows[0])
    ids = to_device(torch.tensor([row[start:] for row in rows], dtype=torch.long), network.device)
    x = through_layers(
        network, ids, NewestPositions(cache, length, taps, ids.device, starts_of(ids, network.config)), taps
    )
    cache.length = length
    return network.unembed(network.finish(x, taps, LAST_LOGITS), LAST_LOGITS)[:, 0]


class Cache:
    """Keys and values, recurrent states and shifted rows of the positions computed so far.

    Per layer: keys (after rope) and values [B, Hk, S, dh]; states [B, H, K, V] of recurrent layers; the last
    rows of layers with a token shift or convolution.
    """

    def __init__(self) -> None:
        self.length = 0
        """Number of positions that every layer has computed."""
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        """Layer -> recurrent state after the last position."""
        self._rows: dict[tuple[int, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including unused allocation, and of states and shifted rows."""
        pairs = (part for pair in self._pairs.values() for part in pair)
        return sum(part.nbytes for part in (*pairs, *self.states.values(), *self._rows.values()))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new positions to those of a layer.

        They count as cached only when `length` is raised, after every layer has appended its own.

        Arguments:
            layer: layer index.
            k: keys after rope, [B, Hk, new, dh].
            v: values, [B, Hk, new, dh].

        Returns:
            Keys and values of all positions: views that the next call may invalidate.
        """
        end = self.length + k.shape[2]
        pair = self._pairs.get(layer)
        if torch.is_grad_enabled():
            # A backward pass may still read the earlier keys, so nothing may be written into their memory.
            self._pairs[layer] = pair = (self._joined(k, pair and pair[0]), self._joined(v, pair and pair[1]))
            return pair
        if pair is None or pair[0].shape[2] < end + _BEHIND:
            pair = self._grown(k, pair and pair[0], end), self._grown(v, pair and pair[1], end)
            self._pairs[layer] = pair
        for allocated, new in zip(pair, (k, v), strict=True):
            # Written in place: concatenating would copy all earlier keys at every token.
            allocated[:, :, self.length : end] = new
        keys, values = (allocated[:, :, :end] for allocated in pair)
        return keys, values

    def newest(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every position of a layer, after it appended new positions in this pass.

        They are views that the next `append` may invalidate.

        Arguments:
            layer: layer index.
            count: number of new positions.
        """
        keys, values = (allocated[:, :, : self.length + count] for allocated in self._pairs[layer])
        return keys, values

    def stretch(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of `count` positions from `first` on, for kernels that need padded keys.

        They are views that the next `append` may invalidate. Entries past the newest position are finite
        numbers without meaning.

        Arguments:
            layer: layer index.
            first: first position.
            count: number of positions.

        Returns:
            (keys, values); None if fewer positions are allocated.
        """
        keys, values = (allocated[:, :, first : first + count] for allocated in self._pairs[layer])
        return (keys, values) if keys.shape[2] == count else None

    def continued(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """Prepend the `count` rows before the new ones, as a token shift or convolution needs them.

        At the beginning of a sequence these are zeros. The last `count` rows are cached for the next call.

        Arguments:
            layer: layer index.
            name: name of the rows in the layer.
            x: rows of the new positions, [B, new, width].
            count: number of earlier rows that the first new one needs.

        Returns:
            [B, count + new, width].
        """
        earlier = self._rows.get((layer, name))
        extended = F.pad(x, (0, 0, count, 0)) if earlier is None else torch.cat([earlier, x], dim=1)
        # A clone: a view would keep the whole sequence alive.
        self._rows[layer, name] = extended[:, -count:].clone()
        return extended

    def rotation(
        self, rope: RopeConfig, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """RoPE tables (cos, sin) of at least `length` positions, [position, half head].

        They are longer if the scaling does not depend on the length, so that they serve later tokens, too.

        Arguments:
            rope: RoPE configuration of the layer.
            length: positions that the tables must cover.
            device: device of the tables.
            dtype: dtype of the tables.
        """
        if rope.depends_on_length:
            return rope_tables(rope, length, device, dtype)
        tables = self._rotations.get(rope)
        if tables is None or len(tables[0]) < length:
            tables = self._rotations[rope] = rope_tables(rope, max(_SMALLEST, 2 * length), device, dtype)
        return tables

    def keep(self, rows: Sequence[int]) -> None:
        """Drop sequences from the cache.

        Arguments:
            rows: batch indices of the sequences that stay.
        """
        indices = list(rows)
        self._pairs = {layer: (k[indices], v[indices]) for layer, (k, v) in self._pairs.items()}
        self.states = {layer: state[indices] for layer, state in self.states.items()}
        self._rows = {place: rows[indices] for place, rows in self._rows.items()}

    def clear(self) -> None:
        """Forget all positions: the next token is at position 0."""
        self.length = 0
        self._pairs, self.states, self._rows = {}, {}, {}

    def _joined(self, new: Tensor, earlier: Tensor | None) -> Tensor:
        return new if earlier is None else torch.cat([earlier[:, :, : self.length], new], dim=2)

    def _grown(self, like: Tensor, earlier: Tensor | None, end: int) -> Tensor:
        """A larger allocation for keys or values, with the earlier positions copied into it."""
        size = _SMALLEST
        # Doubling makes appending n positions cost O(n) copies in total.
        while size < end + _BEHIND:
            size *= 2
        # Zeros, because padded kernels read entries past the newest position, which must be finite.
        allocated = like.new_zeros(*like.shape[:2], size, like.shape[3])
        if earlier is not None:
            allocated[:, :, : self.length] = earlier[:, :, : self.length]
        return allocated


class NewestPositions:
    """Positions and attention of a pass over the new tokens of a sequence, which see the cached positions."""

    def __init__(
        self, cache: Cache, length: int, taps: PassTaps, device: torch.device, starts: Tensor | None = None
    ) -> None:
        """Prepare a pass.

        Arguments:
            cache: positions computed so far.
            length: tokens of the sequence with the new ones.
            taps: hook points of the new positions.
            device: device of the network.
            starts: positions at which targets begin, [B, 1], in an encoder-decoder (never cached); None
                for other models.
        """
        self.starts = starts
        self._cache, self._length, self._taps, self._device = cache, length, taps, device
        self._sides: dict[str, Tensor] = {}
        """Attention masks of an encoder-decoder by `AttentionMixer.part`."""
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the new tokens: arange(cache.length, length)."""
        return torch.arange(self._cache.length, self._length, device=self._device)

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """Raise ConfigError: cached positions were embedded with the share of a token in a shorter text.

        Arguments:
            token: token id whose share in the prompt the embedding depends on.
            ids: token ids.
        """
        raise ConfigError(
            "cache=True: expected a model that embeds each token by itself, found one whose embedding "
            f"depends on the share of token {token} in the prompt; set cache=False"
        )

    def enter(self, layer: int, carried: Carried) -> Carried:
        """The tensors that enter a layer, unchanged: every layer computes the same tokens."""
        return carried

    def needed(self, x: Tensor) -> Tensor:
        """x unchanged: the next layer needs every new token."""
        return x

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE tables (cos, sin) of the new positions, [new, half head]."""
        if rope not in self._rotations:
            new = slice(self._cache.length, self._length)
            cos, sin = self._cache.rotation(rope, self._length, self._device, dtype)
            self._rotations[rope] = cos[new], sin[new]
        return self._rotations[rope]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention of the new tokens to all positions; returns z. Keys and values join the cache.

        Arguments:
            layer: layer index.
            q: queries after RoPE, [B, H, new, dh].
            k: keys of the new positions after RoPE, [B, Hk, new, dh].
            v: values of the new positions, [B, Hk, new, dh].
            mixer: parameters of the layer's attention.
        """
        if mixer.source is None:
            keys, values = self._cache.append(layer, k, v)
        else:
            keys, values = self._cache.newest(mixer.source, k.shape[2])
        new, total = q.shape[2], keys.shape[2]
        if mixer.part is not None:
            return attend_sides(layer, q, keys, values, mixer, self, self._taps, self._sides)
        window = None if mixer.window is None or mixer.window >= total else mixer.window
        is_unfused = needs_unfused(q, mixer) or self._taps.touches(layer, "scores", "attn_scores", "pattern")
        if new == 1 and not is_unfused:
            # One query sees every key that is left after its window or chunk is cut out: no mask.
            n_visible = (total - 1) % window + 1 if window and mixer.is_chunked else window
            first = 0 if n_visible is None else max(total - n_visible, 0)
            key_layer = layer if mixer.source is None else mixer.source
            padded = self._cache.stretch(key_layer, first, padded_keys(q, total - first))
            weigh = None if padded is None else fused_over_padded(*padded)
            visible = keys[:, :, first:], values[:, :, first:]
            return attend(q, *visible, None, mixer, layer, self._taps, weigh)
        # A whole prompt without window is plain causal attention, for which kernels need no mask.
        plain = new == total and window is None and not is_unfused
        allowed = None if plain else causal(total, window, q.device, newest=new, is_chunked=mixer.is_chunked)
        return attend(q, keys, values, allowed, mixer, layer, self._taps)

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """The `count` rows before each new token, [B, new, count, width]; the newest rows are cached.

        Arguments:
            layer: layer index.
            name: name of the rows in the layer.
            x: rows of the new tokens, [B, new, width].
            count: number of rows before each token.
        """
        return windows(self._cache.continued(layer, name, x, count), count)

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """Run a recurrence over the new tokens from the cached state, and cache the state after them.

        Arguments:
            layer: layer index.
            recurrence: the recurrence of the layer.
            tokens: inputs of the recurrence by name, each [B, H, new, width].
            room: prefix of its hook point kinds, e.g. "rwkv".

        Raises:
            InterventionError: where attention to earlier tokens is captured, as only their state is cached.
        """
        matrices = f"{room}_alpha_raw", f"{room}_effective_attn"
        if self._cache.length and self._taps.captures(layer, *matrices):
            raise InterventionError(
                f"expected no captures of 'blocks.{layer}.{room}.hook_effective_attn' in generation with a "
                "cache, as only the state of earlier tokens is cached; generate first, then capture over the "
                "whole text"
            )
        states = self._taps.of_states(layer, f"{room}_state_seq", self._length)
        before = self._cache.states.get(layer)
        read, state = through_sequence(recurrence, tokens, before, states, start=self._cache.length)
        self._cache.states[layer] = state
        show_derived(layer, recurrence, tokens, state, room, self._taps)
        return read
