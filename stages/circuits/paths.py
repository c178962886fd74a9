"""Path patching: effect of senders on receivers along direct paths only.

    heads = PathPatching(pairs=pairs, senders=("a0.h1", "m2"), receivers=("a3.h0<k>", "logits"))
    effects = run(heads.on("specimen"), store)["effect"]          # [pair, sender, receiver]

Senders get their output in the corrupted prompt (or another `alternative`), all other heads are fixed to the
clean run, and MLPs are recomputed or fixed; receivers get the resulting input, and everything after them is
recomputed (forward/edges/paths.py; Wang et al. 2023, "Interpretability in the Wild", section 3.1). With MLPs
fixed, a single path equals `EdgeEffects` of that edge.

Names are those of edges (forward/edges/layout.py): senders "input", "a5.h1", "m3"; receivers "a9.h6<q>",
"m4", "logits". Several that are patched together are joined by "+": "a9.h6<q>+a9.h9<q>".

Border: pairs in, labelled arrays out; forward/edges computes passes edge by edge. Torch is imported when it
runs.

Axes: pair, sender, receiver. NaN where no path leads from sender to receiver.
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
from .pair_experiment import PairExperiment, PairMetricRun

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.edges.paths import Sent
    from ..forward.models.model import Model

__all__ = ["PathPatching", "has_path"]

TOGETHER = "+"
"""Character that joins the names of nodes which are patched together."""


@dataclass(frozen=True, kw_only=True)
class PathPatching(PairExperiment):
    """Effect of each sender on each receiver along direct paths, for each pair of prompts (one cell each)."""

    receivers: tuple[str, ...]
    """Names of receivers; the logits cannot be joined with others."""
    senders: tuple[str, ...] = ()
    """Names of senders; empty for every source of the graph by itself."""
    mlps: Literal["recomputed", "held"] = "recomputed"
    """Whether MLPs on a path are "recomputed", as in the paper, or "held" at their clean output."""

    name: ClassVar[str] = "path_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "effect": Output(
            ("pair", "sender", "receiver"), "<unit>", "change of the metric when the path is patched"
        ),
        "clean": Output(("pair",), "<unit>", "metric of the clean run"),
    }

    def check(self, config: Architecture) -> Layout:
        """Check the fields against a model, as `PairExperiment.check`.

        Raises:
            ConfigError: The model does not have a node.
            StageError: There are no receivers, the logits are joined with others, a name is repeated, or
                no path leads from any sender to any receiver.
        """
        layout = super().check(config)
        if self.mlps not in ("recomputed", "held"):
            raise StageError(f"expected mlps to be 'recomputed' or 'held', found {self.mlps!r}")
        if not self.receivers:
            raise StageError(f"expected at least one receiver, such as {LOGITS!r}, found none")
        for node_names in (self.senders, self.receivers):
            if len(set(node_names)) < len(node_names):
                raise StageError(
                    "expected each sender and each receiver once, found a repeated name in "
                    f"{', '.join(node_names)}"
                )
        senders, receivers = self.sets(layout)
        for names, numbers in zip(self.receivers, receivers, strict=True):
            # Nothing follows the logits, so they cannot share a pass with receivers behind which layers are
            # recomputed.
            if len(numbers) > 1 and len(layout.destinations) - 1 in numbers:
                raise StageError(
                    f"expected the logits as a receiver of their own, as a path ends there, found {names!r}; "
                    "name them as another receiver"
                )
        if not has_path(layout, senders, receivers).any():
            raise StageError(
                "expected a sender that is computed before a receiver, so that a path can lead there, found "
                f"the senders {', '.join(self.senders)} and the receivers {', '.join(self.receivers)}"
            )
        return layout

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The outputs effect [pair, sender, receiver] and clean [pair], of one pair."""
        import xarray as xr

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        pair = self.pair_run(prepared, layout, cell)
        effect = self.effects(prepared, layout, pair)
        return xr.Dataset(
            {
                "effect": declared["effect"].variable(effect[None]),
                "clean": declared["clean"].variable(np.array([pair.clean])),
            },
            coords={"sender": self.sender_names(layout), "receiver": list(self.receivers)},
        )

    def effects(self, model: Model, layout: Layout, pair: PairMetricRun) -> Floats:
        """Effect of every sender on every receiver in a pair.

        Arguments:
            model: The model.
            layout: Graph of the model.
            pair: Clean run of the pair.

        Returns:
            float64 [sender, receiver]; NaN where no path leads from the sender to the receiver.
        """
        import torch

        from ..forward.edges.effects import alone_at
        from ..forward.edges.paths import Senders

        senders, receivers = self.sets(layout)
        is_path = has_path(layout, senders, receivers)
        change, effect = alone_at(pair.batch.change[0], self.position), np.full(is_path.shape, np.nan)
        # One call per receiver: all senders to one receiver share its recomputed layers.
        for column in np.flatnonzero(is_path.any(0)):
            rows = is_path[:, column]
            sent = Senders(change, torch.from_numpy(senders[rows]))
            effect[rows, column] = self.patched(model, layout, pair, sent, receivers[column])
        return effect

    def patched(
        self, model: Model, layout: Layout, pair: PairMetricRun, sent: Sent, receivers: Sequence[int]
    ) -> list[float]:
        """Change of a pair's metric when paths from senders to receivers are patched, one per run.

        Arguments:
            model: The model.
            layout: Graph of the model.
            pair: Clean run of the pair.
            sent: Changed outputs of the senders, one row per run.
            receivers: Destinations that get them.
        """
        import torch

        from ..forward.edges.paths import patched_paths
        from .batches import network_of

        with torch.no_grad():
            logits = patched_paths(
                network_of(model),
                layout,
                pair.batch.clean,
                sent,
                receivers,
                pair.want,
                mlps_held=self.mlps == "held",
                memory=self.memory,
            )
        return pair.changes(logits)

    def sender_names(self, layout: Layout) -> list[str]:
        """Names of the senders, by default all sources."""
        return list(self.senders or layout.sources)

    def sets(self, layout: Layout) -> tuple[Bools, list[list[int]]]:
        """(sources of each sender, bool [sender, source]; indices of the destinations of each receiver)."""
        # A row per source; joined names get the union of their rows.
        senders = np.eye(len(layout.sources), dtype=np.bool_)
        if self.senders:
            sets = (_numbers(joined, layout.sources, "sender") for joined in self.senders)
            senders = np.stack([senders[numbers].any(0) for numbers in sets])
        return senders, [_numbers(joined, layout.destinations, "receiver") for joined in self.receivers]


def has_path(layout: Layout, senders: Bools, receivers: Sequence[Sequence[int]]) -> Bools:
    """Whether a source of a sender is computed before a destination of a receiver, bool [sender, receiver].

    Arguments:
        layout: Graph of the model.
        senders: Sources of each sender, bool [sender, source].
        receivers: Indices of the destinations of each receiver.
    """
    return np.stack([senders @ layout.edges[:, numbers].any(1) for numbers in receivers], axis=1)


def _numbers(joined: str, names: Sequence[str], role: str) -> list[int]:
    """Indices of the nodes in a name such as "a9.h6<q>+a9.h9<q>", ascending.

    Arguments:
        joined: Names joined by "+".
        names: All names of sources, or of destinations, of the graph.
        role: "sender" or "receiver", for messages.

    Raises:
        ConfigError: A name does not exist.
        StageError: A name is repeated.
    """
    parts = [part.strip() for part in joined.split(TOGETHER)]
    for part in parts:
        if part not in names:
            near = nearest(part, names)
            hint = f"did you mean {near!r}?" if near else f"a name looks like {names[-1]!r}"
            raise ConfigError(f"expected the name of a {role} of this model, found {part!r}; {hint}")
    if len(set(parts)) < len(parts):
        raise StageError(f"expected each joined {role} once, found a repeated name in {joined!r}")
    # Sorted: a set of nodes has one spelling, whatever their order in the name.
    return sorted(map(names.index, parts))
