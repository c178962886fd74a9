"""Pairs of prompts for activation patching: a clean and a corrupted prompt with the same number of tokens.

The pairs shown are one pair given by the settings, or the first pairs of `data`, of shipped facts or of
general facts that the model knows. Other pairs serve to choose and to score the layer and position of a
claim.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...stages.causal.answer_ranks import AskedPrompt
from ...stages.causal.grids.patching import common_ends
from ...stages.causal.grids.patching_grid import KINDS
from ...stages.causal.grids.patching_metrics import KL, LogitDifference, Metric, Probability
from ...store.errors import ConfigError
from ..material.answers import answer_pieces, encoded
from ..material.facts.fact_pairs import PairTexts, pair_records
from ..material.places import check_kinds
from ..settings import Count, DataSettings, ModelSettings, require_together, setting
from ..subject import Subject

if TYPE_CHECKING:
    from ...stages.forward.text.tokens import Encoding

__all__ = ["ActivationPatchingTraceSettings", "PatchedPair", "PatchedPairs"]


@dataclass(frozen=True)
class ActivationPatchingTraceSettings(DataSettings, ModelSettings):
    """Settings of `ActivationPatchingTrace`.

    Raises:
        ConfigError: only one of the clean and the corrupted prompt is set, an answer is set without a prompt,
            the metric needs answers that are not set, or a kind does not exist.
    """

    prompt: str = setting("", "clean prompt; none: the first pairs of data, or of facts")
    answer: str = setting("", "next word of the clean prompt; may be empty")
    corrupted: tuple[str, ...] = setting(
        (), "corrupted prompts, of which the first with as many tokens as the clean one is used"
    )
    wrong: str = setting("", "next word of the corrupted prompts; for metric=logit_difference")
    metric: Literal["kl", "logit_difference", "probability"] = setting(
        "kl",
        'quantity that recovery is a share of: "kl" of next-token distributions; "logit_difference", clean '
        'minus corrupted answer; "probability" of the clean answer',
    )
    kinds: tuple[str, ...] = setting(
        (),
        "kinds of activations that are patched; none: resid_post, attn_out and mlp_out; z, q, k, v and "
        "pattern are patched by head",
    )
    window: Count = setting(1, "number of neighbouring layers patched together")
    pairs: Count = setting(2, "number of default pairs shown")
    others: Count = setting(
        6, "other pairs to choose the layer and position on; as many held-out default pairs score them"
    )
    donors: Count = setting(
        2, "unrelated prompts per default pair as controls; a pair set by prompt has `controls` of them"
    )
    answer_piece: Literal["only", "first"] = setting(
        "only", '"only": an answer of several tokens is an error; "first": its first token is measured'
    )

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted")
        if self.answer and not self.prompt:
            raise ConfigError(f"expected a prompt for the answer {self.answer!r}, found none")
        if self.wrong and not self.answer:
            raise ConfigError(f"expected an answer beside wrong={self.wrong!r}, found none")
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
    """A clean and a corrupted prompt with the same number of tokens, and their answers."""

    clean: str
    """Clean prompt."""
    corrupted: str
    """Corrupted prompt."""
    answer: str
    """Answer of the clean prompt; "" without one."""
    clean_ids: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted_ids: tuple[int, ...]
    """Token ids of the corrupted prompt; as many as `clean_ids`."""
    pieces: tuple[int, ...]
    """Token ids of `answer`; empty without one."""
    wrong: str
    """Answer of the corrupted prompt; "" without one."""
    wrong_piece: int | None
    """First token id of `wrong`; None without one."""

    @property
    def subject(self) -> tuple[int, int]:
        """First and last position at which the prompts differ."""
        start, end = common_ends(self.clean_ids, self.corrupted_ids)
        return start, len(self.clean_ids) - end - 1


class PatchedPairs:
    """The pairs that the settings select, encoded for one model."""

    def __init__(self, subject: Subject, settings: ActivationPatchingTraceSettings) -> None:
        self.subject, self.settings = subject, settings

    def shown(self) -> list[PatchedPair]:
        """The pairs whose grids are shown. Raises ConfigError for prompts that cannot be paired."""
        settings = self.settings
        if settings.prompt:
            candidates = dict.fromkeys(settings.corrupted, settings.wrong)
            return [self._pair(settings.prompt, settings.answer, candidates)]
        return [
            self._pair(clean, target, {corrupted: wrong})
            for clean, corrupted, target, wrong in pair_records(self.subject, settings.data)[: settings.pairs]
        ]

    def others(self, shown: Sequence[PatchedPair]) -> list[PatchedPair]:
        """Pairs for selecting and for scoring a layer and position, at most 2 * settings.others: further
        pairs of `data`, or shipped facts without `data`; pairs that are shown, or do not fit the model, are
        left out."""
        settings = self.settings
        # More records than needed, as some do not fit; all of a large file would take long to tokenize.
        few = 4 * settings.others + len(shown)
        fitting = self._fitting(pair_records(self.subject, settings.data)[:few], shown)
        if settings.data and not fitting:
            fitting = self._fitting(pair_records(self.subject, ())[:few], shown)
        return fitting[: 2 * settings.others]

    def _fitting(self, records: Sequence[PairTexts], shown: Sequence[PatchedPair]) -> list[PatchedPair]:
        """Pairs of records, without those shown, of unequal lengths, too long for the model, or with answers
        that the metric cannot tell apart."""
        shown_ids, pairs = [(p.clean_ids, p.corrupted_ids) for p in shown], []
        for clean, corrupted, target, wrong in records:
            ids, corrupted_ids = (tuple(self._encoded(text).ids) for text in (clean, corrupted))
            is_new = (ids, corrupted_ids) not in shown_ids and len(ids) == len(corrupted_ids)
            if not is_new or not self.subject.fits(ids):
                continue
            answer_id, wrong_id = (self.subject.answer_id(clean, word) for word in (target, wrong))
            if self.settings.metric != "logit_difference" or answer_id != wrong_id:
                pair = PatchedPair(
                    clean, corrupted, target, ids, corrupted_ids, (answer_id,), wrong, wrong_id
                )
                pairs.append(pair)
        return pairs

    def metric(self, pair: PatchedPair) -> Metric:
        """Metric that recovery is a share of, for one pair."""
        if self.settings.metric == "logit_difference":
            assert pair.wrong_piece is not None
            return LogitDifference(pair.pieces[0], pair.wrong_piece)
        return Probability(pair.pieces[0]) if self.settings.metric == "probability" else KL()

    def question(self, pair: PatchedPair) -> AskedPrompt:
        """Token ids of the clean prompt, the first token of its answer, and the position that predicts it."""
        return pair.clean_ids, pair.pieces[0], self.read_at(pair)

    def read_at(self, pair: PatchedPair) -> int:
        """Position whose prediction is read in both prompts. Raises ConfigError if the positions differ."""
        clean, corrupted = map(self.subject.read_at, (pair.clean_ids, pair.corrupted_ids))
        if clean != corrupted:
            raise ConfigError(
                f"expected the mask at the same position of both prompts, found {clean} and {corrupted}; "
                "choose other prompts"
            )
        return clean

    def patch(self, pair: PatchedPair, kinds: Sequence[str]) -> dict[str, Any]:
        """Arguments of patching experiments on one pair: prompts, hook-point kinds, window of layers and read
        position.

        Arguments:
            pair: the pair.
            kinds: kinds of hook points that are patched.
        """
        at = self.read_at(pair)
        return {
            "clean": pair.clean_ids,
            "corrupted": pair.corrupted_ids,
            "kinds": tuple(kinds),
            "window": self.settings.window,
            "at": -1 if at == len(pair.clean_ids) - 1 else at,
        }

    def _encoded(self, text: str) -> Encoding:
        """Tokens of a prompt, with a mask appended for models that fill in masks."""
        return encoded(self.subject, self.subject.asked(text))

    def _pair(self, clean: str, answer: str, candidates: Mapping[str, str]) -> PatchedPair:
        """A clean prompt with the first corrupted prompt that has as many tokens.

        Arguments:
            clean: clean prompt.
            answer: its answer; "" for none.
            candidates: answers by corrupted prompt, in the order in which the prompts are tried.

        Raises:
            ConfigError: no candidate has as many tokens, the prompts do not differ, or the answers do not
                suit settings.answer_piece or settings.metric.
        """
        ids = tuple(self._encoded(clean).ids)
        ids_of = {text: tuple(self._encoded(text).ids) for text in candidates}
        corrupted = next((text for text, other_ids in ids_of.items() if len(other_ids) == len(ids)), None)
        if corrupted is None:
            lengths = ", ".join(f"{text!r} has {len(other_ids)}" for text, other_ids in ids_of.items())
            raise ConfigError(
                f"expected a corrupted prompt of {len(ids)} tokens, as {clean!r} has, found none "
                f"({lengths}); choose another"
            )
        if ids_of[corrupted] == ids:
            raise ConfigError(
                f"expected a corrupted prompt that differs from the clean one, found {clean!r} twice"
            )
        pieces = answer_pieces(self.subject, clean, answer, at_mask=True)
        if len(pieces) > 1 and self.settings.answer_piece == "only":
            raise ConfigError(
                f"expected an answer of one token, found {answer!r} as {self.subject.token_texts(pieces)}; "
                "choose another, or measure its first token: answer_piece=first"
            )
        wrong = candidates[corrupted]
        wrong_pieces = answer_pieces(self.subject, corrupted, wrong, at_mask=True)[:1]
        if self.settings.metric == "logit_difference" and pieces[:1] == wrong_pieces:
            raise ConfigError(
                f"metric=logit_difference: expected answers that begin with different tokens, found "
                f"{answer!r} and {wrong!r}; choose others, or another metric"
            )
        return PatchedPair(
            clean,
            corrupted,
            answer,
            clean_ids=ids,
            corrupted_ids=ids_of[corrupted],
            pieces=pieces,
            wrong=wrong,
            wrong_piece=wrong_pieces[0] if wrong_pieces else None,
        )
