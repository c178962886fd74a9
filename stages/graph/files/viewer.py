"""The files of circuit-tracer's graph viewer: `<slug>.json`, listed in graph-metadata.json.

Border: a pruned graph and a folder. Field by field as circuit-tracer 0.5.0 writes them, and Neuronpedia reads
them, but for the name of a graph over several dashboards: "custom-" and a digest that is the same in every
process, where the original has Python's salted hash.

An error node is called 0_{layer}_{position}, which is also what a feature of layer 0 whose index is that
layer is called. The format cannot tell them apart; a graph in which both are kept is written with a warning.
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
    """Write the graph, and its line among the folder's graphs; returns the path of the former.

    scan: which dashboards the features have; default what the graph says. Raises StageError without one,
    and for a slug that is no file name.
    """
    if not slug or slug != Path(slug).name or slug.startswith("."):
        raise StageError(f"expected a slug that is a file name, found {slug!r}")
    found = document(pruned, slug, scan=scan)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / METADATA
    graphs = json.loads(listing.read_text("utf-8"))["graphs"] if listing.exists() else []
    graphs = [each for each in graphs if each["slug"] != slug] + [found["metadata"]]
    path = folder / f"{slug}.json"
    _replace(path, found)
    _replace(listing, {"graphs": graphs})
    return path


def document(pruned: WrittenPart, slug: str, *, scan: str | Sequence[str] | None = None) -> dict[str, Any]:
    """What the viewer reads, as plain JSON values."""
    graph = pruned.graph
    scan = graph.scan if scan is None else scan
    if not scan:
        raise StageError(
            "expected scan, which names the dashboards of the features, found none in the graph; pass scan="
        )
    listed = [] if isinstance(scan, str) else [str(each) for each in scan]
    chosen = np.flatnonzero(pruned.node_mask)
    nodes = dict(zip(chosen.tolist(), _nodes(pruned, chosen), strict=True))
    ids = {number: node["node_id"] for number, node in nodes.items()}
    _warn_of_shared(ids)
    links = [
        {"source": ids[source], "target": ids[target], "weight": float(weight)}
        for target, source, weight in zip(
            pruned.kept.target.tolist(), pruned.kept.source.tolist(), pruned.kept.weight, strict=True
        )
    ]
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


def _nodes(pruned: WrittenPart, chosen: Any) -> list[dict[str, Any]]:
    """The kept nodes as the viewer has them."""
    graph = pruned.graph
    labels = graph.nodes.isel(node=chosen)
    probability, text = graph.logit_probabilities, graph.logit_tokens
    first, layers = graph.counts.sources, graph.counts.layers
    found = []
    for k, number in enumerate(chosen.tolist()):
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
            "influence": float(pruned.cumulative_scores[number]),
            "activation": None,
        }
        if kind == FEATURE:
            node |= {
                "node_id": f"{layer}_{feature}_{position}",
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
            share = float(probability[number - first])
            node |= {
                "node_id": f"{layers + 1}_{feature}_{position}",
                "feature": feature,
                "layer": str(layers + 1),
                "feature_type": "logit",
                "token_prob": share,
                "is_target_logit": number == first,
                "jsNodeId": f"L_{feature}-{position}",
                "clerp": f'Output "{text[number - first]}" (p={share:.3f})',
                "influence": None,
            }
        found.append(node)
    return found


def _warn_of_shared(ids: dict[int, str]) -> None:
    shared = [name for name, times in Counter(ids.values()).items() if times > 1]
    if shared:
        warnings.warn(
            f"{len(shared)} names stand for two nodes of this graph, for example {shared[0]!r}: the "
            "viewer's format calls the error of a layer as it calls the feature of layer 0 with that index; "
            "their edges are mixed up there",
            stacklevel=4,
        )


def _replace(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False), "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> tuple[xr.Dataset, xr.Dataset]:
    """A graph as the viewer has it, written here or by circuit-tracer: nodes and edges, as `PrunedGraph`
    gives them.

    nodes over node: id, kind, layer, position, feature, activation, cumulative, probability; the file's
    metadata and qParams as attributes. edges over edge: source and target, numbers of nodes, and weight.
    Raises StageError for a file that is no graph, or whose links name nodes it does not have.
    """
    import xarray as xr

    try:
        found = json_file(path, StageError)
        nodes, links = found["nodes"], found["links"]
        number = {node["node_id"]: k for k, node in enumerate(nodes)}
        columns = {name: [node[field] for node in nodes] for name, field in _READ.items()}
        kinds = [_KINDS[node["feature_type"]] for node in nodes]
        features = [_feature(node) for node in nodes]
        ends = [(link["source"], link["target"], link["weight"]) for link in links]
        metadata = found["metadata"]
    except MizarrError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(f"expected the JSON of a graph at {path}, found none ({error!r:.200})") from error
    stranger = next(
        (end for source, target, _ in ends for end in (source, target) if end not in number), None
    )
    if stranger is not None:
        raise StageError(f"{path} has a link with {stranger!r}, which is no node of it")
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
        attrs={"metadata": metadata, "qParams": found.get("qParams", {})},
    )
    edges = {
        "source": ("edge", np.array([number[source] for source, _, _ in ends], np.int64)),
        "target": ("edge", np.array([number[target] for _, target, _ in ends], np.int64)),
        "weight": ("edge", np.array([weight for _, _, weight in ends], float)),
    }
    return labelled, xr.Dataset(edges)


_KINDS = {
    "cross layer transcoder": FEATURE,
    "mlp reconstruction error": ERROR,
    "embedding": TOKEN,
    "logit": LOGIT,
}
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
    """Index of a feature, id of a token: in the name, where the field has something else."""
    kind = _KINDS[node["feature_type"]]
    return -1 if kind == ERROR else int(node["node_id"].split("_")[1])
