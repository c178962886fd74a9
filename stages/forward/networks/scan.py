"""What tokens read of a state: a scan, past the hook points of decay and write that every room has.

The state is the history's (`History.scan`); a mixer hands over what each token reads it with, writes to it,
and how it decays.

Axes: as in recurrences/recurrence.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..hooks.taps import Taps
from .history import History
from .recurrences.recurrence import Recurrence


def scan(
    recurrence: Recurrence, tokens: dict[str, Tensor], layer: int, history: History, taps: Taps, room: str
) -> Tensor:
    """What each head reads, [B, H, token, V], from the tokens of a LinearRecurrence without "write".

    room: of the hook points, "rwkv": its log_decay, decay and write, before those of states.
    """
    tokens["log_decay"] = shown_decay(tokens["log_decay"], layer, taps, room)
    return scan_decayed(recurrence, tokens, layer, history, taps, room)


def shown_decay(log_decay: Tensor, layer: int, taps: Taps, room: str) -> Tensor:
    """The log decay [B, H, token, K or 1] to go on with, past its two hook points."""
    log_decay = taps(f"{room}_log_decay", layer, log_decay)
    if taps.touches(layer, f"{room}_decay"):
        decay = taps(f"{room}_decay", layer, torch.exp(log_decay))
        log_decay = torch.log(decay) if taps.changes(layer, f"{room}_decay") else log_decay
    return log_decay


def scan_decayed(
    recurrence: Recurrence, tokens: dict[str, Tensor], layer: int, history: History, taps: Taps, room: str
) -> Tensor:
    """As `scan`, of decays that have been shown: where other tokens are made of them."""
    if taps.touches(layer, f"{room}_write"):
        log_decay = tokens["log_decay"]
        tokens["write"] = taps(f"{room}_write", layer, log_decay.new_ones(*tokens["k"].shape[:3], 1))
    return history.scan(layer, recurrence, tokens, room)
