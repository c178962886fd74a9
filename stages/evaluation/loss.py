"""Loss of a model over a corpus: mean nats per token, by prompt and by position.

Border: prompts as token ids in, labelled numbers out; callers cut texts into prompts. Memory does not grow
with the corpus except for a few numbers per prompt. Cells of prompts are stored separately, so that an
interrupted evaluation resumes and a longer corpus computes only what is new.

The loss at a position is that of the token there, so position 0 has none. Guessing uniformly costs
log(vocab); order.py detects layers that were loaded in a wrong order.

Induction loss (Olsson et al. 2022; TransformerLens' `induction_loss`) is this loss on repeated random tokens,
at the second occurrence, where only the repetition predicts the next token.

Axes: prompt, position. Unit: nats.
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
from .changed import ChangedModelExperiment, Prompts, batches, log_probabilities

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["CorpusLoss", "over_spans"]

TOGETHER = 64
"""Number of prompts of a cell, which is stored at once: an interrupted evaluation repeats at most as many."""


@dataclass(frozen=True)
class CorpusLoss(ChangedModelExperiment):
    """Next-token loss over prompts, by prompt and by position, of the unchanged or the changed model."""

    name: ClassVar[str] = "corpus_loss"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "loss": Output(("prompt",), "nats", "mean loss per token"),
        "tokens": Output(("prompt",), "tokens", "number of predicted tokens"),
        "correct": Output(("prompt",), "1", "share of tokens that are the most likely prediction"),
        "position_loss": Output(("position",), "nats", "mean loss of the tokens at a position"),
        "position_tokens": Output(("position",), "tokens", "number of tokens at a position"),
    }

    prompts: Prompts
    """Token ids of each prompt, at least two."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: the change. Prompts are labels of cells."""
        return self.change

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per `TOGETHER` prompts.

        Raises:
            PromptError: There are no prompts, or one has a single token.
        """
        if not self.prompts or min(map(len, self.prompts)) < 2:
            raise PromptError(
                "expected prompts of at least two tokens, as the loss of the first is not defined, found "
                + (f"a prompt of {min(map(len, self.prompts))}" if self.prompts else "no prompts")
            )
        starts = range(0, len(self.prompts), TOGETHER)
        return [{"prompts": [list(ids) for ids in self.prompts[s : s + TOGETHER]]} for s in starts]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Losses of one cell. position_loss is a sum over prompts here, which `joined` divides."""
        import torch
        import xarray as xr

        model, _ = prepared
        prompts: list[list[int]] = cell["prompts"]
        longest = max(map(len, prompts))
        loss, correct, sums, counts = np.zeros(len(prompts)), np.zeros(len(prompts)), *np.zeros((2, longest))
        for indices, rows in batches(prompts):
            target = torch.tensor(rows, device=model.device)[:, 1:]
            for positions, logprobs in log_probabilities(model, rows, self.bound(prepared, rows)):
                next_tokens = target[:, positions]
                predicted = logprobs[:, : next_tokens.shape[1]]
                # The block of the last position predicts nothing that is in the prompt.
                if not next_tokens.numel():
                    continue
                # float64: sums over a long corpus lose digits in float32.
                losses = -predicted.gather(-1, next_tokens[..., None])[..., 0].double()
                loss[indices] += losses.sum(1).cpu().numpy()
                correct[indices] += (predicted.argmax(-1) == next_tokens).sum(1).cpu().numpy()
                # The prediction at position p is of the token at p + 1.
                target_positions = slice(positions.start + 1, positions.start + 1 + next_tokens.shape[1])
                sums[target_positions] += losses.sum(0).cpu().numpy()
                counts[target_positions] += len(rows)
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
        """Losses of all prompts, and mean losses by position."""
        import xarray as xr

        longest = max(part.sizes["position"] for part in parts)
        # Sums and counts, not means: cells have different numbers of prompts at a position.
        sums, counts = np.zeros(longest), np.zeros(longest, np.int64)
        for part in parts:
            sums[: part.sizes["position"]] += part["position_loss"].values
            counts[: part.sizes["position"]] += part["position_tokens"].values
        whole = xr.concat([part.drop_dims("position") for part in parts], "prompt")
        # 0 / 0 at position 0, which is not predicted: its loss is NaN.
        with np.errstate(invalid="ignore"):
            whole["position_loss"] = ("position", sums / counts)
        whole["position_tokens"] = ("position", counts)
        for name, output in self.outputs.items():
            whole[name].attrs |= output.attrs
        return whole


def over_spans(measured: xr.Dataset, spans: Sequence[tuple[int, int]]) -> Floats:
    """Mean loss in nats per token over spans of positions, float64 [span].

    Arguments:
        measured: Result of `CorpusLoss`.
        spans: (first position, position after the last) of each span.

    Raises:
        PromptError: A span has no predicted tokens.
    """
    loss_sum: Array = (measured["position_loss"] * measured["position_tokens"]).fillna(0).values
    token_count: Array = measured["position_tokens"].values
    means = []
    for start, stop in spans:
        n_tokens = int(token_count[start:stop].sum())
        if not n_tokens:
            raise PromptError(
                f"expected predicted tokens at positions {start} to {stop - 1} to average the loss over, "
                "found none; give longer prompts, or other positions"
            )
        means.append(float(loss_sum[start:stop].sum()) / n_tokens)
    return np.array(means)
