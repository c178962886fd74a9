"""Facts that questions are asked about: the shipped ones, or those of a user's files, in one format.

A file is a JSON list of records. A record is a pair of facts with the fields of CounterFact,
`original_prompt`, `counterfactual_prompt`, `gt_original_target` and `gt_counterfactual_target`; where single
facts are asked for, a pair is two of them, and a record may be one, `{"prompt": ..., "target": ...}`, as the
shipped facts are. `data` names one file or several, and the word "shipped" among them stands for what ships:
alone they are read in its place, beside it in addition to it, in the order given (docs/how-to/facts.md).

Border: texts; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ....store.errors import ConfigError
from ....store.exchange.outside import json_file
from ...subject import shipped_facts
from ..answers import fact

__all__ = ["FACT", "FIELDS", "SHIPPED_DATA", "Fact", "enough", "facts_of", "read_records", "shown_fact"]

FIELDS = ("original_prompt", "counterfactual_prompt", "gt_original_target", "gt_counterfactual_target")
"""Of a record that is a pair of facts."""
FACT = ("prompt", "target")
"""Of a record that is one fact."""
SHIPPED_DATA = "shipped"
"""Stands in `data` for the facts that ship with mizarr."""


T = TypeVar("T")


class Fact(NamedTuple):
    """A prompt, the word that completes it, and the other prompt of its pair."""

    prompt: str
    target: str
    other: str = ""
    """The other prompt of its pair, which differs in the subject; "" where it is no part of a pair."""


def facts_of(data: Sequence[str]) -> list[Fact]:
    """Facts of files, in their order; the shipped ones for no file. Raises ConfigError as `read_records`."""
    found: list[Fact] = []
    for path in data or (SHIPPED_DATA,):
        if path == SHIPPED_DATA:
            found += [Fact(each["prompt"], each["target"]) for each in shipped_facts()]
            continue
        for record in read_records(path, single=True):
            if FACT[0] in record:
                found.append(Fact(*(record[name] for name in FACT)))
            else:
                one, other, target, wrong = (record[name] for name in FIELDS)
                found += [Fact(one, target, other), Fact(other, wrong, one)]
    return found


def shown_fact(model: str, prompt: str, target: str, data: Sequence[str]) -> tuple[str, str]:
    """The prompt and target asked for; by default the first fact of `data`, without it as `answers.fact`."""
    return facts_of(data)[0][:2] if data and not (prompt or target) else fact(model, prompt, target)


def read_records(path: str, *, single: bool = False) -> list[dict[str, str]]:
    """A JSON list of records.

    Arguments:
        path: of the file.
        single: whether records may be single facts.

    Raises:
        ConfigError: no such file, no list, no record at all, or one without its fields or whose fields are no
            texts.
    """
    records = json_file(Path(path).expanduser(), ConfigError, "name a JSON list of CounterFact records")
    listed = records if isinstance(records, list) else [records]
    for i, record in enumerate(listed):
        fields = FACT if single and isinstance(record, dict) and FACT[0] in record else FIELDS
        missing = [name for name in fields if not isinstance(record, dict) or name not in record]
        if missing:
            raise ConfigError(
                f"record {i} of {path!r}: expected the fields {', '.join(fields)}, it lacks "
                f"{', '.join(missing)}"
            )
        wrong = next((name for name in fields if not _is_text(record[name])), None)
        if wrong is not None:
            raise ConfigError(
                f"record {i} of {path!r}: expected {wrong} to be a text that is not empty, found "
                f"{record[wrong]!r}"
            )
    if not listed:
        raise ConfigError(f"expected at least one pair of facts in {path!r}, found none; add a record")
    return list(listed)


def enough(found: list[T], data: Sequence[str], wanted: int, choice: str) -> list[T]:
    """Facts that fit a model, as many as were asked for, or of one's own an even number of what there are.

    Arguments:
        found: facts that fit.
        data: where they come from.
        wanted: number of them, half to choose on and half to score on.
        choice: what is chosen on them: "a place".

    Raises:
        ConfigError: fewer than that of the shipped ones, or fewer than two of one's own.
    """
    if len(found) >= wanted or (data and len(found) > 1):
        return found[: min(wanted, len(found) // 2 * 2)]
    whose, more = ("facts in data", ", or give more") if data else ("shipped facts", "")
    raise ConfigError(
        f"expected {2 if data else wanted} {whose} to choose {choice} on, found {len(found)} that fit the "
        f"model; ask for fewer: facts=…{more}, or ask for no claim: controls=0"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
