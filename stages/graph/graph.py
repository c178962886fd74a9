"""Functions and classes for users: compute, read, prune and save the attribution graph of a prompt.

    graph = mizarr.attribution_graph(model, clt, "The capital of France is", store=store)
    graph.adjacency                                # [target, source], lazy where it is large
    graph.prune(node_threshold=0.8, edge_threshold=0.98).nodes
    graph.to_pt("graph.pt")

Edges are direct effects of tokens, features and errors on each other and on the next-token logits (Ameisen et
al. 2025, "Circuit Tracing"), with the definitions, layout and numbers of circuit-tracer 0.5.0.

node.py computes a graph; files/ reads and writes files of other programs.

Axes: see rows/nodes.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...store.display import html
from ...store.errors import PlanError
from ..options import split_options, takes_options
from .node import GraphNode
from .options import AttributionOptions, GraphOptions
from .pruning import KeptPart, kept_part
from .rows.influence import GraphRows, Influence, influence, scores
from .rows.nodes import NodeCounts, counts_of, node_labels
from .rows.selection import RowSelection
from .rows.targets import choose, prompt_tokens

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ..features.dictionary import Dictionary
    from ..forward.models.model import Model
    from ..forward.models.source import ModelSource

__all__ = ["AttributionGraph", "PrunedGraph", "attribution_graph", "graph_node"]

_IN_MEMORY = 1 << 28
"""Largest size in bytes of `adjacency` as a numpy array; a larger one is a lazy dask array."""


@takes_options(AttributionOptions)
def attribution_graph(
    model: Model | str | Path,
    dictionary: Dictionary | str | Path,
    prompt: Any,
    *,
    store: Store | None = None,
    cluster: str | None = None,
    workers: int = 0,
    progress: bool = False,
    **options: Any,
) -> AttributionGraph:
    """Compute the attribution graph of one prompt.

    With a store, a graph is computed only once, and a killed computation continues.

    Arguments:
        model: A loaded model, or the name of a model.
        dictionary: Transcoders that were trained on the model.
        prompt: A text, which gets a BOS token in front if it has none, or token ids.
        store: Store for rows and graph; None keeps the graph in memory only.
        cluster: Address of a Dask scheduler whose workers compute the rows of large graphs; they load the
            model by its name.
        workers: Number of worker processes on this machine (see `pipeline.run`).
        progress: Whether to show a progress bar on stderr.
        options: See below.

    Raises:
        DictionaryError: The dictionary does not fit the model.
        PromptError, TokenizerError, ShapeError: The prompt or a target is invalid.
        PlanError: The memory is too small, or workers cannot access model or store; nothing is stored.
    """
    from ...pipeline import run
    from ...store import open_store

    node = graph_node(model, dictionary, prompt, **options)
    if store is not None:
        run(node, store, cluster=cluster, workers=workers, quiet=not progress)
        return AttributionGraph(node.open(store))
    if cluster is not None:
        raise PlanError(
            f"expected a store that the workers of the cluster {cluster} can write to, found none; pass "
            "store=, or use workers= on this machine"
        )
    with tempfile.TemporaryDirectory(prefix="mizarr-graph-") as folder:
        # No fsync: the folder is deleted below.
        temporary_store = open_store(folder, durability="process")
        run(node, temporary_store, workers=workers, quiet=not progress)
        return AttributionGraph(node.open(temporary_store).load())


@takes_options(AttributionOptions)
def graph_node(
    model: Model | ModelSource | str | Path,
    dictionary: Dictionary | str | Path,
    prompt: Any,
    **options: Any,
) -> GraphNode:
    """Plan node that computes an attribution graph, for use with other nodes of a workflow.

    Nothing is computed, and torch is not imported.

    Arguments:
        model: A loaded model, its name, or the source that other nodes of the workflow use.
        dictionary: Transcoders made for the model, or the name or path from which they are opened.
        prompt: As for `attribution_graph`.
        options: Fields of `AttributionOptions`, listed below.

    Raises:
        ConfigError: Attribution graphs do not support the model's layers.
        ModelNotFound: There is no directory or cached repository of the dictionary's name.
        DictionaryError: The dictionary's files are invalid, or it does not fit the model.
        PromptError, TokenizerError, ShapeError: The prompt or a target is invalid.
        StageError: The arithmetic is neither "float32" nor "float64".
        PlanError: The memory is too small.
    """
    from ..features.dictionary import Dictionary
    from ..forward.models.source import ModelSource

    (values,) = split_options("attribution_graph", options, AttributionOptions)
    graph_options = AttributionOptions(**values)
    source = ModelSource.of(model)
    opened = dictionary if isinstance(dictionary, Dictionary) else Dictionary.from_pretrained(dictionary)
    targets = choose(
        graph_options.targets,
        tokenizer=source.tokenizer,
        vocab_size=source.config.vocab_size,
        hidden_size=source.config.hidden_size,
        most=graph_options.max_n_logits,
        probability=graph_options.desired_logit_prob,
    )
    # circuit-tracer ranks features again after update_interval batches.
    selection = RowSelection(
        graph_options.max_feature_nodes, graph_options.batch_size * graph_options.update_interval
    )
    about = GraphOptions(targets, selection, graph_options.zero_positions, graph_options.arithmetic)
    tokens = prompt_tokens(prompt, source.tokenizer)
    return GraphNode(source, opened, tokens, about, memory=graph_options.memory)


class AttributionGraph:
    """An attribution graph, computed by `attribution_graph` or read from a file (`from_pt`)."""

    def __init__(self, dataset: xr.Dataset) -> None:
        """Wrap the dataset that `GraphNode` stores, or that `files.torch_file.read` returns."""
        self.dataset = dataset
        """The graph as stored; `weights` [target, source] are the edges: rows are features, then logits."""

    def __repr__(self) -> str:
        c = self.counts
        return (
            f"AttributionGraph({self.prompt!r}: {c.features} features, {c.errors} errors, {c.positions} "
            f"tokens, {c.logits} logits)"
        )

    def _repr_html_(self) -> str:
        """Summary for a notebook: number of nodes of each kind, explained logits, size of the adjacency."""
        c = self.counts
        kinds = [("feature", c.features), ("error", c.errors), ("token", c.positions), ("logit", c.logits)]
        body = html.table(["nodes", "number"], [(name, f"{n:,}") for name, n in kinds], right=[1])
        logits = zip(self.logit_tokens, self.logit_probabilities.tolist(), strict=True)
        rows = [(repr(text), f"{probability:.4f}") for text, probability in logits]
        body += html.table(["logit explained", "probability"], rows, right=[1])
        summary = f"{c.layers} layers; adjacency [target, source] of {c.nodes:,} x {c.nodes:,} direct effects"
        return html.shown(f"Attribution graph of {self.prompt!r}", body, summary)

    # -- nodes

    @cached_property
    def counts(self) -> NodeCounts:
        """Number of features, errors, tokens and logits."""
        return counts_of(self.dataset)

    @cached_property
    def nodes(self) -> xr.Dataset:
        """Kind, layer, position, feature and activation of every node, each [node]; see `node_labels`."""
        import xarray as xr

        return xr.Dataset({name: ("node", values) for name, values in node_labels(self.dataset).items()})

    @property
    def prompt(self) -> str:
        """Text of the prompt, including special tokens."""
        return str(self.dataset.attrs["input_string"])

    @property
    def scan(self) -> str | list[str] | None:
        """Name or names of the transcoders, by which circuit-tracer finds their feature dashboards.

        The name in their config.yaml, else the dictionary's name; None for a graph from a file with neither.
        """
        scan = self.dataset.attrs.get("scan") or self.dataset.attrs.get("dictionary")
        return scan if scan is None or isinstance(scan, str) else [str(name) for name in scan]

    def _array(self, name: str) -> npt.NDArray[Any]:
        """Values of a variable of the dataset."""
        values: npt.NDArray[Any] = self.dataset[name].values
        return values

    @property
    def input_tokens(self) -> npt.NDArray[np.int64]:
        """Token ids of the prompt, including special tokens, int64 [position]."""
        return self._array("input_tokens")

    @property
    def active_features(self) -> npt.NDArray[np.int64]:
        """(layer, position, index) of every active feature, int64 [active, 3], sorted."""
        return self._array("active_features")

    @property
    def activation_values(self) -> npt.NDArray[np.float32]:
        """Activations of the active features, float32 [active]."""
        return self._array("activation_values")

    @property
    def selected_features(self) -> npt.NDArray[np.int64]:
        """Rows of `active_features` that are nodes of the graph, int64 [selected], ascending."""
        return self._array("selected_features")

    @property
    def logit_token_ids(self) -> npt.NDArray[np.int64]:
        """Token ids of the logit nodes, int64 [logit]; custom directions have ids beyond the vocabulary."""
        return self._array("logit_token_ids")

    @property
    def logit_tokens(self) -> list[str]:
        """Texts of the logit nodes, [logit]."""
        return [str(text) for text in self.dataset["logit_text"].values]

    @property
    def logit_probabilities(self) -> npt.NDArray[np.float64]:
        """Probabilities of the logit nodes, or weights of custom directions, float64 [logit]."""
        return self._array("logit_probabilities")

    # -- edges

    @property
    def adjacency(self) -> xr.DataArray:
        """Direct effects between all nodes, float32 [target, source].

        An effect is the change of the target's pre-activation (or of its logit minus the mean logit) if the
        source were added once more. Small matrices are numpy arrays, others lazy. `dataset["weights"]` is
        the part that is not zero by construction.
        """
        import xarray as xr

        c, weights = self.counts, self.dataset["weights"]
        if 4 * c.nodes**2 <= _IN_MEMORY:
            whole: Any = np.zeros((c.nodes, c.nodes), np.float32)
            whole[c.target_nodes, : c.sources] = weights.values
        else:
            import dask.array as da

            rows = weights.chunk().data if weights.chunks is None else weights.data
            features, logits = rows[: c.features], rows[c.features :]
            # Errors and tokens have no incoming edges, logits no outgoing ones: blocks of zeros.
            empty = da.zeros((c.sources - c.features, c.sources), np.float32)
            full = da.concatenate([features, empty, logits])
            whole = da.concatenate([full, da.zeros((c.nodes, c.logits), np.float32)], axis=1)
        labels = self.nodes
        coords = {
            f"{side}_{name}": (side, labels[name].values)
            for side in ("target", "source")
            for name in ("kind", "layer", "position", "feature")
        }
        return xr.DataArray(whole, dims=("target", "source"), coords=coords, name="adjacency")

    # -- what matters

    # Cached: it reads all rows, and influence and both scores need it.
    @cached_property
    def _influence(self) -> Influence:
        return influence(GraphRows.of(self.dataset))

    @property
    def influence(self) -> npt.NDArray[np.float64]:
        """Influence of every node on the logits, float64 [node]; 0 for logits."""
        return self._influence.node

    @property
    def replacement_score(self) -> float:
        """Share of the influence of tokens in that of tokens and error nodes, 0 to 1."""
        return scores(GraphRows.of(self.dataset), self._influence)["replacement_score"]

    @property
    def completeness_score(self) -> float:
        """Influence-weighted share of node inputs that do not come from error nodes, 0 to 1."""
        return scores(GraphRows.of(self.dataset), self._influence)["completeness_score"]

    def prune(self, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> PrunedGraph:
        """The most influential nodes and edges of the graph; pruning.py defines how they are chosen.

        Arguments:
            node_threshold: Share of the influence that the kept nodes carry, 0 to 1.
            edge_threshold: Share of the edge scores that the kept edges carry, 0 to 1.

        Raises:
            StageError: A threshold is outside 0 to 1.
        """
        part = kept_part(
            GraphRows.of(self.dataset), node_threshold=node_threshold, edge_threshold=edge_threshold
        )
        return PrunedGraph(self, part, node_threshold, edge_threshold)

    # -- files

    @classmethod
    def from_pt(cls, path: str | Path) -> AttributionGraph:
        """Read a graph from a file that circuit-tracer saved; StageError if the file holds none."""
        from .files.torch_file import read  # imports torch, as writing does

        return cls(read(Path(path)))

    def to_pt(self, path: str | Path, *, scan: str | Sequence[str] | None = None) -> Path:
        """Save the graph as a file for circuit-tracer, with the dense adjacency matrix; returns the path.

        Arguments:
            path: Path of the new file.
            scan: Names of the transcoders, without which circuit-tracer makes no files for its viewer; None
                for `self.scan`.
        """
        from .files.torch_file import write

        return write(self, Path(path), scan=scan)


class PrunedGraph:
    """The most influential nodes and edges of an attribution graph, made by `AttributionGraph.prune`."""

    def __init__(
        self, graph: AttributionGraph, kept: KeptPart, node_threshold: float, edge_threshold: float
    ) -> None:
        """Result of `AttributionGraph.prune`.

        Arguments:
            graph: The whole graph.
            kept: Nodes and edges of the graph that are kept.
            node_threshold: Share of the influence that the kept nodes carry, 0 to 1.
            edge_threshold: Share of the edge scores that the kept edges carry, 0 to 1.
        """
        self.graph, self.kept = graph, kept
        self.node_threshold, self.edge_threshold = node_threshold, edge_threshold

    def __repr__(self) -> str:
        return (
            f"PrunedGraph({int(self.node_mask.sum())} nodes, {len(self.kept.weight)} edges of {self.graph!r})"
        )

    def _repr_html_(self) -> str:
        """HTML for notebooks: number of kept nodes by kind, and number of kept edges."""
        c, kinds = self.graph.counts, self.nodes["kind"].values.tolist()
        totals = {"feature": c.features, "error": c.errors, "token": c.positions, "logit": c.logits}
        rows = [(name, f"{kinds.count(name):,}", f"{n:,}") for name, n in totals.items()]
        summary = (
            f"{len(self.kept.weight):,} edges; thresholds {self.node_threshold:g} of nodes, "
            f"{self.edge_threshold:g} of edges"
        )
        body = html.table(["nodes", "kept", "of"], rows, right=[1, 2])
        return html.shown(f"Pruned attribution graph of {self.graph.prompt!r}", body, summary)

    @property
    def node_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [node] over all nodes of the graph, True for kept ones."""
        return self.kept.nodes

    @cached_property
    def edge_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [target, source] over all nodes of the graph, True for kept edges; `edges` lists them."""
        return self.kept.edge_mask()

    @property
    def cumulative_scores(self) -> npt.NDArray[np.float64]:
        """For each node, the share of the total influence that it and more influential nodes carry [node]."""
        return self.kept.cumulative

    @cached_property
    def nodes(self) -> xr.Dataset:
        """Labels, influence and cumulative score of the kept nodes [node].

        The coordinate `node` is the number of a node in the whole graph.
        """
        import xarray as xr

        numbers = np.flatnonzero(self.node_mask)
        labels = self.graph.nodes.isel(node=numbers).assign_coords(node=numbers)
        more = {"influence": self.kept.influence[numbers], "cumulative": self.kept.cumulative[numbers]}
        return labels.merge(xr.Dataset({name: ("node", values) for name, values in more.items()}))

    @cached_property
    def edges(self) -> xr.Dataset:
        """Kept edges: source and target (numbers of nodes) and weight, [edge], sorted by target."""
        import xarray as xr

        kept = self.kept
        return xr.Dataset(
            {
                "source": ("edge", kept.source),
                "target": ("edge", kept.target),
                "weight": ("edge", kept.weight),
            }
        )

    def to_viewer(self, folder: str | Path, slug: str, *, scan: str | Sequence[str] | None = None) -> Path:
        """Write `<slug>.json` and graph-metadata.json for circuit-tracer's viewer; returns the former's path.

        Arguments:
            folder: Folder of the viewer's data.
            slug: Name of the graph, and of its file.
            scan: Names of the transcoders, by which the viewer finds dashboards; None for `self.graph.scan`.

        Raises:
            StageError: There is no `scan`, or `slug` cannot be a file name.
        """
        from .files.viewer import write

        return write(self, Path(folder), slug, scan=scan)

    def to_graphml(self, path: str | Path) -> Path:
        """Write the kept nodes and edges as GraphML; returns the path."""
        from .files.tables import write_graphml

        return write_graphml(self, Path(path))

    def to_parquet(self, folder: str | Path) -> tuple[Path, Path]:
        """Write nodes.parquet and edges.parquet; returns both. Needs the extra corpora (pyarrow)."""
        from .files.tables import write_parquet

        return write_parquet(self, Path(folder))
