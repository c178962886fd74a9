"""Harvest order (batch by batch, or layer by layer), and the amount of model weights in memory.

Torch is imported only when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ....store.errors import ConfigError, PlanError
from ..architectures.architecture import Architecture
from ..hooks.spec import BoundSpec
from ..models.source import ModelSource

if TYPE_CHECKING:
    from ..models.model import Model

__all__ = ["ORDERS", "Order", "WorkingMemory", "goes_by_layers", "load_for", "resolve_order"]

Order = Literal["auto", "batch", "layer"]
"""Order of the two loops of a capture over a corpus: each batch through all layers ("batch"), all batches
through one group of layers after another ("layer"), or "layer" only if the weights do not fit in memory
("auto")."""
ORDERS = get_args(Order)


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of memory that capturing over a corpus needs in addition to the weights."""

    batch: int
    """Activations of one batch in one layer."""
    buffers: int
    """Segment buffers for all captures."""
    layer_buffers: int
    """Segment buffers for the captures of one layer, the largest."""


def resolve_order(order: Order, config: Architecture, spec: BoundSpec, name: str) -> Order:
    """The order in which a capture loops over batches and layers; "auto" where both are possible.

    Gradients, and models that transformers runs as a whole, allow "batch" only.

    Arguments:
        order: the requested order.
        config: architecture of the model.
        spec: captures and interventions of the run.
        name: name of the model, for errors.

    Raises:
        PlanError: for an unknown order.
        ConfigError: for "layer", if the model or the spec does not allow it.
    """
    if order not in ORDERS:
        raise PlanError(f"capture order: expected one of {', '.join(ORDERS)}, found {order!r}")
    if order != "layer":
        return "batch" if spec.gradients or config.kind == "bridge" else order
    if config.kind == "bridge":
        raise ConfigError(
            f'order="layer": expected a model whose layers mizarr runs one by one, found {name}, which '
            'transformers runs as a whole; capture with order="batch"'
        )
    if spec.gradients:
        raise ConfigError(
            'order="layer": expected no captured gradients, found some, which need a backward pass through '
            'all layers; capture with order="batch"'
        )
    return order


def goes_by_layers(order: Order, model: Model | None) -> bool:
    """Whether a capture runs all batches through one layer after another.

    It does by request, or because the weights are streamed from disk.

    Arguments:
        order: result of `resolve_order`.
        model: the loaded model; None where worker processes load it, which never stream weights.
    """
    return order == "layer" or (order == "auto" and model is not None and model.streamed is not None)


def load_for(
    source: ModelSource,
    order: Order,
    limit: int | None,
    working: WorkingMemory,
    say: Callable[[str], None],
) -> Model:
    """Load a model with as many weights as fit in memory.

    Arguments:
        source: the model.
        order: result of `resolve_order`; "batch" loads all weights.
        limit: most bytes for weights and working memory; None for the memory that the machine has free.
        working: bytes needed in addition to weights.
        say: called with a message for the user if "auto" chooses to stream weights.

    Raises:
        PlanError: if the limit leaves no memory for weights.
        ConfigError: if it leaves too little.
    """
    from ..models.residency import EVERYTHING, describe_shortage

    if order == "batch":
        # Order "batch" reads every weight at every batch, so all of them must stay in memory.
        return source.load(max_memory=EVERYTHING)
    if limit is None:
        model = source.load(beside=working.batch + working.buffers)
    else:
        model = source.load(max_memory=_weights_limit(source, limit, working))
    if model.streamed is not None and order == "auto":
        shortage = describe_shortage(model.weight_bytes, model.streamed.room)
        say(f"{source.name}: {shortage}; all batches run through one layer after another")
    return model


def _weights_limit(source: ModelSource, limit: int, working: WorkingMemory) -> int:
    """Bytes that weights may take in memory: the memory limit less the activations of a batch and the segment
    buffers.

    If the rest holds the fewest weights with which a pass can run (`UnitBytes.least`), the buffers of all
    layers are subtracted. Otherwise only those of one layer are subtracted, and the result is smaller than
    all weights together, so that the loader streams them.

    Arguments:
        source: the model.
        limit: most bytes for weights, activations and segment buffers together.
        working: bytes of activations and segment buffers.

    Raises:
        PlanError: if activations and the buffers of one layer alone reach the limit.
    """
    from ..models.model import as_dtype
    from ..models.residency import bytes_of

    sizes = bytes_of(source.config, as_dtype(source.dtype).itemsize)
    beside_all_buffers = limit - working.batch - working.buffers
    beside_layer_buffers = limit - working.batch - working.layer_buffers
    if beside_layer_buffers <= 0:
        raise PlanError(
            f"memory_limit: expected more than {working.batch + working.layer_buffers:,} bytes, which the "
            f"activations of a batch and the output buffers take without any weights, found {limit:,}; raise "
            "it, or lower batch_tokens or memory"
        )
    if beside_all_buffers >= sizes.least:
        return beside_all_buffers
    # Less than all weights, so that the loader streams them: buffers are then needed one layer at a time.
    return min(beside_layer_buffers, sizes.total - 1)
