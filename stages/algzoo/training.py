"""Training of AlgZoo networks by the zoo's recipe: new samples in every step, AdamW.

    mizarr train-zoo …    # the command; or, cached in a store:
    trained_rnn.on(task="2nd_argmax", hidden=4, sequence=3, seed=0)

The schedule is the zoo's (lr 0.04 / sqrt(H), weight decay 1e-3, batches of 1024, linear warm-up, exponential
decay to 1/100 at half time). Its 2^30 sequences take days on a CPU, so the default is 2^22, with proportional
warm-up. Small networks often end in local minima: the zoo kept the best of five seeds.

Border: settings in, weights out. Equal settings give equal weights on one machine with one thread.

Axes: as in networks.py; step (of the optimiser, at which the loss was recorded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...pipeline.ambient import plain_torch
from ...store.arrays import Array, as_count
from ...store.digest import LARGEST as LARGEST_INTEGER
from ...store.errors import ConfigError
from .files import write_tensors
from .networks import LARGEST, RnnShape, Shape, TransformerShape, labelled
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

__all__ = [
    "ZooTraining",
    "file_name",
    "save_trained",
    "train",
    "trained_rnn",
    "training_checkpoints",
    "weights_at",
]

WARM_UP = 2**14 / 2**20
"""Share of the training steps in which the learning rate rises, as in AlgZoo."""
NOTED = 64
"""Number of losses recorded per training, each the mean over 1/64 of the steps."""
RATE, DECAY, LEAST = 0.04, 1e-3, 0.01
"""Learning rate times sqrt(hidden size), weight decay, and the factor by which the learning rate decays, as
in AlgZoo."""


@dataclass(frozen=True)
class ZooTraining:
    """Settings of the training of one network.

    Raises:
        ConfigError: a size, count or seed is out of its range.
    """

    task: str
    """Name of the task."""
    hidden: int
    """Number of neurons of an RNN, or width of a transformer's residual stream."""
    sequence: int
    """Number of time steps per input."""
    seed: int = 0
    """Seed of initial weights and training inputs."""
    sequences: int = 2**22
    """Total number of training inputs."""
    batch: int = 1024
    """Number of inputs per optimiser step."""
    layers: int = 2
    """Number of layers, for a task that has a transformer."""
    heads: int = 1
    """Number of attention heads, for a task that has a transformer."""
    end_token: bool = False
    """Whether integer inputs end with a fixed value; see `samples.slices`."""
    checkpoints: tuple[int, ...] = ()
    """Numbers of training inputs after which the weights are kept; multiples of `batch`."""

    def __post_init__(self) -> None:
        zoo_task = task_named(self.task)
        for name, value, minimum in (
            ("hidden", self.hidden, 1),
            ("sequence", self.sequence, zoo_task.min_sequence + self.end_token),
            ("layers", self.layers, 1),
        ):
            if not minimum <= value <= LARGEST:
                raise ConfigError(
                    f"training a network for {self.task}: expected {name} from {minimum} to {LARGEST}, "
                    f"found {value}"
                )
        as_count(self.seed, "seed", least=0, most=LARGEST_INTEGER)
        if self.batch < 1 or self.sequences < 0:
            raise ConfigError(
                "expected batch of at least 1 and sequences of at least 0, found "
                f"batch={self.batch} and sequences={self.sequences}"
            )
        if self.heads < 1 or self.hidden % self.heads:
            raise ConfigError(
                f"expected heads to divide the hidden size {self.hidden}, found heads={self.heads}"
            )
        # A checkpoint within a batch would have no weights of its own; 0 are the initial weights.
        batch_ends = range(0, self.steps * self.batch + 1, self.batch)
        if invalid := [after for after in self.checkpoints if after not in batch_ends]:
            raise ConfigError(
                f"expected checkpoints at multiples of the batch of {self.batch} inputs, from 0 to "
                f"{batch_ends[-1]}, found {invalid[0]}"
            )
        if self.end_token and zoo_task.draws != "integers":
            raise ConfigError(
                f"end_token is for tasks on integers, found {self.task}, whose inputs are real numbers; "
                "leave it out"
            )

    @property
    def shape(self) -> Shape:
        """Network type and layer sizes of the network to train."""
        outputs = task_named(self.task).outputs(self.sequence)
        if task_named(self.task).draws == "normal":
            return RnnShape(self.hidden, outputs)
        return TransformerShape(self.hidden, outputs, self.layers, self.sequence, self.sequence, self.heads)

    @property
    def steps(self) -> int:
        """Number of optimiser steps: full batches only, so that a remainder of `sequences` is not drawn."""
        return self.sequences // self.batch


@plain_torch()
def train(
    settings: ZooTraining,
    advance: Callable[[int], None] = lambda steps: None,
    keep: Callable[[int, dict[str, Array]], None] = lambda sequences, tensors: None,
) -> tuple[dict[str, Array], Array]:
    """Train a network; if the settings imply no step, it keeps its initial weights.

    Arguments:
        settings: settings of the training.
        advance: called with the number of steps made since its last call.
        keep: called at each checkpoint with the number of inputs so far and the tensors.

    Returns:
        (name in a checkpoint -> tensor; mean losses, float [step], in nats for classes, or squared errors).
    """
    import torch

    task = task_named(settings.task)
    losses = np.full(NOTED, np.nan)
    # The caller's random state is restored afterwards; devices=[], as the training runs on the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        # After seeding: torch's modules draw the initial weights.
        network = _module(settings)
        n_steps = 0

        def keep_checkpoint() -> None:
            if n_steps * settings.batch in settings.checkpoints:
                keep(n_steps * settings.batch, _tensors(network))

        keep_checkpoint()
        rate = RATE / settings.hidden**0.5
        optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: _share_of_rate(step, settings.steps)
        )
        # Steps are spread over NOTED records as evenly as possible, for any number of steps.
        record_of_step = np.arange(settings.steps) * NOTED // max(settings.steps, 1)
        for record in range(NOTED):
            count = int((record_of_step == record).sum())
            sums = 0.0
            for _ in range(count):
                x = _random_batch(task, settings)
                loss = _loss(task, network(x), torch.from_numpy(np.asarray(task.targets(x.numpy()))))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                sums += loss.item()
                n_steps += 1
                keep_checkpoint()
            losses[record] = sums / count if count else np.nan
            advance(count)
    return _tensors(network), losses


@stage(
    version=1,
    inputs={},
    outputs={
        **{name: Output(dims, is_optional=True) for name, dims in RnnShape(1, 1).dims.values()},
        "loss": Output(("step",), "1", "mean loss: nats of a class, or squared error"),
    },
)
def trained_rnn(
    *, task: str, hidden: int, sequence: int, seed: int = 0, sequences: int = 2**22, batch: int = 1024
) -> xr.Dataset:
    """A trained RNN as labelled weights, and its losses.

    Arguments:
        task: name of the task.
        hidden: number of neurons of the RNN.
        sequence: number of time steps per input.
        seed: seed of initial weights and training inputs.
        sequences: total number of training inputs.
        batch: number of inputs per optimiser step.

    Raises:
        ConfigError: the task is on integers, which needs a transformer.
    """
    settings = ZooTraining(task, hidden, sequence, seed, sequences, batch)
    if not isinstance(settings.shape, RnnShape):
        raise ConfigError(
            f"an RNN is trained on real numbers, found the task {task}, whose inputs are integers; train a "
            "transformer with algzoo.training.train"
        )
    tensors, losses = train(settings)
    return labelled(tensors, settings.shape).assign(loss=("step", losses))


@stage(
    version=1,
    inputs={},
    outputs={
        name: Output(("checkpoint", *dims), is_optional=True) for name, dims in RnnShape(1, 1).dims.values()
    },
)
def training_checkpoints(
    *,
    task: str,
    hidden: int,
    sequence: int,
    checkpoints: tuple[int, ...],
    seed: int = 0,
    sequences: int = 2**22,
    batch: int = 1024,
) -> xr.Dataset:
    """Weights of an RNN at several points of one training, [checkpoint, …].

    Arguments:
        task: name of the task.
        hidden: number of neurons of the RNN.
        sequence: number of time steps per input.
        checkpoints: numbers of training inputs after which the weights are kept, multiples of `batch`.
        seed: seed of initial weights and training inputs.
        sequences: total number of training inputs.
        batch: number of inputs per optimiser step.

    Raises:
        ConfigError: there are no checkpoints, or the task is on integers, which needs a transformer.
    """
    import xarray as xr

    settings = ZooTraining(task, hidden, sequence, seed, sequences, batch, checkpoints=tuple(checkpoints))
    if not isinstance(settings.shape, RnnShape) or not checkpoints:
        raise ConfigError(
            "expected at least one checkpoint and a task on real numbers, which has an RNN, found "
            f"checkpoints={list(checkpoints)} and the task {task}"
        )
    # One training for all checkpoints: its schedule differs from that of a shorter training.
    by_sequences: dict[int, xr.Dataset] = {}

    def keep(after: int, tensors: dict[str, Array]) -> None:
        by_sequences[after] = labelled(tensors, settings.shape)

    train(settings, keep=keep)
    weights: xr.Dataset = xr.concat(list(by_sequences.values()), "checkpoint")
    return weights.assign_coords(checkpoint=list(by_sequences))


@stage(
    version=1,
    inputs={"trained": None},
    outputs={name: Output(dims, is_optional=True) for name, dims in RnnShape(1, 1).dims.values()},
)
def weights_at(trained: xr.Dataset, *, checkpoint: int) -> xr.Dataset:
    """The labelled weights of one checkpoint of a training.

    Arguments:
        trained: result of `training_checkpoints`.
        checkpoint: number of inputs after which the weights were kept.
    """
    return trained.sel(checkpoint=checkpoint, drop=True)


def file_name(settings: ZooTraining, ending: str = ".safetensors", trained: int | None = None) -> str:
    """File name in AlgZoo's convention: task, width, length, number of training inputs, seed.

    Arguments:
        settings: settings of the training.
        ending: ".safetensors" or ".pth".
        trained: number of training inputs so far, for a checkpoint; None for the end of training.
    """
    trained = settings.steps * settings.batch if trained is None else trained
    return f"{settings.task}_{settings.hidden}_{settings.sequence}_{trained}_{settings.seed}{ending}"


def save_trained(
    settings: ZooTraining, tensors: dict[str, Array], path: Path, trained: int | None = None
) -> Path:
    """Write the weights of a trained network; a `.safetensors` file also states task, length and seed.

    Arguments:
        settings: settings of the training.
        tensors: name in a checkpoint -> tensor.
        path: file to write, ending in ".safetensors" or ".pth".
        trained: number of training inputs so far, for a checkpoint; None for the end of training.

    Returns:
        `path`.
    """
    metadata: dict[str, str | int] = {
        "task": settings.task,
        "sequence": settings.sequence,
        "trained": settings.steps * settings.batch if trained is None else trained,
        "seed": settings.seed,
    }
    return write_tensors(path, tensors, metadata)


def _tensors(network: nn.Module) -> dict[str, Array]:
    """Name in a checkpoint -> copy of the network's current weights."""
    # Copied: the optimiser goes on changing the parameters in place.
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


def _module(settings: ZooTraining) -> nn.Module:
    """The network as a torch module; its state dict has the names of a checkpoint."""
    from torch import nn

    shape = settings.shape
    if isinstance(shape, RnnShape):

        class Rnn(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                # batch_first: inputs are [sample, time].
                self.rnn = nn.RNN(1, shape.hidden, nonlinearity="relu", bias=False, batch_first=True)
                self.linear = nn.Linear(shape.hidden, shape.outputs, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(self.rnn(x[..., None])[1][0])  # type: ignore[no-any-return]

        return Rnn()
    sizes = shape

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(sizes.inputs, sizes.hidden)
            self.pos_embed = nn.Embedding(sizes.sequence, sizes.hidden)
            self.attns = nn.ModuleList(
                nn.MultiheadAttention(sizes.hidden, sizes.heads, bias=False, batch_first=True)
                for _ in range(sizes.layers)
            )
            self.unembed = nn.Linear(sizes.hidden, sizes.outputs, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            stream = self.embed(x) + self.pos_embed.weight
            for attention in self.attns:
                stream = stream + attention(stream, stream, stream, need_weights=False)[0]
            return self.unembed(stream[:, -1])  # type: ignore[no-any-return]

    return Transformer()


def _share_of_rate(step: int, steps: int) -> float:
    """Factor of the learning rate at a step: linear warm-up times exponential decay to 1/100 at half time.

    Arguments:
        step: number of the step, from 0.
        steps: number of steps of the training.
    """
    warm_up_steps = max(1.0, WARM_UP * steps)
    # The decay is clipped at LEAST, so that the second half trains at a constant rate.
    return min(step / warm_up_steps, 1.0) * float(max(LEAST ** (2 * step / max(steps, 1)), LEAST))


def _random_batch(task: Task, settings: ZooTraining) -> Tensor:
    """A batch of random inputs [sample, time], drawn by torch's global generator, which `train` seeds."""
    import torch

    count, length = settings.batch, settings.sequence
    if task.draws == "normal":
        return torch.randn(count, length)
    integers = torch.randint(length - settings.end_token, (count, length - settings.end_token))
    if settings.end_token:
        return torch.cat([integers, torch.full((count, 1), length - 1)], dim=1)
    return integers


def _loss(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    """Mean loss over a batch: squared error of scalar answers, or cross-entropy of classes in nats.

    Arguments:
        task: the task.
        outputs: outputs of the network [sample, output].
        targets: correct answers [sample].
    """
    from torch.nn.functional import cross_entropy, mse_loss

    if task.is_scalar:
        return mse_loss(outputs[:, 0], targets.to(outputs.dtype))
    return cross_entropy(outputs, targets)
