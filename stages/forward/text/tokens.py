"""Tokenizer and Encoding: text to token ids and back, and the position of each token in the text.

The interface of all tokenizers. library.py (tokenizer.json) and world.py (RWKV World) find the tokens of a
text; tokenizer_config.json beside either gives the names of special tokens and the chat template. Never
imports torch.

Offsets count CHARACTERS of the prompt, half-open like Python slices; `byte_offsets` gives them in UTF-8
bytes. Tokens added by the post-processor (BOS, EOS) have the offsets (0, 0) and stand for no character. The
mapping between tokens and characters is in store/reading/characters.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....store.errors import PromptError, TokenizerError
from ....store.exchange.outside import read_outside
from ....store.reading.characters import CharacterSpans
from .declared import AddedToken, DeclaredTokens, read_settings
from .rows import as_ids, as_text

Span = tuple[int, int] | range
OTHER, FINAL = "other", "_final"
NOWHERE = (0, 0)
"""Character offsets of special tokens that cover no text."""
MASKS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
"""Usual texts of the mask token, where the settings name none."""


@dataclass(frozen=True)
class CharPosition:
    """Token that covers a character of a text, or the nearest token."""

    char_pos: int
    """Index of the character in the text."""
    token_idx: int | None
    """Position of the covering or nearest token; None for an empty text."""
    token: str | None
    """Text of this token in the vocabulary, e.g. "Ġis"; None for an empty text."""
    exact_match: bool
    """Whether the token covers the character."""


@dataclass(frozen=True)
class Encoding:
    """Token ids of a text, with the vocabulary entry and the characters of each token."""

    ids: list[int]
    """Token ids."""
    tokens: list[str]
    """Text of each token in the vocabulary, e.g. "Ġis"."""
    offsets: list[tuple[int, int]]
    """Character range (start, end) of each token in `text`; (0, 0) for special tokens added around it."""
    special: list[bool]
    """Whether each token was added around the text by the tokenizer, such as BOS."""
    text: str
    """The encoded text."""
    byte_spans: list[tuple[int, int]] | None = None
    """UTF-8 byte range (start, end) of each token, if tokens may end inside a character; None if not."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def byte_offsets(self) -> list[tuple[int, int]]:
        """Range (start, end) of each token in UTF-8 bytes of the text.

        Without `byte_spans`, a token is taken to cover whole characters.
        """
        if self.byte_spans is not None:
            return self.byte_spans
        byte_of = byte_positions(self.text)
        return [(byte_of[start], byte_of[end]) for start, end in self.offsets]

    @property
    def splits_character(self) -> list[bool]:
        """Whether each token begins or ends inside a character, which it shares with a neighbour."""
        splits = [False] * len(self)
        for current, following in pairwise(self.spans.placed.tolist()):
            # Neighbours that overlap share a character, of which each holds some bytes.
            if self.offsets[following][0] < self.offsets[current][1]:
                splits[current] = splits[following] = True
        return splits

    @cached_property
    def spans(self) -> CharacterSpans:
        """The offsets as an index that finds tokens by character."""
        start, end = zip(*self.offsets, strict=True) if self.offsets else ((), ())
        return CharacterSpans(start, end)

    def char_to_token(self, char: int) -> int | None:
        """First token that covers a character; None if none does."""
        return self.spans.char_to_token(char)

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """Token covering a character, else the token with the nearest centre (ties: the earlier token)."""
        return self.spans.char_to_token_fuzzy(char)

    def char_to_token_start(self, char: int) -> int | None:
        """First token with its start at the character or later; None without such a token."""
        return self.spans.char_to_token_start(char)

    def char_range_to_tokens(self, start: int, end: int) -> list[int]:
        """All tokens that overlap characters start … end-1.

        Arguments:
            start: first character.
            end: character after the last one.
        """
        return self.spans.char_range_to_tokens(start, end)

    def token_to_char_range(self, index: int) -> tuple[int, int]:
        """Character range (start, end) of a token; (0, 0) for special tokens such as BOS.

        Arguments:
            index: position of the token, counted from 0.

        Raises:
            TokenizerError: for a position that the text does not have.
        """
        if not 0 <= index < len(self):
            raise TokenizerError(
                f"expected a token position in 0..{len(self) - 1} of a text with {len(self)} tokens, found "
                f"{index}"
            )
        return self.offsets[index]

    def label_spans(self, spans: Iterable[tuple[str, Span]]) -> list[str]:
        """Label each token by the first named span of characters that it overlaps, or "other".

        The last token of each name gets the label "name_final", also where a name has several spans.

        Arguments:
            spans: (name, (start, end) or range) pairs, in characters.

        Raises:
            TokenizerError: for a span outside the text, or a name that is itself a label.
        """
        checked = [(name, *self._check_span(name, span)) for name, span in spans]
        labels = [OTHER] * len(self)
        for i in self.spans.placed.tolist():
            start, end = self.offsets[i]
            labels[i] = next((name for name, first, last in checked if end > first and start < last), OTHER)
        # Later tokens overwrite earlier ones, so that the last of each name is left.
        last_of = {name: i for i, name in enumerate(labels) if name != OTHER}
        for name, i in last_of.items():
            labels[i] = name + FINAL
        return labels

    def convert_positions(self, chars: Iterable[int]) -> list[CharPosition]:
        """Find the token of each character; a character without token gets the nearest one.

        Arguments:
            chars: indices of characters in the text.
        """
        positions = []
        for char in chars:
            index = self.char_to_token_fuzzy(char)
            token = None if index is None else self.tokens[index]
            positions.append(CharPosition(char, index, token, self.char_to_token(char) is not None))
        return positions

    def _check_span(self, name: str, span: Span) -> tuple[int, int]:
        start, end = (span.start, span.stop) if isinstance(span, range) else span
        if not 0 <= start < end <= len(self.text):
            raise TokenizerError(
                f"expected span {name!r} within the {len(self.text)} characters of the text, found "
                f"{start}..{end}; give character offsets, not byte offsets"
            )
        if name == OTHER or name.endswith(FINAL):
            raise TokenizerError(
                f'expected a span name other than "{OTHER}" and without the ending "{FINAL}", which are '
                f"labels themselves, found {name!r}; choose another name"
            )
        return start, end


class Tokenizer(ABC):
    """Converts text to token ids and back, adds BOS where the model expects it, and renders chat templates.

    Subclasses read the file with the vocabulary (library.py, world.py).
    """

    digest: str
    """`sha256:…` of everything that decides token ids and their texts."""

    def __init__(
        self,
        file: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        added: Mapping[int, AddedToken] | None = None,
        pad: str | None = None,
    ) -> None:
        """Read tokenizer_config.json from the folder of a vocabulary file.

        Arguments:
            file: file with the vocabulary.
            settings: content of tokenizer_config.json; None reads it from the folder of the file.
            name: name of the model; None for the name of the folder.
            added: id -> token, for tokens that the file adds to its vocabulary.
            pad: text of the padding token in the file; None without one.

        Raises:
            TokenizerError: for a missing or malformed file.
        """
        self.name = name or file.parent.name
        self._settings = dict(read_settings(file.parent) if settings is None else settings)
        self._declared = DeclaredTokens.of(self._settings, added or {}, pad)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size:,} tokens, {self.digest[:15]})"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens; a model's embedding may have more rows."""

    @property
    @abstractmethod
    def _end(self) -> int:
        """Highest token id plus one."""

    @abstractmethod
    def _id_of(self, text: str) -> int | None:
        """Token id of an exact token text; None for unknown texts."""

    @abstractmethod
    def _piece(self, token: int) -> str | None:
        """Text of a token id in the vocabulary, e.g. "Ġis"; None for an id without a token."""

    @abstractmethod
    def _encode(self, text: str, add_special: bool) -> Encoding:
        """Encode a text; `add_special` adds the special tokens of the model, such as BOS."""

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        return [self._encode(text, add_special) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Convert token ids to text.

        Arguments:
            ids: token ids.
            keep_special: whether special tokens are part of the text.

        Raises:
            TokenizerError: for an id without a token.
        """

    @abstractmethod
    def decode_token(self, token: int) -> str:
        """Text of one token as it reads inside a sentence.

        "" for an id without a token, as embeddings often have more rows than there are tokens.
        """

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token; None if the settings name none."""
        return self.special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token; None if the settings name none."""
        return self.special_id("eos_token")

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token, from tokenizer_config.json or by its usual texts; None without one."""
        candidates = [self.special_id("mask_token"), *map(self._id_of, MASKS)]
        return next((token for token in candidates if token is not None), None)

    def special_id(self, role: str) -> int | None:
        """Id of a special token by its role, e.g. "bos_token"; None if the model has no such token."""
        text = self._declared.texts.get(role)
        return None if text is None else self._id_of(text)

    def encode(self, text: str, *, add_special: bool = True, prepend_bos: bool | None = None) -> Encoding:
        """Encode a text as token ids.

        Arguments:
            text: a text.
            add_special: whether to add the special tokens of the model (BOS for Llama and Gemma, none for
                Qwen 2 and StarCoder 2).
            prepend_bos: True to begin with BOS and False not to, whatever the model's tokenizer does; None
                for what it does.

        Raises:
            PromptError: for a value that is no text.
            TokenizerError: for prepend_bos=True without a BOS token.
        """
        return self._place_bos(self._encode(as_text(text, self.name), add_special), prepend_bos)

    def encode_raw(self, text: str) -> Encoding:
        """Encode a text as token ids without adding special tokens such as BOS."""
        return self.encode(text, add_special=False)

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, prepend_bos: bool | None = None
    ) -> list[Encoding]:
        """Encode many texts at once, as `encode` does for each.

        Arguments:
            texts: the texts.
            add_special: whether to add the special tokens of the model.
            prepend_bos: True to begin with BOS, False not to; None for what the model's tokenizer does.
        """
        checked = [as_text(text, self.name) for text in texts]
        encodings = self._encode_batch(checked, add_special)
        return [self._place_bos(encoding, prepend_bos) for encoding in encodings]

    def ids_of(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """Token ids of many texts, without the character offsets that `encode_batch` gives.

        Arguments:
            texts: the texts.
            add_special: whether to add the special tokens of the model.
        """
        return [encoding.ids for encoding in self.encode_batch(texts, add_special=add_special)]

    def to_str_tokens(self, text: str, *, add_special: bool = True) -> list[str]:
        """Split a text into the texts of its tokens, e.g. ["The", " cat"].

        Arguments:
            text: a text.
            add_special: whether to add the special tokens of the model.
        """
        return [self.decode_token(token) for token in self.encode(text, add_special=add_special).ids]

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of every token by id; "" for an id without a token."""
        return [self.decode_token(token) for token in range(self._end)]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text of each token id in the vocabulary, e.g. "Ġis".

        Raises:
            TokenizerError: for an id without a token.
        """
        pieces = []
        for token in as_ids(ids):
            piece = self._piece(token)
            if piece is None:
                raise TokenizerError(
                    f"expected ids of the {self.vocab_size} tokens of {self.name}, found {token}; encode the "
                    "text with the tokenizer of this model"
                )
            pieces.append(piece)
        return pieces

    def find_token_id(self, word: str) -> int:
        """Token id of a single-token word, tried with a leading space (mid-sentence form), then without.

        Raises:
            TokenizerError: for a word that is several tokens either way, as the id of its last piece is
                another word; the message lists the pieces.
        """
        encodings: list[Encoding] = []
        # WordPiece encodes any unknown word as one token, [UNK], which must not count as a match.
        unknown = self.special_id("unk_token")
        # With a space first: inside a sentence most vocabularies have another token than at its start.
        for text in [f" {word}", word] if word else []:
            encodings.append(encoding := self.encode_raw(text))
            if len(encoding) == 1 and encoding.ids[0] != unknown:
                return encoding.ids[0]
        pieces = " or ".join(repr(encoding.tokens) for encoding in encodings) or "nothing"
        raise TokenizerError(
            f"expected {word!r} to be one token of {self.name}, found {pieces}; "
            "choose a word that is one token, or pass a token id"
        )

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation with the model's chat template.

        The template runs in jinja2's sandbox. The text already contains its special tokens: encode it with
        ``add_special=False``.

        Arguments:
            messages: the user's message, or [{"role": "user", "content": …}, …].
            system: system message to put first; None for none.
            add_generation_prompt: whether to end with the start of the assistant's turn.
            variables: further variables of the template, e.g. enable_thinking.

        Raises:
            TokenizerError: if the model has no template, or the template refuses the conversation.
        """
        from jinja2 import TemplateError

        template = self._chat_template()
        turns = _messages(messages)
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        context = {
            **self._declared.texts,
            # Defined as None, as transformers does, because some templates ask `tools is not none`.
            "tools": None,
            "documents": None,
            **variables,
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(_jinja().from_string(template).render(context))
        except TemplateError as error:
            raise TokenizerError(
                f"the chat template of {self.name} does not accept these messages: {error}; change the "
                "messages"
            ) from error

    def _chat_template(self) -> str:
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            named = {str(entry["name"]): entry["template"] for entry in template}
            # Several templates by name; transformers takes "default".
            template = named.get("default", next(iter(named.values()), None))
        if not isinstance(template, str):
            raise TokenizerError(
                f"expected a chat template of {self.name} in tokenizer_config.json or chat_template.jinja, "
                "found none; add the file of a chat model, or write the conversation as one text"
            )
        return template

    def _place_bos(self, encoding: Encoding, wanted: bool | None) -> Encoding:
        if wanted is None:
            return encoding
        bos = self.bos_id
        if bos is None:
            if not wanted:
                return encoding
            raise TokenizerError(
                f"prepend_bos=True: expected a BOS token in tokenizer_config.json of {self.name}, found "
                "none; leave prepend_bos out, or pass token ids that begin with the id you want"
            )
        has_bos = encoding.ids[:1] == [bos]
        if wanted and not has_bos:
            return replace(
                encoding,
                ids=[bos, *encoding.ids],
                tokens=[*self.pieces([bos]), *encoding.tokens],
                offsets=[NOWHERE, *encoding.offsets],
                special=[True, *encoding.special],
                byte_spans=None if encoding.byte_spans is None else [NOWHERE, *encoding.byte_spans],
            )
        # A BOS written out in the text is part of it; only one that was added is removed.
        if not wanted and has_bos and encoding.special[0]:
            return replace(
                encoding,
                ids=encoding.ids[1:],
                tokens=encoding.tokens[1:],
                offsets=encoding.offsets[1:],
                special=encoding.special[1:],
                byte_spans=None if encoding.byte_spans is None else encoding.byte_spans[1:],
            )
        return encoding


def _messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as a list of messages; a plain text is the user's message."""
    if isinstance(messages, str):
        return [{"role": "user", "content": as_text(messages, "the message")}]
    if not isinstance(messages, list | tuple) or not all(isinstance(turn, Mapping) for turn in messages):
        raise PromptError(
            'expected messages as a text, or as [{"role": "user", "content": "…"}], found '
            f"{type(messages).__name__}; pass one of these"
        )
    return [dict(message) for message in messages]


def byte_positions(text: str) -> list[int]:
    """UTF-8 byte position of each character of a text, then of its end; len(text) + 1 numbers.

    >>> byte_positions("né!")
    [0, 1, 3, 4]
    """
    positions = [0]
    for char in text:
        # surrogatepass: half a surrogate pair has a length, too, and is refused elsewhere.
        positions.append(positions[-1] + len(char.encode("utf-8", "surrogatepass")))
    return positions


def byte_to_char(text: str, byte: int) -> int:
    """Index of the character that a UTF-8 byte of a text belongs to; len(text) for the end of the text.

    Arguments:
        text: a text.
        byte: position in its UTF-8 bytes.

    Raises:
        TokenizerError: for a byte beyond the end.
    """
    positions = byte_positions(text)
    if not 0 <= byte <= positions[-1]:
        raise TokenizerError(
            f"expected a byte position in 0..{positions[-1]} of the text, found {byte}; pass the text that "
            "the position was counted in"
        )
    return bisect_right(positions, byte) - 1


def read_tokenizer(file: Path) -> bytes:
    """Bytes of a tokenizer file; TokenizerError if it does not exist."""
    return read_outside(file, TokenizerError, "add the file, or pass token ids instead of text")


def _jinja() -> Any:
    """Environment for chat templates, which come with models from anyone and so run in a sandbox."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """The tag {% generation %} around an assistant's text, for training; renders its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own way to name them

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(inside).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        # The settings with which transformers renders chat templates.
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, loopcontrols],
    )
    # jinja's own filter escapes HTML characters; transformers' templates expect plain JSON.
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
