"""Files of circuit-tracer's graph viewer: `<slug>.json`, listed in graph-metadata.json.

All fields are as circuit-tracer 0.5.0 writes them and Neuronpedia reads them, except the name of a graph with
features of several dashboards: "custom-" and a digest that is the same in every process, where the original
has Python's salted hash.

The id of an error node is 0_{layer}_{position}, which is also the id of the feature of layer 0 with that
layer as its index. The format cannot distinguish them; a graph that keeps both is written with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.digest import digest
from ....store.errors import MizarrError, StageError
from ....store.exchange.outside import json_file
from ..rows.nodes import ERROR, FEATURE, LOGIT, TOKEN

if TYPE_CHECKING:
    import xarray as xr

    from .written import WrittenPart

__all__ = ["document", "read", "write"]

METADATA = "graph-metadata.json"


def write(pruned: WrittenPart, folder: Path, slug: str, *, scan: str | Sequence[str] | None = None) -> Path:
    """Write a pruned graph for circuit-tracer's viewer, and add it to the folder's list of graphs.

    Arguments:
        pruned: The pruned graph.
        folder: Folder of the viewer's data.
        slug: Name of the graph, and of its file.
        scan: Names of the transcoders, by which the viewer finds dashboards; None for those of the graph.

    Returns:
        Path of the graph's file.

    Raises:
        StageError: There is no `scan`, or `slug` cannot be a file name.
    """
    if not slug or slug != Path(slug).name or slug.startswith("."):
        raise StageError(
            f"expected a slug that can be a file name, such as 'capital-of-france', found {slug!r}"
        )
    content = document(pruned, slug, scan=scan)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / METADATA
    graphs = json.loads(listing.read_text("utf-8"))["graphs"] if listing.exists() else []
    # A graph of the same name is replaced, in the list as on disk.
    graphs = [graph for graph in graphs if graph["slug"] != slug] + [content["metadata"]]
    path = folder / f"{slug}.json"
    # The listing last: it never names a file that does not exist yet.
    _replace(path, content)
    _replace(listing, {"graphs": graphs})
    return path


def document(pruned: WrittenPart, slug: str, *, scan: str | Sequence[str] | None = None) -> dict[str, Any]:
    """Contents of the viewer's file of a pruned graph, as JSON values.

    Arguments:
        pruned: The pruned graph.
        slug: Name of the graph.
        scan: Names of the transcoders, by which the viewer finds dashboards; None for those of the graph.

    Raises:
        StageError: There is no `scan`.
    """
    graph = pruned.graph
    scan = graph.scan if scan is None else scan
    if not scan:
        raise StageError(
            "expected the names of the transcoders, by which the viewer finds feature dashboards, found none "
            "in the graph; pass scan="
        )
    listed = [] if isinstance(scan, str) else [str(name) for name in scan]
    numbers = np.flatnonzero(pruned.node_mask)
    nodes = dict(zip(numbers.tolist(), _nodes(pruned, numbers), strict=True))
    ids = {number: node["node_id"] for number, node in nodes.items()}
    _warn_of_shared(ids)
    # float: JSON has no numpy.float32.
    links = [
        {"source": ids[source], "target": ids[target], "weight": float(weight)}
        for target, source, weight in zip(
            pruned.kept.target.tolist(), pruned.kept.source.tolist(), pruned.kept.weight, strict=True
        )
    ]
    # circuit-tracer leaves out nodes without links, except tokens and logits.
    linked = {end for link in links for end in (link["source"], link["target"])}
    always = ("embedding", "logit")
    metadata = {
        "slug": slug,
        "scan": scan if isinstance(scan, str) else f"custom-{digest('scan', listed)[:16]}",
        "transcoder_list": listed,
        "prompt_tokens": [str(text) for text in graph.dataset["input_text"].values],
        "prompt": graph.prompt,
        "node_threshold": pruned.node_threshold,
        "schema_version": 1,
    }
    return {
        "metadata": metadata,
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [n for n in nodes.values() if n["node_id"] in linked or n["feature_type"] in always],
        "links": links,
    }


def _nodes(pruned: WrittenPart, numbers: Any) -> list[dict[str, Any]]:
    """Nodes of a graph in the viewer's JSON form; `numbers` are their numbers in the whole graph."""
    graph = pruned.graph
    labels = graph.nodes.isel(node=numbers)
    probability, text = graph.logit_probabilities, graph.logit_tokens
    first_logit, layers = graph.counts.sources, graph.counts.layers
    nodes = []
    for k, number in enumerate(numbers.tolist()):
        kind = str(labels["kind"].values[k])
        layer, position, feature = (int(labels[name].values[k]) for name in ("layer", "position", "feature"))
        node: dict[str, Any] = {
            "node_id": "",
            "feature": -1,
            "layer": str(layer),
            "ctx_idx": position,
            "feature_type": "",
            "token_prob": 0.0,
            "is_target_logit": False,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "jsNodeId": "",
            "clerp": "",
            # circuit-tracer's viewer calls the cumulative score "influence".
            "influence": float(pruned.cumulative_scores[number]),
            "activation": None,
        }
        if kind == FEATURE:
            node |= {
                "node_id": f"{layer}_{feature}_{position}",
                # Cantor pairing of layer and index, as circuit-tracer has it.
                "feature": (layer + feature) * (layer + feature + 1) // 2 + feature,
                "feature_type": "cross layer transcoder",
                "jsNodeId": f"{layer}_{feature}-0",
                "activation": float(labels["activation"].values[k]),
            }
        elif kind == ERROR:
            node |= {
                "node_id": f"0_{layer}_{position}",
                "feature_type": "mlp reconstruction error",
                "jsNodeId": f"{layer}_{position}-0",
            }
        elif kind == TOKEN:
            node |= {
                "node_id": f"E_{feature}_{position}",
                "feature": position,
                "layer": "E",
                "feature_type": "embedding",
                "jsNodeId": f"E_{feature}-{position}",
            }
        elif kind == LOGIT:
            share = float(probability[number - first_logit])
            node |= {
                "node_id": f"{layers + 1}_{feature}_{position}",
                "feature": feature,
                "layer": str(layers + 1),
                "feature_type": "logit",
                "token_prob": share,
                "is_target_logit": number == first_logit,
                "jsNodeId": f"L_{feature}-{position}",
                "clerp": f'Output "{text[number - first_logit]}" (p={share:.3f})',
                "influence": None,
            }
        nodes.append(node)
    return nodes


def _warn_of_shared(ids: dict[int, str]) -> None:
    """Warn if the viewer's format gives two nodes the same id (see the docstring of this module)."""
    shared = [name for name, times in Counter(ids.values()).items() if times > 1]
    if shared:
        warnings.warn(
            f"{len(shared)} ids of the viewer's file stand for two nodes each, for example {shared[0]!r}: "
            "its format gives the error node of layer i the id of feature i of layer 0, so that the viewer "
            "mixes up their edges",
            stacklevel=4,
        )


def _replace(path: Path, value: Any) -> None:
    """Write a value as a JSON file, atomically."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False), "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> tuple[xr.Dataset, xr.Dataset]:
    """Read a graph from a file of the viewer, written by mizarr or circuit-tracer.

    Returns:
        (nodes, edges), laid out as in `PrunedGraph`. Nodes have id, kind, layer, position, feature,
        activation, cumulative and probability, [node], and the metadata and qParams of the file as
        attributes. Edges have source and target (numbers of nodes) and weight, [edge].

    Raises:
        StageError: The file holds no graph, or a link refers to a node that is not in the file.
    """
    import xarray as xr

    try:
        content = json_file(path, StageError)
        nodes, links = content["nodes"], content["links"]
        number = {node["node_id"]: k for k, node in enumerate(nodes)}
        columns = {name: [node[field] for node in nodes] for name, field in _READ.items()}
        kinds = [_KINDS[node["feature_type"]] for node in nodes]
        features = [_feature(node) for node in nodes]
        ends = [(link["source"], link["target"], link["weight"]) for link in links]
        metadata = content["metadata"]
    except MizarrError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(
            f"expected a graph file of circuit-tracer's viewer at {path}, found other JSON ({error!r:.200})"
        ) from error
    # Checked here: as a KeyError it would name neither the file nor the problem.
    unknown = next((end for source, target, _ in ends for end in (source, target) if end not in number), None)
    if unknown is not None:
        raise StageError(
            f"expected links between nodes of the graph in {path}, found a link with {unknown!r}, which is "
            "not among its nodes"
        )
    layers = [-1 if layer == "E" else int(layer) for layer in columns.pop("layer")]
    # The viewer puts logits one layer further up than the last stream.
    layers = [at - 1 if kind == LOGIT else at for at, kind in zip(layers, kinds, strict=True)]
    labelled = xr.Dataset(
        {
            "kind": ("node", np.array(kinds, str)),
            "layer": ("node", np.array(layers, np.int64)),
            "feature": ("node", np.array(features, np.int64)),
            **{
                name: ("node", np.array(values, _DTYPES.get(name, float))) for name, values in columns.items()
            },
        },
        attrs={"metadata": metadata, "qParams": content.get("qParams", {})},
    )
    edges = {
        "source": ("edge", np.array([number[source] for source, _, _ in ends], np.int64)),
        "target": ("edge", np.array([number[target] for _, target, _ in ends], np.int64)),
        "weight": ("edge", np.array([weight for _, _, weight in ends], float)),
    }
    return labelled, xr.Dataset(edges)


# `feature_type` of the viewer -> kind of node.
_KINDS = {
    "cross layer transcoder": FEATURE,
    "mlp reconstruction error": ERROR,
    "embedding": TOKEN,
    "logit": LOGIT,
}
# Name of the column -> field of the viewer's nodes.
_READ = {
    "id": "node_id",
    "layer": "layer",
    "position": "ctx_idx",
    "activation": "activation",
    "cumulative": "influence",
    "probability": "token_prob",
}
_DTYPES: dict[str, Any] = {"id": str, "position": np.int64}


def _feature(node: dict[str, Any]) -> int:
    """Index of a feature, or id of a token, from a node's id; -1 for an error node.

    The node's field "feature" holds other numbers.
    """
    kind = _KINDS[node["feature_type"]]
    return -1 if kind == ERROR else int(node["node_id"].split("_")[1])
