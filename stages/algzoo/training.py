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
"""Share of the steps with rising learning rate, as in the zoo."""
NOTED = 64
"""Number of mean losses recorded per training."""
RATE, DECAY, LEAST = 0.04, 1e-3, 0.01
"""Learning rate times sqrt(H), weight decay, and final share of the learning rate, as in the zoo."""


@dataclass(frozen=True)
class ZooTraining:
    """Settings of one training.

    Raises:
        ConfigError: for sizes that make no network.
    """

    task: str
    """Name of the task."""
    hidden: int
    """Neurons of the RNN, or width of the transformer."""
    sequence: int
    """Time steps per input."""
    seed: int = 0
    """Seed of initial weights and samples."""
    sequences: int = 2**22
    """Total number of training inputs."""
    batch: int = 1024
    """Inputs per step."""
    layers: int = 2
    """Layers of a transformer."""
    heads: int = 1
    """Attention heads of a transformer."""
    end_token: bool = False
    """Whether integer inputs end with a fixed token; see `samples.slices`."""
    checkpoints: tuple[int, ...] = ()
    """Numbers of inputs after which weights are kept, multiples of the batch."""

    def __post_init__(self) -> None:
        zoo_task = task_named(self.task)
        for name, value, minimum in (
            ("hidden", self.hidden, 1),
            ("sequence", self.sequence, zoo_task.min_sequence + self.end_token),
            ("layers", self.layers, 1),
        ):
            if not minimum <= value <= LARGEST:
                raise ConfigError(f"expected {name} from {minimum} to {LARGEST}, found {value}")
        as_count(self.seed, "seed", least=0, most=LARGEST_INTEGER)
        if self.batch < 1 or self.sequences < 0:
            raise ConfigError(
                f"expected a batch of at least 1, found {self.batch} of {self.sequences} sequences"
            )
        if self.heads < 1 or self.hidden % self.heads:
            raise ConfigError(f"expected heads that divide the width {self.hidden}, found {self.heads}")
        # A checkpoint within a batch would have no weights of its own; 0 are the initial weights.
        batch_ends = range(0, self.steps * self.batch + 1, self.batch)
        if invalid := [after for after in self.checkpoints if after not in batch_ends]:
            raise ConfigError(
                f"expected checkpoints after whole batches of {self.batch}, up to {batch_ends[-1]}, found "
                f"{invalid[0]}"
            )
        if self.end_token and zoo_task.draws != "integers":
            raise ConfigError(f"expected a task of integers with an end token, found {self.task}")

    @property
    def shape(self) -> Shape:
        """Network type and layer sizes."""
        outputs = task_named(self.task).outputs(self.sequence)
        if task_named(self.task).draws == "normal":
            return RnnShape(self.hidden, outputs)
        return TransformerShape(self.hidden, outputs, self.layers, self.sequence, self.sequence, self.heads)

    @property
    def steps(self) -> int:
        """Optimiser steps, each of a full batch; inputs that do not fill one are not drawn."""
        return self.sequences // self.batch


@plain_torch()
def train(
    settings: ZooTraining,
    advance: Callable[[int], None] = lambda steps: None,
    keep: Callable[[int, dict[str, Array]], None] = lambda sequences, tensors: None,
) -> tuple[dict[str, Array], Array]:
    """Train a network.

    Without steps the network has its initial weights.

    Arguments:
        settings: of the training.
        advance: called with the number of steps made since the last call.
        keep: called at each checkpoint with the number of inputs so far and the tensors.

    Returns:
        Tensors named as in a checkpoint, and mean losses [step]: nats for classes, or squared error.
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
                x = _drawn(task, settings)
                loss = _loss(task, network(x), _targets(task, x))
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
        hidden: neurons of the RNN.
        sequence: time steps per input.
        seed: seed of initial weights and samples.
        sequences: total number of training inputs.
        batch: inputs per step.

    Raises:
        ConfigError: for an integer task, which needs a transformer.
    """
    settings = ZooTraining(task, hidden, sequence, seed, sequences, batch)
    if not isinstance(settings.shape, RnnShape):
        raise ConfigError(
            f"expected a task of numbers for an RNN, found {task}; use train() for a transformer"
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
        hidden: neurons of the RNN.
        sequence: time steps per input.
        checkpoints: numbers of inputs after which weights are kept, multiples of the batch.
        seed: seed of initial weights and samples.
        sequences: total number of training inputs.
        batch: inputs per step.

    Raises:
        ConfigError: without checkpoints, or for an integer task.
    """
    import xarray as xr

    settings = ZooTraining(task, hidden, sequence, seed, sequences, batch, checkpoints=tuple(checkpoints))
    if not isinstance(settings.shape, RnnShape) or not checkpoints:
        raise ConfigError(f"expected checkpoints of an RNN, found {list(checkpoints)} of {task}")
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
    """Labelled weights at one checkpoint.

    Arguments:
        trained: result of `training_checkpoints`.
        checkpoint: number of inputs after which the weights were kept.
    """
    return trained.sel(checkpoint=checkpoint, drop=True)


def file_name(settings: ZooTraining, ending: str = ".safetensors", trained: int | None = None) -> str:
    """File name in the zoo's convention: task, width, length, training inputs, seed.

    Arguments:
        settings: of the training.
        ending: ".safetensors" or ".pth".
        trained: inputs so far, for a checkpoint; None for the end of training.
    """
    trained = settings.steps * settings.batch if trained is None else trained
    return f"{settings.task}_{settings.hidden}_{settings.sequence}_{trained}_{settings.seed}{ending}"


def save_trained(
    settings: ZooTraining, tensors: dict[str, Array], path: Path, trained: int | None = None
) -> Path:
    """Write a trained network; a `.safetensors` also has the settings of its name as metadata.

    Arguments:
        settings: of the training.
        tensors: named as in a checkpoint.
        path: file to write.
        trained: inputs so far, for a checkpoint; None for the end of training.
    """
    metadata: dict[str, str | int] = {
        "task": settings.task,
        "sequence": settings.sequence,
        "trained": settings.steps * settings.batch if trained is None else trained,
        "seed": settings.seed,
    }
    return write_tensors(path, tensors, metadata)


def _tensors(network: nn.Module) -> dict[str, Array]:
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
    """Linear warm-up times exponential decay, which reaches 1/100 after half of the steps."""
    warm_up_steps = max(1.0, WARM_UP * steps)
    # The decay is clipped at LEAST, so that the second half trains at a constant rate.
    return min(step / warm_up_steps, 1.0) * float(max(LEAST ** (2 * step / max(steps, 1)), LEAST))


def _drawn(task: Task, settings: ZooTraining) -> Tensor:
    """One batch of inputs [sample, time]."""
    import torch

    # By torch's generator, whose state follows from the seed; samples.py draws with numpy, for any block
    # alone.
    count, length = settings.batch, settings.sequence
    if task.draws == "normal":
        return torch.randn(count, length)
    integers = torch.randint(length - settings.end_token, (count, length - settings.end_token))
    if settings.end_token:
        return torch.cat([integers, torch.full((count, 1), length - 1)], dim=1)
    return integers


def _targets(task: Task, x: Tensor) -> Tensor:
    import torch

    return torch.from_numpy(np.asarray(task.targets(x.numpy())))


def _loss(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    """Squared error of a scalar answer, cross-entropy in nats of a class; mean over the batch."""
    from torch.nn.functional import cross_entropy, mse_loss

    return (
        mse_loss(outputs[:, 0], targets.to(outputs.dtype))
        if task.is_scalar
        else cross_entropy(outputs, targets)
    )
