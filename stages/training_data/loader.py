"""`ActivationLoader`: shuffled batches of stored activations, as numpy arrays.

    states = mizarr.capture(model, prompts, "blocks.*.hook_resid_post", store=store)
    loader = mizarr.ActivationLoader(states, layers=[3, 4], batch=4096, epochs=2, skip_positions=1)
    for batch in loader:
        batch["resid_post"]                          # float32 [row, layer, hidden]
    loader.state_dict()                              # position, and digest of rows and order

Order and reading: order.py and batches.py. Needs no torch, except `to_torch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ...store.arrays import as_count, as_indices, is_several, require_kind
from ...store.digest import digest
from ...store.errors import ConfigError
from ..options import option, split_options, takes_options
from .batches import Batch, Batches
from .conversion import as_float32
from .normalisation import Normalisation
from .several import EndToEnd, Joined
from .stored import StoredActivations

if TYPE_CHECKING:
    import xarray as xr

    from .stored import Cell
    from .torch_dataset import ActivationDataset

__all__ = ["ActivationLoader"]

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class LoaderOptions:
    """Options for shuffling, batching and conversion of rows.

    Raises:
        ConfigError: Options contradict each other.
    """

    batch: int = option(4096, "Rows per batch.", kind="count")
    seed: int = option(
        0,
        "Seed of the order. Order is a function of seed, epoch, selected prompts and the run's segments.",
    )
    buffer_tokens: int = option(
        1 << 15, "Rows shuffled together in memory, in each of two buffers.", kind="count"
    )
    block_tokens: int = option(1 << 10, "Neighbouring tokens that enter a buffer together.", kind="count")
    epochs: int | None = option(1, "Passes over the rows; None for an endless loader.", kind="count")
    drop_last: bool = option(False, "Leave out a last batch that is shorter than the others.")
    skip_positions: int = option(0, "Number of first positions of each prompt that are left out.")
    without: Iterable[int] = option((), "Token ids whose rows are left out, such as BOS and padding.")
    normalise: str | None = option(
        None, "Method that scales rows by `statistics`; see normalisation.py. Default none."
    )
    statistics: xr.Dataset | dict[str, xr.Dataset] | None = option(
        None, "Statistics of the rows (`state_statistics`); by variable where there are several."
    )
    dtype: Literal["float32", "stored"] = option(
        "float32", "Dtype of batches: float32, or the dtype of the store.", choices=("float32", "stored")
    )
    labels: bool = option(False, "Whether batches hold run, prompt, position and token_id of their rows.")

    def __post_init__(self) -> None:
        for name in ("batch", "buffer_tokens", "block_tokens", "epochs"):
            if name != "epochs" or self.epochs is not None:
                as_count(getattr(self, name), name)
        if self.dtype not in ("float32", "stored"):
            raise ConfigError(
                f"expected 'float32' or 'stored' as the dtype of an ActivationLoader, found {self.dtype!r}"
            )
        if self.buffer_tokens < self.block_tokens:
            raise ConfigError(
                f"expected buffer_tokens to be at least block_tokens={self.block_tokens}, found "
                f"buffer_tokens={self.buffer_tokens}"
            )
        object.__setattr__(self, "without", as_indices(self.without, "without"))
        # Scaled float16 or int8 rows would be rounded a second time.
        if self.normalise is not None and self.dtype == "stored":
            raise ConfigError("normalise= needs dtype='float32', found dtype='stored'; leave one of them out")


class ActivationLoader:
    """Shuffled batches of the rows of one stored run, or of several runs of one model.

    A batch is a dict: variable -> [row, layer, width], heads concatenated. The caller may modify it, but must
    copy what it keeps, as a batch may be a view of the buffer. Each iteration continues at `position`, the
    number of the next batch; every row occurs once per epoch.

    Arguments:
        states: A dataset from `capture` or `store.entry(…).open()`, possibly with selected prompts or layers;
            or several of one model.
        variables: Names of the variables; None for all.
        layers: Layers; None for all. A single number removes the layer axis.
        options: See below.

    Raises:
        ConfigError: Options are invalid.
        EntryNotFound: A variable is not stored.
        ShapeError: A variable has no row per token; when a batch is read, also if a number is not finite.
        CorruptEntry: A batch is read from a damaged file.
    """

    @takes_options(LoaderOptions)
    def __init__(
        self,
        states: xr.Dataset | StoredActivations | EndToEnd | Sequence[xr.Dataset | StoredActivations],
        variables: Sequence[str] | str | None = None,
        layers: Sequence[int] | int | None = None,
        **options: Any,
    ) -> None:
        (loader_options,) = split_options("ActivationLoader", options, LoaderOptions)
        settings = LoaderOptions(**loader_options)
        source = _source(states)
        if variables is not None:
            # A single name is an iterable of letters, too; `_cells` handles it.
            require_kind(variables, Iterable, "variables as names", "write ['resid_post']")
        layer_numbers = None if layers is None else as_indices(layers, "layers")
        # layers=3 drops the layer axis and layers=[3] keeps it, as indexing does in numpy and xarray.
        self._is_single = layers is not None and not is_several(layers)
        self.cells = _cells(states, source, variables, layer_numbers)
        source.require(cell for cells in self.cells.values() for cell in cells)
        self.dtype, self.labels = settings.dtype, settings.labels
        self._scaled = _normalisations(self.cells, settings.normalise, settings.statistics)
        self.position = 0
        self._batches = Batches(
            # All layers of a variable as one wide cell: one row then is one slice of the window.
            Joined(
                source.leaving_out(positions=settings.skip_positions, tokens=tuple(settings.without)),
                {(variable, None): cells for variable, cells in self.cells.items()},
            ),
            tuple((variable, None) for variable in self.cells),
            batch=settings.batch,
            window=settings.buffer_tokens,
            block=settings.block_tokens,
            seed=settings.seed,
            epochs=settings.epochs,
            drop_last=settings.drop_last,
        )

    @property
    def rows(self) -> int:
        """Number of rows per epoch, without excluded tokens."""
        return self._batches.order.rows

    def __len__(self) -> int:
        """Number of remaining batches; TypeError for an endless loader."""
        total = self._batches.total
        if total is None:
            raise TypeError("an endless ActivationLoader (epochs=None) has no length; pass epochs=")
        return total - self.position

    def __iter__(self) -> Iterator[Arrays]:
        """Batches from `position` on. ConfigError if none is left."""
        if self._batches.epochs is not None and not len(self):
            raise ConfigError(
                f"all {self.position} batches of the loader's {self._batches.epochs} epochs were taken; make "
                "a loader with more epochs, or set loader.position = 0 to start again"
            )
        for batch in self._batches.since(self.position):
            # Before the yield: a caller that stops here has received this batch.
            self.position = batch.number + 1
            yield self._arrays(batch)

    def shared(self, worker: int, workers: int, *, taken: int = 0) -> Iterator[Arrays]:
        """Batches of one worker, from `position` on: number `worker`, and every `workers`-th after it.

        Taken from all workers in turn, the batches are in order.

        Arguments:
            worker: Number of the worker.
            workers: Number of workers.
            taken: Batches of this worker to skip.
        """
        if not 0 <= worker < workers:
            raise ConfigError(
                f"expected worker from 0 to {workers - 1}, as workers={workers}, found {worker}"
            )
        # Each worker has returned `taken` batches, so together they are `taken * workers` batches further.
        for batch in self._batches.since(self.position + taken * workers, (worker, workers)):
            yield self._arrays(batch)

    def to_torch(self) -> ActivationDataset:
        """The loader as a torch `IterableDataset`, for `DataLoader(loader.to_torch(), batch_size=None,
        num_workers=2)`."""
        from .torch_dataset import ActivationDataset

        return ActivationDataset(self)

    # -- resuming

    @property
    def identity(self) -> str:
        """Digest of the rows and their order."""
        batches = self._batches
        # Without epochs and drop_last: they end the order, and do not change a batch before its end.
        settings = [batches.batch, batches.window, batches.block, batches.seed, *self._left_out()]
        return digest("activation loader", batches.source.identity(batches.cells), settings)

    def state_dict(self) -> dict[str, Any]:
        """Position and identity, as JSON values."""
        return {"position": self.position, "identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Restore the position of a `state_dict`.

        Raises:
            ConfigError: The state belongs to other rows, or to another order of them.
        """
        if state["identity"] != self.identity:
            raise ConfigError(
                "the state to load belongs to a loader of other activations, or in another order; make the "
                "loader from the same runs with the same batch, buffer_tokens, block_tokens, seed, "
                "skip_positions and without"
            )
        self.position = int(state["position"])
        return self

    def _left_out(self) -> list[Any]:
        """Skipped positions and excluded token ids, as plain values."""
        # All runs of an EndToEnd leave out the same.
        source: Any = self._batches.source
        first_run = source.source.runs[0] if isinstance(source.source, EndToEnd) else source.source
        return [first_run.skip_positions, list(first_run.without)]

    # -- batches

    def _arrays(self, batch: Batch) -> Arrays:
        """Arrays of a batch by variable, converted and normalised."""
        arrays: Arrays = {}
        for variable, cells in self.cells.items():
            stored = batch.rows[variable, None]
            rows = as_float32(stored) if self.dtype == "float32" else stored
            layers = rows.reshape(len(rows), len(cells), -1)
            for index, cell in enumerate(cells):
                if cell in self._scaled:
                    self._scaled[cell](layers[:, index])
            has_axis = cells[0][1] is not None and not self._is_single
            arrays[variable] = layers if has_axis else rows
        return arrays | (self._batches.source.labels(batch.tokens) if self.labels else {})


def _source(states: Any) -> StoredActivations | EndToEnd:
    """The stored activations of a dataset, or of several datasets of one model, joined."""
    if isinstance(states, StoredActivations | EndToEnd):
        return states
    if isinstance(states, Sequence) and not isinstance(states, str | bytes):
        if not states:
            raise ConfigError("expected at least one stored run for an ActivationLoader, found an empty list")
        runs = [_source(state) for state in states]
        return EndToEnd(tuple(run for run in runs if isinstance(run, StoredActivations)))
    import xarray as xr

    require_kind(
        states,
        xr.Dataset,
        "states as a dataset that mizarr.capture gave, or several",
        "open one: store['3f9a'], with the start of a run's digest from `mizarr ls`",
    )
    return StoredActivations.of_dataset(states)


def _cells(
    states: Any,
    source: StoredActivations | EndToEnd,
    variables: Sequence[str] | str | None,
    layers: Sequence[int] | None,
) -> dict[str, list[Cell]]:
    """Variable -> (variable, layer) pairs to read: those requested, by default all of the (first) dataset.

    Arguments:
        states: What the user passed to the loader.
        source: The same as stored activations.
        variables: Names of variables; None for all.
        layers: Layer numbers; None for all.
    """
    from ...store.reading.selection import as_layer

    first_states = states[0] if isinstance(states, Sequence) else states
    run = source.runs[0] if isinstance(source, EndToEnd) else source
    available: dict[str, list[int | None]] = {}
    if isinstance(first_states, StoredActivations | EndToEnd):
        for name, layer in run.entry.published():
            available.setdefault(name, []).append(layer)
    else:
        for name, array in first_states.data_vars.items():
            array_of_layer = as_layer(array)
            has_layer = "layer" in array_of_layer.coords
            available[str(name)] = (
                np.atleast_1d(array_of_layer["layer"].values).tolist() if has_layer else [None]
            )
    packed = [name for name in available if run.entry.spec(name).packed == "token"]
    requested = (
        [variables] if isinstance(variables, str) else packed if variables is None else list(variables)
    )
    if not requested:
        raise ConfigError(
            "expected at least one variable with a row per token to load, found none; name one, or capture "
            "some, such as blocks.*.hook_resid_post"
        )
    cells: dict[str, list[Cell]] = {}
    for name in requested:
        has_layers = run.entry.spec(name).layers is not None
        layer_numbers = available.get(name, []) if layers is None or not has_layers else layers
        cells[name] = [(name, layer) for layer in layer_numbers]
    return cells


def _normalisations(
    cells: Mapping[str, Sequence[Cell]],
    method: str | None,
    statistics: xr.Dataset | dict[str, xr.Dataset] | None,
) -> dict[Cell, Normalisation]:
    """(variable, layer) -> normalisation of its rows; empty without a method.

    Arguments:
        cells: Variable -> (variable, layer) pairs to read.
        method: Name of the normalisation; None for none.
        statistics: Statistics of the only variable, or variable -> statistics; None for none.
    """
    if method is None and statistics is None:
        return {}
    if method is None or statistics is None:
        raise ConfigError(
            "normalise= and statistics= belong together, found only one of them; compute the statistics, "
            "such as state_statistics(states.resid_post), or leave both out"
        )
    by_name = statistics if isinstance(statistics, dict) else dict.fromkeys(cells, statistics)
    if len(cells) > 1 and not isinstance(statistics, dict):
        raise ConfigError(
            f"the loader reads several variables, {', '.join(cells)}, which need statistics of their own, "
            "found one set; pass statistics as a dict by variable"
        )
    if absent := [name for name in cells if name not in by_name]:
        raise ConfigError(
            f"statistics of the variable {absent[0]} are missing, found those of "
            f"{', '.join(map(str, by_name))}; add them"
        )
    return {
        cell: Normalisation.of(by_name[name], cell[1], method)
        for name, variable_cells in cells.items()
        for cell in variable_cells
    }
