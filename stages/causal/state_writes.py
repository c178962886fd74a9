"""Knockout and steering of writes to a recurrent state (RWKV).

In a recurrent model a token is read later through the state to which it wrote, S_t = decay(S_{t-1}) + c_t k_t
v_t^T. Here c of one token is set to 0 (state knockout), or c of several tokens to other scales (state
steering), as in candle-mi (StateKnockoutSpec, StateSteeringSpec); decay is unchanged. Information can bypass
the state through the token shift, which shows each token to the next, and through other layers. So a missing
effect means that the state of *these layers* was not needed, not that the token was never read.

In RWKV-5 and 6 a token reads the state before its own write, so that the last token's write is never read; in
RWKV-7 it reads its own.

Because a state decays, recent writes matter most, in randomly initialised models too. The control of a
knocked-out write is therefore a random value of equal norm at the same position (`RandomWrites`), not a write
of another position.

Border: token ids and numbers; forward/hooks/writes.py defines the interventions, the planner shares work
between runs. Torch is imported when it runs.

Axes: layer (the first that is changed), position (of the write, one run each), dose, draw, rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import StageError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Add
from ..forward.hooks.spec import HookSpec
from ..forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .controls import random_directions
from .effects import Baseline, array, effect, effects_along, gather, of_baseline, read_logits
from .layer_sweep import LayerSweep
from .steering import check_doses

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["WRITE_SCALES", "RandomWrites", "StateKnockout", "StateSteering"]

WRITE_SCALES = (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0)
"""Default scales: sign reversed, knocked out, halved, unchanged, doubled, quadrupled."""


@dataclass(frozen=True)
class _StateWriteSweep(LayerSweep):
    """Base class of experiments that change writes to the recurrent state, layer by layer."""

    window: int = field(default=1, kw_only=True)
    """Number of neighbouring layers that are changed together; the first is the cell's label."""
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Indices of the heads whose state is changed; None for all heads."""

    @property
    def width(self) -> int:
        """Number of neighbouring layers that are changed together."""
        return self.window

    def _variables(
        self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any], axes: Mapping[str, Sequence[Any]]
    ) -> xr.Dataset:
        """Result of one cell: effects [layer, *axes], and measurements of the unchanged run.

        Arguments:
            prepared: Result of the unchanged run.
            cell: Labels of the cell.
            measured: Results of `effect`, one per run.
            axes: Coordinate labels by name of the axis, slowest first.
        """
        import xarray as xr

        effects = gather(measured, {"layer": 1, **{axis: len(labels) for axis, labels in axes.items()}})
        layer = ("layer", [cell["layer"]], {"long_name": f"first of {self.window} changed layers"})
        of_unchanged = of_baseline(prepared, self.target, self.top_k)
        coords = {axis: np.array(labels) for axis, labels in axes.items()}
        return xr.Dataset(effects | of_unchanged, coords={"layer": layer, **coords})


@dataclass(frozen=True)
class StateKnockout(_StateWriteSweep):
    """Knocks out the write of one position at a time, in one layer (or window of layers) at a time."""

    name: ClassVar[str] = "state_knockout"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "position")

    positions: tuple[int, ...] | None = None
    """Positions with knocked-out writes, one run per position; None for every prompt position."""

    def check(self, config: Architecture) -> None:
        """Check the fields against a model.

        Raises:
            InterventionError: The model has no recurrent state, or positions or heads do not exist.
        """
        self._spec(self._positions()).validate(config, len(self.tokens))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One run per position, whose write is knocked out in all layers of the cell."""
        specs = [self._spec([position]).layers(self.changed(cell)) for position in self._positions()]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, position]; positions count from the start."""
        from_start = [position % len(self.tokens) for position in self._positions()]
        return self._variables(prepared, cell, measured, {"position": from_start})

    def _positions(self) -> Sequence[int]:
        return range(len(self.tokens)) if self.positions is None else self.positions

    def _spec(self, positions: Sequence[int]) -> StateKnockoutSpec:
        spec = StateKnockoutSpec().positions(positions)
        return spec if self.heads is None else spec.heads(self.heads)


@dataclass(frozen=True)
class StateSteering(_StateWriteSweep):
    """Scales the writes of some positions together: one run per dose, in one layer or window at a time."""

    name: ClassVar[str] = "state_steering"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "dose")

    positions: tuple[int, ...]
    """Positions whose writes are scaled together."""
    doses: tuple[float, ...] = WRITE_SCALES
    """Factors of the writes, distinct; 0 is a knockout, 1 changes nothing."""

    def check(self, config: Architecture) -> None:
        """Check the fields against a model.

        Raises:
            StageError: Doses are missing or repeated.
            InterventionError: The model has no recurrent state, positions or heads do not exist, or a dose is
                infinite or NaN.
        """
        check_doses(self.doses)
        for dose in self.doses:
            self._spec(dose).hooks(config, len(self.tokens))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One run per dose, which scales the writes in all layers of the cell."""
        specs = [self._spec(dose).layers(self.changed(cell)) for dose in self.doses]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, dose], and measurements of the unchanged run."""
        return self._variables(prepared, cell, measured, {"dose": self.doses})

    def _spec(self, dose: float) -> StateSteeringSpec:
        spec = StateSteeringSpec.scale(dose).positions(self.positions)
        return spec if self.heads is None else spec.heads(self.heads)


@dataclass(frozen=True)
class _WritesOfRun(Baseline):
    """Result of the unchanged run, with the keys and values that its tokens write to the state."""

    keys: Mapping[int, npt.NDArray[np.float32]]
    """Keys by layer, float32 [head, position, width]."""
    values: Mapping[int, npt.NDArray[np.float32]]
    """Values by layer, float32 [head, position, width]."""


@dataclass(frozen=True)
class RandomWrites(_StateWriteSweep):
    """Null distribution of a state knockout: effect of leaving out a random write of equal norm.

    For real and random writes alike, the effect is the distance from the run with the write to the run
    without any: KL(with u || without) for a random value u, |u| = |v| in every head, and KL(with v ||
    without) for the knockout. The two differ only in what v means. Subtracting k u^T from a state that holds
    k v^T would be a different comparison: without v the read vector shrinks, without u it turns.

    Raises:
        StageError: `draws` is below 1.
    """

    name: ClassVar[str] = "random_writes"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "position", "draw_of_write")

    positions: tuple[int, ...]
    """Positions whose values are replaced by random ones."""
    draws: int = 20
    """Number of random values per position."""
    seed: int = 0
    """Seed of the random values, combined with layer and position."""

    def check(self, config: Architecture) -> None:
        """Raise InterventionError if the write cannot be knocked out, StageError if `draws` is below 1."""
        if self.draws < 1:
            raise StageError(
                f"{self.name}: expected at least one draw for the null distribution, found draws={self.draws}"
            )
        StateKnockoutSpec(chosen_heads=self.heads).positions(self.positions).validate(
            config, len(self.tokens)
        )

    def prepare(self, model: Model) -> _WritesOfRun:
        """Result of the unchanged run, with the keys and values of every layer."""
        unchanged, layers = super().prepare(model), range(model.config.num_layers)
        points = [HookPoint(kind, layer) for kind in ("rwkv_k", "rwkv_v") for layer in layers]
        # A pass of its own over the prompt alone: the baseline run also reads the pieces of the target.
        captured = model.forward(self.tokens, HookSpec().capture(*points))
        keys, values = (
            {layer: array(captured[HookPoint(kind, layer)][0]) for layer in layers}
            for kind in ("rwkv_k", "rwkv_v")
        )
        return _WritesOfRun(unchanged.config, unchanged.logits, unchanged.pattern, keys, values)

    def runs(self, prepared: _WritesOfRun, cell: CellLabels) -> list[Run]:
        """For each position, the run without its write, then one run per random value."""
        return [run for position in self._from_start for run in self._runs_at(prepared, cell, position)]

    def _runs_at(self, written: _WritesOfRun, cell: CellLabels, position: int) -> list[Run]:
        """The run without the write of a position, and runs with random values written in its place."""
        layers = self.changed(cell)
        without = self._spec(position).layers(layers).hooks(written.config, len(self.tokens))
        with_random = [HookSpec() for _ in range(self.draws)]
        for layer in layers:
            key, value = (by_layer[layer][:, position] for by_layer in (written.keys, written.values))
            # SeedSequence mixes the three numbers: their sum would repeat directions across layers.
            (seed,) = np.random.SeedSequence([self.seed, layer, position]).generate_state(1).tolist()
            random_values = random_directions(value, self.draws, seed=seed)
            for draw, random_value in enumerate(random_values):
                # The state holds k v^T: adding k (u - v)^T replaces the write of v by that of u.
                change = key[:, None, :, None] * (random_value - value)[:, None, None, :]
                # The payload of an intervention on some heads has those heads only.
                selected = change if self.heads is None else change[list(self.heads)]
                with_random[draw] = with_random[draw].intervene(
                    HookPoint("rwkv_state_seq", layer),
                    Add(selected, positions=(position,), heads=self.heads),
                )
        return [self.run_of(spec) for spec in (without, *with_random)]

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The runs with constants in place of keys and values, for planning."""
        sizes = config.axis_sizes
        ones = np.ones((sizes["head"], len(self.tokens), sizes["key"]), np.float32)
        by_layer = dict.fromkeys(range(config.num_layers), ones)
        unchanged = Baseline.sketch(config)
        return self.runs(_WritesOfRun(config, unchanged.logits, unchanged.pattern, by_layer, by_layer), cell)

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> Floats:
        """Logits of one run [piece, vocab], which `dataset` compares with another run of the cell."""
        return read_logits(result)

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, position, draw_of_write] of leaving out the random writes."""
        effects = []
        # Per position one run without the write, then one per draw (`runs`).
        for start in range(0, len(measured), self.draws + 1):
            without, *with_random = measured[start : start + self.draws + 1]
            effects += [effect(logits, without, self.target, self.top_k) for logits in with_random]
        axes = {"position": self._from_start, "draw_of_write": range(self.draws)}
        return self._variables(prepared, cell, effects, axes)

    def _spec(self, position: int) -> StateKnockoutSpec:
        spec = StateKnockoutSpec().position(position)
        return spec if self.heads is None else spec.heads(self.heads)

    @property
    def _from_start(self) -> list[int]:
        """The positions, counted from the start of the prompt."""
        return [position % len(self.tokens) for position in self.positions]
