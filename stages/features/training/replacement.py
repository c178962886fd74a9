"""Loss of a model that reads a dictionary's reconstructions in place of its own activations.

At the hook points that are written, activations are replaced by the features' reconstruction from the hook
points that are read. Loss and next-token distribution are compared with those of the unchanged model, and of
a model whose activations there are zero, or their mean over all measured tokens:

    recovered = (CE_ablated - CE_replaced) / (CE_ablated - CE_clean), and the same with KL(clean || .)

Each place is replaced alone, and all places together. Replaced together, the features read the states that
the replaced model computes, layer by layer, errors included: the replacement model of Lindsey et al. 2025.
The first positions of a prompt keep their activations, and predictions there are not counted.

Border: a model, features by layer, prompts as token ids; uses the interventions Replace, Add and Zero of the
model.

Axes: place ("all", then the written layers by number); prompts of equal length share a forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ....pipeline.ambient import plain_torch
from ....store.errors import PromptError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Add, Intervention, Replace
from ...forward.hooks.spec import HookSpec

if TYPE_CHECKING:
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model
    from ..layers.layer import LayerFeatures

__all__ = ["ReconstructionRuns", "replacement_loss"]

ALL = "all"
"""Label on the axis `place` for the replacement of all written layers together."""
_VARIANTS = ("replaced", "zero", "mean")


@plain_torch()
def replacement_loss(
    model: Model,
    layers: Mapping[int, LayerFeatures],
    read: str,
    write: str,
    prompts: Sequence[Sequence[int]],
    *,
    skip_positions: int = 1,
    batch_tokens: int = 4096,
) -> xr.Dataset:
    """Loss in nats per token of a model whose activations are replaced by a dictionary's reconstructions.

    Arguments:
        model: The model.
        layers: Features by layer.
        read: Hook kind that features read.
        write: Hook kind that features write to.
        prompts: Token ids of each prompt.
        skip_positions: Number of positions at the start of each prompt that are not replaced.
        batch_tokens: Number of tokens of a forward pass.

    Returns:
        ce, kl [place, way], way "replaced", "zero" or "mean"; ce_clean of the unchanged model; ce_recovered,
        kl_recovered [place, ablation]: share of the ablation's cost that the reconstruction avoids.

    Raises:
        PromptError: No prompt is longer than skip_positions + 1.
        ConfigError: The model does not predict the next token.
    """
    model.config.require_next_token()
    runs = ReconstructionRuns(model, dict(sorted(layers.items())), read, write, skip_positions)
    batches = list(_batches(prompts, skip_positions, batch_tokens))
    if not batches:
        raise PromptError(
            f"expected prompts longer than {skip_positions + 1} tokens, because the first {skip_positions} "
            "are not replaced, found none; give longer prompts"
        )
    means = runs.means(batches)
    places = [ALL, *map(str, runs.layers)]
    ce, kl = (np.zeros((len(places), len(_VARIANTS))) for _ in range(2))
    clean_ce, count = 0.0, 0
    for ids in batches:
        clean = model.forward(ids, HookSpec().capture(*runs.read_points.values()))
        reference = runs.log_probabilities(clean)
        clean_ce += runs.cross_entropy(reference, ids)
        count += reference.shape[0] * reference.shape[1]
        for i, place in enumerate(places):
            replaced_layers = list(runs.layers) if place == ALL else [int(place)]
            for j, variant in enumerate(_VARIANTS):
                if variant == "replaced":
                    spec = runs.closed_loop(ids) if place == ALL else runs.alone(int(place), clean)
                else:
                    spec = runs.ablated(replaced_layers, ids, means if variant == "mean" else None)
                log_probabilities = runs.log_probabilities(model.forward(ids, spec))
                ce[i, j] += runs.cross_entropy(log_probabilities, ids)
                kl[i, j] += float((reference.exp() * (reference - log_probabilities)).sum())
    ce, kl, clean_ce = ce / count, kl / count, clean_ce / count
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (ce[:, 1:] - ce[:, :1]) / (ce[:, 1:] - clean_ce)
        # KL of the clean model from itself is 0, so its share needs no clean term.
        kl_shares = 1 - kl[:, :1] / kl[:, 1:]
    return xr.Dataset(
        {
            "ce": (("place", "way"), ce, {"units": "nats"}),
            "kl": (("place", "way"), kl, {"units": "nats"}),
            "ce_clean": ((), clean_ce, {"units": "nats"}),
            "ce_recovered": (("place", "ablation"), shares),
            "kl_recovered": (("place", "ablation"), kl_shares),
        },
        {"place": places, "way": list(_VARIANTS), "ablation": list(_VARIANTS[1:])},
        {"tokens": count, "skip_positions": skip_positions},
    )


class ReconstructionRuns:
    """Makes interventions that replace a model's activations by a dictionary's reconstructions.

    "Counted positions" are those after the first `skip` of each prompt.

    Arguments:
        model: The model.
        layers: Features by layer.
        read: Hook kind that features read.
        write: Hook kind that features write to.
        skip: Number of positions at the start of each prompt that keep their activations.
    """

    def __init__(
        self, model: Model, layers: Mapping[int, LayerFeatures], read: str, write: str, skip: int
    ) -> None:
        self.model, self.layers, self.skip = model, layers, skip
        self.read_points = {layer: HookPoint(read, layer) for layer in layers}
        self.write_points = {layer: HookPoint(write, layer) for layer in layers}

    @plain_torch()
    def log_probabilities(self, cache: HookCache) -> Tensor:
        """Log-probabilities [prompt, position, vocab] of the next token at counted positions but the last."""
        logits = cache.logits
        assert logits is not None
        return logits[:, self.skip : -1].float().log_softmax(-1)

    @plain_torch()
    def cross_entropy(self, log_probabilities: Tensor, ids: list[list[int]]) -> float:
        """Cross-entropy of the actual next tokens in nats, summed over prompts and positions.

        Arguments:
            log_probabilities: Result of the method of this name.
            ids: Token ids of prompts of equal length.
        """
        # The log-probabilities at position p are of the token at p + 1.
        next_tokens = torch.tensor(ids, device=log_probabilities.device)[:, self.skip + 1 :, None]
        return -float(log_probabilities.gather(-1, next_tokens).sum())

    @plain_torch()
    def means(self, batches: Sequence[list[list[int]]]) -> dict[int, Tensor]:
        """Mean activation [width] at every written hook point over all counted positions, by layer.

        Arguments:
            batches: Batches of prompts of equal length, as token ids.
        """
        sums: dict[int, Tensor] = {}
        count = 0
        for ids in batches:
            cache = self.model.forward(ids, HookSpec().capture(*self.write_points.values()))
            for layer, point in self.write_points.items():
                rows = self._rows(point, cache).double()
                sums[layer] = sums.get(layer, 0.0) + rows.sum((0, 1))
            count += len(ids) * (len(ids[0]) - self.skip)
        return {layer: (total / count).float() for layer, total in sums.items()}

    def ablated(
        self, replaced_layers: Sequence[int], ids: list[list[int]], means: Mapping[int, Tensor] | None
    ) -> HookSpec:
        """Intervention that sets the activations at written hook points to zero, or to their means.

        Arguments:
            replaced_layers: Layers whose written hook points are set.
            ids: Token ids of prompts of equal length.
            means: Mean activation by layer; None for zeros.
        """
        spec = HookSpec()
        for layer in replaced_layers:
            width = self.layers[layer].W_dec[layer].shape[1]
            value = torch.zeros(width) if means is None else means[layer]
            value = value.expand(len(ids), len(ids[0]) - self.skip, -1)
            spec = spec.intervene(*self._change(layer, value, Replace))
        return spec

    def alone(self, layer: int, clean: HookCache) -> HookSpec:
        """Intervention that reconstructs one layer's activations from the unchanged model's states.

        Arguments:
            layer: The layer that is replaced.
            clean: Captured states of the unchanged model, at all hook points that are read.
        """
        rebuilt = self._decoded({m: self._encoded(m, clean) for m in self.layers if m <= layer}, layer)
        return HookSpec().intervene(*self._change(layer, self._finished(layer, rebuilt, clean), Replace))

    def closed_loop(self, ids: list[list[int]]) -> HookSpec:
        """Intervention that replaces all layers; each reconstruction sees the replacement of lower layers.

        Arguments:
            ids: Token ids of prompts of equal length.
        """
        spec = HookSpec()
        for layer, rebuilt, _ in self._loop(ids):
            spec = spec.intervene(*self._change(layer, rebuilt, Replace))
        return spec

    def errors(self, ids: list[list[int]]) -> dict[int, Tensor]:
        """Reconstruction minus activation where all lower layers are replaced, by layer.

        float32 [prompt, counted position, width].

        Arguments:
            ids: Token ids of prompts of equal length.
        """
        differences = {}
        for layer, rebuilt, cache in self._loop(ids, *self.write_points.values()):
            actual = self._rows(self.write_points[layer], cache).float()
            differences[layer] = rebuilt.to(actual) - actual
        return differences

    def added(self, vectors: Mapping[int, Tensor]) -> HookSpec:
        """Interventions that add a vector at the hook point that each layer's part of the dictionary writes.

        Arguments:
            vectors: Vectors by layer, [prompt, counted position, width].
        """
        spec = HookSpec()
        for layer, value in vectors.items():
            spec = spec.intervene(*self._change(layer, value, Add))
        return spec

    def _loop(self, ids: list[list[int]], *captured: HookPoint) -> Iterator[tuple[int, Tensor, HookCache]]:
        """Yield (layer, its reconstruction, the forward pass it was computed from), lowest layer first.

        Each reconstruction is in place while the next layer is computed. `captured`: hook points that the
        pass
        of their layer captures as well.
        """
        active: dict[int, Tensor] = {}
        spec = HookSpec()
        for layer in self.layers:
            points = (self.read_points[layer], *(point for point in captured if point.layer == layer))
            # One pass per layer: its features must see the states of the model with lower layers replaced.
            cache = self.model.forward(ids, spec.capture(*points), want=None)
            active[layer] = self._encoded(layer, cache)
            rebuilt = self._finished(layer, self._decoded(active, layer), cache)
            spec = spec.intervene(*self._change(layer, rebuilt, Replace))
            yield layer, rebuilt, cache

    def _encoded(self, layer: int, cache: HookCache) -> Tensor:
        """Feature activations [prompt, counted position, feature] of one layer."""
        return self.layers[layer].encode(self._states(layer, cache))

    def _states(self, layer: int, cache: HookCache) -> Tensor:
        """States that one layer's features read [prompt, counted position, width]."""
        return self._rows(self.read_points[layer], cache)

    def _rows(self, point: HookPoint, cache: HookCache) -> Tensor:
        """Captured activations [prompt, counted position, width] at a hook point, heads concatenated."""
        states = cache[point]
        # [prompt, head, position, d_head]: features read the heads of a position side by side.
        if "d_head" in point.dims:
            states = states.transpose(1, 2).flatten(2)
        return states[:, self.skip :]

    def _decoded(self, active: Mapping[int, Tensor], target: int) -> Tensor:
        """Sum [prompt, counted position, d_out] of what the features of all layers write to `target`."""
        parts = [
            self.layers[layer].decode(a, target)
            # A CLT's output at a layer also sums the features of lower layers.
            for layer, a in active.items()
            if target in self.layers[layer].targets
        ]
        return torch.stack(parts).sum(0)

    def _finished(self, layer: int, rebuilt: Tensor, cache: HookCache) -> Tensor:
        """Reconstruction of one layer: what features write, with bias, scale and skip connection."""
        return self.layers[layer].finish(rebuilt, self._states(layer, cache))

    def _change(
        self, layer: int, value: Tensor, change: type[Add] | type[Replace]
    ) -> tuple[HookPoint, Intervention]:
        """Hook point that a layer writes, and the intervention that adds or sets `value` there.

        `value` is [prompt, counted position, width].
        """
        point = self.write_points[layer]
        if "d_head" in point.dims:
            heads = self.model.config.axis_sizes[point.dims[1]]
            value = value.unflatten(2, (heads, -1)).transpose(1, 2)
        positions = tuple(range(self.skip, self.skip + value.shape[-2]))
        return point, change(value, positions=positions)


def _batches(prompts: Sequence[Sequence[int]], skip: int, batch_tokens: int) -> Iterator[list[list[int]]]:
    """Batches of about `batch_tokens` tokens, of prompts of equal length longer than skip + 1 tokens."""
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for ids in prompts:
        if len(ids) > skip + 1:
            by_length[len(ids)].append(list(ids))
    for length, rows in sorted(by_length.items()):
        # Equal lengths need no padding or attention mask.
        size = max(1, batch_tokens // length)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))
