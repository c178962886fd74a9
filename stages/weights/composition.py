"""Composition scores: how much of what a head writes a later head reads, as query, as key, as value.

Border: matrices of a model; runs nothing. Idea (Elhage et al. 2021, section "Path Expansion";
TransformerLens' `all_composition_scores`): with OV of the earlier head and QK, QK' or OV of the later one,

    Q: |OV QK| / (|OV| |QK|)     K: |OV QK'| / (|OV| |QK|)     V: |OV OV'| / (|OV| |OV'|)

in Frobenius norms, rows being what is read. It is between 0 and 1 and not 0 for unrelated matrices: of rank r
in a stream of width h about sqrt(r / h), more where singular values are few. So each pair stands beside the
same head writing elsewhere (random_heads.py), as often as is asked.

Norms come from triangles of the factors (R of QR), so that a pair costs one product [d_head, hidden, d_head].
With rope, QK is that of a query and a key at the same place, which is how it is reported of such models.

Axes: mode (Q, K, V), source_layer, source_head (writes), layer, head (reads), draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from .circuits import key_queries
from .matrices import attending, heads_in
from .random_heads import random_writers

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["MODES", "composition_scores"]

MODES = ("Q", "K", "V")
PAIRS = ("mode", "source_layer", "source_head", "layer", "head")


@stage(
    version=1,
    inputs={},
    outputs={
        "score": Output(PAIRS, "1", "composition score, NaN where the head that writes is not before"),
        "control": Output(PAIRS, "1", "its mean where the head writes elsewhere, as much"),
        "share_as_large": Output(PAIRS, "1", "share of such heads whose score is as large"),
        "largest_control": Output(("mode", "draw"), "1", "largest control of all pairs, by draw"),
        "ov_norm": Output(("layer", "head"), "1", "Frobenius norm of OV"),
    },
    resources=("weights",),
)
def composition_scores(
    *, weights: Matrices, modes: Sequence[str] = MODES, controls: int = 20, seed: int = 0
) -> xr.Dataset:
    """Composition scores of all pairs of heads, and of heads that write elsewhere.

    modes: which of "Q", "K", "V". controls: random heads each head that writes is replaced by, in turn.
    Returns float64; layers that do not attend are left out. share_as_large counts the pair itself, so that it
    is never 0. Raises ConfigError for an unknown mode, and for heads whose circuits are no matrices.
    """
    import xarray as xr

    if unknown := [mode for mode in modes if mode not in MODES] or not modes:
        raise ConfigError(f"expected modes among {', '.join(MODES)}, found {unknown or 'none'}")
    layers = attending(weights.config)
    heads = heads_in(weights.config, layers[0]).count
    reads = [_reads(weights, layer, modes) for layer in layers]
    shape = (len(modes), len(layers), heads, len(layers), heads)
    score, total, reached = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape)
    largest = np.full((len(modes), controls), np.nan)
    ov_norm = np.zeros((len(layers), heads))
    for i, source in enumerate(layers):
        written = _triangles(_values(weights, source)) @ _outputs(weights, source)
        ov_norm[i] = _norms(written)
        found = _scores(written, reads[i + 1 :], len(modes))
        score[:, i, :, i + 1 :] = found
        rng = np.random.default_rng([seed, source])
        for draw in range(controls if found.size else 0):
            drawn = _scores(random_writers(written, rng), reads[i + 1 :], len(modes))
            total[:, i, :, i + 1 :] += drawn
            reached[:, i, :, i + 1 :] += drawn >= found
            highest = np.nanmax(drawn.reshape(len(modes), -1), axis=1)
            largest[:, draw] = np.fmax(largest[:, draw], highest)
    nothing = np.isnan(score)
    control = np.where(nothing | (controls == 0), np.nan, total / max(1, controls))
    share = np.where(nothing, np.nan, (1 + reached) / (1 + controls))
    return xr.Dataset(
        {
            "score": (PAIRS, score),
            "control": (PAIRS, control),
            "share_as_large": (PAIRS, share),
            "largest_control": (("mode", "draw"), largest),
            "ov_norm": (("layer", "head"), ov_norm),
        },
        {"mode": list(modes), "source_layer": layers, "layer": layers},
    )


def _reads(weights: Matrices, layer: int, modes: Sequence[str]) -> Floats:
    """What the heads of a layer read with, times the triangle of what stands behind it in their circuits,
    over the norm of these: [mode, head, hidden, d_head]."""
    heads = range(heads_in(weights.config, layer).count)
    found: dict[str, Floats] = {}
    if {"Q", "K"} & set(modes):
        pairs = [key_queries(weights, layer, head) for head in heads]
        queries, keys = (np.stack(each).astype(np.float64) for each in zip(*pairs, strict=True))
        found |= {"Q": _joined(queries, keys), "K": _joined(keys, queries)}
    if "V" in modes:
        found["V"] = _joined(_values(weights, layer), np.swapaxes(_outputs(weights, layer), 1, 2))
    stacked = np.stack([found[mode] for mode in modes])
    with np.errstate(invalid="ignore", divide="ignore"):
        return stacked / _norms(stacked)[..., None, None]


def _joined(read: Array, behind: Array) -> Floats:
    """[head, hidden, d_head] with the norms of read @ behind'."""
    found: Floats = read @ np.swapaxes(_triangles(behind), 1, 2)
    return found


def _scores(written: Floats, reads: Sequence[Floats], modes: int) -> Floats:
    """[mode, source head, layer, head].

    written [source head, d_head, hidden]: what a head writes with, behind the triangle of what it reads with.
    """
    heads, size, hidden = written.shape
    if not reads:
        return np.empty((modes, heads, 0, heads))
    flat = written.reshape(-1, hidden)
    with np.errstate(invalid="ignore", divide="ignore"):
        flat = flat / np.repeat(_norms(written), size)[:, None]
    found = np.empty((modes, heads, len(reads), reads[0].shape[1]))
    for j, of_layer in enumerate(reads):
        met = flat @ np.moveaxis(of_layer, 2, 0).reshape(hidden, -1)
        squares = np.square(met).reshape(heads, size, modes, of_layer.shape[1], -1).sum(axis=(1, 4))
        found[:, :, j] = np.sqrt(squares).swapaxes(0, 1)
    return found


def _values(weights: Matrices, layer: int) -> Floats:
    heads = range(heads_in(weights.config, layer).count)
    return np.stack([weights.projection("v", layer, head).matrix for head in heads]).astype(np.float64)


def _outputs(weights: Matrices, layer: int) -> Floats:
    heads = range(heads_in(weights.config, layer).count)
    return np.stack([weights.output(layer, head) for head in heads]).astype(np.float64)


def _triangles(tall: Array) -> Floats:
    """R of each [..., row, column] = Q R, [..., min(row, column), column]."""
    return np.asarray(np.linalg.qr(tall, mode="r"))


def _norms(matrices: Array) -> Floats:
    found: Floats = np.linalg.norm(matrices, axis=(-2, -1))
    return found
