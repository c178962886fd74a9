"""Weights of one layer of a loaded model, by the names of `Architecture.tensors`."""

from __future__ import annotations

from typing import Any

MLP = ("gate", "up", "down", "gate_up")


def part_of(layer: Any, name: str) -> Any:
    """The `Linear` or norm called `name` ("q", "down", "ln1") of a layer that attends and has an MLP."""
    if name.startswith("ln"):
        return layer.norms[name]
    return getattr((layer.channel_mixer if name in MLP else layer.mixers[0]).weights, name)
