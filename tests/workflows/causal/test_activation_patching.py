"""The causal trace from prompts to figures, on a random model and on the specimen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mizarr
from mizarr.stages.forward.runs.run import Run, stream
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.material.facts.fact_pairs import pairs_of_facts
from mizarr.workflows.subject import Subject, shipped_facts
from tests.known_facts import compute_as_known
from tests.torch_free import TORCH_BLOCKED

CLEAN, CORRUPTED = "it was the age of wisdom", "it was the age of despair"


def tokens_of(folder: Path, text: str) -> int:
    return len(mizarr.Model.from_pretrained(folder).tokenizer.encode(text))


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> tuple[str, str, str]:
    """A clean prompt, a corrupted one of as many tokens, and one of more."""
    words = ["season", "spring", "winter", "epoch", "belief", "light"]
    lengths = {word: tokens_of(tiny_model, f"it was the {word} of") for word in words}
    one, other = next((a, b) for a in words for b in words if a < b and lengths[a] == lengths[b])
    return f"it was the {one} of", f"it was the {other} of", "we had everything before us in the season of"


@pytest.fixture(scope="module")
def done(tiny_model: Path, prompts, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("trace") / "store"
    given = {"prompt": prompts[0], "corrupted": [prompts[2], prompts[1]], "answer": " w"}
    given |= {"others": 2, "controls": 6}
    return compute("activation_patching", store=store, model=str(tiny_model), answer_piece="first", **given)


@pytest.fixture(scope="module")
def claiming(tiny_model: Path, prompts, tmp_path_factory: pytest.TempPathFactory):
    """The same, as of a model that says the answers of both other pairs."""
    store = tmp_path_factory.mktemp("claiming") / "store"
    given = {"prompt": prompts[0], "corrupted": [prompts[1]], "others": 2, "controls": 6}
    return compute_as_known("activation_patching", store=store, model=str(tiny_model), **given)


def test_the_first_corrupted_prompt_of_as_many_tokens_is_taken(done, prompts):
    assert done.traced[0].corrupted == prompts[1]


def test_json_has_the_fields_of_the_original_and_the_numbers_of_the_model(done, tiny_model: Path, prompts):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    found = document["results"][0]
    assert {
        "model_id",
        "clean_prompt",
        "corrupted_prompt",
        "subject_pos",
        "tokens",
        "n_layers",
        "seq_len",
        "corrupted_kl",
        "subject_recovery",
        "grid",
    } <= found.keys()
    model = mizarr.Model.from_pretrained(tiny_model)
    logits = {i: result.logits[0, -1].double() for i, result in stream(model, [Run(p) for p in prompts[:2]])}
    p, q = (logits[i].log_softmax(-1) for i in range(2))
    assert found["corrupted_kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    grid = np.array(found["grid"])
    assert grid.shape == (3, found["seq_len"]) == (found["n_layers"], len(found["tokens"]))
    np.testing.assert_allclose(grid[-1, -1], 100, atol=1e-2)
    np.testing.assert_allclose(grid[:, : found["subject_pos"]], 0, atol=1e-2)
    assert found["subject_recovery"] == grid[:, found["subject_pos"]].tolist()
    ids = [model.tokenizer.encode(text).ids for text in prompts[:2]]
    assert found["subject_pos"] == next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    answer = found["answer_token_ids"][0]
    assert found["answer_probability"]["clean"] == pytest.approx(float(p[answer].exp()), abs=1e-5)
    assert found["grids"].keys() == {"resid_post", "attn_out", "mlp_out"}
    best = found["best"][0]
    assert best["recovery"] == grid.max() == grid[best["layer"], best["position"]]


def test_of_pairs_that_a_model_does_not_know_nothing_is_claimed(done, tiny_model: Path, tmp_path: Path):
    """Neither of a pair of one's own, nor of those shipped, of which none is known here."""
    given = {"model": str(tiny_model), "kinds": ["attn_out"], "others": 2, "donors": 1}
    given |= {"pairs": 1, "answer_piece": "first"}
    shipped = compute("activation_patching", store=tmp_path, **given)
    told = {"; a claim needs 2.": done, " and 0 of 3 pairs to score on; a claim needs 2 of each.": shipped}
    for scored, answer in told.items():
        (found,) = (view for view in answer.shown if view.kind == "findings")
        assert answer.to_json()["findings"] == []
        assert f"The model knows the answer of 0 of 2 pairs to choose on{scored}" in found.caption
        assert "data=FILE" in found.caption and "controls=0" in found.caption
        assert answer.to_json()["not_claimed"] == found.caption
        assert answer.nodes.keys() == {"general_facts", "pair_0", "known"}, "no control was run"
        assert answer.result("known")["rank"].values.min() > 0


def test_which_pairs_are_known_is_what_a_plain_pass_says(tmp_path: Path):
    done = compute("activation_patching", store=tmp_path, kinds=["attn_out"], others=4, donors=1)
    specimen = mizarr.Model.from_pretrained("specimen")
    answers = {each["prompt"]: each["target"] for each in shipped_facts()}
    for name, count in (("choice", 4), ("scored", 6)):
        prompts = [each.clean for each in done.nodes[name].experiment.experiments]
        group = "to choose on" if name == "choice" else "to score on"
        said = [
            int(specimen.forward(list(ids)).logits[0, -1].argmax())
            == specimen.tokenizer.encode(f" {answers[text]}", add_special=False).ids[0]
            for ids in prompts
            for text in answers
            if tuple(specimen.tokenizer.encode(text).ids) == ids
        ]
        assert len(said) == count
        assert done.is_known(group).tolist() == said
        assert sum(said) >= count - 1
    prompts = {one["prompts"] for one in done.to_json()["findings"]}
    assert prompts == {int(done.is_known("to score on").sum())}


def test_findings_are_what_a_place_of_other_pairs_recovers_beside_unrelated_states(
    claiming, tiny_model: Path
):
    """Choice from the stored grids of other pairs; effect and null of this pair again, by plain passes."""
    model = mizarr.Model.from_pretrained(tiny_model)
    traced = claiming.traced[0]
    donors = [each.donor for each in claiming.nodes["controls"].experiment.experiments]
    assert len(set(donors)) == 6 and {len(ids) for ids in donors} == {len(traced.clean_ids)}
    clean, corrupted = (
        model.forward(ids).logits[0, -1].double().log_softmax(-1)
        for ids in (traced.clean_ids, traced.corrupted_ids)
    )

    def lost(q) -> float:
        return float((clean.exp() * (clean - q)).sum())

    def recovered(ids, point: str, place: int) -> float:
        state = model.forward(ids, mizarr.HookSpec().capture(point), want=None)[point][0, place][None]
        spec = mizarr.HookSpec().intervene(point, mizarr.Replace(state, positions=(place,)))
        after = model.forward(traced.corrupted_ids, spec).logits[0, -1].double().log_softmax(-1)
        return 100 * (1 - lost(after) / lost(corrupted))

    findings = claiming.to_json()["findings"]
    assert [one["claim"].startswith("for comparison, patching the clean resid_post") for one in findings] == [
        *[False] * 3,
        True,
    ]
    for kind, found in zip(("resid_post", "attn_out", "mlp_out", "resid_post"), findings, strict=True):
        grids = claiming.result("choice")["recovery"].sel(kind=kind)
        mean = grids.mean("draw").transpose("layer", "position")
        mean = mean.values[:, : 1 if kind == "resid_post" else 2]
        pick = np.abs(mean).argmin() if found is findings[-1] else mean.argmax()
        layer, role = np.unravel_index(pick, mean.shape)
        assert f"{kind} of layer {layer}" in found["claim"]
        place = (traced.subject[1], len(traced.clean_ids) - 1)[role]
        point = f"blocks.{layer}.hook_{kind}"
        assert found["effect"] == pytest.approx(recovered(traced.clean_ids, point, place), rel=1e-2, abs=0.1)
        # the cause itself is one of those drawn
        others = [found["effect"], *(recovered(ids, point, place) for ids in donors)]
        assert found["null"]["draws"] == 6
        assert min(others) - 0.5 <= found["null"]["low_95"] <= found["null"]["high_95"] <= max(others) + 0.5


def test_a_single_kind_is_told_the_same_way(done, tiny_model: Path, prompts, tmp_path: Path):
    one = compute(
        "activation_patching",
        store=tmp_path / "store",
        model=str(tiny_model),
        prompt=prompts[0],
        corrupted=[prompts[1]],
        others=1,
        controls=2,
        kinds=["attn_out"],
    )
    np.testing.assert_allclose(
        one.to_json()["results"][0]["grid"], done.to_json()["results"][0]["grids"]["attn_out"], atol=1e-3
    )
    assert "answer" not in one.to_json()["results"][0]
    one.render(Console())


def test_heads_are_patched_at_all_positions_and_told_beside_states(
    done, tiny_model: Path, prompts, tmp_path: Path, capsys
):
    kinds = ["z", "resid_post", "k", "pattern"]
    heads = compute(
        "activation_patching",
        store=tmp_path / "store",
        model=str(tiny_model),
        prompt=prompts[0],
        corrupted=[prompts[1]],
        others=1,
        controls=2,
        kinds=kinds,
    )
    (found,) = heads.to_json()["results"]
    shapes = {kind: np.array(grid).shape for kind, grid in found["grids"].items()}
    assert shapes == {"z": (3, 2), "resid_post": (3, found["seq_len"]), "k": (3, 1), "pattern": (3, 2)}
    states = done.to_json()["results"][0]["grids"]["resid_post"]
    np.testing.assert_allclose(found["grids"]["resid_post"], states, atol=1e-3)
    model = mizarr.Model.from_pretrained(tiny_model)
    point = "blocks.1.attn.hook_z"
    clean = model.forward(prompts[0], mizarr.HookSpec().capture(point), want=None)[point][0]
    put = mizarr.HookSpec().intervene(point, mizarr.Replace(clean[1:2], heads=(1,)))
    passes = (model.forward(prompts[0]), model.forward(prompts[1]), model.forward(prompts[1], put))
    p, corrupted, patched = (result.logits[0, -1].double().log_softmax(-1) for result in passes)
    lost = [float((p.exp() * (p - q)).sum()) for q in (corrupted, patched)]
    assert found["grids"]["z"][1][1] == pytest.approx(100 * (1 - lost[1] / lost[0]), abs=0.05)
    best = {one["kind"]: one for one in found["best"]}
    assert best["z"].keys() == {"kind", "layer", "head", "recovery"}
    assert best["resid_post"].keys() == {"kind", "layer", "position", "recovery"}
    heads.render(Console(width=160), tmp_path)
    printed = capsys.readouterr().out
    assert (
        "At: the position or head where recovery is largest." in " ".join(printed.split())
        and "head 1" in printed
    )


def test_heads_alone_have_no_position_of_a_subject(tiny_model: Path, prompts, tmp_path: Path):
    given = {"model": str(tiny_model), "prompt": prompts[0], "corrupted": [prompts[1]], "kinds": ["v"]}
    heads = compute("activation_patching", store=tmp_path / "store", **given)
    (found,) = heads.to_json()["results"]
    assert "subject_recovery" not in found
    assert list(heads.nodes) == ["heads_0"]
    assert "key/value head" in {
        getattr(panel, "column_name", "") for v in heads.shown for panel in _panels(v)
    }


def _panels(view):
    return getattr(view, "panels", ())


def test_tables_and_figures_name_places_and_keys(done, tmp_path: Path, capsys):
    (path,) = done.render(Console(width=160), tmp_path)
    printed = capsys.readouterr().out
    assert "resid_post" in printed
    assert "100.0 %" in printed
    assert path.read_bytes().startswith(b"\x89PNG")
    assert done.to_json()["provenance"]["keys"]["pair_0"][:12].encode() in path.read_bytes()


def test_the_specimen_is_traced_through_pairs_of_its_own_facts(tmp_path: Path):
    done = compute("activation_patching", store=tmp_path / "store", pairs=1, others=1, kinds=["resid_post"])
    (found,) = done.to_json()["results"]
    assert len(found["answer_token_ids"]) == 1, "defaults have answers of one token"
    assert found["answer_probability"]["clean"] > found["answer_probability"]["corrupted"]
    assert found["best"][0]["recovery"] == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prompt": "it was"}, "found prompt without corrupted"),
        ({"corrupted": ["it was"]}, "found corrupted without prompt"),
        ({"answer": "of"}, "expected a prompt"),
        ({"kinds": ["resid_pots"]}, "nearest is 'resid_post'"),
        ({"kinds": ["result"]}, "expected kinds among"),
        ({"pairs": 0}, "pairs to be int of at least 1"),
        ({"answer_piece": "last"}, "only or first"),
        ({"prompt": CLEAN, "corrupted": ["it was"]}, "tokens, as .* has, found none .'it was' has"),
        ({"prompt": CLEAN, "corrupted": [CLEAN]}, "that differs"),
        (
            {"prompt": CLEAN, "corrupted": [CORRUPTED], "metric": "probability"},
            "found no answer; set answer=",
        ),
        (
            {"prompt": CLEAN, "corrupted": [CORRUPTED], "answer": ",", "metric": "logit_difference"},
            "no wrong",
        ),
        ({"metric": "logit_diff"}, "kl, logit_difference or probability"),
        (
            {"data": "nowhere.json"},
            r"the file nowhere\.json: No such file .*; name a JSON list of CounterFact",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(given, match, tiny_model: Path):
    with pytest.raises(ConfigError, match=match):
        build("activation_patching", model=str(tiny_model), **given)


def test_an_answer_of_several_tokens_needs_a_choice(tiny_model: Path, prompts):
    given = {"model": str(tiny_model), "prompt": prompts[0], "corrupted": [prompts[1]], "answer": "honey"}
    with pytest.raises(ConfigError, match=r"one token.*answer_piece=first"):
        build("activation_patching", **given)
    chosen = build("activation_patching", answer_piece="first", **given).traced[0]
    tokenizer = mizarr.Model.from_pretrained(tiny_model).tokenizer
    assert len(chosen.pieces) > 1
    assert "".join(tokenizer.decode_token(token) for token in chosen.pieces) == " honey"


def test_what_is_stored_is_told_again_where_there_is_no_torch(tmp_path: Path):
    program = (
        TORCH_BLOCKED
        + """
from mizarr.workflows import compute
for name, given in json.loads(sys.argv[2]).items():
    print(json.dumps(compute(name, store=sys.argv[1], **given).to_json()))
"""
    )
    settings = {
        "activation_patching": {"pairs": 1, "kinds": ["mlp_out"]},
        # A claim needs two pairs to score on.
        "counterfact_patching": {"limit": 2},
        "factual_routing": {"limit": 2},
    }
    store = tmp_path / "store"
    here = [compute(name, store=store, **given).to_json() for name, given in settings.items()]
    arguments = [sys.executable, "-c", program, str(store), json.dumps(settings)]
    told = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert [json.loads(line) for line in told.stdout.splitlines()] == json.loads(json.dumps(here))


@pytest.fixture(scope="module")
def own_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shipped pairs in a file of one's own."""
    path = tmp_path_factory.mktemp("own") / "pairs.json"
    path.write_text(json.dumps(pairs_of_facts(Subject("specimen"), shipped_facts())[20:26]))
    return path


def test_pairs_of_a_file_are_shown_chosen_on_and_scored_in_place_of_shipped_ones(
    own_pairs: Path, tmp_path: Path
):
    given = {"kinds": ["attn_out"], "donors": 1, "controls": 20}
    records, shipped = json.loads(own_pairs.read_text()), pairs_of_facts(Subject("specimen"), shipped_facts())
    done = compute("activation_patching", store=tmp_path, data=str(own_pairs), **given)
    assert [each.clean for each in done.traced] == [each["original_prompt"] for each in records[:2]]
    encode = done.subject.tokenizer.encode

    def clean(name: str) -> list[tuple[int, ...]]:
        return [each.clean for each in done.nodes[name].experiment.experiments]

    ids = [tuple(encode(each["original_prompt"]).ids) for each in records]
    assert (clean("choice"), clean("scored")) == (ids[2:4], ids[:2] + ids[4:])
    assert done.to_json()["findings"][0]["prompts"] == 4
    both = build("activation_patching", data=[str(own_pairs), "shipped"], others=3, **given)
    ids += [tuple(encode(each["original_prompt"]).ids) for each in shipped[:2]]
    chosen = [each.clean for each in both.nodes["choice"].experiment.experiments]
    assert chosen == ids[2:5]
    scored = [each.clean for each in both.nodes["scored"].experiment.experiments]
    assert scored == ids[:2] + ids[5:8]


def test_without_controls_none_is_run_and_the_page_says_that_nothing_is_claimed(
    own_pairs: Path, tmp_path: Path
):
    done = compute("activation_patching", store=tmp_path, data=str(own_pairs), pairs=1, controls=0)
    assert list(done.nodes) == ["pair_0"]
    document = done.to_json()
    assert document["findings"] == []
    assert document["not_claimed"] == "Nothing is claimed, as no control was run (controls=0)."
    page = done.report(tmp_path / "page.html").read_text()
    assert document["not_claimed"] in page and "(p = " not in page


@pytest.mark.parametrize("metric", ["logit_difference", "probability"])
def test_recovery_is_a_share_of_the_metric_that_plain_passes_give(
    metric: str, own_pairs: Path, tmp_path: Path
):
    given = {"kinds": ["mlp_out"], "pairs": 1, "controls": 0, "metric": metric, "data": str(own_pairs)}
    done = compute("activation_patching", store=tmp_path, **given)
    found, traced = done.to_json()["results"][0], done.traced[0]
    model = mizarr.Model.from_pretrained("specimen")
    record = json.loads(own_pairs.read_text())[0]
    right, wrong = (
        model.tokenizer.encode(f" {record[name]}", add_special=False).ids[0]
        for name in ("gt_original_target", "gt_counterfactual_target")
    )
    place, point = traced.subject[1], "blocks.1.hook_mlp_out"
    state = model.forward(traced.clean_ids, mizarr.HookSpec().capture(point), want=None)[point][0, place][
        None
    ]
    put = mizarr.HookSpec().intervene(point, mizarr.Replace(state, positions=(place,)))
    passes = (
        model.forward(traced.clean_ids),
        model.forward(traced.corrupted_ids),
        model.forward(traced.corrupted_ids, put),
    )
    logits = [each.logits[0, -1].double() for each in passes]
    values = [
        float(each[right] - each[wrong] if metric == "logit_difference" else each.softmax(-1)[right])
        for each in logits
    ]
    clean, corrupted, patched = values
    expected = 100 * (patched - corrupted) / (clean - corrupted)
    assert found["metric"] == metric
    assert found["grids"]["mlp_out"][1][place] == pytest.approx(expected, abs=0.05)
    table = next(view for view in done.shown if view.kind == "table")
    if metric == "logit_difference":
        assert found["logit_difference"] == pytest.approx({"clean": clean, "corrupted": corrupted}, abs=1e-3)
        assert found["logit_difference_grids"]["mlp_out"][1][place] == pytest.approx(patched, abs=1e-3)
        assert f"Logit of {record['gt_original_target']!r} minus that of" in table.caption
        assert f"{clean:+.2f} clean, {corrupted:+.2f} corrupted" in table.caption
    else:
        assert "share of the clean answer's probability" in table.caption
