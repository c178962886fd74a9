"""Pairs of facts that differ in their subject, from files of CounterFact records or from the shipped facts.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ....stages.causal.answer_ranks import AskedPrompt
from ....stages.causal.counterfact import FactTokens, blocks_of, differing_span, position_map
from ....stages.causal.draws import AtOnce
from ....stages.causal.factual_routing import FactualRouting
from ....store.errors import ConfigError
from ...general_facts import GENERAL
from ...settings import PairSettings, SubjectRule
from ...workflow import Nodes
from ..answers import require_next
from ..relations import relation_of
from ..unrelated import Unrelated
from .fact_data import FIELDS, SHIPPED_DATA, default_data, read_records, single_facts
from .known import CHOSEN_ON, SCORED, KnownWorkflow

if TYPE_CHECKING:
    from ...subject import Subject

__all__ = [
    "SUBJECTS",
    "FactPair",
    "PairTexts",
    "PairWorkflow",
    "fact_pairs",
    "layers_label",
    "pair_records",
    "pairs_of_facts",
]


class PairTexts(NamedTuple):
    """A record of CounterFact: two prompts that differ in their subject, and their answers."""

    original: str
    """Original prompt."""
    counterfactual: str
    """Prompt with another subject."""
    target: str
    """Answer to the original prompt."""
    counterfactual_target: str
    """Answer to the counterfactual prompt."""


@dataclass(frozen=True)
class FactPair:
    """One pair of facts, tokenized."""

    texts: PairTexts
    """Both prompts and their answers."""
    tokens: FactTokens
    """Token ids of both prompts, and positions of the subject."""
    labels: tuple[str, ...]
    """Label of each token of the original prompt: fact, fact_final or other."""

    @property
    def label(self) -> str:
        """Title of the pair: the fact and the two targets."""
        texts = self.texts
        return f"{texts.original.split(chr(10))[0]} {texts.target} -> {texts.counterfactual_target}"


SUBJECTS: Mapping[SubjectRule, str] = {
    "whole": "subject",
    "differing": "subject's last token",
    "last_fact": "fact's last token",
}
"""Setting `subject` -> name of what is patched: all tokens in which the prompts differ, the last of them, or
the last token of the fact (as in candle-mi)."""


def fact_pairs(
    subject: Subject, data: Sequence[str], limit: int, *, rule: SubjectRule = "whole"
) -> list[FactPair]:
    """The first pairs of facts from files, or of the default facts, tokenized.

    Arguments:
        subject: the model.
        data: files; empty for the shipped facts.
        limit: number of pairs; 0 for all.
        rule: which tokens are the subject, see SUBJECTS.
    """
    return [_tokenised(subject, record, rule) for record in pair_records(subject, data)[: limit or None]]


def pair_records(subject: Subject, data: Sequence[str]) -> list[PairTexts]:
    """Pairs of facts from files and named sources, in their order.

    Arguments:
        subject: the model, whose tokenizer decides which shipped and general facts are paired.
        data: files, SHIPPED_DATA or GENERAL; empty for those of `default_data`.
    """
    records: list[dict[str, str]] = []
    for source in default_data(subject, data) or (SHIPPED_DATA,):
        if source in (SHIPPED_DATA, GENERAL):
            records += pairs_of_facts(subject, single_facts(subject, source))
        else:
            records += read_records(source)
    return [PairTexts(*(record[name] for name in FIELDS)) for record in records]


def pairs_of_facts(subject: Subject, facts: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Pairs of facts with the same relation, equally many tokens and different answers; each fact is in at
    most one pair.

    Pairs in which both answers are single tokens come first, then those in which the original answer is. If
    only one answer is a single token, its fact is the original.
    """
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for fact, ids in zip(facts, subject.tokenizer.ids_of([fact["prompt"] for fact in facts]), strict=True):
        relation = fact.get("relation") or relation_of(fact["prompt"], words=2)
        if relation is not None:
            groups[relation, len(ids)].append(fact)
    pairs = []
    for group in groups.values():
        unpaired: list[dict[str, Any]] = []
        for fact in group:
            partner = next((other for other in unpaired if other["target"] != fact["target"]), None)
            if partner is None:
                unpaired.append(fact)
            else:
                unpaired.remove(partner)
                pairs.append((partner, fact))

    answers = [(fact["prompt"], fact["target"]) for pair in pairs for fact in pair]
    tokens_of = dict(zip(answers, subject.pieces_of_answers(answers), strict=True))
    order = {fact["prompt"]: i for i, fact in enumerate(facts)}

    def has_several_tokens(fact: dict[str, Any]) -> bool:
        return len(tokens_of[fact["prompt"], fact["target"]]) > 1

    in_order = sorted(pairs, key=lambda pair: order[pair[0]["prompt"]])
    # False sorts first: within a pair, the fact with a single-token answer becomes the original.
    oriented = [sorted(pair, key=has_several_tokens) for pair in in_order]
    # Stable: pairs with equally many single-token answers keep the order of their facts.
    oriented.sort(key=lambda pair: [has_several_tokens(fact) for fact in pair])
    return [
        dict(zip(FIELDS, (a["prompt"], b["prompt"], a["target"], b["target"]), strict=True))
        for a, b in oriented
    ]


def _tokenised(subject: Subject, texts: PairTexts, rule: SubjectRule) -> FactPair:
    """A pair of facts as token ids, with the positions of its subject by `rule`."""
    encodings = subject.tokenizer.encode_batch([texts.original, texts.counterfactual])
    # In CounterFact an instruction follows the fact after a blank line.
    end = texts.original.find("\n\n")
    labels = encodings[0].label_spans([("fact", (0, end if end > 0 else len(texts.original)))])
    original, counterfactual = (tuple(encoding.ids) for encoding in encodings)
    fact = tuple(i for i, label in enumerate(labels) if label != "other")
    pair = FactTokens(original, counterfactual, fact)
    pair.check()
    # (position in the original, position in the counterfactual) of each patched token.
    if rule == "last_fact":
        subject_positions: tuple[tuple[int, int], ...] = ((fact[-1], position_map(pair)[fact[-1]]),)
    else:
        differing = differing_span(original, counterfactual)
        subject_positions = differing if rule == "whole" else differing[-1:]
    return FactPair(texts, replace(pair, subject=subject_positions), tuple(labels))


class PairWorkflow(KnownWorkflow):
    """Base class of workflows that patch pairs of facts in blocks of layers."""

    settings: PairSettings
    asked_about = "pairs"
    # Patching from one fact to another means nothing if the model knows neither.
    describes_unknown = False

    def read_pairs(self) -> dict[str, Any]:
        """Reads pairs and blocks of layers from the settings, and returns them as arguments of an
        experiment."""
        require_next(self.subject)
        settings, layers = self.settings, self.subject.config.num_layers
        self.pairs = fact_pairs(self.subject, settings.data, settings.limit, rule=settings.subject)
        # At least three blocks where there are three layers, or there would be little to choose from.
        self.block_size = settings.block_size or max(1, min(4, layers // 3))
        self.blocks = blocks_of(layers, self.block_size)
        return {"pairs": tuple(pair.tokens for pair in self.pairs), "block_size": self.block_size}

    def control_nodes(self) -> Nodes:
        """Nodes for the claims: "choice", the subject patched in other pairs, to select a block; "controls",
        states of unrelated prompts patched; and the ranks of the pairs' answers. Empty if controls=0."""
        settings = self.settings
        if not settings.controls:
            return {}
        shown = {pair.tokens.original for pair in self.pairs}
        candidates = (_tokenised(self.subject, record, settings.subject) for record in self._other_records())
        chosen_on = [pair for pair in candidates if pair.tokens.original not in shown][: settings.others]
        if not chosen_on:
            raise ConfigError(
                "expected pairs of facts, besides those shown, on which to choose a block of layers, found "
                "none that fit the model; give more pairs: data=FILE, or set controls=0 to make no claims"
            )
        unrelated, from_unrelated = Unrelated(self.subject), list[FactTokens]()
        for number, fact_pair in enumerate(self.pairs):
            pair, seed = fact_pair.tokens, settings.seed + number
            donors = unrelated.to(
                pair.counterfactual, settings.donors, seed=seed, targets=fact_pair.texts[2:]
            )
            from_unrelated += [replace(pair, counterfactual=donor) for donor in donors]
        experiments = {"choice": tuple(pair.tokens for pair in chosen_on), "controls": tuple(from_unrelated)}
        self.only_claims = (*self.only_claims, *experiments)
        groups = {CHOSEN_ON: chosen_on, SCORED: self.pairs}
        return self.known_node(
            {name: [self._asked(pair) for pair in pairs] for name, pairs in groups.items()}
        ) | {
            name: self.on_model(AtOnce((FactualRouting(pairs=pairs, block_size=self.block_size),)))
            for name, pairs in experiments.items()
        }

    def _asked(self, pair: FactPair) -> AskedPrompt:
        """Question for `AnswerRanks`: the original prompt of a pair, the first token of its answer, and the
        last position."""
        return pair.tokens.original, self.subject.answer_id(pair.texts.original, pair.texts.target), -1

    def _other_records(self) -> list[PairTexts]:
        """Texts of further pairs on which a block is chosen: of `data`, or of shipped facts if `data` has
        none; slightly more than required."""
        # More than needed: pairs that are shown, and prompts longer than the context, drop out.
        start, count = len(self.pairs), 4 * self.settings.others
        records = pair_records(self.subject, self.settings.data)[start : start + count]
        records = records or pair_records(self.subject, ())[:count]
        return [r for r in records if self.subject.fits(self.subject.tokenizer.encode(r.original).ids)]

    def by_donor(self, values: Any) -> Any:
        """Values of the result "controls" with an axis per unrelated prompt (donor), for pairs that the model
        knows: [pair * donor, …] -> [pair, donor, …]."""
        by_pair = values.reshape(len(self.pairs), self.settings.donors, *values.shape[1:])
        return by_pair[self.is_known(SCORED)]

    def claimed_pairs(self) -> str:
        """Numbers of pairs on which a block is chosen and scored, as the end of a sentence of captions."""
        counts, _ = self.known_counts
        return (
            f"{counts[CHOSEN_ON]} other pairs whose answer the model predicts; the choice is scored on the "
            f"{counts[SCORED]} pairs shown whose answer the model predicts"
        )

    @property
    def about(self) -> dict[str, Any]:
        """JSON fields on the model and its blocks of layers."""
        layers, count = self.subject.config.num_layers, len(self.blocks)
        return {
            "model_id": self.subject.name,
            "block_size": self.block_size,
            "n_layers": layers,
            "n_blocks": count,
        }

    def prompts_json(self, i: int, result: Any) -> dict[str, Any]:
        """JSON fields on pair `i`: its prompts, and the model's most likely next tokens after them.

        Arguments:
            i: index of the pair.
            result: result that holds the most likely next tokens.
        """
        pair = self.pairs[i]
        ids = [int(result[f"{name}_token_id"][i]) for name in ("original", "counterfactual")]
        names = ("original_continuation", "cf_continuation")
        continuations = zip(names, self.subject.token_texts(ids), strict=True)
        return {"label": pair.label, **dict(zip(FIELDS, pair.texts, strict=True)), **dict(continuations)}


def layers_label(layers: Sequence[int]) -> str:
    """A block of layers as text: "0-3", or "2" for a single layer."""
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
