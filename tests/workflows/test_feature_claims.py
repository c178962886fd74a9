"""What workflows on features claim, recomputed with plain forwards; and what moves their nulls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.doses import Dose, in_place_of
from mizarr.stages.features.effects.injection import Injection, injected
from mizarr.workflows import build, compute

PROMPT = "The large horse said night\nand Estella with the coach said"
OFF, ON, STRENGTH = ("0:215", "0:427", "0:67"), "0:184", 7.0
INJECTED, CORRECTION = 184, 177
HELD_OUT = (
    "Pip wrote to the fire: sight\nthen Lorry and the horse heard",
    "A heart and a poor hand sang might\nfor Wemmick had a whole friend and",
)
"""Of the couplets that ship the first two but that of the prompt, ending on rhymes of "light" in turn."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("claims") / "store"


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def clt() -> Dictionary:
    return Dictionary.from_pretrained("specimen/clt")


@pytest.fixture(autouse=True)
def two_couplets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mizarr.workflows.feature_exchange.exchange.HELD_OUT", 2)


def norm(clt: Dictionary, layer: int, index: int, first: int = 0) -> float:
    part = clt.layer(layer)
    rows = [part.decoder_rows([index], m)[0] for m in clt.targets(layer) if m >= first]
    return float(torch.cat(rows).norm())


def drawn(clt: Dictionary, index: int, count: int, seed: int, without: tuple[int, ...]) -> list[int]:
    """Indices of other features of a layer, as controls draw them."""
    rest = [i for i in range(clt.n_features) if i not in (index, *without)]
    return [rest[i] for i in np.random.default_rng(seed).permutation(len(rest))[:count]]


def site(model: mizarr.Model, ids: list[int]) -> int:
    """Position of the last token before the line break."""
    return [model.tokenizer.decode_token(each) for each in ids].index("\n") - 1


def said(model: mizarr.Model, clt: Dictionary, prompt: str, *features: Injection, word: str) -> float:
    """P(word) after a prompt, with features injected at the end of its first line."""
    ids = model.tokenize([prompt])[0]
    hooks = injected(clt, features, [site(model, ids)]) if features else mizarr.HookSpec()
    (token,) = model.tokenizer.encode(f" {word}", add_special=False).ids
    return float(model.forward([ids], hooks).logits[0, -1].double().softmax(-1)[token])


def commitment(on: str = ON, strength: float = STRENGTH) -> list[Injection]:
    return [*(Injection(each, -STRENGTH) for each in OFF), Injection(on, strength)]


def others(clt: Dictionary, count: int, seed: int) -> list[Injection]:
    without = tuple(int(each.split(":")[1]) for each in OFF)
    return [
        Injection(f"0:{i}", STRENGTH * norm(clt, 0, INJECTED) / norm(clt, 0, i))
        for i in drawn(clt, INJECTED, count, seed, without)
    ]


def agree(found: dict[str, Any], effect: float, null: list[float], looked_at: int) -> None:
    assert found["effect"] == pytest.approx(effect, rel=1e-3, abs=1e-6)
    assert found["null"]["median"] == pytest.approx(float(np.median(null)), rel=1e-3, abs=1e-6)
    as_large = sum(each >= effect for each in null)
    share = min(1.0, looked_at * (1 + as_large) / (1 + len(null)))
    assert found["null"]["as_large"] == as_large
    assert found["null"]["share_as_large"] == pytest.approx(share)
    assert (found["verdict"] == "beyond chance") == (share <= 0.05)


def test_an_injection_is_held_against_others_that_write_as_much(
    store: Path, model: mizarr.Model, clt: Dictionary
):
    told = compute("planning_in_poems", store=store, controls=4, seed=3).to_json()
    before = said(model, clt, PROMPT, word="run")

    def change(*features: Injection) -> float:
        return said(model, clt, PROMPT, *features, word="run") - before

    off, random = commitment()[:-1], others(clt, 4, seed=3)
    null = [change(*off, each) for each in random]
    agree(told["findings"][0], change(*commitment()), null, looked_at=211)
    rows = {row["done"]: row["change"] for row in told["parts"]}
    assert rows["suppression alone"] == pytest.approx(change(*off), rel=1e-3)
    assert rows["injection alone"] == pytest.approx(change(commitment()[-1]), rel=1e-3)
    by_couplet = []
    for prompt in HELD_OUT:
        base = said(model, clt, prompt, word="run")
        tried = [commitment()[-1], *random]
        by_couplet.append([said(model, clt, prompt, *off, each, word="run") - base for each in tried])
    own, *null = np.mean(by_couplet, axis=0).tolist()
    agree(told["findings"][1], own, null, looked_at=1)
    assert (told["findings"][1]["prompts"], told["findings"][1]["held_out"]) == (2, True)
    json.dumps(told, allow_nan=False)


def test_a_correction_is_held_against_others_after_the_same_commitment(
    store: Path, model: mizarr.Model, clt: Dictionary
):
    told = compute("correction_test", store=store, controls=3, steps=1).to_json()

    def change(index: int) -> float:
        amount = 20.0 * norm(clt, 1, CORRECTION, 1) / norm(clt, 1, index, 1)
        more = Injection(f"1:{index}", amount, from_layer=1)
        with_it = said(model, clt, PROMPT, *commitment(), more, word="quite")
        return with_it - said(model, clt, PROMPT, *commitment(), word="quite")

    null = [change(index) for index in drawn(clt, CORRECTION, 3, 0, ())]
    agree(told["findings"][0], change(CORRECTION), null, looked_at=960)


def test_the_head_that_moves_is_held_against_heads_that_others_move(
    store: Path, model: mizarr.Model, clt: Dictionary
):
    told = compute("attention_routing", store=store, controls=3, steps=1).to_json()
    ids = model.tokenize([PROMPT])[0]
    place = site(model, ids)
    capture = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")

    def weights(*features: Injection) -> np.ndarray:
        hooks = injected(clt, features, [place]) if features else mizarr.HookSpec()
        cache = model.forward([ids], hooks.extend(capture))
        return np.stack([cache[point][0, :, -1, place].numpy() for point in cache])

    plain, off = weights(), commitment()[:-1]
    moved = [np.abs(weights(*off, each) - plain) for each in (commitment()[-1], *others(clt, 3, seed=0))]
    for number, measure in enumerate((np.max, np.sum)):
        own, *null = [float(measure(each)) for each in moved]
        agree(told["findings"][number], own, null, looked_at=211)


def test_ranked_features_are_held_against_sets_that_write_as_much(
    store: Path, model: mizarr.Model, clt: Dictionary
):
    told = compute("clt_vs_plt", store=store, controls=3, seed=2).to_json()
    found = told["arms"]["clt"]["suppress_inject"]
    ranked = [(f["layer"], f["index"]) for f in [*found["suppress_features"], found["inject_feature"]]]
    doses = [Dose(*each, fixed=-STRENGTH) for each in ranked[:-1]] + [Dose(*ranked[-1], fixed=STRENGTH)]
    before = said(model, clt, PROMPT, word="run")

    def change(features: list[Injection]) -> float:
        return said(model, clt, PROMPT, *features, word="run") - before

    null = []
    for seed in (2, 3, 4):
        some = in_place_of(doses, clt.n_features, seed=seed)
        pairs = zip(some, doses, strict=True)
        scaled = [d.fixed * norm(clt, d.layer, d.index) / norm(clt, e.layer, e.index) for e, d in pairs]
        pairs = zip(some, scaled, strict=True)
        null.append(change([Injection(f"{e.layer}:{e.index}", amount) for e, amount in pairs]))
    own = change([Injection(f"{dose.layer}:{dose.index}", dose.fixed) for dose in doses])
    clt_finding = next(each for each in told["findings"] if each["claim"].startswith("clt: "))
    agree(clt_finding, own, null, looked_at=1)
    swept = found["sweep"][site(model, model.tokenize([PROMPT])[0])]["prob"] - before
    assert clt_finding["effect"] == pytest.approx(swept, rel=1e-3, abs=1e-6)


def test_settings_of_controls_move_the_null_and_nothing_else(store: Path):
    def keys(**given: Any) -> dict[str, str | None]:
        nodes, opened = build("planning_in_poems", **given).nodes, mizarr.open_store(store)
        found = {name: node.key(opened) for name, node in nodes.items()}
        return {name: key and key.digest for name, key in found.items()}

    first, more, other = keys(), keys(controls=7), keys(seed=1)
    for changed in (more, other):
        moved = {name for name in first if first[name] != changed[name]}
        assert moved == {"controls", "held_out", "elsewhere"}


def test_a_feature_of_ones_own_pays_for_what_was_looked_at():
    def looked_at(**given: Any) -> int:
        return build("planning_in_poems", **given).exchange.looked_at

    assert looked_at() == 211
    assert looked_at(inject="0:100") == 1
    assert looked_at(inject="0:100", looked_at=12) == 12
    assert looked_at(prompt="The mother tongue of Andrew Jackson is") == 1


def test_a_prompt_of_ones_own_takes_the_best_position_as_its_controls_do(
    store: Path, model: mizarr.Model, clt: Dictionary
):
    prompt = "Two and two is"
    told = compute("planning_in_poems", store=store, prompt=prompt, controls=2, suppress="none").to_json()
    ids = model.tokenize([prompt])[0]
    (token,) = model.tokenizer.encode(" run", add_special=False).ids

    def best(feature: Injection) -> float:
        runs = [model.forward([ids], injected(clt, [feature], [at])).logits[0, -1] for at in range(len(ids))]
        return max(float(run.double().softmax(-1)[token]) for run in runs)

    before = said(model, clt, prompt, word="run")
    null = [
        best(Injection(f"0:{i}", STRENGTH * norm(clt, 0, INJECTED) / norm(clt, 0, i))) - before
        for i in drawn(clt, INJECTED, 2, 0, ())
    ]
    (found,) = told["findings"]
    agree(found, best(Injection(ON, STRENGTH)) - before, null, looked_at=1)
    assert "the best position" in found["claim"]
    assert told["kind"] == "prompt"
