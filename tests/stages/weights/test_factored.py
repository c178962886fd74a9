"""FactoredMatrix says of a product what numpy says of it multiplied out."""

from __future__ import annotations

from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mizarr.stages.weights.factored import FactoredMatrix
from mizarr.store.errors import ShapeError

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**16))


def factors(rows: int, inner: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, inner)).astype("f4"), rng.normal(size=(inner, columns)).astype("f4")


def both(rows: int, inner: int, columns: int, seed: int, is_lazy: bool) -> tuple[FactoredMatrix, np.ndarray]:
    left, right = factors(rows, inner, columns, seed)
    dense = left.astype(float) @ right.astype(float)
    if is_lazy:
        left, right = da.from_array(left, chunks=(2, -1)), da.from_array(right, chunks=(-1, 3))
    return FactoredMatrix(left, right), dense


@settings(max_examples=20)
@given(SIZES, st.booleans())
def test_singular_values_and_norms_are_those_of_the_product(sizes, is_lazy):
    matrix, dense = both(*sizes, is_lazy)
    expected = np.linalg.svd(dense, compute_uv=False)
    found = matrix.singular_values
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-10 * expected[0])
    assert matrix.frobenius_norm == pytest.approx(np.linalg.norm(dense), rel=1e-12)
    assert matrix.spectral_norm == pytest.approx(expected[0], rel=1e-12)
    u, s, v = matrix.svd()
    np.testing.assert_allclose(np.asarray(u * s @ v.T), dense, atol=1e-9 * expected[0])
    for side in (np.asarray(u), np.asarray(v)):
        np.testing.assert_allclose(side.T @ side, np.eye(len(s)), atol=1e-10)
    np.testing.assert_allclose(matrix.dense(), dense, rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**16), st.booleans())
def test_eigenvalues_are_those_of_the_product_but_for_zeros(size, inner, seed, is_lazy):
    inner = min(inner, size)
    matrix, dense = both(size, inner, size, seed, is_lazy)
    found = matrix.eigenvalues
    assert (np.diff(np.abs(found)) <= 1e-12 * np.abs(found[0])).all()
    # What eigenvalues are in any order: sums of their powers are traces.
    powers = np.eye(size)
    for n in range(1, inner + 1):
        powers = powers @ dense
        assert (found**n).sum() == pytest.approx(np.trace(powers), rel=1e-6, abs=1e-6 * np.abs(found[0]) ** n)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 12), min_size=3, max_size=6), st.integers(0, 2**16))
def test_a_product_of_several_is_cut_where_it_is_narrowest(sizes, seed):
    rng = np.random.default_rng(seed)
    matrices = [rng.normal(size=pair) for pair in pairwise(sizes)]
    found = FactoredMatrix.product(*matrices, dims=("a", "b"))
    assert found.inner == min(sizes[1:-1])
    assert found.shape == (sizes[0], sizes[-1])
    np.testing.assert_allclose(found.dense(), np.linalg.multi_dot(matrices), rtol=1e-9, atol=1e-9)


def test_products_with_arrays_and_with_each_other_stay_factored():
    one, dense = both(5, 2, 7, 0, False)
    other, square = both(7, 3, 4, 1, False)
    rng = np.random.default_rng(2)
    before, behind = rng.normal(size=(6, 5)), rng.normal(size=(7, 3))
    for found, expected in (
        (one @ other, dense @ square),
        (before @ one, before @ dense),
        (one @ behind, dense @ behind),
        (2.5 * one.T, 2.5 * dense.T),
    ):
        assert isinstance(found, FactoredMatrix) and found.inner <= 3
        np.testing.assert_allclose(found.dense(), expected, rtol=1e-5, atol=1e-5)
    assert (one @ other).inner == 2


@pytest.mark.parametrize("is_lazy", [False, True])
def test_rows_columns_and_numbers_are_got_without_the_rest(is_lazy):
    matrix, dense = both(6, 2, 5, 3, is_lazy)
    assert matrix[4, 1] == pytest.approx(dense[4, 1], rel=1e-5)
    assert isinstance(matrix[4, 1], float)
    np.testing.assert_allclose(matrix[2], dense[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrix[:, -1], dense[:, -1], rtol=1e-5, atol=1e-6)
    some = matrix[1:4, [0, 3]]
    assert some.shape == (3, 2) and isinstance(some, FactoredMatrix)
    np.testing.assert_allclose(some.dense(), dense[1:4][:, [0, 3]], rtol=1e-5, atol=1e-6)
    rows = np.concatenate([part for _, part in matrix.blocks(4)])
    np.testing.assert_allclose(rows, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_labelled_array_is_lazy_and_in_blocks(is_lazy):
    matrix, dense = both(6, 2, 5, 4, is_lazy)
    found = matrix.labelled(4, row=list("abcdef"))
    assert found.dims == ("row", "column") and found.chunks == ((4, 2), (4, 1))
    np.testing.assert_allclose(found.sel(row="d"), dense[3], rtol=1e-5, atol=1e-6)
    assert matrix.labelled(None).chunks is None


def test_what_does_not_fit_is_refused_with_both_shapes():
    with pytest.raises(ShapeError, match=r"found shapes \(2, 3\) and \(4, 5\)"):
        FactoredMatrix(np.ones((2, 3)), np.ones((4, 5)))
    with pytest.raises(ShapeError, match=r"shape \(2, 3\) is followed by shape \(4, 5\)"):
        FactoredMatrix.product(np.ones((2, 3)), np.ones((4, 5)))
    with pytest.raises(ShapeError, match="at least two matrices"):
        FactoredMatrix.product(np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"square matrix has eigenvalues, found shape \(2, 4\)"):
        _ = FactoredMatrix(np.ones((2, 3)), np.ones((3, 4))).eigenvalues


def test_a_product_that_is_zero_has_norm_zero():
    matrix = FactoredMatrix(np.zeros((3, 2)), np.ones((2, 3)))
    assert matrix.frobenius_norm == matrix.spectral_norm == 0
    assert not matrix.eigenvalues.any()
