"""Recurrent feedback as a workflow: the published protocol and scores, trials by hand, resumption, claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import mizarr
from mizarr import RecurrentPass, generate
from mizarr.stages.causal.recurrence import RecurrentContinuation, Trial
from mizarr.stages.forward.generation.continuations import GenerationSettings
from mizarr.stages.forward.generation.generate import TokenStream
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.material.samples.rhymes import PRESETS, conditions_of, last_word
from mizarr.workflows.recurrent.recurrent_feedback import RecurrentFeedback
from tests.specimen_training.couplets import FAMILIES, FIRST, family_of

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "reference"
PROTOCOL = SHARED / "recurrent" / "anacrousis_protocol.json"
SMALL: dict[str, Any] = {
    "limit": 3,
    "blocks": ["0-1", "1-2"],
    "strengths": [3.0, 30.0],
    "block": "1-2",
    "strength": 20.0,
    "sustained": True,
    "controls": 2,
    "max_tokens": 4,
    "sweep": True,
}
"""On a model of three layers."""


@pytest.fixture
def continued(monkeypatch) -> list[Any]:
    """Recurrences under which prompts are gone on from, from here on."""
    seen: list[Any] = []
    begin: Callable[..., None] = TokenStream.__init__

    def counted(self, model, prompts, hooks=None, settings=None, recurrent=None):
        seen.append(recurrent)
        begin(self, model, prompts, hooks, settings, recurrent)

    monkeypatch.setattr(TokenStream, "__init__", counted)
    return seen


# -- the protocol


@pytest.mark.skipif(not PROTOCOL.is_file(), reason="the reference arrays are not beside this checkout")
def test_lines_and_conditions_are_the_published_ones():
    published, preset = json.loads(PROTOCOL.read_text()), PRESETS["anacrousis"]
    assert [
        {"id": line.number, "target": line.target, "line1": line.text, "rhyme_family": list(line.family)}
        for line in preset.lines
    ] == published["couplets"]
    conditions = list(conditions_of(preset.blocks, preset.strengths, preset.sustained, published["depth"]))
    assert len(conditions) == 28
    for ours, theirs in zip(conditions, published["conditions"], strict=True):
        assert ours.name == theirs["name"]
        assert ours.block == (theirs.get("loop_start", 0), theirs.get("loop_end", 0))
        assert (ours.strength, ours.sustained) == (theirs.get("strength"), theirs.get("sustained", False))
        assert ours.depth == (1 if theirs["name"] == "baseline" else 2)
    assert preset.model == published["model"]


@pytest.mark.skipif(not PROTOCOL.is_file(), reason="the reference arrays are not beside this checkout")
@pytest.mark.parametrize("name", ["prefill", "sustained"])
def test_published_second_lines_score_as_published(name):
    document = json.loads((SHARED / "published" / "recurrent_feedback" / f"{name}.json").read_text())
    lines = {line.number: line for line in PRESETS["anacrousis"].lines}
    for theirs in document["couplets"]:
        line, word = lines[theirs["id"]], last_word(theirs["recurrent_line"])
        assert word == theirs["recurrent_word"]
        assert line.rhymes(word) == theirs["recurrent_rhymes"]
        assert line.rhymes(theirs["baseline_word"]) == theirs["baseline_rhymes"]
    anew = sum(
        lines[each["id"]].rhymes_without_target(each["recurrent_word"]) for each in document["couplets"]
    )
    # Of those counted, as many as repeat the first line's own word are no rhymes.
    copied = sum(each["recurrent_word"] == each["target"] for each in document["couplets"])
    assert anew == document["recurrent_rhymes"] - copied


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The rain falls on the ground,", "ground"),
        (" and SAID: Night!'...\nnot this", "night"),
        ("", ""),
        ("\nnight", ""),
        ("don't", "don't"),
        ("night —", "—"),
        ("...", ""),
    ],
)
def test_the_last_word_of_the_first_line(text, word):
    assert last_word(text) == word


def test_the_specimens_lines_are_of_its_own_families():
    lines = PRESETS["specimen"].lines
    assert len({line.target for line in lines}) == len(lines) == 12
    for line in lines:
        number = family_of(line.target)
        assert number is not None
        assert set(line.family) == set(FAMILIES[number])
        assert line.text.endswith(line.target)
        assert any(line.text.startswith(frame.partition("{")[0]) for frame in FIRST)


# -- trials


def test_every_trial_is_what_generate_gives_by_hand(tiny_model, tmp_path):
    done = compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL)
    model = mizarr.Model.from_pretrained(tiny_model)
    rows = load_file(tiny_model / "model.safetensors")["lm_head.weight"].double()
    lines, expected = PRESETS["specimen"].lines[:3], []
    directions = []
    for line in lines:
        ids = [model.tokenizer.encode(f" {word}", add_special=False).ids[-1] for word in line.family]
        mean = rows[ids].mean(0)
        directions.append((mean / mean.norm()).float())
    conditions = {
        "baseline": None,
        "double_pass_0-1": (0, 1, None, False),
        "unembed_0-1_s=3.0": (0, 1, 3.0, False),
        "unembed_0-1_s=30.0": (0, 1, 30.0, False),
        "double_pass_1-2": (1, 2, None, False),
        "unembed_1-2_s=3.0": (1, 2, 3.0, False),
        "unembed_1-2_s=30.0": (1, 2, 30.0, False),
        "sustained_1-2_s=3.0": (1, 2, 3.0, True),
        "sustained_1-2_s=30.0": (1, 2, 30.0, True),
        "sustained_1-2_s=20.0": (1, 2, 20.0, True),
    }
    assert [each.name for each in done.conditions] == list(conditions)

    def text(line: int, asked: Any, direction: Any) -> str:
        recurrent = None
        if asked is not None:
            start, end, strength, sustained = asked
            fed = [] if strength is None else [(-1, direction, strength)]
            recurrent = RecurrentPass(start, end, 2, fed, sustained)
        (found,) = generate(
            model, [f"{lines[line].text}\n"], max_tokens=4, stop="\n", cache=False, recurrent=recurrent
        )
        return found.generated_text or ""

    for asked in conditions.values():
        expected += [text(row, asked, directions[row]) for row in range(3)]
    assert done.trials["generated_text"].values.tolist() == expected
    assert len(set(expected)) > 6, "conditions differ"
    # Another line's words, and random directions as long.
    told = conditions["sustained_1-2_s=20.0"]
    others = done.controls["generated_text"].values.tolist()
    assert others[:3] == [text(row, told, directions[(row + 1) % 3]) for row in range(3)]
    assert len(others) == 3 + 2 * 3
    assert len(set(others[3:])) > 2


def test_the_document_has_the_published_fields_and_both_scores(tiny_model, tmp_path):
    done = compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    expected = {"loop_start": 1, "loop_end": 2, "depth": 2, "strength": 20.0, "mode": "sustained"}
    assert expected.items() <= document.items()
    assert (document["n_layers"], document["hidden_size"], document["total_couplets"]) == (3, 32, 3)
    fields = {"id", "target", "line1", "baseline_word", "baseline_rhymes", "recurrent_word"}
    fields |= {"recurrent_rhymes", "recurrent_line", "result"}
    assert all(fields <= each.keys() for each in document["couplets"])
    assert document["findings"] == [], "a model that does not rhyme is claimed to do nothing"
    model = mizarr.Model.from_pretrained(tiny_model)
    for row, line in enumerate(PRESETS["specimen"].lines[:3]):
        ids = {model.tokenizer.encode(f" {word}", add_special=False).ids[-1] for word in line.family}
        logprobs = model.forward(f"{line.text}\n").logits[0, -1].double().log_softmax(-1)
        order = logprobs.argsort(descending=True).tolist()
        rank = min(order.index(token) for token in ids)
        found = document["couplets"][row]["planning"]["baseline"]
        assert found["rank"] == rank + 1
        assert found["probability"] == pytest.approx(float(logprobs[order[rank]].exp()), rel=1e-5)
        assert found["family_probability"] == pytest.approx(float(logprobs[list(ids)].exp().sum()), rel=1e-5)
        assert found["in_top_100"] == sum(order.index(token) < 100 for token in ids)


def test_a_killed_protocol_goes_on_where_it_was(tiny_model, tmp_path, continued, monkeypatch):
    begin = TokenStream.__init__

    def killed(self, *given):
        if len(continued) == 7:  # in the third condition
            raise KeyboardInterrupt
        begin(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(TokenStream, "__init__", killed)
        with pytest.raises(KeyboardInterrupt):
            compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL)
    continued.clear()
    done = compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL)
    assert len(continued) == (10 - 2) * 3 + 3 * 3
    continued.clear()
    again = compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL)
    assert continued == [] and again.to_json() == done.to_json()
    compute("recurrent_feedback", store=tmp_path, model=str(tiny_model), **SMALL | {"controls": 3})
    assert len(continued) == 3, "one draw more is one draw"


def test_everything_of_a_trial_is_in_its_key(tiny_model):
    how = GenerationSettings(max_tokens=3, eos=(1,))
    base = {"prompt": (3, 4), "words": (5, 6), "loop_start": 0, "loop_end": 1, "depth": 2, "strength": 1.0}
    others = [
        {"prompt": (3, 5)},
        {"words": (5, 7)},
        {"words": (5, 6, 6)},
        {"loop_start": 1},
        {"loop_end": 2},
        {"depth": 3},
        {"strength": 2.0},
        {"strength": None},
        {"sustained": True},
        {"draw": 0},
        {"draw": 1},
        {"draw": 0, "seed": 1},
    ]

    def key(told: dict[str, Any], how: GenerationSettings = how) -> str:
        node = RecurrentContinuation(((Trial(**base | told),),), how).on(str(tiny_model))
        return node.cell_key(node.cells()[0]).digest

    settings = [GenerationSettings(max_tokens=4, eos=(1,)), GenerationSettings(max_tokens=3, eos=())]
    settings += [GenerationSettings(max_tokens=3, eos=(1,), stop="\n")]
    keys = [key(told) for told in [{}, *others]] + [key({}, each) for each in settings]
    assert len(set(keys)) == len(keys)
    assert key({"seed": 9}) == key({}), "a seed nobody draws with decides nothing"


# -- claims, and bad input


def test_lines_end_on_the_rhyme_that_is_fed(tmp_path):
    done = compute("recurrent_feedback", store=tmp_path, sweep=False, limit=5, controls=3, max_tokens=16)
    document = done.to_json()
    assert document["baseline_rhymes"] == 5, "the specimen rhymes by itself"
    anew, turned = document["findings"]
    assert turned["verdict"] == "beyond chance" and turned["effect"] >= 0.6
    assert sum(each["foreign_rhymes"] for each in document["couplets"]) == round(5 * turned["effect"])
    shares = [each["recurrent_rhymes_without_target"] for each in document["couplets"]]
    plain = [each["baseline_rhymes_without_target"] for each in document["couplets"]]
    assert anew["effect"] == pytest.approx(np.mean(shares) - np.mean(plain))
    assert "run on for 16 tokens" in done.shown[0].caption
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_chosen_among_many_on_these_lines_the_null_pays_for_it():
    """The published best of 27 conditions is held against 27 chances; one that is named against one."""
    workflow = object.__new__(RecurrentFeedback)
    workflow.preset, workflow.lines = PRESETS["anacrousis"], PRESETS["anacrousis"].lines[:4]
    for strength, looked_at in ((None, 27), (3.0, 1)):
        workflow.settings = RecurrentFeedback.settings_type(preset="anacrousis", strength=strength)
        workflow.condition = workflow._selected_condition()
        claim = workflow._claim("claim", np.ones(4), np.zeros((4, 4)), np.zeros(4))
        assert claim.null.looked_at == looked_at


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": "5-2"}, "a block of layers as first-last, such as '8-15', found '5-2'"),
        ({"blocks": ["all"]}, "such as '8-15', found 'all'"),
        ({"blocks": ["1-7"]}, r"a block of layers within 0\.\.5, found layers 1 to 7"),
        ({"depth": 0}, "depth to be int of at least 1, found 0"),
        ({"preset": "anacrusis"}, "did you mean 'anacrousis'"),
        ({"strength": "much"}, "strength to be float"),
        ({"preset": "anacrousis", "model": "specimen"}, r"layers within 0\.\.5, found"),
    ],
)
def test_bad_input_is_told_in_one_line_before_anything_runs(given, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        build("recurrent_feedback", **given).run(mizarr.open_store(tmp_path / "store"))
    assert "\n" not in str(caught.value)


def test_a_trial_needs_words():
    with pytest.raises(ConfigError, match=r"expected at least one word, .*, found none; set words"):
        Trial((1,), ())
