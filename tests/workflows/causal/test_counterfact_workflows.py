"""CounterFact patching and factual routing from records to figures, on a random model and on the specimen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mizarr
from mizarr import HookSpec, Replace
from mizarr.pipeline import plan
from mizarr.stages.causal.counterfact import position_map
from mizarr.store import open_store
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.material.facts.fact_pairs import fact_pairs, layers_label, pair_records, pairs_of_facts
from mizarr.workflows.subject import Subject, shipped_facts
from tests.known_facts import compute_as_known

QUESTION = "\n\nwisdom or hope?\n\nso:"
RECORDS = [
    {
        "original_prompt": f"it was the age of {one}{QUESTION}",
        "counterfactual_prompt": f"it was the age of {other}{QUESTION}",
        "gt_original_target": one,
        "gt_counterfactual_target": other,
    }
    for one, other in (("wisdom", "hope"), ("despair", "us"))
]
PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "counterfact"
"""A file of real records, where the checkout has one beside it."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.json"
    path.write_text(json.dumps(RECORDS))
    return path


@pytest.fixture(scope="module")
def settings(tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    store = tmp_path_factory.mktemp("counterfact") / "store"
    own = {"store": store, "model": str(tiny_model), "data": str(data), "block_size": 2}
    return {**own, "others": 2, "donors": 3}


@pytest.fixture(scope="module")
def patching(settings):
    return compute_as_known("counterfact_patching", **settings)


@pytest.fixture(scope="module")
def routing(settings):
    return compute_as_known("factual_routing", top_k=3, **settings)


def test_tokens_are_labelled_by_the_text_before_the_first_blank_line(patching, tiny_model: Path):
    tokenizer = mizarr.Model.from_pretrained(tiny_model).tokenizer
    for record, pair in zip(RECORDS, patching.pairs, strict=True):
        encoding = tokenizer.encode(record["original_prompt"])
        end = record["original_prompt"].index("\n\n")
        fact = [i for i, (start, stop) in enumerate(encoding.offsets) if stop > start and start < end]
        assert pair.tokens.fact == tuple(fact)
        assert [i for i, label in enumerate(pair.labels) if label == "fact_final"] == fact[-1:]
        assert pair.labels[0] == "other", "BOS states nothing"


def test_json_has_the_fields_of_the_protocol(patching):
    document = json.loads(json.dumps(patching.to_json(), allow_nan=False))
    assert {"model_id", "block_size", "n_layers", "n_blocks", "results", "summary"} <= document.keys()
    assert (document["n_layers"], document["n_blocks"]) == (3, 2)
    first = document["results"][0]
    assert {
        "label",
        "original_prompt",
        "counterfactual_prompt",
        "gt_original_target",
        "gt_counterfactual_target",
        "input_tokens",
        "original_continuation",
        "cf_continuation",
        "patches",
    } <= first.keys()
    assert len(first["patches"]) == 2 * len(first["input_tokens"])
    for patch in first["patches"]:
        assert patch["is_different"] == (patch["ablated_continuation"] != first["original_continuation"])
        assert patch["layer"] in ([0, 1], [2])
        assert patch["cf_pos"] == position_map(patching.pairs[0].tokens)[patch["orig_pos"]]
    last = [p for p in first["patches"] if p["layer"] == [2]][-1]
    assert last["ablated_continuation"] == first["cf_continuation"]


def test_the_summary_counts_the_patches(patching):
    document = patching.to_json()
    every = [patch for result in document["results"] for patch in result["patches"]]
    summary = document["summary"]
    assert summary["total_patches"] == len(every)
    assert summary["total_different"] == sum(patch["is_different"] for patch in every)
    for row in summary["pct_different_by_block"]:
        chosen = [patch["is_different"] for patch in every if patch["layer"] == row["layers"]]
        assert (row["count_total"], row["count_different"]) == (len(chosen), sum(chosen))
        assert row["pct_different"] == pytest.approx(100 * np.mean(chosen))
    for row in summary["pct_different_by_token_type"]:
        chosen = [patch["is_different"] for patch in every if patch["token_type"] == row["token_type"]]
        assert (row["count_total"], row["count_different"]) == (len(chosen), sum(chosen))


def test_routing_says_which_position_is_the_subject_and_by_which_rule(routing, settings, tiny_model: Path):
    tokenizer = mizarr.Model.from_pretrained(tiny_model).tokenizer
    for result, record in zip(routing.to_json()["results"], RECORDS, strict=True):
        encoding = tokenizer.encode(record["original_prompt"])
        subject = result["subject"]
        assert subject["rule"] == "whole"
        assert subject["positions"][-1] == subject["position"]
        end = record["original_prompt"].index("\n\n")
        assert encoding.offsets[subject["position"]][1] == end, "the prompts differ in the fact's last word"
        assert subject["token"] == tokenizer.decode_token(encoding.ids[subject["position"]])
    theirs = compute("factual_routing", **settings, subject="last_fact", controls=0).to_json()
    assert theirs["subject_rule"] == "last_fact"
    for result in theirs["results"]:
        assert result["subject"]["position"] == result["fact_positions"][-1]


def test_routing_lists_and_adds_up_the_heads_that_move(routing):
    document = json.loads(json.dumps(routing.to_json(), allow_nan=False))
    assert {"n_heads", "n_blocks", "results", "aggregate"} <= document.keys()
    delta = routing.routing["delta"].values
    for i, result in enumerate(document["results"]):
        for b, block in enumerate(result["blocks"]):
            assert block["total_routing_shift"] == pytest.approx(np.abs(delta[i, b]).sum())
            sizes = [abs(head["delta"]) for head in block["top_heads"]]
            assert len(sizes) == 3
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] == pytest.approx(np.abs(delta[i, b]).max())
            for head in block["top_heads"]:
                assert head["delta"] == pytest.approx(head["patched_attn"] - head["baseline_attn"])
    aggregate = document["aggregate"]
    counts = [row["appearances_in_top10"] for row in aggregate["head_frequency"]]
    # Six heads in all, so that every head is among the first ten of every block: 2 pairs of 2 blocks.
    assert counts == [4] * 6
    assert all(row["pct_of_blocks"] <= 100 for row in aggregate["head_frequency"])
    sizes = [row["avg_abs_delta"] for row in aggregate["head_frequency"]]
    assert sizes == sorted(sizes, reverse=True), "equal counts are ordered by how far heads move"
    moved = [row["avg_total_routing_shift"] for row in aggregate["avg_routing_by_block"]]
    np.testing.assert_allclose(moved, np.abs(delta).sum((2, 3)).mean(0))


def test_patching_above_a_layer_moves_no_attention_below_it(routing):
    delta = routing.routing["delta"].values
    assert np.abs(delta[:, 1, :3]).max() < 1e-6, "the last block is patched after its attention"
    assert np.abs(delta[:, 0, 1:]).max() > 1e-4


def subject_patched(model, original, places: tuple[tuple[int, int], ...], other, block: list[int]):
    """A plain pass with positions of a block taken from another prompt."""
    positions, sources = zip(*places, strict=True)
    points = [f"blocks.{layer}.hook_resid_post" for layer in block]
    states = model.forward(other, HookSpec().capture(*points), want=None)
    spec = HookSpec().capture("blocks.*.attn.hook_pattern")
    for point in points:
        spec = spec.intervene(point, Replace(states[point][0, list(sources)], positions=positions))
    return model.forward(original, spec)


def test_the_finding_of_patching_is_what_the_other_subject_makes_it_say(patching, settings):
    model = mizarr.Model.from_pretrained(settings["model"])
    found, quiet = patching.to_json()["findings"]
    choice, controls = (patching.result(name).isel(draw=0) for name in ("choice", "controls"))
    taken = (choice["token_id"] == choice["counterfactual_token_id"]).mean("pair").values
    block = patching.blocks[int(taken.argmax())]
    effects, nulls = [], []
    donors = controls_of(patching)
    for each, unrelated in zip(patching.pairs, donors, strict=True):
        pair = each.tokens
        says = int(model.forward(pair.counterfactual).logits[0, -1].argmax())
        for prompt, kept in ((pair.counterfactual, effects), *((d, nulls) for d in unrelated)):
            result = subject_patched(model, pair.original, pair.subject, prompt, block)
            kept.append(int(result.logits[0, -1].argmax()) == says)
    assert found["effect"] == pytest.approx(np.mean(effects))
    assert found["prompts"] == len(effects) == 2
    ours = controls["token_id"].values[:, int(taken.argmax())]
    said = np.repeat(patching.raw_patches["counterfactual_token_id"].values, 3)
    assert (ours == said).tolist() == nulls
    assert found["null"]["draws"] == 50
    least = patching.blocks[int(np.flatnonzero(taken == taken.min())[-1])]
    assert (
        quiet["claim"].startswith("for comparison, ") and f"layers {layers_label(least)} " in quiet["claim"]
    )
    said = [
        int(
            subject_patched(model, pair.original, pair.subject, pair.counterfactual, least)
            .logits[0, -1]
            .argmax()
        )
        == int(model.forward(pair.counterfactual).logits[0, -1].argmax())
        for pair in (each.tokens for each in patching.pairs)
    ]
    assert quiet["effect"] == pytest.approx(np.mean(said))


def controls_of(done) -> list[list[tuple[int, ...]]]:
    """The unrelated prompts of each pair, as the plan has them."""
    (experiment,) = done.nodes["controls"].experiment.experiments
    prompts = [pair.counterfactual for pair in experiment.pairs]
    for prompt, pair in zip(prompts, np.repeat(range(2), 3), strict=True):
        own = done.pairs[pair].tokens
        assert len(prompt) == len(own.counterfactual) and prompt not in (own.counterfactual, own.original)
    return [prompts[:3], prompts[3:]]


def test_the_findings_of_routing_are_moved_attention_beside_unrelated_subjects(routing, settings):
    model = mizarr.Model.from_pretrained(settings["model"])
    total, one, quiet = routing.to_json()["findings"]
    choice = routing.result("choice").isel(draw=0)
    moved = np.abs(choice["attention"] - choice["baseline_attention"])
    moved = moved.transpose("pair", "block", "layer", "head").values.mean(0)
    block = int(moved.sum((1, 2)).argmax())
    layer, head = np.unravel_index(moved[block].argmax(), moved.shape[1:])
    assert f"head {head} of layer {layer}" in one["claim"]
    above = moved[block].copy()
    above[: routing.blocks[block][0] + 1] = np.inf
    still = np.unravel_index(above.argmin(), above.shape)
    assert quiet["claim"].startswith("for comparison, ")
    assert f"head {still[1]} of layer {still[0]}" in quiet["claim"]
    effects, nulls = [], []
    for each, unrelated in zip(routing.pairs, controls_of(routing), strict=True):
        pair = each.tokens

        def attention(result, fact=pair.fact) -> np.ndarray:
            patterns = [result[f"blocks.{i}.attn.hook_pattern"][0, :, -1, list(fact)] for i in range(3)]
            return np.stack([each.double().mean(-1).numpy() for each in patterns])

        before = attention(model.forward(pair.original, HookSpec().capture("blocks.*.attn.hook_pattern")))
        for prompt, kept in ((pair.counterfactual, effects), *((d, nulls) for d in unrelated)):
            result = subject_patched(model, pair.original, pair.subject, prompt, routing.blocks[block])
            kept.append(np.abs(attention(result) - before))
    effects, nulls = np.array(effects), np.array(nulls).reshape(2, 3, 3, 2)
    for found, own, others in (
        (total, effects.sum((1, 2)), nulls.sum((2, 3))),
        (one, effects[:, layer, head], nulls[:, :, layer, head]),
        (quiet, effects[:, *still], nulls[:, :, *still]),
    ):
        assert found["effect"] == pytest.approx(own.mean(), rel=1e-3)
        assert found["interval_95"] == pytest.approx([own.min(), own.max()], rel=1e-3)
        causes = np.column_stack([own, others])  # the cause itself is one of those drawn
        means = np.add.outer(causes[0], causes[1]).ravel() / 2
        assert (
            means.min() * 0.999 <= found["null"]["low_95"] <= found["null"]["high_95"] <= means.max() * 1.001
        )
    fewer = compute_as_known("factual_routing", top_k=3, **settings, controls=7, seed=2)
    assert fewer.to_json()["findings"][0]["null"]["draws"] == 7
    keys = [done.to_json()["provenance"]["keys"] for done in (routing, fewer)]
    assert keys[0]["controls"] != keys[1]["controls"]
    assert (keys[0]["routing"], keys[0]["choice"]) == (keys[1]["routing"], keys[1]["choice"])


@pytest.mark.parametrize("name", ["counterfact_patching", "factual_routing"])
def test_tables_and_figures_show_what_came_out(name, settings, tmp_path: Path, capsys):
    done = compute_as_known(name, **settings)
    files = done.render(Console(width=160), tmp_path)
    assert [path.name for path in files] == [f"{name}.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "0-1" in printed
    assert "%" in printed


@pytest.mark.parametrize("name", ["counterfact_patching", "factual_routing"])
def test_of_pairs_that_a_model_does_not_know_nothing_is_claimed(name, settings, tmp_path):
    said = (
        r"The model knows the answer of 0 of 2 pairs to choose on and 0 of 2 pairs to score on; a claim "
        r"needs 2 of each\. So no control was run .* data=FILE, .* controls=0\.$"
    )
    with pytest.raises(ConfigError, match=said):
        compute(name, **settings | {"store": tmp_path})
    shown = "patches" if name == "counterfact_patching" else "routing"
    stored = open_store(tmp_path)
    planned = build(name, **{name: value for name, value in settings.items() if name != "store"})
    is_cached = {each: plan([node], stored).is_cached for each, node in planned.nodes.items()}
    # The pairs to choose on are general facts, as `data` has no more.
    assert is_cached.pop("general_facts") and is_cached.pop("known")
    assert not any(is_cached.values()), "it stopped before anything else"
    without = compute(name, **settings, controls=0)
    assert list(without.nodes) == [shown]
    assert without.to_json()["not_claimed"] == "Nothing is claimed, as no control was run (controls=0)."


def test_claims_are_about_the_pairs_that_the_model_knows(settings):
    """Two of three pairs are known: effects are those of these two."""
    records = [*RECORDS, RECORDS[0] | {"original_prompt": f"we had everything before{QUESTION}"}]
    path = settings["store"].parent / "three.json"
    path.write_text(json.dumps(records))
    done = compute_as_known("factual_routing", **settings | {"data": str(path)})
    whole = done.to_json()["findings"][0]
    done = build(
        "factual_routing", **{k: v for k, v in settings.items() if k != "store"} | {"data": str(path)}
    )
    done.is_known = lambda group: np.arange(done.groups[group]) < 2
    told = done.run(open_store(settings["store"])).to_json()["findings"][0]
    moved = np.abs(done.routing["delta"].values)
    block = next(b for b in range(2) if f"layers {layers_label(done.blocks[b])} " in told["claim"])
    assert told["prompts"] == 2 and whole["prompts"] == 3
    assert told["effect"] == pytest.approx(moved[:2, block].sum((1, 2)).mean())


def test_pairs_of_several_files_are_read_in_order_and_the_rest_is_chosen_on(data, tiny_model: Path):
    given = {"model": str(tiny_model), "limit": 1, "others": 2}
    own = build("factual_routing", data=str(data), **given)
    both = build("factual_routing", data=[str(data), "shipped"], **given | {"limit": 3})
    assert [each.texts.original for each in own.pairs] == [RECORDS[0]["original_prompt"]]
    shipped = [record.original for record in pair_records(own.subject, ["shipped"])[:1]]
    assert [each.texts.original for each in both.pairs] == [
        each["original_prompt"] for each in RECORDS
    ] + shipped
    (chosen_on,) = own.nodes["choice"].experiment.experiments[0].pairs
    assert list(chosen_on.original) == own.subject.tokenizer.encode(RECORDS[1]["original_prompt"]).ids


def test_pairs_of_facts_share_a_relation_and_a_length_and_differ_in_their_answer():
    subject = Subject("specimen")
    pairs = pairs_of_facts(subject, shipped_facts())
    assert len(pairs) >= 50
    prompts = [record[name] for record in pairs for name in ("original_prompt", "counterfactual_prompt")]
    assert len(set(prompts)) == len(prompts), "each fact is in one pair at most"
    for record in pairs[:50]:
        one, other = record["original_prompt"], record["counterfactual_prompt"]
        assert len(subject.tokenizer.encode(one)) == len(subject.tokenizer.encode(other))
        assert one.split()[-2:] == other.split()[-2:]
        assert record["gt_original_target"] != record["gt_counterfactual_target"]


def test_blocks_of_a_small_model_are_a_third_of_its_layers():
    assert build("counterfact_patching", limit=1).blocks == [[0, 1], [2, 3], [4, 5]]


def test_published_records_are_read_and_labelled(tiny_model: Path):
    path = PUBLISHED / "counterfact_transluce_test.json"
    if not path.is_file():
        pytest.skip(f"no published records at {path}")
    subject = Subject("specimen")
    pairs = fact_pairs(subject, (str(path),), 0)
    assert len(pairs) == len(json.loads(path.read_text()))
    for each in pairs:
        positions, sources = zip(*each.tokens.subject, strict=True)
        assert {*positions} <= {*each.tokens.fact}, "the subject is in the fact, not in the instruction"
        assert each.labels.count("fact_final") == 1
        assert min(sources) >= 0 and max(sources) < len(each.tokens.counterfactual)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"data": "nowhere.json"},
            r"the file nowhere\.json: No such file .*; name a JSON list of CounterFact",
        ),
        ({"limit": -1}, "limit to be int of at least 0, found -1"),
        ({"block_size": -1}, "block_size to be int of at least 0, found -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, match, tiny_model: Path):
    for name in ("counterfact_patching", "factual_routing"):
        with pytest.raises(ConfigError, match=match):
            build(name, **({"model": str(tiny_model)} | given))


def test_records_without_their_fields_are_named(tmp_path: Path, tiny_model: Path):
    path = tmp_path / "records.json"
    for text, match in (
        ('[{"original_prompt": "a"}]', r"record 0 .*found a record without counterfactual_prompt"),
        ("{", "JSON list"),
        ("[]", "at least one pair"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            build("counterfact_patching", model=str(tiny_model), data=str(path))


def test_a_rule_for_subjects_that_is_none_is_refused(tiny_model: Path):
    with pytest.raises(ConfigError, match="whole, differing or last_fact"):
        build("factual_routing", model=str(tiny_model), subject="first")
