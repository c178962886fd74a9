"""Tokenizer: text to token ids and back, and which token stands where in the text.

What all tokenizers answer alike. How the tokens of a text are found is library.py (tokenizer.json) or
world.py (the vocabulary of RWKV World); tokenizer_config.json beside either gives the names of special tokens
and the chat template. Border: text and ids; knows no model and never imports torch.

Offsets are in CHARACTERS of the prompt, half-open, as Python slices text; `byte_offsets` gives them in UTF-8
bytes. Tokens the post-processor adds (BOS, EOS) have the offsets (0, 0) and never stand for a character. The
mapping between the two is in store/reading/characters.py.
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
"""Offsets of a token that stands for no character."""
MASKS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
"""What encoders and masked-diffusion models call their mask, where their settings do not say."""


@dataclass(frozen=True)
class CharPosition:
    """Where a character of the text went: to the token over it (`exact_match`), else to the nearest."""

    char_pos: int
    token_idx: int | None
    token: str | None
    exact_match: bool


@dataclass(frozen=True)
class Encoding:
    """Token ids of one text with their pieces and places.

    tokens: vocabulary pieces, e.g. "Ġis". offsets: per token, (start, end) in characters of `text`; (0, 0)
    for tokens that stand for no character of it. special: whether a token was added rather than read.
    byte_spans: offsets in UTF-8 bytes, where the tokenizer knows them apart from its characters.
    """

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    special: list[bool]
    text: str
    byte_spans: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def byte_offsets(self) -> list[tuple[int, int]]:
        """The offsets in bytes of the text's UTF-8 form; without `byte_spans` those of whole characters."""
        if self.byte_spans is not None:
            return self.byte_spans
        at = byte_positions(self.text)
        return [(at[start], at[end]) for start, end in self.offsets]

    @property
    def splits_character(self) -> list[bool]:
        """Whether a token begins or ends inside a character, which it then shares with its neighbour."""
        splits = [False] * len(self)
        for one, following in pairwise(self.spans.placed.tolist()):
            if self.offsets[following][0] < self.offsets[one][1]:
                splits[one] = splits[following] = True
        return splits

    @cached_property
    def spans(self) -> CharacterSpans:
        """The same offsets, to look characters up in."""
        start, end = zip(*self.offsets, strict=True) if self.offsets else ((), ())
        return CharacterSpans(start, end)

    def char_to_token(self, char: int) -> int | None:
        """First token that covers a character; None if none does."""
        return self.spans.char_to_token(char)

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """The token that covers a character, else the one whose middle is nearest to it (the earlier of two
        as near).
        """
        return self.spans.char_to_token_fuzzy(char)

    def char_to_token_start(self, char: int) -> int | None:
        """First token that starts at a character or later."""
        return self.spans.char_to_token_start(char)

    def char_range_to_tokens(self, start: int, end: int) -> list[int]:
        """All tokens that overlap characters start … end-1."""
        return self.spans.char_range_to_tokens(start, end)

    def token_to_char_range(self, index: int) -> tuple[int, int]:
        """Characters a token stands for, (0, 0) for BOS and its like. Raises TokenizerError out of range."""
        if not 0 <= index < len(self):
            raise TokenizerError(f"expected a token position in 0..{len(self) - 1}, found {index}")
        return self.offsets[index]

    def label_spans(self, spans: Iterable[tuple[str, Span]]) -> list[str]:
        """One label per token: the first span it overlaps, "other" where there is none; the last token of
        each name is "name_final".

        spans: (name, (start, end) or range) in characters. A name may stand for several spans; it still has
        one final token. Raises TokenizerError for a span outside the text, or a name that would be mistaken
        for a label.
        """
        checked = [(name, *self._check_span(name, span)) for name, span in spans]
        labels = [OTHER] * len(self)
        for i in self.spans.placed.tolist():
            start, end = self.offsets[i]
            labels[i] = next((name for name, first, last in checked if end > first and start < last), OTHER)
        last_of = {name: i for i, name in enumerate(labels) if name != OTHER}
        for name, i in last_of.items():
            labels[i] = name + FINAL
        return labels

    def convert_positions(self, chars: Iterable[int]) -> list[CharPosition]:
        """Where each character went; those no token covers go to the nearest one, and say so."""
        found = []
        for char in chars:
            index = self.char_to_token_fuzzy(char)
            token = None if index is None else self.tokens[index]
            found.append(CharPosition(char, index, token, self.char_to_token(char) is not None))
        return found

    def _check_span(self, name: str, span: Span) -> tuple[int, int]:
        start, end = (span.start, span.stop) if isinstance(span, range) else span
        if not 0 <= start < end <= len(self.text):
            raise TokenizerError(
                f"expected span {name!r} to lie within the text's {len(self.text)} characters, found "
                f"{start}..{end}; are these byte offsets?"
            )
        if name == OTHER or name.endswith(FINAL):
            raise TokenizerError(f"{name!r} is a label of its own; choose another name for the span")
        return start, end


class Tokenizer(ABC):
    """Text <-> token ids, with the model's own rule for BOS and its chat template.

    What file holds the tokens, and how a text is cut into them, is known to library.py and world.py.
    """

    digest: str
    """`sha256:…` of what decides ids and words."""

    def __init__(
        self,
        file: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        own: Mapping[int, AddedToken] | None = None,
        pad: str | None = None,
    ) -> None:
        """Raises TokenizerError if a file is missing or cannot be read.

        Arguments:
            file: holds the tokens.
            settings: what tokenizer_config.json says; by default read from beside the file.
            name: of the model; default that of its folder.
            own: id -> token of those that the file finds in a text before it cuts it up.
            pad: text of the token that the file pads with, if it does.
        """
        self.name = name or file.parent.name
        self._settings = dict(read_settings(file.parent) if settings is None else settings)
        self._declared = DeclaredTokens.of(self._settings, own or {}, pad)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size:,} tokens, {self.digest[:15]})"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""

    @property
    @abstractmethod
    def _end(self) -> int:
        """One more than the highest id of a token."""

    @abstractmethod
    def _id_of(self, text: str) -> int | None:
        """Id of the token of exactly this text, or of this name for a special one; None without one."""

    @abstractmethod
    def _piece(self, token: int) -> str | None:
        """Vocabulary piece of an id; None for an id without a token."""

    @abstractmethod
    def _encode(self, text: str, add_special: bool) -> Encoding:
        """Tokens of a text, with what the post-processor adds if it is asked for."""

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        return [self._encode(text, add_special) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Text of token ids. Raises TokenizerError for an id the tokenizer has no token for."""

    @abstractmethod
    def decode_token(self, token: int) -> str:
        """Text of one token as it reads inside a sentence; "" for an id without a token: embeddings often
        have more rows than there are tokens.
        """

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if the settings name one."""
        return self.special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if the settings name one."""
        return self.special_id("eos_token")

    @property
    def mask_id(self) -> int | None:
        """Id of the token that stands where one is to be filled in: that of tokenizer_config.json, else one
        of the usual names; None without one."""
        named = self.special_id("mask_token")
        usual = (self._id_of(name) for name in MASKS)
        return named if named is not None else next((token for token in usual if token is not None), None)

    def special_id(self, role: str) -> int | None:
        """Id of a special token by its role, e.g. "bos_token"; None where the model has none."""
        text = self._declared.texts.get(role)
        return None if text is None else self._id_of(text)

    def encode(self, text: str, *, add_special: bool = True, prepend_bos: bool | None = None) -> Encoding:
        """Tokens of a text.

        add_special: add what the model's post-processor adds (BOS for Llama and Gemma, nothing for Qwen 2 and
        StarCoder 2). prepend_bos: True to begin with BOS, False not to, whatever the post-processor does;
        None leaves it to that.
        """
        return self._place_bos(self._encode(as_text(text, self.name), add_special), prepend_bos)

    def encode_raw(self, text: str) -> Encoding:
        """Tokens of a text and nothing else."""
        return self.encode(text, add_special=False)

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, prepend_bos: bool | None = None
    ) -> list[Encoding]:
        """As `encode`, for many texts at once."""
        checked = [as_text(text, self.name) for text in texts]
        return [self._place_bos(found, prepend_bos) for found in self._encode_batch(checked, add_special)]

    def ids_of(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """Token ids of many texts, nothing added unless told: all that a corpus needs."""
        return [encoding.ids for encoding in self.encode_batch(texts, add_special=add_special)]

    def to_str_tokens(self, text: str, *, add_special: bool = True) -> list[str]:
        """A text as the texts of its tokens."""
        return [self.decode_token(token) for token in self.encode(text, add_special=add_special).ids]

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of every token by id, empty where an id has none."""
        return [self.decode_token(token) for token in range(self._end)]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Vocabulary pieces of token ids, such as "Ġis". Raises TokenizerError for an id without a token."""
        found = []
        for i in as_ids(ids):
            piece = self._piece(i)
            if piece is None:
                raise TokenizerError(
                    f"expected ids of {self.name}'s {self.vocab_size} tokens, found {i}; "
                    "was it encoded with another tokenizer?"
                )
            found.append(piece)
        return found

    def find_token_id(self, word: str) -> int:
        """Id of the one token a word is: with a space before it, as inside a sentence, else bare.

        Raises TokenizerError, listing the pieces, for a word that is several tokens either way: its last
        piece is another word.
        """
        tried: list[Encoding] = []
        unknown = self.special_id("unk_token")
        for text in [f" {word}", word] if word else []:
            tried.append(found := self.encode_raw(text))
            if len(found) == 1 and found.ids[0] != unknown:
                return found.ids[0]
        pieces = " or ".join(repr(found.tokens) for found in tried) or "nothing"
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
        """A conversation as the text the model was tuned on, by its own template, run in jinja2's sandbox.

        messages: what the user says, or [{"role": "user", "content": …}, …]. variables: what else the
        template knows, e.g. enable_thinking. The text holds its special tokens already: encode it with
        ``add_special=False``. Raises TokenizerError if the model has no template, or the template refuses the
        conversation.
        """
        from jinja2 import TemplateError

        template = self._chat_template()
        said = _messages(messages)
        if system is not None:
            said.insert(0, {"role": "system", "content": system})
        context = {
            **self._declared.texts,
            # Given as nothing, as transformers does: to a template that asks `tools is not none` it matters.
            "tools": None,
            "documents": None,
            **variables,
            "messages": said,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(_jinja().from_string(template).render(context))
        except TemplateError as error:
            raise TokenizerError(
                f"the chat template of {self.name} refuses this conversation: {error}"
            ) from error

    def _chat_template(self) -> str:
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            named = {str(entry["name"]): entry["template"] for entry in found}
            found = named.get("default", next(iter(named.values()), None))
        if not isinstance(found, str):
            raise TokenizerError(
                f"{self.name} has no chat template; expected one in tokenizer_config.json or "
                "chat_template.jinja. It is a base model, or the file is missing: write the prompt out as "
                "text"
            )
        return found

    def _place_bos(self, found: Encoding, wanted: bool | None) -> Encoding:
        if wanted is None:
            return found
        bos = self.bos_id
        if bos is None:
            if not wanted:
                return found
            raise TokenizerError(
                f"{self.name} names no BOS token in tokenizer_config.json; expected one for "
                "prepend_bos=True, so put its id in front of the ids yourself"
            )
        has = found.ids[:1] == [bos]
        if wanted and not has:
            return replace(
                found,
                ids=[bos, *found.ids],
                tokens=[*self.pieces([bos]), *found.tokens],
                offsets=[NOWHERE, *found.offsets],
                special=[True, *found.special],
                byte_spans=None if found.byte_spans is None else [NOWHERE, *found.byte_spans],
            )
        # A BOS written out in the text is part of it; only one that was added is taken away.
        if not wanted and has and found.special[0]:
            return replace(
                found,
                ids=found.ids[1:],
                tokens=found.tokens[1:],
                offsets=found.offsets[1:],
                special=found.special[1:],
                byte_spans=None if found.byte_spans is None else found.byte_spans[1:],
            )
        return found


def _messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as a list of messages; a text is what the user says."""
    if isinstance(messages, str):
        return [{"role": "user", "content": as_text(messages, "the message")}]
    if not isinstance(messages, list | tuple) or not all(isinstance(one, Mapping) for one in messages):
        raise PromptError(
            'expected a conversation as a text, or as [{"role": "user", "content": …}, …], found '
            f"{type(messages).__name__}"
        )
    return [dict(one) for one in messages]


def byte_positions(text: str) -> list[int]:
    """Byte position of every character of a text in its UTF-8 form, and of its end: [len(text) + 1].

    >>> byte_positions("né!")
    [0, 1, 3, 4]
    """
    at = [0]
    for char in text:
        at.append(at[-1] + len(char.encode("utf-8", "surrogatepass")))
    return at


def byte_to_char(text: str, byte: int) -> int:
    """The character a byte of the text's UTF-8 form belongs to; its end for the end. Raises TokenizerError
    beyond it.
    """
    at = byte_positions(text)
    if not 0 <= byte <= at[-1]:
        raise TokenizerError(f"expected a byte position in 0..{at[-1]}, found {byte}; is it of another text?")
    return bisect_right(at, byte) - 1


def read_tokenizer(file: Path) -> bytes:
    """The bytes of a tokenizer's file. Raises TokenizerError where there is none."""
    return read_outside(file, TokenizerError, "add the file, or pass token ids instead of text")


def _jinja() -> Any:
    """Templates come with models, from anyone: they run in jinja's sandbox."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marked(Extension):
        """What stands in {% generation %}: training wants to know that an assistant says it."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own way to name them

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(inside).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marked, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
