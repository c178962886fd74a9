"""Networks that were written, not trained: the second largest of 2, 3 and 10 numbers.

How each works is told where its matrices are made. They are those of Alignment Research Center's handcrafted
models, tensor for tensor; the one of 3 is right up to 1 / scale, which float32 allows to be about 100.

Border: matrices.
"""

from __future__ import annotations

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError

__all__ = ["LENGTHS", "handcrafted_2nd_argmax"]

LENGTHS = (2, 3, 10)
"""Sequences there is a handcrafted network for."""


def handcrafted_2nd_argmax(sequence: int) -> dict[str, Array]:
    """Tensors of the network that tells the second largest of 2, 3 or 10 numbers, as a checkpoint has them.

    Raises ConfigError for another length.
    """
    if sequence not in LENGTHS:
        told = ", ".join(map(str, LENGTHS))
        raise ConfigError(
            f"expected a handcrafted network of {told} numbers, found {sequence}; train one of it"
        )
    ih, hh, oh = {2: _of_two, 3: _of_three, 10: _of_ten}[sequence]()
    found = {"rnn.weight_ih_l0": ih.reshape(-1, 1), "rnn.weight_hh_l0": hh, "linear.weight": oh}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}


def _of_two() -> tuple[Array, Array, Array]:
    """States relu(x_0), relu(-x_0), then relu(x_1 - x_0), relu(x_0 - x_1): what is left over is the sign."""
    return np.array([1.0, -1.0]), np.array([[-1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])


def _of_three(scale: int = 100) -> tuple[Array, Array, Array]:
    """Two linear functions of the numbers so far, a and b, each held as relu(a) and relu(-a).

    `first` says what they are of three numbers, so that each step takes them from two numbers to three; the
    readout sees |a| and |b|, which differ in sign by which number lies between the others.
    """
    first = np.array([[1, -scale - 1, scale], [-1, -scale, scale + 1]], np.float32)
    second = np.array([[1, 1], [-scale, scale + 1], [scale + 1, -scale]], np.float32)
    signs = np.array([[1, 0, 0, -1], [0, 1, -1, 0]], np.float32)
    step = signs.T @ first[:, :2] @ _inverse(first[:, 1:]) @ signs
    return signs.T @ first[:, 2], step, second @ np.abs(signs)


def _inverse(matrix: Array) -> Array:
    """Inverse of two rows and columns by elimination in float32, pivots divided by as a product with 1 /
    pivot.

    The order of LAPACK's: its rounding, which this matrix magnifies to 1e-6, is part of the published
    weights.
    """
    (a, b), (c, d) = matrix
    per_pivot = np.float32(1) / a
    factor = c * per_pivot
    rest = d - factor * b
    columns = [
        ((one - b * (below / rest)) * per_pivot, below / rest) for one, below in ((1, -factor), (0, 1))
    ]
    return np.array(columns, np.float32).T


def _of_ten() -> tuple[Array, Array, Array]:
    """22 neurons. With m(...) = max(0, ...) over the numbers named, after t of them:

        0-9      relu of each of the last ten
        10-17    m(all but an earlier one) - last, of each of the eight before that
        18       m(all but the one before the last) - last
        19       m(all) - neuron 20, what the last one adds
        20       m(all but the last)
        21       m(all) - last

    Output i is relu(x_i) - 2 m(all but x_i): only the largest has a positive one, and the second largest has
    the smallest of the others' penalties.
    """
    ih, hh, oh = np.zeros(22), np.zeros((22, 22)), np.zeros((10, 22))
    top, before, over = 19, 20, 21
    ih[9] = ih[top] = 1.0
    ih[10:19] = ih[over] = -1.0
    for i in range(9):
        hh[i, i + 1] = 1.0
    hh[top, [top, before]] = -1.0
    hh[[before, over], top] = hh[[before, over], before] = 1.0
    hh[18, before] = 1.0
    for i in range(10, 18):
        hh[i, [i + 1, top, before, over]] = [1.0, 1.0, 1.0, -1.0]
    for i in range(10):
        oh[i, i] = 1.0
    for i in range(9):
        oh[i, [10 + i, top, before, over]] = [2.0, 2.0, 2.0, -2.0]
    oh[9, before] = 2.0
    return ih, hh, oh
