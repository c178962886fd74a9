"""AlgZoo models: a network by name, with its tensors, task and identity, and passes with hook points.

    model = load_model("specimen-2nd-argmax-3")                  # or a file, .safetensors or .pth
    cache = model.forward(x, HookSpec().capture("rnn.hook_hidden.*"))
    cache["rnn.hook_hidden.2"]                                   # [batch, neuron]

A model is identified by its tensors: equal ones in either file format, or from a handcrafted builder, are one
model. The name locates the file, and gives the task where the tensors do not determine it. Passes are float64
by default, as some of these networks subtract large numbers: in float32 the handcrafted one for 3 numbers is
wrong on 0.3 of 1000 samples.

Border: joins files, shapes and passes; no store. Imports torch only to compute, or to read a `.pth`.

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
from .files import FORMATS, ZooMetadata, read_tensors
from .handcrafted import LENGTHS, handcrafted_2nd_argmax
from .networks import RnnShape, Shape, digest_of, labelled, parameters, shape_of, tensors_digest
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.spec import BoundSpec, HookSpec

__all__ = ["HANDCRAFTED", "SHIPPED", "AlgZooModel", "load_model"]

FOLDER = Path(__file__).parent / "specimen"
"""Folder of the networks that ship."""
SHIPPED = ("specimen-2nd-argmax-2", "specimen-2nd-argmax-3", "specimen-longest-cycle-4")
"""Trained networks that ship with mizarr."""
HANDCRAFTED = {f"handcrafted-2nd-argmax-{length}": length for length in LENGTHS}
"""Name of a handcrafted network (handcrafted.py) -> numbers per input."""


@dataclass(frozen=True, eq=False)
class AlgZooModel:
    """One network and its task."""

    name: str
    """Name or path from which it was loaded, outside of every key."""
    task: Task
    """The task that it solves."""
    sequence: int
    """Time steps per input."""
    tensors: Mapping[str, Array]
    """Weights, named as in a checkpoint."""
    shape: Shape
    """Network type (RNN or transformer) and layer sizes."""
    metadata: ZooMetadata
    """What its file says about its training."""
    files: PinnedFiles
    """Its file; no file for a handcrafted network."""

    def __post_init__(self) -> None:
        self._as_read  # noqa: B018 - digested before anybody can edit the tensors

    @property
    def title(self) -> str:
        """Name for titles: the file name without folder and ending."""
        return Path(self.name).stem if self.name.endswith(FORMATS) else self.name

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return parameters(self.shape)

    @property
    def is_rnn(self) -> bool:
        """Whether it is the RNN, not the transformer."""
        return isinstance(self.shape, RnnShape)

    def identity(self, dtype: str = "float64") -> ModelIdentity:
        """Identity of the network in the keys of its runs."""
        shape = self.shape
        # The name is left out: equal tensors are one model wherever they lie.
        return ModelIdentity(tensors_digest(self.tensors), digest_of(shape), shape.version, dtype, "explicit")

    @cached_property
    def weights(self) -> xr.Dataset:
        """Weights as labelled arrays (networks.py)."""
        return labelled(self.tensors, self.shape)

    def weights_node(self) -> SourceNode:
        """Node of a workflow that stores the weights once per network."""
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
        """A HookSpec bound to the hook points of the network.

        Arguments:
            hooks: captures and interventions; None for none.
            sequence: time steps per input.
        """
        from ..forward.hooks.spec import HookSpec

        return (hooks or HookSpec()).bind(self.shape.hook_points(sequence), self.title)

    @plain_torch()
    def outputs(self, x: Any, dtype: str = "float64") -> Array:
        """Outputs [sample, output] of many samples.

        Arguments:
            x: inputs [sample, time].
            dtype: "float32" or "float64".
        """
        import torch

        from .forward import network_of

        outputs: Array = (
            network_of(self.tensors, self.shape, dtype).outputs(torch.as_tensor(np.asarray(x))).numpy()
        )
        return outputs

    @plain_torch()
    def forward(self, x: Any, hooks: HookSpec | None = None, dtype: str = "float64") -> HookCache:
        """One pass over inputs, with captures and interventions.

        Arguments:
            x: inputs [sample, time].
            hooks: captures and interventions; None for none.
            dtype: "float32" or "float64".

        Returns:
            The captures; `logits` are the outputs.

        Raises:
            ShapeError: for inputs of other dims or sizes.
            HookPointNotFound, InterventionError: for a HookSpec that does not fit the network.
        """
        import torch

        from ..forward.hooks.cache import HookCache
        from ..forward.hooks.taps import RunTaps
        from .forward import network_of

        inputs = torch.as_tensor(np.asarray(x))
        if inputs.ndim != 2 or 0 in inputs.shape:
            raise ShapeError(f"expected inputs [sample, time], found shape {list(inputs.shape)}")
        n_samples, sequence = inputs.shape
        spec = self.bind(hooks, sequence)
        sizes = self.shape.axis_sizes(sequence) | {"batch": n_samples}
        for point, change in spec.interventions:
            change.check(point, sizes)
        captured: dict[Any, torch.Tensor] = {}
        # Cloned, because the RNN overwrites its buffers in the next time step.
        taps = RunTaps(spec, lambda capture, value: captured.update({capture: value.clone()}))
        network = network_of(self.tensors, self.shape, dtype)
        outputs = network.run(inputs.to(network.dtype) if self.is_rnn else inputs, taps)
        return HookCache(inputs.tolist(), outputs, captured)


def load_model(
    name: str | Path, *, task: str | None = None, sequence: int | None = None, heads: int = 1
) -> AlgZooModel:
    """Load a network: a file (`.safetensors`, `.pth`), one that ships, or a handcrafted one.

    Arguments:
        name: path or name.
        task: name of the task; needed where the file has none.
        sequence: time steps; needed where neither tensors nor file give them, else checked against these.
        heads: attention heads of a transformer, which no file contains.

    Raises:
        ModelNotFound: for a missing file.
        WeightsError: for tensors of no AlgZoo network, or a file name that contradicts them.
        ConfigError: for a task that is unknown, missing or does not fit the tensors.
    """
    text = str(name)
    files = PinnedFiles(f"the network {text}", "its file was replaced meanwhile; start again with it")
    if text in HANDCRAFTED:
        tensors, metadata = (
            handcrafted_2nd_argmax(HANDCRAFTED[text]),
            ZooMetadata("2nd_argmax", sequence=HANDCRAFTED[text]),
        )
    else:
        tensors, metadata = read_tensors(files.note(_path_of(text)))
    shape = shape_of(tensors, text, heads)
    if heads != 1 and isinstance(shape, RnnShape):
        raise ConfigError(f"{text}: expected no heads of an RNN, found heads={heads}; leave it out")
    zoo_task = _task_of(text, task or metadata.task)
    if metadata.hidden is not None and metadata.hidden != shape.hidden:
        raise WeightsError(
            f"{text}: expected tensors of width {metadata.hidden}, as in the file name, found width "
            f"{shape.hidden}; is it the right file?"
        )
    length = _sequence_of(text, zoo_task, shape, sequence, metadata.sequence)
    return AlgZooModel(text, zoo_task, length, tensors, shape, metadata, files)


def _path_of(name: str) -> Path:
    """File of a shipped network, or a path; ModelNotFound for a name that is neither."""
    if name in SHIPPED:
        return FOLDER / f"{name}.safetensors"
    path = Path(name).expanduser()
    # A missing file with a known ending goes on, so that reading it names the path in the error.
    if path.exists() or path.suffix in FORMATS:
        return path
    near = nearest(name, (*SHIPPED, *HANDCRAFTED))
    hint = (
        f"; did you mean {near!r}?" if near else f"; {', '.join((*SHIPPED, *HANDCRAFTED))} ship with mizarr"
    )
    raise ModelNotFound(f"expected a file of AlgZoo ({' or '.join(FORMATS)}), found none at {name!r}{hint}")


def _task_of(where: str, name: str | None) -> Task:
    """The named task; ConfigError without a name."""
    if name is None:
        raise ConfigError(
            f"{where}: expected the task in the file name, found none; name it, such as task=2nd_argmax"
        )
    return task_named(name)


def _sequence_of(where: str, task: Task, shape: Shape, requested: int | None, in_name: int | None) -> int:
    """Time steps per input: from the tensors, else as requested, else from the file name."""
    if isinstance(shape, RnnShape):
        if task.draws == "integers":
            raise ConfigError(
                f"{where}: expected a transformer for {task.name}, found an RNN; name another task"
            )
        # A classifier has one output per time step; a scalar network fits any length.
        length = (requested or in_name) if task.is_scalar else shape.outputs
    else:
        if task.draws != "integers":
            raise ConfigError(
                f"{where}: expected an RNN for {task.name}, whose inputs are numbers, found a transformer, "
                "which reads integers; name another task"
            )
        length = shape.sequence
    if length is None:
        raise ConfigError(
            f"{where}: expected the sequence length in the file name, found none; name it, such as sequence=3"
        )
    if length < task.min_sequence or shape.outputs != task.outputs(length):
        raise ConfigError(
            f"{where}: expected {task.outputs(length)} outputs for {task.name} of {length} numbers, found "
            f"{shape.outputs}; say another task or sequence"
        )
    # An integer task has values 0..n-1, each of which needs a row of the embedding.
    if not isinstance(shape, RnnShape) and shape.inputs < length:
        raise ConfigError(
            f"{where}: expected an embedding of {length} integers for {task.name}, found {shape.inputs}"
        )
    for stated, origin in ((requested, "asked for"), (in_name, "in the name")):
        if stated is not None and stated != length:
            raise ConfigError(
                f"{where}: expected sequences of {length}, as the tensors say, found {stated} {origin}"
            )
    return length
