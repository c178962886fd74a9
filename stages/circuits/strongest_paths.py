"""Strongest paths: senders of largest effect on some pairs, tested on held-out pairs against random changes.

    paths = StrongestPaths(chosen_on=train_pairs, pairs=test_pairs, receivers=("logits",))
    back = StrongestPaths(chosen_on=train_pairs, pairs=test_pairs, receivers=("logits",), back=1)

Every sender is patched in every pair (paths.py). The senders that change the metric most on `chosen_on` are
also, on the held-out pairs, changed by random directions of equal norm, position by position, on the same
path: the null distribution. With `back`, the receivers are the queries, keys and values of the heads with the
largest effect on the given receivers (Wang et al. 2023, "Interpretability in the Wild", sections 3.2 and
3.3). They are known only after those effects, so selection and test are one experiment.

Border: pairs in, labelled arrays out. Torch is imported when it runs.

Axes: pair, sender, receiver; told: selected senders, the strongest heads, then the strongest other sources,
then the weakest head; draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats, Ints
from ...store.digest import digest
from ...store.errors import StageError
from ..causal.controls import random_directions
from ..forward.edges.layout import KINDS, LOGITS
from ..forward.runs.experiment import CellLabels
from .pair_experiment import PairExperiment, PairMetricRun
from .pairs import Pair
from .paths import TOGETHER, PathPatching, has_path

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["StrongestPaths", "is_head"]

NONE = -1
"""Value of `chosen` in places left over when fewer senders than requested have a path."""


@dataclass(frozen=True, kw_only=True)
class StrongestPaths(PairExperiment):
    """Effect of every source on the receivers along paths, and of random changes of the strongest sources.

    A cell is a pair of prompts.
    """

    chosen_on: tuple[Pair, ...]
    """Pairs of prompts on which the strongest senders are selected, by their mean effect."""
    receivers: tuple[str, ...] = (LOGITS,)
    """Names of the receivers, as for `PathPatching`."""
    mlps: Literal["recomputed", "held"] = "recomputed"
    """Whether MLPs on a path are recomputed or held, as for `PathPatching`."""
    strongest: int = 4
    """Number of heads to select, and equal number of other sources (MLPs and the input)."""
    draws: int = 20
    """Number of random changes of each selected sender."""
    back: int = 0
    """Number of heads with the largest effect on `receivers` whose joint queries, joint keys and joint values
    become the receivers; 0 keeps `receivers`.
    """

    name: ClassVar[str] = "strongest_paths"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **PathPatching.outputs,
        "chosen_effect": Output(
            ("sender", "receiver"), "<unit>", "mean effect on the pairs on which senders are selected"
        ),
        "chosen": Output(("told", "receiver"), "1", "index of each selected sender, -1 for none"),
        "random": Output(
            ("pair", "draw", "told", "receiver"),
            "<unit>",
            "change of the metric by random changes of a sender, of equal norm",
        ),
    }

    def params(self) -> dict[str, Any]:
        """All fields but the pairs, as of `PairExperiment`, with `chosen_on` as plain values."""
        return {**super().params(), "chosen_on": [pair.canonical() for pair in self.chosen_on]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Outputs in the unit of the metric; `chosen` holds indices of senders."""
        return {**super().outputs_on(config), "chosen": self.outputs["chosen"]}

    def check(self, config: Architecture) -> Layout:
        """Graph of the model, if the fields fit it; raises the errors of `PathPatching.check` too.

        Raises:
            StageError: A number is below its minimum, the metrics of the pairs have different units, or
            `back`
                is above the number of heads with a path to the receivers.
        """
        self._paths(self.chosen_on, self.receivers).check(config)
        paths = self._paths(self.pairs, self.receivers)
        layout = paths.check(config)
        if self.chosen_on[0].metric.units != self.unit:
            raise StageError(
                f"expected the pairs of chosen_on to have metrics in {self.unit}, as the pairs to measure "
                f"do, found {self.chosen_on[0].metric.units}"
            )
        for name, minimum in (("strongest", 1), ("draws", 0), ("back", 0)):
            if (count := getattr(self, name)) < minimum:
                raise StageError(f"expected the field {name} to be at least {minimum}, found {count}")
        is_sender = has_path(layout, *paths.sets(layout)).any(1)
        heads = sum(is_head(layout.sources[source]) for source in np.flatnonzero(is_sender))
        if self.back > heads:
            raise StageError(
                f"expected the field back to be at most {heads}, the number of heads with a path to "
                f"{', '.join(self.receivers)}, found {self.back}; choose a smaller number"
            )
        return layout

    def _paths(self, pairs: tuple[Pair, ...], receivers: tuple[str, ...]) -> PathPatching:
        """Experiment that patches the paths from every source to `receivers`."""
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
        """(model, path patching to the final receivers, mean effects [sender, receiver] on `chosen_on`)."""
        layout, receivers = self.check(model.config), self.receivers
        mean_effects = self._mean(model, layout, receivers)
        if self.back:
            strongest = _ranked(mean_effects, [is_head(name) for name in layout.sources])[: self.back]
            # In the order of the graph: a set of heads has one name, whatever the order of their effects.
            heads = [layout.sources[head] for head in sorted(strongest)]
            receivers = tuple(TOGETHER.join(f"{head}<{kind}>" for head in heads) for kind in KINDS)
            mean_effects = self._mean(model, layout, receivers)
        return model, self._paths(self.pairs, receivers), mean_effects

    def _mean(self, model: Model, layout: Layout, receivers: tuple[str, ...]) -> Floats:
        """Effects of all senders on receivers, averaged over `chosen_on`, float64 [sender, receiver]."""
        paths = self._paths(self.chosen_on, receivers)
        cells = (paths.pair_run(model, layout, cell) for cell in paths.cells(model.config))
        mean: Floats = np.mean([paths.effects(model, layout, pair) for pair in cells], axis=0)
        return mean

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects in one pair, and those of random changes of the strongest senders."""
        import xarray as xr

        model, paths, mean_effects = prepared
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        pair = paths.pair_run(model, layout, cell)
        selected = np.stack([self._selected_senders(layout, effects) for effects in mean_effects.T], axis=1)
        variables = {
            "effect": paths.effects(model, layout, pair)[None],
            "clean": np.array([pair.clean]),
            "chosen_effect": mean_effects,
            "chosen": selected,
            "random": self._random(model, layout, paths, pair, selected)[None],
        }
        return xr.Dataset(
            {name: declared[name].variable(values) for name, values in variables.items()},
            coords={"sender": list(layout.sources), "receiver": list(paths.receivers)},
        )

    def _selected_senders(self, layout: Layout, effects: Floats) -> Ints:
        """Indices of the n strongest heads, the n strongest other sources and the weakest head.

        Arguments:
            layout: Graph of the model.
            effects: Effects on one receiver [sender], NaN without a path.

        Returns:
            int64 [2 n + 1], with `NONE` for missing senders if fewer have a path.
        """
        is_head_source = [is_head(name) for name in layout.sources]
        heads = _ranked(effects[:, None], is_head_source)
        other_sources = _ranked(effects[:, None], [not is_one for is_one in is_head_source])
        senders = np.full(2 * self.strongest + 1, NONE)
        for start, ranked in ((0, heads), (self.strongest, other_sources)):
            strongest = ranked[: self.strongest]
            senders[start : start + len(strongest)] = strongest
        # The weakest head is a negative control that was selected like the others.
        if len(heads) > self.strongest:
            senders[-1] = heads[-1]
        return senders

    def _random(
        self, model: Model, layout: Layout, paths: PathPatching, pair: PairMetricRun, selected: Ints
    ) -> Floats:
        """Change of the metric by random changes of selected senders, float64 [draw, selected, receiver].

        Each has the norm of the sender's own change, position by position.
        """
        import torch

        from ..forward.edges.effects import alone_at
        from ..forward.edges.paths import Changes

        change, receivers = alone_at(pair.batch.change[0], self.position), paths.sets(layout)[1]
        pair_identity = pair.batch.pairs[0].canonical()
        effects = np.full((self.draws, *selected.shape), np.nan)
        for row, column in np.argwhere(selected != NONE).tolist():
            source = int(selected[row, column])
            # numpy has no bfloat16, hence float().
            template = change[source].float().cpu().numpy()
            # Seeded by pair and sender, so that a draw does not depend on which other senders are selected.
            seed = int(digest("random_paths", self.seed, pair_identity, layout.sources[source])[:12], 16)
            directions = torch.from_numpy(random_directions(template, self.draws, seed=seed)).to(change)
            effects[:, row, column] = paths.patched(
                model, layout, pair, Changes(source, directions), receivers[column]
            )
        return effects


def is_head(name: str) -> bool:
    """Whether a sender's name is that of a single head, such as "a5.h1"."""
    return name.startswith("a") and TOGETHER not in name


def _ranked(effects: Floats, is_candidate: Sequence[bool]) -> list[int]:
    """Indices of senders with a path, by their largest |effect| on any receiver, largest first.

    Arguments:
        effects: Effects [sender, receiver], NaN without a path.
        is_candidate: Whether each sender is considered [sender].
    """
    # NaN marks senders without a path; -1 sorts them last, behind effects of 0.
    size = np.nan_to_num(np.abs(effects), nan=-1.0).max(1)
    return [
        int(sender)
        for sender in np.argsort(-size, kind="stable")
        if is_candidate[sender] and size[sender] >= 0
    ]
