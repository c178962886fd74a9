"""Which characters does each token cover? Characters to tokens and back, for one text and one tokenizer.

Only the tokenizer is used; no model is loaded. Characters are Python's (code points), not bytes; special
tokens that the tokenizer adds, such as BOS, cover no character.

Defaults: "The Eiffel Tower is located in Paris, France." with its place names as ranges; for another text its
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from ...stages.logits.lens import format_text, format_token
from ...store.errors import ConfigError
from ...store.reading.characters import words
from ..material.answers import encoded
from ..settings import FileSettings, setting
from ..subject import Subject
from ..views import Data, Figure, Strip, Table, View, dash
from ..workflow import Workflow

if TYPE_CHECKING:
    from ...stages.forward.models.model import Model
    from ...store import Store

__all__ = ["TokenPositionsSettings", "TokenPositions"]

TEXT = "The Eiffel Tower is located in Paris, France."
"""Default text that is tokenized."""
CHARACTERS = (0, 4, 11, 31, 38, 44)
"""Characters to look up in the default text."""
SPANS = ("Eiffel Tower=4-16", "Paris=31-36", "France=38-44")
"""Ranges to label in the default text."""
CONVERTED = (4, 16, 31, 36, 99)
"""Character indices to convert to token positions in the default text; 99 is past its end."""
REVERSED = 5
"""Number of tokens, from the first on, whose characters are listed in the caption."""


@dataclass(frozen=True)
class TokenPositionsSettings(FileSettings):
    """Settings of the workflow `token_positions`: the text, and the characters to look up in it."""

    text: str = setting(TEXT, "text to tokenize")
    characters: tuple[int, ...] | None = setting(
        None, "indices of characters to look up; none: first characters of words"
    )
    spans: tuple[str, ...] | None = setting(
        None, 'ranges of characters to label, "name=start-end"; none: the words'
    )
    convert: tuple[int, ...] | None = setting(
        None, "indices of characters to convert to positions; none: those of `characters`"
    )


class TokenPositions(Workflow):
    """Workflow that shows the tokens of one text, and converts characters to token positions and back.

    Raises:
        ConfigError: a range that is not written as "name=start-end".
        PromptError: a text without tokens, or with more than the model reads.
        TokenizerError: a range that is empty or outside the text.
    """

    name = "token_positions"
    question = "Which characters does each token cover?"
    descriptive = "Which characters each token stands for."
    settings_type = TokenPositionsSettings
    settings: TokenPositionsSettings

    def __init__(self, settings: TokenPositionsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(settings.reference(model))
        self.encoding = encoded(self.subject, settings.text)
        word_ranges = words(settings.text)
        word_starts = tuple(start for start, _ in word_ranges)
        word_spans = tuple(f"{settings.text[a:b]}={a}-{b}" for a, b in word_ranges)
        # The defaults of the shipped text; those of any other text are its words.
        is_shipped = settings.text == TEXT
        self.characters = _or_default(settings.characters, CHARACTERS if is_shipped else word_starts)
        spans = _or_default(settings.spans, SPANS if is_shipped else word_spans)
        self.spans = [read_span(span) for span in spans]
        self.converted = _or_default(settings.convert, CONVERTED if is_shipped else self.characters)
        self.labels = self.encoding.label_spans([(name, (start, end)) for name, start, end in self.spans])
        self.nodes = {}
        # No stage runs; the answer is identified by the tokenizer's digest in place of result keys.
        self._keys = {"tokenizer": self.subject.tokenizer.digest.removeprefix("sha256:")}

    def run(self, store: Store, **options: Any) -> Self:
        """Computes nothing: the text was tokenized when the workflow was built."""
        return self

    @property
    def summary(self) -> str:
        """See `Workflow`: number of tokens, and the one that covers most characters."""
        encoding, text = self.encoding, self.settings.text
        start, end = max(encoding.offsets, key=lambda span: span[1] - span[0])
        return (
            f"The {len(text)} characters of the text are {len(encoding)} tokens, {sum(encoding.special)} of "
            f"them special; the longest is {format_token(text[start:end])!r} with {end - start} characters."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: tables of tokens, of characters to tokens, of ranges and of converted
        positions; the text with its tokens."""
        encoding, text, name = self.encoding, self.settings.text, self.subject.name
        pieces = self.subject.token_texts(encoding.ids)
        digest = self.subject.tokenizer.digest
        yield Data(json={"model_id": name, "tokenizer": digest, "text": text, "unit": "characters"})
        tokens = [
            {
                "position": i,
                "token_id": encoding.ids[i],
                "token": pieces[i],
                "piece": encoding.tokens[i],
                "start": start,
                "end": end,
                "is_special": encoding.special[i],
                "label": self.labels[i],
            }
            for i, (start, end) in enumerate(encoding.offsets)
        ]
        yield Table.of(
            tokens,
            ("position", "position", "d"),
            ("id", "token_id", "d"),
            ("token", lambda row: f"'{format_token(row['token'])}'"),
            ("piece", lambda row: format_token(row["piece"])),
            ("characters", lambda row: "–" if row["is_special"] else f"{row['start']}-{row['end']}"),
            ("label", lambda row: format_text(row["label"])),
            title=f"Tokens of '{format_text(text)}' by the tokenizer of {name}",
            caption="One row per token. Piece: the token as the tokenizer's vocabulary writes it. "
            "Characters: half-open range start-end of the text that the token covers; a dash for special "
            "tokens that were added. Label: name of the range that the token belongs to.",
            json={"tokens": tokens},
        )
        characters = [
            {
                "char_pos": char,
                "token": encoding.char_to_token(char),
                "fuzzy": encoding.char_to_token_fuzzy(char),
                "starts_at_or_after": encoding.char_to_token_start(char),
            }
            for char in self.characters
        ]
        char_ranges = (encoding.token_to_char_range(i) for i in range(min(REVERSED, len(encoding))))
        yield Table.of(
            characters,
            ("character", "char_pos", "d"),
            ("is", lambda row: repr(text[row["char_pos"]]) if 0 <= row["char_pos"] < len(text) else "–"),
            ("exact", lambda row: dash(row["token"]), str),
            ("nearest", lambda row: dash(row["fuzzy"]), str),
            ("first at or after", lambda row: dash(row["starts_at_or_after"]), str),
            title="Character to token",
            caption="One row per character of the text. Numbers are token positions. Exact: the token that "
            "covers the character. Nearest: that token or, if there is none, the nearest one. First at or "
            "after: the first token that starts at the character or later. Characters that the first "
            f"{REVERSED} tokens cover: "
            + ", ".join(f"{a}-{b} (token {i})" for i, (a, b) in enumerate(char_ranges))
            + ".",
            json={"characters": characters},
        )
        ranges = [
            {
                "name": span_name,
                "start": start,
                "end": end,
                "text": text[start:end],
                "tokens": encoding.char_range_to_tokens(start, end),
            }
            for span_name, start, end in self.spans
        ]
        yield Table.of(
            ranges,
            ("name", lambda row: format_text(row["name"])),
            ("characters", lambda row: f"{row['start']}-{row['end']}"),
            ("tokens", lambda row: ", ".join(map(str, row["tokens"]))),
            title="Tokens of each range",
            caption="One row per named range of characters. Tokens: positions of all tokens that overlap it; "
            "the last one has the label NAME_final in the table of tokens.",
            json={"ranges": ranges},
        )
        converted = [asdict(position) for position in encoding.convert_positions(self.converted)]
        yield Table.of(
            converted,
            ("character", "char_pos", "d"),
            ("position", lambda row: dash(row["token_idx"]), str),
            ("piece", lambda row: format_token(row["token"] or "–")),
            ("exact", lambda row: "yes" if row["exact_match"] else "nearest", str),
            title="Characters converted to token positions",
            caption="One row per character index. Position: that of the token that covers the character or, "
            "if no token does, of the nearest one. Piece: that token.",
            json={"converted": converted},
        )
        # The last token of a range has a label of its own, but the colour of the range.
        names = (label.removesuffix("_final") for label in self.labels)
        spans = tuple("" if label == "other" else label for label in names)
        added = [format_token(pieces[i]) for i, (start, end) in enumerate(encoding.offsets) if end <= start]
        note = f" Tokens without characters: {', '.join(added)}." if added else ""
        coloured = ", ".join(filter(None, dict.fromkeys(spans)))
        yield Figure(
            name="token_positions",
            title=f"{len(encoding)} tokens of {name}",
            caption=f"The text with the extent of each token. Numbers are token positions.{note}"
            + (f" Coloured: the named ranges {coloured}." if coloured else ""),
            panels=(Strip(text=text, offsets=tuple(encoding.offsets), spans=spans),),
        )


def read_span(written: str) -> tuple[str, int, int]:
    """(name, start, end) of a range written as "name=start-end"; the name of "start-end" is "start-end"
    itself.

    Raises ConfigError for another format.

    >>> read_span("Paris=31-36")
    ('Paris', 31, 36)
    """
    # At most 18 digits, which fit in int64.
    match = re.fullmatch(r"(?:(?P<name>.+)=)?(?P<start>\d{1,18})-(?P<end>\d{1,18})", written, re.DOTALL)
    if not match:
        raise ConfigError(f'expected spans as "name=start-end" in characters, found {written!r}')
    start, end = int(match["start"]), int(match["end"])
    return match["name"] or f"{start}-{end}", start, end


def _or_default(value: tuple[Any, ...] | None, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """The value, or the default for None; an empty tuple stays empty."""
    return default if value is None else value
