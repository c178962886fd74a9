"""Facts for workflows: shipped ones, or from the user's files.

A file is a JSON list of records. A record is a pair of facts with the fields of CounterFact,
`original_prompt`, `counterfactual_prompt`, `gt_original_target` and `gt_counterfactual_target`. For workflows
on single facts, a pair counts as two facts, and a record may be a single fact `{"prompt": ..., "target":
...}`. The setting `data` names files to use instead of the shipped facts; "shipped" among them adds these, in
the given order (docs/how-to/facts.md).

Border: texts; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ....stages.forward.models.files import SHIPPED
from ....store.errors import ConfigError
from ....store.exchange.outside import json_file
from ...general_facts import GENERAL
from ...subject import shipped_facts
from ..answers import fact

if TYPE_CHECKING:
    from ...subject import Subject

__all__ = [
    "FACT",
    "FIELDS",
    "SHIPPED_DATA",
    "Fact",
    "default_data",
    "enough",
    "facts_of",
    "read_records",
    "shown_fact",
    "single_facts",
]

FIELDS = ("original_prompt", "counterfactual_prompt", "gt_original_target", "gt_counterfactual_target")
"""Fields of a record that is a pair of facts."""
FACT = ("prompt", "target")
"""Fields of a record that is a single fact."""
SHIPPED_DATA = "shipped"
"""Name of the shipped facts in the setting `data`."""


T = TypeVar("T")


class Fact(NamedTuple):
    """A factual prompt, its completing word, and optionally a counterfactual prompt."""

    prompt: str
    """The prompt."""
    target: str
    """The word that completes it."""
    other: str = ""
    """The other prompt of the pair, which differs in the subject; "" for a single fact."""


def default_data(subject: Subject, data: Sequence[str]) -> tuple[str, ...]:
    """Names of files and sources of facts; () for the shipped facts.

    Arguments:
        subject: the model, whose default is used if `data` is empty: the shipped facts for a model that ships
            with mizarr, the general facts for any other.
        data: the setting.
    """
    if data:
        return () if tuple(data) == (SHIPPED_DATA,) else tuple(data)
    return () if subject.files.name in SHIPPED else (GENERAL,)


def single_facts(subject: Subject, source: str) -> list[dict[str, Any]]:
    """Facts of a named source: SHIPPED_DATA, or GENERAL, of which those that the model knows."""
    return shipped_facts() if source == SHIPPED_DATA else subject.general_facts


def facts_of(subject: Subject, data: Sequence[str]) -> list[Fact]:
    """Facts of files and named sources, in their order; the shipped ones if none is named. Raises ConfigError
    like `read_records`."""
    facts: list[Fact] = []
    for path in data or (SHIPPED_DATA,):
        if path in (SHIPPED_DATA, GENERAL):
            facts += [Fact(record["prompt"], record["target"]) for record in single_facts(subject, path)]
            continue
        for record in read_records(path, single=True):
            if FACT[0] in record:
                facts.append(Fact(*(record[name] for name in FACT)))
            else:
                original, counterfactual, target, counterfactual_target = (record[name] for name in FIELDS)
                facts += [
                    Fact(original, target, counterfactual),
                    Fact(counterfactual, counterfactual_target, original),
                ]
    return facts


def shown_fact(subject: Subject, settings: Any) -> tuple[str, str]:
    """Prompt and target of the settings; without them the first fact of their `data`, or by default the fact
    of `answers.fact` for a model that ships with mizarr, and the first known general fact for any other.

    Arguments:
        subject: the model.
        settings: settings with model, prompt, target and data.
    """
    data = settings.data or default_data(subject, ())
    if data and not (settings.prompt or settings.target):
        return facts_of(subject, data)[0][:2]
    return fact(settings.model, settings.prompt, settings.target)


def read_records(path: str, *, single: bool = False) -> list[dict[str, str]]:
    """Read a JSON list of records.

    Arguments:
        path: path of the file.
        single: whether records may be single facts.

    Raises:
        ConfigError: the file is missing, contains no list or no record, or a record lacks a field or has one
            that is no text.
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


def enough(facts: list[T], data: Sequence[str], count: int, choice: str) -> list[T]:
    """The first `count` facts; of a user's and of general facts fewer if there are not so many, but an even
    number.

    Arguments:
        facts: facts that fit the model.
        data: names of their files and sources (`default_data`); empty for the shipped facts.
        count: number of facts, half for selection and half for scoring.
        choice: what is selected on them, for the message: "a place".

    Raises:
        ConfigError: fewer than `count` shipped facts, or fewer than two of the user's.
    """
    if len(facts) >= count or (data and len(facts) > 1):
        # Even, as one half chooses and the other half scores.
        return facts[: min(count, len(facts) // 2 * 2)]
    source, more = ("facts in data", ", or give more") if data else ("shipped facts", "")
    if tuple(data) == (GENERAL,):
        source, more = "general facts", ", or give others: data=FILE"
    raise ConfigError(
        f"expected {2 if data else count} {source} to choose {choice} on, found {len(facts)} that fit the "
        f"model; ask for fewer: facts=…{more}, or set controls=0 to make no claims"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
