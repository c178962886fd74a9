"""Copying scores: whether a head that reads a token raises that token's logit, over the whole vocabulary.

Border: matrices of a model; runs nothing, and never holds anything [vocab, vocab].

Idea (Elhage et al. 2021, section "Copying heads"): the full OV circuit is a matrix [vocab, vocab] that maps a
token to logits. A positive eigenvalue is a direction of tokens that raises itself, so that

    copying = sum(Re eigenvalues) / sum |eigenvalues|

is 1 for a head that copies and -1 for one that does the opposite. Eigenvalues of E V O U are, but for zeros,
those of O (U E) V, [d_head, d_head]: the vocabulary is summed once for all heads, U E being [hidden, hidden].

Control: the same head writing elsewhere (random_heads.py).

Axes: layer, head, draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from .matrices import attending, heads_in
from .random_heads import random_writers

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["copying_scores", "eigenvalue_positivity", "vocabulary_gram"]

ROWS = 4096
"""Of the vocabulary that are read at once."""
HEADS = ("layer", "head")


@stage(
    version=1,
    inputs={},
    outputs={
        "copying": Output(HEADS, "1", "copying score"),
        "control": Output((*HEADS, "draw"), "1", "the same of the head writing elsewhere"),
        "ov_norm": Output(HEADS, "1", "Frobenius norm of OV"),
        "top_share": Output(HEADS, "1", "share of OV's squared norm in its first singular value"),
    },
    resources=("weights",),
)
def copying_scores(*, weights: Matrices, controls: int = 50, seed: int = 0) -> xr.Dataset:
    """Copying scores of all heads, and of random heads as large. controls: of these, per head.

    Layers that do not attend are left out. A head that writes nothing has NaN.
    """
    import xarray as xr

    layers = attending(weights.config)
    heads = heads_in(weights.config, layers[0]).count
    gram = vocabulary_gram(weights)
    copying, norm, top = (np.zeros((len(layers), heads)) for _ in range(3))
    control = np.zeros((len(layers), heads, controls))
    for i, layer in enumerate(layers):
        rng = np.random.default_rng([seed, layer])
        for head in range(heads):
            value = weights.projection("v", layer, head).matrix.astype(np.float64)
            written = weights.output(layer, head).astype(np.float64)
            singular = np.linalg.svd(np.linalg.qr(value, mode="r") @ written, compute_uv=False)
            norm[i, head] = np.sqrt(np.square(singular).sum())
            top[i, head] = np.square(singular[0] / norm[i, head]) if norm[i, head] else np.nan
            through = gram @ value
            copying[i, head] = eigenvalue_positivity(written @ through)
            for draw in range(controls):
                control[i, head, draw] = eigenvalue_positivity(random_writers(written, rng) @ through)
    return xr.Dataset(
        {
            "copying": (HEADS, copying),
            "control": ((*HEADS, "draw"), control),
            "ov_norm": (HEADS, norm),
            "top_share": (HEADS, top),
        },
        {"layer": layers},
    )


def eigenvalue_positivity(matrix: Array) -> float:
    """sum(Re eigenvalues) / sum |eigenvalues| of a square matrix, from -1 to 1; NaN for one of zeros.

    >>> eigenvalue_positivity(np.diag([3.0, -1.0]))
    0.5
    """
    found = np.linalg.eigvals(np.asarray(matrix, np.float64))
    size = float(np.abs(found).sum())
    return float(found.real.sum() / size) if size else float("nan")


def vocabulary_gram(weights: Matrices) -> Floats:
    """sum over tokens of unembedding' embedding, float64 [target hidden, source hidden], row after row."""
    vocab, hidden = weights.config.vocab_size, weights.config.hidden_size
    found = np.zeros((hidden, hidden))
    for start in range(0, vocab, ROWS):
        here = slice(start, min(start + ROWS, vocab))
        read_out, entered = weights.unembedding(here).matrix, weights.embedding(here)
        found += read_out.astype(np.float64) @ entered.astype(np.float64)
    return found
