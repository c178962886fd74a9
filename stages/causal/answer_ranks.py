"""Ranks of answers: which prompts does a model know, nothing being changed?

A prompt is known where the first token of its answer is the model's likeliest next token: rank 0. One forward
pass per prompt, so that a question can ask before it runs thousands of interventions on facts nobody knows.

Border: token ids in, numbers out; knows no texts. Never imports torch until it runs.

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
"""Token ids of a prompt, the first token of its answer, and the position whose logits say it (-1: the last).
"""


@dataclass(frozen=True)
class AnswerRanks(Experiment):
    """How many tokens are likelier than each prompt's answer.

    prompts: with answer and position. Raises StageError for none.
    """

    name: ClassVar[str] = "answer_ranks"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "rank": Output(("prompt",), "1", "tokens likelier than the answer's first token; 0: it is likeliest"),
    }

    prompts: tuple[AskedPrompt, ...]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise StageError("answer_ranks: expected at least one prompt with its answer, found none")

    def params(self) -> dict[str, Any]:
        """None of its own: the one cell lists the prompts."""
        return {}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One, as it takes one pass per prompt. Raises PromptError for an answer outside the vocabulary."""
        for _, answer, _ in self.prompts:
            check_metrics((Rank(answer),), config.vocab_size)
        return [{"prompts": [[list(ids), answer, at] for ids, answer, at in self.prompts]}]

    def runs(self, prepared: None, cell: CellLabels) -> Sequence[Run]:
        """One forward pass per prompt, without interventions."""
        return [Run(ids, None, Logits((at,))) for ids, _, at in cell["prompts"]]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs themselves: making them needs no loaded model."""
        return self.runs(None, cell)

    def measure(self, prepared: None, cell: CellLabels, result: HookCache) -> Any:
        """Logits of one prompt where its answer is said, float64 [vocab]."""
        return as_vector(result.logits)

    def measure_run(self, prepared: None, cell: CellLabels, number: int, result: HookCache) -> float:
        """The rank of the prompt's own answer."""
        _, answer, _ = cell["prompts"][number]
        logits = self.measure(prepared, cell, result)
        return Rank(answer).value(logits, logits)

    def dataset(self, prepared: None, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Ranks in the order of the prompts."""
        import xarray as xr

        return xr.Dataset({"rank": self.outputs["rank"].variable(np.array(measured, np.float64))})
