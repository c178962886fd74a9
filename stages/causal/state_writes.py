"""Writes to a recurrent state, knocked out or steered: what does the model say without what a token wrote?

A token of a recurrent model is read later through the state it wrote to, S_t = (what is left of S_{t-1}) +
c_t k_t v_t^T. Here c of one token is set to 0 (state knockout), or c of some tokens to several scales (state
steering), as candle-mi does (StateKnockoutSpec, StateSteeringSpec); decay happens all the same. Two ways
around the state stay open: the token shift, which shows each token to the next one, and other layers. So no
effect says that the state of *these layers* was not needed, and not that the token was not read.

In RWKV-5 and 6 a token reads the state before its own write, so that the last token's own write is read by
nobody; in RWKV-7 it reads its own.

Border: token ids and numbers; what is changed is a spec of writes (forward/hooks/writes.py), how runs share
their work is the planner's. Never imports torch until it runs.

Not every write counts alike: a state decays, so what was written last is read most, in random weights too. A
write left out therefore stands beside random values as long, written in its place and left out likewise
(`RandomWrites`), and not beside writes of other positions.

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
"""Turned round, knocked out, halved, as it is, doubled, four times."""


@dataclass(frozen=True)
class _Writes(LayerSweep):
    """What both share.

    window: how many layers from there on are changed together; all of them: as many as the model has. heads:
    None for all. The rest: see `LayerSweep`.
    """

    window: int = field(default=1, kw_only=True)
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def width(self) -> int:
        """How many neighbouring layers are changed together."""
        return self.window

    def _variables(
        self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any], axes: Mapping[str, Sequence[Any]]
    ) -> xr.Dataset:
        """The effects [layer, *axes], and what the unchanged run says. axes: labels by name."""
        import xarray as xr

        found = gather(measured, {"layer": 1, **{axis: len(labels) for axis, labels in axes.items()}})
        layer = ("layer", [cell["layer"]], {"long_name": f"first of {self.window} changed layers"})
        of_run = of_baseline(prepared, self.target, self.top_k)
        coords = {axis: np.array(labels) for axis, labels in axes.items()}
        return xr.Dataset(found | of_run, coords={"layer": layer, **coords})


@dataclass(frozen=True)
class StateKnockout(_Writes):
    """The write of each position knocked out by itself, in each layer by itself or in several together.

    positions: whose writes; None for every position of the prompt.
    """

    name: ClassVar[str] = "state_knockout"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "position")

    positions: tuple[int, ...] | None = None

    def check(self, config: Architecture) -> None:
        """Raise InterventionError for a model without such a state, positions or heads that are not there."""
        self._spec(self._chosen()).validate(config, len(self.tokens))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One per position, its write knocked out in all layers of the cell."""
        specs = [self._spec([place]).layers(self.changed(cell)) for place in self._chosen()]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, position]; positions counted from the start."""
        places = [place % len(self.tokens) for place in self._chosen()]
        return self._variables(prepared, cell, measured, {"position": places})

    def _chosen(self) -> Sequence[int]:
        return range(len(self.tokens)) if self.positions is None else self.positions

    def _spec(self, positions: Sequence[int]) -> StateKnockoutSpec:
        spec = StateKnockoutSpec().positions(positions)
        return spec if self.heads is None else spec.heads(self.heads)


@dataclass(frozen=True)
class StateSteering(_Writes):
    """The writes of some positions multiplied together by several scales, in each layer by itself.

    positions: whose writes. doses: scales; 0 is a knockout, 1 changes nothing.
    """

    name: ClassVar[str] = "state_steering"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "dose")

    positions: tuple[int, ...]
    doses: tuple[float, ...] = WRITE_SCALES

    def check(self, config: Architecture) -> None:
        """Raise StageError for no doses; InterventionError as of a knockout, and for a scale that is no
        number."""
        check_doses(self.doses)
        for dose in self.doses:
            self._spec(dose).hooks(config, len(self.tokens))

    def runs(self, prepared: Baseline, cell: CellLabels) -> list[Run]:
        """One per dose, in all layers of the cell."""
        specs = [self._spec(dose).layers(self.changed(cell)) for dose in self.doses]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, dose], and what the unchanged run says."""
        return self._variables(prepared, cell, measured, {"dose": self.doses})

    def _spec(self, dose: float) -> StateSteeringSpec:
        spec = StateSteeringSpec.scale(dose).positions(self.positions)
        return spec if self.heads is None else spec.heads(self.heads)


@dataclass(frozen=True)
class _Written(Baseline):
    """The unchanged run, and what its tokens write: keys, values float32 [head, position, width] by layer."""

    keys: Mapping[int, npt.NDArray[np.float32]]
    values: Mapping[int, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class RandomWrites(_Writes):
    """A null: random values as long as each position's own, written in its place, and then left out.

    Of both kinds of write what is measured is the way from the run with it to the run without any: KL(with u
    || without), |u| = |v| in every head, where a knockout has KL(with v || without). The two ends are alike
    but for what v means. (To take k u^T away from the state that holds k v^T would be another thing: what is
    read shrinks without v, and turns without u.) positions: whose. draws: directions for each, drawn by seed
    for each layer and position.
    """

    name: ClassVar[str] = "random_writes"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = effects_along("layer", "position", "draw_of_write")

    positions: tuple[int, ...]
    draws: int = 20
    seed: int = 0

    def check(self, config: Architecture) -> None:
        """As of a knockout; StageError for no draws."""
        if self.draws < 1:
            raise StageError(f"{self.name}: expected at least one draw, found {self.draws}")
        StateKnockoutSpec(chosen_heads=self.heads).positions(self.positions).validate(
            config, len(self.tokens)
        )

    def prepare(self, model: Model) -> _Written:
        """The unchanged run with the keys and values of every layer."""
        plain, layers = super().prepare(model), range(model.config.num_layers)
        points = [HookPoint(kind, layer) for kind in ("rwkv_k", "rwkv_v") for layer in layers]
        held = model.forward(self.tokens, HookSpec().capture(*points))
        keys, values = (
            {layer: array(held[HookPoint(kind, layer)][0]) for layer in layers}
            for kind in ("rwkv_k", "rwkv_v")
        )
        return _Written(plain.config, plain.logits, plain.pattern, keys, values)

    def runs(self, prepared: _Written, cell: CellLabels) -> list[Run]:
        """Per position the one without its write, then one per draw."""
        return [run for place in self._places for run in self._runs(prepared, cell, place)]

    def _runs(self, written: _Written, cell: CellLabels, place: int) -> list[Run]:
        layers = self.changed(cell)
        without = self._spec(place).layers(layers).hooks(written.config, len(self.tokens))
        with_other = [HookSpec() for _ in range(self.draws)]
        for layer in layers:
            key, value = (each[layer][:, place] for each in (written.keys, written.values))
            (seed,) = np.random.SeedSequence([self.seed, layer, place]).generate_state(1).tolist()
            others = random_directions(value, self.draws, seed=seed)
            for draw, other in enumerate(others):
                change = key[:, None, :, None] * (other - value)[:, None, None, :]
                chosen = change if self.heads is None else change[list(self.heads)]
                with_other[draw] = with_other[draw].intervene(
                    HookPoint("rwkv_state_seq", layer), Add(chosen, positions=(place,), heads=self.heads)
                )
        return [self.run_of(spec) for spec in (without, *with_other)]

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The runs with other numbers: what is taken is as long as values are."""
        sizes = config.axis_sizes
        one = np.ones((sizes["head"], len(self.tokens), sizes["key"]), np.float32)
        held = dict.fromkeys(range(config.num_layers), one)
        plain = Baseline.sketch(config)
        return self.runs(_Written(config, plain.logits, plain.pattern, held, held), cell)

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> Floats:
        """The logits: what they are measured against is a run of the same cell."""
        return read_logits(result)

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, position, draw_of_write] of leaving out what was drawn."""
        effects = []
        for start in range(0, len(measured), self.draws + 1):
            without, *with_other = measured[start : start + self.draws + 1]
            effects += [effect(each, without, self.target, self.top_k) for each in with_other]
        axes = {"position": self._places, "draw_of_write": range(self.draws)}
        return self._variables(prepared, cell, effects, axes)

    def _spec(self, place: int) -> StateKnockoutSpec:
        spec = StateKnockoutSpec().position(place)
        return spec if self.heads is None else spec.heads(self.heads)

    @property
    def _places(self) -> list[int]:
        return [place % len(self.tokens) for place in self.positions]
