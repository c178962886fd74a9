"""`ActivationLoader`: shuffled batches of stored activations, as arrays.

    states = mizarr.capture(model, prompts, "blocks.*.hook_resid_post", store=store)
    loader = mizarr.ActivationLoader(states, layers=[3, 4], batch=4096, epochs=2, skip_positions=1)
    for batch in loader:
        batch["resid_post"]                          # float32 [row, layer, hidden]
    loader.state_dict()                              # one number and what it is a place in

Border: labelled datasets in, arrays out; order and reading are order.py's and batches.py's. Never imports
torch; `to_torch` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ...store.arrays import as_count, as_indices, is_several, require_kind
from ...store.digest import digest
from ...store.errors import ConfigError
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


class ActivationLoader:
    """Shuffled batches of the rows of one stored run, or of several of one model.

    states: a dataset as `capture` or `store.entry(…).open()` gives it, also with some prompts or layers
    selected; or several. variables, layers: which; by default all that are there. A single number of a layer
    leaves out the axis. batch, buffer_tokens: rows of a batch, and of those shuffled together in memory (two
    such buffers are held); block_tokens: neighbouring tokens that come into a buffer together. seed: order is
    a function of it, the epoch, the prompts chosen and how the run is cut into segments, and of nothing else.
    epochs: None without end. drop_last: leave out the last batch where it is shorter. skip_positions: first
    positions of each prompt that are left out; without: token ids that are (BOS, padding). normalise: how
    rows are scaled, by the statistics given (`state_statistics`; by variable where there are several). dtype:
    "float32", or "stored". labels: whether batches tell run, prompt, position and token_id of their rows.

    A batch is a dict: variable -> [row, layer, width], heads laid side by side; it is the caller's to change,
    and may be a part of the buffer, to be copied where it is kept. Each iteration goes on at `position`, the
    number of the next batch; every row comes once an epoch. Raises ConfigError for settings that do not fit,
    EntryNotFound, ShapeError for variables without a row per token; when a batch is read, ShapeError where
    numbers are not finite, CorruptEntry where a file is damaged.
    """

    def __init__(
        self,
        states: xr.Dataset | StoredActivations | EndToEnd | Sequence[xr.Dataset | StoredActivations],
        variables: Sequence[str] | str | None = None,
        layers: Sequence[int] | int | None = None,
        *,
        batch: int = 4096,
        seed: int = 0,
        buffer_tokens: int = 1 << 15,
        block_tokens: int = 1 << 10,
        epochs: int | None = 1,
        drop_last: bool = False,
        skip_positions: int = 0,
        without: Iterable[int] = (),
        normalise: str | None = None,
        statistics: xr.Dataset | dict[str, xr.Dataset] | None = None,
        dtype: Literal["float32", "stored"] = "float32",
        labels: bool = False,
    ) -> None:
        _check(batch=batch, buffer_tokens=buffer_tokens, block_tokens=block_tokens, epochs=epochs)
        if dtype not in ("float32", "stored"):
            raise ConfigError(f"expected dtype 'float32' or 'stored', found {dtype!r}")
        if buffer_tokens < block_tokens:
            raise ConfigError(
                f"expected buffer_tokens of at least block_tokens={block_tokens}, found {buffer_tokens}"
            )
        source = _source(states)
        if variables is not None:
            require_kind(variables, Iterable, "variables as names", "write ['resid_post']")
        without = as_indices(tuple(without) if isinstance(without, Iterator) else without, "without")
        chosen = None if layers is None else as_indices(layers, "layers")
        self._is_single = layers is not None and not is_several(layers)
        self.cells = _cells(states, source, variables, chosen)
        source.require(cell for cells in self.cells.values() for cell in cells)
        self.dtype, self.labels = dtype, labels
        self._scaled = _normalisations(self.cells, normalise, statistics)
        if normalise is not None and dtype == "stored":
            raise ConfigError("expected dtype 'float32' of rows that are normalised, found 'stored'")
        self.position = 0
        self._batches = Batches(
            Joined(
                source.leaving_out(positions=skip_positions, tokens=tuple(without)),
                {(variable, None): cells for variable, cells in self.cells.items()},
            ),
            tuple((variable, None) for variable in self.cells),
            batch=batch,
            window=buffer_tokens,
            block=block_tokens,
            seed=seed,
            epochs=epochs,
            drop_last=drop_last,
        )

    @property
    def rows(self) -> int:
        """Rows of one epoch: tokens that nothing leaves out."""
        return self._batches.order.rows

    def __len__(self) -> int:
        """Batches that are left; TypeError where there is no end."""
        total = self._batches.total
        if total is None:
            raise TypeError("a loader without epochs= has no length")
        return total - self.position

    def __iter__(self) -> Iterator[Arrays]:
        """The batches from `position` on. Raises ConfigError when none is left."""
        if self._batches.epochs is not None and not len(self):
            raise ConfigError(
                f"all {self.position} batches of {self._batches.epochs} epochs were taken; ask for more "
                "epochs, or set position to 0"
            )
        for batch in self._batches.since(self.position):
            self.position = batch.number + 1
            yield self._made(batch)

    def shared(self, worker: int, workers: int, *, taken: int = 0) -> Iterator[Arrays]:
        """Those of the batches from `position` on that are a worker's: number `worker`, and every
        `workers`-th one behind it. Of all workers in turn they are the batches in order. taken: the first of
        them that are left out.
        """
        if not 0 <= worker < workers:
            raise ConfigError(f"expected a worker below workers={workers}, found {worker}")
        for batch in self._batches.since(self.position + taken * workers, (worker, workers)):
            yield self._made(batch)

    def to_torch(self) -> ActivationDataset:
        """The same as a torch `IterableDataset`: `DataLoader(loader.to_torch(), batch_size=None,
        num_workers=2)`.
        """
        from .torch_dataset import ActivationDataset

        return ActivationDataset(self)

    # -- where it stands

    @property
    def identity(self) -> str:
        """Digest of the rows and of their order."""
        it = self._batches
        settings = [it.batch, it.window, it.block, it.seed, *self._left_out()]
        return digest("activation loader", it.source.identity(it.cells), settings)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as JSON values."""
        return {"position": self.position, "identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Go on where another one stood. Raises ConfigError for one of other rows or another order."""
        if state["identity"] != self.identity:
            raise ConfigError(
                "expected a place in these rows in this order, found one in others; load the same runs with "
                "the same batch, buffer_tokens, block_tokens, seed, skip_positions and without"
            )
        self.position = int(state["position"])
        return self

    def _left_out(self) -> list[Any]:
        source: Any = self._batches.source
        first = source.source.runs[0] if isinstance(source.source, EndToEnd) else source.source
        return [first.skip_positions, list(first.without)]

    # -- batches

    def _made(self, batch: Batch) -> Arrays:
        made: Arrays = {}
        for variable, cells in self.cells.items():
            stored = batch.rows[variable, None]
            rows = as_float32(stored) if self.dtype == "float32" else stored
            layers = rows.reshape(len(rows), len(cells), -1)
            for place, cell in enumerate(cells):
                if cell in self._scaled:
                    self._scaled[cell](layers[:, place])
            has_axis = cells[0][1] is not None and not self._is_single
            made[variable] = layers if has_axis else rows
        return made | (self._batches.source.labels(batch.tokens) if self.labels else {})


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None or name != "epochs":
            as_count(value, name)


def _source(states: Any) -> StoredActivations | EndToEnd:
    if isinstance(states, StoredActivations | EndToEnd):
        return states
    if isinstance(states, Sequence) and not isinstance(states, str | bytes):
        if not states:
            raise ConfigError("expected one stored run or more, found none")
        runs = [_source(each) for each in states]
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
    """Variable -> its cells: those asked for, by default those that the (first) dataset shows."""
    from ...store.reading.selection import as_layer

    first = states[0] if isinstance(states, Sequence) else states
    run = source.runs[0] if isinstance(source, EndToEnd) else source
    shown: dict[str, list[int | None]] = {}
    if isinstance(first, StoredActivations | EndToEnd):
        for name, layer in run.entry.published():
            shown.setdefault(name, []).append(layer)
    else:
        for name, array in first.data_vars.items():
            found = as_layer(array)
            has = "layer" in found.coords
            shown[str(name)] = np.atleast_1d(found["layer"].values).tolist() if has else [None]
    packed = [name for name in shown if run.entry.spec(name).packed == "token"]
    asked = [variables] if isinstance(variables, str) else packed if variables is None else list(variables)
    if not asked:
        raise ConfigError("expected variables with a row per token, found none; capture some")
    cells: dict[str, list[Cell]] = {}
    for name in asked:
        has_layers = run.entry.spec(name).layers is not None
        held = shown.get(name, []) if layers is None or not has_layers else layers
        cells[name] = [(name, layer) for layer in held]
    return cells


def _normalisations(
    cells: Mapping[str, Sequence[Cell]],
    how: str | None,
    statistics: xr.Dataset | dict[str, xr.Dataset] | None,
) -> dict[Cell, Normalisation]:
    if how is None and statistics is None:
        return {}
    if how is None or statistics is None:
        raise ConfigError(
            "expected normalise= and statistics= together, found one of them; statistics are what "
            "state_statistics(states.resid_post) gives"
        )
    by_name = statistics if isinstance(statistics, dict) else dict.fromkeys(cells, statistics)
    if len(cells) > 1 and not isinstance(statistics, dict):
        raise ConfigError(
            f"expected statistics of each of {', '.join(cells)}, found one set; give them by variable"
        )
    if absent := [name for name in cells if name not in by_name]:
        raise ConfigError(
            f"expected statistics of {absent[0]}, found those of {', '.join(map(str, by_name))}"
        )
    return {
        cell: Normalisation.of(by_name[name], cell[1], how) for name, held in cells.items() for cell in held
    }
