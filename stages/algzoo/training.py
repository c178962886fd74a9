"""Training of networks of AlgZoo, as the zoo's were: fresh samples in every step, AdamW, a seed.

    mizarr train-zoo …    # the command; or, cached in a store:
    trained_rnn.on(task="2nd_argmax", hidden=4, sequence=3, seed=0)

The schedule is the zoo's (lr 0.04 / sqrt(H), weight decay 1e-3, batches of 1024, linear warm-up, exponential
decay to a hundredth at half time); its 2^30 sequences are days on a CPU, so that defaults here are 2^22, with
a warm-up in proportion. Tiny networks end in local minima as often as not: the zoo kept the best of five
seeds.

Border: settings in, weights out. The same settings give the same weights on one machine with one thread.

Axes: as in networks.py; step (of the optimiser, where the loss was noted).
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
"""Share of the zoo's steps in which its rate rises."""
NOTED = 64
"""How often the loss is noted in the course of a training."""
RATE, DECAY, LEAST = 0.04, 1e-3, 0.01


@dataclass(frozen=True)
class ZooTraining:
    """One training.

    sequences: drawn in all. batch: drawn in a step. layers, heads: of a transformer. end_token: of integers,
    see samples.py. checkpoints: sequences after which the weights are kept, too, whole batches. Raises
    ConfigError for sizes that make no network.
    """

    task: str
    hidden: int
    sequence: int
    seed: int = 0
    sequences: int = 2**22
    batch: int = 1024
    layers: int = 2
    heads: int = 1
    end_token: bool = False
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        chosen = task_named(self.task)
        for name, value, least in (
            ("hidden", self.hidden, 1),
            ("sequence", self.sequence, chosen.least + self.end_token),
            ("layers", self.layers, 1),
        ):
            if not least <= value <= LARGEST:
                raise ConfigError(f"expected {name} from {least} to {LARGEST}, found {value}")
        as_count(self.seed, "seed", least=0, most=LARGEST_INTEGER)
        if self.batch < 1 or self.sequences < 0:
            raise ConfigError(
                f"expected a batch of at least 1, found {self.batch} of {self.sequences} sequences"
            )
        if self.heads < 1 or self.hidden % self.heads:
            raise ConfigError(f"expected heads that divide the width {self.hidden}, found {self.heads}")
        whole = range(0, self.steps * self.batch + 1, self.batch)
        if wrong := [after for after in self.checkpoints if after not in whole]:
            raise ConfigError(
                f"expected checkpoints after whole batches of {self.batch}, up to {whole[-1]}, found "
                f"{wrong[0]}"
            )
        if self.end_token and chosen.draws != "integers":
            raise ConfigError(f"expected a task of integers with an end token, found {self.task}")

    @property
    def shape(self) -> Shape:
        """Of the network that is trained."""
        outputs = task_named(self.task).outputs(self.sequence)
        if task_named(self.task).draws == "normal":
            return RnnShape(self.hidden, outputs)
        return TransformerShape(self.hidden, outputs, self.layers, self.sequence, self.sequence, self.heads)

    @property
    def steps(self) -> int:
        """Steps of the optimiser, of a whole batch each: sequences that fill none are not drawn."""
        return self.sequences // self.batch


@plain_torch()
def train(
    settings: ZooTraining,
    advance: Callable[[int], None] = lambda steps: None,
    keep: Callable[[int, dict[str, Array]], None] = lambda sequences, tensors: None,
) -> tuple[dict[str, Array], Array]:
    """Tensors of a trained network, and its mean losses [step]: nats of a class, or squared error.

    advance: told how many steps were made. keep: given the tensors at each of the checkpoints, and after how
    many sequences. Without a step the network is the drawn one.
    """
    import torch

    task = task_named(settings.task)
    losses = np.full(NOTED, np.nan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = _module(settings)
        made = 0

        def reached() -> None:
            if made * settings.batch in settings.checkpoints:
                keep(made * settings.batch, _tensors(network))

        reached()
        rate = RATE / settings.hidden**0.5
        optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: _share_of_rate(step, settings.steps)
        )
        places = np.arange(settings.steps) * NOTED // max(settings.steps, 1)
        for place in range(NOTED):
            many = int((places == place).sum())
            sums = 0.0
            for _ in range(many):
                x = _drawn(task, settings)
                loss = _loss(task, network(x), _targets(task, x))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                sums += loss.item()
                made += 1
                reached()
            losses[place] = sums / many if many else np.nan
            advance(many)
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
    """A trained RNN as labelled weights, and its losses; see `ZooTraining`."""
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
    """Weights of an RNN on its way, [checkpoint, …]; one training, see `ZooTraining`. Raises ConfigError for
    no checkpoints."""
    import xarray as xr

    settings = ZooTraining(task, hidden, sequence, seed, sequences, batch, checkpoints=tuple(checkpoints))
    if not isinstance(settings.shape, RnnShape) or not checkpoints:
        raise ConfigError(f"expected checkpoints of an RNN, found {list(checkpoints)} of {task}")
    kept: dict[int, xr.Dataset] = {}

    def keep(after: int, tensors: dict[str, Array]) -> None:
        kept[after] = labelled(tensors, settings.shape)

    train(settings, keep=keep)
    found: xr.Dataset = xr.concat(list(kept.values()), "checkpoint")
    return found.assign_coords(checkpoint=list(kept))


@stage(
    version=1,
    inputs={"trained": None},
    outputs={name: Output(dims, is_optional=True) for name, dims in RnnShape(1, 1).dims.values()},
)
def weights_at(trained: xr.Dataset, *, checkpoint: int) -> xr.Dataset:
    """One of the checkpoints of `training_checkpoints`, as labelled weights."""
    return trained.sel(checkpoint=checkpoint, drop=True)


def file_name(settings: ZooTraining, ending: str = ".safetensors", trained: int | None = None) -> str:
    """As the zoo names its files: task, width, length, sequences of training, seed. trained: of a
    checkpoint."""
    trained = settings.steps * settings.batch if trained is None else trained
    return f"{settings.task}_{settings.hidden}_{settings.sequence}_{trained}_{settings.seed}{ending}"


def save_trained(
    settings: ZooTraining, tensors: dict[str, Array], path: Path, trained: int | None = None
) -> Path:
    """Write a trained network; a `.safetensors` says of itself what its name says. trained: of a
    checkpoint."""
    said: dict[str, str | int] = {
        "task": settings.task,
        "sequence": settings.sequence,
        "trained": settings.steps * settings.batch if trained is None else trained,
        "seed": settings.seed,
    }
    return write_tensors(path, tensors, said)


def _tensors(network: nn.Module) -> dict[str, Array]:
    return {name: held.detach().numpy().copy() for name, held in network.state_dict().items()}


def _module(settings: ZooTraining) -> nn.Module:
    """The network as torch trains it; its state dict has the names of a checkpoint."""
    from torch import nn

    shape = settings.shape
    if isinstance(shape, RnnShape):

        class Rnn(nn.Module):
            def __init__(self) -> None:
                super().__init__()
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
    """Linear warm-up times exponential decay, which ends at a hundredth when half of the steps are made."""
    warm = max(1.0, WARM_UP * steps)
    return min(step / warm, 1.0) * float(max(LEAST ** (2 * step / max(steps, 1)), LEAST))


def _drawn(task: Task, settings: ZooTraining) -> Tensor:
    import torch

    many, length = settings.batch, settings.sequence
    if task.draws == "normal":
        return torch.randn(many, length)
    free = torch.randint(length - settings.end_token, (many, length - settings.end_token))
    if settings.end_token:
        return torch.cat([free, torch.full((many, 1), length - 1)], dim=1)
    return free


def _targets(task: Task, x: Tensor) -> Tensor:
    import torch

    return torch.from_numpy(np.asarray(task.targets(x.numpy())))


def _loss(task: Task, said: Tensor, targets: Tensor) -> Any:
    from torch.nn.functional import cross_entropy, mse_loss

    return mse_loss(said[:, 0], targets.to(said.dtype)) if task.is_scalar else cross_entropy(said, targets)
