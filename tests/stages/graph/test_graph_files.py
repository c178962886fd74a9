"""circuit-tracer's files of a graph: read, written, read again; other files are refused."""

from __future__ import annotations

import json
import pickle
import pickletools
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from mizarr.stages.graph.files.viewer import read
from mizarr.stages.graph.graph import AttributionGraph
from mizarr.store.errors import StageError

from .reference import CIRCUITS, arrays, graph_of, meta, needs_reference

pytestmark = needs_reference


def saved() -> Path:
    return CIRCUITS / "cases" / "clt_p1" / "graph.pt"


def test_a_file_of_circuit_tracer_is_read():
    graph, expected = AttributionGraph.from_pt(saved()), arrays("clt_p1")
    np.testing.assert_array_equal(graph.adjacency, expected["adjacency_matrix"])
    np.testing.assert_array_equal(graph.active_features, expected["active_features"])
    assert graph.prompt == "<bos>she wrote a letter to her brother"
    assert graph.logit_tokens[0] == " dog"
    told = meta("clt_p1")["prune"][0]
    assert int(graph.prune().node_mask.sum()) == told["nodes_kept"]


def test_what_is_written_is_read_as_it_was(tmp_path: Path):
    graph = graph_of("clt_p1_top60")
    again = AttributionGraph.from_pt(graph.to_pt(tmp_path / "new" / "graph.pt"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["graph.pt"]
    for name in ("adjacency", "active_features", "selected_features", "logit_token_ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(graph, name))
    np.testing.assert_allclose(again.influence, graph.influence, rtol=1e-6)  # probabilities are float32 there
    assert again.logit_tokens == graph.logit_tokens
    assert again.dataset.attrs["model_type"] == "llama"
    assert again.dataset.attrs["scan"] == graph.dataset.attrs["scan"]


@pytest.mark.parametrize("name", ["specimen", "org/name"])
def test_a_file_says_where_others_find_the_tokenizer(name: str, tmp_path: Path):
    """Of the built-in model its folder: its name is ours alone."""
    graph = graph_of("clt_p1")
    graph.dataset.attrs["model"] = name
    with zipfile.ZipFile(graph.to_pt(tmp_path / "graph.pt")) as held:
        (pickled,) = (held.read(each) for each in held.namelist() if each.endswith("data.pkl"))
    texts = [value for code, value, _ in pickletools.genops(pickled) if isinstance(value, str)]
    told = texts[texts.index("tokenizer_name") + 1]
    assert told == name if name != "specimen" else (Path(told) / "tokenizer.json").is_file()


def test_the_classes_in_a_written_file_are_those_of_circuit_tracer(tmp_path: Path):
    path = graph_of("clt_p1").to_pt(tmp_path / "graph.pt")
    ours, theirs = (torch.serialization.get_unsafe_globals_in_checkpoint(each) for each in (path, saved()))
    assert sorted(ours) == sorted(theirs)


def test_a_file_with_another_class_is_refused(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    torch.save({"adjacency_matrix": Evil()}, tmp_path / "graph.pt", pickle_module=pickle)
    with pytest.raises(StageError, match="would run other code"):
        AttributionGraph.from_pt(tmp_path / "graph.pt")


@pytest.mark.parametrize("content", [{"adjacency_matrix": torch.zeros(3, 3)}, [1, 2]])
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, content):
    torch.save(content, tmp_path / "graph.pt")
    with pytest.raises(StageError, match="expected a graph saved by circuit-tracer"):
        AttributionGraph.from_pt(tmp_path / "graph.pt")
    with pytest.raises(StageError, match="found no file"):
        AttributionGraph.from_pt(tmp_path / "none.pt")
    (tmp_path / "cut.pt").write_bytes(saved().read_bytes()[:5000])
    with pytest.raises(StageError, match="cannot be read"):
        AttributionGraph.from_pt(tmp_path / "cut.pt")


@pytest.mark.parametrize("case", ["clt_p1", "plt_p1"])
@pytest.mark.filterwarnings("ignore:.* stand for two nodes")
def test_the_viewers_file_is_the_same_field_by_field(case: str, tmp_path: Path):
    expected = json.loads((CIRCUITS / "cases" / case / "graph_files" / f"ref-{case}.json").read_text())
    path = graph_of(case).prune().to_viewer(tmp_path, f"ref-{case}")
    found = json.loads(path.read_text())
    assert found["metadata"] == expected["metadata"]
    assert found["qParams"] == expected["qParams"]
    for kind, numbers in (("nodes", ("influence", "activation", "token_prob")), ("links", ("weight",))):
        assert len(found[kind]) == len(expected[kind])
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            for name in numbers:
                assert ours.pop(name) == pytest.approx(theirs.pop(name), abs=1e-5)
            assert ours == theirs
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())
    assert listed == json.loads((path.parent / "graph-metadata.json").read_text())
    assert listed["graphs"] == [expected["metadata"]]


@pytest.mark.filterwarnings("ignore:.* stand for two nodes")
def test_a_graph_written_again_moves_to_the_end_of_the_list(tmp_path: Path):
    kept = graph_of("plt_p1").prune()
    for slug in ("a", "b", "a"):
        kept.to_viewer(tmp_path, slug, scan=["one", "two"])
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [each["slug"] for each in listed] == ["b", "a"]
    assert listed[0]["transcoder_list"] == ["one", "two"]
    assert listed[0]["scan"] == listed[1]["scan"] != ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "graph-metadata.json"]


def test_names_that_stand_for_two_nodes_are_told(tmp_path: Path):
    graph = graph_of("clt_p0")
    kept = graph.prune(1.0, 1.0)
    labels = kept.nodes
    features = labels.where(labels["kind"] == "feature", drop=True)
    assert ((features["layer"] == 0) & (features["feature"] < 4)).any()  # or there is nothing to warn of
    with pytest.warns(UserWarning, match="ids of the viewer's file stand for two nodes"):
        kept.to_viewer(tmp_path, "graph")


def test_a_slug_that_is_no_file_name_is_refused(tmp_path: Path):
    with pytest.raises(StageError, match="file name"):
        graph_of("clt_p1").prune().to_viewer(tmp_path, "../graph")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.* stand for two nodes")
def test_the_viewers_file_is_read_back(tmp_path: Path):
    kept = graph_of("gemma2_p1").prune()
    path = kept.to_viewer(tmp_path, "graph")
    nodes, edges = read(path)
    own = kept.nodes
    linked = np.isin(own["node"], kept.edges.to_array()[:2]) | np.isin(own["kind"], ["token", "logit"])
    own = own.isel(node=np.flatnonzero(linked))
    for name in ("kind", "layer", "position", "feature", "activation"):
        np.testing.assert_array_equal(nodes[name], own[name])
    np.testing.assert_array_equal(own["node"].values[edges["target"]], kept.edges["target"])
    np.testing.assert_allclose(edges["weight"], kept.edges["weight"])
    assert nodes.attrs["metadata"]["slug"] == "graph"


@pytest.mark.filterwarnings("ignore:.* stand for two nodes")
def test_a_viewers_file_that_makes_no_sense_is_refused(tmp_path: Path):
    path = graph_of("clt_p1").prune().to_viewer(tmp_path, "graph")
    found = json.loads(path.read_text())
    found["links"][0]["source"] = "nobody"
    path.write_text(json.dumps(found))
    with pytest.raises(StageError, match="nobody"):
        read(path)
    path.write_text(path.read_text()[:400])
    with pytest.raises(StageError, match="expected JSON in"):
        read(path)


def test_graphml_and_parquet_hold_what_is_kept(tmp_path: Path):
    kept = graph_of("clt_p1").prune()
    root = ElementTree.parse(kept.to_graphml(tmp_path / "graph.graphml")).getroot()
    space = {"g": "http://graphml.graphdrawing.org/xmlns"}
    assert len(root.findall(".//g:node", space)) == int(kept.node_mask.sum())
    edges = root.findall(".//g:edge", space)
    assert [int(edge.attrib["target"]) for edge in edges] == kept.edges["target"].values.tolist()
    assert [float(edge[0].text or "") for edge in edges] == kept.edges["weight"].values.tolist()
    parquet = pytest.importorskip("pyarrow.parquet")
    kept.to_parquet(tmp_path)
    nodes, links = (
        parquet.read_table(tmp_path / f"{name}.parquet").to_pydict() for name in ("nodes", "edges")
    )
    np.testing.assert_array_equal(nodes["id"], np.flatnonzero(kept.node_mask))
    np.testing.assert_array_equal(links["weight"], kept.edges["weight"])
    np.testing.assert_array_equal(nodes["influence"], kept.nodes["influence"])
