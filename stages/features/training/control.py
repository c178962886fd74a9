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
"""Penalty of the ridge regression of decoders, relative to the mean squared activation of a feature."""
_SAMPLED = 512
"""Rows taken from each block to set thresholds, because one block alone would not be representative."""


def random_features(
    layers: Mapping[int, LayerFeatures],
    blocks: Callable[[], Iterable[Mapping[VariableLayer, Tensor]]],
    read: str,
    write: str,
    *,
    seed: int,
    fitted: bool = True,
) -> dict[int, LayerFeatures]:
    """Random features as a control: as many as in trained layers, with the same targets and L0.

    Each layer reads its states centred and whitened by their mean and spread over a sample of rows, which
    also sets the thresholds.

    Arguments:
        layers: The trained features by layer.
        blocks: Function that returns the blocks of activations [row, width] by (hook kind, layer); called
            twice.
        read: Hook kind that features read.
        write: Hook kind that features write to.
        seed: Seed of the random directions.
        fitted: Whether decoders are fitted by ridge regression on all rows; else they have random directions,
            the norms of the trained decoders, and activations of the same mean size.
    """
    sampled_rows: dict[int, list[Tensor]] = {layer: [] for layer in sorted(layers)}
    for block in blocks():
        for layer, samples_of_blocks in sampled_rows.items():
            rows = block[read, layer]
            samples_of_blocks.append(rows[:: max(1, len(rows) // _SAMPLED)])
    generator = torch.Generator().manual_seed(seed)
    samples = {layer: torch.cat(parts) for layer, parts in sampled_rows.items()}
    drawn = {layer: _with_random_encoder(layers[layer], samples[layer], generator) for layer in samples}
    if not fitted:
        return {
            layer: _with_random_decoders(features, layers[layer], samples[layer], generator)
            for layer, features in drawn.items()
        }
    # One regression for all layers: the features of several layers write to the same target.
    columns_of_layer, total = {}, 0
    for layer, features in drawn.items():
        columns_of_layer[layer] = slice(total, total + features.n_features)
        total += features.n_features
    # Sums in float64: the normal equations square the condition number of the activations.
    gram = torch.zeros(total + 1, total + 1, dtype=torch.float64)
    products_with_target = {
        layer: torch.zeros(total + 1, features.W_dec[layer].shape[1]).double()
        for layer, features in drawn.items()
    }
    for block in blocks():
        parts = [features.encode(block[read, layer]) for layer, features in drawn.items()]
        # The last column is a constant feature, whose decoder row will be the bias.
        activations = torch.cat([*parts, torch.ones(len(parts[0]), 1)], dim=1)
        gram.add_(activations.T @ activations)
        for target, products in products_with_target.items():
            products.add_(activations.T @ block[write, target])
    decoders = {layer: dict(features.W_dec) for layer, features in drawn.items()}
    biases: dict[int, Tensor] = {}
    for target, products in products_with_target.items():
        writers = [layer for layer in drawn if target in layers[layer].targets]
        feature_columns = [torch.arange(total)[columns_of_layer[layer]] for layer in writers]
        columns = torch.cat([*feature_columns, torch.tensor([total])])
        gram_part = gram[columns][:, columns]
        gram_part.diagonal()[:-1] += RIDGE * gram_part.diagonal()[:-1].mean()
        # The last row belongs to the constant feature: the bias, which is not penalised.
        solved = torch.linalg.solve(gram_part, products[columns]).float()
        biases[target] = solved[-1]
        for number, layer in enumerate(writers):
            size = drawn[layer].n_features
            decoders[layer][target] = solved[number * size : (number + 1) * size]
    return {
        layer: replace(features, W_dec=decoders[layer], b_dec=biases[layer])
        for layer, features in drawn.items()
    }


def _with_random_encoder(trained: LayerFeatures, rows: Tensor, generator: torch.Generator) -> LayerFeatures:
    """The trained features with random encoder rows, and one threshold that gives the same L0 on `rows`."""
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


def _with_random_decoders(
    drawn: LayerFeatures, trained: LayerFeatures, rows: Tensor, generator: torch.Generator
) -> LayerFeatures:
    """Features of a random encoder with random decoders, which write vectors as large as trained ones do."""
    assert isinstance(drawn.activation, JumpReLU)
    assert drawn.b_enc is not None
    # Scaling encoder, bias and threshold together leaves the set of active features unchanged.
    scale = float(trained.encode(rows).sum() / drawn.encode(rows).sum())
    decoders = {}
    for target in trained.targets:
        trained_rows = trained.decoder_rows(slice(None), target)
        directions = torch.nn.functional.normalize(
            torch.randn(trained_rows.shape, generator=generator), dim=1
        )
        decoders[target] = directions * trained_rows.norm(dim=1, keepdim=True)
    return replace(
        drawn,
        W_enc=drawn.W_enc * scale,
        b_enc=drawn.b_enc * scale,
        activation=JumpReLU(drawn.activation.threshold * scale),
        W_dec=decoders,
        b_dec=trained.b_dec,
    )
