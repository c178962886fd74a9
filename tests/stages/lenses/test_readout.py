"""What a lens reads of stored streams: logits, ranks and vectors of the reference; what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.lenses.artifacts import read_lens
from mizarr.stages.lenses.jacobian import OUTPUTS
from mizarr.stages.lenses.readout import fitted_lens, lens_vectors, transported
from mizarr.stages.logits.lens import logits
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import MizarrError
from tests.stages.lenses.reference import (
    NAMES,
    OF_LOGITS,
    OF_VECTORS,
    SET,
    arrays,
    meta,
    model_of,
    needs_reference,
    prompts_of,
)

pytestmark = needs_reference


def lens_of(name: str, stem: str = "fit") -> xr.Dataset:
    """The default fit of the reference, or one of its files."""
    if stem != "fit":
        return read_lens(SET / "cases" / name / "artifacts" / f"{stem}.pt")
    found, told = arrays(name, "fits"), meta(name)["fits"]["default"]
    values = {"jacobian": found["default.J"], "n_prompts": np.int64(told["n_prompts"])}
    layers = found["default.layers"].tolist()
    variables = {key: OUTPUTS[key].variable(value) for key, value in values.items()}
    return xr.Dataset(variables, {"layer": layers}, {"target_layer": meta(name)["layers"] - 1})


def readout_of(name: str) -> xr.Dataset:
    files = resolve(str(SET / "models" / name))
    return readout_from_files(files.checkpoint, files.architecture())


def states_of(name: str, prompt: int, store: mizarr.Store) -> xr.DataArray:
    ids = [list(prompts_of(name, [prompt])[0])]
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    return mizarr.capture(model_of(name), ids, hooks, store=store, progress=False)["resid_post"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [1, 3])
def test_stored_streams_are_read_as_in_the_reference(name, prompt, tmp_path):
    wanted = arrays(name, "readouts")
    states, readout = states_of(name, prompt, mizarr.open_store(tmp_path)), readout_of(name)
    carried = transported(states, lens_of(name))
    np.testing.assert_allclose(carried[:-1], wanted[f"p{prompt}.transported"], rtol=0, atol=OF_LOGITS)
    read = logits(carried, readout)
    assert read["layer"].values.tolist() == wanted[f"p{prompt}.layers"].tolist()
    np.testing.assert_allclose(read, wanted[f"p{prompt}.lens_logits"], rtol=0, atol=OF_LOGITS)
    np.testing.assert_allclose(read[-1], wanted[f"p{prompt}.model_logits"], rtol=0, atol=OF_LOGITS)
    half = logits(transported(states, lens_of(name, "default_float16")), readout)
    np.testing.assert_allclose(half, wanted[f"p{prompt}.float16_lens_logits"], rtol=0, atol=OF_LOGITS)
    subset = meta(name)["readout_subset"]
    chosen = read.isel(layer=subset["layers"], token=subset["positions"])
    np.testing.assert_allclose(chosen, wanted[f"p{prompt}.subset.lens_logits"], rtol=0, atol=OF_LOGITS)
    found = fitted_lens(states, None, readout, lens_of(name), top_k=10)
    gap = meta(name)["smallest_gap_in_top_11"]
    ids = wanted[f"p{prompt}.topk_ids"]
    # Neighbours that are closer than twice the error may change places.
    assert (found["top_id"].values != ids).mean() <= (0 if gap > 2e-5 else 0.01)
    values = np.take_along_axis(read.values, found["top_id"].values, -1)
    np.testing.assert_allclose(values, wanted[f"p{prompt}.topk_values"], rtol=0, atol=OF_LOGITS)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_tokens_are_those_of_the_reference(name):
    wanted, lens, readout = arrays(name, "vectors"), lens_of(name), readout_of(name)
    whole = lens_vectors(lens, readout)
    np.testing.assert_allclose(whole, wanted["dictionary"], rtol=0, atol=OF_VECTORS)
    some = lens_vectors(lens, readout, wanted["tokens"])
    np.testing.assert_allclose(some, wanted["vectors"], rtol=0, atol=OF_VECTORS)
    assert some["vocab"].values.tolist() == wanted["tokens"].tolist()


def test_layers_that_the_lens_lacks_are_left_out(tmp_path):
    states, lens = states_of("llama", 1, mizarr.open_store(tmp_path)), lens_of("llama")
    some = transported(states, lens.sel(layer=[2, 0]))
    assert some["layer"].values.tolist() == [0, 2, 3]
    xr.testing.assert_allclose(some, transported(states, lens).sel(layer=[0, 2, 3]))


def test_states_and_tokens_that_do_not_fit_are_one_line(tmp_path):
    states, lens = states_of("llama", 1, mizarr.open_store(tmp_path)), lens_of("llama")
    readout = readout_of("llama")
    wrong = [
        (lambda: transported(states.isel(hidden=slice(20)), lens), "24 hidden dimensions, the width"),
        (lambda: transported(states.isel(layer=0), lens), "a layer axis"),
        (lambda: transported(states.isel(layer=[0, 1]), lens), "up to the last layer, 3"),
        (lambda: transported(states.isel(layer=[3]), lens), "states of the layers"),
        (lambda: lens_vectors(lens, readout, [101]), "token ids in 0..100"),
        (lambda: lens_vectors(lens, readout, [-1]), "found the token -1"),
        (lambda: lens_vectors(lens, readout.isel(hidden=slice(20)), [0]), "24 hidden dimensions in the lens"),
    ]
    for call, said in wrong:
        with pytest.raises(MizarrError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
