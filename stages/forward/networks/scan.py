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
    log_decay = taps(f"{room}_log_decay", layer, tokens["log_decay"])
    if taps.touches(layer, f"{room}_decay"):
        decay = taps(f"{room}_decay", layer, torch.exp(log_decay))
        log_decay = torch.log(decay) if taps.changes(layer, f"{room}_decay") else log_decay
    tokens["log_decay"] = log_decay
    if taps.touches(layer, f"{room}_write"):
        tokens["write"] = taps(f"{room}_write", layer, log_decay.new_ones(*tokens["k"].shape[:3], 1))
    return history.scan(layer, recurrence, tokens, room)
