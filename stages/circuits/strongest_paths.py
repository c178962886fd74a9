"""Strongest paths: senders that say most on some pairs, scored on others beside random changes as long.

    paths = StrongestPaths(chosen_on=some, pairs=others, receivers=("logits",))
    back = StrongestPaths(chosen_on=some, pairs=others, receivers=("logits",), back=1)

Every sender is patched in every pair (paths.py). Those that change the metric most on the pairs they are
chosen on are also put, in the pairs they are scored on, to random directions as long, position by position,
on the same path: what any change of that size would do there. One step back, the receivers are the queries,
keys and values of the heads that say most to the receivers asked for (Wang et al., Interpretability in the
Wild, 2023, sections 3.2 and 3.3); they are known only when the effects are, so that choosing and running them
are one experiment.

Border: pairs in, labelled arrays out. Never imports torch until it runs.

Axes: pair, sender, receiver; told: a sender that was chosen, the strongest heads, then the strongest others,
then the head that says least; draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.digest import digest
from ...store.errors import StageError
from ..causal.controls import random_directions
from ..forward.edges.layout import KINDS, LOGITS
from ..forward.runs.experiment import CellLabels
from .by_pair import ByPair, PairExperiment
from .pairs import Pair
from .paths import TOGETHER, PathPatching, paths_there_are

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["StrongestPaths", "is_head"]

NONE = -1
"""Where fewer senders have a path than were asked for."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StrongestPaths(PairExperiment):
    """Paths from every source, and from the strongest ones beside random changes. A cell is a pair.

    chosen_on: pairs whose effects say which are the strongest. receivers, mlps: of `PathPatching`. strongest:
    how many heads, and as many others. draws: random changes of each. back: heads, the strongest at the
    receivers asked for, whose queries, keys and values are the receivers, each of the three of all these
    heads together; 0 for none.
    """

    chosen_on: tuple[Pair, ...]
    receivers: tuple[str, ...] = (LOGITS,)
    mlps: Literal["recomputed", "held"] = "recomputed"
    strongest: int = 4
    draws: int = 20
    back: int = 0

    name: ClassVar[str] = "strongest_paths"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **PathPatching.outputs,
        "chosen_effect": Output(
            ("sender", "receiver"), "<unit>", "mean change over the pairs senders are chosen on"
        ),
        "chosen": Output(("told", "receiver"), "1", "which senders were chosen, -1 for none"),
        "random": Output(
            ("pair", "draw", "told", "receiver"),
            "<unit>",
            "change of the metric by random changes of a sender, as long",
        ),
    }

    def params(self) -> dict[str, Any]:
        """Pairs by what they are."""
        return {**super().params(), "chosen_on": [pair.canonical() for pair in self.chosen_on]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric, but for numbers of senders."""
        return {**super().outputs_on(config), "chosen": self.outputs["chosen"]}

    def check(self, config: Architecture) -> Layout:
        """As of every path; and StageError for none to be told, or more heads to go back to than
        say anything to the receivers."""
        self._paths(self.chosen_on, self.receivers).check(config)
        paths = self._paths(self.pairs, self.receivers)
        layout = paths.check(config)
        if self.chosen_on[0].metric.units != self.unit:
            raise StageError(
                f"expected pairs to choose on whose metric is in {self.unit}, as of those to score, found "
                f"{self.chosen_on[0].metric.units}"
            )
        for name, least in (("strongest", 1), ("draws", 0), ("back", 0)):
            if (found := getattr(self, name)) < least:
                raise StageError(f"expected {name} of at least {least}, found {found}")
        speaks = paths_there_are(layout, *paths.sets(layout)).any(1)
        heads = sum(is_head(layout.sources[source]) for source in np.flatnonzero(speaks))
        if self.back > heads:
            raise StageError(
                f"expected at most {heads} heads to go back to, as no more say anything to "
                f"{', '.join(self.receivers)}, found back={self.back}"
            )
        return layout

    def _paths(self, pairs: tuple[Pair, ...], receivers: tuple[str, ...]) -> PathPatching:
        """From every source to receivers."""
        return PathPatching(
            pairs=pairs,
            receivers=receivers,
            mlps=self.mlps,
            alternative=self.alternative,
            seed=self.seed,
            position=self.position,
            memory=self.memory,
        )

    def prepare(self, model: Model) -> Any:
        """The model, the paths to the receivers there are in the end, and the mean effects that senders are
        chosen by, [sender, receiver]."""
        layout, receivers = self.check(model.config), self.receivers
        chosen = self._mean(model, layout, receivers)
        if self.back:
            strongest = _ranked(chosen, [is_head(name) for name in layout.sources])[: self.back]
            heads = [layout.sources[head] for head in sorted(strongest)]
            receivers = tuple(TOGETHER.join(f"{head}<{kind}>" for head in heads) for kind in KINDS)
            chosen = self._mean(model, layout, receivers)
        return model, self._paths(self.pairs, receivers), chosen

    def _mean(self, model: Model, layout: Layout, receivers: tuple[str, ...]) -> Floats:
        """Effects on the pairs that senders are chosen on, [sender, receiver]."""
        paths = self._paths(self.chosen_on, receivers)
        cells = (paths.of_cell(model, layout, cell) for cell in paths.cells(model.config))
        found: Floats = np.mean([paths.effects(model, layout, pair) for pair in cells], axis=0)
        return found

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """All of `outputs`, of one pair."""
        import xarray as xr

        model, paths, chosen = prepared
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        pair = paths.of_cell(model, layout, cell)
        told = np.stack([self._told(layout, effects) for effects in chosen.T], axis=1)
        given = {
            "effect": paths.effects(model, layout, pair)[None],
            "clean": np.array([pair.clean]),
            "chosen_effect": chosen,
            "chosen": told,
            "random": self._random(model, layout, paths, pair, told)[None],
        }
        return xr.Dataset(
            {name: declared[name].variable(each) for name, each in given.items()},
            coords={"sender": list(layout.sources), "receiver": list(paths.receivers)},
        )

    def _told(self, layout: Layout, effects: Floats) -> Ints:
        """The strongest heads and others, and the quietest head, by effects on one receiver [sender]: 2 n + 1
        numbers of senders."""
        is_one = [is_head(name) for name in layout.sources]
        heads, others = (_ranked(effects[:, None], each) for each in (is_one, [not one for one in is_one]))
        found = np.full(2 * self.strongest + 1, NONE)
        for start, ranked in ((0, heads), (self.strongest, others)):
            chosen = ranked[: self.strongest]
            found[start : start + len(chosen)] = chosen
        if len(heads) > self.strongest:
            found[-1] = heads[-1]
        return found

    def _random(self, model: Model, layout: Layout, paths: PathPatching, pair: ByPair, told: Ints) -> Floats:
        """The metric's change by random changes as long as what senders say, [draw, told, receiver]."""
        import torch

        from ..forward.edges.effects import alone_at
        from ..forward.edges.paths import Changes

        change, receivers = alone_at(pair.batch.change[0], self.position), paths.sets(layout)[1]
        whose = pair.batch.pairs[0].canonical()
        found = np.full((self.draws, *told.shape), np.nan)
        for row, column in np.argwhere(told != NONE).tolist():
            source = int(told[row, column])
            like = change[source].float().cpu().numpy()
            # Of pair and sender alone: who else is asked for changes no draw.
            seed = int(digest("random_paths", self.seed, whose, layout.sources[source])[:12], 16)
            drawn = torch.from_numpy(random_directions(like, self.draws, seed=seed)).to(change)
            found[:, row, column] = paths.patched(
                model, layout, pair, Changes(source, drawn), receivers[column]
            )
        return found


def is_head(name: str) -> bool:
    """Whether a sender is one head."""
    return name.startswith("a") and TOGETHER not in name


def _ranked(effects: Floats, among: Sequence[bool]) -> list[int]:
    """Senders among some, the largest |effect| on any receiver [sender, receiver] first; none that has no
    path."""
    size = np.nan_to_num(np.abs(effects), nan=-1.0).max(1)
    return [int(each) for each in np.argsort(-size, kind="stable") if among[each] and size[each] >= 0]
