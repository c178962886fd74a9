"""Targets of probes: tokenised texts, and a value or label for each token that is predicted from its state.

Targets of wrapped prose: `character_count`, the number of characters between the start of the line and the
token; `line_break`, a label, whether the next token contains a line break (line_corpus.py wraps the prose).

Targets from a file: a JSON list, or JSON lines, of {"text", "label"}, for the last token, or {"text",
"spans": [{"start", "end", "label"}, …]}, for every token that overlaps a span of characters. Labels are
strings, true and false, or numbers. Or CSV with a header that has the columns text and label, or, as the
files of sae-probes (Kantamneni et al. 2025), prompt and target. A further field may name the group of a text,
such as its document.

Border: texts, tokens and numbers; loads no model.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...stages.corpus.text import token_counts
from ...store.errors import ConfigError, PromptError, TokenizerError
from ...store.exchange.outside import json_value, read_outside

if TYPE_CHECKING:
    from ...store import PackedTokens
    from ..subject import Subject

__all__ = [
    "TARGETS",
    "Target",
    "as_word",
    "groups_of",
    "labelled_entries",
    "read_labels",
    "thinned",
    "wrapped_targets",
]

TARGETS = ("character_count", "line_break")
"""Names of the targets that probes of wrapped prose predict."""
FEWEST = 10
"""Smallest number of examples that each label must have to be balanced."""


@dataclass(frozen=True)
class Target:
    """A quantity or label that a probe predicts."""

    name: str
    """Name of the target."""
    values: npt.NDArray[np.float64]
    """Value at every token, float64 [token]; NaN for tokens without one."""
    classes: tuple[str, ...] = ()
    """Names of the labels 0, 1, …; empty for numbers."""

    @property
    def kind(self) -> str:
        """Kind of the target: "label" for classes, "number" otherwise."""
        return "label" if self.classes else "number"


def wrapped_targets(tokens: PackedTokens, names: Sequence[str]) -> list[Target]:
    """Targets of wrapped prose. Special tokens, line breaks and, for `line_break`, last tokens of prompts
    have no value.

    Arguments:
        tokens: tokens of the prose.
        names: names of the targets.
    """
    counts = token_counts(tokens, line_breaks=False).astype(np.float64)
    targets = []
    for name in names:
        values = counts if name == "character_count" else _next_breaks(tokens)
        # -1: special tokens and line breaks.
        valid = np.where(counts >= 0, values, np.nan)
        targets.append(Target(name, valid, () if name == "character_count" else ("other", "line break")))
    return targets


def _next_breaks(tokens: PackedTokens) -> npt.NDArray[np.float64]:
    """Whether the next token of the prompt contains a line break, 1 or 0; NaN at the last token. [token]."""
    assert tokens.texts is not None
    assert tokens.char_start is not None
    assert tokens.char_end is not None
    values = np.full(tokens.n_tokens, np.nan)
    for i, text in enumerate(tokens.texts):
        row = tokens.row(i)
        # Line breaks before each character: the count rises within a token that contains one.
        breaks = np.cumsum([0, *(char == "\n" for char in text)])
        holds = breaks[tokens.char_end[row]] > breaks[tokens.char_start[row]]
        values[row.start : row.stop - 1] = holds[1:]
    return values


def read_labels(
    subject: Subject, path: str, kind: str, groups: str = ""
) -> tuple[PackedTokens, Target, npt.NDArray[np.int64]]:
    """Read labelled texts from a file; see the module docstring for the format.

    Arguments:
        subject: the model, for its tokenizer.
        path: the file.
        kind: "label" or "number"; "auto" treats strings and booleans as labels, and numbers as numbers.
        groups: field that names the group of a text; empty to make each text a group.

    Returns:
        The texts as tokens, their labels, and the group of each text, numbered from 0, [prompt].

    Raises:
        ConfigError: the file has another format, or a text has no group.
        TokenizerError: a span is outside its text.
        PromptError: labels and numbers are mixed.
    """
    entries = labelled_entries(path)
    tokens = subject.pack([entry["text"] for entry in entries])
    labels: dict[int, Any] = {}
    for i, entry in enumerate(entries):
        row = tokens.row(i)
        if "label" in entry:
            labels[row.stop - 1] = entry["label"]
            continue
        encoding = subject.tokenizer.encode(entry["text"])
        for span in entry["spans"]:
            start, end = int(span["start"]), int(span["end"])
            if not 0 <= start < end <= len(entry["text"]):
                raise TokenizerError(
                    f"entry {i} of {path!r}: expected a span within its {len(entry['text'])} characters, "
                    f"found {start}..{end}; count start and end in characters, not in bytes"
                )
            labels |= {row.start + at: span["label"] for at in encoding.char_range_to_tokens(start, end)}
    labelled_tokens = {at: label for at, label in labels.items() if label is not None}
    target = _target(Path(path).stem, labelled_tokens, tokens.n_tokens, kind)
    return tokens, target, groups_of(entries, groups, path)


def _target(name: str, labels: dict[int, Any], n_tokens: int, kind: str) -> Target:
    # In Python True and False are ints.
    are_numbers = {isinstance(one, int | float) and not isinstance(one, bool) for one in labels.values()}
    if kind == "auto":
        if len(are_numbers) > 1:
            raise PromptError(
                f"expected either labels or numbers in {name!r}, found both; set kind=label to read all as "
                "labels"
            )
        kind = "number" if are_numbers == {True} else "label"
    if kind == "number" and are_numbers != {True}:
        raise PromptError(
            f"expected numbers as labels in {name!r}, as kind=number, found other values; set kind=label"
        )
    values = np.full(n_tokens, np.nan)
    if kind == "number":
        values[list(labels)] = list(labels.values())
        return Target(name, values)
    classes = tuple(sorted({as_word(one) for one in labels.values()}))
    if len(classes) < 2:
        raise PromptError(
            f"expected two or more different labels in {name!r}, found "
            f"{repr(classes[0]) + ' alone' if classes else 'none'}; add texts with another label"
        )
    values[list(labels)] = [classes.index(as_word(one)) for one in labels.values()]
    return Target(name, values, classes)


def labelled_entries(path: str) -> list[dict[str, Any]]:
    """Entries of a file of labelled texts, each {"text", "label"} or {"text", "spans"}, with further fields.

    Raises:
        ConfigError: the file has another format, or a text has no label.
        PromptError: the file has no entries.
    """
    data = read_outside(Path(path).expanduser(), ConfigError, "correct it, or name another file")
    try:
        # Editors on Windows write a byte order mark in front of UTF-8.
        text = data.decode("utf-8-sig")
        entries = _table(text) if path.lower().endswith(".csv") else _json(text)
    except (ValueError, csv.Error) as error:
        raise ConfigError(
            f"expected labelled texts as CSV, JSON, or JSON lines, at {path!r}, found {error}"
        ) from error
    for i, entry in enumerate(entries):
        if not _is_sound(entry):
            form = '{"text": …, "label": …}, or "spans" of start, end and label'
            entry_text = json.dumps(entry, ensure_ascii=False)[:60]
            raise ConfigError(f"entry {i} of {path!r}: expected {form}, found {entry_text}")
    if not entries:
        raise PromptError(f"expected labelled texts in {path!r}, found none; add some, or name another file")
    return list(entries)


def groups_of(entries: Sequence[dict[str, Any]], field: str, path: str) -> npt.NDArray[np.int64]:
    """Group of each entry, numbered from 0, [entry].

    Arguments:
        entries: entries of a file of labelled texts.
        field: field that names the group; empty to make each entry a group.
        path: the file, for messages.

    Raises:
        ConfigError: an entry lacks the field.
    """
    if not field:
        return np.arange(len(entries))
    for i, entry in enumerate(entries):
        if entry.get(field) in (None, ""):
            raise ConfigError(
                f"entry {i} of {path!r}: expected a value in the field {field!r}, which groups names, found "
                f"{', '.join(map(repr, entry))}; add it, or leave groups out"
            )
    _, group = np.unique([str(entry[field]) for entry in entries], return_inverse=True)
    return group.astype(np.int64)


def _json(text: str) -> list[Any]:
    """Entries of a JSON list or of JSON lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    is_list = bool(lines) and lines[0].lstrip().startswith("[")
    entries = json_value(text.encode()) if is_list else [json_value(line.encode()) for line in lines]
    return list(entries)


def _table(text: str) -> list[dict[str, Any]]:
    """Entries of CSV with a header; labels that are all numbers become numbers, and a missing one None."""
    names = {"prompt": "text", "target": "label"}
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    entries: list[dict[str, Any]] = [
        {names.get(name, name): value for name, value in row.items() if name is not None} for row in rows
    ]
    for entry in entries:
        if entry.get("label") == "":
            entry["label"] = None
    try:
        numbers = [json_value(str(entry["label"]).encode()) for entry in entries]
    except (ValueError, KeyError):
        return entries
    if all(isinstance(number, int | float) for number in numbers):
        entries = [entry | {"label": number} for entry, number in zip(entries, numbers, strict=True)]
    return entries


def _is_sound(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        return False
    spans = entry.get("spans", [])
    are_whole = all(isinstance(span, dict) and {"start", "end", "label"} <= set(span) for span in spans)
    return "label" in entry or (bool(spans) and are_whole)


def as_word(label: Any) -> str:
    """A label as text: "true" and "false" as in JSON, other values by `str`."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def thinned(target: Target, *, examples: int, balance: bool, seed: int) -> Target:
    """Target with values at a random subset of its tokens; NaN at all other tokens.

    Arguments:
        target: the target.
        examples: largest number of examples; 0 for all.
        balance: whether to select equally many of each label.
        seed: of the selection.

    Raises:
        PromptError: a label has fewer than ten examples to balance.
    """
    rng = np.random.default_rng(seed)
    labelled = np.flatnonzero(~np.isnan(target.values))
    groups = [labelled]
    if balance and target.classes:
        groups = [labelled[target.values[labelled] == label] for label in range(len(target.classes))]
        fewest = min(range(len(groups)), key=lambda i: len(groups[i]))
        if len(groups[fewest]) < FEWEST:
            raise PromptError(
                f"expected at least {FEWEST} examples of each label of {target.name!r} to take as many of "
                f"each, found {len(groups[fewest])} of {target.classes[fewest]!r}; give more text, or set "
                "balance=false"
            )
    most = min(len(group) for group in groups)
    share = min(most, examples // len(groups)) if examples else most
    selected = np.concatenate([rng.permutation(group)[:share] for group in groups])
    # Tokens that were not drawn get NaN, which means "no value": probes leave them out.
    values = np.full_like(target.values, np.nan)
    values[selected] = target.values[selected]
    return Target(target.name, values, target.classes)
