"""Attention knockout and attention patterns, from a prompt to tables, figures and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from mizarr import HookSpec, Knockout
from mizarr.store.errors import ConfigError, InterventionError, MizarrError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.material.edge_choice import ROLES
from mizarr.workflows.subject import shipped_facts
from tests.known_facts import compute_as_known

PROMPT, TARGET = "it was the age of", "wisdom"
RELATIONS = ("is developed by", "they understand", "is located in the continent", "originates from", "is")
NAMED = {"prompt": PROMPT, "target": TARGET, "layer": 1, "key": "first"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attention") / "store"


@pytest.fixture(scope="module")
def knockout(tiny_model: Path, store: Path):
    return compute("attention_knockout", store=store, model=str(tiny_model), **NAMED)


@pytest.fixture(scope="module")
def patterns(tiny_model: Path, store: Path):
    return compute("attention_patterns", store=store, model=str(tiny_model), prompt=PROMPT)


def last_logits(model, hooks=None) -> torch.Tensor:
    return model.forward(PROMPT, hooks).logits[0, -1].double()


def cut(model, layer: int, query: int, key: int, heads=None) -> torch.Tensor:
    change = Knockout([(query, key)], heads=heads)
    return last_logits(model, HookSpec().intervene(f"blocks.{layer}.attn.hook_scores", change))


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def test_the_edge_told_is_a_plain_pass_with_that_edge_cut(knockout, model):
    document = knockout.to_json()
    last = len(model.tokenizer.encode(PROMPT)) - 1
    assert document["target_layer"] == 1
    assert document["knockout_edge"] == [last, 0]
    before, after = last_logits(model), cut(model, 1, last, 0)
    assert document["kl_divergence"] == pytest.approx(kl(before, after), rel=1e-3, abs=1e-8)
    token = document["target_token_id"]
    assert document["target_logit_diff"] == pytest.approx(float(before[token] - after[token]), abs=1e-4)
    change = (before.softmax(-1) - after.softmax(-1)).abs()
    top = document["top_changed"]
    assert [one["rank"] for one in top] == list(range(1, 11))
    np.testing.assert_allclose([one["abs_diff"] for one in top], change.topk(10).values, atol=1e-6)
    best = top[0]["token_id"]
    assert top[0]["baseline_prob"] == pytest.approx(float(before.softmax(-1)[best]), abs=1e-5)
    assert top[0]["ablated_prob"] == pytest.approx(float(after.softmax(-1)[best]), abs=1e-5)
    assert top[0]["token"] == model.tokenizer.decode_token(best)


def test_the_sweep_has_every_key_layer_and_head(knockout, model):
    document, last = knockout.to_json(), knockout.edge[0]
    sweep, heads = document["sweep"], document["heads"]
    assert sweep["keys"] == list(range(last + 1))
    before = last_logits(model)
    for layer in range(3):
        for key in (0, last):
            expected = kl(before, cut(model, layer, last, key))
            assert sweep["kl_divergence"][layer][key] == pytest.approx(expected, rel=1e-3, abs=1e-8)
        for head in range(2):
            expected = kl(before, cut(model, layer, last, 0, [head]))
            assert heads["kl_divergence"][layer][head] == pytest.approx(expected, rel=1e-3, abs=1e-8)


def test_the_target_is_followed_by_its_first_piece_and_by_all_of_them(knockout, model):
    """A word of several tokens is never followed by its last piece alone."""
    document = knockout.to_json()
    encode = model.tokenizer.encode
    both, before = encode(f"{PROMPT} {TARGET}").ids, encode(PROMPT).ids
    pieces = both[len(before) :]
    assert len(pieces) > 1, "the word must be split for this to say something"
    assert document["target_token_ids"] == pieces
    assert document["target_token_id"] == pieces[0]
    logprob = model.forward(both).logits[0].double().log_softmax(-1)
    whole = sum(logprob[len(before) - 1 + i, token] for i, token in enumerate(pieces))
    assert document["baseline_p_target"] == pytest.approx(float(whole.exp()), rel=1e-3)


def test_the_finding_is_the_cut_beside_cuts_of_other_edges(knockout, model):
    """Effect and null again, by plain passes: every other edge there is, as there are fewer than controls."""
    last, before = knockout.edge[0], last_logits(model)
    of_kl, of_logit = knockout.to_json()["findings"]
    token = knockout.to_json()["target_token_id"]
    effects = {}
    for layer in range(3):
        for key in range(last + 1):
            after = cut(model, layer, last, key)
            effects[layer, key] = kl(before, after), float(before[token] - after[token])
    own = effects.pop((1, 0))
    assert len(effects) <= 50
    for found, measure in ((of_kl, 0), (of_logit, 1)):
        others = np.array([each[measure] for each in effects.values()])
        assert found["effect"] == pytest.approx(own[measure], rel=1e-3, abs=1e-5)
        assert found["null"]["median"] == pytest.approx(np.median(others), rel=1e-3, abs=1e-5)
        assert found["null"]["draws"] == len(others)
    as_large = sum(each[0] >= own[0] for each in effects.values())
    assert of_kl["null"]["share_as_large"] == pytest.approx((1 + as_large) / (1 + len(effects)))


def test_fewer_controls_and_another_seed_draw_other_edges(knockout, tiny_model, store):
    def null(**given):
        done = compute("attention_knockout", store=store, model=str(tiny_model), **NAMED, **given)
        return done.to_json()["findings"][0]["null"]

    few, other = null(controls=5), null(controls=5, seed=1)
    assert few["draws"] == other["draws"] == 5
    assert few["median"] != other["median"] != knockout.to_json()["findings"][0]["null"]["median"]


@pytest.mark.parametrize("name", ["attention_knockout", "steering_dose_response"])
def test_of_facts_that_a_model_does_not_know_nothing_is_claimed(name, tiny_model, tmp_path):
    given = {"model": str(tiny_model), "prompt": "A spring is developed by", "sweep": False, "facts": 2}
    done = compute(name, store=tmp_path, **given)
    (told,) = (view for view in done.shown if view.kind == "findings")
    assert done.to_json()["findings"] == []
    assert "facts to score on; a claim needs 2 of each. So no control was run and nothing" in told.caption
    assert not done.nodes.keys() & {"facts", "controls"}, "no control was run"
    choice = done.to_json()["choice"]
    assert not choice["is_claimed"] and choice["chosen_on"] == choice["scored_on"] == []
    lost = np.array([done.lost_here(key) for key in done.keys])
    place, layer = np.unravel_index(lost.argmax(), lost.shape)
    assert choice["lost"] == lost.max() and choice["layer"] == layer == done.to_json()["target_layer"]
    assert done.edge[1] == done.keys[place]
    rule = "the prediction of this prompt most"
    assert rule in choice["rule"] and rule in told.caption
    without = compute(name, store=tmp_path, controls=0, **given)
    assert "known" not in without.nodes
    assert without.to_json()["choice"] == choice
    assert without.to_json()["not_claimed"].startswith(
        "Nothing is claimed, as no control was run (controls=0)."
    )


def test_facts_of_a_file_say_where_their_subject_ends_by_the_other_prompt(tiny_model, model, tmp_path):
    records = [
        {
            "original_prompt": f"it was the age of {one} and of",
            "counterfactual_prompt": f"it was the age of {other} and of",
            "gt_original_target": "hope",
            "gt_counterfactual_target": "despair",
        }
        for one, other in (("wisdom", "Light"), ("belief", "spring"))
    ]
    path = tmp_path / "own.json"
    path.write_text(json.dumps([{"prompt": PROMPT, "target": "us"}, *records]))
    given = {"model": str(tiny_model), "facts": 2, "data": str(path)}
    done = compute_as_known("attention_knockout", store=tmp_path / "s", **given)
    assert (done.prompt, done.target) == (PROMPT, "us")
    for other in done.others:
        text = other.encoding.text
        end = other.encoding.offsets[other.roles["subject"]][1]
        assert text[:end].split(" ")[-1] == text.split(" ")[5], "the subject is the sixth word"
    assert done.groups == {"to choose on": 2, "to score on": 2}
    assert done.to_json()["findings"][0]["prompts"] == 2


def test_what_a_model_does_not_know_has_no_part_in_the_choice(tiny_model, tmp_path):
    known = {"to choose on": [True, False, True], "to score on": [False, True, True]}
    given = {"model": str(tiny_model), "facts": 3, "sweep": False, "prompt": PROMPT}
    done = compute_as_known("attention_knockout", store=tmp_path, known=known, **given)
    texts = [each.encoding.text for each in done.others]
    choice = done.to_json()["choice"]
    assert choice["chosen_on"] == [texts[0], texts[2]] and choice["scored_on"] == texts[4:]
    mean = done.measured_on_facts("kl")[[0, 2], :, :3].mean(axis=0)
    assert choice["lost"] == pytest.approx(mean.max())
    assert done.to_json()["findings"][0]["prompts"] == 2


def test_an_edge_that_nobody_named_is_chosen_on_facts_and_scored_on_others(tiny_model, model, tmp_path):
    """The choice, the effect on held-out facts and its null, again by plain passes."""
    done = compute_as_known(
        "attention_knockout",
        store=tmp_path / "s",
        model=str(tiny_model),
        prompt="A spring is developed by",
        data="shipped",
        facts=2,
        controls=30,
        seed=3,
    )
    document = done.to_json()
    texts = [*document["choice"]["chosen_on"], *document["choice"]["scored_on"]]
    assert len(set(texts)) == 4
    found = []
    for text in texts:
        encoding = model.tokenizer.encode(text)
        query = len(encoding) - 1
        relation = next(each for each in RELATIONS if text.endswith(each))
        end = len(text) - len(relation) - 1
        keys = (0, encoding.char_range_to_tokens(end - 1, end)[-1], query - 1)
        before = model.forward(text).logits[0, -1].double()
        cuts = [
            [
                model.forward(
                    text,
                    HookSpec().intervene(f"blocks.{layer}.attn.hook_scores", Knockout([(query, key)])),
                )
                .logits[0, -1]
                .double()
                for key in keys
            ]
            for layer in range(3)
        ]
        found.append([[kl(before, after) for after in row] for row in cuts])
    lost = np.mean(found[:2], axis=0)
    layer, role = np.unravel_index(lost.argmax(), lost.shape)
    assert (document["choice"]["layer"], document["choice"]["role"]) == (layer, list(ROLES)[role])
    assert document["choice"]["lost"] == pytest.approx(lost.max(), rel=1e-3)
    first = document["findings"][0]
    scored = [each[layer][role] for each in found[2:]]
    assert first["held_out"] and first["prompts"] == 2
    assert first["effect"] == pytest.approx(np.mean(scored), rel=1e-3)
    assert first["interval_95"] == pytest.approx([min(scored), max(scored)], rel=1e-3)
    assert document["target_layer"] == layer
    assert document["knockout_edge"] == [done.query, done.roles[list(ROLES)[role]]]
    # The quiet edge is the least of those that are not the edge told of in this prompt, and drawn in it.
    others = [place for place, name in enumerate(ROLES) if done.roles.get(name, done.edge[1]) != done.edge[1]]
    assert 0 < len(others) < len(ROLES)
    assert done.quiet.lost == pytest.approx(lost[:, others].min(), rel=1e-3, abs=1e-9)
    assert document["findings"][-1]["claim"].startswith("for comparison")
    heads = np.array(document["heads"]["kl_divergence"])
    before = model.forward(done.prompt).logits[0, -1].double()
    alone = Knockout([done.edge], heads=[1])
    after = model.forward(done.prompt, HookSpec().intervene("blocks.2.attn.hook_scores", alone)).logits[0, -1]
    assert heads[2, 1] == pytest.approx(kl(before, after.double()), rel=1e-3, abs=1e-8)


def test_without_sweep_one_edge_is_cut_and_told_the_same(knockout, tiny_model, tmp_path):
    alone = compute(
        "attention_knockout",
        store=tmp_path / "store",
        model=str(tiny_model),
        sweep=False,
        controls=4,
        **NAMED,
    )
    document, whole = alone.to_json(), knockout.to_json()
    assert alone.edges["kl"].shape[1] < whole["findings"][0]["null"]["draws"]
    assert document["findings"][0]["null"]["draws"] == 4
    assert document["kl_divergence"] == pytest.approx(whole["kl_divergence"], rel=1e-4)
    assert "sweep" not in document and "heads" not in document
    assert alone.draw(tmp_path) == []


def test_queries_and_keys_are_named_by_phrase(tiny_model, model):
    planned = build("attention_knockout", model=str(tiny_model), prompt=PROMPT, query="age", key="was")
    encoding = model.tokenizer.encode(PROMPT)
    at = [encoding.char_range_to_tokens(start, start + 3)[-1] for start in (11, 3)]
    assert planned.edge == tuple(at)


def test_paris_keeps_its_own_field(tiny_model, tmp_path):
    done = compute("attention_knockout", store=tmp_path / "s", model=str(tiny_model), layer=1, key=0)
    document = done.to_json()
    assert document["prompt"] == "The capital of France is the city of"
    assert document["paris_logit_diff"] == document["target_logit_diff"]


def test_the_patterns_are_those_of_the_model(patterns, model):
    document = patterns.to_json()
    cache = model.forward(PROMPT, HookSpec().capture("blocks.*.attn.hook_pattern"))
    own = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(3)]).double()
    row, key = own.mean(1)[:, -1], document["key"]
    assert key == 1 + int(row.mean(0)[1:-1].argmax())
    for layer in range(3):
        top = document["layers"][layer]["top_attended"]
        np.testing.assert_allclose([one["weight"] for one in top], row[layer].topk(5).values, atol=1e-6)
        assert top[0]["position"] == int(row[layer].argmax())
        np.testing.assert_allclose(
            document["layers"][layer]["weight_by_head"], own[layer, :, -1, key], atol=1e-6
        )
    assert document["peak_layer"] == int(row[:, key].argmax())
    incoming = own[document["peak_layer"]].mean(0)[key:, key]
    np.testing.assert_allclose([one["weight"] for one in document["incoming"]], incoming, atol=1e-6)


def test_the_keys_of_a_query_that_is_not_the_last_end_with_it(tiny_model, tmp_path):
    done = compute(
        "attention_patterns", store=tmp_path / "s", model=str(tiny_model), prompt=PROMPT, query=2, key=1
    )
    document = done.to_json()
    assert (document["query"], document["key"]) == (2, 1)
    for layer in document["layers"]:
        assert {one["position"] for one in layer["top_attended"] if one["weight"] > 0} <= {0, 1, 2}
    assert document["incoming"][0]["position"] == 1
    assert done.draw(tmp_path / "figures")


@pytest.mark.parametrize("name", ["attention_knockout", "attention_patterns"])
def test_a_second_call_is_a_hit_and_needs_no_torch(name, knockout, patterns, tiny_model, store):
    given = {"model": str(tiny_model), "prompt": PROMPT}
    given |= NAMED if name == "attention_knockout" else {}
    program = (
        "import sys, json\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from mizarr.workflows import compute\n"
        "done = compute(sys.argv[1], store=sys.argv[2], **json.loads(sys.argv[3]))\n"
        "print(json.dumps(done.to_json()))"
    )
    command = [sys.executable, "-c", program, name, str(store), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = knockout if name == "attention_knockout" else patterns
    assert json.loads(done.stdout) == json.loads(json.dumps(first.to_json(), allow_nan=False))


@pytest.mark.parametrize("name", ["attention_knockout", "attention_patterns"])
def test_tables_and_figures_show_the_prompt_and_name_the_results(name, knockout, patterns, tmp_path, capsys):
    done = knockout if name == "attention_knockout" else patterns
    (path,) = done.render(Console(width=120), tmp_path)
    printed = capsys.readouterr().out
    assert "'␣of'" in printed
    assert path.read_bytes().startswith(b"\x89PNG")
    assert next(iter(done.to_json()["provenance"]["keys"].values()))[:12].encode() in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("attention_knockout", {"layer": 3}, ConfigError, r"layer in 0\.\.2, found 3"),
        ("attention_knockout", {"key": 99}, PromptError, "found 99"),
        ("attention_knockout", {"query": 2, "key": 3}, InterventionError, "no weight there"),
        ("attention_knockout", {"query": 0}, InterventionError, "leaves query 0 no key"),
        ("attention_knockout", {"query": "aeg"}, PromptError, "did you mean 'age'"),
        (
            "attention_knockout",
            {"target": "x", "prompt": None},
            ConfigError,
            "a prompt for the target",
        ),
        ("attention_knockout", {"top_k": 0}, ConfigError, "top_k"),
        ("attention_patterns", {"query": 2, "key": 3}, InterventionError, "no weight there"),
        ("attention_patterns", {"top_k": 0}, ConfigError, "top_k"),
        ("attention_patterns", {"prompt": "word " * 99}, PromptError, "at most 64 positions"),
    ],
)
def test_wrong_input_gives_one_clear_line_before_anything_runs(tiny_model, name, given, error, message):
    with pytest.raises(error, match=message) as found:
        build(name, **{"model": str(tiny_model), "prompt": PROMPT} | given)
    assert isinstance(found.value, MizarrError)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["attention_knockout", "attention_patterns"])
def test_defaults_run_offline_on_the_specimen(name, tmp_path):
    """What a person meets first; the numbers belong to the weights."""
    given = {"sweep": False, "facts": 2} if name == "attention_knockout" else {}
    done = compute(name, store=tmp_path / "store", **given)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["model_id"] == "specimen"
    assert document["prompt"] == shipped_facts()[0]["prompt"]
    assert done.tables()
