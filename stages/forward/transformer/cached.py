"""Reading on: a forward pass over the newest positions of a sequence, with the keys and values of the others
kept from when those were read.

Border: token ids, taps and tensors; which token comes next is decided elsewhere.

Interventions are applied to each position once, when it is new; its keys and values stay what they were then.
Keys are kept as rope has turned them. Where the turn depends on the length of the sequence (dynamic NTK
scaling beyond the original context, longrope where it changes its factors), nothing kept is true of the
longer sequence, and all of it is read again.

Axes: as in the folder's glossary; of the S positions of a sequence so far the last ones are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..config import RopeConfig, TransformerConfig
from ..growing import spec_so_far
from ..hooks import BoundSpec
from ..interventions import Held
from ..taps import RunTaps, Sink
from ..wants import LAST_LOGITS
from .attention import attend
from .rope import depends_on_length, inverse_frequencies, rope_tables

if TYPE_CHECKING:
    from .decoder import Decoder

_SMALLEST = 64
"""Positions room is made for at first; it doubles when it is full."""


class KVCache:
    """Keys, as rotated, and values of the positions read so far, [B, Hk, S, dh] for each layer."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        """Positions read in every layer."""
        self._held: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        """Bytes taken, room for positions to come included."""
        return sum(part.nbytes for held in self._held if held is not None for part in held)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer with new ones [B, Hk, new, dh] behind them; views, valid until the next
        call. `advance` makes them count, once every layer has its own."""
        end = self.length + k.shape[2]
        held = self._held[layer]
        if held is None or held[0].shape[2] < end:
            held = self._grown(k, held and held[0], end), self._grown(v, held and held[1], end)
            self._held[layer] = held
        for room, new in zip(held, (k, v), strict=True):
            room[:, :, self.length : end] = new
        keys, values = (room[:, :, :end] for room in held)
        return keys, values

    def advance(self, positions: int) -> None:
        """Count the positions that were appended to every layer."""
        self.length += positions

    def keep(self, rows: Sequence[int]) -> None:
        """Only these prompts of the batch."""
        self._held = [
            None if held is None else (held[0][list(rows)], held[1][list(rows)]) for held in self._held
        ]

    def clear(self) -> None:
        """Forget everything."""
        self.length = 0
        self._held = [None] * len(self._held)

    def _grown(self, like: Tensor, held: Tensor | None, end: int) -> Tensor:
        size = _SMALLEST
        while size < end:
            size *= 2
        room = like.new_empty(*like.shape[:2], size, like.shape[3])
        if held is not None:
            room[:, :, : self.length] = held[:, :, : self.length]
        return room


@dataclass(frozen=True)
class NewestPositions:
    """The newest positions of sequences of one length; see `Positions` in attention.py."""

    config: TransformerConfig
    taps: RunTaps
    cache: KVCache
    cos: Tensor
    sin: Tensor

    def kept(self, x: Tensor) -> Tensor:
        """All of them."""
        return x

    def mix(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """z [B, H, new, dh] from q, k and v of the new positions, their keys and values kept on the way."""
        keys, values = self.cache.append(layer, k, v)
        new, total = q.shape[2], keys.shape[2]
        window = self.config.layer_windows[layer]
        if window is not None and window >= total:
            window = None
        by_hand = self.config.attn_logit_softcapping is not None
        if by_hand or self.taps.touches(layer, "scores", "attn_scores", "pattern"):
            allowed = _visible(new, total, window, q.device)
        elif new == 1:
            # One query sees all that its window holds: no mask.
            keys, values = (
                (keys, values) if window is None else (keys[:, :, -window:], values[:, :, -window:])
            )
            allowed = None
        else:
            allowed = None if new == total and window is None else _visible(new, total, window, q.device)
        return attend(q, keys, values, allowed, self.config, layer, self.taps)


def _visible(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [new, total], True where attention of the newest positions may look."""
    place = torch.arange(total, device=device)
    distance = place[total - new :, None] - place
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class CachedReader:
    """Reads sequences of one length on, position by position, under one spec."""

    def __init__(self, decoder: Decoder, spec: BoundSpec) -> None:
        self._decoder, self._spec = decoder, spec
        self.cache = KVCache(decoder.config.num_layers)
        self._tables: tuple[Tensor, Tensor] | None = None

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """Logits [B, vocab] at the last position of sequences of one length, which begin with what was read
        before. Captured activations, of the new positions alone, go to `sink`."""
        decoder, length = self._decoder, len(rows[0])
        if _turns_anew(decoder.config.rope, self.cache.length, length):
            self.cache.clear()
        start = self.cache.length
        device = decoder.weights.embed.device
        ids = torch.tensor([row[start:] for row in rows], dtype=torch.long, device=device)
        held = Held(np.arange(start, length), length)
        taps = RunTaps(spec_so_far(self._spec, length), sink, held=held)
        cos, sin = self._rope(length, device)
        positions = NewestPositions(decoder.config, taps, self.cache, cos[start:length], sin[start:length])
        with torch.no_grad():
            x = taps("embed", None, decoder.embed(ids))
            for layer, weights in enumerate(decoder.weights.layers):
                x = decoder.block(taps("resid_pre", layer, x), layer, weights, positions, taps)
            self.cache.advance(length - start)
            return decoder.unembed(decoder.finish(x, taps, LAST_LOGITS), LAST_LOGITS)[:, 0]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts of the batch only."""
        self.cache.keep(rows)

    def _rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rope = self._decoder.config.rope
        if depends_on_length(rope):
            return rope_tables(rope, length, device)
        if self._tables is None or len(self._tables[0]) < length:
            self._tables = rope_tables(rope, max(_SMALLEST, 2 * length), device)
        return self._tables


def _turns_anew(rope: RopeConfig, before: int, length: int) -> bool:
    """Whether the keys of a sequence of `before` positions are turned otherwise once it has `length`."""
    if before == 0 or not depends_on_length(rope):
        return False
    return not torch.equal(inverse_frequencies(rope, before), inverse_frequencies(rope, length))
