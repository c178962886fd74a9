"""An attribution graph as a node of a workflow, computed and stored in blocks of rows.

A small graph is computed and stored at once. For a larger one, each block of rows is stored as a cell under
its own key, and the blocks are joined on disk at the end: a killed computation continues where it stopped,
and the matrix need not fit in memory. To continue, the forward pass runs again; it is cheap compared with
the rows.

rows/attribute.py computes rows; rows/selection.py chooses them. Planning imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline.context import Cell
from ...pipeline.memory import measured
from ...pipeline.nodes import Estimate, Node, ResultNode, Status, check_pinned, status_of
from ...pipeline.plan import as_bytes
from ...pipeline.reasons import last_timed, scaled_seconds, why_not
from ...store.arrays import Ints
from ...store.errors import PlanError, PromptError, StageError
from ...store.keys import ResultKey
from ..forward.runs.experiment import tokenizer_input
from ..forward.text.prompts import check_prompts
from .options import GraphOptions
from .rows.frozen import require_attention, require_transcoders

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline import Context
    from ...pipeline.pinned import Pinned
    from ...store import Store
    from ..features.dictionary import Dictionary
    from ..forward.models.source import ModelSource
    from .prepare import PreparedGraph

__all__ = ["GraphNode"]

MEMORY = 1 << 30
"""Default memory in bytes for the computation, in addition to the model."""
CELL_BYTES = 16 << 20
"""Size in bytes of the rows that are stored at once as one cell."""
SMALLEST = 1 << 20
"""Smallest value of `memory` in bytes."""


class GraphNode(ResultNode):
    """Plan node that computes the attribution graph of one prompt, and stores it in blocks of rows."""

    name = "attribution_graph"
    version = 1
    inputs: tuple[Node, ...] = ()

    def __init__(
        self,
        source: ModelSource,
        dictionary: Dictionary,
        tokens: Sequence[int],
        options: GraphOptions,
        *,
        memory: int | str | None = None,
    ) -> None:
        """Check model, dictionary and prompt; nothing is loaded.

        Arguments:
            source: The model.
            dictionary: Transcoders of the model.
            tokens: Token ids of the prompt.
            options: Settings that are part of the key.
            memory: Memory for the computation beside the model, in bytes or as "2GiB"; None for 1 GiB.

        Raises:
            ConfigError: Attribution graphs do not support the model's layers.
            DictionaryError: The dictionary does not fit the model.
            PromptError: The prompt is too short to have features, or too long.
            PlanError: The memory is too small.
        """
        self.source, self.dictionary, self.options = source, dictionary, options
        self.resource = dictionary.as_resource(str(dictionary.device))
        self.tokens = tuple(tokens)
        budget = as_bytes(memory)
        self.memory = MEMORY if budget is None else budget
        config = source.config
        check_prompts(
            [self.tokens], config.vocab_size, config.context_length, source.name, config.unknown_token
        )
        if not 0 <= options.zero_positions < len(self.tokens):
            raise PromptError(
                f"expected a prompt of more than {options.zero_positions} tokens for an attribution graph, "
                f"as the first {options.zero_positions} have no features (zero_positions), found "
                f"{len(self.tokens)}; lengthen the prompt, or lower zero_positions"
            )
        if options.arithmetic not in ("float32", "float64"):
            raise StageError(
                f"expected arithmetic to be 'float32' or 'float64', found {options.arithmetic!r}"
            )
        if self.memory < SMALLEST:
            raise PlanError(
                f"expected memory of at least {SMALLEST} bytes for an attribution graph, found {self.memory}"
            )
        require_attention(config, source.name)
        require_transcoders(dictionary, config, source.name)

    def __repr__(self) -> str:
        return f"GraphNode({self.source!r}, {self.dictionary!r}, {len(self.tokens)} tokens)"

    def __getstate__(self) -> dict[str, Any]:
        # Workers open the dictionary by its name, through `resource`.
        return {**vars(self), "dictionary": None}

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Resources that must not change during the run: the dictionary's files."""
        # Model files are checked when the model is loaded.
        return (self.resource,)

    # -- identity

    def key(self, store: Store) -> ResultKey:
        """Key of the graph: model, dictionary, tokens and options."""
        return self._key(self.name, {})

    def cell_key(self, first: int, count: int) -> ResultKey:
        """Key of a cell, a block of rows that is stored at once.

        Arguments:
            first: Number of the cell's first row, in the order in which rows are computed.
            count: Number of the cell's rows.
        """
        return self._key(f"{self.name}/cell", {"first": first, "count": count})

    def _key(self, label: str, more: dict[str, int]) -> ResultKey:
        params = {"tokens": list(self.tokens), **self.options.params(), **more}
        inputs = {"model": self.source.identity.digest, "dictionary": self.resource.features}
        inputs |= tokenizer_input(self.source)
        return ResultKey(label, self.version, params, inputs)

    # -- planning

    def status(self, store: Store) -> Status:
        """Whether the graph is stored; for a missing graph, the reason."""
        check_pinned(self)
        key = self.key(store)
        self.source.expect(served=store.lookup(key) is not None)
        return Status(True, cells_cached=1) if store.lookup(key) else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """Peak memory, and expected seconds, scaled by tokens from the newest graph of the same model.

        The number of rows is not known before features are computed.
        """
        if status_of(self, store).is_cached:
            return Estimate()
        work = (
            f"a graph of {len(self.tokens)} tokens with the features of {len(self.dictionary.layers)} layers"
        )
        return Estimate(peak_bytes=self.memory, seconds=self._seconds(store), work=work)

    def _seconds(self, store: Store) -> float | None:
        inputs = self.key(store).request()["inputs"]

        def has_same_inputs(note: Mapping[str, Any]) -> bool:
            return bool(note.get("request", {}).get("inputs") == inputs)

        last = last_timed(self.name, store, has_same_inputs)
        if last is None:
            return None
        # By tokens: the number of rows is known only once features are computed.
        share = len(self.tokens) / len(last["request"]["params"]["tokens"])
        return round(scaled_seconds(last, share), 3)

    # -- running

    def require_workers(self, context: Context) -> None:
        """Raise PlanError if other processes cannot load the model."""
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Compute the rows that are not stored yet, then store the whole graph."""
        with measured() as took:
            prepared = self.prepared()
            rows = self.options.selection.rows(prepared.n_features, prepared.n_logits)
            cells = _Cells(self, store, prepared, rows, context)
            task = context.progress.task(self.name, total=rows, unit="rows")
            # A greedy selection ranks features by the rows computed so far, hence the function.
            visits = self.options.selection.visits(
                prepared.n_features, prepared.logit_weights, prepared.n_columns, lambda: cells.blocks
            )
            for items in visits:
                cells.compute(items, task.advance)
            # Notes describe how a result was made; they are part of no key.
            note = {**self.source.provenance(), "dictionary": self.dictionary.name, **took()}
            self.publish(store, self.key(store), cells.joined(), note)

    def prepared(self) -> PreparedGraph:
        """The graph's nodes, and all that its rows are computed from, after a forward pass of the prompt."""
        from .prepare import prepare

        dictionary = self.resource.opened
        return prepare(self.source.load(), dictionary, self.tokens, self.options, memory=self.memory)

    def put_rows(self, store: Store, prepared: PreparedGraph, rows: Rows) -> None:
        """Compute the rows of a cell, and store them.

        Arguments:
            store: The store.
            prepared: Result of `prepared`.
            rows: The cell.
        """
        import xarray as xr

        with measured() as took:
            items = rows.items
            dataset = xr.Dataset(
                {"weights": (("target", "source"), prepared.rows(items)), "item": ("target", items)}
            )
            note = {"model": self.source.name, **took()}
        self.publish(store, rows.key, dataset, note)


@dataclass(frozen=True)
class Rows(Cell):
    """A block of rows of the graph's adjacency matrix that is computed and stored at once."""

    items: Ints
    """Target of each row: index of an active feature, or the number of these plus the index of a logit."""


class _Cells:
    """Computes the rows of a graph cell by cell, in this process or on workers.

    Rows stay in memory if all of them fit in one cell; otherwise each cell is stored.
    """

    def __init__(
        self, node: GraphNode, store: Store, prepared: PreparedGraph, rows: int, context: Context
    ) -> None:
        self.node, self.store, self.prepared, self.context = node, store, prepared, context
        row_bytes = 4 * prepared.n_columns
        # A quarter of the memory, as maps and decoder vectors take a quarter each (prepare.py).
        self._size = max(1, min(CELL_BYTES, node.memory // 4) // row_bytes)
        self._is_stored = rows > self._size
        self._first = 0
        self.blocks: list[tuple[Ints, Any]] = []
        """(target of each row, weights [row, source]) of each cell computed so far."""

    def compute(self, items: Ints, advance: Any) -> None:
        """Compute rows, cell by cell.

        Arguments:
            items: Target of each row; see `PreparedGraph.rows`.
            advance: Called after each cell with the number of its rows.
        """
        parts = [items[start : start + self._size] for start in range(0, len(items), self._size)]
        if not self._is_stored:
            for part in parts:
                self.blocks.append((part, self.prepared.rows(part)))
                advance(len(part))
            return
        cells = [self._cell(part) for part in parts]
        if self.context.has_workers:
            self._compute_on_workers(cells)
        for cell in cells:
            # Missing here: no workers, or a single missing cell.
            if self.store.lookup(cell.key) is None:
                self.node.put_rows(self.store, self.prepared, cell)
            self.blocks.append((cell.items, self.store.open_result(cell.key)["weights"]))
            advance(len(cell.items))

    def _compute_on_workers(self, cells: Sequence[Rows]) -> None:
        """Compute missing cells on workers, if several cells are missing.

        Computing a single cell here takes less time than starting a worker.
        """
        missing = [cell for cell in cells if self.store.lookup(cell.key) is None]
        if len(missing) > 1:
            needs = self.node.source.needs
            self.context.map(compute_rows, self.node, self.store, missing, needs=needs)

    def _cell(self, items: Ints) -> Rows:
        """The cell for the next rows, whose targets are `items`."""
        labels = {"first": self._first, "count": len(items)}
        self._first += len(items)
        return Rows(labels, self.node.cell_key(**labels), items)

    def joined(self) -> xr.Dataset:
        """The whole graph as a dataset; features without a row have no column either."""
        import dask.array as da

        items = np.concatenate([items for items, _ in self.blocks])
        # Stored blocks are joined lazily: publishing reads them one by one.
        if self._is_stored:
            whole: Any = da.concatenate([block.chunk().data for _, block in self.blocks])
        else:
            weights = [block for _, block in self.blocks]
            whole = weights[0] if len(weights) == 1 else np.concatenate(weights)
        return self.prepared.dataset(items, whole)


_prepared: list[tuple[str, PreparedGraph]] = []
"""At most one (key digest, prepared graph): the last graph of this worker, whose forward pass runs once."""
_PREPARING = threading.Lock()  # two threads of a worker would otherwise run the forward pass twice


def compute_rows(node: GraphNode, store: Store, rows: Rows) -> None:
    """Compute and store a cell of rows; the task that a worker runs.

    Arguments:
        node: Node of the graph.
        store: The store.
        rows: The cell.
    """
    with _PREPARING:
        key = node.key(store).digest
        # A dictionary whose files changed is opened again, and features of the old files are not used.
        if not (_prepared and _prepared[0][0] == key and _prepared[0][1].dictionary is node.resource.opened):
            _prepared.clear()
            _prepared.append((key, node.prepared()))
        prepared = _prepared[0][1]
        node.put_rows(store, prepared, rows)  # inside the lock: each block uses all threads of the worker
