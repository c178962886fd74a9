"""Copying scores: whether a head raises the logit of the token that it attends to, over the whole vocabulary.

Border: matrices of a model; no forward pass, and no [vocab, vocab] matrix.

The full OV circuit E V O U maps an attended token to logits, [vocab, vocab] (Elhage et al. 2021, section
"Copying heads"). A positive eigenvalue belongs to a set of tokens that raises its own logits, so that

    copying = sum(Re eigenvalues) / sum |eigenvalues|

is 1 for a head that copies and -1 for one that suppresses what it reads. The non-zero eigenvalues of E V O U
are those of O (U E) V, [d_head, d_head]: the sum over the vocabulary, U E [hidden, hidden], is computed once
for all heads.

Control: the same head writing into random directions (random_heads.py).

Axes: layer, head, draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from .matrices import attending, heads_in, vocabulary_blocks
from .random_heads import RandomWriters

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["copying_scores", "eigenvalue_positivity", "vocabulary_gram"]

HEADS = ("layer", "head")
"""Dims of one value per head."""


@stage(
    version=1,
    inputs={},
    outputs={
        "copying": Output(HEADS, "1", "copying score"),
        "control": Output(
            (*HEADS, "draw"), "1", "copying score of heads that write as much in random directions"
        ),
        "ov_norm": Output(HEADS, "1", "Frobenius norm of OV"),
        "top_share": Output(HEADS, "1", "share of OV's squared norm in its first singular value"),
    },
    resources=("weights",),
)
def copying_scores(*, weights: Matrices, controls: int = 50, seed: int = 0) -> xr.Dataset:
    """Copying scores of all heads, and of random heads of equal singular values.

    Layers without attention are left out. A head that writes nothing has the score NaN.

    Arguments:
        weights: matrices of the model.
        controls: number of random heads per head.
        seed: seed of the random heads.
    """
    import xarray as xr

    layers = attending(weights.config)
    heads = heads_in(weights.config, layers[0]).num_attention_heads
    gram = vocabulary_gram(weights)
    copying, norm, top = (np.zeros((len(layers), heads)) for _ in range(3))
    control = np.zeros((len(layers), heads, controls))
    for i, layer in enumerate(layers):
        # Seeded per layer: controls of one layer do not depend on which other layers attend.
        rng = np.random.default_rng([seed, layer])
        for head in range(heads):
            value = weights.projection("v", layer, head).matrix.astype(np.float64)
            written = weights.output(layer, head).astype(np.float64)
            # Singular values of OV from R of V = Q R: Q is orthonormal and changes none.
            singular = np.linalg.svd(np.linalg.qr(value, mode="r") @ written, compute_uv=False)
            norm[i, head] = np.sqrt(np.square(singular).sum())
            top[i, head] = np.square(singular[0] / norm[i, head]) if norm[i, head] else np.nan
            # (U E) V once per head, shared by all controls.
            gram_times_value = gram @ value
            copying[i, head] = eigenvalue_positivity(written @ gram_times_value)
            random = RandomWriters.of(written)
            for draw in range(controls):
                control[i, head, draw] = eigenvalue_positivity(random.draw(rng) @ gram_times_value)
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
    """sum(Re eigenvalues) / sum |eigenvalues| of a square matrix, -1 to 1; NaN for a zero matrix.

    >>> eigenvalue_positivity(np.diag([3.0, -1.0]))
    0.5
    """
    eigenvalues = np.linalg.eigvals(np.asarray(matrix, np.float64))
    total = float(np.abs(eigenvalues).sum())
    return float(eigenvalues.real.sum() / total) if total else float("nan")


def vocabulary_gram(weights: Matrices) -> Floats:
    """Sum over all tokens of the outer product of unembedding and embedding, float64 [target hidden, source
    hidden]."""
    gram = np.zeros((weights.config.hidden_size, weights.config.hidden_size))
    for rows in vocabulary_blocks(weights.config):
        # float64: float32 would lose digits in a sum over the vocabulary, and eigenvalues are sensitive to
        # them.
        unembedding, embedding = weights.unembedding(rows).matrix, weights.embedding(rows)
        gram += unembedding.astype(np.float64) @ embedding.astype(np.float64)
    return gram
