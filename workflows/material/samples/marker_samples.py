"""Texts with a marker and target positions for attention, in characters: from a corpus file, or built from
prose.

A corpus is plip-rs' "universal" JSON: {"_format_version": "2.0", "python_doctest": [sample, …], "rust_test":
[…], …}, a sample {"id", "code", "marker_char_pos", "marker_pattern", "target_char_positions"}. Characters are
counted as in Python, or in bytes as in Rust.

Border: texts, characters, and tokens of one tokenizer; loads no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import ConfigError, PromptError, nearest
from ....store.exchange.outside import json_file

if TYPE_CHECKING:
    from ....stages.forward.text.tokens import Encoding

__all__ = ["Conversion", "Placed", "Sample", "place", "read_samples", "repeated_samples"]

SENTENCE = (8, 25)
"""Smallest and largest number of words of the sentences that samples are built from."""
SAID_AGAIN = 5
"""Number of words of a sentence's beginning that are repeated after it."""


@dataclass(frozen=True)
class Sample:
    """A text with a marker and target positions; fields are named as in plip-rs."""

    id: str
    """Name of the sample."""
    code: str
    """The text."""
    marker_char_pos: int
    """Character offset of the marker."""
    marker_pattern: str
    """Text of the marker."""
    target_char_positions: tuple[int, ...]
    """Character offsets of the targets."""


@dataclass(frozen=True)
class Placed:
    """A sample with the token positions of its marker and targets."""

    sample: Sample
    """The sample."""
    marker: int
    """Token position of the marker."""
    targets: tuple[int, ...]
    """Token positions of the targets."""


@dataclass
class Conversion:
    """Counts of the conversion from characters to tokens, as in plip-rs."""

    total_samples: int = 0
    """Samples converted."""
    successful_conversions: int = 0
    """Usable samples: their marker and at least one target have a token."""
    failed_conversions: int = 0
    """Samples whose marker has no token."""
    fuzzy_matches: int = 0
    """Characters that no token covers, assigned to the nearest token."""

    def to_json(self) -> dict[str, int]:
        """The four counts by name, as a JSON object."""
        return asdict(self)


def read_samples(path: str, conditions: Sequence[str], *, unit: str) -> tuple[str, list[list[Sample]]]:
    """Samples of some conditions from a corpus file.

    Arguments:
        path: the file.
        conditions: names of groups of samples.
        unit: unit of the positions, "characters" or "bytes" (of the text in UTF-8).

    Returns:
        Format version of the file, and the samples of each condition.

    Raises:
        ConfigError: the file is no such corpus, or has no such condition.
        PromptError: a position is outside its text, or the marker is not at its position.
    """
    file = Path(path).expanduser()
    document = json_file(file, ConfigError, "name a corpus of samples as JSON")
    groups = (
        {name: group for name, group in document.items() if isinstance(group, list)}
        if isinstance(document, dict)
        else {}
    )
    samples = []
    for name in conditions:
        if name not in groups:
            near = nearest(name, groups)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"expected a condition among {', '.join(groups) or 'none'} of {path!r}, found {name!r}{hint}"
            )
        samples.append([_read(record, name, unit) for record in groups[name]])
    return str(document.get("_format_version", "1.0")), samples


def repeated_samples(text: str, samples: int) -> tuple[list[Sample], list[Sample]]:
    """(samples, controls): sentences followed by a repetition of their beginning, and other sentences
    followed by the beginning of a sentence.

    The marker is the last character; its target is the word that followed the first time, or in controls the
    word at the same place of the other sentence. No sentence is in both lists.

    Arguments:
        text: text that sentences are taken from.
        samples: number of samples in each list.

    Raises:
        PromptError: the text has too few sentences of suitable length.
    """
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text)]
    sentences = [part for part in sentences if SENTENCE[0] <= len(part.split()) <= SENTENCE[1]]
    if len(sentences) < 3 * samples:
        raise PromptError(
            f"expected {3 * samples} sentences of {SENTENCE[0]} to {SENTENCE[1]} words in the prose, found "
            f"{len(sentences)}; ask for fewer samples: samples={len(sentences) // 3}"
        )
    # Every third sentence, so that both lists come from the whole text.
    repeated, control, before_control = (sentences[start : 3 * samples : 3] for start in range(3))
    return [_with_repetition(f"repeated_{i}", part, part) for i, part in enumerate(repeated)], [
        _with_repetition(f"other_{i}", *pair)
        for i, pair in enumerate(zip(before_control, control, strict=True))
    ]


def place(sample: Sample, encoding: Encoding, counts: Conversion) -> Placed | None:
    """Sample with token positions instead of characters; None if its marker, or every target, is covered by
    no token.

    Arguments:
        sample: the sample.
        encoding: its tokenised text.
        counts: counts of the conversion, which are updated.
    """
    marker, *targets = encoding.convert_positions([sample.marker_char_pos, *sample.target_char_positions])
    counts.total_samples += 1
    counts.fuzzy_matches += sum(
        position.token_idx is not None and not position.exact_match for position in (marker, *targets)
    )
    if marker.token_idx is None:
        counts.failed_conversions += 1
        return None
    target_tokens = tuple(position.token_idx for position in targets if position.token_idx is not None)
    if not target_tokens:
        return None
    counts.successful_conversions += 1
    return Placed(sample, marker.token_idx, target_tokens)


def _with_repetition(name: str, before: str, sentence: str) -> Sample:
    """Sample of a text `before` followed by the first SAID_AGAIN words of `sentence`; its target is the word
    of `before` at index SAID_AGAIN."""
    again = " ".join(sentence.split()[:SAID_AGAIN])
    code = f"{before} {again}"
    target = len(" ".join(before.split()[:SAID_AGAIN])) + 1
    return Sample(name, code, len(code) - 1, code[-1], (target,))


def _read(record: Any, condition: str, unit: str) -> Sample:
    """Sample of a record of a corpus file, with positions in characters; raises an error for an invalid
    record."""
    from ....stages.forward.text.tokens import byte_positions, byte_to_char

    try:
        positions = [int(record["marker_char_pos"]), *map(int, record["target_char_positions"])]
        name, code, pattern = str(record["id"]), str(record["code"]), str(record.get("marker_pattern", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected samples of {condition!r} with id, code, marker_char_pos (a number) and "
            f"target_char_positions (numbers), found one with a field missing or of another type: {error!r}"
        ) from error
    size = len(code) if unit == "characters" else byte_positions(code)[-1]
    if outside := [position for position in positions if not 0 <= position < size]:
        raise PromptError(
            f"sample {name!r} of {condition!r}: expected positions in 0..{size - 1}, found {outside[0]} "
            f"({unit}); correct it, or set unit to what positions count: characters or bytes"
        )
    if unit == "bytes":
        positions = [byte_to_char(code, position) for position in positions]
    if pattern and not code.startswith(pattern, positions[0]):
        text_at_marker = code[positions[0] : positions[0] + len(pattern)]
        raise PromptError(
            f"sample {name!r} of {condition!r}: expected its marker {pattern!r} at character "
            f"{positions[0]}, found {text_at_marker!r}; if positions count bytes, set unit=bytes"
        )
    return Sample(name, code, positions[0], pattern, tuple(positions[1:]))
