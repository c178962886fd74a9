"""Claims about prompts that a model knows: measured first, so that no control is run for a claim never made.

A prompt is known where its answer is the model's likeliest next token (stages/causal/answer_ranks.py). A
workflow names groups of prompts, such as those a place is chosen on and those it is scored on. `run` computes
their ranks before anything else; where a group has fewer known prompts than a claim needs, the nodes that
only claims need are left out, and the findings say why instead. `controls=0` leaves them out from the start.

Border: token ids and stored ranks; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ....stages.causal.answer_ranks import AnswerRanks, AskedPrompt
from ....store.errors import ConfigError
from ...views import Findings
from ...workflow import ModelWorkflow, Nodes
from ..answers import KNOWN

if TYPE_CHECKING:
    from ....store import Store

__all__ = ["CHOSEN_ON", "NO_CONTROLS", "SCORED", "KnownWorkflow"]

CHOSEN_ON, SCORED = "to choose on", "to score on"
"""What prompts are for, as messages say it behind "8 facts"."""
NO_CONTROLS = "Nothing is claimed, as no control was run (controls=0)."
NODE = "known"
"""Name of the node that measures ranks."""


class KnownWorkflow(ModelWorkflow):
    """A question whose claims are about prompts that the model knows."""

    settings: Any
    """With those of `ControlSettings`."""
    asked_about: ClassVar[str] = "facts"
    """What the prompts are, in messages: "facts" or "pairs"."""
    describes_unknown: ClassVar[bool] = True
    """Whether what is left without claims is worth showing of prompts that the model does not know."""
    only_claims: tuple[str, ...] = ()
    """Names of the nodes that only claims need; `plan` sets it."""
    groups: Mapping[str, int]
    """Number of prompts in each group, by what it is for: {"to choose on": 8}; set by `known_node`."""

    def known_node(self, groups: Mapping[str, Sequence[AskedPrompt]]) -> Nodes:
        """The node that measures which prompts the model knows.

        groups: prompts by what they are for, in words that follow "8 facts": {"to choose on": ...}. A claim
        needs KNOWN of each.
        """
        self.groups = {name: len(prompts) for name, prompts in groups.items()}
        return {NODE: self.on_model(AnswerRanks(tuple(chain.from_iterable(groups.values()))))}

    def is_known(self, group: str) -> npt.NDArray[np.bool_]:
        """Which prompts of a group the model knows, bool [prompt]."""
        names = list(self.groups)
        ends = np.cumsum([self.groups[name] for name in names])
        ranks = np.split(self._ranks, ends[:-1])[names.index(group)]
        return np.array(ranks == 0)

    @cached_property
    def _ranks(self) -> npt.NDArray[np.float64]:
        assert self.store is not None, "measured by `run`"
        found: npt.NDArray[np.float64] = self.nodes[NODE].open(self.store)["rank"].values
        return found

    @property
    def known_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """By group how many prompts the model knows, and how many there are."""
        return {name: int(self.is_known(name).sum()) for name in self.groups}, dict(self.groups)

    @property
    def not_claimed(self) -> str:
        """Why nothing is claimed, in a sentence; empty where something is."""
        if not self.settings.controls:
            return NO_CONTROLS
        if NODE not in self.nodes:
            return ""
        counts, totals = self.known_counts
        if min(counts.values()) >= KNOWN:
            return ""
        whose, each = self.asked_about, " of each" if len(totals) > 1 else ""
        known = " and ".join(f"{counts[name]} of {total} {whose} {name}" for name, total in totals.items())
        return (
            f"The model knows the answer of {known}; a claim needs {KNOWN}{each}. So no control was run and "
            f"nothing is claimed: give {whose} that it knows with data=FILE, or ask for what describes the "
            "model alone with controls=0."
        )

    def unclaimed(self) -> Findings:
        """See `Workflow`; read from the ranks of the answers, if these were computed."""
        return Findings.none(self.not_claimed, (NODE,) if NODE in self.nodes else ())

    def first_nodes(self) -> Nodes:
        """See `Workflow`: ranks, where a claim hangs on them."""
        return {NODE: self.nodes[NODE]} if NODE in self.nodes and self.only_claims else {}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: the nodes that only claims need are left out where there will be none. Raises
        ConfigError where unknown prompts are not described."""
        self.store = store
        vars(self).pop("_ranks", None)
        if self.only_claims and self.not_claimed:
            if refuses and not self.describes_unknown:
                raise ConfigError(self.not_claimed)
            self.nodes = {name: node for name, node in self.nodes.items() if name not in self.only_claims}
        return self
