"""Sparse decompositions into lens vectors: supports and parts of the reference; nonnegative least squares."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.stages.lenses.decomposition import _nonnegative, decompose, norm_share
from mizarr.store.errors import ShapeError
from tests.stages.lenses.reference import (
    NAMES,
    OF_CODES,
    OF_SHARES,
    arrays,
    meta,
    model_of,
    needs_reference,
    prompts_of,
)


def vectors_of(name: str) -> xr.DataArray:
    values = arrays(name, "vectors")["dictionary"]
    coords = {"layer": range(len(values)), "vocab": range(values.shape[1])}
    return xr.DataArray(values, dims=("layer", "vocab", "hidden"), coords=coords)


@needs_reference
@pytest.mark.parametrize("name", NAMES)
def test_decompositions_are_those_of_the_reference(name):
    wanted, vectors, streams = arrays(name, "decompositions"), vectors_of(name), arrays(name, "readouts")
    for case, told in meta(name)["decompositions"].items():
        state = wanted["free"]
        if "position" in told:
            state = streams[f"p{told['prompt']}.streams"][told["layer"], told["position"]]
        algorithm = "gp" if told["algorithm"] == "gradient_pursuit" else "omp"
        found = decompose(state, vectors.sel(layer=told["layer"]), k=told["k"], algorithm=algorithm)
        parts = {
            "selected_support": found.selected,
            "support": found.support,
            "coordinates": found.coordinates,
            "reconstruction": found.reconstruction,
            "j_space_component": found.component,
            "non_j_space_component": found.rest,
        }
        for part, value in parts.items():
            atol = 0 if "support" in part else OF_CODES
            np.testing.assert_allclose(value, wanted[f"{case}.{part}"], rtol=0, atol=atol, err_msg=case)


@needs_reference
@pytest.mark.parametrize("name", NAMES)
def test_shares_of_variance_are_those_of_the_reference(name):
    told, wanted, vectors = meta(name)["variance"], arrays(name, "occupancy"), vectors_of(name)
    points = [f"blocks.{layer}.hook_resid_post" for layer in vectors["layer"].values]
    shares = []
    for ids in prompts_of(name, told["prompts"]):
        cache = model_of(name).forward([list(ids)], mizarr.HookSpec().capture(*points))
        stream = np.stack([cache[point][0].numpy() for point in points])
        states = xr.DataArray(stream, dims=("layer", "token", "hidden"), coords={"layer": vectors["layer"]})
        shares.append(norm_share(states, vectors, k=told["k"]))
    for case, settings in told["settings"].items():
        chosen = settings.get("positions")
        rows = [s.isel(token=slice(16, None) if chosen is None else chosen).values for s in shares]
        found = np.concatenate(rows, axis=1)
        np.testing.assert_allclose(found, wanted[f"variance.{case}.per_position"], rtol=0, atol=OF_SHARES)


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_meets_its_conditions(seed):
    rng = np.random.default_rng(seed)
    atoms, x = rng.standard_normal((6, 5 + seed % 4)), rng.standard_normal(5 + seed % 4)
    c = _nonnegative(atoms, x)
    gradient = atoms @ (x - c @ atoms)
    assert (c >= 0).all()
    # Karush, Kuhn, Tucker: no gradient along free coordinates, none upwards at the bound.
    np.testing.assert_allclose(gradient[c > 0], 0, atol=1e-9)
    assert (gradient[c == 0] <= 1e-9).all()


def test_a_sparse_combination_is_found_and_the_parts_add_up():
    rng = np.random.default_rng(0)
    values = np.linalg.qr(rng.standard_normal((12, 12)))[0][:8] * np.arange(1, 9)[:, None]
    vectors = xr.DataArray(values, dims=("vocab", "hidden"), coords={"vocab": range(100, 108)})
    state = 3 * values[2] + 0.5 * values[5] - 2 * values[7]
    found = decompose(state, vectors, k=4)
    assert found.selected.tolist() == found.support.tolist() == [102, 105]
    np.testing.assert_allclose(found.coordinates, [3, 0.5], atol=1e-12)
    np.testing.assert_allclose(found.component + found.rest, state, atol=1e-12)
    nothing = decompose(np.zeros(12), vectors, k=4)
    assert nothing.selected.size == nothing.support.size == 0
    assert not nothing.component.any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 0}, "expected k in 1..8"),
        ({"k": 9}, "found 9"),
        ({"algorithm": "lasso"}, "expected the algorithm"),
        ({"state": np.zeros(11)}, "expected a state"),
    ],
)
def test_a_wrong_argument_is_one_line(given, said):
    vectors = xr.DataArray(np.eye(8, 12), dims=("vocab", "hidden"), coords={"vocab": range(8)})
    with pytest.raises(ShapeError, match=said) as caught:
        decompose(**{"state": np.zeros(12), "vectors": vectors, "k": 2} | given)
    assert "\n" not in str(caught.value)
