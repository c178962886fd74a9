"""The workflow on attribution graphs: its numbers are the graph's, cached, resumed, and shown on a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import plan
from mizarr.stages.features.labels import set_labels
from mizarr.stages.graph import node
from mizarr.stages.graph.rows import attribute
from mizarr.stages.logits.lens import format_token
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run
from mizarr.workflows.features.attribution_graph import (
    PRESETS,
    AttributionGraphs,
    AttributionGraphsSettings,
    chosen_preset,
)
from mizarr.workflows.views import Graph
from mizarr.workflows.views.graph.drawing import drawn_part
from tests.browser import chromium, opened
from tests.stages.graph.random_transcoders import save_random_transcoders
from tests.torch_free import without_torch

PROMPT = "it was the season of Light"


@pytest.fixture(scope="module")
def given(tiny_model: Path, prose_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings: a random model and transcoders, prose to look features up in."""
    folder = tmp_path_factory.mktemp("transcoders") / "clt"
    save_random_transcoders(folder, mizarr.Model.from_pretrained(tiny_model), "clt-jumprelu", features=30)
    return {
        "model": str(tiny_model),
        "dictionary": str(folder),
        "prompt": PROMPT,
        "corpus": str(prose_file),
        "top_k": 6,
    }


@pytest.fixture(scope="module")
def done(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> AttributionGraphs:
    found = compute("attribution_graph", store=tmp_path_factory.mktemp("graph") / "store", **given)
    assert isinstance(found, AttributionGraphs)
    return found


def test_its_numbers_are_those_of_the_graph(done: AttributionGraphs, given: dict[str, Any]):
    graph = mizarr.attribution_graph(given["model"], given["dictionary"], PROMPT)
    told = done.to_json()
    np.testing.assert_array_equal(done.graph.adjacency, graph.adjacency)
    assert told["replacement_score"] == graph.replacement_score
    assert told["completeness_score"] == graph.completeness_score
    kept = graph.prune()
    assert told["kept"]["edges"] == len(kept.edges["weight"])
    assert sum(told["kept"][kind] for kind in ("feature", "error", "token", "logit")) == kept.node_mask.sum()
    np.testing.assert_array_equal(done.pruned.edge_mask, kept.edge_mask)
    order = np.argsort(-graph.influence[: graph.counts.features], kind="stable")[:6]
    for one, index in zip(told["features"], order, strict=True):
        assert [one["layer"], one["position"], one["index"]] == graph.active_features[index].tolist()
        assert one["influence"] == graph.influence[index]
        assert one["activation"] == pytest.approx(graph.activation_values[index])
    assert [each["probability"] for each in told["logits"]] == graph.logit_probabilities.tolist()
    json.dumps(told, allow_nan=False)


def test_tokens_raised_are_those_that_the_decoder_points_to(done: AttributionGraphs, given: dict[str, Any]):
    model = mizarr.Model.from_pretrained(given["model"])
    weights, one = model.network.weights, done.strongest[0]
    row = done.dictionary.decoder_vector(one.feature, model.config.num_layers - 1)
    unembed = weights.embed if weights.lm_head is None else weights.lm_head
    effects = (unembed - unembed.mean(0)) @ (row * weights.final_norm.weight)
    vocabulary = done.subject.tokenizer.vocabulary
    raised = [format_token(vocabulary[i]) for i in effects.argsort(descending=True)[:5]]
    assert list(one.raised) == raised


def test_what_is_cached_needs_no_torch(done: AttributionGraphs, given: dict[str, Any], tmp_path: Path):
    assert done.store is not None
    program = """
from pathlib import Path
from mizarr.workflows import compute
done = compute("attribution_graph", store=sys.argv[1], **json.loads(sys.argv[2]))
folder = Path(sys.argv[3])
done.report(folder / "graph.html")
print(json.dumps([done.to_json(), [path.name for path in done.draw(folder)]]))
"""
    again, files = without_torch(program, done.store.path, json.dumps(given), tmp_path)
    assert again == json.loads(json.dumps(done.to_json()))
    assert files == ["attribution_graph.png"]
    assert (tmp_path / "attribution_graph.png").read_bytes().startswith(b"\x89PNG")
    assert "it was the season" in (tmp_path / "graph.html").read_text("utf-8")


def test_a_killed_workflow_goes_on_where_it_was(
    done: AttributionGraphs, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node, "CELL_BYTES", 4000)
    rows, calls = attribute.Attributor.rows, []

    def watched(self: attribute.Attributor, chosen: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(chosen.tolist())
        return rows(self, chosen)

    with monkeypatch.context() as patch:
        patch.setattr(attribute.Attributor, "rows", watched)
        with pytest.raises(KeyboardInterrupt):
            compute("attribution_graph", store=tmp_path / "store", **given)
    before, calls = calls, [[], [], [], []]
    monkeypatch.setattr(attribute.Attributor, "rows", watched)
    found = compute("attribution_graph", store=tmp_path / "store", **given)
    assert not {i for some in before for i in some} & {i for some in calls for i in some}
    np.testing.assert_allclose(found.graph.adjacency, done.graph.adjacency, rtol=1e-5, atol=1e-6)


def test_settings_are_those_of_the_graph(given: dict[str, Any], tmp_path: Path):
    token = mizarr.Model.from_pretrained(given["model"]).tokenizer.encode_raw("s").ids
    found = compute(
        "attribution_graph",
        store=tmp_path / "store",
        **given | {"targets": ["s"], "max_feature_nodes": 7, "zero_positions": 2, "corpus": "none"},
        arithmetic="float64",
        node_threshold=0.5,
    ).to_json()
    assert [each["token_id"] for each in found["logits"]] == token
    assert found["nodes"]["feature"] == 7 < found["active_features"]
    assert min(one["position"] for one in found["features"]) >= 2
    graph = mizarr.attribution_graph(
        given["model"],
        given["dictionary"],
        PROMPT,
        targets=token,
        max_feature_nodes=7,
        batch_size=256,
        zero_positions=2,
        arithmetic="float64",
    )
    assert found["kept"]["edges"] == len(graph.prune(0.5).edges["weight"])
    assert found["replacement_score"] == graph.replacement_score


@pytest.mark.parametrize(("changed", "said"), [
    ({"dictionary": None}, "expected transcoders that were trained on .*; name them: dictionary="),
    ({"preset": "gemma2-2b"}, "did you mean 'gemma2-2b-"),
    ({"node_threshold": 1.2}, "node_threshold to be float of at least 0 and at most 1"),
    ({"corpus_tokens": 0}, "expected corpus_tokens to be int of at least 1"),
    ({"targets": ["the season"]}, "to be one token"),
    ({"targets": [300]}, "token ids from 0 to 299"),
    ({"max_feature_nodes": 0}, "max_feature_nodes"),
    ({"zero_positions": 100}, "more than 100 tokens"),
    ({"corpus": "nowhere.txt"}, "expected files of documents at"),
    ({"arithmetic": "float16"}, "'float32' or 'float64', found 'float16'"),
    ({"graph_memory": "lots"}, "lots"),
    ({"treshold": 1}, "no setting 'treshold'"),
])  # fmt: skip
def test_what_does_not_fit_is_told_before_anything_runs(changed: dict[str, Any], said: str, given):
    with pytest.raises(mizarr.MizarrError, match=said):
        build("attribution_graph", **given | changed)


def test_the_command_line_says_in_one_line_what_does_not_fit(given, tmp_path: Path, capfd):
    pairs = [f"{name}={value}" for name, value in {**given, "zero_positions": 100}.items()]
    options = [part for pair in pairs for part in ("--set", pair)]
    assert run(["compute", "attribution_graph", "--store", str(tmp_path / "store"), *options]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and "more than 100 tokens" in err


def test_a_text_without_paragraphs_is_no_corpus(given, tmp_path: Path):
    (tmp_path / "empty.txt").write_text("\n\n \n")
    with pytest.raises(mizarr.MizarrError, match="expected at least one text"):
        build("attribution_graph", **given | {"corpus": str(tmp_path / "empty.txt")})


def test_presets_name_models_with_their_transcoders():
    assert chosen_preset(AttributionGraphsSettings()) == PRESETS["specimen"]
    chosen = chosen_preset(AttributionGraphsSettings(preset="gemma2-2b-426k", prompt="Paris is in"))
    assert chosen == ("google/gemma-2-2b", "mntss/clt-gemma-2-2b-426k", "Paris is in")
    with pytest.raises(mizarr.MizarrError, match=r"or set preset=llama3\.2-1b-524k"):
        chosen_preset(AttributionGraphsSettings(model="meta-llama/Llama-3.2-1B"))


def test_the_figure_has_the_edges_that_carry_most_and_one_out_of_each_feature(done: AttributionGraphs):
    nodes, edges, through = drawn_part(done.pruned, features=5, edges=8)
    kept, count = done.pruned.kept, done.graph.counts
    features = nodes[nodes < count.features]
    strongest = [one.node for one in done.strongest if kept.nodes[one.node]][:5]
    assert set(features) == set(strongest)
    assert set(nodes[nodes >= count.features]) == set(range(count.token_nodes.start, count.nodes))
    drawn = np.isin(kept.source, nodes) & np.isin(kept.target, nodes)
    best = np.flatnonzero(drawn)[np.argsort(-through[drawn], kind="stable")][:8]
    assert set(best) <= set(edges) <= set(np.flatnonzero(drawn))
    with_edges = [f for f in features if drawn[kept.source == f].any()]
    assert set(with_edges) <= set(kept.source[edges])
    into = np.bincount(kept.target, through, count.nodes)
    np.testing.assert_allclose(into[count.sources :], done.graph.logit_probabilities)


# -- the page


def test_labels_stand_where_features_are_named_and_change_no_key(
    done: AttributionGraphs, given: dict[str, Any]
):
    store, feature, before = done.store, done.strongest[0].feature, done.to_json()
    assert store is not None
    set_labels(store, done.dictionary, {feature: "towards <b>"})
    try:
        again = build("attribution_graph", **given)
        assert plan(again.nodes.values(), store).is_cached
        again.run(store, quiet=True)
        told = again.to_json()
        assert told["features"][0]["label"].startswith('"towards <b>", ')
        assert before["features"][0]["label"] == told["features"][0]["label"].removeprefix('"towards <b>", ')
        (shown,) = (each for each in again.shown if isinstance(each, Graph))
        assert shown.called == ((str(feature), "towards <b>"),)
    finally:
        set_labels(store, done.dictionary, {feature: ""})
    assert done.to_json()["features"] == before["features"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.browser
def test_the_page_shows_prunes_pins_and_saves_the_graph(done: AttributionGraphs, browser, tmp_path: Path):
    element = next(each for each in done.shown if isinstance(each, Graph))
    file, best = done.report(tmp_path / "graph.html"), done.strongest[0]
    number = ("layer", "number", "position")
    wanted = (best.feature.layer, best.feature.index, best.position)
    (node,) = (
        i
        for i in np.flatnonzero(element.kinds == 0).tolist()
        if tuple(int(getattr(element, name)[i]) for name in number) == wanted
    )
    with opened(browser, file) as here:
        page = here.page
        counted = page.locator(".counted")

        def says(pruned: Any) -> None:
            nodes = int(pruned.node_mask.sum())
            # Not wait_for_function: it evaluates text, which the page forbids.
            start = re.compile(rf"^\s*{nodes:,} of {done.graph.counts.nodes:,} node")
            page.locator(".counted", has_text=start).wait_for()
            edges = int(counted.inner_text().rpartition(", ")[2].split()[0].replace(",", ""))
            assert edges == len(pruned.edges["weight"])
            assert page.locator(".net [data-node]").count() == nodes

        says(done.pruned)
        page.locator("input[type=range]").nth(0).fill("0.95")
        says(done.graph.prune(0.95, 0.98))

        mark = page.locator(f".net [data-node='{node}']")
        mark.scroll_into_view_if_needed()
        mark.click()
        card = page.locator("section.pin")
        assert str(best.feature) in card.inner_text()
        assert card.locator(".effects .token").all_text_contents() == [*best.raised, *best.lowered]
        assert card.locator(".examples .shaded").count() > 0
        page.locator(".grouping input[type=text]").fill("first")
        page.locator("button", has_text="Group pinned").click()
        with page.expect_download() as waiting:
            page.locator("button", has_text="Save").click()
        state = json.loads(Path(waiting.value.path()).read_text())
        name = f"{best.feature.layer}_{best.feature.index}_{best.position}"
        assert state["supernodes"] == [["first", name]]
        assert state["pruningThreshold"] == 0.95
        assert here.complaints == []
        assert here.requests == [file.as_uri()]


@pytest.mark.slow
def test_on_the_specimen_features_explain_most_and_the_answer_is_french(tmp_path: Path):
    told = compute("attribution_graph", store=tmp_path / "store", corpus_tokens=500).to_json()
    assert told["logits"][0]["token"] == " French"
    assert told["replacement_score"] > 0.5 and told["completeness_score"] > 0.7


def test_its_defaults_are_those_of_circuit_tracers_command_line():
    chosen = AttributionGraphsSettings()
    assert (chosen.max_n_logits, chosen.desired_logit_prob, chosen.batch_size) == (10, 0.95, 256)
    assert (chosen.max_feature_nodes, chosen.update_interval) == (7500, 4)
    assert (chosen.node_threshold, chosen.edge_threshold) == (0.8, 0.98)
