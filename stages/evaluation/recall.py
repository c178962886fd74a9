"""Factual recall: whether prompts that state a fact up to its object are continued by that object.

Border: prompts and answers as token ids; which texts those are is made in workflows. An answer is followed by
its first token. Rows as of CounterFact (Meng et al. 2022, "Locating and Editing Factual Associations"): a
prompt, the true object, and the objects of all other rows, which are what it is held against: a model that
only knows which objects are frequent gives them to every prompt.

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
from .changed import OfChanged, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["FactualRecall"]


@dataclass(frozen=True)
class FactualRecall(OfChanged):
    """What is said behind prompts. targets: first token of each prompt's own answer."""

    name: ClassVar[str] = "factual_recall"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "logprob": Output(("fact", "answer"), "nats", "of every answer behind every prompt"),
        "rank": Output(("fact",), "1", "of its own answer among all tokens, 0 the likeliest"),
        "said": Output(("fact",), "1", "likeliest token"),
        "target": Output(("fact",), "1", "its own answer"),
    }

    prompts: Prompts
    targets: tuple[int, ...]

    def params(self) -> dict[str, Any]:
        """All that was asked decides each cell."""
        return {"prompts": [list(ids) for ids in self.prompts], "targets": list(self.targets), **self.change}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One. Raises PromptError unless there is an answer for each prompt."""
        if not self.prompts or len(self.prompts) != len(self.targets):
            raise PromptError(
                f"expected an answer for each prompt, found {len(self.targets)} for {len(self.prompts)}"
            )
        return [{}]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """logprob [fact, answer], answers by ascending id; rank, said and target [fact]. Computed here."""
        import xarray as xr

        model, _ = prepared
        answers = np.unique(self.targets)
        target = np.array(self.targets, np.int64)
        logprob = np.zeros((len(target), len(answers)))
        rank, said = np.zeros((2, len(target)), np.int64)
        for places, rows in batches(self.prompts):
            ((_, found),) = log_probabilities(model, rows, self.bound(prepared, rows), last=True)
            values = found[:, 0].double().cpu().numpy()
            own = values[np.arange(len(places)), target[places]]
            logprob[places] = values[:, answers]
            rank[places] = (values > own[:, None]).sum(axis=1)
            said[places] = values.argmax(axis=1)
        about = {name: {"units": it.unit, "long_name": it.long_name} for name, it in self.outputs.items()}
        return xr.Dataset(
            {
                "logprob": (("fact", "answer"), logprob, about["logprob"]),
                "rank": ("fact", rank, about["rank"]),
                "said": ("fact", said, about["said"]),
                "target": ("fact", target, about["target"]),
            },
            {"answer": answers},
        )
