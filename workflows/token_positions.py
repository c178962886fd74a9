"""Which token stands where? Characters to tokens and back, for one text and one tokenizer.

Needs no model to run: the tokenizer alone answers. Characters are counted as Python counts them, never in
bytes; tokens that a tokenizer adds (a BOS) stand for no character.

Defaults: "The Eiffel Tower is located in Paris, France." and its landmarks; for another text its words.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..stages.positions import words
from ..store.errors import ConfigError, PromptError
from .answers import encoded, named, plain
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import Store

__all__ = ["Settings", "TokenPositions"]

TEXT = "The Eiffel Tower is located in Paris, France."
CHARACTERS = (0, 4, 11, 31, 38, 44)
SPANS = ("Eiffel Tower=4-16", "Paris=31-36", "France=38-44")
CONVERTED = (4, 16, 31, 36, 99)
REVERSED = 5
"""Tokens mapped back in the table."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen": whose tokenizer')
    text: str = setting(TEXT, "text to place tokens in")
    characters: tuple[int, ...] | None = setting(None, "characters to look up; none: where words begin")
    spans: tuple[str, ...] | None = setting(None, 'ranges to label, "name=start-end"; none: the words')
    convert: tuple[int, ...] | None = setting(None, "characters to convert to positions; none: as looked up")


class TokenPositions(Workflow):
    """One text and its tokens."""

    name = "token_positions"
    question = "Which token stands where?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model)
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

    def tables(self) -> list[Table]:
        """The tokens, the characters looked up, the ranges, and the positions converted."""
        return [self._tokens_table(), self._characters_table(), self._spans_table(), self._converted_table()]

    def draw(self, folder: Path) -> list[Path]:
        """The text cut into its tokens."""
        from .figures_attention import tokens_strip

        return [
            self.figure(
                folder / "token_positions.png",
                lambda: tokens_strip(
                    self.settings.text,
                    self.encoding.offsets,
                    named(self.subject, self.encoding.ids),
                    self.labels,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything the tables show, for every token."""
        encoding, text = self.encoding, self.settings.text
        pieces = named(self.subject, encoding.ids)
        return {
            **self.header(),
            "model_id": self.subject.name,
            "tokenizer": self.subject.tokenizer.digest,
            "text": text,
            "unit": "characters",
            "tokens": [
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
            ],
            "characters": [
                {
                    "char_pos": char,
                    "token": encoding.char_to_token(char),
                    "fuzzy": encoding.char_to_token_fuzzy(char),
                    "starts_at_or_after": encoding.char_to_token_start(char),
                }
                for char in self.characters
            ],
            "ranges": [
                {
                    "name": name,
                    "start": start,
                    "end": end,
                    "text": text[start:end],
                    "tokens": encoding.char_range_to_tokens(start, end),
                }
                for name, start, end in self.spans
            ],
            "converted": [asdict(one) for one in encoding.convert_positions(self.converted)],
        }

    def _tokens_table(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"{plain(self.settings.text)!r} for {self.subject.name}", box=None, pad_edge=False
        )
        for column in ("position", "id", "token", "piece", "characters", "label"):
            table.add_column(
                column, justify="right" if column in ("position", "id") else "left", no_wrap=True
            )
        texts = named(self.subject, self.encoding.ids)
        for i, (start, end) in enumerate(self.encoding.offsets):
            span = "–" if self.encoding.special[i] else f"{start}-{end}"
            row = (str(i), str(self.encoding.ids[i]), plain(repr(texts[i])), plain(self.encoding.tokens[i]))
            table.add_row(*row, span, plain(self.labels[i]))
        table.caption = "characters are half-open ranges; a token that was added stands for none"
        return table

    def _characters_table(self) -> Table:
        from rich.table import Table

        encoding, text = self.encoding, self.settings.text
        table = Table(title="Character to token", box=None, pad_edge=False)
        for column in ("character", "is", "exact", "nearest", "next to start"):
            table.add_column(column, justify="left" if column == "is" else "right", no_wrap=True)
        for char in self.characters:
            is_ = repr(text[char]) if 0 <= char < len(text) else "–"
            lookups = (
                encoding.char_to_token(char),
                encoding.char_to_token_fuzzy(char),
                encoding.char_to_token_start(char),
            )
            table.add_row(str(char), plain(is_), *(_or_dash(found) for found in lookups))
        back = [encoding.token_to_char_range(i) for i in range(min(REVERSED, len(encoding)))]
        table.caption = "and back: " + ", ".join(f"{i} is {a}-{b}" for i, (a, b) in enumerate(back))
        return table

    def _spans_table(self) -> Table:
        from rich.table import Table

        table = Table(title="Ranges", box=None, pad_edge=False)
        for column in ("name", "characters", "tokens"):
            table.add_column(column, no_wrap=column != "tokens")
        for name, start, end in self.spans:
            tokens = self.encoding.char_range_to_tokens(start, end)
            table.add_row(plain(name), f"{start}-{end}", ", ".join(map(str, tokens)))
        table.caption = "all tokens that overlap a range; the last one of a name is labelled name_final"
        return table

    def _converted_table(self) -> Table:
        from rich.table import Table

        table = Table(title="Characters converted to positions", box=None, pad_edge=False)
        for column in ("character", "position", "piece", "exact"):
            table.add_column(column, justify="left" if column == "piece" else "right", no_wrap=True)
        for one in self.encoding.convert_positions(self.converted):
            exact = "yes" if one.exact_match else "nearest"
            table.add_row(str(one.char_pos), _or_dash(one.token_idx), plain(one.token or "–"), exact)
        return table


def read_span(written: str) -> tuple[str, int, int]:
    """ "name=start-end", or "start-end", which is its own name, as (name, start, end).

    >>> read_span("Paris=31-36")
    ('Paris', 31, 36)
    """
    found = re.fullmatch(r"(?:(?P<name>.+)=)?(?P<start>\d+)-(?P<end>\d+)", written, re.DOTALL)
    if not found:
        raise ConfigError(f'expected spans as "name=start-end" in characters, found {written!r}')
    start, end = int(found["start"]), int(found["end"])
    return found["name"] or f"{start}-{end}", start, end


def _given(asked: tuple[Any, ...] | None, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    return otherwise if asked is None else asked


def _or_dash(index: int | None) -> str:
    return "–" if index is None else str(index)


WORKFLOW = TokenPositions
