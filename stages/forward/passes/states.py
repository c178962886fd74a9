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
    """The `count` rows before each token, as a token shift or convolution needs them.

    Arguments:
        x: rows of the tokens, with `count` earlier rows in front, [B, count + token, width].
        count: number of rows before each token.

    Returns:
        A view [B, token, count, width] of x.
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
    """Run a recurrence over the next tokens of a sequence; step by step if states are captured or changed.

    Arguments:
        recurrence: the recurrence of a layer.
        tokens: inputs of the recurrence by name, each [B, H, T, width].
        state: state before the first token; None at the beginning of a sequence.
        taps: called with the state after each token; None lets the whole sequence run at once.
        start: position of the first token.

    Returns:
        (what each token reads from its state [B, H, T, V], state after the last token).
    """
    if taps is None:
        return recurrence(tokens, state)
    read, unchanged_states, states = [], [], []
    for step in range(next(iter(tokens.values())).shape[2]):
        token = {name: x[:, :, step : step + 1] for name, x in tokens.items()}
        token_read, unchanged = recurrence(token, state)
        changed = taps.changed(unchanged, start + step)
        if changed is not unchanged:
            # The token has read the state before the taps changed it: read again from the changed one.
            initial = torch.zeros_like(unchanged) if state is None else state
            token_read = recurrence.read(token, initial, changed)
        read.append(token_read)
        unchanged_states.append(unchanged)
        states.append(changed)
        state = changed
    taps.seen(torch.stack(unchanged_states, 2), torch.stack(states, 2))
    return torch.cat(read, 2), states[-1]


def show_derived(
    layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], state: Tensor, room: str, taps: Taps
) -> None:
    """Pass the last state, and the attention matrix equivalent to a recurrence, to taps that capture them.

    Arguments:
        layer: layer index.
        recurrence: the recurrence of the layer.
        tokens: inputs of the recurrence by name, each [B, H, T, width].
        state: state after the last token.
        room: prefix of its hook point kinds, e.g. "rwkv".
        taps: called at every hook point of the pass.
    """
    if taps.captures(layer, f"{room}_state"):
        taps(f"{room}_state", layer, state)
    if taps.captures(layer, f"{room}_alpha_raw", f"{room}_effective_attn"):
        # The matrix costs T x T per head, which a recurrence never needs for itself.
        alpha = recurrence.weights(tokens)
        taps(f"{room}_alpha_raw", layer, alpha)
        taps(f"{room}_effective_attn", layer, effective_attention(alpha))
