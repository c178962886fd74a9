"""Nodes where graphs begin: datasets made by a function of declared identity, and datasets in memory.

Border: identifies a dataset and provides it; what reads it is decided by stages. Data that cannot be
identified is refused, because a guessed key could return the result of other data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..store.errors import StageError
from ..store.keys import ResultKey
from .context import Selection
from .memory import measured
from .nodes import (
    Estimate,
    Node,
    Part,
    Port,
    Ports,
    ResultNode,
    Status,
    check_pinned,
    cut,
    indices_along,
    status_of,
)
from .parameters import parameter_records
from .reasons import last_timed, scaled_seconds, why_not

if TYPE_CHECKING:
    import xarray as xr

    from ..store import Store
    from .context import Context
    from .pinned import Pinned

NOTHING = Estimate()
"""The estimate of a cached node."""


class SourceNode(ResultNode):
    """A dataset made by a function from declared parameters, e.g. a model's readout from its files.

    Arguments:
        name: Name in keys.
        version: Raise it when the result changes.
        params: Plain values that identify the result; digests of files instead of their names.
        make: Computes the dataset; called in the main process, and only while the result is not stored.
        estimate: Cost of calling `make`.
        pinned: Resources that `make` reads.
    """

    def __init__(
        self,
        name: str,
        version: int,
        params: Mapping[str, Any],
        make: Callable[[], xr.Dataset],
        estimate: Estimate = NOTHING,
        pinned: Sequence[Pinned] = (),
    ) -> None:
        self.name, self.version, self.params = name, version, parameter_records(params)
        self._make, self._estimate, self._pinned = make, estimate, pinned

    def __repr__(self) -> str:
        return f"SourceNode({self.name}, {self.params})"

    def __getstate__(self) -> dict[str, Any]:
        # Workers only read the stored result; functions and open files stay in the main process.
        return {**self.__dict__, "_make": None, "_pinned": ()}

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Resources read by `make`, such as checkpoint files."""
        return self._pinned

    def key(self, store: Store) -> ResultKey:
        """Result key, from name, version and parameters; a source reads no other node."""
        return ResultKey(self.name, self.version, self.params, {})

    def status(self, store: Store) -> Status:
        """Whether the dataset is stored."""
        check_pinned(self)
        key = self.key(store)
        return Status(True, cells_cached=1) if store.lookup(key) else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """The declared estimate while the dataset is missing; seconds scaled by bytes from the last run."""
        if status_of(self, store).is_cached:
            return NOTHING
        last_note = last_timed(self.name, store, lambda note: bool(note.get("bytes_read")))
        if last_note is None:
            return self._estimate
        share = self._estimate.bytes_read / last_note["bytes_read"]
        return replace(self._estimate, seconds=round(scaled_seconds(last_note, share), 3))

    def run(self, store: Store, context: Context) -> None:
        """See `Node.run`: makes and publishes the dataset in the calling thread."""
        with measured() as took:
            dataset = self._make()
            note = {**took(), "bytes_read": self._estimate.bytes_read}
        self.publish(store, self.key(store), dataset, note)


class ConstantNode(Ports):
    """A dataset in memory as an input: identified by its content, stored only if worker processes must read
    it.

    The dataset is copied, so that changing the original in place does not invalidate the digest. Data that it
    reads lazily is digested again before anything computed from it is published.

    Raises:
        ShapeError: A dtype or attribute cannot be digested.
    """

    inputs: tuple[Node, ...] = ()

    def __init__(self, dataset: xr.Dataset, name: str = "constant") -> None:
        from ..store.content import content_of

        self.name = name
        # A deep copy: the original may be changed in place after its content was digested.
        self._dataset: xr.Dataset | None = dataset.copy(deep=True)
        self.content = content_of(dataset)
        self._is_lazy = any(not variable._in_memory for variable in dataset.variables.values())

    def __repr__(self) -> str:
        return f"ConstantNode({self.name}, {self.content[:19]})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}  # workers read the copy that `keep` stored

    def keep(self, store: Store) -> None:
        """Store the dataset for workers of a cluster; arrays are never sent to workers directly."""
        whole = cut(self.content, lambda: self._loaded(store), None, {}, changes=self._is_lazy)
        store.put_result(self._key, self._loaded(store), provenance={}, confirm=whole.check)

    def status(self, store: Store) -> Status:
        """Always cached: a dataset in memory needs no run."""
        return Status(True, cells_cached=1)

    def estimate(self, store: Store) -> Estimate:
        """Zeros: nothing has to be read or written."""
        return NOTHING

    def labels(self, store: Store, axis: str) -> list[Any]:
        """See `Node.labels`: for "segment" one range with all tokens of the dataset."""
        dataset = self._loaded(store)
        if axis != "segment":
            return indices_along(dataset, axis)
        return [(0, dataset.sizes["token"])] if "token" in dataset.dims else []

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """See `Node.part`. Only workers, which have no dataset in memory, read the store."""
        dataset = self._loaded(store)
        return cut(self.content, lambda: dataset, variable, selection, changes=self._is_lazy)

    def run(self, store: Store, context: Context) -> None:
        """See `Node.run`: nothing to do, as the dataset is in memory already."""

    def open(self, store: Store) -> xr.Dataset:
        """The dataset in memory; a worker reads the stored copy."""
        return self._loaded(store)

    @property
    def _key(self) -> ResultKey:
        return ResultKey("constant", 1, {"content": self.content}, {})

    def _loaded(self, store: Store) -> xr.Dataset:
        if self._dataset is None:
            self._dataset = store.open_result(self._key)
        return self._dataset


def as_port(source: Any, name: str) -> Port:
    """A stage's input as a port.

    Arguments:
        source: A port, a node, an xarray DataArray or a Dataset.
        name: Name of the input, for messages and as the name of a constant node.

    Raises:
        StageError: The value is of another type and has no identity.
    """
    if isinstance(source, Port):
        return source
    if isinstance(source, Node):
        return Port(source)
    import xarray as xr

    # The variable's name enters the key, so an unnamed array gets the input's name.
    if isinstance(source, xr.DataArray):
        label = name if source.name is None else str(source.name)
        return Port(ConstantNode(source.to_dataset(name=label), name), label)
    if isinstance(source, xr.Dataset):
        return Port(ConstantNode(source, name))
    raise StageError(
        f"input {name!r}: expected a node, node['variable'] or a labelled array (xarray), found "
        f"{type(source).__name__}; name the axes of a bare array: xr.DataArray(values, dims=(…))"
    )
