"""General facts: what most language models know, for models that do not ship with mizarr.

`general_facts.json` holds relations such as "capital of a country", each with one prompt and pairs of a
subject and its answer. The first workflow on a model ranks the answers of all of them in one forward pass
each, and stores the ranks; workflows then ask about those facts whose answer is the model's most likely next
token (`Subject.facts`).

Border: texts; loads no model and never imports torch.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

__all__ = ["GENERAL", "GENERAL_NODE", "general_facts"]

GENERAL = "general"
"""Name of the general facts in the setting `data`."""
GENERAL_NODE = "general_facts"
"""Name of the node and result with the answer's rank for each general fact."""


@cache
def general_facts() -> tuple[dict[str, str], ...]:
    """All general facts, {"prompt": …, "target": …, "relation": …}, one of each relation in turn, so that the
    first few cover many relations."""
    relations = json.loads((Path(__file__).parent / "general_facts.json").read_text("utf-8"))["relations"]
    columns = [
        [
            {"prompt": row["prompt"].format(subject), "target": answer, "relation": row["relation"]}
            for subject, answer in row["facts"]
        ]
        for row in relations
    ]
    in_turn = chain.from_iterable(zip_longest(*columns))
    return tuple(fact for fact in in_turn if fact is not None)
