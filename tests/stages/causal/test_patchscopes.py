"""Patchscopes: equal to two literal passes, the logit lens as a special case, and resumed cells."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr import HookSpec, Model, Replace
from mizarr.pipeline import run
from mizarr.stages.causal.metrics import kl_divergence, log_softmax
from mizarr.stages.causal.patchscopes import OWN, Patchscopes
from mizarr.stages.logits.lens import logit_lens
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store.errors import ConfigError, InterventionError, MizarrError, PromptError, StageError

from ..forward.random_encoders import save_random_encoder
from ..forward.random_models import VOCAB, save_random_model

SOURCES = (((5, 17, 200, 9), -1), ((5, 17, 31, 44, 60), 2), ((8, 9), 1))
TARGET = (7, 80, 90, 7, 81, 91, 7, 300, 82)
WORDS = (3, 77)
SCOPES = Patchscopes(SOURCES, TARGET, placeholder=-2, words=WORDS, max_tokens=3)


def loaded(folder: Path, family: str) -> Model:
    save_random_model(folder, family, 2)
    return Model.from_pretrained(folder)


def computed(model: Model, folder: Path, scopes: Patchscopes = SCOPES) -> xr.Dataset:
    store, node = mizarr.open_store(folder), scopes.on(model)
    run(node, store, quiet=True)
    return node.open(store).load()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def found(model: Model, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    return computed(model, tmp_path_factory.mktemp("store"))


def literal(model: Model, ids, position: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """State after a layer, and next-token logits, of one plain pass."""
    point = f"blocks.{layer}.hook_resid_post"
    result = model.forward(ids, HookSpec().capture(point), want=mizarr.logits())
    return result[point][0, position].numpy(), result.logits[0, position].double().numpy()


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_reading_equals_two_literal_passes(family: str, tmp_path: Path):
    model = loaded(tmp_path / "model", family)
    found = computed(model, tmp_path / "store")
    layers = range(model.config.num_layers)
    assert found["rank"].dims == ("source", "layer", "target_layer", "word")
    for (number, (ids, position)), layer, target_layer in product(enumerate(SOURCES), layers, layers):
        state, own = literal(model, ids, position, layer)
        patch = HookSpec().intervene(
            f"blocks.{target_layer}.hook_resid_post", Replace(state, positions=(len(TARGET) - 2,))
        )
        logits = model.forward(TARGET, patch, want=mizarr.logits()).logits[0, -1].double().numpy()
        cell = found.sel(source=number, layer=layer, target_layer=target_layer)
        assert cell["own_id"] == own.argmax()
        assert cell["kl"] == pytest.approx(float(kl_divergence(own, logits)), abs=1e-5)
        assert cell["top_id"] == logits.argmax()
        for word, token in zip((OWN, *WORDS), (int(own.argmax()), *WORDS), strict=True):
            read = cell.sel(word=word)
            assert read["logprob"] == pytest.approx(log_softmax(logits)[token], abs=1e-5)
            assert read["rank"] == (logits > logits[token]).sum()
        (made,) = mizarr.generate(model, [TARGET], patch, max_tokens=3, temperature=0.0, eos=())
        assert cell["text"].item() == (made.generated_text or "")


def test_the_logit_lens_is_a_reading_at_the_own_place(model: Model, found: xr.Dataset):
    head = readout_from_files([Path(model.name) / "model.safetensors"], model.config)
    for number, (ids, position) in enumerate(SOURCES):
        states = np.stack([literal(model, ids, position, layer)[0] for layer in found["layer"].values])
        array = xr.DataArray(states[:, None], dims=("layer", "token", "hidden"))
        for word, token in zip((OWN, *WORDS), (int(found["own_id"][number]), *WORDS), strict=True):
            targets = xr.DataArray(np.array([token], np.int32), dims="token")
            lens = logit_lens(array, targets, head).isel(token=0)
            read = found.sel(source=number, word=word)
            np.testing.assert_allclose(read["lens_logprob"], lens["target_logprob"], atol=1e-5)
            np.testing.assert_array_equal(read["lens_rank"] + 1, lens["target_rank"])
            np.testing.assert_allclose(read["lens_kl"], lens["kl"], atol=1e-5)
    # After the last layer nothing is left to do: the lens reads the model's own prediction.
    assert (found["lens_top_id"].isel(layer=-1) == found["own_id"]).all()


def test_a_state_put_back_where_it_was_reads_its_own_prediction(model: Model, tmp_path: Path):
    ids, _ = SOURCES[0]
    found = computed(model, tmp_path, Patchscopes(((ids, -1),), ids))
    same = [found["kl"].sel(layer=layer, target_layer=layer).item() for layer in found["layer"].values]
    np.testing.assert_allclose(same, 0, atol=1e-5)
    assert found["kl"].max() > 1e-3


def test_a_killed_sweep_computes_the_missing_sources(model, tmp_path: Path, monkeypatch, found):
    store, node = mizarr.open_store(tmp_path), SCOPES.on(model)
    dataset = Patchscopes.dataset

    def killed(self, prepared, cell, measured):
        if cell["source"] == [[8, 9], 1]:
            raise KeyboardInterrupt
        return dataset(self, prepared, cell, measured)

    monkeypatch.setattr(Patchscopes, "dataset", killed)
    with pytest.raises(KeyboardInterrupt):
        run(node, store, quiet=True)
    monkeypatch.undo()
    again = SCOPES.on(model)
    missing = again.missing(store)
    assert 0 < len(missing) < 3
    run(again, store, quiet=True)
    xr.testing.assert_allclose(again.open(store).load(), found, rtol=1e-6)


def test_the_plan_reads_the_target_prompt_before_the_placeholder_once(model, tmp_path: Path):
    node = SCOPES.on(model)
    planned = node.plan(mizarr.open_store(tmp_path))
    layers = model.config.num_layers
    assert planned.runs == len(SOURCES) * layers * (layers + 1)
    assert planned.positions < planned.naive / 2


def test_another_source_computes_one_cell(model, tmp_path: Path):
    first, more = (Patchscopes(SOURCES[:count], TARGET).on(model) for count in (2, 3))
    store = mizarr.open_store(tmp_path)
    run(first, store, quiet=True)
    assert [cell["source"] for cell in more.missing(store)] == [[[8, 9], 1]]


def test_a_model_that_fills_in_masks_is_refused(tmp_path: Path):
    save_random_encoder(tmp_path, "bert")
    node = Patchscopes(SOURCES, TARGET).on(Model.from_pretrained(tmp_path))
    with pytest.raises(ConfigError, match="expected a model that predicts the next token, found bert"):
        node.cells()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sources": ()}, PromptError, "at least one source prompt, found none"),
        ({"sources": (((), -1),)}, PromptError, "at least one token"),
        ({"sources": (((1, 2), 2),)}, PromptError, "a source position from -2 to 1, .* found 2"),
        ({"sources": SOURCES[:1] * 2}, StageError, "sources that differ"),
        ({"words": (3, 3)}, StageError, "words that differ"),
        ({"words": (VOCAB,)}, PromptError, f"token ids from 0 to {VOCAB - 1}, found {VOCAB}"),
        ({"target": ()}, PromptError, "at least one token"),
        ({"placeholder": 9}, PromptError, "the placeholder from -9 to 8, .* found 9"),
        ({"layers": (9,)}, InterventionError, "expected layers from 0 to"),
        ({"target_layers": (0, 0)}, InterventionError, "each once"),
        ({"max_tokens": -1}, StageError, "max_tokens of at least 0, found -1"),
    ],
)
def test_what_cannot_be_read_is_refused_before_a_pass(model, change, error, message):
    given = {"sources": SOURCES, "target": TARGET} | change
    with pytest.raises(MizarrError, match=message) as raised:
        Patchscopes(**given).on(model).cells()
    assert raised.type is error and "\n" not in str(raised.value)
