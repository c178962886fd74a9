"""States of a recurrence along one sequence, and what is worked out of them for who asks.

Border: tensors, a recurrence and taps; whose tokens they are, and where a state comes from, is known to
histories.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..hooks.taps import StateTaps, Taps
from ..networks.recurrences.effective import effective_attention
from ..networks.recurrences.recurrence import Recurrence

__all__ = ["show_derived", "through_sequence", "windows"]


def windows(x: Tensor, count: int) -> Tensor:
    """x [B, count + token, width] -> the `count` rows before each token [B, token, count, width], a view."""
    return x.unfold(1, count, 1)[:, :-1].transpose(-1, -2)


def through_sequence(
    recurrence: Recurrence,
    tokens: Mapping[str, Tensor],
    state: Tensor | None,
    taps: StateTaps | None,
    *,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """What tokens [B, H, T, width] read [B, H, T, V], and the state behind them; step by step where somebody
    reads or changes states. start: position of the first token."""
    if taps is None:
        return recurrence(tokens, state)
    read, befores, afters = [], [], []
    for place in range(next(iter(tokens.values())).shape[2]):
        one = {name: x[:, :, place : place + 1] for name, x in tokens.items()}
        plain, found = recurrence(one, state)
        after = taps.changed(found, start + place)
        if after is not found:
            plain = recurrence.read(one, torch.zeros_like(found) if state is None else state, after)
        read.append(plain)
        befores.append(found)
        afters.append(after)
        state = after
    taps.seen(torch.stack(befores, 2), torch.stack(afters, 2))
    return torch.cat(read, 2), afters[-1]


def show_derived(
    layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], state: Tensor, room: str, taps: Taps
) -> None:
    """The last state, and the attention a recurrence amounts to, at hook points that somebody captures."""
    if taps.captures(layer, f"{room}_state"):
        taps(f"{room}_state", layer, state)
    if taps.captures(layer, f"{room}_alpha_raw", f"{room}_effective_attn"):
        alpha = recurrence.weights(tokens)
        taps(f"{room}_alpha_raw", layer, alpha)
        taps(f"{room}_effective_attn", layer, effective_attention(alpha))
