"""Pairs of facts that differ in their subject: from a file of CounterFact records, or the shipped ones.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.causal.counterfact import FactTokens, blocks_of, differing_span, position_map
from ...stages.causal.draws import AtOnce
from ...stages.causal.factual_routing import FactualRouting
from ...store.errors import ConfigError
from ...store.exchange.outside import json_file
from ..settings import PairSettings, SubjectRule
from ..subject import shipped_facts
from ..workflow import ModelWorkflow
from .answers import named, require_next
from .relations import relation_of
from .unrelated import Unrelated

if TYPE_CHECKING:
    from ...pipeline.nodes import ResultNode
    from ..subject import Subject

__all__ = ["SUBJECTS", "FactPair", "PairWorkflow", "fact_pairs", "layers_told", "shipped_pairs"]

FIELDS = ("original_prompt", "counterfactual_prompt", "gt_original_target", "gt_counterfactual_target")


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


def fact_pairs(subject: Subject, data: str, limit: int, *, rule: SubjectRule = "whole") -> list[FactPair]:
    """The first pairs of a file, or of the shipped facts for an empty path; limit 0 takes all.

    rule: see SUBJECTS.
    """
    records = read_records(data) if data else shipped_pairs(subject)
    chosen = records[: limit or None]
    if not chosen:
        raise ConfigError("expected at least one pair of facts, found none; see data=… and limit=…")
    return [_tokenised(subject, record, rule) for record in chosen]


def read_records(path: str) -> list[dict[str, str]]:
    """A JSON list of records; ConfigError for one without the four fields."""
    records = json_file(Path(path).expanduser(), ConfigError, "name a JSON list of CounterFact records")
    for i, record in enumerate(records if isinstance(records, list) else [records]):
        missing = [name for name in FIELDS if not isinstance(record, dict) or name not in record]
        if missing:
            raise ConfigError(
                f"record {i} of {path!r}: expected the fields {', '.join(FIELDS)}, it lacks "
                f"{', '.join(missing)}"
            )
    return list(records)


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


class PairWorkflow(ModelWorkflow):
    """A question about pairs of facts, patched block by block of layers."""

    settings: PairSettings

    def read_pairs(self) -> dict[str, Any]:
        """Pairs and blocks, as an experiment takes them."""
        require_next(self.subject)
        given, layers = self.settings, self.subject.config.num_layers
        self.pairs = fact_pairs(self.subject, given.data, given.limit, rule=given.subject)
        self.block_size = given.block_size or max(1, min(4, layers // 3))
        self.blocks = blocks_of(layers, self.block_size)
        return {"pairs": tuple(each.pair for each in self.pairs), "block_size": self.block_size}

    def control_nodes(self) -> dict[str, ResultNode]:
        """The subject patched in other pairs, to choose on, and from unrelated prompts in these pairs."""
        given = self.settings
        shown = {each.pair.original for each in self.pairs}
        records = (_tokenised(self.subject, record, given.subject) for record in self._other_records())
        others = tuple(each.pair for each in records if each.pair.original not in shown)[: given.others]
        if not others:
            raise ConfigError("expected other pairs of facts to choose the block on, found none")
        unrelated, from_unrelated = Unrelated(self.subject), list[FactTokens]()
        for number, each in enumerate(self.pairs):
            pair, targets = each.pair, (each.target, each.counterfactual_target)
            seed = given.seed + number
            donors = unrelated.to(pair.counterfactual, given.donors, seed=seed, targets=targets)
            from_unrelated += [replace(pair, counterfactual=donor) for donor in donors]
        experiments = {"choice": others, "controls": tuple(from_unrelated)}
        return {
            name: self.on_model(AtOnce((FactualRouting(pairs=pairs, block_size=self.block_size),)))
            for name, pairs in experiments.items()
        }

    def _other_records(self) -> list[dict[str, str]]:
        """Shipped pairs that are not shown, a few more than needed."""
        limit = self.subject.config.context_length
        first = 0 if self.settings.data else len(self.pairs)
        records = shipped_pairs(self.subject)[first : first + 4 * self.settings.others]
        fits = (limit or sys.maxsize).__ge__
        return [r for r in records if fits(len(self.subject.tokenizer.encode(r["original_prompt"])))]

    def by_donor(self, values: Any) -> Any:
        """Of the node "controls" [pair and donor, …]: [pair, donor, …]."""
        return values.reshape(len(self.pairs), self.settings.donors, *values.shape[1:])

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
