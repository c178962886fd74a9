"""The order of a harvest: each batch through all layers, or all batches through some layers after others; and
how much of a model is in memory for it.

Border: bytes and settings; torch is imported where a model is loaded.
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

__all__ = ["ORDERS", "Beside", "Order", "goes_by_layers", "load_for", "order_of"]

Order = Literal["auto", "batch", "layer"]
"""Batches outside and layers inside ("batch"), the other way round ("layer"), or the latter where weights do
not fit ("auto")."""
ORDERS = get_args(Order)


@dataclass(frozen=True)
class Beside:
    """Bytes a harvest takes beside weights. of_pass: of one batch in a layer. buffers: of segments, with all
    that is captured; of_layer: with what one layer gives, at most."""

    of_pass: int
    buffers: int
    of_layer: int


def order_of(order: Order, config: Architecture, spec: BoundSpec, name: str) -> Order:
    """The order asked for, "batch" where nothing else can be. Raises PlanError for one there is not,
    ConfigError for one that this model or spec cannot take."""
    if order not in ORDERS:
        raise PlanError(f"expected an order of {', '.join(ORDERS)}, found {order!r}")
    if order != "layer":
        return "batch" if spec.gradients or config.kind == "bridge" else order
    if config.kind == "bridge":
        raise ConfigError(
            f"expected a model whose layers are computed here, found {name}, which runs through transformers "
            'as a whole; capture with order="batch"'
        )
    if spec.gradients:
        raise ConfigError(
            'expected one way through the layers for order="layer", found gradients, which go back through '
            'all of them; capture with order="batch"'
        )
    return order


def goes_by_layers(order: Order, model: Model | None) -> bool:
    """Whether layers are outside and batches inside."""
    return order == "layer" or (order == "auto" and model is not None and model.streamed is not None)


def load_for(
    source: ModelSource, order: Order, limit: int | None, beside: Beside, say: Callable[[str], None]
) -> Model:
    """The model, with as much of its weights in memory as there is room for.

    limit: bytes that weights and what is beside them may take; None for what the machine has left. say: told,
    in one line, where weights come and go unasked. Raises PlanError for a limit that leaves no room for
    weights, ConfigError for one that leaves too little.
    """
    from ..models.residency import EVERYTHING, told

    if order == "batch":
        return source.load(max_memory=EVERYTHING)
    if limit is None:
        model = source.load(beside=beside.of_pass + beside.buffers)
    else:
        model = source.load(max_memory=_within(source, limit, beside))
    if model.streamed is not None and order == "auto":
        say(f"{source.name}: {told(model.weight_bytes, model.streamed.room)}, the corpus goes layer by layer")
    return model


def _within(source: ModelSource, limit: int, beside: Beside) -> int:
    """What weights may take under a limit: beside all buffers, or at least beside those of one layer."""
    from ..models.model import as_dtype
    from ..models.residency import bytes_of

    sizes = bytes_of(source.config, as_dtype(source.dtype).itemsize)
    ample, least = limit - beside.of_pass - beside.buffers, limit - beside.of_pass - beside.of_layer
    if least <= 0:
        raise PlanError(
            f"expected a memory limit above {beside.of_pass + beside.of_layer:,} bytes, which a batch and "
            f"buffers take without any weights, found {limit:,}; raise it, or lower batch_tokens or memory="
        )
    return ample if ample >= sizes.least else min(least, sizes.total - 1)
