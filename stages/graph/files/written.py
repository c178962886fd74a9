# ruff: noqa: D102 - what each is, the docstrings of the graph say
"""What the files of a graph are written from.

Border: what writers ask of a graph, no more; the graph itself is graph.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import xarray as xr

    from ..pruning import Kept
    from ..rows.nodes import NodeCounts

__all__ = ["WrittenGraph", "WrittenPart"]


class WrittenGraph(Protocol):
    """A whole graph; the properties are AttributionGraph's."""

    dataset: xr.Dataset

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
    """The part of a graph that matters at two thresholds; the properties are PrunedGraph's."""

    kept: Kept
    node_threshold: float

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
