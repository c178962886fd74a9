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

Axes: layer (the first that is changed), position (of the write, one run each), dose, rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ..forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .effects import Baseline, effects_along, gather, of_baseline
from .layer_sweep import LayerSweep
from .steering import check_doses

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["WRITE_SCALES", "StateKnockout", "StateSteering"]

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
        """The window."""
        return self.window

    def _variables(
        self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any], axis: str, labels: Sequence[Any]
    ) -> xr.Dataset:
        """The effects [layer, axis], and what the unchanged run says."""
        import xarray as xr

        found = gather(measured, {"layer": 1, axis: len(labels)})
        layer = ("layer", [cell["layer"]], {"long_name": f"first of {self.window} changed layers"})
        of_run = of_baseline(prepared, self.target, self.top_k)
        return xr.Dataset(found | of_run, coords={"layer": layer, axis: np.array(labels)})


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
        """One per position."""
        specs = [self._spec([place]).layers(self.changed(cell)) for place in self._chosen()]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, position]; positions counted from the start."""
        places = [place % len(self.tokens) for place in self._chosen()]
        return self._variables(prepared, cell, measured, "position", places)

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
        """One per dose."""
        specs = [self._spec(dose).layers(self.changed(cell)) for dose in self.doses]
        return [self.run_of(spec.hooks(prepared.config, len(self.tokens))) for spec in specs]

    def dataset(self, prepared: Baseline, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, dose]."""
        return self._variables(prepared, cell, measured, "dose", list(self.doses))

    def _spec(self, dose: float) -> StateSteeringSpec:
        spec = StateSteeringSpec.scale(dose).positions(self.positions)
        return spec if self.heads is None else spec.heads(self.heads)
