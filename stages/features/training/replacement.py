"""What a model loses when it reads a dictionary's reconstructions in place of its own activations.

At the hook points that are written, activations become what features make of the states at the hook points
that are read; loss and next-token distribution are compared with those of the whole model, and of a model
whose activations there are zero, or their mean over all tokens measured:

    recovered = (CE_ablated - CE_replaced) / (CE_ablated - CE_clean), and the same with KL(clean || .)

One place at a time, and all together. All together the features read what the replaced model computes, layer
by layer, errors and all: the replacement model of Lindsey et al. 2025. The first positions of a prompt keep
their activations, and what is predicted there does not count.

Border: a model, features by layer, prompts as token ids; interventions are Replace and Zero of the model's
own.

Axes: place ("all", then the written layers by number); prompts of one length share a pass.
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

__all__ = ["Reconstructed", "replacement_loss"]

ALL = "all"
_WAYS = ("replaced", "zero", "mean")


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
    """Loss of the model with its activations replaced, in nats per token.

    read, write: hook kinds. prompts: token ids; `skip_positions` first tokens of each are left alone.
    ce, kl [place, way]: of "replaced", "zero" and "mean"; ce_clean: of the model as it is. ce_recovered,
    kl_recovered [place, ablation]: share of what the ablation costs that the reconstruction keeps.
    Raises PromptError when no prompt is longer than skip_positions + 1, ConfigError for a model that does not
    predict the next token.
    """
    model.config.require_next_token()
    worker = Reconstructed(model, dict(sorted(layers.items())), read, write, skip_positions)
    batches = list(_batches(prompts, skip_positions, batch_tokens))
    if not batches:
        raise PromptError(f"expected prompts longer than {skip_positions + 1} tokens, found none")
    means = worker.means(batches)
    places = [ALL, *map(str, worker.layers)]
    ce, kl = (np.zeros((len(places), len(_WAYS))) for _ in range(2))
    clean_ce, count = 0.0, 0
    for ids in batches:
        clean = worker.forward(ids, HookSpec().capture(*worker.read_points.values()))
        reference = worker.log_probabilities(clean)
        clean_ce += worker.cross_entropy(reference, ids)
        count += reference.shape[0] * reference.shape[1]
        for i, place in enumerate(places):
            chosen = list(worker.layers) if place == ALL else [int(place)]
            for j, way in enumerate(_WAYS):
                if way == "replaced":
                    spec = worker.closed_loop(ids) if place == ALL else worker.alone(int(place), clean)
                else:
                    spec = worker.ablated(chosen, ids, means if way == "mean" else None)
                found = worker.log_probabilities(worker.forward(ids, spec))
                ce[i, j] += worker.cross_entropy(found, ids)
                kl[i, j] += float((reference.exp() * (reference - found)).sum())
    ce, kl, clean_ce = ce / count, kl / count, clean_ce / count
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (ce[:, 1:] - ce[:, :1]) / (ce[:, 1:] - clean_ce)
        kl_shares = 1 - kl[:, :1] / kl[:, 1:]
    return xr.Dataset(
        {
            "ce": (("place", "way"), ce, {"units": "nats"}),
            "kl": (("place", "way"), kl, {"units": "nats"}),
            "ce_clean": ((), clean_ce, {"units": "nats"}),
            "ce_recovered": (("place", "ablation"), shares),
            "kl_recovered": (("place", "ablation"), kl_shares),
        },
        {"place": places, "way": list(_WAYS), "ablation": list(_WAYS[1:])},
        {"tokens": count, "skip_positions": skip_positions},
    )


class Reconstructed:
    """The runs of a model with a dictionary's reconstructions in place of what it writes.

    layers: features by layer. read, write: hook kinds. skip: first positions that keep their activations.
    """

    def __init__(
        self, model: Model, layers: Mapping[int, LayerFeatures], read: str, write: str, skip: int
    ) -> None:
        self.model, self.layers, self.skip = model, layers, skip
        self.read_points = {layer: HookPoint(read, layer) for layer in layers}
        self.write_points = {layer: HookPoint(write, layer) for layer in layers}

    def forward(self, ids: list[list[int]], spec: HookSpec) -> HookCache:
        """Logits of one pass in which reconstructions stand in."""
        return self.model.forward(ids, spec)

    @plain_torch()
    def log_probabilities(self, cache: HookCache) -> Tensor:
        """Of next tokens [prompt, position, vocab], at the positions that count."""
        logits = cache.logits
        assert logits is not None
        return logits[:, self.skip : -1].float().log_softmax(-1)

    @plain_torch()
    def cross_entropy(self, found: Tensor, ids: list[list[int]]) -> float:
        """Summed over prompts and positions, nats."""
        following = torch.tensor(ids, device=found.device)[:, self.skip + 1 :, None]
        return -float(found.gather(-1, following).sum())

    @plain_torch()
    def means(self, batches: Sequence[list[list[int]]]) -> dict[int, Tensor]:
        """Mean activation at every written hook point, over all positions that count."""
        sums: dict[int, Tensor] = {}
        count = 0
        for ids in batches:
            cache = self.forward(ids, HookSpec().capture(*self.write_points.values()))
            for layer, point in self.write_points.items():
                rows = self._rows(point, cache).double()
                sums[layer] = sums.get(layer, 0.0) + rows.sum((0, 1))
            count += len(ids) * (len(ids[0]) - self.skip)
        return {layer: (total / count).float() for layer, total in sums.items()}

    def ablated(
        self, chosen: Sequence[int], ids: list[list[int]], means: Mapping[int, Tensor] | None
    ) -> HookSpec:
        """These places zero, or their means."""
        spec = HookSpec()
        for layer in chosen:
            width = self.layers[layer].W_dec[layer].shape[1]
            value = torch.zeros(width) if means is None else means[layer]
            value = value.expand(len(ids), len(ids[0]) - self.skip, -1)
            spec = spec.intervene(*self._change(layer, value, Replace))
        return spec

    def alone(self, layer: int, clean: HookCache) -> HookSpec:
        """One place, from the states of the whole model."""
        made = self._decoded({m: self._encoded(m, clean) for m in self.layers if m <= layer}, layer)
        return HookSpec().intervene(*self._change(layer, self._finished(layer, made, clean), Replace))

    def closed_loop(self, ids: list[list[int]]) -> HookSpec:
        """All places, each from what the model computes with those below replaced; ids: of one length."""
        spec = HookSpec()
        for layer, made, _ in self._loop(ids):
            spec = spec.intervene(*self._change(layer, made, Replace))
        return spec

    def errors(self, ids: list[list[int]]) -> dict[int, Tensor]:
        """By how much each place of the closed loop differs from what it would hold there if it alone were
        left as it is: float32 [prompt, position that counts, width], by layer."""
        found = {}
        for layer, made, cache in self._loop(ids, *self.write_points.values()):
            held = self._rows(self.write_points[layer], cache).float()
            found[layer] = made.to(held) - held
        return found

    def added(self, vectors: Mapping[int, Tensor]) -> HookSpec:
        """Vectors [prompt, position that counts, width] added to what each place holds."""
        spec = HookSpec()
        for layer, value in vectors.items():
            spec = spec.intervene(*self._change(layer, value, Add))
        return spec

    def _loop(self, ids: list[list[int]], *seen: HookPoint) -> Iterator[tuple[int, Tensor, HookCache]]:
        """(layer, its reconstruction, the pass it was made from, with the hook points of the layer among
        `seen`), lowest layer first; each stands in its place while the next is made."""
        active: dict[int, Tensor] = {}
        spec = HookSpec()
        for layer in self.layers:
            wanted = (self.read_points[layer], *(point for point in seen if point.layer == layer))
            cache = self.model.forward(ids, spec.capture(*wanted), want=None)
            active[layer] = self._encoded(layer, cache)
            made = self._finished(layer, self._decoded(active, layer), cache)
            spec = spec.intervene(*self._change(layer, made, Replace))
            yield layer, made, cache

    def _encoded(self, layer: int, cache: HookCache) -> Tensor:
        return self.layers[layer].encode(self._states(layer, cache))

    def _states(self, layer: int, cache: HookCache) -> Tensor:
        return self._rows(self.read_points[layer], cache)

    def _rows(self, point: HookPoint, cache: HookCache) -> Tensor:
        """[prompt, position that counts, width], heads side by side."""
        states = cache[point]
        if "d_head" in point.dims:  # heads before positions
            states = states.transpose(1, 2).flatten(2)
        return states[:, self.skip :]

    def _decoded(self, active: Mapping[int, Tensor], target: int) -> Tensor:
        parts = [
            self.layers[layer].decode(a, target)
            for layer, a in active.items()
            if target in self.layers[layer].targets
        ]
        return torch.stack(parts).sum(0)

    def _finished(self, layer: int, made: Tensor, cache: HookCache) -> Tensor:
        return self.layers[layer].finish(made, self._states(layer, cache))

    def _change(
        self, layer: int, value: Tensor, change: type[Add] | type[Replace]
    ) -> tuple[HookPoint, Intervention]:
        """A value [prompt, position that counts, width] where a layer writes, as an intervention."""
        point = self.write_points[layer]
        if "d_head" in point.dims:
            heads = self.model.config.axis_sizes[point.dims[1]]
            value = value.unflatten(2, (heads, -1)).transpose(1, 2)
        positions = tuple(range(self.skip, self.skip + value.shape[-2]))
        return point, change(value, positions=positions)


def _batches(prompts: Sequence[Sequence[int]], skip: int, batch_tokens: int) -> Iterator[list[list[int]]]:
    """Prompts of one length together, as many as make `batch_tokens`; those that predict nothing left out."""
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for ids in prompts:
        if len(ids) > skip + 1:
            by_length[len(ids)].append(list(ids))
    for length, rows in sorted(by_length.items()):
        size = max(1, batch_tokens // length)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))
