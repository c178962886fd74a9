"""General facts: what most language models know, for models that do not ship with mizarr.

`general.json` holds relations such as "capital of a country", each with one prompt and pairs of a subject
and its answer. The first workflow on a model ranks the answers of all of them in one forward pass each, and
stores the ranks; workflows then ask about those facts whose answer is the model's most likely next token
(`Subject.facts`).

Border: texts; loads no model and never imports torch.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ....stages.causal.answer_ranks import AnswerRanks

if TYPE_CHECKING:
    from ...subject import Subject

__all__ = ["GENERAL", "GENERAL_NODE", "general_facts", "general_ranks"]

GENERAL = "general"
"""Name of the general facts in the setting `data`."""
GENERAL_NODE = "general_facts"
"""Name of the node, and of its result, with the rank of the answer of each general fact."""


@cache
def general_facts() -> tuple[dict[str, str], ...]:
    """The general facts: {"prompt": …, "target": …, "relation": …}, one of each relation in turn, so that the
    first of them are of many relations."""
    relations = json.loads((Path(__file__).parent / "general.json").read_text("utf-8"))["relations"]
    columns = [
        [
            {"prompt": row["prompt"].format(subject), "target": answer, "relation": row["relation"]}
            for subject, answer in row["facts"]
        ]
        for row in relations
    ]
    in_turn = chain.from_iterable(zip_longest(*columns))
    return tuple(fact for fact in in_turn if fact is not None)


def general_ranks(subject: Subject) -> AnswerRanks:
    """The experiment that ranks the answers of all general facts in a model; its axis `prompt` follows
    `general_facts`."""
    facts = [(subject.asked(fact["prompt"]), fact["target"]) for fact in general_facts()]
    prompts = subject.tokenizer.ids_of([prompt for prompt, _ in facts], add_special=True)
    answers = subject.answer_ids(facts)
    positions = [subject.read_at(ids) for ids in prompts]
    return AnswerRanks(tuple(zip(map(tuple, prompts), answers, positions, strict=True)))
