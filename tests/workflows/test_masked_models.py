"""Models that fill in a mask, asked at its position: the logit lens and the causal trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookPoint, HookSpec, Model, Replace
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.subject import shipped_facts
from mizarr.workflows.views import Figure, Tokens
from tests.stages.forward.random_encoders import save_masking_tokenizer, save_random_encoder
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import save_random_model
from tests.stages.forward.toy_rwkv6 import CONFIG, SPECIMEN

pytest.importorskip("transformers")
KINDS = {"bert": "WordPiece", "xlm-roberta": "Unigram"}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    save_random_encoder(found, request.param, 0, tokenizer=False, pad_token_id=0, num_hidden_layers=3)
    save_masking_tokenizer(found, KINDS[request.param])
    return found


def test_a_text_gets_what_its_tokenizer_puts_around_it_and_the_mask_is_one_token(folder: Path):
    tokenizer = Model.from_pretrained(folder).tokenizer
    mask = tokenizer.mask_id
    found = tokenizer.encode(f"The {tokenizer.pieces([mask])[0]} of the sea")
    assert found.ids[0] == 2 and found.ids[-1] == 3
    assert found.special[0] and found.special[-1] and not any(found.special[1:-1])
    assert found.ids.count(mask) == 1 == len([token for token in found.ids if token == 4])


def test_the_lens_follows_the_answer_at_the_mask(folder: Path, tmp_path: Path):
    model = Model.from_pretrained(folder)
    mask = model.tokenizer.pieces([model.tokenizer.mask_id])[0]
    facts = shipped_facts()[:2]
    texts = (facts[0]["prompt"], f"In {facts[1]['prompt']} {mask}.")
    words = tuple(fact["target"] for fact in facts)
    done = compute("logit_lens", store=tmp_path / "store", model=str(folder), prompts=texts, answers=words)
    assert done.texts == (f"{texts[0]} {mask}", texts[1])
    for i, text in enumerate(done.texts):
        ids = model.tokenizer.encode(text).ids
        place = ids.index(model.tokenizer.mask_id)
        logits = model.forward(ids).logits[0].log_softmax(-1)
        lens = done.prompt(i)
        assert done.ends[i] == place
        np.testing.assert_array_equal(np.delete(lens["target_id"].values, place), np.delete(ids, place))
        filled = model.tokenizer.encode(text.replace(mask, words[i].strip())).ids
        assert lens["target_id"].values[place] == filled[place]
        last = lens.isel(layer=-1)
        expected = logits[torch.arange(len(ids)), torch.tensor(last["target_id"].values).long()]
        np.testing.assert_allclose(last["target_logprob"].values, expected.numpy(), atol=1e-4)
        told = done.document(i)["layers"][-1]["predictions"][0]
        assert told["token_id"] == int(logits[place].argmax())
    assert json.dumps(done.to_json(), allow_nan=False)


def test_patches_are_measured_at_the_mask(folder: Path, tmp_path: Path):
    model = Model.from_pretrained(folder)
    mask = model.tokenizer.pieces([model.tokenizer.mask_id])[0]
    clean, *others = (fact["prompt"] for fact in shipped_facts())
    long = len(model.tokenizer.encode(clean))
    corrupted = next(each for each in others if len(model.tokenizer.encode(each)) == long)
    clean, corrupted = f"{clean} {mask}.", f"{corrupted} {mask}."
    done = compute(
        "activation_patching",
        store=tmp_path / "store",
        model=str(folder),
        prompt=clean,
        corrupted=[corrupted],
        others=2,
        controls=6,
    )
    one, other = (model.tokenizer.encode(text).ids for text in (clean, corrupted))
    place = one.index(model.tokenizer.mask_id)
    assert place < len(one) - 1
    kind, layer, position = "attn_out", 1, done.traced[0].subject[1]
    point = HookPoint(kind, layer)
    held = model.forward(one, HookSpec().capture(point))
    spec = HookSpec().intervene(point, Replace(held[point][0, position], positions=(position,)))
    runs = [held.logits, model.forward(other).logits, model.forward(other, spec).logits]
    logs = [each[0, place].double().log_softmax(-1) for each in runs]
    kl = [float((logs[0].exp() * (logs[0] - each)).sum()) for each in logs]
    grid = done.grids(0)[kind]["recovery"].sel(layer=layer, position=position)
    assert float(grid) == pytest.approx(1 - kl[2] / kl[1], abs=1e-3)
    # Everything of the last stream at the mask is the answer itself; elsewhere it is nothing.
    stream = done.grids(0)["resid_post"]["recovery"].isel(layer=-1).values
    assert stream[place] == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(np.delete(stream, place), 0, atol=1e-4)


def test_prompts_of_several_masks_are_refused(folder: Path, tmp_path: Path):
    mask = {"bert": "[MASK]", "xlm-roberta": "<mask>"}[Model.from_pretrained(folder).config.model_type]
    with pytest.raises(ConfigError, match=r"expected a prompt with one mask token for .*, found 2"):
        compute("logit_lens", store=tmp_path / "store", model=str(folder), prompts=(f"The {mask} of {mask}",))


AT_THE_END = {
    "ablation": {"prompt": "The capital of", "target": "Rome"},
    "attribution_patching": {"pairs": 2},
    "integrated_gradients": {"pairs": 2},
    "jacobian_lens": {"limit": 2},
}


@pytest.mark.parametrize("name", AT_THE_END)
def test_what_is_asked_at_the_last_token_is_refused(folder: Path, name: str):
    with pytest.raises(
        ConfigError, match=r"expected a model that predicts the next token, found .* fills in"
    ):
        build(name, model=str(folder), **AT_THE_END[name])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose mask is taken away, and whose tokenizer has no token to ask at either."""
    found = tmp_path_factory.mktemp("gpt2")
    save_random_hybrid(found, "gpt2", 0, tokenizer=False, vocab_size=CONFIG["vocab_size"], is_causal=False)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SPECIMEN / file, found)
    return found


@pytest.mark.parametrize("name", [*AT_THE_END, "counterfact_patching", "activation_patching"])
def test_where_nothing_says_what_is_missing_nothing_is_asked_at_the_last_token(decoder: Path, name: str):
    with pytest.raises(
        ConfigError, match="predicts the next token, found gpt2, in which every position also sees later"
    ):
        build(name, model=str(decoder), **AT_THE_END.get(name, {}))


def test_positions_alone_are_told_on_both_sides(decoder: Path, tmp_path: Path):
    done = compute("ov_qk", store=tmp_path, model=str(decoder), controls=2)
    (row, *_) = done.to_json()["positions"]
    assert row["offset"] == list(range(-4, 5))
    (table,) = (table for table in done.tables() if "by position alone" in str(table.title))
    assert "4 ahead" in str(table.columns[1]) and "0 back" in str(table.columns[5])


def test_attention_that_looks_ahead_is_stored_and_not_asked_what_looks_back(folder: Path, tmp_path: Path):
    model, store = Model.from_pretrained(folder), mizarr.open_store(tmp_path / "store")
    hooks = HookSpec().capture("blocks.0.attn.hook_pattern")
    pattern = model.forward([5, 6, 7], hooks)["blocks.0.attn.hook_pattern"]
    assert float(pattern.triu(1).max()) > 0
    stored = mizarr.capture(model, [[5, 6, 7]], hooks, store=store)
    torch.testing.assert_close(torch.from_numpy(stored.mi.attn(0).values), pattern)
    with pytest.raises(ConfigError, match=r"workflows on attention assume, found .*; capture 'blocks"):
        compute("attention_patterns", store=store, model=str(folder), prompt="The capital of France")
    kept = [mizarr.run(model, [mizarr.Run([5, 6, 7], hooks)], store=store)[0] for _ in range(2)]
    computed, read = (each["blocks.0.attn.hook_pattern"] for each in kept)
    torch.testing.assert_close(computed, pattern)
    assert torch.equal(read, computed)


def test_models_without_a_tokenizer_are_read_by_ids(tmp_path: Path):
    """As those of board games: prompts are ids, and so are the labels of tokens."""
    from mizarr.pipeline import run
    from mizarr.stages.forward.models.files import resolve
    from mizarr.stages.logits.lens import logit_lens
    from mizarr.stages.logits.readout import readout_node

    save_random_hybrid(tmp_path / "model", "gpt2", 0, tokenizer=False, vocab_size=61)
    model, games = Model.from_pretrained(tmp_path / "model"), [[5, 60, 7, 8], [1, 2, 3]]
    store = mizarr.open_store(tmp_path / "store")
    states = mizarr.capture(model, games, HookSpec().capture("blocks.*.hook_resid_post"), store=store)
    node = readout_node(resolve(tmp_path / "model"))
    run(node, store)
    readout = node.open(store)
    assert readout["token"].values.tolist() == [str(i) for i in range(61)]
    found = logit_lens(states["resid_post"], None, readout)
    logits = model.forward(games[0]).logits[0]
    assert found["top_id"].isel(layer=-1, rank=0).values[:4].tolist() == logits.argmax(-1).tolist()
    with pytest.raises(
        mizarr.MizarrError,
        match=r"expected tokenizer\.json or .* in the folder .*; add the file, or pass token ids",
    ):
        model.forward("text")


def test_masks_behind_a_prompt_are_filled_in_and_told_pass_by_pass(folder: Path, tmp_path: Path):
    model, text = Model.from_pretrained(folder), "The capital of France"
    given = {"model": str(folder), "prompts": (text,), "max_tokens": 3}
    done = compute("generate", store=tmp_path, steps=2, **given)
    (told,) = json.loads(json.dumps(done.to_json(), allow_nan=False))["results"]
    ids, mask = model.tokenizer.encode(text).ids, model.tokenizer.mask_id
    asked = [*ids[:-1], mask, mask, mask, ids[-1]]
    assert [one["step"] for one in told["filled"]] == [0, 0, 1] and told["passes"] == 2
    assert [token for token, was in zip(told["token_ids"], asked, strict=True) if was != mask] == ids
    first = model.forward(asked).logits[0].softmax(-1)
    for one in told["filled"][:2]:
        assert one["probability"] == pytest.approx(float(first[one["position"], one["token_id"]]), abs=1e-5)
        asked[one["position"]] = one["token_id"]
    (last,) = told["filled"][2:]
    then = model.forward(asked).logits[0, last["position"]].softmax(-1)
    assert last["probability"] == pytest.approx(float(then[last["token_id"]]), abs=1e-5)
    (strip, *_), (figure,) = (
        [view for view in done.views() if isinstance(view, kind)] for kind in (Tokens, Figure)
    )
    assert np.isfinite(strip.texts[0].values).sum() == 3
    at = {one["position"]: one["step"] for one in told["filled"]}
    expected = [[True, at[place] == 1] for place in sorted(at)]
    np.testing.assert_array_equal(np.isfinite(figure.panels[0].values), expected)
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_masks_of_a_prompt_are_filled_in_where_they_stand_and_beside_the_whole_model(folder: Path, tmp_path):
    mask = Model.from_pretrained(folder).tokenizer
    word = mask.pieces([mask.mask_id])[0]
    asked = {
        "model": str(folder),
        "prompts": (f"The {word} of {word} is",),
        "zero": ("blocks.0.hook_mlp_out",),
    }
    done = compute("generate", store=tmp_path, order="position", **asked)
    (told,) = done.to_json()["results"]
    places = [one["position"] for one in told["filled"]]
    assert places == sorted(places) and len(places) == 2 and told["unchanged_text"]
    assert done.unchanged is not None and int((done.unchanged["step_filled"] >= 0).sum()) == 2


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("folder", {"cache": True}, r"expected no cache for .*, which fills in masks, found cache=True"),
        (
            "folder",
            {"stop": ("x",), "top_k": 3},
            r"expected no stop and no top_k for .*, which fills in masks",
        ),
        ("folder", {"order": "surest"}, "order to be one of confidence, .*, found 'surest'"),
        ("decoder", {}, r"expected a mask token in the tokenizer of .*, found none; name it as mask_token"),
        ("specimen", {"steps": 3}, "expected no steps for specimen, which predicts the next token"),
    ],
)
def test_settings_of_the_other_kind_of_model_are_refused(name, given, match, folder, decoder, tmp_path: Path):
    model = str({"folder": folder, "decoder": decoder}.get(name, name))
    with pytest.raises(ConfigError, match=match):
        compute("generate", store=tmp_path, model=model, prompts=("The capital of France",), **given)


def test_the_lens_and_patches_read_dream_one_position_before_its_mask(tmp_path: Path):
    save_random_model(tmp_path / "model", "qwen2", 0, tokenizer=False)
    save_masking_tokenizer(tmp_path / "model", "WordPiece")
    path = tmp_path / "model" / "config.json"
    told = json.loads(path.read_text())
    theta = (told.pop("rope_parameters", None) or {}).get("rope_theta", 1e4)
    own = {"model_type": "Dream", "rope_theta": theta, "use_sliding_window": False}
    path.write_text(json.dumps(told | own))
    model = Model.from_pretrained(tmp_path / "model")
    done = compute(
        "logit_lens",
        store=tmp_path / "store",
        model=str(tmp_path / "model"),
        prompts=("The capital of France is [MASK].",),
        answers=("Paris",),
    )
    ids = model.tokenizer.encode(done.texts[0]).ids
    place = ids.index(model.tokenizer.mask_id)
    assert done.ends == [place - 1]
    logits = model.forward(ids).logits[0].log_softmax(-1)
    lens, last = done.prompt(0), len(ids) - 1
    following = [*ids[1:place], done.subject.answer_id(done.texts[0], "Paris"), *ids[place + 1 :]]
    assert lens["target_id"].values[:last].tolist() == following
    expected = [float(logits[at, token]) for at, token in enumerate(following)]
    np.testing.assert_allclose(lens["target_logprob"].isel(layer=-1).values[:last], expected, atol=1e-4)
