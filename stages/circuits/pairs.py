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
"""What an edge carries that is left out: its source's output in the corrupted prompt ("corrupted"), 0
("zero"), the mean over clean prompts of that length, by position ("mean"), or the output in another clean
prompt ("resampled").
"""
ALTERNATIVES: tuple[Alternative, ...] = get_args(Alternative)
"""All values of `Alternative`."""


@dataclass(frozen=True)
class Pair:
    """Two prompts of equal length, and a metric of the logits at their last position.

    The tokens that the metric reads may differ from pair to pair.

    Raises:
        PromptError: for prompts that are not token ids.
    """

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt, equal in number to those of the clean prompt."""
    metric: Metric
    """Metric of either run."""

    def __post_init__(self) -> None:
        for side in ("clean", "corrupted"):
            object.__setattr__(self, side, tuple(one_row_of_ids(getattr(self, side), f"{side} prompt")))

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the pair in a key."""
        return {
            "clean": list(self.clean),
            "corrupted": list(self.corrupted),
            "metric": self.metric.canonical(),
        }


def checked_layout(pairs: Sequence[Pair], alternative: str, config: Architecture) -> Layout:
    """The graph of a model, after checking that pairs fit it.

    Arguments:
        pairs: all pairs of an experiment.
        alternative: what an edge carries that is left out; see `Alternative`.
        config: architecture of the model.

    Raises:
        StageError: for no pairs, metrics of several units, a `Recovery`, or an unknown or impossible
            alternative.
        PromptError: for prompts or tokens that do not fit the model.
        ConfigError: for a model that is not a graph of heads and MLPs on one residual stream.
    """
    layout = Layout.of(config)
    if not pairs:
        raise StageError("expected at least one pair of prompts, found none")
    for number, pair in enumerate(pairs):
        if not pair.clean or len(pair.clean) != len(pair.corrupted):
            raise PromptError(
                f"pair {number}: expected a clean and a corrupted prompt of equal length, found "
                f"{len(pair.clean)} and {len(pair.corrupted)} tokens; choose others"
            )
        check_prompts(
            [list(pair.clean), list(pair.corrupted)], config.vocab_size, config.context_length, "the model"
        )
        # A recovery needs the corrupted run's metric, which a run of a circuit does not have.
        if isinstance(pair.metric, Recovery):
            raise StageError(
                f"pair {number}: expected a metric of one run, found a recovery; give the metric it rescales"
            )
        check_metrics([pair.metric], config.vocab_size)
    units = {pair.metric.units for pair in pairs}
    if len(units) > 1:
        raise StageError(
            f"expected one unit for the metrics of all pairs, as they are averaged, found {units}"
        )
    if alternative not in ALTERNATIVES:
        raise StageError(f"expected an alternative among {', '.join(ALTERNATIVES)}, found {alternative!r}")
    # A mean over one prompt is that prompt, and a prompt cannot be its own donor.
    single_pairs = [numbers for numbers in by_length(pairs) if len(numbers) < 2]
    if alternative in ("mean", "resampled") and single_pairs:
        raise StageError(
            f"alternative {alternative}: expected at least two pairs of each length, as other pairs replace "
            f"a pair's sources, found one pair of {len(pairs[single_pairs[0][0]].clean)} tokens; add more "
            "pairs, or choose alternative corrupted or zero"
        )
    return layout


def by_length(pairs: Sequence[Pair]) -> list[list[int]]:
    """Indices of pairs by prompt length, in order of first appearance."""
    indices: dict[int, list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        indices[len(pair.clean)].append(number)
    return list(indices.values())


def tokens_of(metric: Metric) -> list[int] | None:
    """Vocabulary items that a metric reads, in its order; None for all."""
    return None if metric.tokens is None else list(metric.tokens)


def metric_value(metric: Metric, logits: Floats, clean: Floats) -> float:
    """The metric of one run, from logits of the whole vocabulary.

    Arguments:
        metric: the metric.
        logits: of this run, [vocab].
        clean: of the clean run, [vocab].
    """
    tokens = tokens_of(metric)
    if tokens is None:
        return metric.value(logits, clean)
    return metric.value(logits[tokens], clean[tokens])
