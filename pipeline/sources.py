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
    """Node for a dataset that a function makes from declared parameters, e.g. a model's unembedding.

    Arguments:
        name: Name of the result in keys.
        version: Version of the function in keys; raise it when the result changes.
        params: Plain values that identify the result; digests of files instead of their names.
        make: Computes the dataset; called in the main process, and only while the result is not stored.
        estimate: Expected cost of calling `make`.
        pinned: Files or weights that `make` reads.
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
        """Look up whether the dataset is stored."""
        check_pinned(self)
        key = self.key(store)
        return Status(True, cells_cached=1) if store.lookup(key) else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """Expected cost while the dataset is not stored: as declared, with seconds scaled from the last
        run."""
        if status_of(self, store).is_cached:
            return NOTHING
        last_note = last_timed(self.name, store, lambda note: bool(note.get("bytes_read")))
        if last_note is None:
            return self._estimate
        share = self._estimate.bytes_read / last_note["bytes_read"]
        return replace(self._estimate, seconds=round(scaled_seconds(last_note, share), 3))

    def run(self, store: Store, context: Context) -> None:
        """Make and store the dataset, in the calling thread."""
        with measured() as took:
            dataset = self._make()
            note = {**took(), "bytes_read": self._estimate.bytes_read}
        self.publish(store, self.key(store), dataset, note)


class ConstantNode(Ports):
    """Node for a dataset in memory that is an input of a stage, identified by its content.

    It is stored only if worker processes must read it. The dataset is copied, so that changing the original
    in place does not invalidate the digest. Data that it reads lazily is digested again before anything
    computed from it is published.

    Raises:
        ShapeError: A dtype or attribute cannot be digested.
    """

    inputs: tuple[Node, ...] = ()
    """A dataset in memory reads no other node."""

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
        """Store the dataset for worker processes; arrays are never sent to workers directly."""
        whole = cut(self.content, lambda: self._loaded(store), None, {}, changes=self._is_lazy)
        store.put_result(self._key, self._loaded(store), provenance={}, confirm=whole.check)

    def status(self, store: Store) -> Status:
        """Always cached, as a dataset in memory needs no computation."""
        return Status(True, cells_cached=1)

    def estimate(self, store: Store) -> Estimate:
        """Zeros, as nothing has to be read or written."""
        return NOTHING

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Numbers along the axis "layer" or "block"; for "segment" one range (0, end) with all tokens."""
        dataset = self._loaded(store)
        if axis != "segment":
            return indices_along(dataset, axis)
        return [(0, dataset.sizes["token"])] if "token" in dataset.dims else []

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the dataset: one variable (None: all), cut by layer, block and token range.

        The store is read only by workers, which do not have the dataset in memory.
        """
        dataset = self._loaded(store)
        return cut(self.content, lambda: dataset, variable, selection, changes=self._is_lazy)

    def run(self, store: Store, context: Context) -> None:
        """Do nothing, as the dataset is in memory already."""

    def open(self, store: Store) -> xr.Dataset:
        """The dataset in memory; a worker reads the stored copy."""
        return self._loaded(store)

    @property
    def _key(self) -> ResultKey:
        """Key under which `keep` stores the dataset."""
        return ResultKey("constant", 1, {"content": self.content}, {})

    def _loaded(self, store: Store) -> xr.Dataset:
        """The dataset in memory; on a worker the stored copy."""
        if self._dataset is None:
            self._dataset = store.open_result(self._key)
        return self._dataset


def as_port(source: Any, name: str) -> Port:
    """Convert an argument of a stage to a `Port`, the form in which a node reads its inputs.

    Arguments:
        source: A port, a node, an xarray DataArray or a Dataset.
        name: Name of the input, for messages and as the name of a constant node.

    Raises:
        StageError: The argument is of another type.
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
