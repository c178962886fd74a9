"""A network of AlgZoo by name: its tensors, task and identity, and passes with hook points.

    model = load_model("specimen-2nd-argmax-3")                  # or a file, .safetensors or .pth
    cache = model.forward(x, HookSpec().capture("rnn.hook_hidden.*"))
    cache["rnn.hook_hidden.2"]                                   # [batch, neuron]

Identity is content: the same tensors in either format, or written by a function, are one model. A name
decides nothing but where to look, and what the task is where tensors cannot say it. Passes are float64 unless
told: some of these networks take differences of large numbers (the written one of 3 numbers is off by 0.3 of
1000 in float32).

Border: joins files, shapes and passes; knows no store. Never imports torch but to compute, or to read a
`.pth`.

Axes: as in networks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import SourceNode
from ...pipeline.ambient import plain_torch
from ...pipeline.pinned import PinnedFiles
from ...store.arrays import Array
from ...store.errors import ConfigError, ModelNotFound, ShapeError, SourceChanged, WeightsError, nearest
from ...store.keys import ModelIdentity
from .files import FORMATS, Said, read_tensors
from .handcrafted import LENGTHS, handcrafted_2nd_argmax
from .networks import RnnShape, Shape, digest_of, labelled, parameters, shape_of, tensors_digest
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.spec import BoundSpec, HookSpec

__all__ = ["HANDCRAFTED", "SHIPPED", "AlgZooModel", "load_model"]

FOLDER = Path(__file__).parent / "specimen"
SHIPPED = ("specimen-2nd-argmax-2", "specimen-2nd-argmax-3", "specimen-longest-cycle-4")
"""Trained networks that ship with mizarr."""
HANDCRAFTED = {f"handcrafted-2nd-argmax-{length}": length for length in LENGTHS}
"""Networks that were written (handcrafted.py), and the numbers each reads."""


@dataclass(frozen=True, eq=False)
class AlgZooModel:
    """One network and its task.

    name: as it was asked for; part of no key. sequence: time steps it was made for. said: what its file says
    of its training.
    """

    name: str
    task: Task
    sequence: int
    tensors: Mapping[str, Array]
    shape: Shape
    said: Said
    files: PinnedFiles
    """Its file, if it lies in one."""

    def __post_init__(self) -> None:
        self._as_read  # noqa: B018 - before anybody can edit them

    @property
    def title(self) -> str:
        """For titles: the name of the file without folder and ending."""
        return Path(self.name).stem if self.name.endswith(FORMATS) else self.name

    @property
    def parameters(self) -> int:
        """Numbers it is made of."""
        return parameters(self.shape)

    @property
    def is_rnn(self) -> bool:
        """Whether it is the RNN; else it is the transformer."""
        return isinstance(self.shape, RnnShape)

    def identity(self, dtype: str = "float64") -> ModelIdentity:
        """What passes of it are keyed by."""
        shape = self.shape
        return ModelIdentity(tensors_digest(self.tensors), digest_of(shape), shape.version, dtype, "explicit")

    @cached_property
    def weights(self) -> xr.Dataset:
        """Its weights as labelled arrays (networks.py)."""
        return labelled(self.tensors, self.shape)

    def weights_node(self) -> SourceNode:
        """The weights in a workflow's graph; stored once per network."""
        identity = self.identity()
        params = {"weights": identity.weights, "config": identity.config}
        return SourceNode("algzoo_weights", 1, params, lambda: self.weights, pinned=(self,))

    @cached_property
    def _as_read(self) -> str:
        return tensors_digest(self.tensors)

    def check(self) -> None:
        """Raise SourceChanged unless its file, and its tensors in memory, are as they were read."""
        self.files.check()
        if tensors_digest(self.tensors) != self._as_read:
            raise SourceChanged(
                f"expected the tensors of {self.name} as they were read, found them edited in memory; save "
                "the edited network to a file of its own, and load that"
            )

    def bind(self, hooks: HookSpec | None, sequence: int) -> BoundSpec:
        """A spec over the hook points there are for sequences of this length."""
        from ..forward.hooks.spec import HookSpec

        return (hooks or HookSpec()).bind(self.shape.hook_points(sequence), self.title)

    @plain_torch()
    def outputs(self, x: Any, dtype: str = "float64") -> Array:
        """What it says [sample, output] for inputs [sample, time]."""
        import torch

        from .forward import network_of

        found: Array = (
            network_of(self.tensors, self.shape, dtype).outputs(torch.as_tensor(np.asarray(x))).numpy()
        )
        return found

    @plain_torch()
    def forward(self, x: Any, hooks: HookSpec | None = None, dtype: str = "float64") -> HookCache:
        """One pass over inputs [sample, time], with captures and interventions at its hook points.

        `cache.logits` is what it says, [batch, output]. Raises ShapeError for other inputs, and as
        `HookSpec.bind` and the interventions do.
        """
        import torch

        from ..forward.hooks.cache import HookCache
        from ..forward.hooks.taps import RunTaps
        from .forward import network_of

        given = torch.as_tensor(np.asarray(x))
        if given.ndim != 2 or 0 in given.shape:
            raise ShapeError(f"expected inputs [sample, time], found shape {list(given.shape)}")
        many, sequence = given.shape
        spec = self.bind(hooks, sequence)
        sizes = self.shape.axis_sizes(sequence) | {"batch": many}
        for point, change in spec.interventions:
            change.check(point, sizes)
        captured: dict[Any, torch.Tensor] = {}
        taps = RunTaps(spec, lambda capture, value: captured.update({capture: value.clone()}))
        network = network_of(self.tensors, self.shape, dtype)
        said = network.run(given.to(network.dtype) if self.is_rnn else given, taps)
        return HookCache(given.tolist(), said, captured)


def load_model(
    name: str | Path, *, task: str | None = None, sequence: int | None = None, heads: int = 1
) -> AlgZooModel:
    """A network of AlgZoo: a file (`.safetensors`, `.pth`), one that ships, or one that was written.

    task, sequence: where neither tensors nor file name say them, or to be checked against what they say.
    heads: of a transformer, which no file tells. Raises ModelNotFound, WeightsError, and ConfigError for a
    task that is not known, not told, or not one for these tensors.
    """
    text = str(name)
    files = PinnedFiles(f"the network {text}", "its file was replaced meanwhile; start again with it")
    if text in HANDCRAFTED:
        tensors, said = (
            handcrafted_2nd_argmax(HANDCRAFTED[text]),
            Said("2nd_argmax", sequence=HANDCRAFTED[text]),
        )
    else:
        tensors, said = read_tensors(files.note(_path_of(text)))
    shape = shape_of(tensors, text, heads)
    if heads != 1 and isinstance(shape, RnnShape):
        raise ConfigError(f"{text}: expected no heads of an RNN, found heads={heads}; leave it out")
    chosen = _task_of(text, task or said.task)
    if said.hidden is not None and said.hidden != shape.hidden:
        raise WeightsError(
            f"{text}: expected {said.hidden} wide, as the name says, found tensors {shape.hidden} wide; is "
            "it the right file?"
        )
    length = _sequence_of(text, chosen, shape, sequence, said.sequence)
    return AlgZooModel(text, chosen, length, tensors, shape, said, files)


def _path_of(name: str) -> Path:
    if name in SHIPPED:
        return FOLDER / f"{name}.safetensors"
    path = Path(name).expanduser()
    if path.exists() or path.suffix in FORMATS:
        return path
    near = nearest(name, (*SHIPPED, *HANDCRAFTED))
    hint = (
        f"; did you mean {near!r}?" if near else f"; {', '.join((*SHIPPED, *HANDCRAFTED))} ship with mizarr"
    )
    raise ModelNotFound(f"expected a file of AlgZoo ({' or '.join(FORMATS)}), found none at {name!r}{hint}")


def _task_of(where: str, name: str | None) -> Task:
    if name is None:
        raise ConfigError(
            f"{where}: expected the task in the name of the file, found none there; say it: task=2nd_argmax"
        )
    return task_named(name)


def _sequence_of(where: str, task: Task, shape: Shape, asked: int | None, named: int | None) -> int:
    """How long sequences are: by the tensors where they say it, else by who asks, else by the name."""
    if isinstance(shape, RnnShape):
        if task.draws == "integers":
            raise ConfigError(
                f"{where}: expected a transformer for {task.name}, found an RNN; name another task"
            )
        length = (asked or named) if task.is_scalar else shape.outputs
    else:
        if task.draws != "integers":
            raise ConfigError(
                f"{where}: expected an RNN for {task.name}, whose inputs are numbers, found a transformer, "
                "which reads integers; name another task"
            )
        length = shape.sequence
    if length is None:
        raise ConfigError(
            f"{where}: expected how long sequences are in the name of the file, found nothing; say it: "
            "sequence=3"
        )
    if length < task.least or shape.outputs != task.outputs(length):
        raise ConfigError(
            f"{where}: expected {task.outputs(length)} outputs for {task.name} of {length} numbers, found "
            f"{shape.outputs}; say another task or sequence"
        )
    if not isinstance(shape, RnnShape) and shape.inputs < length:
        raise ConfigError(
            f"{where}: expected an embedding of {length} integers for {task.name}, found {shape.inputs}"
        )
    for other, who in ((asked, "asked for"), (named, "in the name")):
        if other is not None and other != length:
            raise ConfigError(
                f"{where}: expected sequences of {length}, as the tensors say, found {other} {who}"
            )
    return length
