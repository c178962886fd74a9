"""Where graphs begin: datasets made by a function of declared identity, and datasets in hand.

Border: says what something is and gets it; what reads it is a stage's business. What cannot be identified is
refused, as a key that guesses returns somebody else's numbers.
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


class SourceNode(ResultNode):
    """A dataset made by a function from declared parameters, e.g. a model's readout from its files.

    params: plain values that identify the result: digests of files, not their names. make: called in the main
    process, and only while the result is not stored. pinned: what `make` reads.
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
        # A worker reads; what these hold on to stays here, where the source was checked.
        return {**self.__dict__, "_make": None, "_pinned": ()}

    @property
    def pinned(self) -> Sequence[Pinned]:
        """What `make` reads."""
        return self._pinned

    def key(self, store: Store) -> ResultKey:
        """Made of the parameters alone."""
        return ResultKey(self.name, self.version, self.params, {})

    def status(self, store: Store) -> Status:
        """Whether it is stored."""
        check_pinned(self)
        key = self.key(store)
        return Status(True, cells_cached=1) if store.lookup(key) else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """As declared, while it is missing; seconds in proportion to the bytes read last time."""
        if status_of(self, store).is_cached:
            return NOTHING
        last = last_timed(self.name, store, lambda note: bool(note.get("bytes_read")))
        if last is None:
            return self._estimate
        share = self._estimate.bytes_read / last["bytes_read"]
        return replace(self._estimate, seconds=round(scaled_seconds(last, share), 3))

    def run(self, store: Store, context: Context) -> None:
        """Make and publish it, in the calling thread."""
        with measured() as took:
            made = self._make()
            note = {**took(), "bytes_read": self._estimate.bytes_read}
        self.publish(store, self.key(store), made, note)


class ConstantNode(Ports):
    """A dataset in hand as an input: identified by its content, stored only when a cluster has to read it.

    The dataset is copied, so that changing the original in place does not change what the digest stands for;
    what it reads lazily is digested once more before anything made of it is published. Raises ShapeError for
    dtypes and attributes that cannot be digested.
    """

    inputs: tuple[Node, ...] = ()

    def __init__(self, dataset: xr.Dataset, name: str = "constant") -> None:
        from ..store.content import content_of

        self.name = name
        self._dataset: xr.Dataset | None = dataset.copy(deep=True)
        self.content = content_of(dataset)
        self._is_lazy = any(not variable._in_memory for variable in dataset.variables.values())

    def __repr__(self) -> str:
        return f"ConstantNode({self.name}, {self.content[:19]})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}  # workers read what `keep` has stored

    def keep(self, store: Store) -> None:
        """Store it, so that workers of a cluster can read it: paths travel, arrays do not."""
        whole = cut(self.content, lambda: self._held(store), None, {}, changes=self._is_lazy)
        store.put_result(self._key, self._held(store), provenance={}, confirm=whole.check)

    def status(self, store: Store) -> Status:
        """Cached: what is in hand needs no run."""
        return Status(True, cells_cached=1)

    def estimate(self, store: Store) -> Estimate:
        """Nothing is read or written: it is there."""
        return NOTHING

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Its layers or blocks; all tokens are one segment."""
        dataset = self._held(store)
        if axis != "segment":
            return indices_along(dataset, axis)
        return [(0, dataset.sizes["token"])] if "token" in dataset.dims else []

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """See `Node`; the store is read in workers alone, which have no dataset in hand."""
        held = self._held(store)
        return cut(self.content, lambda: held, variable, selection, changes=self._is_lazy)

    def run(self, store: Store, context: Context) -> None:
        """Does nothing: what is in hand is there."""

    def open(self, store: Store) -> xr.Dataset:
        """The dataset in hand, as it was given."""
        return self._held(store)

    @property
    def _key(self) -> ResultKey:
        return ResultKey("constant", 1, {"content": self.content}, {})

    def _held(self, store: Store) -> xr.Dataset:
        if self._dataset is None:
            self._dataset = store.open_result(self._key)
        return self._dataset


def as_port(given: Any, name: str) -> Port:
    """Whatever may be given as a stage's input, as a port; StageError for what has no identity."""
    if isinstance(given, Port):
        return given
    if isinstance(given, Node):
        return Port(given)
    import xarray as xr

    if isinstance(given, xr.DataArray):
        label = name if given.name is None else str(given.name)
        return Port(ConstantNode(given.to_dataset(name=label), name), label)
    if isinstance(given, xr.Dataset):
        return Port(ConstantNode(given, name))
    raise StageError(
        f"input {name!r}: expected a node, node['variable'] or a labelled array (xarray), found "
        f"{type(given).__name__}; name the axes of a bare array: xr.DataArray(values, dims=(…))"
    )
