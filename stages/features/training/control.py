"""Controls for trained dictionaries: random features of the same number and sparsity.

With fitted decoders: a random encoder loses little information, and least squares reconstructs as much as
possible; the gap between this control and a trained dictionary is what training achieved. With random
decoders as well, activations carry no information about what is written.

Border: features and rows in blocks in, features out.
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
"""Ridge penalty, relative to the mean square of an activation."""
_SAMPLED = 512
"""Rows of each block from which thresholds are set; a single block would not be a representative sample."""


def random_features(
    layers: Mapping[int, LayerFeatures],
    blocks: Callable[[], Iterable[Mapping[VariableLayer, Tensor]]],
    read: str,
    write: str,
    *,
    seed: int,
    fitted: bool = True,
) -> dict[int, LayerFeatures]:
    """Random features with the sizes, targets and L0 of `layers`.

    Each layer reads its states centred and whitened by their mean and spread over a sample of rows, which
    also sets the thresholds.

    Arguments:
        layers: The trained features.
        blocks: Returns the blocks of rows [row, width] by (hook kind, layer); called more than once.
        read: Hook kind that features read.
        write: Hook kind that they write to.
        seed: Seed of the directions.
        fitted: Whether decoders are fitted by ridge regression on all rows; else they have random directions,
            the norms of the trained decoders, and activations of the same mean size.
    """
    rows: dict[int, list[Tensor]] = {layer: [] for layer in sorted(layers)}
    for block in blocks():
        for layer, sampled in rows.items():
            sampled.append(block[read, layer][:: max(1, len(block[read, layer]) // _SAMPLED)])
    generator = torch.Generator().manual_seed(seed)
    samples = {layer: torch.cat(sampled) for layer, sampled in rows.items()}
    drawn = {layer: _drawn(layers[layer], samples[layer], generator) for layer in samples}
    if not fitted:
        return {
            layer: _unfitted(features, layers[layer], samples[layer], generator)
            for layer, features in drawn.items()
        }
    # One regression for all layers: the features of several layers write to the same target.
    offsets, total = {}, 0
    for layer, features in drawn.items():
        offsets[layer] = slice(total, total + features.n_features)
        total += features.n_features
    # Sums in float64: the normal equations square the condition number of the activations.
    gram = torch.zeros(total + 1, total + 1, dtype=torch.float64)
    moments = {
        layer: torch.zeros(total + 1, features.W_dec[layer].shape[1]).double()
        for layer, features in drawn.items()
    }
    for block in blocks():
        active = torch.cat([features.encode(block[read, layer]) for layer, features in drawn.items()], dim=1)
        # A constant feature whose decoder row is the bias.
        active = torch.cat([active, torch.ones(len(active), 1)], dim=1)
        gram.add_(active.T @ active)
        for m, sums in moments.items():
            sums.add_(active.T @ block[write, m])
    decoders = {layer: dict(features.W_dec) for layer, features in drawn.items()}
    biases: dict[int, Tensor] = {}
    for m, sums in moments.items():
        writers = [layer for layer in drawn if m in layers[layer].targets]
        columns = torch.cat(
            [*(torch.arange(total)[offsets[layer]] for layer in writers), torch.tensor([total])]
        )
        gram_part = gram[columns][:, columns]
        gram_part.diagonal()[:-1] += RIDGE * gram_part.diagonal()[:-1].mean()
        # The last row belongs to the constant feature: the bias, which is not penalised.
        solved = torch.linalg.solve(gram_part, sums[columns]).float()
        biases[m] = solved[-1]
        for number, layer in enumerate(writers):
            size = drawn[layer].n_features
            decoders[layer][m] = solved[number * size : (number + 1) * size]
    return {
        layer: replace(features, W_dec=decoders[layer], b_dec=biases[layer])
        for layer, features in drawn.items()
    }


def _drawn(trained: LayerFeatures, rows: Tensor, generator: torch.Generator) -> LayerFeatures:
    """Random encoder rows, with the threshold at which as many features are active as in `trained`."""
    mean = rows.mean(0)
    # Divided by the spread of each entry: random directions in whitened states.
    W_enc = torch.randn(trained.W_enc.shape, generator=generator) / rows.std(0).clamp(min=1e-8)
    unthresholded = LayerFeatures(
        trained.layer, W_enc, trained.W_dec, JumpReLU(torch.zeros(())), b_enc=-W_enc @ mean
    )
    n_active = int((trained.encode(rows) != 0).sum())
    pre = unthresholded.preactivations(rows).flatten()
    # JumpReLU keeps values above the threshold, so exactly n_active values pass.
    threshold = pre.kthvalue(len(pre) - n_active).values
    return replace(
        unthresholded, activation=JumpReLU(torch.full((trained.n_features,), float(threshold)).clamp(min=0))
    )


def _unfitted(
    drawn: LayerFeatures, like: LayerFeatures, rows: Tensor, generator: torch.Generator
) -> LayerFeatures:
    """Random features with random decoders that write vectors of the same mean size as those of `like`."""
    assert isinstance(drawn.activation, JumpReLU)
    assert drawn.b_enc is not None
    # Scaling encoder, bias and threshold together leaves the set of active features unchanged.
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
