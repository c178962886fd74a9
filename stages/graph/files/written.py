# ruff: noqa: D102 - the properties are documented in `AttributionGraph` and `PrunedGraph`
"""Protocols of the graphs that writers of files accept: the properties they use, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xarray as xr

    from ..pruning import KeptPart
    from ..rows.nodes import NodeCounts

__all__ = ["WrittenGraph", "WrittenPart"]


class WrittenGraph(Protocol):
    """A whole graph; its properties are those of `AttributionGraph`."""

    dataset: xr.Dataset
    """Stored dataset of the graph."""

    @property
    def counts(self) -> NodeCounts: ...
    @property
    def nodes(self) -> xr.Dataset: ...
    @property
    def adjacency(self) -> xr.DataArray: ...
    @property
    def prompt(self) -> str: ...
    @property
    def scan(self) -> str | list[str] | None: ...
    @property
    def input_tokens(self) -> npt.NDArray[np.int64]: ...
    @property
    def active_features(self) -> npt.NDArray[np.int64]: ...
    @property
    def activation_values(self) -> npt.NDArray[np.float32]: ...
    @property
    def selected_features(self) -> npt.NDArray[np.int64]: ...
    @property
    def logit_token_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def logit_tokens(self) -> list[str]: ...
    @property
    def logit_probabilities(self) -> npt.NDArray[np.float64]: ...


class WrittenPart(Protocol):
    """A pruned graph; its properties are those of `PrunedGraph`."""

    kept: KeptPart
    """The kept nodes and edges."""
    node_threshold: float
    """Share of the influence that the kept nodes carry."""

    @property
    def graph(self) -> WrittenGraph: ...
    @property
    def node_mask(self) -> npt.NDArray[np.bool_]: ...
    @property
    def cumulative_scores(self) -> npt.NDArray[np.float64]: ...
    @property
    def nodes(self) -> xr.Dataset: ...
    @property
    def edges(self) -> xr.Dataset: ...
