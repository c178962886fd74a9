"""Loss of a model over a corpus, streaming: mean nats per token, by prompt and by position.

Border: prompts as token ids in, labelled numbers out; texts are cut into prompts elsewhere. Nothing that
grows with the corpus is held but a few numbers per prompt: log-probabilities exist a few positions at a time,
and a cell of prompts is stored by itself, so that a killed evaluation goes on where it was and a longer
corpus computes what is new.

A position's loss is that of the token that stands there, so position 0 has none. Uniform guessing loses
log(vocab); what tells a model that was loaded wrongly is said of it by `order.py`.

Induction loss (Olsson et al. 2022; TransformerLens' `induction_loss`) is this loss on random tokens that are
repeated, where they stand the second time: nothing but the repetition tells what comes next.

Axes: prompt, position. Nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Array, Floats
from ...store.errors import PromptError
from ..forward.runs.experiment import CellLabels
from .changed import OfChanged, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["CorpusLoss", "over_spans"]

TOGETHER = 64
"""Prompts of a cell."""


@dataclass(frozen=True)
class CorpusLoss(OfChanged):
    """Loss over prompts, under a change or none. prompts: token ids, at least two each."""

    name: ClassVar[str] = "corpus_loss"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "loss": Output(("prompt",), "nats", "mean loss per token"),
        "tokens": Output(("prompt",), "tokens", "that were predicted"),
        "correct": Output(("prompt",), "1", "share whose likeliest token is the one that stands there"),
        "position_loss": Output(("position",), "nats", "mean loss of the tokens at a position"),
        "position_tokens": Output(("position",), "tokens", "how many those are"),
    }

    prompts: Prompts

    def params(self) -> dict[str, Any]:
        """The change; which prompts is said by the cells."""
        return self.change

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Some prompts each. Raises PromptError for a prompt of one token, or none at all."""
        if not self.prompts or min(map(len, self.prompts)) < 2:
            raise PromptError(
                "expected prompts of at least two tokens, as the first is not predicted, found "
                f"{'one of ' + str(min(map(len, self.prompts))) if self.prompts else 'none'}"
            )
        starts = range(0, len(self.prompts), TOGETHER)
        return [{"prompts": [list(ids) for ids in self.prompts[s : s + TOGETHER]]} for s in starts]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The outputs of one cell, position_loss as a sum."""
        import torch
        import xarray as xr

        model, _ = prepared
        prompts: list[list[int]] = cell["prompts"]
        longest = max(map(len, prompts))
        loss, correct, sums, counts = np.zeros(len(prompts)), np.zeros(len(prompts)), *np.zeros((2, longest))
        for places, rows in batches(prompts):
            target = torch.tensor(rows, device=model.device)[:, 1:]
            for here, every in log_probabilities(model, rows, self.bound(prepared, rows)):
                wanted = target[:, here]
                found = every[:, : wanted.shape[1]]
                if not wanted.numel():
                    continue
                lost = -found.gather(-1, wanted[..., None])[..., 0].double()
                loss[places] += lost.sum(1).cpu().numpy()
                correct[places] += (found.argmax(-1) == wanted).sum(1).cpu().numpy()
                at = slice(here.start + 1, here.start + 1 + wanted.shape[1])
                sums[at] += lost.sum(0).cpu().numpy()
                counts[at] += len(rows)
        tokens = np.array([len(ids) - 1 for ids in prompts])
        return xr.Dataset(
            {
                "loss": ("prompt", loss / tokens),
                "tokens": ("prompt", tokens),
                "correct": ("prompt", correct / tokens),
                "position_loss": ("position", sums),
                "position_tokens": ("position", counts.astype(np.int64)),
            }
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All prompts, and means over all of them by position."""
        import xarray as xr

        longest = max(part.sizes["position"] for part in parts)
        sums, counts = np.zeros(longest), np.zeros(longest, np.int64)
        for part in parts:
            sums[: part.sizes["position"]] += part["position_loss"].values
            counts[: part.sizes["position"]] += part["position_tokens"].values
        whole = xr.concat([part.drop_dims("position") for part in parts], "prompt")
        with np.errstate(invalid="ignore"):
            whole["position_loss"] = ("position", sums / counts)
        whole["position_tokens"] = ("position", counts)
        for name, output in self.outputs.items():
            whole[name].attrs |= {"units": output.unit, "long_name": output.long_name}
        return whole


def over_spans(measured: xr.Dataset, spans: Sequence[tuple[int, int]]) -> Floats:
    """Mean loss over spans of positions [span], of `CorpusLoss`; each from its first position up to, and
    without, its last. Raises PromptError for a span in which nothing was predicted."""
    total: Array = (measured["position_loss"] * measured["position_tokens"]).fillna(0).values
    counted: Array = measured["position_tokens"].values
    found = []
    for start, stop in spans:
        many = int(counted[start:stop].sum())
        if not many:
            raise PromptError(
                f"expected tokens at positions {start} to {stop - 1}, found none predicted there"
            )
        found.append(float(total[start:stop].sum()) / many)
    return np.array(found)
