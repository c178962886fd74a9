"""Pairs: a clean prompt, its corrupted counterpart of as many tokens, and the metric of what comes next.

Border: token ids and metrics; loads no model and never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...store.arrays import Floats
from ...store.errors import PromptError, StageError
from ..causal.grids.patching_metrics import Metric, Recovery, check_metrics
from ..forward.architectures.architecture import Architecture
from ..forward.edges.layout import Layout
from ..forward.text.prompts import check_prompts
from ..forward.text.rows import one_row_of_ids

__all__ = ["ALTERNATIVES", "Alternative", "Pair", "by_length", "checked", "tokens_of", "value"]

Alternative = Literal["corrupted", "zero", "mean", "resampled"]
"""What an edge carries that is left out: what its source adds in the corrupted prompt (the counterfactual),
0, its mean over the clean prompts of that length, by position, or what it adds in another clean prompt."""
ALTERNATIVES: tuple[Alternative, ...] = ("corrupted", "zero", "mean", "resampled")


@dataclass(frozen=True)
class Pair:
    """Two prompts of equal length, and a metric of the logits at their last position, in which the tokens
    asked for differ from pair to pair. Raises PromptError for prompts that are not token ids."""

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt, as many."""
    metric: Metric
    """What is measured of either run."""

    def __post_init__(self) -> None:
        for side in ("clean", "corrupted"):
            object.__setattr__(self, side, tuple(one_row_of_ids(getattr(self, side), f"{side} prompt")))

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify it."""
        return {
            "clean": list(self.clean),
            "corrupted": list(self.corrupted),
            "metric": self.metric.canonical(),
        }


def checked(pairs: Sequence[Pair], alternative: str, config: Architecture) -> Layout:
    """The graph of the model, once pairs are found to fit it.

    Raises StageError for no pairs, metrics of several units, or of a scale that a run alone does not have,
    PromptError for prompts or tokens that do not fit, ConfigError for a model that is no such graph.
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
    alone = [places for places in by_length(pairs) if len(places) < 2]
    if alternative in ("mean", "resampled") and alone:
        raise StageError(
            f"alternative {alternative}: expected at least two pairs of each length, as others stand "
            f"for one, found one pair of {len(pairs[alone[0][0]].clean)} tokens"
        )
    return layout


def by_length(pairs: Sequence[Pair]) -> list[list[int]]:
    """Which pairs have prompts of one length, in order of first appearance."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        found[len(pair.clean)].append(number)
    return list(found.values())


def tokens_of(metric: Metric) -> list[int] | None:
    """Vocabulary items whose logits a metric sees, in its order; None for all."""
    return None if metric.tokens is None else list(metric.tokens)


def value(metric: Metric, logits: Floats, clean: Floats) -> float:
    """The metric of one run. logits, clean: of this run and of the clean one, [vocab]."""
    chosen = tokens_of(metric)
    if chosen is None:
        return metric.value(logits, clean)
    return metric.value(logits[chosen], clean[chosen])
