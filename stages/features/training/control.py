"""Controls: features of random direction, as many and as sparse as trained ones.

What a dictionary must beat. With decoders fitted: a random encoder throws little away, and least squares
makes the best of it; what is left between it and a trained dictionary is what features have learned. With
decoders of random direction as well, what is active says nothing of what is written.

Border: features and rows in blocks, features out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layers.activations import JumpReLU
from ..layers.layer import LayerFeatures

if TYPE_CHECKING:
    from ....store.runs.committed import VariableLayer

__all__ = ["random_features"]

RIDGE = 1e-4
"""Penalty, relative to the mean square of an activation."""
_KEPT = 512
"""Rows of a block by which thresholds are set; those of one block alone are no sample of all."""


def random_features(
    layers: Mapping[int, LayerFeatures],
    blocks: Callable[[], Iterable[Mapping[VariableLayer, Tensor]]],
    read: str,
    write: str,
    *,
    seed: int,
    fitted: bool = True,
) -> dict[int, LayerFeatures]:
    """Features of random directions with the sizes, targets and L0 of `layers`; decoders fitted by ridge
    regression on all rows, or of random direction with the norms of theirs and activations as large.

    blocks: gives the rows anew each time it is called, cell -> [row, width]; some rows of each set
    thresholds. Each layer reads its states centred and whitened by their mean and spread over those rows.
    """
    rows: dict[int, list[Tensor]] = {layer: [] for layer in sorted(layers)}
    for block in blocks():
        for layer, held in rows.items():
            held.append(block[read, layer][:: max(1, len(block[read, layer]) // _KEPT)])
    generator = torch.Generator().manual_seed(seed)
    seen = {layer: torch.cat(held) for layer, held in rows.items()}
    drawn = {layer: _drawn(layers[layer], seen[layer], generator) for layer in seen}
    if not fitted:
        return {layer: _unfitted(it, layers[layer], seen[layer], generator) for layer, it in drawn.items()}
    offsets, total = {}, 0
    for layer, it in drawn.items():
        offsets[layer] = slice(total, total + it.n_features)
        total += it.n_features
    gram = torch.zeros(total + 1, total + 1, dtype=torch.float64)
    moments = {
        layer: torch.zeros(total + 1, it.W_dec[layer].shape[1]).double() for layer, it in drawn.items()
    }
    for block in blocks():
        active = torch.cat([it.encode(block[read, layer]) for layer, it in drawn.items()], dim=1)
        active = torch.cat([active, torch.ones(len(active), 1)], dim=1)
        gram.add_(active.T @ active)
        for m, sums in moments.items():
            sums.add_(active.T @ block[write, m])
    found = {layer: dict(it.W_dec) for layer, it in drawn.items()}
    biases: dict[int, Tensor] = {}
    for m, sums in moments.items():
        writers = [layer for layer in drawn if m in layers[layer].targets]
        chosen = torch.cat(
            [*(torch.arange(total)[offsets[layer]] for layer in writers), torch.tensor([total])]
        )
        part = gram[chosen][:, chosen]
        part.diagonal()[:-1] += RIDGE * part.diagonal()[:-1].mean()
        solved = torch.linalg.solve(part, sums[chosen]).float()
        biases[m] = solved[-1]
        for place, layer in enumerate(writers):
            size = drawn[layer].n_features
            found[layer][m] = solved[place * size : (place + 1) * size]
    return {layer: replace(it, W_dec=found[layer], b_dec=biases[layer]) for layer, it in drawn.items()}


def _drawn(like: LayerFeatures, rows: Tensor, generator: torch.Generator) -> LayerFeatures:
    """Random encoder rows, and the threshold at which as many fire as in `like`."""
    mean = rows.mean(0)
    W_enc = torch.randn(like.W_enc.shape, generator=generator) / rows.std(0).clamp(min=1e-8)
    open_ = LayerFeatures(like.layer, W_enc, like.W_dec, JumpReLU(torch.zeros(())), b_enc=-W_enc @ mean)
    wanted = int((like.encode(rows) != 0).sum())
    pre = open_.preactivations(rows).flatten()
    least = pre.kthvalue(len(pre) - wanted).values
    return replace(open_, activation=JumpReLU(torch.full((like.n_features,), float(least)).clamp(min=0)))


def _unfitted(
    drawn: LayerFeatures, like: LayerFeatures, rows: Tensor, generator: torch.Generator
) -> LayerFeatures:
    """Drawn features that write random directions as strongly as `like` writes its own, on average."""
    assert isinstance(drawn.activation, JumpReLU)
    assert drawn.b_enc is not None
    scale = float(like.encode(rows).sum() / drawn.encode(rows).sum())
    decoders = {}
    for target in like.targets:
        trained = like.decoder_rows(slice(None), target)
        random = torch.nn.functional.normalize(torch.randn(trained.shape, generator=generator), dim=1)
        decoders[target] = random * trained.norm(dim=1, keepdim=True)
    return replace(
        drawn,
        W_enc=drawn.W_enc * scale,
        b_enc=drawn.b_enc * scale,
        activation=JumpReLU(drawn.activation.threshold * scale),
        W_dec=decoders,
        b_dec=like.b_dec,
    )
