"""Pairs: a clean prompt, a corrupted prompt of equal length, and a metric of the next token.

Border: token ids and metrics; loads no model and imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...store.arrays import Floats
from ...store.errors import PromptError, StageError
from ..causal.grids.patching_metrics import Metric, Recovery, check_metrics
from ..forward.architectures.architecture import Architecture
from ..forward.edges.layout import Layout
from ..forward.text.prompts import check_prompts
from ..forward.text.rows import one_row_of_ids

__all__ = ["ALTERNATIVES", "Alternative", "Pair", "by_length", "checked_layout", "tokens_of", "metric_value"]

Alternative = Literal["corrupted", "zero", "mean", "resampled"]
"""What an edge carries when it is left out.

"corrupted": the output of its source in the corrupted prompt; "zero": 0; "mean": the mean output over clean
prompts of equal length, by position; "resampled": the output in another clean prompt.
"""
ALTERNATIVES: tuple[Alternative, ...] = get_args(Alternative)
"""All values of `Alternative`."""


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupted prompt of equal length, and a metric of the logits at the last position.

    The tokens that the metric reads may differ from pair to pair.

    Raises:
        PromptError: A prompt is not a row of token ids.
    """

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt, equal in number to those of the clean prompt."""
    metric: Metric
    """Metric of the next-token logits of a run of either prompt."""

    def __post_init__(self) -> None:
        for side in ("clean", "corrupted"):
            object.__setattr__(self, side, tuple(one_row_of_ids(getattr(self, side), f"{side} prompt")))

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the pair in keys of results."""
        return {
            "clean": list(self.clean),
            "corrupted": list(self.corrupted),
            "metric": self.metric.canonical(),
        }


def checked_layout(pairs: Sequence[Pair], alternative: str, config: Architecture) -> Layout:
    """Graph of a model (heads and MLPs on one residual stream), after checking that pairs fit it.

    Arguments:
        pairs: All pairs of an experiment.
        alternative: What an edge carries when it is left out; see `Alternative`.
        config: Architecture of the model.

    Raises:
        StageError: There are no pairs, metrics have several units, one is a `Recovery`, or the alternative is
            unknown or impossible.
        PromptError: Prompts or tokens do not fit the model.
        ConfigError: The model is no such graph.
    """
    layout = Layout.of(config)
    if not pairs:
        raise StageError("expected at least one pair of prompts, found none")
    for number, pair in enumerate(pairs):
        if not pair.clean or len(pair.clean) != len(pair.corrupted):
            raise PromptError(
                f"pair {number}: expected a clean and a corrupted prompt of equal length, found "
                f"{len(pair.clean)} and {len(pair.corrupted)} tokens; choose other prompts"
            )
        check_prompts(
            [list(pair.clean), list(pair.corrupted)], config.vocab_size, config.context_length, "the model"
        )
        # A recovery needs the corrupted run's metric, which a run of a circuit does not have.
        if isinstance(pair.metric, Recovery):
            raise StageError(
                f"pair {number}: expected a metric of a single run, found Recovery; give the metric inside it"
            )
        check_metrics([pair.metric], config)
    units = {pair.metric.units for pair in pairs}
    if len(units) > 1:
        raise StageError(
            "expected metrics of one unit for all pairs, as they are averaged, found the units "
            f"{', '.join(sorted(units))}"
        )
    if alternative not in ALTERNATIVES:
        raise StageError(
            f"expected alternative to be one of {', '.join(ALTERNATIVES)}, found {alternative!r}"
        )
    # A mean over one prompt is that prompt, and a prompt cannot be its own donor.
    single_pairs = [numbers for numbers in by_length(pairs) if len(numbers) < 2]
    if alternative in ("mean", "resampled") and single_pairs:
        raise StageError(
            f"expected at least two pairs of each length for alternative={alternative!r}, which takes "
            "replacements from other pairs, found only one pair of "
            f"{len(pairs[single_pairs[0][0]].clean)} tokens; add more pairs, or choose "
            "alternative='corrupted' or 'zero'"
        )
    return layout


def by_length(pairs: Sequence[Pair]) -> list[list[int]]:
    """Indices of the pairs of each prompt length, in order of first appearance."""
    indices: dict[int, list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        indices[len(pair.clean)].append(number)
    return list(indices.values())


def tokens_of(metric: Metric) -> list[int] | None:
    """Ids of the tokens whose logits a metric reads, in its order; None for all."""
    return None if metric.tokens is None else list(metric.tokens)


def metric_value(metric: Metric, logits: Floats, clean: Floats) -> float:
    """Value of a metric for one run, from the logits of the whole vocabulary.

    Arguments:
        metric: The metric.
        logits: Logits of the run [vocab].
        clean: Logits of the clean run [vocab].
    """
    tokens = tokens_of(metric)
    if tokens is None:
        return metric.value(logits, clean)
    return metric.value(logits[tokens], clean[tokens])
