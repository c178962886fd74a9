"""Path patching: what senders say to receivers, and to nobody else.

    heads = PathPatching(pairs=pairs, senders=("a0.h1", "m2"), receivers=("a3.h0<k>", "logits"))
    effects = run(heads.on("specimen"), store)["effect"]          # [pair, sender, receiver]

Senders are put to what they add in the corrupted prompt (`alternative` says what else), all other heads are
held at the clean one, MLPs are computed anew or held; receivers get what then reaches them, and all behind
them is computed anew (forward/edges/paths.py; Wang et al., Interpretability in the Wild, 2023, section 3.1).
With MLPs held, this is `EdgeEffects` of one edge.

Names are those of edges (forward/edges/layout.py): senders "input", "a5.h1", "m3"; receivers "a9.h6<q>",
"m4", "logits". Several patched together are joined by "+": "a9.h6<q>+a9.h9<q>".

Border: pairs in, labelled arrays out; how a pass is taken apart is in forward/edges. Never imports torch
until it runs.

Axes: pair, sender, receiver. NaN where no path leads from the one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import ConfigError, StageError, nearest
from ..forward.edges.layout import LOGITS, Bools
from ..forward.runs.experiment import CellLabels
from .by_pair import ByPair, PairExperiment

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.edges.paths import Sent
    from ..forward.models.model import Model

__all__ = ["PathPatching", "paths_there_are"]

TOGETHER = "+"


@dataclass(frozen=True, kw_only=True)
class PathPatching(PairExperiment):
    """Each of some senders along its paths to each of some receivers, in each pair. A cell is a pair.

    senders: none for every source by itself. mlps: what lies on a path beside the stream: MLPs computed anew,
    as in the paper, or nothing.
    """

    receivers: tuple[str, ...]
    senders: tuple[str, ...] = ()
    mlps: Literal["recomputed", "held"] = "recomputed"

    name: ClassVar[str] = "path_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "effect": Output(
            ("pair", "sender", "receiver"), "<unit>", "change of the metric where the path is patched"
        ),
        "clean": Output(("pair",), "<unit>", "the metric of the clean run"),
    }

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; ConfigError for a node there is not, StageError for no receiver,
        for logits among other receivers, for one set given twice, and where no path leads anywhere."""
        layout = super().check(config)
        if self.mlps not in ("recomputed", "held"):
            raise StageError(f"expected mlps recomputed or held, found {self.mlps!r}")
        if not self.receivers:
            raise StageError(f"expected at least one receiver, such as {LOGITS!r}, found none")
        for joined in (self.senders, self.receivers):
            if len(set(joined)) < len(joined):
                raise StageError(f"expected names that differ, found {', '.join(joined)}")
        senders, receivers = self.sets(layout)
        for names, numbers in zip(self.receivers, receivers, strict=True):
            if len(numbers) > 1 and len(layout.destinations) - 1 in numbers:
                raise StageError(
                    f"expected the logits by themselves, as a path ends there, found {names!r}; ask for them "
                    "as another receiver"
                )
        if not paths_there_are(layout, senders, receivers).any():
            raise StageError(
                f"expected a sender that is computed before a receiver, found {', '.join(self.senders)} "
                f"and {', '.join(self.receivers)}"
            )
        return layout

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """effect [pair, sender, receiver], clean [pair], of one pair."""
        import xarray as xr

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        pair = self.of_cell(prepared, layout, cell)
        effect = self.effects(prepared, layout, pair)
        return xr.Dataset(
            {
                "effect": declared["effect"].variable(effect[None]),
                "clean": declared["clean"].variable(np.array([pair.clean])),
            },
            coords={"sender": self.sender_names(layout), "receiver": list(self.receivers)},
        )

    def effects(self, model: Model, layout: Layout, pair: ByPair) -> Floats:
        """Of every sender on every receiver in a pair, float64 [sender, receiver]."""
        import torch

        from ..forward.edges.effects import alone_at
        from ..forward.edges.paths import Senders

        senders, receivers = self.sets(layout)
        there_are = paths_there_are(layout, senders, receivers)
        change, effect = alone_at(pair.batch.change[0], self.position), np.full(there_are.shape, np.nan)
        for column in np.flatnonzero(there_are.any(0)):
            rows = there_are[:, column]
            sent = Senders(change, torch.from_numpy(senders[rows]))
            effect[rows, column] = self.patched(model, layout, pair, sent, receivers[column])
        return effect

    def patched(
        self, model: Model, layout: Layout, pair: ByPair, sent: Sent, receivers: Sequence[int]
    ) -> list[float]:
        """By how much rows of senders change the metric of a pair by what they say to receivers, [row]."""
        import torch

        from ..forward.edges.paths import patched_paths
        from .batches import network_of

        held, clean = self.mlps == "held", pair.batch.clean
        with torch.no_grad():
            logits = patched_paths(
                network_of(model),
                layout,
                clean,
                sent,
                receivers,
                pair.want,
                mlps_held=held,
                memory=self.memory,
            )
        return pair.changes(logits)

    def sender_names(self, layout: Layout) -> list[str]:
        """As asked, or every source."""
        return list(self.senders or layout.sources)

    def sets(self, layout: Layout) -> tuple[Bools, list[list[int]]]:
        """Senders, bool [sender, source], and the destinations of each receiver."""
        senders = np.eye(len(layout.sources), dtype=np.bool_)
        if self.senders:
            sets = (_numbers(each, layout.sources, "sender") for each in self.senders)
            senders = np.stack([senders[numbers].any(0) for numbers in sets])
        return senders, [_numbers(each, layout.destinations, "receiver") for each in self.receivers]


def paths_there_are(layout: Layout, senders: Bools, receivers: Sequence[Sequence[int]]) -> Bools:
    """Whether any of some senders is computed before any of some receivers, bool [sender, receiver]: senders
    bool [sender, source], receivers destinations."""
    return np.stack([senders @ layout.edges[:, numbers].any(1) for numbers in receivers], axis=1)


def _numbers(joined: str, names: Sequence[str], what: str) -> list[int]:
    """Which nodes a name says, several joined by "+". Raises ConfigError for one there is not, with the
    nearest, StageError for one said twice."""
    said = [each.strip() for each in joined.split(TOGETHER)]
    for each in said:
        if each not in names:
            near = nearest(each, names)
            hint = f"did you mean {near!r}?" if near else f"such as {names[-1]!r}"
            raise ConfigError(f"expected a {what} of this model, found {each!r}; {hint}")
    if len(set(said)) < len(said):
        raise StageError(f"expected {what}s that differ, found {joined!r}")
    return sorted(map(names.index, said))
