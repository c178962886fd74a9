"""The tuned lens: trained below the logit lens on text it has not seen, resumed, read from and written to the
files of tuned-lens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.lenses import tuned
from mizarr.stages.lenses.artifacts import read_tuned_lens, require_fit, write_lens, write_tuned_lens
from mizarr.stages.lenses.jacobian import merged, standard_error
from mizarr.stages.lenses.readout import fitted_lens, transported
from mizarr.stages.lenses.tuned import tuned_lens_fit
from mizarr.stages.logits.lens import logit_lens, logits
from mizarr.stages.logits.readout import readout, readout_node
from mizarr.store.errors import ConfigError, MizarrError, ShapeError, WeightsError
from mizarr.workflows.subject import shipped_prose

WIDTH, VOCAB = 6, 11
LAST = 5
"""Last layer of the specimen."""


@cache
def specimen() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def prompts(first: int, last: int) -> list[list[int]]:
    ids = specimen().tokenizer.encode(shipped_prose(), add_special=False).ids
    return [list(ids[64 * i : 64 * (i + 1)]) for i in range(first, last)]


def fit_of(ids: list[list[int]], layers: range, **settings: Any) -> Any:
    points = [f"blocks.{layer}.hook_resid_post" for layer in (*layers, LAST)]
    return tuned_lens_fit.on(
        resid_post=CaptureNode(specimen(), ids, points[:-1])["resid_post"],
        final=CaptureNode(specimen(), ids, points[-1:]),
        readout=readout_node(resolve("specimen")),
        **settings,
    )


def states_of(ids: list[list[int]], store: mizarr.Store) -> xr.DataArray:
    return mizarr.capture(specimen(), ids, "blocks.*.hook_resid_post", store=store, progress=False)[
        "resid_post"
    ]


def test_on_unseen_text_the_tuned_lens_is_nearer_to_the_model_than_the_logit_lens(tmp_path):
    store = mizarr.open_store(tmp_path)
    fit = fit_of(prompts(0, 40), range(LAST), steps=20, batch=128)
    run(fit, store)
    lens, states = fit.open(store), states_of(prompts(300, 310), store)
    head = readout_node(resolve("specimen")).open(store)
    plain, fitted = (
        read["kl"].mean("token").values
        for read in (logit_lens(states, None, head), fitted_lens(states, None, head, lens))
    )
    assert (fitted[:-1] < 0.95 * plain[:-1]).all()
    assert fitted[-1] == plain[-1] == 0


def test_a_killed_fit_keeps_finished_layers_and_one_more_layer_costs_one(tmp_path):
    store, ids = mizarr.open_store(tmp_path), prompts(0, 4)
    whole = fit_of(ids, range(3), steps=2, batch=32)
    part = fit_of(ids, range(2), steps=2, batch=32)
    states_of(ids, store)
    run(part, store)
    (missing,) = whole.missing(store)
    assert missing.selection == {"layer": 2}
    run(whole, store)
    np.testing.assert_array_equal(whole.open(store)["jacobian"][:2], part.open(store)["jacobian"])
    other = mizarr.open_store(tmp_path / "other")
    again = fit_of(ids, range(3), steps=2, batch=32)
    run(again, other)
    xr.testing.assert_identical(again.open(other).load(), whole.open(store).load())
    assert len(fit_of(ids, range(3), steps=2, batch=32, seed=1).missing(store)) == 3


def head_of(norm: str, *, bias: bool, soft_cap: float | None = None) -> xr.Dataset:
    rng = np.random.default_rng(1)
    return readout(
        rng.standard_normal((VOCAB, WIDTH)),
        rng.standard_normal(WIDTH),
        norm=norm,
        eps=1e-5,
        soft_cap=soft_cap,
        norm_bias=rng.standard_normal(WIDTH) if bias else None,
        unembed_bias=rng.standard_normal(VOCAB) if bias else None,
    )


def streams(n_layers: int = 4, n_tokens: int = 40, seed: int = 0) -> xr.DataArray:
    values = np.random.default_rng(seed).standard_normal((n_layers, n_tokens, WIDTH)).astype(np.float32)
    # Far from 0, as residual streams are.
    return xr.DataArray(
        3 * values + 5, {"layer": np.arange(n_layers)}, ("layer", "token", "hidden"), name="resid_post"
    )


def arguments(states: xr.DataArray) -> tuple[xr.DataArray, xr.Dataset]:
    return states[:-1], states[-1:].to_dataset()


@pytest.mark.parametrize(
    ("norm", "bias", "soft_cap"),
    [("layer", True, None), ("layer", False, None), ("rms", True, 2.0), ("gemma_rms", False, None)],
)
def test_the_first_loss_is_the_kl_of_the_logit_lens_and_training_lowers_it(norm, bias, soft_cap):
    states, head = streams(), head_of(norm, bias=bias, soft_cap=soft_cap)
    lens = tuned_lens_fit(*arguments(states), head, steps=40, batch=40, rate=1e-2)
    plain = logit_lens(states, None, head)["kl"].mean("token").values
    np.testing.assert_allclose(lens["loss"][:, 0], plain[:-1], rtol=1e-5)
    fitted = fitted_lens(states, None, head, lens)["kl"].mean("token").values
    assert (fitted[:-1] < plain[:-1]).all()


def test_an_affine_change_of_the_last_stream_is_found():
    states, head = streams(2, 400), head_of("layer", bias=True)
    rng = np.random.default_rng(2)
    matrix, offset = np.eye(WIDTH) + 0.3 * rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH)
    states[1] = states[0].values @ matrix.T + offset
    lens = tuned_lens_fit(*arguments(states), head, steps=400, batch=200, rate=0.03)
    assert float(lens["loss"][0, -1]) < 0.01 * float(lens["loss"][0, 0])
    fresh = streams(2, 100, seed=9)
    fresh[1] = fresh[0].values @ matrix.T + offset
    assert float(fitted_lens(fresh, None, head, lens)["kl"][0].mean()) < 0.02 * float(lens["loss"][0, 0])


def test_a_batch_is_the_same_in_pieces_of_few_tokens_and_over_windows(monkeypatch):
    states, head = streams(2, 50), head_of("rms", bias=False)
    whole = tuned_lens_fit(*arguments(states), head, steps=5, batch=30)
    monkeypatch.setattr(tuned, "LOGIT_BYTES", 4 * VOCAB * 7)
    pieces = tuned_lens_fit(*arguments(states), head, steps=5, batch=30)
    np.testing.assert_allclose(pieces["loss"], whole["loss"], rtol=1e-4)
    np.testing.assert_allclose(pieces["jacobian"], whole["jacobian"], atol=1e-4)
    # Every token once an epoch, in whatever windows: two steps of half the tokens see the mean of all.
    monkeypatch.setattr(tuned, "WINDOW_BYTES", 1)
    monkeypatch.setattr(tuned, "BLOCK", 8)
    small = tuned_lens_fit(*arguments(states), head, steps=2, batch=25, rate=1e-9)
    plain = logit_lens(states, None, head)["kl"].mean("token").values[:-1]
    np.testing.assert_allclose(small["loss"].mean("step"), plain, rtol=1e-5)


def refused(error: type[MizarrError], words: str, *args: Any, **settings: Any) -> None:
    with pytest.raises(error, match=words):
        tuned_lens_fit(*args, **settings)


def test_streams_and_settings_that_do_not_fit_are_refused():
    states, head = streams(), head_of("rms", bias=False)
    below, final = arguments(states)
    refused(
        ShapeError, "resid_post of the last layer, found other", below, final.rename(resid_post="other"), head
    )
    refused(ShapeError, r"below the last one, 3, found layers \[0, 1, 2, 3\]", states, final, head)
    refused(ShapeError, "streams of the same tokens", below[:, :-1], final, head)
    refused(ShapeError, "5 hidden", below, final, head.isel(hidden=slice(5)))
    refused(ConfigError, "steps of at least 1", below, final, head, steps=0)
    refused(ConfigError, "batch of at least 1", below, final, head, batch=0)
    refused(ConfigError, "rate, a learning rate, above 0", below, final, head, rate=0.0)
    refused(ConfigError, "infinite or NaN", below * np.nan, final, head)


def save(
    folder: Path, *, bias: bool = True, dtype: torch.dtype = torch.float32, **config: Any
) -> torch.nn.ModuleList:
    """Folder as tuned-lens writes it: translators of 4 layers, as plain linear modules."""
    torch.manual_seed(0)
    modules = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=bias, dtype=dtype) for _ in range(4))
    folder.mkdir(exist_ok=True)
    torch.save(modules.state_dict(), folder / "params.pt")
    values = {"base_model_name_or_path": "toy", "d_model": WIDTH, "num_hidden_layers": 4, "bias": bias}
    values |= {"base_model_revision": None, "unembed_hash": "ab", "lens_type": "linear_tuned_lens"}
    (folder / "config.json").write_text(json.dumps(values | config), "utf-8")
    return modules


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files_of_tuned_lens_give_the_logits_of_their_own_definition(bias, dtype, tmp_path):
    modules, states, head = (
        save(tmp_path, bias=bias, dtype=dtype).float(),
        streams(),
        head_of("rms", bias=False),
    )
    lens = read_tuned_lens(tmp_path)
    assert lens.attrs == {"target_layer": 3, "model_name": "toy", "unembed_hash": "ab"}
    assert lens["layer"].values.tolist() == [-1, 0, 1, 2]
    read = logits(transported(states, lens), head)
    gain, unembed = (torch.tensor(head[name].values) for name in ("norm_weight", "unembed"))
    for layer in range(3):
        # hidden_states[i] of transformers is the input of layer i: the stream after layer i - 1.
        h = torch.tensor(states[layer].values)
        h = h + modules[layer + 1](h)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        np.testing.assert_allclose(read[layer], (h @ unembed.T).detach(), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(read[3], logits(states, head)[3])


def test_a_written_folder_is_read_alike_and_lacking_layers_are_the_logit_lens(tmp_path):
    modules = save(tmp_path / "theirs")
    lens = read_tuned_lens(tmp_path / "theirs")
    write_tuned_lens(lens, tmp_path / "ours")
    ours = torch.load(tmp_path / "ours" / "params.pt", weights_only=True)
    for name, tensor in modules.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=2e-7)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")]
    assert configs[0] == configs[1]
    fitted = tuned_lens_fit(*arguments(streams()), head_of("rms", bias=False), steps=2, batch=8)
    write_tuned_lens(fitted, tmp_path / "fit", model_name="toy")
    again = read_tuned_lens(tmp_path / "fit")
    np.testing.assert_allclose(again["jacobian"][1:], fitted["jacobian"], atol=2e-7)
    np.testing.assert_array_equal(again["jacobian"][0], np.eye(WIDTH))
    assert again.attrs["model_name"] == "toy"
    assert sorted(path.name for path in (tmp_path / "fit").iterdir()) == ["config.json", "params.pt"]


def test_folders_that_are_no_tuned_lens_are_refused_in_one_line(tmp_path):
    def broken(words: str, **config: Any) -> None:
        save(tmp_path / "lens", **config)
        with pytest.raises(WeightsError, match=words) as error:
            read_tuned_lens(tmp_path / "lens")
        assert "\n" not in str(error.value)

    with pytest.raises(WeightsError, match=r"found no config.json"):
        read_tuned_lens(tmp_path)
    broken("4 translators of width 7 .* found another value for 0.weight", d_model=7)
    broken("5 translators of width 6 .* found another value for 4.weight", num_hidden_layers=5)
    broken("3 translators of width 6 .* found 8 tensors", num_hidden_layers=3)
    broken("num_hidden_layers .* found 1.5", num_hidden_layers=1.5)
    broken("num_hidden_layers .* found True", num_hidden_layers=True)
    broken(f"{10**15} translators", num_hidden_layers=10**15)
    params = save(tmp_path / "lens").state_dict()
    params["2.bias"][0] = float("nan")
    torch.save(params, tmp_path / "lens" / "params.pt")
    with pytest.raises(WeightsError, match=r"found another value for 2\.bias"):
        read_tuned_lens(tmp_path / "lens")
    (tmp_path / "lens" / "params.pt").write_bytes(b"no file of torch")
    with pytest.raises(WeightsError, match=r"params\.pt"):
        read_tuned_lens(tmp_path / "lens")


def test_a_tuned_lens_of_another_model_and_uses_of_another_lens_are_refused(tmp_path):
    save(tmp_path)
    lens = read_tuned_lens(tmp_path)
    with pytest.raises(WeightsError, match="width 192, found one with 6"):
        require_fit(lens, specimen().config)
    with pytest.raises(WeightsError, match="tuned lens, whose bias"):
        write_lens(lens, tmp_path / "lens.pt")
    with pytest.raises(WeightsError, match="expected a tuned lens"):
        write_tuned_lens(lens.drop_vars("bias"), tmp_path / "other")
    with pytest.raises(ShapeError, match="how many prompts"):
        merged([lens, lens])
    with pytest.raises(ShapeError, match="without a deviation"):
        standard_error(lens)
    assert not (tmp_path / "other").exists()
