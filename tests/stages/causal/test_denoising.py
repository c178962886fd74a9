"""Masks filled in, against a loop over the reference's own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookSpec, Model, Zero
from mizarr.pipeline import run
from mizarr.stages.causal.denoising import Denoising, filled_by_step
from mizarr.store.errors import ConfigError, PromptError

from ..forward.random_encoders import MASK, save_random_encoder
from ..forward.random_models import save_random_model

pytest.importorskip("transformers")
TEXTS = ((2, MASK, 40, MASK, MASK, 77, MASK, MASK, 3), (2, 31, MASK, 50, MASK, 3))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_random_encoder(folder, "bert", 0, tokenizer=False)


def denoised(experiment: Denoising, folder: Path | str, store: Path) -> Any:
    kept = mizarr.open_store(store)
    node = experiment.on(str(folder))
    run(node, kept)
    return node.open(kept).load()


def by_hand(logits_of: Any, ids: tuple[int, ...], counts: list[int], order: str) -> list[dict[int, Any]]:
    """By pass: place -> (token, its probability), as in Mask-Predict. logits_of: ids -> [place, vocab]."""
    text, found = list(ids), []
    for count in counts:
        said = {}
        for place in [place for place, token in enumerate(text) if token == MASK]:
            probabilities = logits_of(text)[place].double().softmax(-1).tolist()
            best = sorted((p, -i) for i, p in enumerate(probabilities) if i != MASK)[::-1][:2]
            entropy = -sum(p * np.log(p) for p in probabilities)
            (first, token), (second, _) = best
            rank = {"confidence": -first, "margin": second - first, "entropy": entropy, "position": place}
            said[place] = (rank[order], -token, first)
        chosen = sorted(said, key=lambda place: (said[place][0], place))[:count]
        found.append({place: said[place][1:] for place in chosen})
        for place in chosen:
            text[place] = said[place][1]
    return found


@pytest.mark.parametrize(
    ("order", "steps"), [("confidence", None), ("margin", 2), ("entropy", 3), ("position", 4)]
)
def test_masks_are_filled_as_the_reference_says_the_surest_first(order, steps, bert, tmp_path):
    folder, reference = bert

    def logits_of(text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([text])).logits[0]

    found = denoised(Denoising(TEXTS, mask=MASK, steps=steps, order=order), folder, tmp_path)
    for row, ids in enumerate(TEXTS):
        one = found.isel(prompt=row)
        passes = by_hand(logits_of, ids, filled_by_step(ids.count(MASK), steps), order)
        filled = {place: (step, *told) for step, each in enumerate(passes) for place, told in each.items()}
        for place, token in enumerate(ids):
            step, expected, probability = filled.get(place, (-1, token, np.nan))
            here = one.isel(position=place)
            assert (int(here["step_filled"]), int(here["token_id"])) == (step, expected)
            np.testing.assert_allclose(np.exp(here["logprob"]), probability, atol=1e-5)
        assert (one["token_id"].values[len(ids) :] == -1).all()


def test_the_trace_says_what_stood_at_each_mask_before_it_was_filled(bert, tmp_path):
    folder, reference = bert
    found = denoised(Denoising(TEXTS[:1], mask=MASK, steps=3), folder, tmp_path).isel(prompt=0)
    text = torch.tensor([TEXTS[0]])
    for step in range(3):
        with torch.no_grad():
            said = reference(text).logits[0].double().log_softmax(-1)
        masks = text[0] == MASK
        said_of_others = said.clone()
        said_of_others[:, MASK] = -np.inf
        here = found.sel(step=step)
        np.testing.assert_array_equal(here["best_id"].values >= 0, masks.numpy())
        np.testing.assert_array_equal(here["best_id"].values[masks], said_of_others[masks].argmax(-1))
        np.testing.assert_allclose(
            here["best_logprob"].values[masks], said_of_others[masks].amax(-1), atol=1e-4
        )
        np.testing.assert_allclose(
            here["entropy"].values[masks], -(said.exp() * said).sum(-1)[masks], atol=1e-4
        )
        text[0, found["step_filled"].values == step] = torch.tensor(
            found["token_id"].values[found["step_filled"].values == step]
        ).long()
    assert not (text == MASK).any()


def test_dream_reads_a_mask_one_position_before_it_and_others_at_it(tmp_path):
    """As Dream's code shifts its logits before it samples."""
    for model_type, shift in (("Dream", 1), ("qwen2", 0)):
        folder = tmp_path / model_type
        save_random_model_without_mask(folder, model_type)
        model = Model.from_pretrained(folder)

        def logits_of(text: list[int], model=model, shift=shift) -> torch.Tensor:
            logits = model.forward([text]).logits[0]
            return torch.cat([logits[:1], logits[:-1]]) if shift else logits

        found = denoised(Denoising(TEXTS[:1], mask=MASK), folder, tmp_path / "store").isel(prompt=0)
        passes = by_hand(logits_of, TEXTS[0], [1] * TEXTS[0].count(MASK), "confidence")
        filled = {place: told[0] for each in passes for place, told in each.items()}
        assert [filled.get(place, token) for place, token in enumerate(TEXTS[0])] == found[
            "token_id"
        ].values.tolist()


def save_random_model_without_mask(folder: Path, model_type: str) -> None:
    save_random_model(folder, "qwen2", 0, tokenizer=False)
    told = json.loads((folder / "config.json").read_text())
    theta = (told.pop("rope_parameters", None) or {}).get("rope_theta", 1e4)
    own = {"model_type": model_type, "rope_theta": theta, "use_sliding_window": False, "is_causal": False}
    (folder / "config.json").write_text(json.dumps(told | own))


def test_draws_follow_the_seed_and_the_model(bert):
    """A token is drawn from what is said at its mask: the likeliest come as often as they are likely."""
    model, one = Model.from_pretrained(bert[0]), (2, 31, MASK, 50, 3)

    def drawn(seed: int, **given: Any) -> np.ndarray:
        experiment = Denoising((one,), MASK, seed=seed, **{"temperature": 0.5} | given)
        (cell,) = experiment.cells(model.config)
        return experiment.dataset(model, cell, [])["token_id"].values[0]

    found = [int(drawn(seed)[2]) for seed in range(80)]
    assert int(drawn(7)[2]) == found[7] and MASK not in found
    logits = model.forward([list(one)]).logits[0, 2].double()
    logits[MASK] = -np.inf
    said = (logits / 0.5).softmax(-1)
    likely = said.topk(20).indices.tolist()
    share, expected = np.mean([token in likely for token in found]), float(said[likely].sum())
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(found))


def test_a_random_order_is_that_of_the_seed(bert):
    model = Model.from_pretrained(bert[0])
    orders = []
    for seed in (0, 0, 1, 2):
        experiment = Denoising(TEXTS[:1], MASK, order="random", seed=seed)
        (cell,) = experiment.cells(model.config)
        orders.append(experiment.dataset(model, cell, [])["step_filled"].values[0].tolist())
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) > 1
    assert sorted(step for step in orders[0] if step >= 0) == list(range(TEXTS[0].count(MASK)))


def test_what_is_filled_depends_on_no_company_and_one_prompt_more_computes_one(bert, tmp_path, monkeypatch):
    folder, _ = bert
    store = mizarr.open_store(tmp_path)
    alone = Denoising(TEXTS[:1], mask=MASK).on(str(folder))
    run(alone, store)
    read = []
    whole = Model.run_batch

    def counted(self: Model, rows: Any, *rest: Any) -> Any:
        read.append(tuple(rows[0]))
        return whole(self, rows, *rest)

    monkeypatch.setattr(Model, "run_batch", counted)
    both = Denoising(TEXTS, mask=MASK).on(str(folder))
    run(both, store)
    assert read[0] == TEXTS[1] and len(read) == TEXTS[1].count(MASK)
    one, other = alone.open(store).load().isel(prompt=0), both.open(store).load().isel(prompt=0)
    np.testing.assert_array_equal(one["token_id"], other["token_id"])
    np.testing.assert_array_equal(one["best_logprob"], other["best_logprob"])


def test_what_is_silenced_is_silenced_in_every_pass(bert, tmp_path):
    folder, _ = bert
    hooks = HookSpec().intervene("blocks.0.hook_mlp_out", Zero())
    found = denoised(Denoising(TEXTS[:1], MASK, hooks=hooks), folder, tmp_path).isel(prompt=0)
    text, model = list(TEXTS[0]), Model.from_pretrained(folder)
    for step in range(text.count(MASK)):
        said = model.forward([text], hooks).logits[0].double().log_softmax(-1)
        place = int(np.flatnonzero(found["step_filled"].values == step)[0])
        token = int(found["token_id"][place])
        assert float(found["logprob"][place]) == pytest.approx(float(said[place, token]), abs=1e-5)
        text[place] = token


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (
            {"prompts": ((2, 5, 3),)},
            PromptError,
            r"expected a mask token \(id 4\) in every prompt, found none",
        ),
        ({"prompts": ((MASK,) * 5000,)}, PromptError, "masks included, .* found 5000"),
        ({"order": "confidense"}, ConfigError, "did you mean 'confidence'"),
        ({"steps": 0}, ConfigError, "steps of at least 1, found 0"),
        ({"temperature": -1.0}, ConfigError, "temperature >= 0, found -1"),
        (
            {"hooks": HookSpec().capture("blocks.0.hook_mlp_out")},
            ConfigError,
            "interventions only, found captures",
        ),
    ],
)
def test_what_cannot_be_filled_in_is_refused_in_a_line(given, error, match, bert, tmp_path):
    with pytest.raises(error, match=match):
        denoised(Denoising(**{"prompts": TEXTS, "mask": MASK, **given}), bert[0], tmp_path)


def test_a_model_that_predicts_the_next_token_fills_in_nothing(tmp_path):
    with pytest.raises(
        ConfigError, match="masked language model for denoising, found llama, which predicts the"
    ):
        denoised(Denoising(TEXTS, mask=MASK), "specimen", tmp_path)
