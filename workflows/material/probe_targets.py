"""What probes ask: texts as tokens, and of each token what is to be read off its state.

Border: texts, tokens and numbers; loads no model.

Of wrapped prose, where counting can be asked about: `character_count`, the characters between the start of
the line and the token, a number; `line_break`, whether the next token breaks the line, a label. Each stretch
of prose is wrapped at one width, so that no words of the test prompts have been fitted at another.

Of a file: a JSON list, or JSON lines, of {"text", "label"}, read off the last token, or {"text", "spans":
[{"start", "end", "label"}, …]}, read off every token that overlaps a span of characters. Labels are strings,
true and false, or numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...stages.corpus.text import pack_lines, token_counts, wrap
from ...store.errors import ConfigError, PromptError, TokenizerError
from ...store.exchange.outside import json_value, read_outside

if TYPE_CHECKING:
    from ...store import PackedTokens
    from ..subject import Subject

__all__ = ["TARGETS", "Target", "read_labels", "thinned", "wrapped_prose", "wrapped_targets"]

TARGETS = ("character_count", "line_break")
"""What can be asked of wrapped prose."""
STRETCH = 400
"""Words wrapped at one width before the next one's turn."""
FEWEST = 10
"""Examples of each label below which labels are not made equally common."""


@dataclass(frozen=True)
class Target:
    """One thing asked: its value at every token (NaN: none), and, for labels, the names of values 0, 1, …"""

    name: str
    values: npt.NDArray[np.float64]
    classes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """ "label" or "number", as `stages.probe` calls them."""
        return "label" if self.classes else "number"


def wrapped_prose(
    subject: Subject, texts: Sequence[str], widths: Sequence[int], context: int
) -> PackedTokens:
    """Texts in stretches, each wrapped at the next of the widths, cut at line starts into prompts of at most
    `context` tokens."""
    pieces: list[str] = []
    room = context - subject.special_tokens
    stretches = []
    for text in texts:
        words = text.split()
        stretches += [words[start : start + STRETCH] for start in range(0, len(words), STRETCH)]
    for i, stretch in enumerate(stretches):
        wrapped = wrap(" ".join(stretch), widths[i % len(widths)])
        pieces += pack_lines(wrapped, subject.starts(wrapped), room)
    return subject.pack(pieces)


def wrapped_targets(tokens: PackedTokens, names: Sequence[str]) -> list[Target]:
    """What is asked of wrapped prose; special tokens, line breaks and, for `line_break`, last tokens have no
    value."""
    counts = token_counts(tokens, line_breaks=False).astype(np.float64)
    found = []
    for name in names:
        values = counts if name == "character_count" else _next_breaks(tokens)
        kept = np.where(counts >= 0, values, np.nan)
        found.append(Target(name, kept, () if name == "character_count" else ("other", "line break")))
    return found


def _next_breaks(tokens: PackedTokens) -> npt.NDArray[np.float64]:
    """1 where the next token of the prompt holds a line break, 0 where not, NaN after the last."""
    assert tokens.texts is not None
    assert tokens.char_start is not None
    assert tokens.char_end is not None
    found = np.full(tokens.n_tokens, np.nan)
    for i, text in enumerate(tokens.texts):
        row = tokens.row(i)
        breaks = np.cumsum([0, *(char == "\n" for char in text)])
        holds = breaks[tokens.char_end[row]] > breaks[tokens.char_start[row]]
        found[row.start : row.stop - 1] = holds[1:]
    return found


def read_labels(subject: Subject, path: str, kind: str) -> tuple[PackedTokens, Target]:
    """The texts of a file as tokens, and their labels; see the module for the format.

    kind: "label" or "number"; "auto" takes strings and truth values for labels, numbers for numbers.
    Raises ConfigError for a file of another form, TokenizerError for a span outside its text, PromptError
    where labels and numbers are mixed.
    """
    entries = _entries(path)
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
                    f"found {start}..{end}; are these byte offsets?"
                )
            labels |= {row.start + at: span["label"] for at in encoding.char_range_to_tokens(start, end)}
    known = {at: label for at, label in labels.items() if label is not None}
    return tokens, _target(Path(path).stem, known, tokens.n_tokens, kind)


def _target(name: str, labels: dict[int, Any], n_tokens: int, kind: str) -> Target:
    are_numbers = {isinstance(one, int | float) and not isinstance(one, bool) for one in labels.values()}
    if kind == "auto":
        if len(are_numbers) > 1:
            raise PromptError(f"expected labels, or numbers, in {name!r}, found both; set kind=label")
        kind = "number" if are_numbers == {True} else "label"
    if kind == "number" and are_numbers != {True}:
        raise PromptError(f"expected numbers in {name!r}, found other labels; set kind=label")
    values = np.full(n_tokens, np.nan)
    if kind == "number":
        values[list(labels)] = list(labels.values())
        return Target(name, values)
    classes = tuple(sorted({_word(one) for one in labels.values()}))
    if len(classes) < 2:
        raise PromptError(
            f"expected two labels or more in {name!r}, found {classes[0] if classes else 'none'!r} alone; "
            "a probe has nothing to tell apart"
        )
    values[list(labels)] = [classes.index(_word(one)) for one in labels.values()]
    return Target(name, values, classes)


def _entries(path: str) -> list[dict[str, Any]]:
    """The entries of a file, checked for their form."""
    data = read_outside(Path(path).expanduser(), ConfigError, "correct it, or name another file")
    try:
        lines = [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
        is_list = bool(lines) and lines[0].lstrip().startswith("[")
        found = json_value(data) if is_list else [json_value(line.encode()) for line in lines]
    except ValueError as error:
        raise ConfigError(
            f"expected labelled texts as JSON, or JSON lines, at {path!r}, found {error}"
        ) from error
    for i, entry in enumerate(found):
        if not _is_sound(entry):
            form = '{"text": …, "label": …}, or "spans" of start, end and label'
            said = json.dumps(entry, ensure_ascii=False)[:60]
            raise ConfigError(f"entry {i} of {path!r}: expected {form}, found {said}")
    if not found:
        raise PromptError(f"expected labelled texts in {path!r}, found none")
    return list(found)


def _is_sound(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        return False
    spans = entry.get("spans", [])
    are_whole = all(isinstance(span, dict) and {"start", "end", "label"} <= set(span) for span in spans)
    return "label" in entry or (bool(spans) and are_whole)


def _word(label: Any) -> str:
    """A label as it is told: true and false as in JSON, everything else as it reads."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def thinned(target: Target, *, examples: int, balance: bool, seed: int) -> Target:
    """At most so many of a target's examples, chosen at random; with `balance` as many of each label.

    examples: 0 keeps all.
    Raises PromptError where `balance` would leave too few: fewer than ten of some label.
    """
    rng = np.random.default_rng(seed)
    there = np.flatnonzero(~np.isnan(target.values))
    groups = [there]
    if balance and target.classes:
        groups = [there[target.values[there] == label] for label in range(len(target.classes))]
        fewest = min(range(len(groups)), key=lambda i: len(groups[i]))
        if len(groups[fewest]) < FEWEST:
            raise PromptError(
                f"expected at least {FEWEST} examples of each label of {target.name!r} to take as many of "
                f"each, found {len(groups[fewest])} of {target.classes[fewest]!r}; give more text, or set "
                "balance=false"
            )
    most = min(len(group) for group in groups)
    share = min(most, examples // len(groups)) if examples else most
    kept = np.concatenate([rng.permutation(group)[:share] for group in groups])
    values = np.full_like(target.values, np.nan)
    values[kept] = target.values[kept]
    return Target(target.name, values, target.classes)
