"""Batches of prompt pairs of equal length, with source outputs of the clean run and their replacements.

Border: a model and pairs in, tensors and logits out; callers decide which edges are changed.

Axes: B pairs of a batch, S positions, D hidden; source as in forward/edges/layout.py.
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
from .experiment import MEMORY
from .pairs import Alternative, Pair, by_length, tokens_of

if TYPE_CHECKING:
    from ..forward.models.model import Model

__all__ = ["PairBatch", "as_array", "batches", "gradients", "network_of"]


@dataclass(frozen=True)
class PairBatch:
    """Some pairs of prompts of one length, with their clean run and the outputs that replace its sources."""

    indices: list[int]
    """Index of each pair among all pairs."""
    pairs: list[Pair]
    """The pairs."""
    ids: Tensor
    """Token ids of the clean prompts, int64 [B, S]."""
    corrupted_ids: Tensor
    """Token ids of the corrupted prompts, int64 [B, S]."""
    clean: EdgeSources
    """Outputs of all sources in the clean run."""
    replacement: Tensor
    """What an edge from each source carries when it is left out of a circuit [B, source, S, D]."""
    logits: Floats
    """Clean logits at the last position, float64 [B, vocab]."""

    @property
    def change(self) -> Tensor:
        """Replacement minus clean output of each source [B, source, S, D]."""
        return self.replacement - self.clean.added


def network_of(model: Model) -> SplitNetwork:
    """Network of a model, typed for passes edge by edge; ConfigError if weights are streamed from disk."""
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
    """Yield the pairs in batches of equal length, with their clean runs.

    Arguments:
        model: The model.
        layout: Graph of the model: its sources, destinations and edges.
        pairs: All pairs.
        alternative: What an edge carries when it is left out; see `Alternative`.
        seed: Seed of the prompts drawn for "resampled".
        memory: Memory in bytes beside the model.
        only: Index of a single pair to run; None for all.
    """
    network = network_of(model)
    for group in by_length(pairs):
        length, element = len(pairs[group[0]].clean), network.dtype.itemsize
        # Clean outputs, replacements and their difference are in memory at once, hence the factor 3; a
        # quarter of the budget, as runs of circuits and backward passes need the rest.
        bytes_per_pair = 3 * len(layout.sources) * length * model.config.hidden_size * element
        batch_size = max(1, memory // 4 // bytes_per_pair)
        parts = [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
        # Over all pairs of this length, whatever the batch or `only`: a pair's numbers depend on neither.
        mean = _mean(model, layout, pairs, parts) if alternative == "mean" else None
        donors = _donors(group, seed)
        for indices in parts if only is None else [[index] for index in group if index == only]:
            batch_pairs = [pairs[index] for index in indices]
            ids, corrupted = (
                _ids(model, [getattr(pair, name) for pair in batch_pairs]) for name in ("clean", "corrupted")
            )
            clean = sources_of(network, layout, ids)
            if alternative == "zero":
                replacement = torch.zeros_like(clean.added)
            elif mean is not None:
                replacement = mean.expand_as(clean.added)
            else:
                donor_ids = _ids(model, [pairs[donors[index]].clean for index in indices])
                replacement_ids = corrupted if alternative == "corrupted" else donor_ids
                replacement = sources_of(network, layout, replacement_ids).added
            # Metrics read the last position only, so one row per prompt is unembedded, not a whole prompt.
            logits = network.unembed(network.final_norm(clean.streams.logits[:, -1]), Logits())
            yield PairBatch(indices, batch_pairs, ids, corrupted, clean, replacement, as_array(logits))


def as_array(logits: Tensor) -> Floats:
    """Logits as a float64 numpy array, which metrics read."""
    values: Floats = logits.double().cpu().numpy()
    return values


def gradients(batch: PairBatch, logits: Tensor) -> Tensor:
    """Gradient of each pair's metric with respect to the last logits of its run.

    Arguments:
        batch: The pairs, with their clean logits.
        logits: Logits at the last position of the runs [B, vocab].

    Returns:
        Gradients [B, vocab], in the dtype and on the device of the logits.
    """
    # In closed form, in float64 (`Metric.gradient`), not by autograd: users define metrics in numpy.
    runs = as_array(logits)
    gradient = np.zeros_like(runs)
    for row, (pair, run, clean) in enumerate(zip(batch.pairs, runs, batch.logits, strict=True)):
        tokens = tokens_of(pair.metric)
        columns = slice(None) if tokens is None else tokens
        gradient[row, columns] = pair.metric.gradient(run[columns], clean[columns])
    return torch.from_numpy(gradient).to(logits)


def _mean(model: Model, layout: Layout, pairs: Sequence[Pair], parts: Sequence[Sequence[int]]) -> Tensor:
    """Mean output of each source over the clean prompts of one length [source, S, D].

    `parts` are the indices of these pairs, in batches.
    """
    summed, count = None, 0
    for indices in parts:
        ids = _ids(model, [pairs[index].clean for index in indices])
        # Summed in float64, so that the mean does not depend on how pairs are batched.
        added = sources_of(network_of(model), layout, ids).added.double().sum(0)
        summed, count = added if summed is None else summed + added, count + len(indices)
    assert summed is not None  # there are pairs
    return (summed / count).to(model.dtype)


def _donors(group: Sequence[int], seed: int) -> dict[int, int]:
    """For each pair of a group, another pair whose clean prompt gives its replacements: donor by pair."""
    order = np.random.default_rng(seed).permutation(len(group))
    # A random cycle: no pair is its own donor, and each is used once.
    shifted = np.roll(order, 1)
    return {group[int(pair)]: group[int(donor)] for pair, donor in zip(order, shifted, strict=True)}


def _ids(model: Model, rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of prompts of equal length as a tensor on the model's device, int64 [prompt, position]."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=model.device)
