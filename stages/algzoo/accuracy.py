"""How often a network is right, over any number of seeded samples, in bounded memory.

Samples are drawn block by block where they are used (samples.py). A block is a cell: a Dask task whose counts
are stored when it ends, so that a killed run of 1e8 samples goes on, and one of more samples goes on from it.
Counts are kept per thousand samples, which is what tells how exact fewer samples would have been
(analysis/compute_curve.py).

Border: labelled weights in, counts out.

Axes: block; chunk (a thousand samples of a block, fewer at the end); target and output (classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, StageNode, stage
from ...pipeline.nodes import Node
from ...store.arrays import Array, Ints
from ...store.errors import ConfigError, ShapeError
from .networks import RnnShape, tensors_of
from .samples import BLOCK, Draw, block_sizes, inputs_there_are, slices
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["CHUNK", "accuracy_of", "rmse_of", "sampled_accuracy", "sampled_accuracy_node"]

CHUNK = 1000
"""Samples of one stored count."""


def _joined(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Blocks side by side; the confusion of all of them together."""
    import xarray as xr

    counted = xr.concat([part.drop_vars("confusion", errors="ignore") for part in parts], "chunk")
    if "confusion" in parts[0]:
        counted["confusion"] = sum((part["confusion"] for part in parts[1:]), parts[0]["confusion"])
    return counted


@stage(
    version=1,
    inputs={"weights": None, "blocks": ("block",)},
    outputs={
        "samples": Output(("chunk",), "samples", "samples drawn"),
        "right": Output(("chunk",), "samples", "samples it is right about", is_optional=True),
        "squared_error": Output(("chunk",), "1", "sum of squared errors", is_optional=True),
        "confusion": Output(
            ("target", "output"), "samples", "what is right, and what it says", is_optional=True
        ),
    },
    cells="block",
    combine=_joined,
)
def sampled_accuracy(
    weights: xr.Dataset,
    blocks: xr.DataArray,
    *,
    task: str,
    sequence: int,
    seed: int = 0,
    draw: Draw = "random",
    end_token: bool = False,
    dtype: str = "float32",
) -> xr.Dataset:
    """Right answers among the samples of each block.

    weights: `AlgZooModel.weights`. blocks: int64 [block], how many samples of each numbered block. draw:
    "all" counts every input of integers once. dtype: of the passes. Returns samples [chunk], and of a task
    with classes right [chunk] and confusion [target, output], of one whose answer is a number squared_error
    [chunk].
    """
    import torch
    import xarray as xr

    from .forward import network_of

    chosen = task_named(task)
    tensors, shape = tensors_of(weights)
    _require_fit(chosen, sequence, shape.outputs)
    network = network_of(tensors, shape, dtype)
    parts = []
    for block, many in zip(blocks["block"].values.tolist(), blocks.values.tolist(), strict=True):
        if not 0 < many <= BLOCK:
            raise ShapeError(f"expected 1 to {BLOCK} samples of block {block}, found {many}")
        scores, confusion = [], np.zeros((shape.outputs, shape.outputs), np.int64)
        for x in slices(chosen, sequence, block, many, seed=seed, draw=draw, end_token=end_token):
            given = x.astype(np.float32) if isinstance(shape, RnnShape) else x
            said = network.run(
                torch.from_numpy(given).to(network.dtype if isinstance(shape, RnnShape) else torch.int64)
            )
            scores.append(_scored(chosen, chosen.targets(x), said.numpy(), confusion))
        parts.append(_counted(chosen, np.concatenate(scores), confusion))
    found: xr.Dataset = _joined([xr.Dataset(part) for part in parts])
    return found


def sampled_accuracy_node(
    weights: Node,
    *,
    task: str,
    sequence: int,
    samples: int,
    seed: int = 0,
    end_token: bool = False,
    exhaustive: bool = False,
    dtype: str = "float32",
) -> StageNode:
    """The count of `samples` samples as a node; exhaustive: of all inputs of a task of integers instead."""
    import xarray as xr

    many = inputs_there_are(task_named(task), sequence) if exhaustive else samples
    sizes = block_sizes(many)
    blocks = xr.DataArray(np.array(sizes), {"block": np.arange(len(sizes))}, "block", name="samples")
    return sampled_accuracy.on(
        weights=weights,
        blocks=blocks,
        task=task,
        sequence=sequence,
        seed=seed,
        draw="all" if exhaustive else "random",
        end_token=end_token,
        dtype=dtype,
    )


def accuracy_of(counted: xr.Dataset) -> float:
    """Share of right answers among the samples counted."""
    return float(counted["right"].sum()) / float(counted["samples"].sum())


def rmse_of(counted: xr.Dataset) -> float:
    """Root of the mean squared error among the samples counted."""
    return float(np.sqrt(float(counted["squared_error"].sum()) / float(counted["samples"].sum())))


def _scored(task: Task, targets: Array, said: Array, confusion: Ints) -> Array:
    """Of each sample whether it is right, or its squared error; right and said classes are added to
    `confusion`."""
    if task.is_scalar:
        errors: Array = (said[:, 0].astype(np.float64) - targets) ** 2
        return errors
    classes = said.argmax(axis=1)
    places = np.bincount(targets * len(confusion) + classes, minlength=confusion.size)
    confusion += places.reshape(confusion.shape)
    right: Array = classes == targets
    return right


def _counted(task: Task, scores: Array, confusion: Ints) -> dict[str, tuple[tuple[str, ...], Array]]:
    """Sums over chunks of a block."""
    starts = np.arange(0, len(scores), CHUNK)
    sizes = np.diff(np.append(starts, len(scores)))
    found: dict[str, tuple[tuple[str, ...], Array]] = {"samples": (("chunk",), sizes)}
    if task.is_scalar:
        return found | {"squared_error": (("chunk",), np.add.reduceat(scores, starts))}
    right = np.add.reduceat(scores.astype(np.int64), starts)
    return found | {"right": (("chunk",), right), "confusion": (("target", "output"), confusion)}


def _require_fit(task: Task, sequence: int, outputs: int) -> None:
    if outputs != task.outputs(sequence):
        raise ConfigError(
            f"expected {task.outputs(sequence)} outputs for {task.name} of {sequence} numbers, found a "
            f"network of {outputs}; name another task or sequence"
        )
