"""Layer order: loss of a model as loaded, and with two layers exchanged.

A converted checkpoint in which two layers are exchanged still produces text, slightly worse; its loss alone
reveals nothing. But trained layers depend on their order: exchanging any two raises the loss of a correctly
loaded model, and lowers the loss of a model in which these two were exchanged. So the null distribution of a
model is the same weights in other orders.

Border: prompts as token ids. No reference model is needed, so a freshly converted model can be tested.

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
from .changed import ChangedModelExperiment, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["LayerOrders", "swaps"]

TOGETHER = 16
"""Number of orders of a cell, which is stored at once: storing costs more than the few runs of an order."""


def swaps(layers: int, most: int, *, first: int = 0, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Orders of a model's layers: as loaded, then each with two layers exchanged.

    Arguments:
        layers: Number of layers.
        most: Largest number of exchanges; if there are more, they are sampled at random.
        first: First layer that may be exchanged.
        seed: Seed of the sample.

    >>> swaps(3, 10)
    ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1))
    """
    pairs = list(combinations(range(first, layers), 2))
    if len(pairs) > most:
        sample = np.random.default_rng(seed).permutation(len(pairs))[:most]
        # Sorted, so that a larger sample lists its orders in the same sequence.
        pairs = [pairs[i] for i in sorted(sample)]
    orders = [tuple(range(layers))]
    for layer, other_layer in pairs:
        order = list(range(layers))
        order[layer], order[other_layer] = other_layer, layer
        orders.append(tuple(order))
    return tuple(orders)


@dataclass(frozen=True)
class LayerOrders(ChangedModelExperiment):
    """Loss over prompts of a model whose layers are computed in several orders."""

    name: ClassVar[str] = "layer_orders"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "loss": Output(("order", "prompt"), "nats", "mean loss per token"),
        "layers": Output(("order", "layer"), "1", "layer that is computed at each depth"),
    }

    prompts: Prompts
    """Token ids of each prompt, at least two."""
    orders: Prompts
    """Permutations of the layers, such as those of `swaps`."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: prompts and change. Orders are labels of cells."""
        return {"prompts": [list(ids) for ids in self.prompts], **self.change}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per `TOGETHER` orders.

        Raises:
            ConfigError: An order is not a permutation, or moves a first layer that must stay; or the model
                runs in transformers, where layers cannot be reordered.
        """
        for order in self.orders:
            if sorted(order) != list(range(config.num_layers)):
                last = config.num_layers - 1
                raise ConfigError(
                    f"expected an order to hold every layer from 0 to {last} once, found {order}"
                )
        # Where the stream does not start with the embedding itself (RWKV: with its norm), layer 0 computes
        # it.
        if any(order[0] for order in self.orders) and config.stream_start.kind != "embed":
            raise ConfigError(
                f"expected orders that begin with layer 0 for {config.model_type}, as later layers read what "
                "it computes, found another first layer; use swaps(..., first=1)"
            )
        if not config.shares_prefixes:
            raise ConfigError(
                f"expected a model whose layers can be reordered, found {config.model_type}, which runs in "
                "transformers; choose a model of a family that mizarr runs itself"
            )
        listed = [list(order) for order in self.orders]
        return [{"orders": listed[start : start + TOGETHER]} for start in range(0, len(listed), TOGETHER)]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Loss of each order and prompt of a cell, and the orders."""
        import xarray as xr

        orders = [tuple(order) for order in cell["orders"]]
        values = {
            "loss": np.stack([self._losses(prepared, order) for order in orders]),
            "layers": np.array(orders),
        }
        return xr.Dataset({name: self.outputs[name].variable(array) for name, array in values.items()})

    def _losses(self, prepared: Any, order: tuple[int, ...]) -> Floats:
        """Mean loss in nats per token of each prompt, with the layers in one order, float64 [prompt]."""
        import torch

        model, _ = prepared
        loss = np.zeros(len(self.prompts))
        for indices, rows in batches(self.prompts):
            target = torch.tensor(rows, device=model.device)[:, 1:]
            spec = self.bound(prepared, rows)
            if order != tuple(range(model.config.num_layers)):
                # Only for changed orders: naming the usual order gives another digest than the plain run.
                spec = replace(spec, order=order)
            for positions, logprobs in log_probabilities(model, rows, spec):
                next_tokens = target[:, positions]
                # Logits at the last position predict no token of the prompt, and are cut off; float64 for
                # sums.
                losses = -logprobs[:, : next_tokens.shape[1]].gather(-1, next_tokens[..., None]).double()
                loss[indices] += losses.sum((1, 2)).cpu().numpy()
        by_prompt: Floats = loss / np.array([len(ids) - 1 for ids in self.prompts])
        return by_prompt

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Orders of all cells, concatenated along `order`."""
        import xarray as xr

        return xr.concat(parts, "order")
