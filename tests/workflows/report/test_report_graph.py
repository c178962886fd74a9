"""Attribution graphs on report pages: what the browser shows, prunes, saves and loads is the graph's."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.corpus.encode import encode_nodes
from mizarr.stages.features.corpus.examples import top_examples
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.graph.files.viewer import document
from mizarr.stages.graph.graph import AttributionGraph, PrunedGraph
from mizarr.stages.logits.lens import format_text, format_token
from mizarr.store.errors import ShapeError
from mizarr.workflows.material.graph_views import examples_of, graph_views
from mizarr.workflows.report.page import render
from mizarr.workflows.views import Graph, Table, Values
from mizarr.workflows.views.blocks import size
from mizarr.workflows.views.graph.features import strongest_features
from mizarr.workflows.views.graph.graph import KINDS
from mizarr.workflows.workflow import Workflow
from tests.browser import Opened, chromium, opened
from tests.stages.graph.random_transcoders import save_random_transcoders
from tests.stages.graph.reference import CIRCUITS, arrays, edge_mask, meta, needs_reference
from tests.torch_free import without_torch

pytestmark = pytest.mark.wide

HOSTILE = "</script><img src=x onerror='window.hacked = 1'>"
WORDS = [" the", " of", " Paris", HOSTILE, "\n", " wrote", " river", " stone"]
THRESHOLDS = [(0.8, 0.98), (0.5, 0.9), (1.0, 1.0), (0.3, 0.5), (0.95, 0.7), (0.0, 0.0)]


def drawn_by_hand(seed: int = 0, layers: int = 3, positions: int = 5, each: int = 3) -> AttributionGraph:
    """A graph of random weights: `each` features at every layer and position but the first."""
    rng = np.random.default_rng(seed)
    active = np.array(
        [
            (layer, position, feature)
            for layer in range(layers)
            for position in range(1, positions)
            for feature in sorted(rng.choice(50, each, replace=False).tolist())
        ]
    )
    logits = 4
    source_layer = np.concatenate([active[:, 0], np.arange(layers).repeat(positions), np.full(positions, -1)])
    target_layer = np.concatenate([active[:, 0], np.full(logits, layers)])
    weights = rng.normal(size=(len(active) + logits, len(source_layer))).astype(np.float32) ** 3
    weights[source_layer >= target_layer[:, None]] = 0
    shares = np.array([0.5, 0.3, 0.1, 0.05])
    return AttributionGraph(
        xr.Dataset(
            {
                "weights": (("target", "source"), weights),
                "active_features": (("active", "axis"), active),
                "activation_values": ("active", rng.uniform(0.1, 3, len(active)).astype(np.float32)),
                "selected_features": ("selected", np.arange(len(active))),
                "input_tokens": ("input_position", 100 + np.arange(positions)),
                "input_text": ("input_position", np.array(["<s>", " The", HOSTILE, " of", " a"], object)),
                "logit_token_ids": ("logit", np.array([7, 8, 9, 10])),
                "logit_text": ("logit", np.array([" Paris", HOSTILE, "\n", " stone"], object)),
                "logit_probabilities": ("logit", shares),
            },
            attrs={"input_string": "The x of a", "n_layers": layers, "scan": "by hand"},
        )
    )


def known_of(graph: AttributionGraph) -> dict[str, Any]:
    """Random logit effects, and two examples of every feature but those of layer 0."""
    rng = np.random.default_rng(1)
    size, dims = (graph.counts.features, 3), ("feature", "rank", "window")
    effects = {
        name: (("selected", "rank"), values)
        for name, values in {
            "raised": rng.integers(0, len(WORDS), size),
            "raised_by": -np.sort(-rng.uniform(0, 2, size)),
            "lowered": rng.integers(0, len(WORDS), size),
            "lowered_by": np.sort(-rng.uniform(0, 2, size)),
        }.items()
    }
    examples = {}
    for layer in range(1, graph.counts.layers):
        here = np.unique(graph.active_features[graph.active_features[:, 0] == layer][:, 2])
        shape = (len(here), 2, 6)
        tokens = rng.integers(-1, len(WORDS), shape).astype(np.int32)
        values = np.where(rng.random(shape) < 0.5, 0, rng.random(shape)).astype(np.float32)
        examples[layer] = xr.Dataset(
            {"token_id": (dims, tokens), "activation": (dims, values)}, coords={"feature": here}
        )
    return {"vocabulary": WORDS, "effects": xr.Dataset(effects), "examples": examples}


@dataclass(frozen=True)
class Nothing:
    """No settings."""


class Page(Workflow):
    """A page with one element."""

    name, question, settings_type = "graph", "What brings about the next token?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}

    def __init__(self, element: Any) -> None:
        super().__init__(Nothing())
        self.element = element

    def views(self) -> Iterator[Any]:
        yield self.element


def views_of(
    pruned: PrunedGraph, *, examples: Any = None, sources: tuple[str, ...] = (), **words: Any
) -> tuple[Values, Graph, Table]:
    """What is said of a graph, with its 15 strongest features."""
    graph, strongest = pruned.graph, strongest_features(pruned, **words, most=15)
    scores = {name: getattr(graph, name) for name in ("replacement_score", "completeness_score")}
    return graph_views(pruned, strongest, scores, examples=examples, sources=sources, **words)


# -- what is embedded


def test_all_edges_among_the_nodes_here_are_here_strongest_first():
    graph = drawn_by_hand()
    whole = Graph.of(graph.prune(), title="g")
    assert (
        len(whole.source)
        == whole.n_edges
        == np.count_nonzero(
            graph.adjacency.values[:, graph.influence + (graph.nodes["kind"].values != "error") > 0]
        )
    )
    assert (np.diff(abs(whole.weight)) <= 0).all()
    some = Graph.of(graph.prune(), title="g", edges=len(whole.source) // 2)
    assert len(some.source) == some.n_edges <= len(whole.source) // 2
    assert 0.8 <= some.share < whole.share == 1
    labels = graph.nodes
    key = ("kind", "layer", "position", "feature")
    number = {each: i for i, each in enumerate(zip(*(labels[name].values for name in key), strict=True))}
    place = [
        number[KINDS[kind], *rest]
        for kind, *rest in zip(some.kinds, some.layer, some.position, some.number, strict=True)
    ]
    among = graph.adjacency.values[np.ix_(place, place)]
    np.testing.assert_array_equal(among[some.target, some.source], some.weight)
    assert np.count_nonzero(among) == len(some.source)
    inner = graph.nodes["kind"].isin(["feature", "error"]).values
    assert set(np.flatnonzero((graph.prune(some.share, 1.0).cumulative_scores <= some.share) & inner)) == {
        i for i in place if inner[i]
    }


def test_where_the_first_thresholds_nodes_have_too_many_edges_the_weakest_are_left_out():
    graph = drawn_by_hand()
    few = Graph.of(graph.prune(), title="g", edges=50)
    mask = graph.prune(0.8, 1.0).node_mask
    assert len(few.source) == 50 < few.n_edges
    assert set(few.cumulative[few.kinds < 2]) == set(
        graph.prune().cumulative_scores[mask & (graph.nodes["kind"].isin(["feature", "error"]).values)]
    )
    again = few.limited(20)
    assert (len(again.source), again.n_edges) == (20, few.n_edges)


def test_a_page_without_room_has_fewer_examples_then_fewer_edges():
    graph = drawn_by_hand(each=12)
    whole = Graph.of(graph.prune(), title="g", **known_of(graph))
    assert whole.within(size(whole)) is whole
    bare = whole.within(size(whole) - 1)
    assert bare.notes.example_words.size == 0 and len(bare.source) == len(whole.source)
    small = whole.within(size(bare) // 2)
    assert isinstance(small, Graph) and size(small) <= size(bare) // 2
    assert len(small.notes.raised) <= len(whole.notes.raised)
    assert whole.within(100).kind == "note"


def test_the_same_graph_gives_the_same_bytes():
    first, second = (
        render(Page(Graph.of(graph.prune(), title="g", **known_of(graph))))
        for graph in (drawn_by_hand(), drawn_by_hand())
    )
    assert first == second


def test_a_page_about_a_graph_has_its_scores_and_its_strongest_features():
    graph = drawn_by_hand()
    known = known_of(graph)
    scores, element, strongest = views_of(graph.prune(), **known, sources=("graph",))
    assert dict(scores.pairs)["replacement score"] == f"{graph.replacement_score:.3f}"
    pruned = graph.prune()
    kinds = graph.nodes["kind"].values[pruned.node_mask]
    assert dict(scores.pairs)["features kept"] == f"{(kinds == 'feature').sum()} of {graph.counts.features}"
    assert (element.node_threshold, element.edge_threshold, element.n_nodes) == (
        0.8,
        0.98,
        graph.counts.nodes,
    )
    best = int(np.argmax(graph.influence[: graph.counts.features]))
    layer, position, feature = graph.active_features[best]
    cells = ["".join(run.text for run in cell) for cell in strongest.rows[0]]
    text = {1: " The", 2: HOSTILE, 3: " of", 4: " a"}[int(position)]
    assert cells[:2] == [f"L{layer}:{feature}", f"{position} {format_token(text)}"]
    assert float(cells[3]) == pytest.approx(graph.influence[best], abs=1e-4)
    raised = known["effects"]["raised"].values[best]
    assert cells[4] == " · ".join(format_token(WORDS[i]) for i in raised)
    assert {each.sources for each in (scores, element, strongest)} == {("graph",)}
    assert len(views_of(graph.prune())[2].columns) == 4


def test_texts_of_a_stored_corpus_reach_the_features_of_a_graph(tmp_path):
    model, prompts = mizarr.Model.from_pretrained("specimen"), ["The capital of France is", "It was a river"]
    clt = mizarr.Dictionary.from_pretrained(
        save_random_transcoders(tmp_path / "clt", model, "clt-jumprelu", features=30)
    )
    store = mizarr.open_store(tmp_path / "store")
    graph = mizarr.attribution_graph(model, clt, prompts[0], store=store)
    states = CaptureNode(model, prompts, [str(point) for point in clt.read_hooks])
    encoded = encode_nodes(clt, states)
    ranked = {layer: top_examples.on(encoded=node, k=3) for layer, node in encoded.items()}
    run(ranked.values(), store, quiet=True)
    texts, tops = ({layer: node.open(store) for layer, node in nodes.items()} for nodes in (encoded, ranked))
    vocabulary = [str(i) for i in range(model.config.vocab_size)]
    _, element, _ = views_of(
        graph.prune(1.0), vocabulary=vocabulary, examples=examples_of(graph, texts, tops, most=2)
    )
    assert element.notes.example_words.shape[1] == 2
    for node in np.flatnonzero(element.kinds == 0).tolist():
        layer, feature, row = (int(getattr(element, name)[node]) for name in ("layer", "number", "row"))
        best = float(tops[layer]["value"].sel(feature=feature)[0])
        values = element.notes.example_values[row, 0]
        assert best == pytest.approx(values.max()) and best > 0
        place = int(tops[layer]["token"].sel(feature=feature)[0])
        word = element.notes.words[element.notes.example_words[row, 0, int(values.argmax())]]
        assert word == str(int(texts[layer]["token_id"][place]))


def test_a_page_of_a_stored_graph_needs_no_torch(tmp_path):
    (tmp_path / "graph.pickle").write_bytes(pickle.dumps(drawn_by_hand().dataset))
    said = without_torch(
        """
import pickle
import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.corpus.encode import encode_nodes
from mizarr.stages.features.corpus.examples import top_examples
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.graph.graph import AttributionGraph
from mizarr.workflows.material.graph_views import examples_of, graph_views
from mizarr.workflows.views.graph.features import strongest_features
pruned = AttributionGraph(pickle.load(open(sys.argv[1], "rb"))).prune()
scores = {name: getattr(pruned.graph, name) for name in ("replacement_score", "completeness_score")}
views = graph_views(pruned, strongest_features(pruned, most=15), scores)
print(json.dumps([view.kind for view in views]))
""",
        tmp_path / "graph.pickle",
    )
    assert said == ["values", "graph", "table"]


def test_notes_of_another_graph_are_refused():
    graph, other = drawn_by_hand(), drawn_by_hand(each=2)
    with pytest.raises(ShapeError, match="effects"):
        Graph.of(graph.prune(), title="g", **known_of(other))


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """visit(element) opens its page; when the test is over it must have been quiet, and alone."""
    with ExitStack() as open_pages:
        held: list[tuple[Opened, str]] = []

        def open_page(element: Graph, **view: Any) -> Opened:
            file = Page(element).report(tmp_path / f"{len(held)}.html")
            held.append((open_pages.enter_context(opened(browser, file, **view)), file.as_uri()))
            return held[-1][0]

        yield open_page
        for page, address in held:
            assert page.complaints == []
            assert page.requests == [address]


def told(here: Opened) -> tuple[int, int]:
    """Nodes and edges the page says are left."""
    nodes, edges = re.match(r"([\d,]+) of [\d,]+ nodes, ([\d,]+) edges", counted(here)).groups()
    return int(nodes.replace(",", "")), int(edges.replace(",", ""))


def counted(here: Opened) -> str:
    text: str = here.page.locator(".counted").inner_text()
    return text


def prune(here: Opened, nodes: float, edges: float) -> None:
    """Move both sliders."""
    for k, share in enumerate((nodes, edges)):
        here.page.locator("input[type=range]").nth(k).fill(str(share))
    here.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def drawn(here: Opened) -> set[int]:
    return set(here.page.locator(".net [data-node]").evaluate_all("all => all.map(e => +e.dataset.node)"))


def edges_drawn(here: Opened) -> set[int]:
    """Edges of what is pointed at or pinned."""
    found = here.page.locator(".net-field > g:nth-of-type(3) path")
    return set(found.evaluate_all("all => all.map(e => +e.dataset.edge)"))


def point(here: Opened, node: int) -> Any:
    """Point at a node; the tooltip."""
    mark = here.page.locator(f".net [data-node='{node}']")
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    here.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    here.page.wait_for_selector(".tip.on")
    return here.page.locator(".tip")


def press(here: Opened, node: int) -> None:
    point(here, node)
    here.page.mouse.down()
    here.page.mouse.up()


def shown(values: float) -> str:
    return f"{values:.4g}"


@pytest.mark.browser
def test_sliders_keep_what_prune_keeps(visit):
    graph = drawn_by_hand()
    element = Graph.of(graph.prune(), title="g")
    here = visit(element)
    for nodes, edges in THRESHOLDS:
        prune(here, nodes, edges)
        kept = graph.prune(nodes, edges)
        assert told(here) == (int(kept.node_mask.sum()), len(kept.kept.weight)), (nodes, edges)
        assert len(drawn(here)) == kept.node_mask.sum()
        cumulative = element.cumulative[sorted(drawn(here))]
        np.testing.assert_allclose(np.sort(cumulative), np.sort(kept.cumulative_scores[kept.node_mask]))


@pytest.mark.browser
@needs_reference
@pytest.mark.parametrize("case", ["clt_p1", "plt_p1"])
def test_the_reference_circuits_are_pruned_in_the_page_as_circuit_tracer_does(case, visit):
    found, said = arrays(case), meta(case)
    graph = AttributionGraph(of_reference(case))
    here = visit(Graph.of(graph.prune(), title=case))
    for k, thresholds in enumerate(said["prune"]):
        prune(here, thresholds["node_threshold"], thresholds["edge_threshold"])
        mask = found[f"prune{k}_node_mask"]
        assert told(here) == (int(mask.sum()), int(edge_mask(case, k).sum()))
    file = CIRCUITS / "cases" / case / "graph_files" / f"ref-{case}.json"
    viewer = json.loads(file.read_text())
    prune(here, said["prune"][0]["node_threshold"], said["prune"][0]["edge_threshold"])
    assert told(here)[1] == len(viewer["links"])


def of_reference(case: str) -> xr.Dataset:
    """The dataset of a reference graph, from its arrays."""
    found, said = arrays(case), meta(case)
    features, logits = len(found["selected_features"]), len(found["logit_token_ids"])
    rows = np.r_[:features, len(found["adjacency_matrix"]) - logits : len(found["adjacency_matrix"])]
    texts = [each["token"] for each in said["logit_targets"]]
    return xr.Dataset(
        {
            "weights": (("target", "source"), found["adjacency_matrix"][rows][:, :-logits]),
            "active_features": (("active", "axis"), found["active_features"]),
            "activation_values": ("active", found["activation_values"]),
            "selected_features": ("selected", found["selected_features"]),
            "input_tokens": ("input_position", found["input_tokens"]),
            "input_text": ("input_position", np.array(said["token_strings"], object)),
            "logit_token_ids": ("logit", found["logit_token_ids"]),
            "logit_text": ("logit", np.array(texts, object)),
            "logit_probabilities": ("logit", found["logit_probabilities"].astype(float)),
        },
        attrs={"input_string": said["prompt"], "n_layers": said["n_layers"], "scan": "local"},
    )


@pytest.mark.browser
def test_a_node_pointed_at_tells_its_numbers_and_shows_its_edges(visit):
    graph = drawn_by_hand()
    element = Graph.of(graph.prune(), title="g", **known_of(graph))
    here = visit(element)
    prune(here, 1.0, 1.0)
    for node in sorted(drawn(here))[::7]:
        kind = KINDS[element.kinds[node]]
        tip = point(here, node)
        text = tip.inner_text()
        if kind == "feature":
            assert f"L{element.layer[node]}:{element.number[node]} feature" in text
            assert f"at position {element.position[node]}" in text
            assert f"activation {shown(element.activation[node])}" in text
        if kind == "logit":
            assert f"{100 * element.probability[node]:.1f}%" in text
        else:
            assert f"influence {shown(element.influence[node])}" in text
            assert f"cumulative {shown(element.cumulative[node])}" in text
        for heading, side in (("from", element.target), ("to", element.source)):
            mine = element.weight[side == node]
            box = tip.locator(".two > div", has=here.page.locator(f"h6:text-is('{heading}')"))
            assert box.count() == (len(mine) > 0)
            if len(mine):
                said = list(map(float, box.locator(".weight").all_inner_texts()))
                np.testing.assert_allclose(said, mine[:5], rtol=6e-3)
        linked = set(np.flatnonzero((element.source == node) | (element.target == node)).tolist())
        assert edges_drawn(here) == linked


@pytest.mark.browser
def test_a_feature_tells_what_it_raises_and_where_it_is_most_active(visit):
    graph = drawn_by_hand()
    known = known_of(graph)
    element = Graph.of(graph.prune(), title="g", **known)
    here = visit(element)
    prune(here, 1.0, 1.0)
    seen = set()
    for node in [i for i in sorted(drawn(here)) if element.kinds[i] == 0][::5]:
        layer, position, feature = (
            int(getattr(element, name)[node]) for name in ("layer", "position", "number")
        )
        at = graph.active_features.tolist().index([layer, position, feature])
        first = next(
            i for i, (a, _, b) in enumerate(graph.active_features.tolist()) if (a, b) == (layer, feature)
        )
        tip = point(here, node)
        said = tip.locator(".effects .token").all_text_contents()
        expected = [
            format_token(WORDS[i])
            for name in ("raised", "lowered")
            for i in known["effects"][name][first].values
        ]
        assert said == expected, at
        texts = tip.locator(".examples .shaded").all_text_contents()
        seen.add(layer)
        if layer == 0:
            assert texts == []
            continue
        mine = known["examples"][layer].sel(feature=feature)["token_id"].values
        assert texts == ["".join(format_text(WORDS[i]) for i in line if i >= 0) for line in mine]
    assert seen == {0, 1, 2}
    assert here.page.evaluate("window.hacked") is None


@pytest.mark.browser
def test_pinned_nodes_stay_and_lead_to_others(visit):
    element = Graph.of(drawn_by_hand().prune(), title="g")
    here = visit(element)
    first, second = [i for i in sorted(drawn(here)) if element.kinds[i] == 0][:2]
    for node in (first, second):
        press(here, node)
    here.page.mouse.move(0, 0)
    cards = here.page.locator("section.pin")
    assert cards.evaluate_all("all => all.map(e => +e.dataset.node)") == [second, first]
    kept = edges_drawn(here)
    ends = {*element.source[sorted(kept)].tolist(), *element.target[sorted(kept)].tolist()}
    assert {first, second} <= ends
    cards.first.locator("button.to-node").first.click()
    assert cards.count() == 3
    here.page.wait_for_selector(".tip.on")
    cards.nth(1).locator(".close").click()
    assert second not in cards.evaluate_all("all => all.map(e => +e.dataset.node)")
    here.page.locator("button", has_text="Unpin all").click()
    assert cards.count() == 0
    press(here, first)
    prune(here, 0.0, 0.5)
    assert "below the threshold" in cards.inner_text()


@pytest.mark.browser
def test_keys_walk_through_the_graph_and_pin(visit):
    element = Graph.of(drawn_by_hand().prune(), title="g")
    here = visit(element)
    here.page.locator(".net").focus()
    reached = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "End", "ArrowUp", "ArrowLeft"):
        here.page.keyboard.press(key)
        here.page.wait_for_timeout(80)
        reached.append(int(here.page.locator(".net .over").get_attribute("data-node")))
    assert element.kinds[reached[0]] == KINDS.index("logit")
    levels = [element.layer[i] for i in reached[:3]]
    assert levels[0] > levels[1] >= levels[2]
    said = here.page.locator(".unseen[aria-live]").inner_text()
    assert f"position {element.position[reached[-1]]}" in said
    here.page.keyboard.press("Enter")
    assert int(here.page.locator("section.pin").get_attribute("data-node")) == reached[-1]
    here.page.keyboard.press("Escape")
    assert here.page.locator(".net .over").count() == 0


def save(here: Opened) -> tuple[Path, dict[str, Any]]:
    with here.page.expect_download() as waiting:
        here.page.locator("button", has_text="Save").click()
    path = Path(waiting.value.path())
    return path, json.loads(path.read_text())


@pytest.mark.browser
def test_a_name_that_stands_for_two_nodes_is_told_when_it_is_saved(visit):
    element = Graph.of(drawn_by_hand().prune(), title="g")
    here = visit(element)
    prune(here, 1.0, 1.0)
    errors = [i for i in sorted(drawn(here)) if element.kinds[i] == 1]
    features = {
        (0, element.number[i], element.position[i])
        for i in drawn(here)
        if element.kinds[i] == 0 and element.layer[i] == 0
    }
    shared = next(i for i in errors if (0, element.layer[i], element.position[i]) in features)
    for node in (next(i for i in errors if element.layer[i] == 2), shared):
        press(here, node)
        _, state = save(here)
        name = f"0_{element.layer[node]}_{element.position[node]}"
        assert state["clickedId"] == name
        said = here.page.locator("[role=status]").inner_text()
        assert (f"{name} is also the name of a feature" in said) == (node == shared)


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore:.* stand for two nodes")
def test_groups_are_saved_as_the_viewer_has_them_and_loaded_again(visit, tmp_path):
    graph = drawn_by_hand()
    element = Graph.of(graph.prune(), title="g")
    here = visit(element)
    features = [i for i in sorted(drawn(here)) if element.kinds[i] == 0]
    ends = [next(i for i in sorted(drawn(here)) if element.kinds[i] == kind) for kind in (2, 3)]
    for node in features[:3]:
        press(here, node)
    here.page.locator(".grouping input[type=text]").fill(HOSTILE)
    here.page.locator("button", has_text="Group pinned").click()
    for node in features[3:5]:
        press(here, node)
    here.page.locator(".grouping input[type=text]").fill("two")
    here.page.keyboard.press("Enter")
    for node in ends:
        press(here, node)
    assert here.page.locator(".pill").count() == 2
    colours = here.page.locator(".net .grouped").evaluate_all("all => all.map(e => e.style.stroke)")
    assert len(colours) == 5 and len(set(colours)) == 2
    prune(here, 0.7, 0.98)
    path, state = save(here)
    known = document(graph.prune(1.0, 1.0), "x")["nodes"]

    def named(node: int) -> str:
        """By what the viewer's own nodes say."""
        kinds = ("cross layer transcoder", "mlp reconstruction error", "embedding", "logit")
        (found,) = (
            each["node_id"]
            for each in known
            if each["feature_type"] == kinds[element.kinds[node]]
            and each["ctx_idx"] == element.position[node]
            and (element.kinds[node] != 0 or int(each["layer"]) == element.layer[node])
            and (element.kinds[node] == 2 or int(each["node_id"].split("_")[1]) == element.number[node])
        )
        return found

    assert state["supernodes"] == [[HOSTILE, *map(named, features[:3])], ["two", *map(named, features[3:5])]]
    assert state["pinnedIds"] == [named(i) for i in (*ends, *features[:5])]
    assert (state["linkType"], state["sg_pos"], state["pruningThreshold"]) == ("both", "", 0.7)

    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"qParams": {**state, "pinnedIds": [*state["pinnedIds"], "9_9_9"]}}))
    for file, lost in ((path, False), (whole, True)):
        there = visit(element)
        there.page.locator("input[type=file]").set_input_files(file)
        there.page.wait_for_selector(".pill")
        told_of = "loaded 2 groups and 2 pins" + ("; 1 node is not on this page" if lost else "")
        assert there.page.locator("[role=status]").inner_text() == told_of
        assert there.page.locator(".pill text").all_text_contents() == [HOSTILE, "two"]
        assert (
            there.page.locator("section.pin").evaluate_all("all => all.map(e => +e.dataset.node)")
            == ends[::-1]
        )
        assert told(there) == told(here)
        assert save(there)[1] == state
        assert there.page.evaluate("window.hacked") is None
    bad = tmp_path / "bad.json"
    bad.write_text('{"supernodes": "no"}')
    here.page.locator("input[type=file]").set_input_files(bad)
    # Not wait_for_function: it evaluates text, which the page forbids.
    here.page.locator("[role=status]", has_text="expected").wait_for()
    assert here.page.locator(".pill").count() == 2, "what was there stays"


@pytest.mark.browser
def test_a_group_tells_the_sums_of_its_members_edges(visit):
    element = Graph.of(drawn_by_hand().prune(edge_threshold=1.0), title="g")
    features = [
        i for i in range(len(element.kinds)) if element.kinds[i] == 0 and element.cumulative[i] < 0.7
    ][-3:]
    ids = [f"{element.layer[i]}_{element.number[i]}_{element.position[i]}" for i in features]
    here = visit(Graph.of(drawn_by_hand().prune(edge_threshold=1.0), title="g", supernodes=(("mine", *ids),)))
    here.page.locator(".chip button").first.click()
    card = here.page.locator("section.pin")
    alive = drawn(here)
    sums: dict[int, float] = {}
    for source, target, weight in zip(element.source, element.target, element.weight, strict=True):
        if target in features and source not in features and source in alive:
            sums[int(source)] = sums.get(int(source), 0.0) + float(weight)
    expected = sorted(sums.values(), key=abs, reverse=True)[:12]
    said = card.locator(".two > div").first.locator(".weight").all_inner_texts()
    np.testing.assert_allclose(list(map(float, said)), expected, rtol=6e-3)
    influence = float(sum(element.influence[features]))
    assert f"influence together {shown(influence)}" in card.inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_graph_fits_its_window_and_is_not_blank(width, dark, visit):
    from PIL import Image

    graph = drawn_by_hand(each=12)
    here = visit(Graph.of(graph.prune(), title="g", **known_of(graph)), width=width, dark=dark)
    press(here, min(drawn(here)))
    assert here.page.evaluate("document.documentElement.scrollWidth") <= width
    inner, outer = here.page.locator(".net").evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert (inner > outer) == (width == 400), "it scrolls inside itself where there is no room"
    picture = Image.open(io.BytesIO(here.page.locator(".net").screenshot())).convert("RGB")
    assert len(picture.getcolors(1 << 24)) > 100
    apart = here.page.evaluate(
        """() => {
          const marks = [...document.querySelectorAll(".net circle, .net path[data-node]")];
          const dots = marks.map(e => e.getBoundingClientRect());
          const middle = (box) => [box.x + box.width / 2, box.y + box.height / 2];
          const near = (a, b) => Math.hypot(middle(a)[0] - middle(b)[0], middle(a)[1] - middle(b)[1]);
          return Math.min(...dots.flatMap((a, i) => dots.slice(i + 1).map((b) => near(a, b))));
        }"""
    )
    assert apart >= 13, "no dot lies on another"
