"""Recurrent scan of a mixer, with the hook points of decay and write that all recurrent mixers have.

The state belongs to the history (`History.scan`); a mixer provides queries, keys, values and decays of the
tokens.

Axes: as in recurrences/recurrence.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..hooks.taps import Taps
from .history import History
from .recurrences.recurrence import Recurrence


def scan(
    recurrence: Recurrence, tokens: dict[str, Tensor], layer: int, history: History, taps: Taps, prefix: str
) -> Tensor:
    """Run a recurrence over the tokens, with the hook points of its log decay, decay and write.

    Arguments:
        recurrence: how the state is decayed, written and read.
        tokens: inputs of the recurrence by name, such as "q", "k", "v" and "log_decay", each [B, H, token,
            width], without "write", which is added if that hook point is captured or changed.
        layer: number of the layer.
        history: runs the recurrence over the tokens of each sequence.
        taps: captures and interventions of the pass, called at its hook points.
        prefix: prefix of the names of the hook points: "rwkv", "ssm", "linear" or "mlstm".

    Returns:
        What each head reads from the state, [B, H, token, V], float32.
    """
    tokens["log_decay"] = tapped_log_decay(tokens["log_decay"], layer, taps, prefix)
    return scan_decayed(recurrence, tokens, layer, history, taps, prefix)


def tapped_log_decay(log_decay: Tensor, layer: int, taps: Taps, prefix: str) -> Tensor:
    """Log decay of a recurrent state after the interventions on its two hook points, log_decay and decay.

    Arguments:
        log_decay: Natural logarithm of the decay, [B, H, token, K or 1].
        layer: Number of the layer.
        taps: Captures and interventions of the pass, called at its hook points.
        prefix: Prefix of the hook points: "rwkv", "ssm", "linear" or "mlstm".

    Returns:
        Log decay of the same shape, with the interventions on both hook points.
    """
    log_decay = taps(f"{prefix}_log_decay", layer, log_decay)
    if taps.touches(layer, f"{prefix}_decay"):
        decay = taps(f"{prefix}_decay", layer, torch.exp(log_decay))
        log_decay = torch.log(decay) if taps.changes(layer, f"{prefix}_decay") else log_decay
    return log_decay


def scan_decayed(
    recurrence: Recurrence, tokens: dict[str, Tensor], layer: int, history: History, taps: Taps, prefix: str
) -> Tensor:
    """Run a recurrence over the tokens, like `scan`, for mixers that derive other inputs from the decays and
    so have called `tapped_log_decay` before.

    Arguments:
        recurrence: How the state is decayed, written and read.
        tokens: Its inputs by name, [B, H, token, width], without "write". The dict gets "write" if that hook
            point is captured or changed, which requires "log_decay".
        layer: Number of the layer.
        history: Runs the recurrence.
        taps: Captures and interventions of the pass, called at its hook points.
        prefix: Prefix of the hook points: "rwkv", "ssm", "linear" or "mlstm".

    Returns:
        What each head reads from the state, [B, H, token, V], float32.
    """
    if taps.touches(layer, f"{prefix}_write"):
        log_decay = tokens["log_decay"]
        tokens["write"] = taps(f"{prefix}_write", layer, log_decay.new_ones(*tokens["k"].shape[:3], 1))
    return history.scan(layer, recurrence, tokens, prefix)
