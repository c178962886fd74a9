"""An attribution graph in a workflow's graph: computed block by block, each block a stored cell.

A small graph is computed and stored at once. Of a larger one, blocks of rows are stored as they are computed,
under keys of their own, and joined on disk when all are there: a killed graph goes on where it was, and the
matrix never has to fit into memory. The forward pass is run again to go on; it is cheap beside the rows.

Border: keys, cells and the store; the arithmetic is in attribute.py, the choice of rows in selection.py.
Planning imports no torch.
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
CELL_BYTES = 16 << 20
"""Of rows that are stored as one cell: a fraction of a second's work on a small model, seconds on a large."""
SMALLEST = 1 << 20


class GraphNode(ResultNode):
    """The attribution graph of one prompt.

    memory: bytes its computation may take beside the model, or "2GiB".
    """

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
        """Raises ConfigError for a model whose layers graphs do not follow, DictionaryError for a dictionary
        that does not fit it, PromptError for a prompt too short to have features, or too long."""
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
                f"expected a prompt of more than {options.zero_positions} tokens, as the first "
                f"{options.zero_positions} have no features, found {len(self.tokens)}; lengthen it, or set "
                "zero_positions"
            )
        if options.arithmetic not in ("float32", "float64"):
            raise StageError(f"expected arithmetic float32 or float64, found {options.arithmetic!r}")
        if self.memory < SMALLEST:
            raise PlanError(f"expected memory of at least {SMALLEST} bytes, found {self.memory}")
        require_attention(config, source.name)
        require_transcoders(dictionary, config, source.name)

    def __repr__(self) -> str:
        return f"GraphNode({self.source!r}, {self.dictionary!r}, {len(self.tokens)} tokens)"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dictionary": None}  # workers open it by name

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionary's files. Those of the model are checked when it is loaded into memory."""
        return (self.resource,)

    # -- identity

    def key(self, store: Store) -> ResultKey:
        """Model, dictionary, tokens and options."""
        return self._key(self.name, {})

    def cell_key(self, first: int, count: int) -> ResultKey:
        """Of `count` rows, in the order in which they are computed, from `first` on."""
        return self._key(f"{self.name}/cell", {"first": first, "count": count})

    def _key(self, label: str, more: dict[str, int]) -> ResultKey:
        params = {"tokens": list(self.tokens), **self.options.params(), **more}
        inputs = {"model": self.source.identity.digest, "dictionary": self.resource.features}
        inputs |= tokenizer_input(self.source)
        return ResultKey(label, self.version, params, inputs)

    # -- planning

    def status(self, store: Store) -> Status:
        """Cached, or why it will run."""
        check_pinned(self)
        key = self.key(store)
        self.source.expect(served=store.lookup(key) is not None)
        return Status(True, cells_cached=1) if store.lookup(key) else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """Memory as given; how many rows there are is known when features have been computed. Seconds in
        proportion to the tokens of the newest graph of this model and dictionary."""
        if status_of(self, store).is_cached:
            return Estimate()
        work = (
            f"a graph of {len(self.tokens)} tokens with the features of {len(self.dictionary.layers)} layers"
        )
        return Estimate(peak_bytes=self.memory, seconds=self._seconds(store), work=work)

    def _seconds(self, store: Store) -> float | None:
        own = self.key(store).request()["inputs"]

        def fits(note: Mapping[str, Any]) -> bool:
            return bool(note.get("request", {}).get("inputs") == own)

        last = last_timed(self.name, store, fits)
        if last is None:
            return None
        share = len(self.tokens) / len(last["request"]["params"]["tokens"])
        return round(scaled_seconds(last, share), 3)

    # -- running

    def require_workers(self, context: Context) -> None:
        """PlanError for a model that other processes cannot load."""
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Compute the rows that are not stored, then the whole."""
        with measured() as took:
            prepared = self.prepared()
            rows = self.options.selection.rows(prepared.n_features, prepared.n_logits)
            cells = _Cells(self, store, prepared, rows, context)
            task = context.progress.task(self.name, total=rows, unit="rows")
            visits = self.options.selection.visits(
                prepared.n_features, prepared.logit_weights, prepared.n_columns, lambda: cells.blocks
            )
            for items in visits:
                cells.compute(items, task.advance)
            note = {**self.source.provenance(), "dictionary": self.dictionary.name, **took()}
            self.publish(store, self.key(store), cells.joined(), note)

    def prepared(self) -> PreparedGraph:
        """The nodes of the graph, and what computes rows, in memory."""
        from .prepare import prepare

        dictionary = self.resource.opened
        return prepare(self.source.load(), dictionary, self.tokens, self.options, memory=self.memory)

    def put_rows(self, store: Store, prepared: PreparedGraph, rows: Rows) -> None:
        """Compute and publish a cell."""
        import xarray as xr

        with measured() as took:
            items = rows.items
            found = xr.Dataset(
                {"weights": (("target", "source"), prepared.rows(items)), "item": ("target", items)}
            )
            note = {"model": self.source.name, **took()}
        self.publish(store, rows.key, found, note)


@dataclass(frozen=True)
class Rows(Cell):
    """A cell: which rows it is of."""

    items: Ints


class _Cells:
    """Rows as they are computed: in memory while all of them fit into one cell, else stored cell by cell,
    here or on workers."""

    def __init__(
        self, node: GraphNode, store: Store, prepared: PreparedGraph, rows: int, context: Context
    ) -> None:
        self.node, self.store, self.prepared, self.context = node, store, prepared, context
        row_bytes = 4 * prepared.n_columns
        self._size = max(1, min(CELL_BYTES, node.memory // 4) // row_bytes)
        self._is_stored = rows > self._size
        self._first = 0
        self.blocks: list[tuple[Ints, Any]] = []
        """(item of each row, weights [row, source]) of all rows so far."""

    def compute(self, items: Ints, advance: Any) -> None:
        """Rows of these items, as cells."""
        parts = [items[start : start + self._size] for start in range(0, len(items), self._size)]
        if not self._is_stored:
            for some in parts:
                self.blocks.append((some, self.prepared.rows(some)))
                advance(len(some))
            return
        cells = [self._cell(some) for some in parts]
        if self.context.has_workers:
            self._compute_elsewhere(cells)
        for cell in cells:
            if self.store.lookup(cell.key) is None:
                self.node.put_rows(self.store, self.prepared, cell)
            self.blocks.append((cell.items, self.store.open_result(cell.key)["weights"]))
            advance(len(cell.items))

    def _compute_elsewhere(self, cells: Sequence[Rows]) -> None:
        """Missing cells on workers; one alone is computed here sooner than a worker is ready."""
        missing = [cell for cell in cells if self.store.lookup(cell.key) is None]
        if len(missing) > 1:
            needs = self.node.source.needs
            self.context.map(compute_rows, self.node, self.store, missing, needs=needs)

    def _cell(self, items: Ints) -> Rows:
        """The next rows as a cell."""
        labels = {"first": self._first, "count": len(items)}
        self._first += len(items)
        return Rows(labels, self.node.cell_key(**labels), items)

    def joined(self) -> xr.Dataset:
        """The graph: features in order, then logits; columns of features that have no row are left out."""
        import dask.array as da

        items = np.concatenate([items for items, _ in self.blocks])
        if self._is_stored:
            whole: Any = da.concatenate([block.chunk().data for _, block in self.blocks])
        else:
            found = [block for _, block in self.blocks]
            whole = found[0] if len(found) == 1 else np.concatenate(found)
        return self.prepared.dataset(items, whole)


_prepared: list[tuple[str, PreparedGraph]] = []
"""Of the graph whose rows this worker computed last, under its key: its forward pass is run once."""
_PREPARING = threading.Lock()


def compute_rows(node: GraphNode, store: Store, rows: Rows) -> None:
    """Compute and publish a cell of rows; a task of its own on a worker elsewhere."""
    with _PREPARING:
        key = node.key(store).digest
        # A dictionary whose files moved was opened anew: what an older one read may be of other files.
        if not (_prepared and _prepared[0][0] == key and _prepared[0][1].dictionary is node.resource.opened):
            _prepared.clear()
            _prepared.append((key, node.prepared()))
        prepared = _prepared[0][1]
        node.put_rows(store, prepared, rows)  # one block at a time: each uses all threads it may
