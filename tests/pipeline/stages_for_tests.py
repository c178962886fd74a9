"""Small stages whose answers can be done on paper, and a log of what ran; tests and workers import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import xarray as xr

from mizarr.pipeline import ConstantNode, Output, SourceNode, stage
from mizarr.store.errors import ShapeError

TLH = ("layer", "token", "hidden")


def note(what: str) -> None:
    """Append to the log of calls; one short write, so that threads and processes may share it."""
    if log := os.environ.get("CALLS"):
        with Path(log).open("a") as file:
            file.write(f"{what}\n")


def calls() -> list[str]:
    log = Path(os.environ["CALLS"])
    return log.read_text().split() if log.exists() else []


def states(layers: int = 3, tokens: int = 8, hidden: int = 4) -> xr.DataArray:
    values = np.arange(layers * tokens * hidden, dtype=np.float32).reshape(layers, tokens, hidden)
    return xr.DataArray(values, dims=TLH, coords={"layer": np.arange(layers)}, name="resid_post")


def source(layers: int = 3, version: int = 1, scale: float = 1.0) -> SourceNode:
    """States as a capture would give them; `version` does not change them, `scale` does."""

    def make() -> xr.Dataset:
        note("source")
        return (states(layers) * np.float32(scale)).to_dataset(name="resid_post")

    return SourceNode("source", version, {"layers": layers, "scale": scale}, make)


@stage(
    version=1,
    inputs={"states": TLH},
    outputs={"norm": Output(("layer", "token"), "1", "length of the state")},
)
def norm(states: xr.DataArray, *, power: float = 2.0) -> xr.DataArray:
    """Length of each state."""
    note("norm")
    return (abs(states) ** power).sum("hidden") ** (1 / power)


@stage(
    version=1,
    inputs={"states": TLH},
    outputs={"mean": Output(("layer", "hidden"), "1", "mean")},
    cells="layer",
)
def layer_mean(states: xr.DataArray, *, delay: float = 0.0, fail_at: int = -1) -> xr.DataArray:
    """Mean state of each layer, slowly if asked."""
    layer = int(states["layer"].item())
    if layer == fail_at:
        raise ShapeError("no such layer today")
    note(f"layer-{layer}")
    time.sleep(delay)
    return states.mean("token")


def add(parts: list[xr.Dataset]) -> xr.Dataset:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@stage(
    version=1,
    inputs={"states": TLH, "weight": None},
    outputs={"total": Output(("layer", "hidden"), "1")},
    cells="segment",
    combine=add,
)
def total(states: xr.DataArray, weight: xr.Dataset) -> xr.DataArray:
    """Weighted sum over tokens."""
    note(f"segment-{states.sizes['token']}")
    return states.sum("token") * weight["w"]


@stage(version=1, inputs={"norm": ("layer", "token")}, outputs={"top": Output(("layer",), "1")})
def largest(norm: xr.DataArray) -> xr.DataArray:
    """Largest of each layer."""
    note("largest")
    return norm.max("token")


DIVISOR = 2


@stage(inputs={"x": ("n",)}, outputs={"y": ("n",)})
def halved(x: xr.DataArray) -> xr.DataArray:
    """By a global; declared without a version."""
    return x / DIVISOR


class Segmented(ConstantNode):
    """A dataset in hand whose tokens are cut into segments, as those of a capture are."""

    def __init__(self, dataset: xr.Dataset, length: int) -> None:
        super().__init__(dataset, "segmented")
        self.length = length

    def labels(self, store, axis):
        if axis != "segment":
            return super().labels(store, axis)
        tokens = self.open(store).sizes["token"]
        return [(start, min(start + self.length, tokens)) for start in range(0, tokens, self.length)]
