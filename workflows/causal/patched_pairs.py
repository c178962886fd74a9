"""Pairs of prompts that activation patching is asked about: a clean and a corrupted one of as many tokens.

One's own pair, pairs of `data`, shipped facts, or candle-mi's pairs of cities; and other pairs, on which a
place is chosen and scored.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...stages.causal.answer_ranks import AskedPrompt
from ...stages.causal.grids.patching import common_ends
from ...stages.causal.grids.patching_grid import KINDS
from ...stages.causal.grids.patching_metrics import KL, LogitDifference, Metric, Probability
from ...stages.forward.models.files import SHIPPED
from ...store.errors import ConfigError
from ..material.answers import answer_pieces, encoded, named
from ..material.facts.fact_data import FIELDS
from ..material.facts.fact_pairs import pair_records, shipped_pairs
from ..material.places import check_kinds
from ..settings import Count, DataSettings, ModelSettings, require_together, setting
from ..subject import Subject

if TYPE_CHECKING:
    from ...stages.forward.text.tokens import Encoding

__all__ = ["ActivationPatchingTraceSettings", "PatchedPair", "PatchedPairs"]

CITIES = (
    (
        "The capital of France is",
        "Paris",
        {
            "The capital of Poland is": "Warsaw",
            "The capital of Brazil is": "Brasília",
            "The capital of Russia is": "Moscow",
            "The capital of Canada is": "Ottawa",
            "The capital of Turkey is": "Ankara",
        },
    ),
    (
        "The Space Needle is in downtown",
        "Seattle",
        {
            "The Eiffel Tower is in downtown": "Paris",
            "The Colosseum is located in downtown": "Rome",
            "The Big Ben is located in downtown": "London",
            "The Great Wall is located in downtown": "Beijing",
        },
    ),
)
"""candle-mi's pairs: clean prompt, its answer, corrupted prompts to choose from with their answers."""


@dataclass(frozen=True)
class ActivationPatchingTraceSettings(DataSettings, ModelSettings):
    """What `--set` can change.

    Raises ConfigError for a clean prompt or a corrupted one alone, an answer without a prompt, a metric that
    needs answers which are not given, and kinds there are not.
    """

    prompt: str = setting("", "clean prompt; none: the first pairs of data, shipped facts or candle-mi's")
    answer: str = setting("", "what comes next in the clean prompt; may be empty")
    corrupted: tuple[str, ...] = setting((), "corrupted prompts; the first of as many tokens is taken")
    wrong: str = setting("", "what comes next in the corrupted prompts; for metric=logit_difference")
    metric: Literal["kl", "logit_difference", "probability"] = setting(
        "kl",
        '"kl" of next-token distributions; "logit_difference", clean answer minus corrupted answer; '
        '"probability" of the clean answer: what recovery is a share of',
    )
    kinds: tuple[str, ...] = setting(
        (), "what is patched; none: resid_post, attn_out and mlp_out; z, q, k, v, pattern: by head"
    )
    window: Count = setting(1, "neighbouring layers patched together")
    pairs: Count = setting(2, "how many of the default pairs")
    others: Count = setting(6, "other pairs a place is chosen on; of default pairs, as many more are scored")
    donors: Count = setting(2, "unrelated prompts per default pair; a pair of one's own has `controls`")
    answer_piece: Literal["only", "first"] = setting(
        "only", '"only" refuses answers of several tokens, "first" follows the first'
    )

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted")
        if self.answer and not self.prompt:
            raise ConfigError(f"expected a prompt for the answer {self.answer!r}, found none")
        if self.wrong and not self.answer:
            raise ConfigError(f"expected an answer beside the wrong one, {self.wrong!r}, found none")
        needed = {"logit_difference": ("answer", "wrong"), "probability": ("answer",)}.get(self.metric, ())
        missing = [name for name in needed if self.prompt and not getattr(self, name)]
        if missing:
            raise ConfigError(
                f"metric={self.metric}: expected {' and '.join(needed)} of the prompt, found no "
                f"{' and no '.join(missing)}; set {'=… and '.join(missing)}=…"
            )
        check_kinds(self.kinds, KINDS)


@dataclass(frozen=True)
class PatchedPair:
    """A clean and a corrupted prompt of as many tokens, with their answers."""

    clean: str
    corrupted: str
    answer: str
    """Of the clean prompt; "" where nobody named it."""
    clean_ids: tuple[int, ...]
    corrupted_ids: tuple[int, ...]
    pieces: tuple[int, ...]
    """Tokens of the answer."""
    wrong: str
    """The corrupted prompt's answer; "" where nobody named it."""
    wrong_piece: int | None
    """Its first token."""

    @property
    def subject(self) -> tuple[int, int]:
        """First and last position at which the prompts differ."""
        start, end = common_ends(self.clean_ids, self.corrupted_ids)
        return start, len(self.clean_ids) - end - 1


class PatchedPairs:
    """The pairs that some settings ask about, for one model."""

    def __init__(self, subject: Subject, settings: ActivationPatchingTraceSettings) -> None:
        self.subject, self.settings = subject, settings

    def shown(self) -> list[PatchedPair]:
        """The pairs whose grids are shown. Raises ConfigError for prompts that are no pair."""
        given = self.settings
        if given.prompt:
            candidates = dict.fromkeys(given.corrupted, given.wrong)
            return [self._chosen(given.prompt, given.answer, candidates)]
        cities = () if given.model in SHIPPED or given.data else CITIES
        if fitting := [city for city in cities if self._fits(city[0], city[2])]:
            return [self._chosen(*city) for city in fitting[: given.pairs]]
        records = pair_records(self.subject, given.data)[: given.pairs]
        return [
            self._chosen(one, target, {other: wrong})
            for one, other, target, wrong in ([record[name] for name in FIELDS] for record in records)
        ]

    def others(self, shown: Sequence[PatchedPair]) -> list[PatchedPair]:
        """Pairs that are not shown and fit the model: the rest of `data`, or where nothing is left of it,
        shipped ones; as many to choose on as to score on."""
        given = self.settings
        few = 4 * given.others + len(shown)
        found = self._fitting(pair_records(self.subject, given.data)[:few], shown)
        if given.data and not found:
            found = self._fitting(shipped_pairs(self.subject)[:few], shown)
        return found[: 2 * given.others]

    def _fitting(
        self, records: Sequence[Mapping[str, str]], shown: Sequence[PatchedPair]
    ) -> list[PatchedPair]:
        """Pairs of some records, but for those shown and those that the model or the metric cannot read."""
        limit, taken = self.subject.config.context_length, [(p.clean_ids, p.corrupted_ids) for p in shown]
        found = []
        for record in records:
            one, other, target, wrong = (record[name] for name in FIELDS)
            ids, corrupted = (tuple(self._encoded(text).ids) for text in (one, other))
            is_new = (ids, corrupted) not in taken and len(ids) == len(corrupted)
            if not is_new or (limit is not None and len(ids) > limit):
                continue
            right, false = (self.subject.answer_id(one, word) for word in (target, wrong))
            if self.settings.metric != "logit_difference" or right != false:
                found.append(PatchedPair(one, other, target, ids, corrupted, (right,), wrong, false))
        return found

    def metric(self, pair: PatchedPair) -> Metric:
        """Metric that recovery is a share of, for one pair."""
        if self.settings.metric == "logit_difference":
            assert pair.wrong_piece is not None
            return LogitDifference(pair.pieces[0], pair.wrong_piece)
        return Probability(pair.pieces[0]) if self.settings.metric == "probability" else KL()

    def question(self, pair: PatchedPair) -> AskedPrompt:
        """The clean prompt, its answer's first token, and the position whose logits say it."""
        return pair.clean_ids, pair.pieces[0], self.read_at(pair)

    def read_at(self, pair: PatchedPair) -> int:
        """The position at which both prompts are read. Raises ConfigError unless that is one position."""
        one, other = map(self.subject.read_at, (pair.clean_ids, pair.corrupted_ids))
        if one != other:
            raise ConfigError(
                f"expected the mask at one position of both prompts, found {one} and {other}; choose others"
            )
        return one

    def patch(self, pair: PatchedPair, kinds: Sequence[str]) -> dict[str, Any]:
        """Arguments that all experiments on a pair have in common."""
        at = self.read_at(pair)
        return {
            "clean": pair.clean_ids,
            "corrupted": pair.corrupted_ids,
            "kinds": tuple(kinds),
            "window": self.settings.window,
            "at": -1 if at == len(pair.clean_ids) - 1 else at,
        }

    def _encoded(self, text: str) -> Encoding:
        """Tokens of a prompt, with a mask behind it for models that fill in masks."""
        return encoded(self.subject, self.subject.asked(text))

    def _fits(self, clean: str, candidates: Iterable[str]) -> bool:
        """Whether any corrupted prompt has as many tokens as the clean one."""
        first, *others = (len(self._encoded(text).ids) for text in (clean, *candidates))
        return first in others

    def _chosen(self, clean: str, answer: str, candidates: Mapping[str, str]) -> PatchedPair:
        """A clean prompt with the first of some corrupted ones, by text their answers, of as many tokens."""
        ids = tuple(self._encoded(clean).ids)
        tried = {text: tuple(self._encoded(text).ids) for text in candidates}
        corrupted = next((text for text, other in tried.items() if len(other) == len(ids)), None)
        if corrupted is None:
            lengths = ", ".join(f"{text!r} has {len(other)}" for text, other in tried.items())
            raise ConfigError(
                f"expected a corrupted prompt of {len(ids)} tokens, as {clean!r} has, found none "
                f"({lengths}); choose another"
            )
        if tried[corrupted] == ids:
            raise ConfigError(
                f"expected a corrupted prompt that differs from the clean one, found {clean!r} twice"
            )
        pieces = answer_pieces(self.subject, clean, answer, at_mask=True)
        if len(pieces) > 1 and self.settings.answer_piece == "only":
            raise ConfigError(
                f"expected an answer of one token, found {answer!r} as {named(self.subject, pieces)}; choose "
                "another, or follow its first token: answer_piece=first"
            )
        wrong = candidates[corrupted]
        false = answer_pieces(self.subject, corrupted, wrong, at_mask=True)[:1]
        if self.settings.metric == "logit_difference" and pieces[:1] == false:
            raise ConfigError(
                f"metric=logit_difference: expected answers that begin with different tokens, found "
                f"{answer!r} and {wrong!r}; choose others, or another metric"
            )
        return PatchedPair(
            clean, corrupted, answer, ids, tried[corrupted], pieces, wrong, false[0] if false else None
        )
