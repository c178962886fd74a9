"""Pairs of facts that differ in their subject: from a file of CounterFact records, or the shipped ones.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....stages.causal.answer_ranks import AskedPrompt
from ....stages.causal.counterfact import FactTokens, blocks_of, differing_span, position_map
from ....stages.causal.draws import AtOnce
from ....stages.causal.factual_routing import FactualRouting
from ....store.errors import ConfigError
from ...settings import PairSettings, SubjectRule
from ...subject import shipped_facts
from ...workflow import Nodes
from ..answers import named, require_next
from ..relations import relation_of
from ..unrelated import Unrelated
from .fact_data import FIELDS, SHIPPED_DATA, read_records
from .known import CHOSEN_ON, SCORED, KnownWorkflow

if TYPE_CHECKING:
    from ...subject import Subject

__all__ = [
    "SUBJECTS",
    "FactPair",
    "PairWorkflow",
    "fact_pairs",
    "layers_told",
    "pair_records",
    "shipped_pairs",
]


@dataclass(frozen=True)
class FactPair:
    """One record of CounterFact, tokenised. labels: fact, fact_final or other, per token of the original."""

    original: str
    counterfactual: str
    target: str
    counterfactual_target: str
    pair: FactTokens
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """For people: the fact and the two targets."""
        return f"{self.original.split(chr(10))[0]} {self.target} -> {self.counterfactual_target}"


SUBJECTS: Mapping[SubjectRule, str] = {
    "whole": "subject",
    "differing": "subject's last token",
    "last_fact": "fact's last token",
}
"""What is patched by a rule that says where a subject is: all tokens in which the prompts differ, the last of
them, or the last token of the fact, as candle-mi has it."""


def fact_pairs(
    subject: Subject, data: Sequence[str], limit: int, *, rule: SubjectRule = "whole"
) -> list[FactPair]:
    """The first pairs of files, or of the shipped facts for none (`pair_records`); limit 0 takes all.

    rule: see SUBJECTS.
    """
    return [_tokenised(subject, record, rule) for record in pair_records(subject, data)[: limit or None]]


def pair_records(subject: Subject, data: Sequence[str]) -> list[dict[str, str]]:
    """Pairs of files as records, in their order; the shipped ones for no file (fact_data.py)."""
    return [
        record
        for path in data or (SHIPPED_DATA,)
        for record in (shipped_pairs(subject) if path == SHIPPED_DATA else read_records(path))
    ]


def shipped_pairs(subject: Subject) -> list[dict[str, str]]:
    """Shipped facts of one relation, as many tokens and other answers, each fact in one pair at most.

    Those whose original answer is a single token come first, and of them those where both are; else in the
    order of the facts. Of a pair with one such answer its fact is the original.
    """
    facts = shipped_facts()
    alike: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for fact, ids in zip(facts, subject.tokenizer.ids_of([fact["prompt"] for fact in facts]), strict=True):
        relation = relation_of(fact["prompt"], words=2)
        if relation is not None:
            alike[relation, len(ids)].append(fact)
    order = {fact["prompt"]: i for i, fact in enumerate(facts)}
    found = []
    for group in alike.values():
        waiting: list[dict[str, Any]] = []
        for fact in group:
            other = next((o for o in waiting if o["target"] != fact["target"]), None)
            if other is None:
                waiting.append(fact)
            else:
                waiting.remove(other)
                found.append((other, fact))

    asked = [(fact["prompt"], fact["target"]) for pair in found for fact in pair]
    pieces = dict(zip(asked, subject.pieces_of_answers(asked), strict=True))

    def has_several(fact: dict[str, Any]) -> bool:
        return len(pieces[fact["prompt"], fact["target"]]) > 1

    in_order = sorted(found, key=lambda pair: order[pair[0]["prompt"]])
    turned = [sorted(pair, key=has_several) for pair in in_order]
    return [
        dict(zip(FIELDS, (a["prompt"], b["prompt"], a["target"], b["target"]), strict=True))
        for a, b in sorted(turned, key=lambda pair: [has_several(fact) for fact in pair])
    ]


def _tokenised(subject: Subject, record: dict[str, str], rule: SubjectRule) -> FactPair:
    texts = [record[name] for name in FIELDS[:2]]
    encodings = subject.tokenizer.encode_batch(texts)
    end = texts[0].find("\n\n")
    labels = encodings[0].label_spans([("fact", (0, end if end > 0 else len(texts[0])))])
    ids = [tuple(encoding.ids) for encoding in encodings]
    fact = tuple(i for i, label in enumerate(labels) if label != "other")
    pair = FactTokens(ids[0], ids[1], fact)
    pair.check()
    if rule == "last_fact":
        places: tuple[tuple[int, int], ...] = ((fact[-1], position_map(pair)[fact[-1]]),)
    else:
        span = differing_span(*ids)
        places = span if rule == "whole" else span[-1:]
    pair = FactTokens(ids[0], ids[1], fact, places)
    targets = [record[name] for name in FIELDS[2:]]
    return FactPair(texts[0], texts[1], targets[0], targets[1], pair, tuple(labels))


class PairWorkflow(KnownWorkflow):
    """A question about pairs of facts, patched block by block of layers."""

    settings: PairSettings
    asked_about = "pairs"
    # How a fact turns into another is nothing to be told of facts that are not there.
    describes_unknown = False

    def read_pairs(self) -> dict[str, Any]:
        """Pairs and blocks, as an experiment takes them."""
        require_next(self.subject)
        given, layers = self.settings, self.subject.config.num_layers
        self.pairs = fact_pairs(self.subject, given.data, given.limit, rule=given.subject)
        self.block_size = given.block_size or max(1, min(4, layers // 3))
        self.blocks = blocks_of(layers, self.block_size)
        return {"pairs": tuple(each.pair for each in self.pairs), "block_size": self.block_size}

    def control_nodes(self) -> Nodes:
        """The subject patched in other pairs, to choose on, and from unrelated prompts in these pairs; and
        which of all these pairs the model knows. None where no control is asked for."""
        given = self.settings
        if not given.controls:
            return {}
        shown = {each.pair.original for each in self.pairs}
        records = (_tokenised(self.subject, record, given.subject) for record in self._other_records())
        chosen_on = [each for each in records if each.pair.original not in shown][: given.others]
        if not chosen_on:
            raise ConfigError(
                "expected other pairs of facts to choose the block on, found none that fit the model; give "
                "more in data=…, or ask for no claim: controls=0"
            )
        unrelated, from_unrelated = Unrelated(self.subject), list[FactTokens]()
        for number, each in enumerate(self.pairs):
            pair, targets = each.pair, (each.target, each.counterfactual_target)
            seed = given.seed + number
            donors = unrelated.to(pair.counterfactual, given.donors, seed=seed, targets=targets)
            from_unrelated += [replace(pair, counterfactual=donor) for donor in donors]
        experiments = {"choice": tuple(each.pair for each in chosen_on), "controls": tuple(from_unrelated)}
        self.only_claims = (*self.only_claims, *experiments)
        asked = {CHOSEN_ON: chosen_on, SCORED: self.pairs}
        return self.known_node(
            {name: [self._asked(each) for each in pairs] for name, pairs in asked.items()}
        ) | {
            name: self.on_model(AtOnce((FactualRouting(pairs=pairs, block_size=self.block_size),)))
            for name, pairs in experiments.items()
        }

    def _asked(self, pair: FactPair) -> AskedPrompt:
        """The original prompt of a pair and the first token of its answer."""
        return pair.pair.original, self.subject.answer_id(pair.original, pair.target), -1

    def _other_records(self) -> list[dict[str, str]]:
        """Pairs that are not shown, a few more than needed: the rest of `data`, or where nothing is left of
        it, shipped ones."""
        limit, given = self.subject.config.context_length, self.settings
        first, few = len(self.pairs), 4 * given.others
        records = pair_records(self.subject, given.data)[first : first + few]
        records = records or shipped_pairs(self.subject)[:few]
        fits = (limit or sys.maxsize).__ge__
        return [r for r in records if fits(len(self.subject.tokenizer.encode(r["original_prompt"])))]

    def by_donor(self, values: Any) -> Any:
        """Of the node "controls" [pair and donor, …], of the pairs that the model knows: [pair, donor, …]."""
        by_pair = values.reshape(len(self.pairs), self.settings.donors, *values.shape[1:])
        return by_pair[self.is_known(SCORED)]

    def counted(self) -> str:
        """How many pairs the claims are about, for captions."""
        counts = [int(self.is_known(name).sum()) for name in (CHOSEN_ON, SCORED)]
        return f"{counts[0]} other pairs whose answer the model says, scored on {counts[1]}"

    @property
    def about(self) -> dict[str, Any]:
        """What a document says of model and blocks."""
        layers, count = self.subject.config.num_layers, len(self.blocks)
        return {
            "model_id": self.subject.name,
            "block_size": self.block_size,
            "n_layers": layers,
            "n_blocks": count,
        }

    def pair_told(self, i: int, result: Any) -> dict[str, Any]:
        """Pair `i`, and what its two prompts would say, from the variables of a result."""
        each = self.pairs[i]
        ids = [int(result[f"{name}_token_id"][i]) for name in ("original", "counterfactual")]
        texts = (each.original, each.counterfactual, each.target, each.counterfactual_target)
        said = zip(("original_continuation", "cf_continuation"), named(self.subject, ids), strict=True)
        return {"label": each.label, **dict(zip(FIELDS, texts, strict=True)), **dict(said)}


def layers_told(layers: Sequence[int]) -> str:
    """A block as people write it: 0-3."""
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
