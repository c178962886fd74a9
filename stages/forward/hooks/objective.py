"""Objective: the scalar of each prompt that gradients differentiate.

A metric is defined elsewhere (stages/causal/grids/patching_metrics.py). It says which logits it needs, its
value, and its gradient with respect to these logits in closed form. An objective adds the position whose
logits are read and the baseline runs that metrics compare with. It enters the key of the gradients; where
metrics or baselines differ between prompts, so does the list of prompts.

Works on numpy vectors of logits and token ids. Never imports torch.
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

__all__ = ["Differentiable", "Objective", "objective_of", "token_columns"]


class Differentiable(Protocol):
    """A metric of next-token logits with a gradient in closed form."""

    @property
    def name(self) -> str:
        """Name of the metric, as error messages show it."""
        ...

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Token ids whose logits the metric reads; None for the whole vocabulary."""
        ...

    @property
    def named(self) -> tuple[int, ...]:
        """Token ids among the metric's arguments, all of which must be in the vocabulary of the model."""
        ...

    @property
    def has_gradient(self) -> bool:
        """Whether the metric is differentiable; a rank is not."""
        ...

    @property
    def needs_baseline(self) -> bool:
        """Whether the metric compares with the logits of another run."""
        ...

    def canonical(self) -> dict[str, Any]:
        """Class and arguments of the metric as plain JSON values, for a digest."""
        ...

    def value(self, logits: Floats, clean: Floats) -> float:
        """Value of the metric for the logits of one run.

        Arguments:
            logits: float64 [vocab], or [tokens] in the order of `tokens`.
            clean: the same logits of the baseline run; `logits` where there is none.
        """
        ...

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient of the value with respect to `logits`, float64, in their shape.

        Arguments:
            logits: float64 [vocab], or [tokens] in the order of `tokens`.
            clean: the same logits of the baseline run; `logits` where there is none.
        """
        ...


@dataclass(frozen=True)
class Objective:
    """The scalar of each prompt that gradients differentiate: a metric of the logits at one position."""

    metrics: tuple[Differentiable, ...]
    """One metric for all prompts, or one per prompt in their order."""
    at: int = -1
    """Position whose next-token logits are read; negative from the end."""
    baselines: tuple[tuple[int, ...], ...] = ()
    """Token ids of the baseline prompt, one for all or one per prompt; empty where no metric compares."""

    @property
    def is_by_prompt(self) -> bool:
        """Whether prompts have different metrics or different baselines."""
        return max(len(self.metrics), len(self.baselines)) > 1

    @property
    def arguments(self) -> str:
        """Arguments of `HookSpec.gradient_of` as Python text."""
        texts = [repr(self.metrics[0] if len(self.metrics) == 1 else list(self.metrics))]
        texts += [f"at={self.at}"] if self.at != -1 else []
        texts += [f"baseline={[list(row) for row in self.baselines]}"] if self.baselines else []
        return ", ".join(texts)

    def canonical(self, prompts: str) -> dict[str, Any]:
        """Metrics, position and baselines as plain JSON values, for a digest.

        Arguments:
            prompts: digest of the prompts; enters only where prompts differ in metric or baseline.
        """
        values = {
            "metrics": [metric.canonical() for metric in self.metrics],
            "at": self.at,
            "baselines": [list(row) for row in self.baselines],
        }
        # With one metric for all, gradients of a prompt are the same in any list of prompts.
        return {**values, "prompts": prompts} if self.is_by_prompt else values

    def check(self, lengths: Sequence[int], vocab_size: int) -> None:
        """Check metrics and baselines against prompts of these lengths.

        Arguments:
            lengths: number of tokens of each prompt.
            vocab_size: size of the model's vocabulary.

        Raises:
            StageError: where the number of metrics or baselines is neither 1 nor that of the prompts, or
                where a metric needs a baseline and has none.
            PromptError: for a position or a token id out of range.
        """
        for noun, values in (("metric", self.metrics), ("baseline", self.baselines)):
            if len(values) > 1 and len(values) != len(lengths):
                raise StageError(
                    f"gradient_of: expected one {noun} for all prompts, or one for each of {len(lengths)} "
                    f"prompts, found {len(values)}; pass 1 or {len(lengths)}"
                )
        for metric in self.metrics:
            if metric.needs_baseline and not self.baselines:
                raise StageError(
                    f"gradient_of: expected a baseline prompt for {metric.name!r}, which compares two runs, "
                    "found none; pass its token ids: gradient_of(metric, baseline=token_ids)"
                )
        for length in {*lengths, *map(len, self.baselines)}:
            if not -length <= self.at < length:
                raise PromptError(
                    f"gradient_of: expected a position at= in {-length}..{length - 1} for a prompt of "
                    f"{length} tokens, found {self.at}"
                )
        for ids in (*(metric.named for metric in self.metrics), *self.baselines):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise PromptError(
                        f"gradient_of: expected token ids in 0..{vocab_size - 1} for metric and baseline, "
                        f"found {token}"
                    )

    def metric_of(self, prompt: int) -> Differentiable:
        """Metric of a prompt by its index."""
        return self.metrics[prompt if len(self.metrics) > 1 else 0]

    def baseline_of(self, prompt: int) -> tuple[int, ...] | None:
        """Token ids of the baseline prompt for the prompt with this index; None where there is none."""
        return self.baselines[prompt if len(self.baselines) > 1 else 0] if self.baselines else None

    def want(self, prompts: Sequence[int]) -> Logits:
        """Selection of logits that covers what the metrics of some prompts read.

        Arguments:
            prompts: indices of the prompts.
        """
        ids: set[int] = set()
        for prompt in prompts:
            tokens = self.metric_of(prompt).tokens
            if tokens is None:
                return Logits((self.at,))
            ids.update(tokens)
        return Logits((self.at,), tuple(sorted(ids)))

    def cotangent(
        self, logits: Tensor, want: Logits, prompts: Sequence[int], clean: Sequence[Tensor | None]
    ) -> Tensor:
        """Gradient of each prompt's metric with respect to the logits of a batch.

        Arguments:
            logits: [batch, positions, tokens] as `want` selects them.
            want: selection of the logits.
            prompts: index of the prompt of each row.
            clean: baseline logits [tokens] of each row; None without baseline.

        Returns:
            A tensor in shape and dtype of `logits`, computed in float64 and rounded once.
        """
        # Metrics compute with numpy in float64; the result is rounded once, at the end.
        cotangent = np.zeros(tuple(logits.shape))
        at = self.at if want.positions is None else want.positions.index(self.at)
        for row, prompt in enumerate(prompts):
            metric, baseline = self.metric_of(prompt), clean[row]
            columns = token_columns(metric.tokens, want.tokens)
            run_logits = _as_float64(logits[row, at])[columns]
            baseline_logits = run_logits if baseline is None else _as_float64(baseline)[columns]
            # `add.at`, as a metric may name one token twice: plain assignment would keep one of its terms.
            np.add.at(cotangent[row, at], columns, metric.gradient(run_logits, baseline_logits))
        return logits.new_tensor(cotangent)


def objective_of(
    metric: Differentiable | Sequence[Differentiable],
    at: int = -1,
    baseline: Sequence[int] | Sequence[Sequence[int]] = (),
) -> Objective:
    """Check the arguments of `HookSpec.gradient_of` and make an `Objective` of them.

    Arguments:
        metric: one metric, or one per prompt.
        at: position whose next-token logits are read.
        baseline: token ids of one prompt, of one per prompt, or empty.

    Raises:
        StageError: for a metric without a gradient, or for no metric.
        PromptError: for a baseline given as text.
    """
    metrics: tuple[Any, ...] = tuple(metric) if isinstance(metric, Sequence) else (metric,)
    rows = [] if is_nothing(baseline) else as_rows(baseline)
    ids = [tuple(row) for row in rows if not isinstance(row, str)]
    # Texts would need a tokenizer, which a spec does not have.
    if len(ids) < len(rows):
        raise PromptError(
            f"gradient_of: expected a baseline of token ids, found the text {rows[0]!r}; pass "
            "baseline=model.tokenize(text)"
        )
    for candidate in metrics:
        if not callable(getattr(candidate, "gradient", None)) or not candidate.has_gradient:
            raise StageError(
                f"gradient_of: expected a differentiable metric, found {candidate!r}; use LogitDifference, "
                "LogProbability, Probability or KL"
            )
    if not metrics:
        raise StageError(
            "gradient_of: expected at least one metric, found none; pass LogitDifference(correct, wrong)"
        )
    return Objective(metrics, as_index(at, "gradient_of: at", PromptError), tuple(ids))


def token_columns(tokens: Sequence[int] | None, computed: Sequence[int] | None) -> Any:
    """Columns of the computed logits that hold the tokens of a metric.

    Arguments:
        tokens: token ids of the metric; None for the whole vocabulary.
        computed: token ids of the logits' last axis; None for the whole vocabulary.

    Returns:
        A list of column indices, or a slice of all columns where `tokens` is None.
    """
    if tokens is None:
        return slice(None)
    return list(tokens) if computed is None else [computed.index(token) for token in tokens]


def _as_float64(logits: Tensor) -> Floats:
    array: Floats = logits.detach().double().cpu().numpy()
    return array
