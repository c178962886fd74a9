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
    """How rows are shuffled, cut into batches and converted.

    Raises:
        ConfigError: for settings that do not fit each other.
    """

    batch: int = option(4096, "Rows per batch.", kind="count")
    seed: int = option(
        0,
        "Seed of the order, which is a function of it, the epoch, the prompts chosen and the segments of the "
        "run, and of nothing else.",
    )
    buffer_tokens: int = option(
        1 << 15, "Rows shuffled together in memory; two such buffers are held.", kind="count"
    )
    block_tokens: int = option(1 << 10, "Neighbouring tokens that enter a buffer together.", kind="count")
    epochs: int | None = option(1, "Passes over the rows; None without end.", kind="count")
    drop_last: bool = option(False, "Leave out the last batch where it is shorter.")
    skip_positions: int = option(0, "Number of first positions of each prompt that are left out.")
    without: Iterable[int] = option((), "Token ids whose rows are left out, such as BOS and padding.")
    normalise: str | None = option(
        None, "Method that scales rows by `statistics`; see normalisation.py. Default none."
    )
    statistics: xr.Dataset | dict[str, xr.Dataset] | None = option(
        None, "Statistics of the rows (`state_statistics`); by variable where there are several."
    )
    dtype: Literal["float32", "stored"] = option(
        "float32", "Dtype of batches, or that of the store.", choices=("float32", "stored")
    )
    labels: bool = option(False, "Whether batches hold run, prompt, position and token_id of their rows.")

    def __post_init__(self) -> None:
        _check(
            batch=self.batch,
            buffer_tokens=self.buffer_tokens,
            block_tokens=self.block_tokens,
            epochs=self.epochs,
        )
        if self.dtype not in ("float32", "stored"):
            raise ConfigError(f"expected dtype 'float32' or 'stored', found {self.dtype!r}")
        if self.buffer_tokens < self.block_tokens:
            raise ConfigError(
                f"expected buffer_tokens of at least block_tokens={self.block_tokens}, found "
                f"{self.buffer_tokens}"
            )
        without = tuple(self.without) if isinstance(self.without, Iterator) else self.without
        object.__setattr__(self, "without", tuple(as_indices(without, "without")))
        if self.normalise is not None and self.dtype == "stored":
            raise ConfigError("expected dtype 'float32' of rows that are normalised, found 'stored'")


class ActivationLoader:
    """Shuffled batches of the rows of one stored run, or of several of one model.

    A batch is a dict: variable -> [row, layer, width], heads laid side by side; it is the caller's to change,
    and may be a part of the buffer, to be copied where it is kept. Each iteration continues at `position`,
    the number of the next batch; every row comes once an epoch.

    Args:
        states: a dataset as `capture` or `store.entry(…).open()` returns it, also with some prompts or layers
            selected; or several.
        variables: names of the variables; default all.
        layers: layers; default all. A single number leaves out the layer axis.
        options: see below.

    Raises:
        ConfigError: for settings that do not fit.
        EntryNotFound, ShapeError: for variables without a row per token.
        ShapeError: when a batch is read whose numbers are not finite.
        CorruptEntry: when a batch is read from a damaged file.
    """

    @takes_options(LoaderOptions)
    def __init__(
        self,
        states: xr.Dataset | StoredActivations | EndToEnd | Sequence[xr.Dataset | StoredActivations],
        variables: Sequence[str] | str | None = None,
        layers: Sequence[int] | int | None = None,
        **options: Any,
    ) -> None:
        (chosen,) = split_options("ActivationLoader", options, LoaderOptions)
        given = LoaderOptions(**chosen)
        source = _source(states)
        if variables is not None:
            require_kind(variables, Iterable, "variables as names", "write ['resid_post']")
        wanted = None if layers is None else as_indices(layers, "layers")
        self._is_single = layers is not None and not is_several(layers)
        self.cells = _cells(states, source, variables, wanted)
        source.require(cell for cells in self.cells.values() for cell in cells)
        self.dtype, self.labels = given.dtype, given.labels
        self._scaled = _normalisations(self.cells, given.normalise, given.statistics)
        self.position = 0
        self._batches = Batches(
            Joined(
                source.leaving_out(positions=given.skip_positions, tokens=tuple(given.without)),
                {(variable, None): cells for variable, cells in self.cells.items()},
            ),
            tuple((variable, None) for variable in self.cells),
            batch=given.batch,
            window=given.buffer_tokens,
            block=given.block_tokens,
            seed=given.seed,
            epochs=given.epochs,
            drop_last=given.drop_last,
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
