"""The fit of a Jacobian lens: the reference's arrays, what a kill loses, what is merged, what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.forward.hooks.interventions import Replace
from mizarr.stages.lenses.jacobian import JacobianLensFit, merged, standard_error
from mizarr.store.errors import ConfigError, MizarrError, PromptError, ShapeError, StageError
from tests.stages.forward.random_encoders import save_random_encoder
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import VOCAB, save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv
from tests.stages.lenses.reference import NAMES, OF_J, arrays, meta, model_of, needs_reference, prompts_of

OPTIONS = {"skip_first_positions": "skip", "max_seq_len": "longest", "source_layers": "layers"}
"""The reference's names of settings -> ours."""


def fitted(model: mizarr.Model, store: mizarr.Store, **given: Any) -> xr.Dataset:
    node = JacobianLensFit(**given).on(model)
    run(node, store)
    return node.open(store).load()


def corpus(
    lengths: tuple[int, ...] = (9, 5, 12, 7, 8, 10, 6), vocab: int = VOCAB
) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(3)
    return tuple(tuple(rng.integers(2, VOCAB, length).tolist()) for length in lengths)


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama")
    return mizarr.Model.from_pretrained(str(folder))


def literal(model: mizarr.Model, ids: tuple[int, ...], layer: int, counted: range) -> np.ndarray:
    """The definition by central differences of plain passes: every entry of every counted source changed."""
    point, last = f"blocks.{layer}.hook_resid_post", f"blocks.{model.config.num_layers - 1}.hook_resid_post"
    clean = model.forward([list(ids)], mizarr.HookSpec().capture(point))[point]
    # Norms and rope tables of a float64 model go through float32, which a smaller step would show.
    width, epsilon = clean.shape[-1], 5e-3
    found = np.zeros((width, width))
    for position in counted:
        steps = torch.zeros(2 * width, *clean.shape[1:], dtype=clean.dtype)
        steps[:width, position] = epsilon * torch.eye(width)
        steps[width:, position] = -epsilon * torch.eye(width)
        hooks = mizarr.HookSpec().intervene(point, Replace(clean + steps)).capture(last)
        streams = model.forward([list(ids)] * 2 * width, hooks)[last][:, counted.start : counted.stop].sum(1)
        found += ((streams[:width] - streams[width:]) / (2 * epsilon)).numpy().T
    return found / len(counted)


# The reference


@needs_reference
@pytest.mark.parametrize("name", NAMES)
def test_fits_are_those_of_the_reference(name, store):
    for fit, told in meta(name)["fits"].items():
        if "shards" in told:
            parts = [
                fitted(model_of(name), store, prompts=prompts_of(name, meta(name)["fits"][part]["prompts"]))
                for part in told["shards"]
            ]
            lens = merged(parts)
        else:
            options = {OPTIONS[key]: value for key, value in told["options"].items() if key in OPTIONS}
            if "layers" in options:
                options["layers"] = tuple(options["layers"])
            prompts = prompts_of(name, told["prompts"])
            options["batch"] = told["options"].get("dim_batch", 8)
            lens = fitted(model_of(name), store, prompts=prompts, segment=3, **options)
        wanted = arrays(name, "fits")
        np.testing.assert_allclose(lens["jacobian"], wanted[f"{fit}.J"], rtol=0, atol=OF_J, err_msg=fit)
        np.testing.assert_allclose(lens["jacobian"], arrays(name, "exact")[f"{fit}.J"], rtol=0, atol=OF_J)
        assert lens["layer"].values.tolist() == wanted[f"{fit}.layers"].tolist()
        assert int(lens["n_prompts"]) == told["n_prompts"]
        assert lens.attrs["target_layer"] == meta(name)["layers"] - 1


@needs_reference
@pytest.mark.parametrize("name", NAMES)
def test_the_deviation_is_the_spread_of_the_reference_over_prompts(name, store):
    told, exact = meta(name)["fits"]["default"], arrays(name, "exact")
    lens = fitted(model_of(name), store, prompts=prompts_of(name, told["prompts"]), segment=3)
    squares = np.square(exact["per_prompt"] - exact["per_prompt"].mean(0)).sum((0, 2, 3))
    np.testing.assert_allclose(lens["deviation"], squares, rtol=1e-5)
    n = told["n_prompts"]
    np.testing.assert_allclose(standard_error(lens), np.sqrt(squares / n / (n - 1)), rtol=1e-5)


# The definition, in other families


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "mamba2", "qwen3_next", "rwkv7", "dynamic"])
@pytest.mark.parametrize("memory", [1 << 30, 1])
def test_products_are_what_small_changes_do_in_attention_and_in_recurrences(family, memory, tmp_path):
    pytest.importorskip("transformers")
    save = {"mamba2": save_random_hybrid, "qwen3_next": save_random_hybrid, "rwkv7": save_random_rwkv}
    if family == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        save_random_model(tmp_path, "llama", rope_scaling=rope, max_position_embeddings=8)
    else:
        save.get(family, save_random_model)(tmp_path, family)
    model = mizarr.Model.from_pretrained(str(tmp_path), dtype="float64")
    (ids,) = corpus((11,))
    layer, width, counted = model.config.num_layers - 2, model.config.axis_sizes["hidden"], range(3, 10)
    found = model.vector_jacobian_products(ids, [layer], torch.eye(width), counted, together=5, memory=memory)
    wanted = literal(model, ids, layer, counted)
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=5e-3 * np.abs(wanted).max())


def test_a_model_in_which_positions_see_later_ones_has_no_such_lens(tmp_path):
    pytest.importorskip("transformers")
    save_random_encoder(tmp_path, "bert")
    model = mizarr.Model.from_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="expected a model that predicts the next token"):
        JacobianLensFit(prompts=corpus(), skip=1).on(model).cells()


# Segments


def test_a_fit_killed_twice_resumes_and_has_the_same_bits(llama, tmp_path, monkeypatch):
    settings: dict[str, Any] = {"prompts": corpus(), "skip": 2, "segment": 2}
    whole = fitted(llama, mizarr.open_store(tmp_path / "whole"), **settings)
    store, differentiate = mizarr.open_store(tmp_path / "killed"), mizarr.Model.vector_jacobian_products
    computed: list[tuple[int, ...]] = []

    def dies(self, ids, *args, **kwargs):
        computed.append(tuple(ids))
        if len(computed) in (4, 7):
            raise KeyboardInterrupt
        return differentiate(self, ids, *args, **kwargs)

    monkeypatch.setattr(mizarr.Model, "vector_jacobian_products", dies)
    for missing in (3, 2):
        with pytest.raises(KeyboardInterrupt):
            fitted(llama, store, **settings)
        assert len(JacobianLensFit(**settings).on(llama).missing(store)) == missing
    resumed = fitted(llama, store, **settings)
    # Of 7 prompts in segments of 2: 2 stored, killed at the 4th; 2 more stored, killed at the 5th; the rest.
    assert len(computed) == 4 + 3 + 3
    xr.testing.assert_identical(resumed, whole)


def test_a_longer_corpus_reuses_the_segments_of_a_shorter_one(llama, store):
    settings: dict[str, Any] = {"skip": 2, "segment": 2}
    fitted(llama, store, prompts=corpus()[:4], **settings)
    longer = JacobianLensFit(prompts=corpus(), **settings).on(llama)
    assert [len(cell["prompts"]) for cell in longer.missing(store)] == [2, 1]


def test_halves_merge_to_the_whole_and_segments_change_nothing_beyond_rounding(llama, store):
    prompts = corpus()
    whole = fitted(llama, store, prompts=prompts, skip=2)
    halves = [fitted(llama, store, prompts=part, skip=2, segment=1) for part in (prompts[:3], prompts[3:])]
    joined = merged(halves)
    np.testing.assert_allclose(joined["jacobian"], whole["jacobian"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(joined["deviation"], whole["deviation"], rtol=1e-4)
    assert int(joined["n_prompts"]) == 7
    assert joined.attrs == whole.attrs


def test_settings_that_change_no_number_are_in_no_key(llama, store):
    def key(**given):
        return JacobianLensFit(prompts=corpus(), **given).on(llama).key(store).digest

    assert key(skip=2, batch=3) == key(skip=2, batch=8) == key(skip=2, seed=4)
    assert key(skip=2, layers=(0,)) == key(skip=2, layers=(-llama.config.num_layers,))
    different = [{}, {"skip": 1}, {"longest": 8}, {"cotangents": 3}, {"cotangents": 3, "seed": 1}]
    assert len({key(**{"skip": 2} | given) for given in different}) == len(different)


# Random cotangents


def test_as_many_random_cotangents_as_the_stream_is_wide_are_the_exact_fit(llama, store):
    prompts, width = corpus(), llama.config.axis_sizes["hidden"]
    exact = fitted(llama, store, prompts=prompts, skip=2)
    drawn = fitted(llama, store, prompts=prompts, skip=2, cotangents=width)
    np.testing.assert_allclose(drawn["jacobian"], exact["jacobian"], rtol=0, atol=1e-5)


def test_an_estimate_is_unbiased_and_its_standard_error_is_its_error(llama, store):
    prompts, n = corpus(), 7
    exact = fitted(llama, store, prompts=prompts, skip=2)
    fits = [fitted(llama, store, prompts=prompts, skip=2, cotangents=4, seed=seed) for seed in range(40)]
    errors = np.stack([fit["jacobian"].values - exact["jacobian"].values for fit in fits])
    mean_square = np.square(errors).sum((2, 3)).mean(0)
    # The mean of 40 estimates errs by 1/40 of the mean square, if none has a bias.
    bias_square = np.square(errors.mean(0)).sum((1, 2))
    assert (bias_square < 1.5 * mean_square / 40).all()
    # The stated error is that of prompts and draws together; that of the draws is what is left of it.
    stated = np.mean([standard_error(fit).values ** 2 for fit in fits], axis=0)
    of_prompts = standard_error(exact).values ** 2
    np.testing.assert_allclose(stated - of_prompts, mean_square, rtol=0.15)
    assert n == int(fits[0]["n_prompts"])


# Refused


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"skip": 16}, PromptError, "expected a prompt of at least 18 tokens"),
        ({"longest": 3}, PromptError, "cut off after 3 tokens"),
        ({"layers": (2,)}, StageError, "expected source layers in 0..0, below the last layer 1"),
        ({"layers": (-1,)}, StageError, "found -1"),
        ({"layers": (7,)}, StageError, "found 7"),
        ({"layers": ()}, StageError, "expected at least one source layer"),
        ({"skip": -1}, StageError, "expected skip at least 0, found -1"),
        ({"batch": 0}, StageError, "expected batch at least 1, found 0"),
        ({"cotangents": 0}, StageError, "expected cotangents from 1 to"),
        ({"cotangents": 9999}, StageError, "found 9999"),
    ],
)
def test_a_wrong_setting_is_one_line(given, error, said, llama):
    with pytest.raises(error, match=said) as caught:
        JacobianLensFit(**{"prompts": corpus(), "skip": 2} | given).on(llama).cells()
    assert "\n" not in str(caught.value)


def test_lenses_that_do_not_belong_together_are_not_merged(llama, store):
    lens = fitted(llama, store, prompts=corpus(), skip=2)
    wrong = [
        [],
        [lens.assign(n_prompts=0)],
        [lens, fitted(llama, store, prompts=corpus(), skip=1)],
        [lens, lens.assign_coords(layer=[1])],
        [lens, lens.assign_attrs(corpus="other")],
    ]
    for lenses in wrong:
        with pytest.raises(MizarrError, match="expected") as caught:
            merged(lenses)
        assert "\n" not in str(caught.value)
    with pytest.raises(ShapeError, match="at least two prompts"):
        standard_error(fitted(llama, store, prompts=corpus()[:1], skip=2))
