"""Grids of runs that each change one place of a model: what patching, tracing and ablation have in common.

A `Grid` names hook points (kinds at layers) and the places within each: every position, every head, both, or
every attention edge. It makes one run per place (and sample), reads metrics off the logits of each, and lays
them out as a labelled array. What is put at a place is the business of the experiment that inherits it.

Border: which runs and how their numbers are arranged; where payloads come from is in patching.py,
tracing.py and ablation.py, how runs are computed in forward/. Planning imports no torch.

Axes: kind (only where several are asked for), layer, then head (kv_head for k and v), position
(query_position for the pattern), key_position. Cells: (kind, layer). Of a state the position is the token it
stands behind.
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
from .patching_metrics import Metric, Recovery, check_metrics, read, wanted
from .patching_results import Blank, PreparedGrid, as_vector, metric_outputs, metrics_of, outputs_along, stack

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache

__all__ = ["HEAD_KINDS", "HIDDEN_KINDS", "KINDS", "STATE_KINDS", "Grid", "GridPlace", "layer_window"]

HIDDEN_KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
HEAD_KINDS = ("z", "q", "k", "v", "pattern")
STATE_KINDS = (
    *("rwkv_state_seq", "rwkv_r", "rwkv_k", "rwkv_v", "rwkv_wkv_out"),
    *("ssm_state_seq", "ssm_x", "ssm_out"),
    *("linear_state_seq", "linear_v", "linear_out"),
    *("mlstm_state_seq", "mlstm_q", "mlstm_k", "mlstm_v", "mlstm_out"),
)
"""Of recurrent models: they have heads and positions, and may be changed by either."""
EXPERT_KINDS = ("expert_weights",)
"""Of mixtures of experts: an expert stands where others have a head."""
KINDS = (*HIDDEN_KINDS, *HEAD_KINDS, *STATE_KINDS, *EXPERT_KINDS)
OVER: Mapping[str, tuple[str, ...]] = {
    "layer": (),
    "position": ("position",),
    "head": ("head",),
    "head_position": ("head", "position"),
    "edge": ("head", "position", "key_position"),
}
"""Which places of a layer get a run of their own, as axes; what an axis does not name is changed as a
whole."""
COMMON = {"kv_head": "head", "expert": "head", "query_position": "position"}


@dataclass(frozen=True)
class GridPlace:
    """Part of an activation: one position (of the pattern: query) or all, one head or all, one key or all."""

    position: int | None = None
    head: int | None = None
    key: int | None = None


@dataclass(frozen=True, kw_only=True)
class Grid(Experiment):
    """One run per place of each hook point.

    kinds: of hook points, one or several. metrics: read off every run. over: "layer" (all of it at once),
    "position", "head" (all positions), "head_position" or "edge" (attention patterns: head, query, key).
    layers, positions, heads: which; None for all. window: how many neighbouring layers are changed together,
    centred on the one that labels them. at: the position whose next-token logits are read.
    """

    kinds: tuple[str, ...]
    metrics: tuple[Metric, ...]
    over: str = "position"
    layers: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    window: int = 1
    at: int = -1

    outputs: ClassVar[Mapping[str, Output]] = outputs_along(
        "kind?", "layer", "head|kv_head|expert?", "position|query_position?", "key_position?"
    )
    reads_text: ClassVar[bool] = True
    has_corrupted: ClassVar[bool] = True
    """Whether there is a run that differs from the clean one before anything is patched."""
    selects: ClassVar[tuple[str, ...]] = ("kinds", "layers")
    """Fields that choose cells and are no part of one."""

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
        """The spec with the interventions of one place added. layers: those of the window."""

    @property
    def num_samples(self) -> int:
        """How many samples each place has: one, unless a grid draws several."""
        return 1

    # -- what is declared

    def params(self) -> dict[str, Any]:
        """All fields but those that only choose cells; metrics as plain values."""
        chosen = {name: value for name, value in vars(self).items() if name not in self.selects}
        return {**chosen, "metrics": [metric.canonical() for metric in self.metrics]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """One array per metric, with the axes of the kinds patched."""
        dims = ["layer", *(name for name, _ in self.axes(config, self.kinds[0]))]
        if len(set(self.kinds)) > 1:
            dims = ["kind", *(COMMON.get(name, name) for name in dims)]
        return metric_outputs(self.metrics, dims, self.num_samples)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per kind and layer; of edges also which there are, where those to later keys are among them.
        Raises StageError, PromptError or InterventionError for what cannot be."""
        self.check(config)
        layers = range(config.num_layers) if self.layers is None else self.layers
        numbers = [layer % config.num_layers for layer in layers]
        edges = {"edges": "all"} if self.over == "edge" and config.looks_ahead else {}
        return [{"kind": kind, "layer": layer, **edges} for kind in self.kinds for layer in numbers]

    def check(self, config: Architecture) -> None:
        """Raise for an empty grid, an unknown kind, or an index out of range."""
        check_metrics(self.metrics, config.vocab_size)
        if not self.has_corrupted and any(isinstance(metric, Recovery) for metric in self.metrics):
            raise StageError(f"{self.name} has no corrupted run to recover from; use the metric itself")
        if self.over not in OVER:
            raise StageError(
                f"{self.name}: expected over to be one of {', '.join(OVER)}, found {self.over!r}"
            )
        for field_, chosen in (("kinds", self.kinds), ("layers", self.layers), ("positions", self.positions)):
            _not_empty(self.name, field_, chosen)
        _not_empty(self.name, "heads", self.heads)
        for kind in self.kinds:
            self._check_kind(kind)
            layers = range(config.num_layers) if self.layers is None else self.layers
            asked = [HookPoint(kind, layer % config.num_layers) for layer in layers]
            require_known(asked, config.hook_points, config.model_type)
            in_range(self.name, "head", self.heads, num_heads(config, kind))
        in_range(self.name, "layer", self.layers, config.num_layers)
        in_range(self.name, "position", self.positions, len(self.prompt))
        if self.window < 1 or (self.over == "edge" and self.window > 1):
            least = "1, as an edge is read from the run it changes" if self.over == "edge" else "at least 1"
            raise StageError(f"{self.name}: expected a window of {least}, found {self.window}")
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

    def held(self, config: Architecture) -> list[HookPoint]:
        """Hook points of every kind, in the layers that have it."""
        return [point for kind in self.kinds for point in config.points_of(kind)]

    # -- runs

    def places(self, config: Architecture, kind: str) -> list[GridPlace]:
        """The places of one hook point, last axis fastest; edges from a query to later keys exist only where
        positions see later ones."""
        axes = dict(self.axes(config, kind))
        every: list[Sequence[int | None]] = [
            next((axes[name] for name in names if name in axes), [None])
            for names in (("head", "kv_head", "expert"), ("position", "query_position"), ("key_position",))
        ]
        return [
            GridPlace(position, head, key)
            for head, position, key in product(*every)
            if key is None or position is None or key <= position or config.looks_ahead
        ]

    def axes(self, config: Architecture, kind: str) -> list[tuple[str, list[int]]]:
        """Names and labels of the axes of one hook point, in order."""
        length = len(self.prompt)
        labels = {
            "head": self._chosen(self.heads, num_heads(config, kind)),
            "position": self._chosen(self.positions, length),
            "key_position": list(range(length)),
        }
        names = {"head": "kv_head"} if kind in ("k", "v") else {}
        names |= {"head": "expert"} if kind in EXPERT_KINDS else {}
        names |= {"position": "query_position"} if kind == "pattern" else {}
        return [(names.get(axis, axis), labels[axis]) for axis in OVER[self.over]]

    @staticmethod
    def _chosen(chosen: tuple[int, ...] | None, size: int) -> list[int]:
        return list(range(size)) if chosen is None else [int(index) % size for index in chosen]

    def base(self, prepared: PreparedGrid, sample: int) -> HookSpec:
        """A fresh spec of the run that is changed; noise belongs here."""
        return HookSpec()

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One per place and sample, samples fastest."""
        kind, layer = cell["kind"], cell["layer"]
        having = prepared.config.layers_with(kind)
        layers = [
            each for each in layer_window(layer, self.window, prepared.config.num_layers) if each in having
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
        """The runs with constants at every place."""
        return self.runs(PreparedGrid(config, np.zeros(0), [], self.blank(config), {}), cell)

    def blank(self, config: Architecture) -> Mapping[Any, Any]:
        """Stands for activations nobody has computed."""
        return Blank(config, len(self.prompt))

    @property
    def want(self) -> Logits:
        """Logits at one position, of the tokens that the metrics read."""
        return Logits((self.at,), wanted(self.metrics))

    # -- numbers

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Floats:
        """Every metric of one run, float64 [metric], not yet rescaled."""
        return read(self.metrics, as_vector(result.logits), prepared.clean)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Floats]) -> xr.Dataset:
        """The metrics of one hook point, [layer, *axes], and those of the runs nothing was patched in."""
        kind, samples = cell["kind"], self.num_samples
        axes = self.axes(prepared.config, kind)
        # What no run changes (edges to the future) keeps the numbers of the run it would have changed.
        unpatched = prepared.unpatched or [prepared.clean] * samples
        values = np.stack([read(self.metrics, each, prepared.clean) for each in unpatched])
        values = np.tile(values, (*[len(labels) for _, labels in axes], 1, 1))
        found = np.array(measured).reshape(-1, samples, len(self.metrics))
        for place, numbers in zip(self.places(prepared.config, kind), found, strict=True):
            values[_index(place, axes)] = numbers
        dims = ["layer", *[name for name, _ in axes]]
        made = metrics_of(prepared, self.metrics, values[None], dims)
        coords: dict[str, Any] = {name: (name, np.array(labels, np.int64)) for name, labels in axes}
        for axis in {"position", "query_position"} & coords.keys():
            for name, texts in prepared.tokens.items():
                coords[name] = (axis, [texts[index] for index in coords[axis][1]])
        return made.assign_coords(**coords, layer=[cell["layer"]], kind=kind)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Layers stacked; several kinds stacked on an axis of their own, NaN where a kind has fewer heads."""
        stacked = [
            stack([part for part in parts if str(part["kind"].values) == kind], "layer")
            for kind in dict.fromkeys(self.kinds)
        ]
        if len(stacked) == 1:
            return stacked[0]
        even = [each.rename({a: b for a, b in COMMON.items() if a in each.dims}) for each in stacked]
        if "head" in even[0].dims:
            most = max((each["head"].values for each in even), key=len)
            even = [each.reindex(head=most) for each in even]
        both = stack([each.drop_vars("kind") for each in even], "kind")
        both = both.assign_coords(kind=list(dict.fromkeys(self.kinds)))
        both.attrs["note"] = (
            "heads of k and v are key/value heads, of which there are fewer: NaN past the last; positions of "
            "the pattern are queries"
        )
        return both


def layer_window(layer: int, width: int, num_layers: int) -> list[int]:
    """`width` layers centred on one, cut at the ends of the model (ROME: from layer - width // 2)."""
    return list(range(max(0, layer - width // 2), min(num_layers, layer + (width + 1) // 2)))


def num_heads(config: Architecture, kind: str) -> int:
    """Heads a kind has: k and v have those of grouped-query attention, states those of their recurrence, a
    mixture has experts, and the stream has none."""
    axis = head_axis(BY_NAME[kind].dims)
    return 0 if axis is None else config.axis_sizes[axis]


def head_axis(dims: Sequence[str]) -> str | None:
    """Which axis counts heads, or experts; d_head counts what is in one."""
    return next((axis for axis in dims if axis.endswith(("head", "expert")) and axis != "d_head"), None)


def part_of(activation: Tensor, point: HookPoint, place: GridPlace) -> Tensor:
    """What a place holds of an activation, without its batch, at a hook point; its axes kept."""
    chosen = {head_axis(point.dims): place.head, "position": place.position, "query_position": place.position}
    places = (chosen.get(axis) for axis in point.dims[1:])
    return activation[tuple(slice(None) if at is None else slice(at, at + 1) for at in places)]


def where(place: GridPlace, point: HookPoint) -> dict[str, tuple[int, ...] | None]:
    """Keywords that narrow an intervention at a hook point to a place."""
    return {
        "positions": None if place.position is None else (place.position,),
        "experts" if point.kind in EXPERT_KINDS else "heads": None if place.head is None else (place.head,),
    }


def _index(place: GridPlace, axes: Sequence[tuple[str, list[int]]]) -> tuple[int, ...]:
    values = dict.fromkeys(("head", "kv_head", "expert"), place.head) | {"key_position": place.key}
    values |= {"position": place.position, "query_position": place.position}
    return tuple(labels.index(values[name]) for name, labels in axes)  # type: ignore[arg-type]


def _not_empty(name: str, what: str, chosen: Sequence[Any] | None) -> None:
    if chosen is not None and not chosen:
        raise StageError(f"{name}: expected at least one of {what}, found none; leave it out to mean all")


def in_range(name: str, what: str, chosen: Sequence[int] | None, size: int) -> None:
    """InterventionError for an index that is not there."""
    for index in () if chosen is None else as_indices(chosen, f"{name}: {what}s", InterventionError):
        if not -size <= index < size:
            raise InterventionError(
                f"{name}: expected a {what} in 0..{size - 1} (or negative, from the end), found {index}"
            )
