"""Whether a model's layers stand in their order: its loss as loaded, and with two layers in each other's
place.

Border: prompts as token ids; nothing is compared with another model, so that it can be asked of one that was
just converted and of which no reference is at hand.

Idea: a checkpoint whose layers are mixed up still speaks, a little worse; a loss alone does not tell. But the
layers of a trained model depend on their order, so that it loses where any two change places, and a model in
which two were mixed up gains where they change back. The null of a model is therefore its own: the same
weights, in other orders.

Axes: order (0: as loaded), prompt, layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..forward.runs.experiment import CellLabels
from .changed import OfChanged, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["LayerOrders", "swaps"]

TOGETHER = 16
"""Orders of a cell: each is a few runs, and less than storing them by themselves would take."""


def swaps(layers: int, most: int, *, first: int = 0, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Orders of layers in which two have changed places: all, or `most` drawn at random; the order as loaded
    first. first: below which layers stay where they are.

    >>> swaps(3, 10)
    ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1))
    """
    pairs = list(combinations(range(first, layers), 2))
    if len(pairs) > most:
        chosen = np.random.default_rng(seed).permutation(len(pairs))[:most]
        pairs = [pairs[i] for i in sorted(chosen)]
    found = [tuple(range(layers))]
    for one, other in pairs:
        order = list(range(layers))
        order[one], order[other] = other, one
        found.append(tuple(order))
    return tuple(found)


@dataclass(frozen=True)
class LayerOrders(OfChanged):
    """Loss over prompts with the layers in other orders. orders: each a permutation, as `swaps` gives
    them."""

    name: ClassVar[str] = "layer_orders"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "loss": Output(("order", "prompt"), "nats", "mean loss per token"),
        "layers": Output(("order", "layer"), "1", "which layer stands in each place"),
    }

    prompts: Prompts
    orders: Prompts

    def params(self) -> dict[str, Any]:
        """The prompts and the change; which orders is said by the cells."""
        return {"prompts": [list(ids) for ids in self.prompts], **self.change}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Some orders each. Raises ConfigError for an order that is no permutation of the layers, and for a
        model that someone else computes, whose layers cannot be gone through in another."""
        for order in self.orders:
            if sorted(order) != list(range(config.num_layers)):
                last = config.num_layers - 1
                raise ConfigError(f"expected every layer 0..{last} once, found {order}")
        if any(order[0] for order in self.orders) and config.stream_start.kind != "embed":
            raise ConfigError(
                f"expected layer 0 first of {config.model_type}, as later layers read what it hands on, "
                "found it elsewhere; give swaps(…, first=1)"
            )
        if not config.shares_prefixes:
            raise ConfigError(
                "expected a model whose layers can be gone through in another order, found "
                f"{config.model_type}, which transformers computes"
            )
        listed = [list(order) for order in self.orders]
        return [{"orders": listed[start : start + TOGETHER]} for start in range(0, len(listed), TOGETHER)]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The losses of some orders."""
        import xarray as xr

        orders = [tuple(order) for order in cell["orders"]]
        about = {name: {"units": it.unit, "long_name": it.long_name} for name, it in self.outputs.items()}
        loss = np.stack([self._losses(prepared, order) for order in orders])
        return xr.Dataset(
            {
                "loss": (("order", "prompt"), loss, about["loss"]),
                "layers": (("order", "layer"), np.array(orders), about["layers"]),
            }
        )

    def _losses(self, prepared: Any, order: tuple[int, ...]) -> Floats:
        """Mean nats per token of each prompt, the layers in one order."""
        import torch

        model, _ = prepared
        loss = np.zeros(len(self.prompts))
        for places, rows in batches(self.prompts):
            target = torch.tensor(rows, device=model.device)[:, 1:]
            spec = self.bound(prepared, rows)
            if order != tuple(range(model.config.num_layers)):
                spec = replace(spec, order=order)
            for here, found in log_probabilities(model, rows, spec):
                wanted = target[:, here]
                lost = -found[:, : wanted.shape[1]].gather(-1, wanted[..., None]).double()
                loss[places] += lost.sum((1, 2)).cpu().numpy()
        by_prompt: Floats = loss / np.array([len(ids) - 1 for ids in self.prompts])
        return by_prompt

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all orders of layers, one after another."""
        import xarray as xr

        return xr.concat(parts, "order")
