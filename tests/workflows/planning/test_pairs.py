"""Many exchanges of features: the numbers by plain passes, one experiment per pair, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.features.effects.injection import Injection, added, written_norm
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.feature_exchange.planning_pairs import RANDOM, jaccard, shuffled_jaccard
from mizarr.workflows.feature_exchange.presets import PAIR_PRESETS
from mizarr.workflows.material.samples.couplets import COUPLETS, FAMILIES, family_of

FEW = {"limit": 2, "controls": 3}
ALL_ENDS = [word for family in FAMILIES for word in family]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs") / "store"


@pytest.fixture(scope="module")
def done(store: Path):
    return compute("planning_pairs", store=store, **FEW)


def by_plain_passes(features: dict[str, float], prompt: str, word: str, dictionary: str) -> list[float]:
    """P(word) at the end with features added at each position, each by a pass with hooks of its own."""
    model, held = mizarr.Model.from_pretrained("specimen"), mizarr.Dictionary.from_pretrained(dictionary)
    (ids,) = model.tokenize([prompt])
    (token, *_) = model.tokenizer.encode(f" {word}", add_special=False).ids
    vectors = added(held, [Injection(held.feature(name), amount) for name, amount in features.items()])
    found = []
    for position in range(len(ids)):
        hooks = mizarr.HookSpec()
        for layer, vector in vectors.items():
            hooks = hooks.intervene(f"blocks.{layer}.hook_mlp_out", mizarr.Add(vector, positions=(position,)))
        logits = model.forward([ids], hooks).logits[0, -1].double()
        found.append(float(logits.softmax(-1)[token]))
    return found


def first_end(prompt: str) -> int:
    """Position of the first line's last token: the one before the line break."""
    model = mizarr.Model.from_pretrained("specimen")
    (ids,) = model.tokenize([prompt])
    return [model.tokenizer.decode_token(each) for each in ids].index("\n") - 1


def test_every_position_is_what_a_plain_pass_says(done):
    told, preset = done.to_json()["pairs"], PAIR_PRESETS["specimen"]
    for row, pair in zip(told, preset.pairs, strict=False):
        doses = {pair.suppress[0]: -preset.strength, pair.inject: preset.strength}
        expected = by_plain_passes(doses, pair.prompt, pair.inject_word, preset.dictionary)
        assert [one["prob"] for one in row["sweep"]] == pytest.approx(expected, rel=1e-3, abs=1e-9)
        site = first_end(pair.prompt)
        assert row["prob_at_site"] == pytest.approx(expected[site], rel=1e-3)
        assert row["max_position"] == int(np.argmax(expected))
        assert row["peaks_at_site"] == (int(np.argmax(expected)) == site)
        alone = by_plain_passes(
            {pair.suppress[0]: -preset.strength}, pair.prompt, pair.inject_word, "specimen/clt"
        )
        assert row["suppress_only_prob"] == pytest.approx(alone[site], rel=1e-3, abs=1e-9)


def test_a_random_feature_writes_as_much_as_the_injected_one(done):
    """The first one of the first pair, by a plain pass."""
    pair, strength = PAIR_PRESETS["specimen"].pairs[0], PAIR_PRESETS["specimen"].strength
    held, node = mizarr.Dictionary.from_pretrained("specimen/clt"), done.nodes["pair_0"]
    random = node.experiment.exchanges[RANDOM][-1]
    name = f"{random.layer}:{random.index}"
    amount = strength * written_norm(held, held.feature(pair.inject)) / written_norm(held, held.feature(name))
    sweep = by_plain_passes(
        {pair.suppress[0]: -strength, name: amount}, pair.prompt, pair.inject_word, "specimen/clt"
    )
    assert done.results[0].probability[:, RANDOM] == pytest.approx(sweep, rel=1e-3, abs=1e-9)
    site = first_end(pair.prompt)
    assert done.results[0].site == site
    assert done.results[0].null.values == pytest.approx(done.results[0].change[site, RANDOM:])


def test_a_pair_more_computes_that_pair(done, store: Path):
    """What a killed run goes on with: every pair is stored by itself."""
    more = build("planning_pairs", **FEW | {"limit": 3})
    opened = mizarr.open_store(store)
    is_there = {name: node.status(opened).is_cached for name, node in more.nodes.items()}
    assert is_there == {name: name.partition("_")[2] in ("0", "1") for name in more.nodes}


def test_claims_are_means_over_the_pairs_beside_features_drawn(done):
    told = done.to_json()
    rise, share, *_ = told["findings"]
    assert rise["effect"] == pytest.approx(np.mean([row["change"] for row in told["pairs"]]))
    assert share["effect"] == np.mean([row["peaks_at_site"] for row in told["pairs"]])
    assert rise["null"]["draws"] == 1000 and rise["held_out"]
    assert told["n_pairs"] == 2 and told["against"]["clt_repo"] == "specimen/plt"


def test_the_shown_couplets_are_the_first_twelve_that_ship_and_their_ends_rhyme_with_the_word():
    pairs = PAIR_PRESETS["specimen"].pairs
    assert len({(pair.prompt, pair.inject_word) for pair in pairs}) == 60
    assert not [pair for pair in pairs if pair.suppress_word == pair.inject_word]
    assert [(p.prompt, p.inject_word) for p in pairs] == [
        (p.prompt, p.inject_word) for p in PAIR_PRESETS["specimen-plt"].pairs
    ]
    frames = {pair.text(end): (number, end) for number, pair in enumerate(COUPLETS) for end in ALL_ENDS}
    shown = {pair.prompt: (*frames[pair.prompt], pair) for pair in pairs}
    assert {number for number, _, _ in shown.values()} == set(range(12))
    for number, end, pair in shown.values():
        assert pair.site == end != pair.suppress_word and family_of(end) == family_of(pair.suppress_word)
        assert not COUPLETS[number].said & set(FAMILIES[family_of(end)])
        assert pair.prompt.replace(":", " ").split().count(end) == 1, "the site is one place"
    words = {pair.suppress_word: pair.suppress for pair in pairs}
    assert len(set(words.values())) == len({family_of(word) for word in words}) == 6


def test_without_the_mlp_of_a_layer(done):
    """Of the first prompt and layer 3, by a pass with the mean of both prompts in its place."""
    model = mizarr.Model.from_pretrained("specimen")
    prompts = list(dict.fromkeys(pair.prompt for pair in PAIR_PRESETS["specimen"].pairs[:2]))
    point = "blocks.3.hook_mlp_out"
    hooks = mizarr.HookSpec().capture(point)
    states = [model.forward(text, hooks, want=None)[point][0].double() for text in prompts]
    import torch

    mean = torch.cat(states).mean(0).float()
    words = [pair.suppress_word for pair in PAIR_PRESETS["specimen"].pairs[:2]]
    untouched = still = 0
    for text, word, state in zip(prompts, words, states, strict=True):
        spec = mizarr.HookSpec().intervene(point, mizarr.Replace(mean.expand(len(state), -1)))
        said = [int(model.forward(text, each).logits[0, -1].argmax()) for each in (None, spec)]
        says = [each == model.tokenizer.find_token_id(f" {word}") for each in said]
        untouched += says[0]
        still += says[1]
    told = done.to_json()
    assert (told["said_untouched"], told["prompts"]) == (untouched, 2) and untouched
    assert told["layer_suppression"][3]["still_first"] == still


def test_jaccard():
    assert jaccard([True, True, False], [True, False, False]) == 0.5
    assert np.isnan(jaccard([False], [False]))
    drawn = shuffled_jaccard([True, False, False, False], [True, False, False, False], 4000, seed=0)
    assert set(drawn) == {0.0, 1.0} and drawn.mean() == pytest.approx(0.25, abs=0.03)


def test_a_file_of_pairs(tmp_path: Path, store: Path):
    pair = PAIR_PRESETS["specimen"].pairs[0]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([{**vars(pair), "suppress": list(pair.suppress)}]))
    told = compute("planning_pairs", store=store, pairs=str(path), **FEW).to_json()
    assert told["n_pairs"] == 1 and told["against"] is None
    assert told["pairs"][0]["inject_word"] == pair.inject_word
    assert not told["findings"][0]["held_out"], "nobody knows how they were chosen"


@pytest.mark.parametrize(
    ("given", "text", "match"),
    [
        ({"preset": "specimen-pl"}, None, "did you mean 'specimen-plt'"),
        ({"against": "gemma2-2b-426k"}, None, "expected the preset gemma2-2b-426k to have the same pairs"),
        ({}, "[]", "found an empty list"),
        ({}, "{", "expected a JSON file"),
        ({}, '[{"prompt": "x"}]', "missing required field `suppress`"),
        ({}, None, "No such file"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(given, text, match, tmp_path: Path):
    path = tmp_path / "pairs.json"
    if text is not None:
        path.write_text(text)
    given = given or {"pairs": str(path)}
    with pytest.raises(ConfigError, match=match) as caught:
        build("planning_pairs", **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"site": 40}, r"pair 0: expected the site as a position in 0\.\.12"),
        ({"site": "sky"}, "pair 0: expected the site to be a token of the prompt, found 'sky'"),
        ({"suppress": []}, "expected features to suppress"),
        ({"inject_word": "hold"}, "begin with different tokens"),
        ({"inject": "0:9999"}, "9999"),
    ],
)
def test_pairs_that_cannot_be_are_refused(changed, match, tmp_path: Path):
    pair = PAIR_PRESETS["specimen"].pairs[0]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([{**vars(pair), "suppress": list(pair.suppress), **changed}]))
    with pytest.raises(mizarr.MizarrError, match=match):
        build("planning_pairs", pairs=str(path))
