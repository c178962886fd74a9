"""Labelled arrays as the plain values of tables and documents."""

from __future__ import annotations

import numpy as np
import xarray as xr

from mizarr.workflows.labelled import labelled, largest, ranked, record, records, stacked, values_of

KL = labelled([[0.5, 2.0, np.nan], [2.0, -1.0, 0.0]], "KL", "nats", layer=[4, 7], head=range(3))
FOUND = xr.Dataset({"kl": KL, "share": KL / 2})


def test_cells_are_ranked_by_value_then_place_without_nan():
    places = [(4, 1), (7, 0), (4, 0), (7, 2), (7, 1)]
    assert ranked(KL) == [{"layer": layer, "head": head} for layer, head in places]
    assert ranked(KL, 1) == [{"layer": 4, "head": 1}]
    assert ranked(KL[:, 2:].isel(layer=[0])) == []


def test_the_largest_cells_carry_their_labels_and_variables_as_python_values():
    (first, second) = largest(FOUND, FOUND["kl"], 2, "kl", half="share")
    assert first == {"layer": 4, "head": 1, "kl": 2.0, "half": 1.0}
    assert (second["layer"], second["head"]) == (7, 0)
    assert [type(value) for value in first.values()] == [int, int, float, float]


def test_records_go_along_one_dim_and_keep_the_others_as_lists():
    rows = records(FOUND.isel(head=slice(2)), "layer", "layer", halves="share")
    assert rows == [{"layer": 4, "halves": [0.25, 1.0]}, {"layer": 7, "halves": [1.0, -0.5]}]
    of_the_model = FOUND.assign(layers=2)
    assert [row["layers"] for row in records(of_the_model, "layer", "layers")] == [2, 2]
    assert record(FOUND.sel(layer=7, head=1), "kl") == {"kl": -1.0}


def test_values_have_their_axes_in_the_order_that_is_asked_for():
    np.testing.assert_array_equal(values_of(KL, "head", "layer"), KL.values.T)
    assert values_of(KL).shape == (2, 3)


def test_stacked_arrays_are_labelled_by_name_and_padded():
    both = stacked("run", {"long": KL.sel(layer=4), "short": KL.sel(layer=7).isel(head=slice(2))})
    assert both["run"].values.tolist() == ["long", "short"] and both.sizes == {"run": 2, "head": 3}
