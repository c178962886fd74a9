"""Composition scores: how much of what an earlier head writes a later head reads as query, key or value.

Border: matrices of a model; no forward pass. With OV of the earlier head and QK, QK^T or OV of the later one
(Elhage et al. 2021, section "Path Expansion"; TransformerLens' `all_composition_scores`):

    Q: |OV QK| / (|OV| |QK|)     K: |OV QK^T| / (|OV| |QK|)     V: |OV OV'| / (|OV| |OV'|)

in Frobenius norms, with rows on the side that is read. Scores lie between 0 and 1 and are not 0 for unrelated
matrices: about sqrt(r / h) for rank r in a stream of width h, more where few singular values dominate. So
each pair is compared with the same head writing into random directions (random_heads.py).

Norms are computed from triangular factors (R of QR), so that a pair costs one product [d_head, hidden,
d_head]; reading heads that share keys and values (grouped-query attention) cost one for their group. With
rope, QK is that of distance 0, as is usually reported.

Axes: mode (Q, K, V), source_layer, source_head (writes), layer, head (reads), draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    reads = [_readings(weights, layer, modes) for layer in layers]
    reads_32 = [[readings.astype(np.float32) for readings in layer_reads] for layer_reads in reads]
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


@dataclass(frozen=True)
class _Readings:
    """The circuits with which the heads of a layer read in one mode, as far as Frobenius norms depend on
    them.

    A circuit A B^T with B = Q R is replaced by A R^T, as Q is orthonormal. Heads with grouped keys and values
    (Ainslie et al. 2023) share A, so that products with A are computed once per group.
    """

    shared: Array
    """A of each group, or A R^T if no heads share A, [group, hidden, d_head]."""
    grams: Array | None
    """R^T R of each head, divided by the squared norm of its circuit, [group, head of the group, d_head *
    d_head]; None if R is part of `shared`, whose circuits then have norm 1."""

    @classmethod
    def of(cls, read: Array, other: Array) -> _Readings:
        """Circuits read @ other^T of the heads of a layer.

        Arguments:
            read: [head, hidden, d_head].
            other: [head, hidden, d_head].
        """
        triangles = _triangles(other)
        sizes = (size for size in range(len(read), 1, -1) if len(read) % size == 0)
        size = next((size for size in sizes if _is_shared(read, size)), 1)
        joined = read @ np.swapaxes(triangles, 1, 2)
        norms = _norms(joined)
        # A head of zeros has norm 0 and its scores are NaN, as their quotient is not defined.
        with np.errstate(invalid="ignore", divide="ignore"):
            if size == 1:
                return cls(joined / norms[:, None, None], None)
            grams = np.swapaxes(triangles, 1, 2) @ triangles / norms[:, None, None] ** 2
        return cls(read[::size], grams.reshape(len(read) // size, size, -1))

    def squared_norms(self, flat: Array, heads: int) -> Array:
        """Squared Frobenius norms of the products of written matrices with these circuits, [source head,
        head].

        Arguments:
            flat: matrices of the source heads below each other, [source head * row, hidden].
            heads: number of source heads.
        """
        groups, hidden, size = self.shared.shape
        # One product of all source heads with all groups: one BLAS call, not heads^2 calls.
        products = flat @ np.moveaxis(self.shared, 1, 0).reshape(hidden, -1)
        if self.grams is None:
            products = products.reshape(heads, -1, groups, size)
            # By einsum along the last, contiguous axis: `square` and `sum` take as long as the product.
            return np.asarray(np.einsum("...i,...i->...", products, products).sum(axis=1))
        products = np.moveaxis(products.reshape(heads, -1, groups, size), 2, 1)
        # |P R^T|^2 is the inner product of P^T P and R^T R.
        inner = np.swapaxes(products, 2, 3) @ products
        by_group = np.moveaxis(inner.reshape(heads, groups, -1), 1, 0) @ np.swapaxes(self.grams, 1, 2)
        return np.asarray(np.moveaxis(by_group, 0, 1).reshape(heads, -1))

    def astype(self, dtype: Any) -> _Readings:
        """The same circuits in another floating-point dtype."""
        return _Readings(self.shared.astype(dtype), None if self.grams is None else self.grams.astype(dtype))


def _is_shared(matrices: Array, size: int) -> bool:
    """Whether each `size` consecutive matrices are equal, [head, row, column]."""
    grouped = matrices.reshape(-1, size, *matrices.shape[1:])
    return bool((grouped == grouped[:, :1]).all())


def _readings(weights: Matrices, layer: int, modes: Sequence[str]) -> list[_Readings]:
    """For each mode, the circuits with which the heads of a layer read, float64.

    Arguments:
        weights: matrices of the model.
        layer: layer of the reading heads.
        modes: modes of composition.
    """
    heads = range(heads_in(weights.config, layer).num_attention_heads)
    by_mode: dict[str, _Readings] = {}
    if {"Q", "K"} & set(modes):
        pairs = [key_queries(weights, layer, head) for head in heads]
        queries, keys = (np.stack(matrices).astype(np.float64) for matrices in zip(*pairs, strict=True))
        by_mode |= {"Q": _Readings.of(queries, keys), "K": _Readings.of(keys, queries)}
    if "V" in modes:
        by_mode["V"] = _Readings.of(_values(weights, layer), np.swapaxes(_outputs(weights, layer), 1, 2))
    return [by_mode[mode] for mode in modes]


def _scores(written: Array, reads: Sequence[Sequence[_Readings]], modes: int) -> Floats:
    """Composition scores of the heads of one layer with those of later layers, [mode, source head, layer,
    head]: the Frobenius norm of the product of OV circuit and reading circuit, divided by both norms.

    Arguments:
        written: matrix with the norms of each source head's OV circuit, [source head, d_head, hidden]: R of
            the QR decomposition of its value matrix, times its output matrix.
        reads: for each later layer the circuits of each mode.
        modes: number of modes of composition (Q, K, V).
    """
    heads, size, hidden = written.shape
    flat = written.reshape(-1, hidden)
    with np.errstate(invalid="ignore", divide="ignore"):
        flat = flat / np.repeat(_norms(written), size)[:, None]
    scores = np.empty((modes, heads, len(reads), heads))
    for j, layer_reads in enumerate(reads):
        for mode, readings in enumerate(layer_reads):
            scores[mode, :, j] = np.sqrt(readings.squared_norms(flat, heads))
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
