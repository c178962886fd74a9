"""Composition scores: how much of what an earlier head writes a later head reads as query, key or value.

Border: matrices of a model; no forward pass. With OV of the earlier head and QK, QK^T or OV of the later one
(Elhage et al. 2021, section "Path Expansion"; TransformerLens' `all_composition_scores`):

    Q: |OV QK| / (|OV| |QK|)     K: |OV QK^T| / (|OV| |QK|)     V: |OV OV'| / (|OV| |OV'|)

in Frobenius norms, with rows on the side that is read. Scores lie between 0 and 1 and are not 0 for unrelated
matrices: about sqrt(r / h) for rank r in a stream of width h, more where few singular values dominate. So
each pair is compared with the same head writing into random directions (random_heads.py).

Norms are computed from triangular factors (R of QR), so that a pair costs one product [d_head, hidden,
d_head]. With rope, QK is that of distance 0, as is usually reported.

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
from .random_heads import RandomWriters

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["MODES", "composition_scores"]

MODES = ("Q", "K", "V")
"""Modes of composition: the later head reads what the earlier one wrote as query, key or value."""
PAIRS = ("mode", "source_layer", "source_head", "layer", "head")
"""Dims of one value per mode and pair of heads."""


@stage(
    version=1,
    inputs={},
    outputs={
        "score": Output(PAIRS, "1", "composition score; NaN unless the writing head's layer is before"),
        "control": Output(PAIRS, "1", "mean score of heads that write as much in random directions"),
        "share_as_large": Output(PAIRS, "1", "share of these random heads whose score is as large"),
        "largest_control": Output(("mode", "draw"), "1", "largest control of all pairs, by draw"),
        "ov_norm": Output(("layer", "head"), "1", "Frobenius norm of OV"),
    },
    resources=("weights",),
)
def composition_scores(
    *, weights: Matrices, modes: Sequence[str] = MODES, controls: int = 20, seed: int = 0
) -> xr.Dataset:
    """Composition scores of all pairs of heads, and of random heads in place of the earlier one.

    Arguments:
        weights: matrices of the model.
        modes: modes of composition to compute, from `MODES`.
        controls: number of random heads that replace each writing head.
        seed: seed of the random heads.

    Returns:
        float64; layers without attention are left out. `share_as_large` counts the pair itself, so it is
        never 0.

    Raises:
        ConfigError: an unknown mode, or heads without QK or OV circuits.
    """
    import xarray as xr

    if not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(
            f"expected at least one of {', '.join(MODES)} as the modes of composition, found {list(modes)}"
        )
    layers = attending(weights.config)
    heads = heads_in(weights.config, layers[0]).num_attention_heads
    reads = [_reading_factors(weights, layer, modes) for layer in layers]
    reads_32 = [layer_reads.astype(np.float32) for layer_reads in reads]
    shape = (len(modes), len(layers), heads, len(layers), heads)
    score, control_sums, n_as_large = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape)
    largest = np.full((len(modes), controls), np.nan)
    ov_norm = np.zeros((len(layers), heads))
    for i, source in enumerate(layers):
        # With V = Q R, the OV circuit V O has the norms of R O.
        written = _triangles(_values(weights, source)) @ _outputs(weights, source)
        ov_norm[i] = _norms(written)
        scores = _scores(written, reads[i + 1 :], len(modes))
        score[:, i, :, i + 1 :] = scores
        # Seeded per layer: controls of one layer do not depend on which other layers attend.
        rng = np.random.default_rng([seed, source])
        random = RandomWriters.of(written)
        for draw in range(controls if scores.size else 0):
            # float32: a draw costs as much as all true scores, and needs no more than three digits.
            random_scores = _scores(random.draw(rng).astype(np.float32), reads_32[i + 1 :], len(modes))
            control_sums[:, i, :, i + 1 :] += random_scores
            n_as_large[:, i, :, i + 1 :] += random_scores >= scores
            # The largest control of all pairs per draw gives a p-value corrected for looking at every pair.
            highest = np.nanmax(random_scores.reshape(len(modes), -1), axis=1)
            # fmax ignores the NaN with which `largest` starts.
            largest[:, draw] = np.fmax(largest[:, draw], highest)
    is_unordered = np.isnan(score)
    control = np.where(is_unordered | (controls == 0), np.nan, control_sums / max(1, controls))
    share = np.where(is_unordered, np.nan, (1 + n_as_large) / (1 + controls))
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


def _reading_factors(weights: Matrices, layer: int, modes: Sequence[str]) -> Floats:
    """For each mode and head, a matrix [hidden, d_head] that replaces the circuit [hidden, hidden] with which
    the head reads, scaled to norm 1.

    A product with this matrix has the same Frobenius norm as the product with the circuit: a circuit A B^T
    with B = Q R is replaced by A R^T, as Q is orthonormal.

    Arguments:
        weights: matrices of the model.
        layer: layer of the reading heads.
        modes: modes of composition.

    Returns:
        float64 [mode, head, hidden, d_head].
    """
    heads = range(heads_in(weights.config, layer).num_attention_heads)
    by_mode: dict[str, Floats] = {}
    if {"Q", "K"} & set(modes):
        pairs = [key_queries(weights, layer, head) for head in heads]
        queries, keys = (np.stack(matrices).astype(np.float64) for matrices in zip(*pairs, strict=True))
        by_mode |= {"Q": _joined(queries, keys), "K": _joined(keys, queries)}
    if "V" in modes:
        by_mode["V"] = _joined(_values(weights, layer), np.swapaxes(_outputs(weights, layer), 1, 2))
    stacked = np.stack([by_mode[mode] for mode in modes])
    # A head of zeros has norm 0 and its scores are NaN, as their quotient is not defined.
    with np.errstate(invalid="ignore", divide="ignore"):
        return stacked / _norms(stacked)[..., None, None]


def _joined(read: Array, other: Array) -> Floats:
    """Matrices [head, hidden, d_head] with the same Frobenius norms as the products read @ other^T.

    Arguments:
        read: [head, hidden, d_head].
        other: [head, hidden, d_head].
    """
    # other = Q R with orthonormal Q, which changes no norm: |read other^T| = |read R^T|.
    joined: Floats = read @ np.swapaxes(_triangles(other), 1, 2)
    return joined


def _scores(written: Array, reads: Sequence[Array], modes: int) -> Floats:
    """Composition scores of the heads of one layer with those of later layers, [mode, source head, layer,
    head]: the Frobenius norm of the product of OV circuit and reading circuit, divided by both norms.

    Arguments:
        written: matrix with the norms of each source head's OV circuit, [source head, d_head, hidden]: R of
            the QR decomposition of its value matrix, times its output matrix.
        reads: for each later layer the result of `_reading_factors`, [mode, head, hidden, d_head].
        modes: number of modes of composition (Q, K, V).
    """
    heads, size, hidden = written.shape
    if not reads:
        return np.empty((modes, heads, 0, heads))
    flat = written.reshape(-1, hidden)
    with np.errstate(invalid="ignore", divide="ignore"):
        flat = flat / np.repeat(_norms(written), size)[:, None]
    scores = np.empty((modes, heads, len(reads), reads[0].shape[1]))
    for j, layer_reads in enumerate(reads):
        # One product of all writing heads with all reading heads of a layer: one BLAS call, not heads^2
        # calls.
        products = flat @ np.moveaxis(layer_reads, 2, 0).reshape(hidden, -1)
        products = products.reshape(heads, size, modes, layer_reads.shape[1], -1)
        # By einsum along the last, contiguous axis: `square` and `sum` take as long as the product itself.
        squares = np.einsum("...i,...i->...", products, products).sum(axis=1)
        scores[:, :, j] = np.sqrt(squares).swapaxes(0, 1)
    return scores


def _values(weights: Matrices, layer: int) -> Floats:
    """Value matrices of the heads of a layer, float64 [head, hidden, d_head]."""
    heads = range(heads_in(weights.config, layer).num_attention_heads)
    return np.stack([weights.projection("v", layer, head).matrix for head in heads]).astype(np.float64)


def _outputs(weights: Matrices, layer: int) -> Floats:
    """Output matrices of the heads of a layer, float64 [head, d_head, hidden]."""
    heads = range(heads_in(weights.config, layer).num_attention_heads)
    return np.stack([weights.output(layer, head) for head in heads]).astype(np.float64)


def _triangles(tall: Array) -> Floats:
    """R of the QR decomposition of each [..., row, column], [..., min(row, column), column]."""
    return np.asarray(np.linalg.qr(tall, mode="r"))


def _norms(matrices: Array) -> Floats:
    """Frobenius norms of matrices [..., row, column], [...]."""
    norms: Floats = np.linalg.norm(matrices, axis=(-2, -1))
    return norms
