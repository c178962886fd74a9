"""Quality of features: reconstruction error, number of active features, dead features, densities.

Border: features and rows of activations, stored or not; runs no model (replacement.py does).

FVU = sum |y - y_hat|^2 / sum |y - mean y|^2 over all measured rows; EV = 1 - FVU. Not comparable with
sparsify's FVU, which uses the mean of each batch, nor with SAELens's explained_variance, which subtracts
another mean.

Axes: layer (read), target (written), feature; bins of log10 density.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ....store.errors import DictionaryError

if TYPE_CHECKING:
    from ....store.runs.committed import VariableLayer
    from ..layers.layer import LayerFeatures

__all__ = ["decoder_likeness", "measure", "summary"]

DENSITY_BINS = np.linspace(-6.0, 0.0, 25)
"""Edges of the histogram of log10 densities."""
_BLOCK = 4096
"""Number of decoder rows that are compared with all others at once."""


def measure(
    layers: Mapping[int, LayerFeatures],
    blocks: Iterable[Mapping[VariableLayer, Tensor]],
    read: str,
    write: str,
) -> xr.Dataset:
    """Measure reconstruction, sparsity and dead features of a dictionary on activations.

    Arguments:
        layers: Features by layer.
        blocks: Blocks of activations [row, width], by (hook kind, layer).
        read: Hook kind that features read.
        write: Hook kind that features write to.

    Returns:
        fvu [target]; mse [target], mean over entries; cosine [target], mean over rows, of target and
        reconstruction, both minus the mean target row of the block; l0 [layer]; l0_count [layer, active]:
        rows with that many active features; density [layer, feature]: share of rows in which a feature is
        active; density_count [layer, log_density]: histogram of log10 density; dead [layer]: share of
        features that are never active.

    Raises:
        DictionaryError: The blocks hold no rows.
    """
    sums = _FigureSums(layers)
    for block in blocks:
        sums.add(block, read, write)
    return sums.dataset()


def summary(measured: xr.Dataset, lost: xr.Dataset | None = None) -> dict[str, Any]:
    """The results of `measure`, and of `replacement_loss`, as one JSON object.

    Per layer: fvu, cosine, l0, dead, very_dense (share of features active in more than a tenth of the rows).

    Arguments:
        measured: Result of `measure`.
        lost: Result of `replacement_loss`; None if the loss was not measured.
    """
    by_layer = {
        "fvu": measured.fvu.values,
        "cosine": measured.cosine.values,
        "l0": measured.l0.values,
        "dead": measured.dead.values,
        "very_dense": (measured.density > 0.1).mean("feature").values,
    }
    figures: dict[str, Any] = {"layers": measured.layer.values.tolist(), "rows": int(measured.attrs["rows"])}
    figures |= {name: [round(float(value), 5) for value in values] for name, values in by_layer.items()}
    if lost is not None:
        figures["loss"] = {
            "tokens": int(lost.attrs["tokens"]),
            "skip_positions": int(lost.attrs["skip_positions"]),
            "clean": round(float(lost.ce_clean), 5),
            "places": {str(place): _loss_figures(lost.sel(place=place)) for place in lost.place.values},
        }
    return figures


def _loss_figures(lost: xr.Dataset) -> dict[str, float]:
    """Losses in nats and recovered shares where one layer, or all, are replaced; rounded to 5 digits."""
    values = {f"ce_{variant}": float(lost.ce.sel(way=variant)) for variant in lost.way.values}
    shares = {
        f"{name}_recovered_{ablation}": float(lost[f"{name}_recovered"].sel(ablation=ablation))
        for name in ("ce", "kl")
        for ablation in lost.ablation.values
    }
    return {name: round(value, 5) for name, value in (values | shares).items()}


class _FigureSums:
    """Running sums over blocks, from which `measure` computes its figures."""

    def __init__(self, layers: Mapping[int, LayerFeatures]) -> None:
        self.layers = dict(sorted(layers.items()))
        size = max(features.n_features for features in layers.values())
        self.rows = 0
        self.fired = {
            layer: torch.zeros(features.n_features, dtype=torch.int64)
            for layer, features in self.layers.items()
        }
        self.counts = {layer: torch.zeros(size + 1, dtype=torch.int64) for layer in self.layers}
        self.error = dict.fromkeys(self.layers, 0.0)
        self.squares = dict.fromkeys(self.layers, 0.0)
        self.cosine = dict.fromkeys(self.layers, 0.0)
        self.sum: dict[int, Tensor] = {}
        self.width = dict.fromkeys(self.layers, 1)

    def add(self, block: Mapping[VariableLayer, Tensor], read: str, write: str) -> None:
        rebuilt: dict[int, Tensor] = {}
        for layer, features in self.layers.items():
            activations = features.encode(block[read, layer])
            is_active = activations != 0
            self.fired[layer] += is_active.sum(0)
            self.counts[layer] += torch.bincount(is_active.sum(1), minlength=len(self.counts[layer]))
            for target in features.targets:
                part = features.decode(activations, target)
                rebuilt[target] = rebuilt[target] + part if target in rebuilt else part
        for target, features in self.layers.items():
            expected = block[write, target]
            self._compare(
                target, features.finish(rebuilt[target], block[read, target]).double(), expected.double()
            )
        # All targets have the same rows, so those of the last target are counted.
        self.rows += len(expected)

    def _compare(self, target: int, rebuilt: Tensor, expected: Tensor) -> None:
        mean = expected.mean(0)
        self.error[target] += float((rebuilt - expected).square().sum())
        self.squares[target] += float(expected.square().sum())
        self.sum[target] = self.sum.get(target, 0.0) + expected.sum(0)
        # The mean is removed: otherwise a large constant offset would give a cosine near 1.
        self.cosine[target] += float(torch.cosine_similarity(rebuilt - mean, expected - mean, dim=1).sum())
        self.width[target] = expected.shape[1]

    def dataset(self) -> xr.Dataset:
        if not self.rows:
            raise DictionaryError(
                "expected activations on which to measure the dictionary, found none; give prompts longer "
                "than the positions that are skipped"
            )
        n, order = self.rows, list(self.layers)
        # Sums are float64: the variance is a small difference of large sums.
        variance = {m: self.squares[m] - float(self.sum[m] @ self.sum[m]) / n for m in order}
        density = np.stack([(self.fired[layer] / n).numpy() for layer in order])
        with np.errstate(divide="ignore"):
            # Dead features (-inf) count in the first bin.
            logs = np.log10(density).clip(DENSITY_BINS[0], None)
        histogram = np.stack([np.histogram(row, DENSITY_BINS)[0] for row in logs])
        counts = np.stack([self.counts[layer].numpy() for layer in order])
        return xr.Dataset(
            {
                "fvu": (
                    "target",
                    [self.error[m] / variance[m] if variance[m] > 0 else np.nan for m in order],
                ),
                "mse": ("target", [self.error[m] / (n * self.width[m]) for m in order]),
                "cosine": ("target", [self.cosine[m] / n for m in order]),
                "l0": ("layer", (counts * np.arange(counts.shape[1])).sum(1) / n),
                "l0_count": (("layer", "active"), counts),
                "density": (("layer", "feature"), density),
                "density_count": (("layer", "log_density"), histogram),
                "dead": ("layer", (density == 0).mean(1)),
            },
            {"layer": order, "target": order, "log_density": (DENSITY_BINS[1:] + DENSITY_BINS[:-1]) / 2},
            {"rows": n},
        )


def decoder_likeness(features: LayerFeatures) -> Tensor:
    """Largest cosine between a feature's decoder and the decoder of any other feature, float32 [feature].

    Decoders for all targets are concatenated. 1 means a duplicate; NaN if there is only one feature.
    """
    rows = torch.cat([features.decoder_rows(slice(None), target) for target in features.targets], dim=1)
    rows = torch.nn.functional.normalize(rows, dim=1)
    if len(rows) < 2:
        return torch.full((len(rows),), torch.nan)
    maxima = []
    for start in range(0, len(rows), _BLOCK):
        cosines = rows[start : start + _BLOCK] @ rows.T
        # The cosine of a feature with itself is 1 and does not count.
        cosines[torch.arange(len(cosines)), torch.arange(start, start + len(cosines))] = -torch.inf
        maxima.append(cosines.max(1).values)
    return torch.cat(maxima)
