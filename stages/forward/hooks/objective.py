"""Objective: what gradients are of, one number of every prompt.

A metric is a value that somebody else declares (stages/causal/grids/patching_metrics.py): it says which
logits it needs, what it is, and its gradient with respect to these logits in closed form. An objective says
of which position's logits, of which prompts, and with what they are compared. It is part of the key of what
it gives; where metrics or baselines differ from prompt to prompt, so are the prompts.

Border: numpy vectors of logits and token ids; knows no model. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ....store.arrays import Floats, as_index
from ....store.errors import PromptError, StageError
from ..text.rows import as_rows, is_nothing
from .wants import Logits

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Differentiable", "Objective", "columns", "objective_of"]


class Differentiable(Protocol):
    """A metric of next-token logits that says its own gradient."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Vocabulary items whose logits are needed; None for all of them."""
        ...

    @property
    def named(self) -> tuple[int, ...]:
        """Vocabulary items it asks about, which a model must have."""
        ...

    @property
    def has_gradient(self) -> bool:
        """Whether it has one at all; a rank moves in steps."""
        ...

    @property
    def needs_baseline(self) -> bool:
        """Whether it compares with the logits of another run."""
        ...

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify it."""
        ...

    def value(self, logits: Floats, clean: Floats) -> float:
        """The number of one run, from float64 [vocab], or [tokens]."""
        ...

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Its gradient with respect to these logits, float64, of their shape."""
        ...


@dataclass(frozen=True)
class Objective:
    """One number of every prompt.

    metrics: one for all prompts, or one of each in their order. at: the position whose next-token logits are
    read. baselines: prompts whose unchanged runs metrics compare with, one for all or one of each; none where
    no metric does.
    """

    metrics: tuple[Differentiable, ...]
    at: int = -1
    baselines: tuple[tuple[int, ...], ...] = ()

    @property
    def is_by_prompt(self) -> bool:
        """Whether prompts have metrics or baselines of their own."""
        return max(len(self.metrics), len(self.baselines)) > 1

    @property
    def arguments(self) -> str:
        """What `HookSpec.gradient_of` was given, as it is written."""
        told = [repr(self.metrics[0] if len(self.metrics) == 1 else list(self.metrics))]
        told += [f"at={self.at}"] if self.at != -1 else []
        told += [f"baseline={[list(row) for row in self.baselines]}"] if self.baselines else []
        return ", ".join(told)

    def canonical(self, prompts: str) -> dict[str, Any]:
        """Plain values. prompts: the digest of the prompts, of which each has its own where this says so."""
        told = {
            "metrics": [metric.canonical() for metric in self.metrics],
            "at": self.at,
            "baselines": [list(row) for row in self.baselines],
        }
        return {**told, "prompts": prompts} if self.is_by_prompt else told

    def check(self, lengths: Sequence[int], vocab_size: int) -> None:
        """Raise StageError or PromptError for metrics that do not go with prompts of these lengths."""
        for what, given in (("metric", self.metrics), ("baseline", self.baselines)):
            if len(given) > 1 and len(given) != len(lengths):
                raise StageError(
                    f"gradients: expected one {what} for all prompts or one of each of {len(lengths)}, found "
                    f"{len(given)}; give as many as prompts"
                )
        for metric in self.metrics:
            if metric.needs_baseline and not self.baselines:
                raise StageError(
                    f"gradients: expected a baseline for {metric.name!r}, which compares two runs, found "
                    "none; name its prompt: gradient_of(metric, baseline=token_ids)"
                )
        for length in {*lengths, *map(len, self.baselines)}:
            if not -length <= self.at < length:
                raise PromptError(
                    f"gradients: expected at in {-length}..{length - 1} for a prompt of {length} tokens, "
                    f"found {self.at}"
                )
        for named in (*(metric.named for metric in self.metrics), *self.baselines):
            for token in named:
                if not 0 <= token < vocab_size:
                    raise PromptError(f"gradients: expected a token id in 0..{vocab_size - 1}, found {token}")

    def metric_of(self, prompt: int) -> Differentiable:
        """The metric of a prompt."""
        return self.metrics[prompt if len(self.metrics) > 1 else 0]

    def baseline_of(self, prompt: int) -> tuple[int, ...] | None:
        """Token ids of what a prompt is compared with."""
        return self.baselines[prompt if len(self.baselines) > 1 else 0] if self.baselines else None

    def want(self, prompts: Sequence[int]) -> Logits:
        """The logits that the metrics of some prompts need together."""
        found: set[int] = set()
        for prompt in prompts:
            tokens = self.metric_of(prompt).tokens
            if tokens is None:
                return Logits((self.at,))
            found.update(tokens)
        return Logits((self.at,), tuple(sorted(found)))

    def cotangent(
        self, logits: Tensor, want: Logits, prompts: Sequence[int], clean: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradient of each prompt's metric with respect to logits [B, positions, tokens], in float64
        until it is rounded to their dtype. want: what these are. clean: of each baseline [tokens], if any."""
        found = np.zeros(tuple(logits.shape))
        place = self.at if want.positions is None else want.positions.index(self.at)
        for row, prompt in enumerate(prompts):
            metric, compared = self.metric_of(prompt), clean[row]
            chosen = columns(metric.tokens, want.tokens)
            own = _wide(logits[row, place])[chosen]
            other = own if compared is None else _wide(compared)[chosen]
            np.add.at(found[row, place], chosen, metric.gradient(own, other))
        return logits.new_tensor(found)


def objective_of(
    metric: Differentiable | Sequence[Differentiable],
    at: int = -1,
    baseline: Sequence[int] | Sequence[Sequence[int]] = (),
) -> Objective:
    """The objective of one metric or several, over one baseline, several, or none. Raises StageError for a
    metric without a gradient, or for none."""
    metrics: tuple[Any, ...] = tuple(metric) if isinstance(metric, Sequence) else (metric,)
    rows = [] if is_nothing(baseline) else as_rows(baseline)
    ids = [tuple(row) for row in rows if not isinstance(row, str)]
    if len(ids) < len(rows):
        raise PromptError(
            f"gradients: expected a baseline of token ids, found the text {rows[0]!r}; give "
            "model.tokenize(text)"
        )
    for each in metrics:
        if not callable(getattr(each, "gradient", None)) or not each.has_gradient:
            raise StageError(
                f"gradients: expected a metric that says its gradient, found {each!r}; take LogitDifference, "
                "LogProbability, Probability or KL"
            )
    if not metrics:
        raise StageError("gradients: expected at least one metric, found none; give LogitDifference(…)")
    return Objective(metrics, as_index(at, "gradients: at", PromptError), tuple(ids))


def columns(tokens: Sequence[int] | None, held: Sequence[int] | None) -> Any:
    """Where a metric's tokens stand among those held, as an index; None for all of them."""
    if tokens is None:
        return slice(None)
    return list(tokens) if held is None else [held.index(token) for token in tokens]


def _wide(logits: Tensor) -> Floats:
    found: Floats = logits.detach().double().cpu().numpy()
    return found
