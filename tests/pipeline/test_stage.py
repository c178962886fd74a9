"""What a stage declares, and what its declaration refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import stages_for_tests as lib
import xarray as xr

from mizarr.pipeline import Output, stage
from mizarr.store.errors import ShapeError, StageError

STATES = xr.DataArray([[[3.0, 4.0]]], dims=lib.TLH)


def test_the_decorated_name_is_still_the_function():
    assert lib.norm(STATES).item() == 5
    assert lib.norm(STATES, power=1.0).item() == 7
    assert lib.norm.__doc__ == "Length of each state."


def test_outputs_get_their_declared_unit_and_name():
    given = lib.norm.compute({"states": STATES}, {"power": 2.0})
    assert given["norm"].attrs == {"units": "1", "long_name": "length of the state"}


def test_inputs_are_told_apart_by_name_so_their_order_does_not_matter():
    turned = STATES.transpose("hidden", "token", "layer")
    assert lib.norm.compute({"states": turned}, {})["norm"].dims == ("layer", "token")


@pytest.mark.parametrize("wrong", [STATES.isel(layer=0), STATES.expand_dims("head")], ids=["less", "more"])
def test_dims_missing_or_too_many_are_a_shape_error_with_both(wrong):
    with pytest.raises(ShapeError, match=r"expected dims \[layer, token, hidden\], found \[.*hidden 2\]"):
        lib.norm.compute({"states": wrong}, {})


def test_an_unknown_parameter_is_refused_with_the_nearest():
    with pytest.raises(StageError, match=r"takes no argument 'pover', .*; did you mean 'power'"):
        lib.norm.on(states=STATES, pover=1)


def test_a_missing_input_is_refused():
    with pytest.raises(StageError, match="also needs states"):
        lib.norm.on()


@pytest.mark.parametrize("value", [object(), float("nan"), lambda: 0], ids=["object", "nan", "function"])
def test_parameters_without_a_canonical_spelling_are_refused(value):
    with pytest.raises(StageError, match="cannot be part of the key"):
        lib.norm.on(states=STATES, power=value)


def test_a_bare_array_is_no_input():
    with pytest.raises(StageError, match="found ndarray"):
        lib.norm.on(states=np.zeros((1, 1, 2)))


def test_undeclared_outputs_are_refused():
    @stage(version=1, inputs={"x": ("layer",)}, outputs={"a": Output(("layer",))})
    def two(x):
        return xr.Dataset({"a": x, "b": x})

    with pytest.raises(StageError, match="declares the outputs a, its function returned a, b"):
        two.compute({"x": xr.DataArray([1.0], dims="layer")}, {})


@pytest.mark.parametrize(
    ("cells", "told"),
    [("head", "among layer, segment"), ("segment", "no input has a dim")],
)
def test_cells_along_an_axis_that_is_not_there_are_refused(cells, told):
    with pytest.raises(StageError, match=told):
        stage(version=1, inputs={"x": ("layer",)}, outputs={}, cells=cells)(lambda x: x)


def test_segments_need_a_function_that_combines_them():
    with pytest.raises(StageError, match="give combine="):
        stage(version=1, inputs={"x": ("token",)}, outputs={}, cells="segment")(lambda x: x)


def test_layers_whose_results_have_no_layer_axis_are_refused_without_a_function_that_combines_them():
    """Several cells were joined to the first of them, which looked like the sum over all layers."""

    @stage(version=1, inputs={"x": ("layer",)}, outputs={"y": Output(())}, cells="layer")
    def total(x):
        return x.sum()

    cells = [total.compute({"x": xr.DataArray([value], dims="layer")}, {}) for value in (1.0, 2.0)]
    with pytest.raises(StageError, match=r"'total' is cut by layer, .* only \[\]; declare combine="):
        total.joined(cells)
    assert total.joined(cells[:1]).identical(cells[0])


def test_without_a_version_the_code_stands_for_it():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    declare = stage(inputs={"x": ("layer",)}, outputs={"y": ("layer",)})
    assert str(declare(one).key_version).startswith("code:")
    assert declare(one).key_version != declare(two).key_version
    renamed = stage(inputs={"x": ("layer",)}, outputs={"y": Output(("layer",), "nats")})
    assert renamed(one).key_version != declare(one).key_version


def test_a_stage_travels_by_name():
    assert pickle.loads(pickle.dumps(lib.norm)) is lib.norm


def test_a_stage_made_inside_a_function_travels_with_its_code():
    import cloudpickle

    @stage(version=3, inputs={"x": ("layer",)}, outputs={"y": ("layer",)})
    def local(x):
        return x + 1

    came = cloudpickle.loads(cloudpickle.dumps(local))
    assert came.version == 3 and came(2) == 3


def test_describe_names_inputs_parameters_and_outputs():
    assert lib.norm.describe().splitlines() == [
        "norm (version 1)",
        "  in  states [layer, token, hidden]",
        "  set power = 2.0",
        "  out norm [layer, token] 1  length of the state",
    ]
