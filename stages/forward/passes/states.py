"""Recurrent states along one sequence, and the captured quantities that are derived from them.

Works on tensors, a recurrence and taps. Where the first state comes from, and which tokens belong to a
sequence, is decided by the histories that call it.
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
    """The `count` rows before each token, a view [B, token, count, width] of x [B, count + token, width].

    Arguments:
        x: rows [B, count + token, width].
        count: number of rows before each token.
    """
    return x.unfold(1, count, 1)[:, :-1].transpose(-1, -2)


def through_sequence(
    recurrence: Recurrence,
    tokens: Mapping[str, Tensor],
    state: Tensor | None,
    taps: StateTaps | None,
    *,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over the next tokens of a sequence; step by step where states are captured or changed.

    Arguments:
        recurrence: the recurrence of a layer.
        tokens: its inputs by name, each [B, H, T, width].
        state: state before the first token; None at the beginning of a sequence.
        taps: taps for its states; None lets the whole sequence run at once.
        start: position of the first token.

    Returns:
        What the tokens read, [B, H, T, V], and the state after the last one.
    """
    if taps is None:
        return recurrence(tokens, state)
    read, befores, afters = [], [], []
    for step in range(next(iter(tokens.values())).shape[2]):
        one = {name: x[:, :, step : step + 1] for name, x in tokens.items()}
        plain, state_before_taps = recurrence(one, state)
        after = taps.changed(state_before_taps, start + step)
        if after is not state_before_taps:
            # The step has read the state before the taps changed it: read again from the changed one.
            initial = torch.zeros_like(state_before_taps) if state is None else state
            plain = recurrence.read(one, initial, after)
        read.append(plain)
        befores.append(state_before_taps)
        afters.append(after)
        state = after
    taps.seen(torch.stack(befores, 2), torch.stack(afters, 2))
    return torch.cat(read, 2), afters[-1]


def show_derived(
    layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], state: Tensor, room: str, taps: Taps
) -> None:
    """Show the last state, and the attention matrix that a recurrence amounts to, where they are captured.

    Arguments:
        layer: layer index.
        recurrence: the recurrence of the layer.
        tokens: its inputs by name, each [B, H, T, width].
        state: state after the last token.
        room: prefix of its hook point kinds, e.g. "rwkv".
        taps: hook points of the pass.
    """
    if taps.captures(layer, f"{room}_state"):
        taps(f"{room}_state", layer, state)
    if taps.captures(layer, f"{room}_alpha_raw", f"{room}_effective_attn"):
        # The matrix costs T x T per head, which a recurrence never needs for itself.
        alpha = recurrence.weights(tokens)
        taps(f"{room}_alpha_raw", layer, alpha)
        taps(f"{room}_effective_attn", layer, effective_attention(alpha))
