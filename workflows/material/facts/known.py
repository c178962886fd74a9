"""Claims restricted to prompts that a model knows; without enough of them, no controls are run.

A prompt is known if its answer is the model's most likely next token (stages/causal/answer_ranks.py). A
workflow names groups of prompts, such as those for selection and those for scoring. `run` computes the ranks
of their answers first. If a group has fewer known prompts than a claim needs, nodes that only claims need are
removed, and the findings state the reason. `controls=0` removes them from the start.

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
"""Names of the groups of prompts that claims need, in words that follow "8 facts" in messages."""
NO_CONTROLS = "Nothing is claimed, as no control was run (controls=0)."
NODE = "known"
"""Name of the node, and of its result, that measures the ranks of answers."""


class KnownWorkflow(ModelWorkflow):
    """Base class of workflows whose claims are about prompts that the model knows."""

    settings: Any
    """Settings, including those of `ControlSettings`."""
    asked_about: ClassVar[str] = "facts"
    """Name of the prompts in messages: "facts" or "pairs"."""
    describes_unknown: ClassVar[bool] = True
    """Whether results without claims are meaningful for prompts that the model does not know."""
    only_claims: tuple[str, ...] = ()
    """Names of the nodes that are needed for claims alone; `plan` sets it."""
    groups: Mapping[str, int]
    """Number of prompts in each group, by name: {"to choose on": 8}; `known_node` sets it."""

    def known_node(self, groups: Mapping[str, Sequence[AskedPrompt]]) -> Nodes:
        """Node that measures which prompts the model knows, as {"known": node}.

        groups: prompts by the name of their group, which follows "8 facts" in messages: {"to choose on": …}.
            A claim needs KNOWN known prompts in each group.
        """
        self.groups = {name: len(prompts) for name, prompts in groups.items()}
        return {NODE: self.on_model(AnswerRanks(tuple(chain.from_iterable(groups.values()))))}

    def is_known(self, group: str) -> npt.NDArray[np.bool_]:
        """Which prompts of a group the model knows, bool [prompt]."""
        names = list(self.groups)
        ends = np.cumsum([self.groups[name] for name in names])
        ranks = np.split(self._ranks, ends[:-1])[names.index(group)]
        # Ranks count from 0: the answer is the most likely next token.
        return np.array(ranks == 0)

    @cached_property
    def _ranks(self) -> npt.NDArray[np.float64]:
        assert self.store is not None, "measured by `run`"
        ranks: npt.NDArray[np.float64] = self.nodes[NODE].open(self.store)["rank"].values
        return ranks

    @property
    def known_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """(numbers of known prompts, numbers of all prompts), each by name of the group."""
        return {name: int(self.is_known(name).sum()) for name in self.groups}, dict(self.groups)

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed, in a sentence; empty if there are claims."""
        if not self.settings.controls:
            return NO_CONTROLS
        if NODE not in self.nodes:
            return ""
        counts, totals = self.known_counts
        if min(counts.values()) >= KNOWN:
            return ""
        prompts, of_each = self.asked_about, " of each" if len(totals) > 1 else ""
        known = " and ".join(f"{counts[name]} of {total} {prompts} {name}" for name, total in totals.items())
        return (
            f"The model knows the answer of {known}; a claim needs {KNOWN}{of_each}. So no control was run "
            f"and nothing is claimed: give {prompts} that it knows with data=FILE, or get the "
            "results without claims by controls=0."
        )

    def unclaimed(self) -> Findings:
        """View with the reason for missing claims; its source is the node of answer ranks, if present."""
        return Findings.none(self.not_claimed, (NODE,) if NODE in self.nodes else ())

    def first_nodes(self) -> Nodes:
        """Node of the ranks of answers, if claims depend on it; `run` computes it before the nodes that only
        claims need."""
        return {NODE: self.nodes[NODE]} if NODE in self.nodes and self.only_claims else {}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """Removes the nodes that only claims need if nothing can be claimed. Raises ConfigError if the
        remaining results would be meaningless (`describes_unknown`). See `Workflow` for the arguments."""
        self.store = store
        vars(self).pop("_ranks", None)
        if self.only_claims and self.not_claimed:
            if refuses and not self.describes_unknown:
                raise ConfigError(self.not_claimed)
            self.nodes = {name: node for name, node in self.nodes.items() if name not in self.only_claims}
        return self
