"""Texts with a marker and places it may look at, by characters: from a corpus file, or made of prose.

Border: texts and characters, and the tokens of one tokenizer they turn into; loads no model.

A corpus is plip-rs' "universal" JSON: {"_format_version": "2.0", "python_doctest": [sample, …], "rust_test":
[…], …}, a sample {"id", "code", "marker_char_pos", "marker_pattern", "target_char_positions"}. Characters are
counted as Python counts them, or in bytes as Rust does.
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
"""Words of the sentences that samples are made of."""
SAID_AGAIN = 5
"""Words said again."""


@dataclass(frozen=True)
class Sample:
    """A text, the character its marker stands at, and the characters of what it may look at."""

    id: str
    code: str
    marker_char_pos: int
    marker_pattern: str
    target_char_positions: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A sample in tokens: position of the marker, positions of the targets."""

    sample: Sample
    marker: int
    targets: tuple[int, ...]


@dataclass
class Conversion:
    """How characters became tokens, as plip-rs counts it: samples whose marker and a target were placed,
    samples whose marker was not, and characters that no token covers, placed at the nearest."""

    total_samples: int = 0
    successful_conversions: int = 0
    failed_conversions: int = 0
    fuzzy_matches: int = 0

    def to_json(self) -> dict[str, int]:
        """The four counts."""
        return asdict(self)


def read_samples(path: str, conditions: Sequence[str], *, unit: str) -> tuple[str, list[list[Sample]]]:
    """The format version of a corpus file, and its samples of each of some conditions.

    unit: of the positions, "characters" or "bytes" (of the text in UTF-8).
    Raises ConfigError for a file that is no such corpus or has no such condition, PromptError for a position
    outside of its text, or a marker that does not stand where it should.
    """
    file = Path(path).expanduser()
    held = json_file(file, ConfigError, "name a corpus of samples as JSON")
    groups = (
        {name: group for name, group in held.items() if isinstance(group, list)}
        if isinstance(held, dict)
        else {}
    )
    found = []
    for name in conditions:
        if name not in groups:
            near = nearest(name, groups)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"expected a condition among {', '.join(groups) or 'none'} of {path!r}, found {name!r}{hint}"
            )
        found.append([_read(one, name, unit) for one in groups[name]])
    return str(held.get("_format_version", "1.0")), found


def repeated_samples(text: str, samples: int) -> tuple[list[Sample], list[Sample]]:
    """Sentences of a text whose beginning is said again, and the same beginnings after another sentence.

    The marker is where the text ends; its target the word that came next the first time, or the word in the
    same place of the other sentence. No sentence is in both lists.
    Raises PromptError for a text with too few sentences of a middling length.
    """
    sentences = [" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s+", text)]
    sentences = [one for one in sentences if SENTENCE[0] <= len(one.split()) <= SENTENCE[1]]
    if len(sentences) < 3 * samples:
        raise PromptError(
            f"expected {3 * samples} sentences of {SENTENCE[0]} to {SENTENCE[1]} words, found "
            f"{len(sentences)}; ask for fewer samples"
        )
    own, others, before = (sentences[start : 3 * samples : 3] for start in range(3))
    repeated = [_said_again(f"repeated_{i}", one, one) for i, one in enumerate(own)]
    return repeated, [
        _said_again(f"other_{i}", *pair) for i, pair in enumerate(zip(before, others, strict=True))
    ]


def place(sample: Sample, encoding: Encoding, told: Conversion) -> Placed | None:
    """A sample in tokens, counted in `told`; None where its marker or all of its targets become none."""
    marker, *targets = encoding.convert_positions([sample.marker_char_pos, *sample.target_char_positions])
    told.total_samples += 1
    told.fuzzy_matches += sum(one.token_idx is not None and not one.exact_match for one in (marker, *targets))
    if marker.token_idx is None:
        told.failed_conversions += 1
        return None
    placed = tuple(one.token_idx for one in targets if one.token_idx is not None)
    if not placed:
        return None
    told.successful_conversions += 1
    return Placed(sample, marker.token_idx, placed)


def _said_again(name: str, before: str, sentence: str) -> Sample:
    again = " ".join(sentence.split()[:SAID_AGAIN])
    code = f"{before} {again}"
    target = len(" ".join(before.split()[:SAID_AGAIN])) + 1
    return Sample(name, code, len(code) - 1, code[-1], (target,))


def _read(given: Any, condition: str, unit: str) -> Sample:
    """One sample of a file, its positions in characters, checked."""
    from ....stages.forward.text.tokens import byte_positions, byte_to_char

    try:
        positions = [int(given["marker_char_pos"]), *map(int, given["target_char_positions"])]
        name, code, pattern = str(given["id"]), str(given["code"]), str(given.get("marker_pattern", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected samples of {condition!r} with id, code, marker_char_pos and target_char_positions, "
            f"found one without: {error}"
        ) from error
    size = len(code) if unit == "characters" else byte_positions(code)[-1]
    if outside := [one for one in positions if not 0 <= one < size]:
        raise PromptError(
            f"sample {name!r} of {condition!r}: expected positions in 0..{size - 1}, found {outside[0]} "
            f"({unit}); is it of another text?"
        )
    if unit == "bytes":
        positions = [byte_to_char(code, one) for one in positions]
    if pattern and not code.startswith(pattern, positions[0]):
        stands = code[positions[0] : positions[0] + len(pattern)]
        raise PromptError(
            f"sample {name!r} of {condition!r}: expected its marker {pattern!r} at character "
            f"{positions[0]}, found {stands!r}; if positions count bytes, set unit=bytes"
        )
    return Sample(name, code, positions[0], pattern, tuple(positions[1:]))
