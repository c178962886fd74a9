"""Batches: pairs of one length through a model, with what each source adds and what stands for it elsewhere.

Border: a model and pairs in, tensors and logits out; which edges are changed, others decide.

Axes: B pairs of a batch, S positions, D hidden, source as in forward/edges/layout.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from ...store.arrays import Floats
from ..forward.edges.layout import Layout
from ..forward.edges.parts import SplitNetwork
from ..forward.edges.prompts import EdgeSources, sources_of
from ..forward.hooks.wants import Logits
from .pairs import Alternative, Pair, by_length, tokens_of

if TYPE_CHECKING:
    from ..forward.models.model import Model

__all__ = ["MEMORY", "PairBatch", "as_array", "batches", "gradients", "network_of"]

MEMORY = 1 << 30
"""Bytes that may be taken beside the model unless told otherwise."""


@dataclass(frozen=True)
class PairBatch:
    """Some pairs of one length.

    places: which of all pairs. ids, corrupted_ids: int [B, S]. clean: the clean pass. other: what stands for
    each source where an edge is left out, [B, source, S, D]. logits: the clean ones at the last position,
    float64 [B, vocab].
    """

    places: list[int]
    pairs: list[Pair]
    ids: Tensor
    corrupted_ids: Tensor
    clean: EdgeSources
    other: Tensor
    logits: Floats

    @property
    def change(self) -> Tensor:
        """What each source adds elsewhere less what it adds here, [B, source, S, D]."""
        return self.other - self.clean.added


def network_of(model: Model) -> SplitNetwork:
    """The network of a model that `Layout.of` takes."""
    model.require_all_weights("edges and circuits")
    return cast(SplitNetwork, model.network)


@torch.no_grad()
def batches(
    model: Model,
    layout: Layout,
    pairs: Sequence[Pair],
    alternative: Alternative,
    *,
    seed: int = 0,
    memory: int = MEMORY,
    only: int | None = None,
) -> Iterator[PairBatch]:
    """All pairs, as many of one length at once as fit a quarter of the memory.

    seed: of which other prompt is drawn for "resampled". only: of which pair alone.
    """
    network = network_of(model)
    for group in by_length(pairs):
        length, element = len(pairs[group[0]].clean), network.dtype.itemsize
        of_a_pair = 3 * len(layout.sources) * length * model.config.hidden_size * element
        most = max(1, memory // 4 // of_a_pair)
        parts = [group[start : start + most] for start in range(0, len(group), most)]
        mean = _mean(model, layout, pairs, parts) if alternative == "mean" else None
        donors = _donors(group, seed)
        for places in parts if only is None else [[place] for place in group if place == only]:
            chosen = [pairs[place] for place in places]
            ids, corrupted = (
                _ids(model, [getattr(pair, name) for pair in chosen]) for name in ("clean", "corrupted")
            )
            clean = sources_of(network, layout, ids)
            if alternative == "zero":
                other = torch.zeros_like(clean.added)
            elif mean is not None:
                other = mean.expand_as(clean.added)
            else:
                drawn = _ids(model, [pairs[donors[place]].clean for place in places])
                asked = corrupted if alternative == "corrupted" else drawn
                other = sources_of(network, layout, asked).added
            logits = network.unembed(network.final_norm(clean.streams.logits[:, -1]), Logits())
            yield PairBatch(places, chosen, ids, corrupted, clean, other, as_array(logits))


def as_array(logits: Tensor) -> Floats:
    """Logits as metrics read them, float64."""
    found: Floats = logits.double().cpu().numpy()
    return found


def gradients(batch: PairBatch, logits: Tensor) -> Tensor:
    """The gradient of each pair's metric with respect to last logits of its run, [B, vocab]."""
    held = as_array(logits)
    found = np.zeros_like(held)
    for row, (pair, run, clean) in enumerate(zip(batch.pairs, held, batch.logits, strict=True)):
        chosen = tokens_of(pair.metric)
        where = slice(None) if chosen is None else chosen
        found[row, where] = pair.metric.gradient(run[where], clean[where])
    return torch.from_numpy(found).to(logits)


def _mean(model: Model, layout: Layout, pairs: Sequence[Pair], parts: Sequence[Sequence[int]]) -> Tensor:
    """What each source adds on average over the clean prompts of one length, [source, S, D]."""
    summed, count = None, 0
    for places in parts:
        ids = _ids(model, [pairs[place].clean for place in places])
        added = sources_of(network_of(model), layout, ids).added.double().sum(0)
        summed, count = added if summed is None else summed + added, count + len(places)
    assert summed is not None  # there are pairs
    return (summed / count).to(model.dtype)


def _donors(group: Sequence[int], seed: int) -> dict[int, int]:
    """For each pair another one, drawn: each is a neighbour's donor in a random order."""
    order = np.random.default_rng(seed).permutation(len(group))
    shifted = np.roll(order, 1)
    return {group[int(to)]: group[int(of)] for to, of in zip(order, shifted, strict=True)}


def _ids(model: Model, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=model.device)
