"""AlgZoo models: a network with its tensors, task and identity, and forward passes with hook points.

    model = load_model("specimen-2nd-argmax-3")                  # or a file, .safetensors or .pth
    cache = model.forward(x, HookSpec().capture("rnn.hook_hidden.*"))
    cache["rnn.hook_hidden.2"]                                   # [batch, neuron]

A model is identified by its tensors: equal tensors are the same model, whichever file format or builder they
come from. The name locates the file, and gives the task where the tensors do not determine it. Passes are
float64 by default, as some of these networks subtract large numbers: in float32 the handcrafted network for 3
numbers is wrong on 0.3 of 1000 samples.

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
    """A network of AlgZoo with the task that it was trained or built for."""

    name: str
    """Name or path of the loaded network; excluded from keys."""
    task: Task
    """The task that the network solves."""
    sequence: int
    """Number of time steps per input."""
    tensors: Mapping[str, Array]
    """Name in a checkpoint -> weights."""
    shape: Shape
    """Network type (RNN or transformer) and layer sizes."""
    metadata: ZooMetadata
    """What the file of the network says about its training."""
    files: PinnedFiles
    """The file of the network, which must not change; none for a handcrafted network."""

    def __post_init__(self) -> None:
        self._as_read  # noqa: B018 - digested before anybody can edit the tensors

    @property
    def title(self) -> str:
        """Name of the network in titles: the file name without folder and ending."""
        return Path(self.name).stem if self.name.endswith(FORMATS) else self.name

    @property
    def parameters(self) -> int:
        """Number of parameters of the network."""
        return parameters(self.shape)

    @property
    def is_rnn(self) -> bool:
        """Whether the network is an RNN; else it is a transformer."""
        return isinstance(self.shape, RnnShape)

    def identity(self, dtype: str = "float64") -> ModelIdentity:
        """Identity of the network in the keys of its runs; `dtype` is that of the forward pass."""
        shape = self.shape
        # The name is left out: equal tensors are one model wherever they lie.
        return ModelIdentity(tensors_digest(self.tensors), digest_of(shape), shape.version, dtype, "explicit")

    @cached_property
    def weights(self) -> xr.Dataset:
        """Weights as labelled arrays, the input of analysis stages."""
        return labelled(self.tensors, self.shape)

    def weights_node(self) -> SourceNode:
        """Node of a computation graph that provides the labelled weights, stored once per network."""
        identity = self.identity()
        params = {"weights": identity.weights, "config": identity.config}
        return SourceNode("algzoo_weights", 1, params, lambda: self.weights, pinned=(self,))

    @cached_property
    def _as_read(self) -> str:
        """Digest of the tensors at the first access, when they had just been read."""
        return tensors_digest(self.tensors)

    def check(self) -> None:
        """Raise SourceChanged if the network's file, or its tensors in memory, changed since it was
        loaded."""
        self.files.check()
        if tensors_digest(self.tensors) != self._as_read:
            raise SourceChanged(
                f"the tensors of {self.name} were edited in memory after they were read, so that stored "
                "results would not belong to its file; save the edited network to another file, and load "
                "that file"
            )

    def bind(self, hooks: HookSpec | None, sequence: int) -> BoundSpec:
        """Bind captures and interventions to the hook points of the network.

        Arguments:
            hooks: captures and interventions; None for none.
            sequence: number of time steps per input.
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
        """Forward pass over inputs, with captures and interventions.

        Arguments:
            x: inputs [sample, time].
            hooks: captures and interventions; None for none.
            dtype: dtype of the pass, "float32" or "float64".

        Returns:
            The captured activations by hook point; its `logits` are the outputs of the network.

        Raises:
            ShapeError: the inputs have other dims or sizes.
            HookPointNotFound, InterventionError: `hooks` does not fit the network.
        """
        import torch

        from ..forward.hooks.cache import HookCache
        from ..forward.hooks.taps import RunTaps
        from .forward import network_of

        inputs = torch.as_tensor(np.asarray(x))
        if inputs.ndim != 2 or 0 in inputs.shape:
            raise ShapeError(
                f"expected inputs of shape [sample, time], found shape {list(inputs.shape)}; pass one row "
                "per sample"
            )
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
    """Load a network from a file, or one that ships with mizarr.

    Arguments:
        name: path of a `.safetensors` or `.pth` file, or a name of `SHIPPED` or `HANDCRAFTED`.
        task: name of the task; needed if the file does not name it.
        sequence: number of time steps per input; needed if neither tensors nor file determine it, else it
            must agree with them.
        heads: number of attention heads of a transformer, which no file contains.

    Raises:
        ModelNotFound: there is no such file.
        WeightsError: the tensors are of no AlgZoo network, or contradict the file name.
        ConfigError: the task is unknown, missing or does not fit the tensors.
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
        raise ConfigError(
            f"{text}: the network is an RNN, which has no attention heads, found heads={heads}; leave it out"
        )
    zoo_task = _task_of(text, task or metadata.task)
    if metadata.hidden is not None and metadata.hidden != shape.hidden:
        raise WeightsError(
            f"{text}: the file name says that the network has width {metadata.hidden}, but its tensors have "
            f"width {shape.hidden}; check that it is the right file"
        )
    length = _sequence_of(text, zoo_task, shape, sequence, metadata.sequence)
    return AlgZooModel(text, zoo_task, length, tensors, shape, metadata, files)


def _path_of(name: str) -> Path:
    """Path of a network's file, given by the name of a shipped network or by the path itself.

    Raises:
        ModelNotFound: it is neither.
    """
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
    raise ModelNotFound(
        f"expected an AlgZoo network: a file that ends in {' or '.join(FORMATS)}, or the name of a network "
        f"that ships with mizarr; found neither at {name!r}{hint}"
    )


def _task_of(where: str, name: str | None) -> Task:
    """Look up a network's task by name; `where` names the network in ConfigError messages."""
    if name is None:
        raise ConfigError(
            f"{where}: the file does not name the network's task; pass it, such as task=2nd_argmax"
        )
    return task_named(name)


def _sequence_of(where: str, task: Task, shape: Shape, requested: int | None, in_name: int | None) -> int:
    """Number of time steps per input: from the tensors, else as requested, else from the file name.

    Arguments:
        where: the network, for messages.
        task: its task.
        shape: network type and layer sizes.
        requested: length that the caller passed; None for none.
        in_name: length that the file name or header states; None for none.

    Raises:
        ConfigError: the length is unknown, contradicts another source, or task and network do not fit.
    """
    if isinstance(shape, RnnShape):
        if task.draws == "integers":
            raise ConfigError(
                f"{where}: the task {task.name} has integer inputs, which need a transformer, but the "
                "network is an RNN; pass another task"
            )
        # A classifier has one output per time step; a scalar network fits any length.
        length = (requested or in_name) if task.is_scalar else shape.outputs
    else:
        if task.draws != "integers":
            raise ConfigError(
                f"{where}: the task {task.name} has real numbers as inputs, which need an RNN, but the "
                "network is a transformer over integers; pass another task"
            )
        length = shape.sequence
    if length is None:
        raise ConfigError(
            f"{where}: the file does not state the number of time steps per input; pass it, such as "
            "sequence=3"
        )
    if length < task.min_sequence or shape.outputs != task.outputs(length):
        raise ConfigError(
            f"{where}: the task {task.name} needs at least {task.min_sequence} numbers per input, and for "
            f"{length} numbers a network of {task.outputs(length)} outputs; this network has "
            f"{shape.outputs}; pass another task or sequence"
        )
    # An integer task has values 0..n-1, each of which needs a row of the embedding.
    if not isinstance(shape, RnnShape) and shape.inputs < length:
        raise ConfigError(
            f"{where}: the task {task.name} with {length} integers per input needs embeddings for {length} "
            f"integers, but the network has {shape.inputs}"
        )
    for stated, origin in ((requested, "sequence is"), (in_name, "the file states")):
        if stated is not None and stated != length:
            raise ConfigError(
                f"{where}: the tensors are for inputs of {length} time steps, but {origin} {stated}; leave "
                "out sequence, or check that it is the right file"
            )
    return length
