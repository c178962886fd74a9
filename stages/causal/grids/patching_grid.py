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
"""Hook kinds of the residual stream and of its summands, without a head axis."""
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
"""By value of `Grid.over`, the axes along which each index gets a run; other axes are changed as a whole."""
COMMON = {"kv_head": "head", "expert": "head", "query_position": "position"}
"""Common axis names under which results of several hook kinds are stacked, by the kinds' own names."""


@dataclass(frozen=True)
class GridPlace:
    """Part of an activation that a run changes, by position, head and key; None means the whole axis."""

    position: int | None = None
    """Position (of an attention pattern, the query position); None for all."""
    head: int | None = None
    """Head index, or expert index for expert kinds; None for all."""
    key: int | None = None
    """Key position of an attention edge; None for all."""


@dataclass(frozen=True, kw_only=True)
class Grid(Experiment):
    """Base class of experiments that change one place of one hook point per run, over a grid of places."""

    kinds: tuple[str, ...]
    """Hook kinds to patch, from `KINDS`."""
    metrics: tuple[Metric, ...]
    """Metrics that are computed from the logits of every run; at least one."""
    over: str = "position"
    """What a run changes: "layer" (the whole activation), "position", "head" (all positions),
    "head_position", or "edge" (attention pattern by head, query and key)."""
    layers: tuple[int, ...] | None = None
    """Grid layers; None for every layer."""
    positions: tuple[int, ...] | None = None
    """Grid positions; None for every position."""
    heads: tuple[int, ...] | None = None
    """Grid heads; None for every head."""
    window: int = 1
    """Number of neighbouring layers that are changed together, centred on the layer of the cell."""
    at: int = -1
    """Position whose next-token logits the metrics read; negative ones count from the end."""

    outputs: ClassVar[Mapping[str, Output]] = outputs_along(
        "kind?", "layer", "head|kv_head|expert?", "position|query_position?", "key_position?"
    )
    reads_text: ClassVar[bool] = True
    has_corrupted: ClassVar[bool] = True
    """Whether there is a corrupted run, which differs from the clean run without any patch."""
    selects: ClassVar[tuple[str, ...]] = ("kinds", "layers")
    """Fields that only select cells, and so do not enter a cell's key."""

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
        """The HookSpec `spec` with the interventions of one place added.

        Arguments:
            spec: HookSpec before the place is changed, from `base`.
            prepared: Result of `prepare`.
            kind: Kind of the hook point.
            layers: Layers in which the place is changed.
            place: Part of the activation that is changed.
            sample: Number of the sample, 0 unless `num_samples` exceeds 1.
        """

    @property
    def num_samples(self) -> int:
        """Number of runs per place; results are their mean and standard deviation."""
        return 1

    # -- declaration

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except those that select cells (`selects`)."""
        fields = {name: value for name, value in vars(self).items() if name not in self.selects}
        return {**fields, "metrics": [metric.canonical() for metric in self.metrics]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs: one array per metric, with the axes of the changed kinds of hook points."""
        dims = ["layer", *(name for name, _ in self.axes(config, self.kinds[0]))]
        if len(set(self.kinds)) > 1:
            dims = ["kind", *(COMMON.get(name, name) for name in dims)]
        return metric_outputs(self.metrics, dims, self.num_samples)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per kind and layer.

        Raises:
            StageError: The grid is empty, a kind is unknown, or a kind does not fit `over`.
            PromptError: A metric's token is outside the vocabulary.
            InterventionError: An index is out of range.
        """
        self.check(config)
        layers = range(config.num_layers) if self.layers is None else self.layers
        numbers = [layer % config.num_layers for layer in layers]
        # Bidirectional models also have edges to later keys; the label keeps their cells apart from causal
        # ones.
        edges = {"edges": "all"} if self.over == "edge" and config.looks_ahead else {}
        return [{"kind": kind, "layer": layer, **edges} for kind in self.kinds for layer in numbers]

    def check(self, config: Architecture) -> None:
        """Check that the fields fit a model; `cells` lists the errors."""
        check_metrics(self.metrics, config)
        if not self.has_corrupted and any(isinstance(metric, Recovery) for metric in self.metrics):
            raise StageError(
                f"{self.name}: expected metrics other than Recovery, as there is no corrupted run to compare "
                "with, found Recovery; use the metric inside it"
            )
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
            allowed_window = "window=1 with over='edge'" if self.over == "edge" else "a window of at least 1"
            raise StageError(f"{self.name}: expected {allowed_window}, found window={self.window}")
        in_range(f"{self.name}, at", "position", (self.at,), len(self.prompt))

    def _check_kind(self, kind: str) -> None:
        if kind not in KINDS:
            near = nearest(kind, KINDS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise StageError(
                f"{self.name}: expected kinds of hook points among {', '.join(KINDS)}, found {kind!r}{hint}"
            )
        allowed = ("pattern",) if self.over == "edge" else (*HEAD_KINDS, *STATE_KINDS, *EXPERT_KINDS)
        if "head" in OVER[self.over] and kind not in allowed:
            raise StageError(
                f"{self.name}: expected kinds among {', '.join(allowed)} with over={self.over!r}, found "
                f"{kind!r}; use over={'position' if kind in HIDDEN_KINDS else 'head_position'!r} for it"
            )
        if self.over == "edge" and self.kinds != ("pattern",):
            raise StageError(
                f"{self.name}: expected kinds=('pattern',) with over='edge', found kinds={self.kinds}"
            )

    def points(self, config: Architecture) -> list[HookPoint]:
        """Hook points of `kinds` at every layer that has them."""
        return [point for kind in self.kinds for point in config.points_of(kind)]

    # -- runs

    def places(self, config: Architecture, kind: str) -> list[GridPlace]:
        """Places of one hook point, last axis fastest.

        Attention edges to later keys are places only in bidirectional models.

        Arguments:
            config: Architecture of the model.
            kind: Kind of the hook point.
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
        """(name, labels) of each axis of the grid over one hook point, in order.

        Arguments:
            config: Architecture of the model.
            kind: Kind of the hook point.
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
        """HookSpec of a run before a place is changed: empty, or with noise in causal tracing.

        Arguments:
            prepared: Result of `prepare`.
            sample: Number of the sample.
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
        """The runs with constants in place of activations, for planning."""
        return self.runs(PreparedGrid(config, np.zeros(0), [], self.blank(config), {}), cell)

    def blank(self, config: Architecture) -> Mapping[Any, Any]:
        """Placeholder for activations, from which runs can be planned without the model."""
        return Blank(config, len(self.prompt))

    @property
    def want(self) -> Logits:
        """Logits at position `at` of the tokens that the metrics read."""
        return Logits((self.at,), required_tokens(self.metrics))

    # -- numbers

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Floats:
        """All metrics of one run before rescaling, float64 [metric]."""
        return read_metrics(self.metrics, as_vector(result.logits), prepared.clean)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """Metrics of one hook point [layer, *axes], and those of the unpatched runs."""
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
        """Results of all layers and kinds; several kinds are stacked along `kind`, missing heads are NaN."""
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
    """Neighbouring layers around a layer, from layer - width // 2 as in ROME, clipped to the model.

    Arguments:
        layer: Layer in the centre.
        width: Number of layers.
        num_layers: Number of layers of the model.
    """
    return list(range(max(0, layer - width // 2), min(num_layers, layer + (width + 1) // 2)))


def num_heads(config: Architecture, kind: str) -> int:
    """Number of heads at a kind of hook point: key/value heads for k and v, experts for a mixture, else 0.

    Arguments:
        config: Architecture of the model.
        kind: Kind of the hook point.
    """
    axis = head_axis(BY_NAME[kind].dims)
    return 0 if axis is None else config.axis_sizes[axis]


def head_axis(dims: Sequence[str]) -> str | None:
    """Name of the head or expert axis; None without such an axis."""
    # d_head ends with "head" too, but is the width of a head.
    return next((axis for axis in dims if axis.endswith(("head", "expert")) and axis != "d_head"), None)


def part_of(activation: Tensor, point: HookPoint, place: GridPlace) -> Tensor:
    """Part of an activation that a place names; indexed axes keep size 1.

    Arguments:
        activation: Activation without batch axis.
        point: Hook point of the activation.
        place: The place.
    """
    index_of = {
        head_axis(point.dims): place.head,
        "position": place.position,
        "query_position": place.position,
    }
    indices = (index_of.get(axis) for axis in point.dims[1:])
    return activation[tuple(slice(None) if index is None else slice(index, index + 1) for index in indices)]


def where(place: GridPlace, point: HookPoint) -> dict[str, Any]:
    """Keyword arguments of an intervention that restrict it to a place.

    Arguments:
        place: The place.
        point: Hook point of the intervention.
    """
    return {
        "positions": None if place.position is None else (place.position,),
        "experts" if point.kind in EXPERT_KINDS else "heads": None if place.head is None else (place.head,),
    }


def _index(place: GridPlace, axes: Sequence[tuple[str, list[int]]]) -> tuple[int, ...]:
    """Index of a place in an array with the axes `axes` (name, labels)."""
    values = dict.fromkeys(("head", "kv_head", "expert"), place.head) | {"key_position": place.key}
    values |= {"position": place.position, "query_position": place.position}
    return tuple(labels.index(values[name]) for name, labels in axes)  # type: ignore[arg-type]


def _not_empty(name: str, field_name: str, values: Sequence[Any] | None) -> None:
    """Raise StageError if a field is an empty sequence."""
    if values is not None and not values:
        raise StageError(
            f"{name}: expected at least one entry in {field_name}, found none; leave the field out for all"
        )


def in_range(name: str, noun: str, indices: Sequence[int] | None, size: int) -> None:
    """Check that indices exist; negative ones count from the end.

    Arguments:
        name: Name of the experiment, for the message.
        noun: What an index names, such as "layer" or "position", for the message.
        indices: The indices; None for all, which are valid.
        size: Number of items.

    Raises:
        InterventionError: An index is outside -size to size - 1.
    """
    for index in () if indices is None else as_indices(indices, f"{name}: {noun}s", InterventionError):
        if not -size <= index < size:
            raise InterventionError(
                f"{name}: expected a {noun} from 0 to {size - 1} (or negative, from the end), found {index}"
            )
