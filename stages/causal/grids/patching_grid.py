"""Grids of runs that each change one place of a model: base of patching, tracing and ablation.

A `Grid` names hook points (kinds at layers) and the places within each: every position, every head, both, or
every attention edge. It makes one run per place (and sample), reads metrics from the logits of each, and
arranges them as a labelled array. Subclasses define what a place is replaced by.

Border: lists runs and arranges their numbers; patching.py, tracing.py and ablation.py make the payloads,
forward/ computes the runs. Planning imports no torch.

Axes: kind (only with several), layer, then head (kv_head for k and v), position (query_position for the
pattern), key_position. Cells: (kind, layer). The position of a recurrent state is that of the last token it
has read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Floats, as_indices
from ....store.errors import InterventionError, StageError, nearest
from ...forward.architectures.points import BY_NAME, HookPoint, require_known
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels, Experiment
from ...forward.runs.run import Run
from .patching_metrics import Metric, Recovery, check_metrics, read_metrics, required_tokens
from .patching_results import Blank, PreparedGrid, as_vector, metric_outputs, metrics_of, outputs_along, stack

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache

__all__ = ["HEAD_KINDS", "HIDDEN_KINDS", "KINDS", "STATE_KINDS", "Grid", "GridPlace", "layer_window"]

HIDDEN_KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""Hook kinds of the residual stream and what is added to it, without a head axis."""
HEAD_KINDS = ("z", "q", "k", "v", "pattern")
"""Hook kinds of attention, with a head axis."""
STATE_KINDS = (
    *("rwkv_state_seq", "rwkv_r", "rwkv_k", "rwkv_v", "rwkv_wkv_out"),
    *("ssm_state_seq", "ssm_x", "ssm_out"),
    *("linear_state_seq", "linear_v", "linear_out"),
    *("mlstm_state_seq", "mlstm_q", "mlstm_k", "mlstm_v", "mlstm_out"),
)
"""Hook kinds of recurrent models, with head and position axes."""
EXPERT_KINDS = ("expert_weights",)
"""Hook kinds of mixtures of experts; their expert axis takes the place of the head axis."""
KINDS = (*HIDDEN_KINDS, *HEAD_KINDS, *STATE_KINDS, *EXPERT_KINDS)
"""Hook kinds that a grid can change."""
OVER: Mapping[str, tuple[str, ...]] = {
    "layer": (),
    "position": ("position",),
    "head": ("head",),
    "head_position": ("head", "position"),
    "edge": ("head", "position", "key_position"),
}
"""Value of `Grid.over` -> axes along which each index gets its own run; other axes are changed as a whole."""
COMMON = {"kv_head": "head", "expert": "head", "query_position": "position"}
"""Axis name of one hook kind -> common axis name, for stacking several kinds."""


@dataclass(frozen=True)
class GridPlace:
    """Sub-array of an activation (position, head, key) that a run patches."""

    position: int | None = None
    """Position, of the pattern the query position; None for all."""
    head: int | None = None
    """Head index, or expert index for expert kinds; None for all."""
    key: int | None = None
    """Key position of an attention edge; None for all."""


@dataclass(frozen=True, kw_only=True)
class Grid(Experiment):
    """One run per place of each hook point."""

    kinds: tuple[str, ...]
    """Hook kinds to patch, from `KINDS`."""
    metrics: tuple[Metric, ...]
    """Metrics read from the logits of every run; at least one."""
    over: str = "position"
    """"layer" (the whole activation), "position", "head" (all positions), "head_position", or "edge"
    (attention pattern by head, query and key).
    """
    layers: tuple[int, ...] | None = None
    """Layers; None for all."""
    positions: tuple[int, ...] | None = None
    """Positions; None for all."""
    heads: tuple[int, ...] | None = None
    """Heads; None for all."""
    window: int = 1
    """Number of neighbouring layers changed together, centred on the labelled one."""
    at: int = -1
    """Position whose next-token logits are read; negative counts from the end."""

    outputs: ClassVar[Mapping[str, Output]] = outputs_along(
        "kind?", "layer", "head|kv_head|expert?", "position|query_position?", "key_position?"
    )
    reads_text: ClassVar[bool] = True
    has_corrupted: ClassVar[bool] = True
    """Whether an unpatched run exists that differs from the clean one."""
    selects: ClassVar[tuple[str, ...]] = ("kinds", "layers")
    """Fields that select cells and do not enter the key of a cell."""

    @property
    @abstractmethod
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the run that is changed."""

    @abstractmethod
    def change(
        self,
        spec: HookSpec,
        prepared: PreparedGrid,
        kind: str,
        layers: Sequence[int],
        place: GridPlace,
        sample: int,
    ) -> HookSpec:
        """`spec` with the interventions of one place added.

        Arguments:
            spec: HookSpec of the unchanged run, from `base`.
            prepared: what `prepare` returned.
            kind: hook kind.
            layers: layers of the window.
            place: part of the activation.
            sample: number of the sample, 0 unless `num_samples` exceeds 1.
        """

    @property
    def num_samples(self) -> int:
        """Number of runs per place; their mean and standard deviation are reported."""
        return 1

    # -- declaration

    def params(self) -> dict[str, Any]:
        """All fields but those that select cells, so that a cell keeps its key in a larger grid."""
        fields = {name: value for name, value in vars(self).items() if name not in self.selects}
        return {**fields, "metrics": [metric.canonical() for metric in self.metrics]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """One array per metric, with the axes of the patched kinds."""
        dims = ["layer", *(name for name, _ in self.axes(config, self.kinds[0]))]
        if len(set(self.kinds)) > 1:
            dims = ["kind", *(COMMON.get(name, name) for name in dims)]
        return metric_outputs(self.metrics, dims, self.num_samples)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per kind and layer.

        Raises:
            StageError: for an empty grid, unknown kinds, or kinds that do not fit `over`.
            PromptError: for a metric's token outside the vocabulary.
            InterventionError: for an index out of range.
        """
        self.check(config)
        layers = range(config.num_layers) if self.layers is None else self.layers
        numbers = [layer % config.num_layers for layer in layers]
        # Bidirectional models also have edges to later keys; the label keeps their cells apart from causal
        # ones.
        edges = {"edges": "all"} if self.over == "edge" and config.looks_ahead else {}
        return [{"kind": kind, "layer": layer, **edges} for kind in self.kinds for layer in numbers]

    def check(self, config: Architecture) -> None:
        """Check the fields against a model; see `cells` for the errors."""
        check_metrics(self.metrics, config.vocab_size)
        if not self.has_corrupted and any(isinstance(metric, Recovery) for metric in self.metrics):
            raise StageError(f"{self.name} has no corrupted run to recover from; use the metric itself")
        if self.over not in OVER:
            raise StageError(
                f"{self.name}: expected over to be one of {', '.join(OVER)}, found {self.over!r}"
            )
        for field_, values in (("kinds", self.kinds), ("layers", self.layers), ("positions", self.positions)):
            _not_empty(self.name, field_, values)
        _not_empty(self.name, "heads", self.heads)
        for kind in self.kinds:
            self._check_kind(kind)
            layers = range(config.num_layers) if self.layers is None else self.layers
            points = [HookPoint(kind, layer % config.num_layers) for layer in layers]
            require_known(points, config.hook_points, config.model_type)
            in_range(self.name, "head", self.heads, num_heads(config, kind))
        in_range(self.name, "layer", self.layers, config.num_layers)
        in_range(self.name, "position", self.positions, len(self.prompt))
        if self.window < 1 or (self.over == "edge" and self.window > 1):
            minimum = "1, as an edge is read from the run it changes" if self.over == "edge" else "at least 1"
            raise StageError(f"{self.name}: expected a window of {minimum}, found {self.window}")
        in_range(f"{self.name}, at", "position", (self.at,), len(self.prompt))

    def _check_kind(self, kind: str) -> None:
        if kind not in KINDS:
            near = nearest(kind, KINDS)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(KINDS)}"
            raise StageError(f"{self.name}: cannot patch {kind!r}; {hint}")
        allowed = ("pattern",) if self.over == "edge" else (*HEAD_KINDS, *STATE_KINDS, *EXPERT_KINDS)
        if "head" in OVER[self.over] and kind not in allowed:
            raise StageError(
                f"{self.name}: over={self.over!r} takes {', '.join(allowed)}, found {kind!r}; use "
                f"over={'position' if kind in HIDDEN_KINDS else 'head_position'!r} for it"
            )
        if self.over == "edge" and self.kinds != ("pattern",):
            raise StageError(f"{self.name}: over='edge' takes kinds=('pattern',), found {self.kinds}")

    def points(self, config: Architecture) -> list[HookPoint]:
        """Hook points of `kinds` at every layer that has them."""
        return [point for kind in self.kinds for point in config.points_of(kind)]

    # -- runs

    def places(self, config: Architecture, kind: str) -> list[GridPlace]:
        """Places of one hook point, last axis fastest; edges to later keys only on bidirectional models.

        Arguments:
            config: architecture of the model.
            kind: hook kind.
        """
        axes = dict(self.axes(config, kind))
        choices: list[Sequence[int | None]] = [
            next((axes[name] for name in names if name in axes), [None])
            for names in (("head", "kv_head", "expert"), ("position", "query_position"), ("key_position",))
        ]
        return [
            GridPlace(position, head, key)
            for head, position, key in product(*choices)
            if key is None or position is None or key <= position or config.looks_ahead
        ]

    def axes(self, config: Architecture, kind: str) -> list[tuple[str, list[int]]]:
        """(name, labels) of each axis of one hook point, in order.

        Arguments:
            config: architecture of the model.
            kind: hook kind.
        """
        length = len(self.prompt)
        labels = {
            "head": self._labels(self.heads, num_heads(config, kind)),
            "position": self._labels(self.positions, length),
            "key_position": list(range(length)),
        }
        # Grouped-query models have fewer key/value heads than heads: an axis name of its own keeps them
        # apart.
        names = {"head": "kv_head"} if kind in ("k", "v") else {}
        names |= {"head": "expert"} if kind in EXPERT_KINDS else {}
        names |= {"position": "query_position"} if kind == "pattern" else {}
        return [(names.get(axis, axis), labels[axis]) for axis in OVER[self.over]]

    @staticmethod
    def _labels(indices: tuple[int, ...] | None, size: int) -> list[int]:
        # Negative indices become positive, so that equal places have equal labels.
        return list(range(size)) if indices is None else [int(index) % size for index in indices]

    def base(self, prepared: PreparedGrid, sample: int) -> HookSpec:
        """HookSpec of the run before a place is changed; tracing adds its noise here.

        Arguments:
            prepared: what `prepare` returned.
            sample: number of the sample.
        """
        return HookSpec()

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One run per place and sample, samples fastest."""
        kind, layer = cell["kind"], cell["layer"]
        # In hybrid models a window may cover layers of another mixer, which lack this hook point.
        layers_with_kind = prepared.config.layers_with(kind)
        layers = [
            neighbour
            for neighbour in layer_window(layer, self.window, prepared.config.num_layers)
            if neighbour in layers_with_kind
        ]
        return [
            Run(
                self.prompt,
                self.change(self.base(prepared, sample), prepared, kind, layers, place, sample),
                self.want,
            )
            for place in self.places(prepared.config, kind)
            for sample in range(self.num_samples)
        ]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with constant payloads in place of activations."""
        return self.runs(PreparedGrid(config, np.zeros(0), [], self.blank(config), {}), cell)

    def blank(self, config: Architecture) -> Mapping[Any, Any]:
        """Placeholder for `PreparedGrid.activations` while runs are only planned."""
        return Blank(config, len(self.prompt))

    @property
    def want(self) -> Logits:
        """Logits at one position, of the tokens that the metrics read."""
        return Logits((self.at,), required_tokens(self.metrics))

    # -- numbers

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Floats:
        """Every metric of one run, float64 [metric], not rescaled."""
        return read_metrics(self.metrics, as_vector(result.logits), prepared.clean)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """Metrics of one hook point, [layer, *axes], and those of the unpatched runs."""
        kind, samples = cell["kind"], self.num_samples
        axes = self.axes(prepared.config, kind)
        # Edges to later keys have no run on a causal model: they get the metrics of the unpatched run.
        unpatched = prepared.unpatched or [prepared.clean] * samples
        values = np.stack([read_metrics(self.metrics, logits, prepared.clean) for logits in unpatched])
        values = np.tile(values, (*[len(labels) for _, labels in axes], 1, 1))
        by_place = np.array(measured).reshape(-1, samples, len(self.metrics))
        for place, numbers in zip(self.places(prepared.config, kind), by_place, strict=True):
            values[_index(place, axes)] = numbers
        dims = ["layer", *[name for name, _ in axes]]
        dataset = metrics_of(prepared, self.metrics, values[None], dims)
        coords: dict[str, Any] = {name: (name, np.array(labels, np.int64)) for name, labels in axes}
        for axis in {"position", "query_position"} & coords.keys():
            for name, texts in prepared.tokens.items():
                coords[name] = (axis, [texts[index] for index in coords[axis][1]])
        return dataset.assign_coords(**coords, layer=[cell["layer"]], kind=kind)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Layers concatenated; several kinds stacked along `kind`, NaN where a kind has fewer heads."""
        stacked = [
            stack([part for part in parts if str(part["kind"].values) == kind], "layer")
            # A kind that is named twice is stacked once.
            for kind in dict.fromkeys(self.kinds)
        ]
        if len(stacked) == 1:
            return stacked[0]
        renamed = [
            dataset.rename({a: b for a, b in COMMON.items() if a in dataset.dims}) for dataset in stacked
        ]
        # k and v may have fewer heads than z and q: their missing heads become NaN instead of failing the
        # join.
        if "head" in renamed[0].dims:
            all_heads = max((dataset["head"].values for dataset in renamed), key=len)
            renamed = [dataset.reindex(head=all_heads) for dataset in renamed]
        both = stack([dataset.drop_vars("kind") for dataset in renamed], "kind")
        both = both.assign_coords(kind=list(dict.fromkeys(self.kinds)))
        both.attrs["note"] = (
            "heads of k and v are key/value heads, of which there are fewer: NaN past the last; positions of "
            "the pattern are queries"
        )
        return both


def layer_window(layer: int, width: int, num_layers: int) -> list[int]:
    """Neighbouring layers centred on one, clipped to the model (as in ROME, from layer - width // 2).

    Arguments:
        layer: layer in the centre.
        width: number of layers.
        num_layers: number of layers of the model.
    """
    return list(range(max(0, layer - width // 2), min(num_layers, layer + (width + 1) // 2)))


def num_heads(config: Architecture, kind: str) -> int:
    """Number of heads of a hook kind: key/value heads for k and v, experts for a mixture, 0 without heads.

    Arguments:
        config: architecture of the model.
        kind: hook kind.
    """
    axis = head_axis(BY_NAME[kind].dims)
    return 0 if axis is None else config.axis_sizes[axis]


def head_axis(dims: Sequence[str]) -> str | None:
    """Axis that counts heads or experts; None without one."""
    # d_head ends with "head" too, but is the width of a head.
    return next((axis for axis in dims if axis.endswith(("head", "expert")) and axis != "d_head"), None)


def part_of(activation: Tensor, point: HookPoint, place: GridPlace) -> Tensor:
    """Sub-array of an activation that a place covers; indexed axes keep size 1.

    Arguments:
        activation: activation without batch axis.
        point: its hook point.
        place: the place.
    """
    index_of = {
        head_axis(point.dims): place.head,
        "position": place.position,
        "query_position": place.position,
    }
    indices = (index_of.get(axis) for axis in point.dims[1:])
    return activation[tuple(slice(None) if index is None else slice(index, index + 1) for index in indices)]


def where(place: GridPlace, point: HookPoint) -> dict[str, tuple[int, ...] | None]:
    """Keyword arguments that restrict an intervention to a place.

    Arguments:
        place: the place.
        point: hook point of the intervention.
    """
    return {
        "positions": None if place.position is None else (place.position,),
        "experts" if point.kind in EXPERT_KINDS else "heads": None if place.head is None else (place.head,),
    }


def _index(place: GridPlace, axes: Sequence[tuple[str, list[int]]]) -> tuple[int, ...]:
    """Index of a place in an array with these axes."""
    values = dict.fromkeys(("head", "kv_head", "expert"), place.head) | {"key_position": place.key}
    values |= {"position": place.position, "query_position": place.position}
    return tuple(labels.index(values[name]) for name, labels in axes)  # type: ignore[arg-type]


def _not_empty(name: str, field_name: str, values: Sequence[Any] | None) -> None:
    if values is not None and not values:
        raise StageError(
            f"{name}: expected at least one of {field_name}, found none; leave it out to mean all"
        )


def in_range(name: str, noun: str, indices: Sequence[int] | None, size: int) -> None:
    """Check indices, which may be negative.

    Arguments:
        name: name of the experiment, for the message.
        noun: what an index names: "layer", "position".
        indices: the indices; None for all, which are valid.
        size: number of items.

    Raises:
        InterventionError: for an index outside -size .. size - 1.
    """
    for index in () if indices is None else as_indices(indices, f"{name}: {noun}s", InterventionError):
        if not -size <= index < size:
            raise InterventionError(
                f"{name}: expected a {noun} in 0..{size - 1} (or negative, from the end), found {index}"
            )
