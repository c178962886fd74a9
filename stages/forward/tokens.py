"""Text and tokens: encoding with character offsets, words that must be one token, spans of text as positions.

A thin layer over the `tokenizers` library. Offsets count characters (Unicode code points) of the text, as Python's strings do, not
bytes; special tokens have the empty span (0, 0) and never answer a question about a character. Torch-free; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...store.digest import content_digest
from ...store.errors import TokenizerError


@dataclass(frozen=True)
class Encoding:
    """A text as tokens. offsets: half-open character spans; special: whether a token was added, not read."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    special: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, char: int) -> int | None:
        """First token whose span holds the character; None between tokens and past the end."""
        return next((i for i in self._real if self.offsets[i][0] <= char < self.offsets[i][1]), None)

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """As `char_to_token`, else the token whose middle is nearest (the earlier on a tie); None without tokens."""
        exact = self.char_to_token(char)
        if exact is not None:
            return exact
        return min(self._real, key=lambda i: abs(char - sum(self.offsets[i]) // 2), default=None)

    def char_to_token_start(self, char: int) -> int | None:
        """First token that starts at or after the character."""
        return next((i for i in self._real if self.offsets[i][0] >= char), None)

    def char_range_to_tokens(self, start: int, stop: int) -> list[int]:
        """Every token that overlaps characters [start, stop)."""
        return [i for i in self._real if self.offsets[i][1] > start and self.offsets[i][0] < stop]

    def token_to_char_range(self, token: int) -> tuple[int, int]:
        """Character span of a token; TokenizerError out of range."""
        if not 0 <= token < len(self.ids):
            raise TokenizerError(f"expected a token position in 0..{len(self.ids) - 1}, found {token}")
        return self.offsets[token]

    def label_spans(self, spans: Sequence[tuple[str, range]]) -> list[str]:
        """A label per token: the first overlapping span's name, "other" where there is none; the last token of each span ends in "_final"."""
        labels = ["other"] * len(self.ids)
        for name, span in spans:
            chosen = [i for i in self.char_range_to_tokens(span.start, span.stop) if labels[i] == "other"]
            for i in chosen:
                labels[i] = name
            if chosen:
                labels[chosen[-1]] = f"{name}_final"
        return labels

    def convert_positions(self, chars: Sequence[int]) -> list[dict[str, Any]]:
        """For each character: {char_pos, token_idx, token, exact_match}, the nearest token where none holds it."""
        found = []
        for char in chars:
            exact = self.char_to_token(char)
            token = self.char_to_token_fuzzy(char)
            piece = None if token is None else self.tokens[token]
            found.append({"char_pos": char, "token_idx": token, "token": piece, "exact_match": exact is not None})
        return found

    @cached_property
    def _real(self) -> list[int]:
        """Tokens that were read from the text and cover some of it."""
        return [i for i, (start, stop) in enumerate(self.offsets) if not self.special[i] and stop > start]


class Tokenizer:
    """A model's tokenizer, from `tokenizer.json` and, for special tokens and chat template, `tokenizer_config.json`."""

    def __init__(self, file: Path, settings: Mapping[str, Any] | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        text = file.read_bytes()
        try:
            self._backend = Backend.from_str(text.decode())
        except Exception as error:
            raise TokenizerError(f"expected a tokenizer in {file}, found {error}; fetch the file again, or pass token ids") from error
        # Corpora are not cut or padded behind the reader's back, whatever the file asks for.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._settings = dict(settings or {})
        self.digest = content_digest(text)
        """`sha256:…` of tokenizer.json."""

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer of a model's directory; None when it has none."""
        file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
        if not file.exists():
            return None
        return cls(file, json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else None)

    def encode(self, text: str, *, add_special: bool = True) -> Encoding:
        """Tokens of a text. add_special: add what the tokenizer's own rule adds (a BOS for Llama and Gemma, nothing for Qwen)."""
        return _encoding(self._backend.encode(text, add_special_tokens=add_special))

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[Encoding]:
        """Tokens of many texts, on all cores."""
        return [_encoding(found) for found in self._backend.encode_batch(list(texts), add_special_tokens=add_special)]

    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Text of token ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=not keep_special))

    def decode_token(self, token: int) -> str:
        """Text of one token as it stands in a text: a leading space is kept."""
        return self.vocabulary[token] if 0 <= token < len(self.vocabulary) else ""

    def to_str_tokens(self, text: str, *, add_special: bool = True) -> list[str]:
        """A text as a list of single-token strings."""
        return [self.decode_token(token) for token in self.encode(text, add_special=add_special).ids]

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of every token by id, empty where an id is unused."""
        size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return [_text_of(self._backend, token) for token in range(size)]

    def special_id(self, name: str) -> int | None:
        """Id of a special token by role, e.g. "bos_token" or "eos_token"; None where the model has none."""
        token = self._settings.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        return None if content is None else self._backend.token_to_id(content)

    def find_token_id(self, word: str) -> int:
        """Id of a word that is one token, with a leading space if there is such a token, else without.

        Raises TokenizerError that lists the pieces of a word which is several tokens: which piece is meant is the caller's choice.
        """
        pieces: list[str] = []
        for spelling in (f" {word}" if not word.startswith(" ") else word, word):
            encoding = self.encode(spelling, add_special=False)
            if len(encoding) == 1:
                return encoding.ids[0]
            pieces = pieces or [self.decode_token(token) for token in encoding.ids]
        raise TokenizerError(f"expected {word!r} to be one token, found {len(pieces)}: {pieces}; choose one of them by its id")

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the model's chat template.

        messages: {"role": "user", "content": …} each. Raises TokenizerError for a model without template. The template runs in jinja2's
        sandbox: it comes with the checkpoint and is not trusted.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._settings.get("chat_template")
        if isinstance(template, list):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        if not template:
            raise TokenizerError("expected a chat_template in tokenizer_config.json, found none; this is a base model, write the prompt out")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        names = {name: self._content(name) for name in ("bos_token", "eos_token")}
        try:
            return environment.from_string(template).render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except TemplateError as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error

    def _content(self, name: str) -> str:
        token = self._settings.get(name)
        return str((token.get("content") if isinstance(token, Mapping) else token) or "")


def char_to_byte(text: str, char: int) -> int:
    """Byte offset in UTF-8 of a character offset: what tools that count bytes call the same place."""
    return len(text[:char].encode())


def _encoding(found: Any) -> Encoding:
    return Encoding(list(found.ids), list(found.tokens), [tuple(span) for span in found.offsets], [bool(mark) for mark in found.special_tokens_mask])


def _text_of(backend: Any, token: int) -> str:
    """A token's text within a sentence: decoded behind an anchor, since decoders strip the space of a first token."""
    piece = backend.id_to_token(token)
    if piece is None:
        return ""
    anchor = backend.encode("a", add_special_tokens=False).ids
    whole = backend.decode([*anchor, token], skip_special_tokens=False)
    alone = backend.decode(anchor, skip_special_tokens=False)
    return str(whole[len(alone) :] if whole.startswith(alone) else backend.decode([token], skip_special_tokens=False))
