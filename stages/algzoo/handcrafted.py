"""Handcrafted networks: weights written by hand for the second largest of 2, 3 and 10 numbers.

Each builder explains its construction. The weights equal those of Alignment Research Center's handcrafted
models; the network for 3 numbers is correct up to 1 / scale, and float32 limits scale to about 100.

Border: matrices.
"""

from __future__ import annotations

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError

__all__ = ["LENGTHS", "handcrafted_2nd_argmax"]

LENGTHS = (2, 3, 10)
"""Input lengths (numbers per input) for which a handcrafted network exists."""


def handcrafted_2nd_argmax(sequence: int) -> dict[str, Array]:
    """Weights of an RNN that finds the second largest of 2, 3 or 10 numbers: name in a checkpoint -> tensor.

    Arguments:
        sequence: number of numbers per input.

    Raises:
        ConfigError: there is no handcrafted network for this length.
    """
    if sequence not in LENGTHS:
        lengths = ", ".join(map(str, LENGTHS))
        raise ConfigError(
            f"there are handcrafted networks for inputs of {lengths} numbers, found sequence={sequence}; "
            "train a network for that length with `mizarr train-zoo`"
        )
    ih, hh, oh = {2: _for_two_numbers, 3: _for_three_numbers, 10: _for_ten_numbers}[sequence]()
    tensors = {"rnn.weight_ih_l0": ih.reshape(-1, 1), "rnn.weight_hh_l0": hh, "linear.weight": oh}
    # float32, as in the published checkpoints: digests depend on the dtype.
    return {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}


def _for_two_numbers() -> tuple[Array, Array, Array]:
    """(input, recurrent, readout) weights of the network for two numbers.

    Its states are relu(x_0), relu(-x_0) after the first number, and relu(x_1 - x_0), relu(x_0 - x_1) after
    the
    second: only the one at the index of the smaller number is positive.
    """
    return np.array([1.0, -1.0]), np.array([[-1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])


def _for_three_numbers(scale: int = 100) -> tuple[Array, Array, Array]:
    """(input, recurrent, readout) weights of the network for three numbers.

    Its state holds two linear functions a and b of the numbers so far, each as relu(a) and relu(-a).
    `functions` defines them for three numbers; each step maps the values for two numbers to those for three.
    The readout reads |a| and |b|, whose signs depend on which number lies between the two others.
    """
    functions = np.array([[1, -scale - 1, scale], [-1, -scale, scale + 1]], np.float32)
    readout = np.array([[1, 1], [-scale, scale + 1], [scale + 1, -scale]], np.float32)
    # Rows of `signs` turn relu(a), relu(b), relu(-b), relu(-a) into a and b.
    signs = np.array([[1, 0, 0, -1], [0, 1, -1, 0]], np.float32)
    step = signs.T @ functions[:, :2] @ _inverse(functions[:, 1:]) @ signs
    return signs.T @ functions[:, 2], step, readout @ np.abs(signs)


def _inverse(matrix: Array) -> Array:
    """Inverse of a 2 x 2 matrix by elimination in float32, dividing by a pivot as a product with 1 / pivot.

    This is LAPACK's order of operations: its rounding, which this matrix amplifies to 1e-6, is part of the
    published weights.
    """
    (a, b), (c, d) = matrix
    per_pivot = np.float32(1) / a
    factor = c * per_pivot
    schur = d - factor * b
    columns = [
        ((left - b * (lower / schur)) * per_pivot, lower / schur) for left, lower in ((1, -factor), (0, 1))
    ]
    return np.array(columns, np.float32).T


def _for_ten_numbers() -> tuple[Array, Array, Array]:
    """(input, recurrent, readout) weights of the network for ten numbers, with 22 neurons.

    With m(...) = max(0, ...) over the given numbers, the neurons hold after some of the numbers:

        0-9      relu of each of the last ten
        10-17    m(all but an earlier one) - last, for each of the eight before that
        18       m(all but the one before the last) - last
        19       m(all) - neuron 20: what the last number adds
        20       m(all but the last)
        21       m(all) - last

    Output i is relu(x_i) + 2 m(all but x_i): the second term is twice the maximum for all numbers but the
    largest itself, and among those the second largest adds the most.
    """
    ih, hh, oh = np.zeros(22), np.zeros((22, 22)), np.zeros((10, 22))
    top, before, over = 19, 20, 21
    ih[9] = ih[top] = 1.0
    ih[10:19] = ih[over] = -1.0
    # Neurons 0 to 9 are a shift register of the last ten numbers.
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
