"""Ranks of correct answers in the unmodified model: which facts does the model know?

A prompt counts as known when the first token of its answer has rank 0, the largest next-token logit. One
forward pass per prompt, so that a workflow can drop unknown facts before it runs thousands of interventions.

Border: token ids in, numbers out; no text. Torch is imported when it runs.

Axes: prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import StageError
from ..forward.hooks.wants import Logits
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run
from .grids.patching_metrics import Rank, check_metrics
from .grids.patching_results import as_vector

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache

__all__ = ["AnswerRanks", "AskedPrompt"]

AskedPrompt = tuple[tuple[int, ...], int, int]
"""(token ids of a prompt, first token of its answer, position whose logits predict the answer; -1: last)."""


@dataclass(frozen=True)
class AnswerRanks(Experiment):
    """For each prompt, the number of tokens with a larger next-token logit than its answer.

    Raises:
        StageError: There are no prompts.
    """

    name: ClassVar[str] = "answer_ranks"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "rank": Output(("prompt",), "1", "number of tokens more likely than the answer's first token"),
    }

    prompts: tuple[AskedPrompt, ...]
    """Prompts with their answer token and the position of the logits; see `AskedPrompt`."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise StageError("answer_ranks: expected at least one prompt with its answer, found none")

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: none, as the labels of the only cell list the prompts."""
        return {}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell for all prompts.

        Raises:
            PromptError: An answer is outside the vocabulary.
        """
        for _, answer, _ in self.prompts:
            # Refused while planning, before the model is loaded.
            check_metrics((Rank(answer),), config)
        return [{"prompts": [[list(ids), answer, at] for ids, answer, at in self.prompts]}]

    def runs(self, prepared: None, cell: CellLabels) -> Sequence[Run]:
        """One forward pass per prompt, without interventions."""
        # Logits at one position only: those of a whole prompt are [token, vocab].
        return [Run(ids, None, Logits((position,))) for ids, _, position in cell["prompts"]]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs themselves: they need no loaded model."""
        return self.runs(None, cell)

    def measure(self, prepared: None, cell: CellLabels, result: HookCache) -> Any:
        """Logits of one prompt at its answer position, float64 [vocab]."""
        return as_vector(result.logits)

    def measure_run(self, prepared: None, cell: CellLabels, number: int, result: HookCache) -> float:
        """Rank of the answer to prompt `number` of the cell, 0 for the largest logit."""
        _, answer, _ = cell["prompts"][number]
        logits = self.measure(prepared, cell, result)
        # `Rank` ignores the clean run, so the same logits stand in for both.
        return Rank(answer).value(logits, logits)

    def dataset(self, prepared: None, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """`rank` [prompt], in the order of the prompts."""
        import xarray as xr

        return xr.Dataset({"rank": self.outputs["rank"].variable(np.array(measured, np.float64))})
