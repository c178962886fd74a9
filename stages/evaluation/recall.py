"""Factual recall: whether prompts that state a fact up to its object are continued by that object.

Border: prompts and answers as token ids; workflows make the texts. Multi-token answers are represented by
their first token. Prompts are as in CounterFact (Meng et al. 2022, "Locating and Editing Factual
Associations"): a prompt, its true object, and the objects of all other prompts for comparison, because a
model that only knows which objects are frequent predicts those for every prompt.

Axes: fact, answer (distinct answers, by token id). Log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import PromptError
from ..forward.runs.experiment import CellLabels
from .changed import ChangedModelExperiment, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["FactualRecall"]


@dataclass(frozen=True)
class FactualRecall(ChangedModelExperiment):
    """Log-probability of every answer after every prompt, and the rank of the correct answer."""

    name: ClassVar[str] = "factual_recall"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "logprob": Output(("fact", "answer"), "nats", "log-probability of every answer after every prompt"),
        "rank": Output(("fact",), "1", "rank of the prompt's own answer among all tokens, 0 the likeliest"),
        "said": Output(("fact",), "1", "most likely next token"),
        "target": Output(("fact",), "1", "first token of the prompt's own answer"),
    }

    prompts: Prompts
    """Token ids of each prompt."""
    targets: tuple[int, ...]
    """Id of the first token of the correct answer to each prompt."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: prompts, targets and change."""
        return {"prompts": [list(ids) for ids in self.prompts], "targets": list(self.targets), **self.change}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell.

        Raises:
            PromptError: The numbers of prompts and answers differ, or are 0.
        """
        if not self.prompts or len(self.prompts) != len(self.targets):
            raise PromptError(
                f"expected one answer for each prompt, and at least one prompt, found {len(self.targets)} "
                f"answers for {len(self.prompts)} prompts"
            )
        return [{}]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """logprob [fact, answer] with answers by ascending id; rank, said and target [fact]."""
        import xarray as xr

        model, _ = prepared
        # Distinct and ascending: several facts may have the same object.
        answers = np.unique(self.targets)
        target = np.array(self.targets, np.int64)
        logprob = np.zeros((len(target), len(answers)))
        rank, top_tokens = np.zeros((2, len(target)), np.int64)
        for indices, rows in batches(self.prompts):
            ((_, logprobs),) = log_probabilities(model, rows, self.bound(prepared, rows), last=True)
            values = logprobs[:, 0].double().cpu().numpy()
            correct = values[np.arange(len(indices)), target[indices]]
            logprob[indices] = values[:, answers]
            # Strictly greater: tied tokens do not push the answer down.
            rank[indices] = (values > correct[:, None]).sum(axis=1)
            top_tokens[indices] = values.argmax(axis=1)
        arrays: dict[str, Any] = {"logprob": logprob, "rank": rank, "said": top_tokens, "target": target}
        variables = {name: self.outputs[name].variable(array) for name, array in arrays.items()}
        return xr.Dataset(variables, {"answer": answers})
