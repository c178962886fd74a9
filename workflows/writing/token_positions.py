"""Which characters does each token cover? Characters to tokens and back, for one text and one tokenizer.

Needs no model to run: the tokenizer alone answers. Characters are counted as Python counts them, never in
bytes; tokens that a tokenizer adds (a BOS) stand for no character.

Defaults: "The Eiffel Tower is located in Paris, France." and its landmarks; for another text its words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from ...stages.corpus.positions import words
from ...stages.logits.lens import format_text, format_token
from ...store.errors import ConfigError, PromptError
from ..material.answers import encoded, named
from ..settings import FileSettings, setting
from ..subject import Subject
from ..views import Data, Figure, Strip, Table, View, dash
from ..workflow import Workflow

if TYPE_CHECKING:
    from ...stages.forward.models.model import Model
    from ...store import Store

__all__ = ["TokenPositionsSettings", "TokenPositions"]

TEXT = "The Eiffel Tower is located in Paris, France."
CHARACTERS = (0, 4, 11, 31, 38, 44)
SPANS = ("Eiffel Tower=4-16", "Paris=31-36", "France=38-44")
CONVERTED = (4, 16, 31, 36, 99)
REVERSED = 5
"""Tokens mapped back in the table."""


@dataclass(frozen=True)
class TokenPositionsSettings(FileSettings):
    """What `--set` can change."""

    text: str = setting(TEXT, "text to place tokens in")
    characters: tuple[int, ...] | None = setting(None, "characters to look up; none: where words begin")
    spans: tuple[str, ...] | None = setting(None, 'ranges to label, "name=start-end"; none: the words')
    convert: tuple[int, ...] | None = setting(None, "characters to convert to positions; none: as looked up")


class TokenPositions(Workflow):
    """One text and its tokens."""

    name = "token_positions"
    question = "Which characters does each token cover?"
    descriptive = "Which characters each token stands for."
    settings_type = TokenPositionsSettings
    settings: TokenPositionsSettings

    def __init__(self, settings: TokenPositionsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(settings.reference(model))
        if not settings.text:
            raise PromptError("expected a text, found an empty one")
        self.encoding = encoded(self.subject, settings.text)
        is_default = settings.text == TEXT
        own = words(settings.text)
        starts = tuple(start for start, _ in own)
        named_spans = tuple(f"{settings.text[a:b]}={a}-{b}" for a, b in own)
        self.characters = _given(settings.characters, CHARACTERS if is_default else starts)
        self.spans = [read_span(one) for one in _given(settings.spans, SPANS if is_default else named_spans)]
        self.converted = _given(settings.convert, CONVERTED if is_default else self.characters)
        self.labels = self.encoding.label_spans([(name, (start, end)) for name, start, end in self.spans])
        self.nodes = {}
        self._keys = {"tokenizer": self.subject.tokenizer.digest.removeprefix("sha256:")}

    def run(self, store: Store, **options: Any) -> Self:
        """Nothing runs: the tokenizer has answered already."""
        return self

    def views(self) -> Iterator[View]:
        """The tokens, the characters looked up, the ranges, and the positions converted."""
        encoding, text, name = self.encoding, self.settings.text, self.subject.name
        pieces = named(self.subject, encoding.ids)
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
            ("token", lambda one: f"'{format_token(one['token'])}'"),
            ("piece", lambda one: format_token(one["piece"])),
            ("characters", lambda one: "–" if one["is_special"] else f"{one['start']}-{one['end']}"),
            ("label", lambda one: format_text(one["label"])),
            title=f"'{format_text(text)}' for {name}",
            caption="characters are half-open ranges; a token that was added stands for none",
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
        back = (encoding.token_to_char_range(i) for i in range(min(REVERSED, len(encoding))))
        yield Table.of(
            characters,
            ("character", "char_pos", "d"),
            ("is", lambda one: repr(text[one["char_pos"]]) if 0 <= one["char_pos"] < len(text) else "–"),
            ("exact", lambda one: dash(one["token"]), str),
            ("nearest", lambda one: dash(one["fuzzy"]), str),
            ("next to start", lambda one: dash(one["starts_at_or_after"]), str),
            title="Character to token",
            caption="and back: " + ", ".join(f"{i} is {a}-{b}" for i, (a, b) in enumerate(back)),
            json={"characters": characters},
        )
        ranges = [
            {
                "name": called,
                "start": start,
                "end": end,
                "text": text[start:end],
                "tokens": encoding.char_range_to_tokens(start, end),
            }
            for called, start, end in self.spans
        ]
        yield Table.of(
            ranges,
            ("name", lambda one: format_text(one["name"])),
            ("characters", lambda one: f"{one['start']}-{one['end']}"),
            ("tokens", lambda one: ", ".join(map(str, one["tokens"]))),
            title="Ranges",
            caption="all tokens that overlap a range; the last one of a name is labelled name_final",
            json={"ranges": ranges},
        )
        converted = [asdict(one) for one in encoding.convert_positions(self.converted)]
        yield Table.of(
            converted,
            ("character", "char_pos", "d"),
            ("position", lambda one: dash(one["token_idx"]), str),
            ("piece", lambda one: format_token(one["token"] or "–")),
            ("exact", lambda one: "yes" if one["exact_match"] else "nearest", str),
            title="Characters converted to positions",
            json={"converted": converted},
        )
        own = (label.removesuffix("_final") for label in self.labels)
        spans = tuple("" if label == "other" else label for label in own)
        added = [format_token(pieces[i]) for i, (start, end) in enumerate(encoding.offsets) if end <= start]
        note = f" Of no character: {', '.join(added)}." if added else ""
        coloured = ", ".join(filter(None, dict.fromkeys(spans)))
        yield Figure(
            name="token_positions",
            title=f"{len(encoding)} tokens of {name}",
            caption=f"Numbers are positions.{note}" + (f" Coloured: {coloured}." if coloured else ""),
            panels=(Strip(text=text, offsets=tuple(encoding.offsets), spans=spans),),
        )


def read_span(written: str) -> tuple[str, int, int]:
    """ "name=start-end", or "start-end", which is its own name, as (name, start, end).

    >>> read_span("Paris=31-36")
    ('Paris', 31, 36)
    """
    found = re.fullmatch(r"(?:(?P<name>.+)=)?(?P<start>\d{1,18})-(?P<end>\d{1,18})", written, re.DOTALL)
    if not found:
        raise ConfigError(f'expected spans as "name=start-end" in characters, found {written!r}')
    start, end = int(found["start"]), int(found["end"])
    return found["name"] or f"{start}-{end}", start, end


def _given(asked: tuple[Any, ...] | None, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    return otherwise if asked is None else asked
