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
    """Token position of one character, exact or nearest."""

    char_pos: int
    """The character."""
    token_idx: int | None
    """Position of the covering or nearest token; None for an empty text."""
    token: str | None
    """Vocabulary piece of that token."""
    exact_match: bool
    """Whether the token covers the character."""


@dataclass(frozen=True)
class Encoding:
    """Token ids of a text, with their pieces and positions."""

    ids: list[int]
    """Token ids."""
    tokens: list[str]
    """Vocabulary pieces, e.g. "Ġis"."""
    offsets: list[tuple[int, int]]
    """Character range (start, end) of each token in `text`; (0, 0) for special tokens added around it."""
    special: list[bool]
    """Whether a token was added by the post-processor."""
    text: str
    """The encoded text."""
    byte_spans: list[tuple[int, int]] | None = None
    """Offsets in UTF-8 bytes, where tokens may end inside a character; None elsewhere."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def byte_offsets(self) -> list[tuple[int, int]]:
        """Offsets in UTF-8 bytes of the text; those of whole characters where there are no `byte_spans`."""
        if self.byte_spans is not None:
            return self.byte_spans
        at = byte_positions(self.text)
        return [(at[start], at[end]) for start, end in self.offsets]

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
        """The offsets, in a form that finds tokens by character."""
        start, end = zip(*self.offsets, strict=True) if self.offsets else ((), ())
        return CharacterSpans(start, end)

    def char_to_token(self, char: int) -> int | None:
        """First token that covers a character; None if none does."""
        return self.spans.char_to_token(char)

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """Token covering a character, else the token with the nearest centre (ties: the earlier token)."""
        return self.spans.char_to_token_fuzzy(char)

    def char_to_token_start(self, char: int) -> int | None:
        """First token that starts at a character or later."""
        return self.spans.char_to_token_start(char)

    def char_range_to_tokens(self, start: int, end: int) -> list[int]:
        """All tokens that overlap characters start … end-1.

        Arguments:
            start: first character.
            end: character after the last one.
        """
        return self.spans.char_range_to_tokens(start, end)

    def token_to_char_range(self, index: int) -> tuple[int, int]:
        """Characters of a token, (0, 0) for BOS and similar ones. Raises TokenizerError out of range."""
        if not 0 <= index < len(self):
            raise TokenizerError(
                f"expected a token position in 0..{len(self) - 1}, found {index}; the text has {len(self)} "
                "tokens"
            )
        return self.offsets[index]

    def label_spans(self, spans: Iterable[tuple[str, Span]]) -> list[str]:
        """One label per token: the first span that it overlaps, or "other".

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
        """Token position of each character; uncovered characters map to the nearest (exact_match=False)."""
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
                f"expected span {name!r} to lie within the text's {len(self.text)} characters, found "
                f"{start}..{end}; are these byte offsets?"
            )
        if name == OTHER or name.endswith(FINAL):
            raise TokenizerError(
                f"expected a span with a name of its own, found {name!r}, which is a label; choose another "
                "name"
            )
        return start, end


class Tokenizer(ABC):
    """Text to token ids and back, with the model's BOS rule and chat template.

    Subclasses read the file that holds the tokens (library.py, world.py).
    """

    digest: str
    """`sha256:…` of everything that decides ids and pieces."""

    def __init__(
        self,
        file: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        added: Mapping[int, AddedToken] | None = None,
        pad: str | None = None,
    ) -> None:
        """Read the settings beside a tokenizer's file.

        Arguments:
            file: file that holds the tokens.
            settings: content of tokenizer_config.json; None reads it beside the file.
            name: name of the model; None for that of the folder.
            added: id -> token of those that the file adds to its vocabulary.
            pad: text of the file's padding token; None without.

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
        """Number of tokens, added ones included; a model's embedding may have more rows."""

    @property
    @abstractmethod
    def _end(self) -> int:
        """Highest token id plus one."""

    @abstractmethod
    def _id_of(self, text: str) -> int | None:
        """Token id of an exact token text; None for unknown texts."""

    @abstractmethod
    def _piece(self, token: int) -> str | None:
        """Vocabulary piece of an id; None for an id without a token."""

    @abstractmethod
    def _encode(self, text: str, add_special: bool) -> Encoding:
        """Tokens of a text, with those of the post-processor if `add_special`."""

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        return [self._encode(text, add_special) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Text of token ids. Raises TokenizerError for an id without a token.

        Arguments:
            ids: token ids.
            keep_special: whether special tokens are part of the text.
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
        declared = self.special_id("mask_token")
        usual = (self._id_of(text) for text in MASKS)
        return declared if declared is not None else next((t for t in usual if t is not None), None)

    def special_id(self, role: str) -> int | None:
        """Id of a special token by its role, e.g. "bos_token"; None where the model has none."""
        text = self._declared.texts.get(role)
        return None if text is None else self._id_of(text)

    def encode(self, text: str, *, add_special: bool = True, prepend_bos: bool | None = None) -> Encoding:
        """Tokens of a text.

        Arguments:
            text: a text.
            add_special: whether to add the tokens of the model's post-processor (BOS for Llama and Gemma,
                none for Qwen 2 and StarCoder 2).
            prepend_bos: True to begin with BOS and False not to, whatever the post-processor does; None
                leaves it to the post-processor.

        Raises:
            PromptError: for a value that is no text.
            TokenizerError: for prepend_bos=True without a BOS token.
        """
        return self._place_bos(self._encode(as_text(text, self.name), add_special), prepend_bos)

    def encode_raw(self, text: str) -> Encoding:
        """Tokens of a text without any special token."""
        return self.encode(text, add_special=False)

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, prepend_bos: bool | None = None
    ) -> list[Encoding]:
        """`encode` for many texts at once.

        Arguments:
            texts: the texts.
            add_special: see `encode`.
            prepend_bos: see `encode`.
        """
        checked = [as_text(text, self.name) for text in texts]
        encodings = self._encode_batch(checked, add_special)
        return [self._place_bos(encoding, prepend_bos) for encoding in encodings]

    def ids_of(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """Token ids of many texts, by default without special tokens: all that a corpus needs.

        Arguments:
            texts: the texts.
            add_special: see `encode`.
        """
        return [encoding.ids for encoding in self.encode_batch(texts, add_special=add_special)]

    def to_str_tokens(self, text: str, *, add_special: bool = True) -> list[str]:
        """Texts of a text's tokens.

        Arguments:
            text: a text.
            add_special: see `encode`.
        """
        return [self.decode_token(token) for token in self.encode(text, add_special=add_special).ids]

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of every token by id; "" for an id without a token."""
        return [self.decode_token(token) for token in range(self._end)]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Vocabulary pieces of token ids, e.g. "Ġis". Raises TokenizerError for an id without a token."""
        pieces = []
        for token in as_ids(ids):
            piece = self._piece(token)
            if piece is None:
                raise TokenizerError(
                    f"expected ids of {self.name}'s {self.vocab_size} tokens, found {token}; "
                    "was it encoded with another tokenizer?"
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
            "choose a word that is one token, or pass the id of a piece"
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
                f"the chat template of {self.name} refuses this conversation: {error}; change the messages"
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
                "found none. It is a base model, or the file is missing: write the prompt out as text"
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
                f"expected a BOS token of {self.name} in tokenizer_config.json for prepend_bos=True, found "
                "none; put its id in front of the ids yourself"
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
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise PromptError(
            'expected a conversation as a text, or as [{"role": "user", "content": …}, …], found '
            f"{type(messages).__name__}"
        )
    return [dict(message) for message in messages]


def byte_positions(text: str) -> list[int]:
    """UTF-8 byte position of each character of a text, and of its end: [len(text) + 1].

    >>> byte_positions("né!")
    [0, 1, 3, 4]
    """
    positions = [0]
    for char in text:
        # surrogatepass: half a surrogate pair has a length, too, and is refused elsewhere.
        positions.append(positions[-1] + len(char.encode("utf-8", "surrogatepass")))
    return positions


def byte_to_char(text: str, byte: int) -> int:
    """The character that a UTF-8 byte of the text belongs to; len(text) for its end.

    Arguments:
        text: a text.
        byte: position in its UTF-8 bytes.

    Raises:
        TokenizerError: for a byte beyond the end.
    """
    positions = byte_positions(text)
    if not 0 <= byte <= positions[-1]:
        raise TokenizerError(
            f"expected a byte position in 0..{positions[-1]}, found {byte}; is it of another text?"
        )
    return bisect_right(positions, byte) - 1


def read_tokenizer(file: Path) -> bytes:
    """Content of a tokenizer's file. Raises TokenizerError if there is none."""
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
