"""Accuracy of an AlgZoo network over any number of seeded random samples, in bounded memory.

Samples are drawn block by block where they are used (samples.py). Each block of a million samples is a task
of its own, whose counts are stored when it ends. So an interrupted run of 1e8 samples resumes, and a run of
more samples reuses the blocks. Counts are stored per thousand samples (a chunk), from which
analysis/compute_curve.py measures the error of smaller samples.

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
from .samples import BLOCK, Draw, block_sizes, count_inputs, slices
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["CHUNK", "accuracy_of", "rmse_of", "sampled_accuracy", "sampled_accuracy_node"]

CHUNK = 1000
"""Number of samples per stored count."""


def _joined(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join the counts of several blocks: chunks are concatenated, confusion matrices are added."""
    import xarray as xr

    counted = xr.concat([part.drop_vars("confusion", errors="ignore") for part in parts], "chunk")
    if "confusion" in parts[0]:
        counted["confusion"] = sum((part["confusion"] for part in parts[1:]), parts[0]["confusion"])
    return counted


@stage(
    version=1,
    inputs={"weights": None, "blocks": ("block",)},
    outputs={
        "samples": Output(("chunk",), "samples", "number of samples"),
        "right": Output(("chunk",), "samples", "samples answered correctly", is_optional=True),
        "squared_error": Output(("chunk",), "1", "sum of squared errors", is_optional=True),
        "confusion": Output(
            ("target", "output"), "samples", "samples by correct class and answer", is_optional=True
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
    """Counts of correct answers, or sums of squared errors, over the samples of each block.

    Arguments:
        weights: labelled weights of the network, as `AlgZooModel.weights`.
        blocks: number of samples to count in each block, int64 [block], labelled with the number of the
            block.
        task: name of the task.
        sequence: number of time steps per input.
        seed: seed of the samples.
        draw: "random", or "all" to count every input of an integer task once.
        end_token: whether integer inputs end with a fixed token; see `samples.slices`.
        dtype: dtype of the forward passes, "float32" or "float64".

    Returns:
        samples [chunk], the number of samples; for a task with classes right [chunk], the number of correct
        answers, and confusion [target, output]; for a task with a scalar answer squared_error [chunk], the
        sum of squared errors.

    Raises:
        ShapeError: a block has fewer than 1 or more than `BLOCK` samples.
        ConfigError: the outputs of the network do not fit the task.
    """
    import torch
    import xarray as xr

    from .forward import network_of

    zoo_task = task_named(task)
    tensors, shape = tensors_of(weights)
    _require_fit(zoo_task, sequence, shape.outputs)
    network = network_of(tensors, shape, dtype)
    parts = []
    for block, count in zip(blocks["block"].values.tolist(), blocks.values.tolist(), strict=True):
        if not 0 < count <= BLOCK:
            raise ShapeError(f"expected 1 to {BLOCK:,} samples to count in block {block}, found {count:,}")
        scores, confusion = [], np.zeros((shape.outputs, shape.outputs), np.int64)
        for x in slices(zoo_task, sequence, block, count, seed=seed, draw=draw, end_token=end_token):
            # The RNN reads numbers, also for an integer task; the transformer looks integers up.
            inputs = x.astype(np.float32) if isinstance(shape, RnnShape) else x
            outputs = network.run(
                torch.from_numpy(inputs).to(network.dtype if isinstance(shape, RnnShape) else torch.int64)
            )
            # Confusion accumulates in place; scores stay per sample until they are summed by chunk.
            scores.append(_sample_scores(zoo_task, zoo_task.targets(x), outputs.numpy(), confusion))
        parts.append(_counts_by_chunk(zoo_task, np.concatenate(scores), confusion))
    dataset: xr.Dataset = _joined([xr.Dataset(part) for part in parts])
    return dataset


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
    """Node of a computation graph that computes `sampled_accuracy` over the first samples of a seed.

    Arguments:
        weights: node that provides the labelled weights.
        task: name of the task.
        sequence: number of time steps per input.
        samples: total number of samples.
        seed: seed of the samples.
        end_token: whether integer inputs end with a fixed token; see `samples.slices`.
        dtype: dtype of the forward passes, "float32" or "float64".
        exhaustive: whether to count every input of an integer task once instead; `samples` is then ignored.
    """
    import xarray as xr

    count = count_inputs(task_named(task), sequence) if exhaustive else samples
    sizes = block_sizes(count)
    # Sizes are an input of the stage, so the key of a block holds its own size, and not the total.
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
    """Share of correct answers, 0 to 1, from the counts of `sampled_accuracy`."""
    return float(counted["right"].sum()) / float(counted["samples"].sum())


def rmse_of(counted: xr.Dataset) -> float:
    """Root mean squared error of scalar answers, from the sums of `sampled_accuracy`."""
    return float(np.sqrt(float(counted["squared_error"].sum()) / float(counted["samples"].sum())))


def _sample_scores(task: Task, targets: Array, outputs: Array, confusion: Ints) -> Array:
    """Whether each answer is correct, bool [sample]; for a scalar task its squared error, float64 [sample].

    Arguments:
        task: the task.
        targets: correct answers [sample].
        outputs: outputs of the network [sample, output].
        confusion: confusion matrix [target, output], to which the samples are added in place.
    """
    if task.is_scalar:
        # float64: squares are summed over up to 1e8 samples.
        errors: Array = (outputs[:, 0].astype(np.float64) - targets) ** 2
        return errors
    classes = outputs.argmax(axis=1)
    # Confusion matrix by a single bincount of target * classes + class.
    counts = np.bincount(targets * len(confusion) + classes, minlength=confusion.size)
    confusion += counts.reshape(confusion.shape)
    right: Array = classes == targets
    return right


def _counts_by_chunk(task: Task, scores: Array, confusion: Ints) -> dict[str, tuple[tuple[str, ...], Array]]:
    """Variables of one block: name -> (dims, values).

    Arguments:
        task: the task.
        scores: scores of the block's samples, as `_sample_scores` returns them; summed over each chunk.
        confusion: confusion matrix of the block; left out for a scalar task.
    """
    starts = np.arange(0, len(scores), CHUNK)
    # The last chunk may be shorter.
    sizes = np.diff(np.append(starts, len(scores)))
    variables: dict[str, tuple[tuple[str, ...], Array]] = {"samples": (("chunk",), sizes)}
    if task.is_scalar:
        return variables | {"squared_error": (("chunk",), np.add.reduceat(scores, starts))}
    # reduceat on booleans would be a logical or.
    right = np.add.reduceat(scores.astype(np.int64), starts)
    return variables | {"right": (("chunk",), right), "confusion": (("target", "output"), confusion)}


def _require_fit(task: Task, sequence: int, outputs: int) -> None:
    """Raise ConfigError unless a network has as many outputs as the task needs for inputs of some length."""
    if outputs != task.outputs(sequence):
        raise ConfigError(
            f"the task {task.name} with {sequence} numbers per input needs a network with "
            f"{task.outputs(sequence)} outputs, found a network with {outputs}; pass another task or sequence"
        )
