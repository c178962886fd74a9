"""The attribution graph of a prompt, as users meet it.

    graph = mizarr.attribution_graph(model, clt, "The capital of France is", store=store)
    graph.adjacency                                # [target, source], lazy where it is large
    graph.prune(node_threshold=0.8, edge_threshold=0.98).nodes
    graph.to_pt("graph.pt")

Which tokens, features and errors bring about the next token, and by how much (Ameisen et al. 2025, "Circuit
Tracing"); with the meaning, layout and numbers of circuit-tracer 0.5.0.

Border: a labelled dataset and what can be asked of it; computing one is node.py's, files are torch_file.py's,
viewer.py's and tables.py's.

Axes: see nodes.py.
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
from .pruning import Kept, kept_part
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
"""Bytes up to which `adjacency` is a plain array."""


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
    """The attribution graph of one prompt; in a store it is computed once, and continues after a kill.

    Args:
        model: a loaded model, or the name of one.
        dictionary: transcoders made for the model.
        prompt: a text, which gets a BOS in front if it has none, or token ids.
        store: where rows are kept; without one the graph is held in memory.
        cluster: address of a Dask scheduler whose workers compute the rows of large graphs; they load the
            model by its name.
        workers: number of processes of this machine that do (see `pipeline.run`).
        progress: show a progress bar on stderr.
        options: see below.

    Raises:
        DictionaryError: for a dictionary that does not fit the model.
        PromptError, TokenizerError, ShapeError: for prompts and targets that make no sense.
        PlanError: where memory cannot be enough, or workers cannot see model or store; nothing is stored
            then.
    """
    from ...pipeline import run
    from ...store import open_store

    node = graph_node(model, dictionary, prompt, **options)
    if store is not None:
        run(node, store, cluster=cluster, workers=workers, quiet=not progress)
        return AttributionGraph(node.open(store))
    if cluster is not None:
        raise PlanError(
            f"expected a store that the workers of {cluster} see, found none; pass store=, or workers= of "
            "this machine"
        )
    with tempfile.TemporaryDirectory(prefix="mizarr-graph-") as folder:
        kept = open_store(folder, durability="process")
        run(node, kept, workers=workers, quiet=not progress)
        return AttributionGraph(node.open(kept).load())


@takes_options(AttributionOptions)
def graph_node(
    model: Model | ModelSource | str | Path,
    dictionary: Dictionary | str | Path,
    prompt: Any,
    **options: Any,
) -> GraphNode:
    """The same as a node of a workflow's graph: planned, nothing computed, no torch imported."""
    from ..features.dictionary import Dictionary
    from ..forward.models.source import ModelSource

    (chosen,) = split_options("attribution_graph", options, AttributionOptions)
    given = AttributionOptions(**chosen)
    source = ModelSource.of(model)
    opened = dictionary if isinstance(dictionary, Dictionary) else Dictionary.from_pretrained(dictionary)
    targets = choose(
        given.targets,
        tokenizer=source.tokenizer,
        vocab_size=source.config.vocab_size,
        hidden_size=source.config.hidden_size,
        most=given.max_n_logits,
        probability=given.desired_logit_prob,
    )
    selection = RowSelection(given.max_feature_nodes, given.batch_size * given.update_interval)
    about = GraphOptions(targets, selection, given.zero_positions, given.arithmetic)
    tokens = prompt_tokens(prompt, source.tokenizer)
    return GraphNode(source, opened, tokens, about, memory=given.memory)


class AttributionGraph:
    """A graph: made by `attribution_graph`, or read from a file (`from_pt`).

    dataset: as the store holds it; weights [target, source] are the edges, rows of features, then logits.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset

    def __repr__(self) -> str:
        c = self.counts
        return (
            f"AttributionGraph({self.prompt!r}: {c.features} features, {c.errors} errors, {c.positions} "
            f"tokens, {c.logits} logits)"
        )

    def _repr_html_(self) -> str:
        """For a notebook: nodes of each kind, the logits explained, and the size of the adjacency."""
        c = self.counts
        kinds = [("feature", c.features), ("error", c.errors), ("token", c.positions), ("logit", c.logits)]
        body = html.table(["nodes", "number"], [(name, f"{n:,}") for name, n in kinds], right=[1])
        logits = zip(self.logit_tokens, self.logit_probabilities.tolist(), strict=True)
        rows = [(repr(text), f"{probability:.4f}") for text, probability in logits]
        body += html.table(["logit explained", "probability"], rows, right=[1])
        told = f"{c.layers} layers; adjacency [target, source] of {c.nodes:,} x {c.nodes:,} direct effects"
        return html.shown(f"Attribution graph of {self.prompt!r}", body, told)

    # -- nodes

    @cached_property
    def counts(self) -> NodeCounts:
        """How many nodes of each kind."""
        return counts_of(self.dataset)

    @cached_property
    def nodes(self) -> xr.Dataset:
        """kind, layer, position, feature and activation of every node; see `node_labels`."""
        import xarray as xr

        return xr.Dataset({name: ("node", values) for name, values in node_labels(self.dataset).items()})

    @property
    def prompt(self) -> str:
        """The prompt's text, special tokens included."""
        return str(self.dataset.attrs["input_string"])

    @property
    def scan(self) -> str | list[str] | None:
        """Which transcoders these are, by what circuit-tracer finds their dashboards with: as they say
        themselves, else their name, as circuit-tracer has it of local ones. None for a graph from a file
        that says neither."""
        found = self.dataset.attrs.get("scan") or self.dataset.attrs.get("dictionary")
        return found if found is None or isinstance(found, str) else [str(each) for each in found]

    @property
    def input_tokens(self) -> npt.NDArray[np.int64]:
        """Token ids of the prompt, special ones included, int64 [position]."""
        found: npt.NDArray[Any] = self.dataset["input_tokens"].values
        return found

    @property
    def active_features(self) -> npt.NDArray[np.int64]:
        """Every active feature [active, 3]: layer, position, index; sorted."""
        found: npt.NDArray[Any] = self.dataset["active_features"].values
        return found

    @property
    def activation_values(self) -> npt.NDArray[np.float32]:
        """Activations of the active features [active]."""
        found: npt.NDArray[Any] = self.dataset["activation_values"].values
        return found

    @property
    def selected_features(self) -> npt.NDArray[np.int64]:
        """Which active features are nodes [selected]: indices, ascending."""
        found: npt.NDArray[Any] = self.dataset["selected_features"].values
        return found

    @property
    def logit_token_ids(self) -> npt.NDArray[np.int64]:
        """Token ids of the logit nodes [logit]; from the number of logits on for directions of one's own."""
        found: npt.NDArray[Any] = self.dataset["logit_token_ids"].values
        return found

    @property
    def logit_tokens(self) -> list[str]:
        """Texts of the logits explained, [logit]."""
        return [str(text) for text in self.dataset["logit_text"].values]

    @property
    def logit_probabilities(self) -> npt.NDArray[np.float64]:
        """Their probabilities, or weights [logit]."""
        found: npt.NDArray[Any] = self.dataset["logit_probabilities"].values
        return found

    # -- edges

    @property
    def adjacency(self) -> xr.DataArray:
        """Direct effects [target, source] among all nodes: what a target's pre-activation (or logit, less the
        mean of all logits) would gain if the source were added once more.

        A plain array while it is small, else a lazy one; the dataset's `weights` are the part of it that is
        not zero by construction.
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

    @cached_property
    def _influence(self) -> Influence:
        return influence(GraphRows.of(self.dataset))

    @property
    def influence(self) -> npt.NDArray[np.float64]:
        """Influence of every node on the logits [node]; logits have none."""
        return self._influence.node

    @property
    def replacement_score(self) -> float:
        """Share of the influence that comes from tokens rather than from errors."""
        return scores(GraphRows.of(self.dataset), self._influence)["replacement_score"]

    @property
    def completeness_score(self) -> float:
        """Share of what enters nodes, weighted by their influence, that does not come from errors."""
        return scores(GraphRows.of(self.dataset), self._influence)["completeness_score"]

    def prune(self, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> PrunedGraph:
        """The part that carries these shares of the influence; see pruning.py. Raises StageError for
        thresholds outside 0 to 1."""
        found = kept_part(
            GraphRows.of(self.dataset), node_threshold=node_threshold, edge_threshold=edge_threshold
        )
        return PrunedGraph(self, found, node_threshold, edge_threshold)

    # -- files

    @classmethod
    def from_pt(cls, path: str | Path) -> AttributionGraph:
        """A graph that circuit-tracer saved. Raises StageError for a file that is not one."""
        from .files.torch_file import read

        return cls(read(Path(path)))

    def to_pt(self, path: str | Path, *, scan: str | Sequence[str] | None = None) -> Path:
        """Save for circuit-tracer, which needs the dense matrix; returns the path.

        scan: which transcoders these are, without which circuit-tracer makes no viewer's files of it; default
        `self.scan`.
        """
        from .files.torch_file import write

        return write(self, Path(path), scan=scan)


class PrunedGraph:
    """The nodes and edges of a graph that matter, at two thresholds."""

    def __init__(
        self, graph: AttributionGraph, kept: Kept, node_threshold: float, edge_threshold: float
    ) -> None:
        self.graph, self.kept = graph, kept
        self.node_threshold, self.edge_threshold = node_threshold, edge_threshold

    def __repr__(self) -> str:
        return (
            f"PrunedGraph({int(self.node_mask.sum())} nodes, {len(self.kept.weight)} edges of {self.graph!r})"
        )

    def _repr_html_(self) -> str:
        """For a notebook: of each kind of node how many are kept, and the edges between them."""
        c, kinds = self.graph.counts, self.nodes["kind"].values.tolist()
        of_all = {"feature": c.features, "error": c.errors, "token": c.positions, "logit": c.logits}
        rows = [(name, f"{kinds.count(name):,}", f"{n:,}") for name, n in of_all.items()]
        told = (
            f"{len(self.kept.weight):,} edges; thresholds {self.node_threshold:g} of nodes, "
            f"{self.edge_threshold:g} of edges"
        )
        body = html.table(["nodes", "kept", "of"], rows, right=[1, 2])
        return html.shown(f"Pruned attribution graph of {self.graph.prompt!r}", body, told)

    @property
    def node_mask(self) -> npt.NDArray[np.bool_]:
        """Which nodes of the graph are kept, [node]."""
        return self.kept.nodes

    @cached_property
    def edge_mask(self) -> npt.NDArray[np.bool_]:
        """Kept edges [target, source], dense; `edges` lists them."""
        return self.kept.edge_mask()

    @property
    def cumulative_scores(self) -> npt.NDArray[np.float64]:
        """Of every node, the share of influence of those at least as influential [node]."""
        return self.kept.cumulative

    @cached_property
    def nodes(self) -> xr.Dataset:
        """Kept nodes with their labels, influence and cumulative score; `node` is their number in the
        graph."""
        import xarray as xr

        chosen = np.flatnonzero(self.node_mask)
        found = self.graph.nodes.isel(node=chosen).assign_coords(node=chosen)
        more = {"influence": self.kept.influence[chosen], "cumulative": self.kept.cumulative[chosen]}
        return found.merge(xr.Dataset({name: ("node", values) for name, values in more.items()}))

    @cached_property
    def edges(self) -> xr.Dataset:
        """Kept edges: source, target (numbers of nodes) and weight, row by row."""
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
        """Write `<slug>.json` and graph-metadata.json for circuit-tracer's viewer; returns the former."""
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
