"""Declarations: which arrays an output means, and what is said of one that is not as declared."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.pipeline import Output, stage
from mizarr.pipeline.declaration import require_declared
from mizarr.store.errors import StageError

GRID = Output(("kind?", "layer", "head|kv_head?", "position|query_position?"), "nats", "loss")


@pytest.mark.parametrize(
    ("dims", "fits"),
    [
        (("layer",), True),
        (("kind", "layer", "head", "position"), True),
        (("layer", "kv_head"), True),
        (("layer", "query_position"), True),
        (("kind", "layer", "query_position"), True),
        ((), False),
        (("kind",), False),
        (("layer", "head", "kv_head"), False),
        (("layer", "position", "head"), False),
        (("layer", "key_position"), False),
        (("layers",), False),
        (("player",), False),
    ],
)
def test_alternatives_and_optional_dims_are_told_apart(dims, fits):
    assert GRID.fits(dims) is fits


def test_dims_without_marks_mean_themselves():
    assert Output(()).fits(())
    assert Output(("a", "b")).fits(("a", "b"))
    assert not Output(("a", "b")).fits(("b", "a"))
    assert not Output(("a.",)).fits(("ab",))


def test_a_variable_has_dims_unit_and_meaning():
    assert Output(("n",), "nats", "loss").variable([1.0]) == (
        ("n",),
        [1.0],
        {"units": "nats", "long_name": "loss"},
    )


DECLARED = {
    "kl": Output(("layer",), "nats"),
    "count": Output((), "1"),
    "extra": Output(("layer",), "logits", is_optional=True),
}


def given(**changed) -> xr.Dataset:
    """A dataset as declared, but for some variables; None leaves one out."""
    variables = {"kl": ("layer", [1.0], {"units": "nats"}), "count": ((), 3)} | changed
    return xr.Dataset({name: value for name, value in variables.items() if value is not None})


def test_what_is_declared_passes_with_and_without_what_is_optional():
    require_declared("experiment 'x'", DECLARED, given())
    require_declared("experiment 'x'", DECLARED, given(extra=("layer", [0.0], {"units": "logits"})))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"kl": None}, "the declared output 'kl' [layer] nats is missing; the dataset has count"),
        (
            {"kll": 1.0},
            "an array 'kll' that is not declared; declared are kl, count, extra; did you mean 'kl'?",
        ),
        ({"kl": ("head", [1.0], {"units": "nats"})}, "output 'kl': expected [layer] nats, found [head] nats"),
        ({"kl": ("layer", [1.0])}, "output 'kl': expected [layer] nats, found [layer] 1;"),
        (
            {"kl": ("layer", [1.0], {"units": "bits"})},
            "output 'kl': expected [layer] nats, found [layer] bits;",
        ),
        ({"extra": ("layer", [0.0])}, "output 'extra': expected [layer] logits, found [layer] 1;"),
    ],
)
def test_a_variable_dim_or_unit_that_is_not_declared_is_named_with_both(changed, complaint):
    with pytest.raises(StageError) as told:
        require_declared("experiment 'x'", DECLARED, given(**changed))
    assert str(told.value).startswith("experiment 'x'") and complaint in str(told.value)


@stage(
    version=1,
    inputs={"x": ("n",)},
    outputs={"y": Output(("m|n",), "1", "as it is"), "z": Output((), "1", is_optional=True)},
    resources=("model",),
)
def copied(x: xr.DataArray, model: str, *, turned: bool = False) -> xr.Dataset:
    """As it is, or under another name."""
    return x.rename(n="m").to_dataset(name="y") if turned else xr.Dataset({"y": x, "z": x.sum()})


def test_stages_speak_the_same_vocabulary():
    x = xr.DataArray(np.ones(2), dims="n")
    assert copied.labelled(copied(x, "m", turned=True))["y"].dims == ("m",)
    assert set(copied.labelled(copied(x, "m")).data_vars) == {"y", "z"}
    with pytest.raises(StageError, match="change the declaration or the function"):
        copied.labelled(xr.Dataset({"z": 1.0}))


def test_a_description_shows_resources_and_what_is_optional():
    assert copied.describe().splitlines() == [
        "copied (version 1)",
        "  in  x [n]",
        "  in  model [resource]",
        "  set turned = False",
        "  out y [m|n] 1  as it is",
        "  out z? [] 1",
    ]
