r"""The tokenizer of RWKV World: a vocabulary of byte strings, read greedily, the longest first.

The file, `rwkv_vocab_v20230424.txt` and its like (github.com/BlinkDL/ChatRWKV, tokenizer/), has one token a
line: its id, its bytes as a Python literal, and how many they are. `'\x80'` is a character (two bytes in
UTF-8), `b'\x80'` a byte. Ids may have gaps; 0 is not in the file and ends a text. No merges, no
normalisation, no BOS. tokenizer_config.json may name ids that the file leaves out; those names are then read
in a text, as the wrappers of such models read them.

Border: bytes and ids; knows no model. Tokens end anywhere, also inside a character: such a token has the
whole character's offsets and its own `byte_spans`, and is shown with its broken bytes escaped, `\xe6\x97`.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ....store.digest import content_digest
from ....store.errors import TokenizerError
from .rows import as_ids
from .tokens import Encoding, Tokenizer, byte_positions, read_tokenizer

WORLD = "rwkv_vocab*.txt"
"""What the file is called."""
END_OF_TEXT = 0
_END_NAME = "<|endoftext|>"
_LITERAL = re.compile(r"""b?('[^'\\]*(\\.[^'\\]*)*'|"[^"\\]*(\\.[^"\\]*)*")""")
_NUMBER = re.compile(r"[0-9]+")
_SHOWN = 60  # characters of a malformed line

Piece = tuple[int, int, int]
"""Token id, and where it begins and ends in bytes."""


class WorldTokenizer(Tokenizer):
    """An rwkv_vocab*.txt. Its digest is of ids, bytes and names, however the lines end or are ordered."""

    def __init__(
        self, file: Path, settings: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> None:
        self._bytes = read_vocabulary(read_tokenizer(file), file)
        super().__init__(file, settings, name=name)
        written = {token: text for token, text in _added(self._settings) if token not in self._bytes}
        self._names = {END_OF_TEXT: _END_NAME} | written
        self._ids = {data: token for token, data in self._bytes.items()}
        self._sizes = _sizes(self._ids)
        self._named_ids = {text.encode(): token for token, text in written.items()}
        longest_first = sorted(self._named_ids, key=len, reverse=True)
        self._named = re.compile(b"|".join(map(re.escape, longest_first)) or rb"(?!)")
        self.digest = _digest(self._bytes, self._names)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; ids the vocabulary leaves out are counted."""
        return self._end

    @property
    def _end(self) -> int:
        return max(*self._bytes, *self._names) + 1

    def special_id(self, role: str) -> int | None:
        """Id of a special token by its role; "eos_token" is id 0 where the settings name no other."""
        found = super().special_id(role)
        return END_OF_TEXT if found is None and role == "eos_token" else found

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes, names of special tokens read as what they are made of.

        Raises TokenizerError where no token fits.
        """
        return [token for token, _, _ in self._longest(data, 0, len(data))]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of token ids, special ones without any. Raises TokenizerError for an id without a token."""
        return self._joined(ids, {})

    def decode(
        self,
        ids: Sequence[int],
        *,
        keep_special: bool = True,
        errors: Literal["strict", "replace"] = "replace",
    ) -> str:
        """Text of token ids: all their bytes, decoded at once.

        errors: "replace" writes U+FFFD for what is no UTF-8. Raises TokenizerError for that with "strict",
        and for an id without a token.
        """
        data = self._joined(ids, self._names if keep_special else {})
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"expected tokens whose bytes are UTF-8, found {data[error.start]:#04x} at byte "
                f'{error.start} ({error.reason}); decode with errors="replace", or take decode_bytes'
            ) from error

    def decode_token(self, token: int) -> str:
        r"""Text of one token, bytes that are no UTF-8 by themselves as `\xe6`; "" for an id without one."""
        return self._piece(int(token)) or ""

    def _id_of(self, text: str) -> int | None:
        named = next((token for token, name in self._names.items() if name == text), None)
        return self._ids.get(text.encode("utf-8", "surrogatepass")) if named is None else named

    def _piece(self, token: int) -> str | None:
        data = self._bytes.get(token)
        return self._names.get(token) if data is None else data.decode("utf-8", "backslashreplace")

    def _encode(self, text: str, add_special: bool) -> Encoding:
        found = list(self._pieces_of(text.encode()))
        ids = [token for token, _, _ in found]
        at = byte_positions(text)
        return Encoding(
            ids,
            self.pieces(ids),
            [(bisect_right(at, start) - 1, bisect_left(at, end)) for _, start, end in found],
            [False] * len(found),
            text,
            [(start, end) for _, start, end in found],
        )

    def _pieces_of(self, data: bytes) -> Iterator[Piece]:
        """Tokens of a text's bytes, those between names found by themselves."""
        at = 0
        for name in self._named.finditer(data):
            yield from self._longest(data, at, name.start())
            yield self._named_ids[name.group()], name.start(), name.end()
            at = name.end()
        yield from self._longest(data, at, len(data))

    def _longest(self, data: bytes, at: int, end: int) -> Iterator[Piece]:
        """The longest token at every place in turn."""
        while at < end:
            for size in self._sizes.get(data[at : at + 2], (1,)):
                token = self._ids.get(data[at : at + size])
                if token is not None and at + size <= end:
                    break
            else:
                raise TokenizerError(
                    f"expected a text that {self.name} has tokens for, found no token at byte {at} "
                    f"({data[at]:#04x}); leave it out, or write it another way"
                )
            yield token, at, at + size
            at += size

    def _joined(self, ids: Iterable[int], names: Mapping[int, str]) -> bytes:
        asked = as_ids(ids)
        self.pieces(asked)
        return b"".join(self._bytes.get(token) or names.get(token, "").encode() for token in asked)


def read_vocabulary(data: bytes, file: Path) -> dict[int, bytes]:
    """Id -> bytes of every token of a vocabulary file's content.

    Raises TokenizerError naming the first line that is none, or that repeats an id or a token.
    """
    try:
        # Not splitlines: a token may hold U+2028 and its like as they are.
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"expected UTF-8 in {file}, found {data[error.start]:#04x} at byte {error.start}; fetch it again"
        ) from error
    found: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for number, line in enumerate(lines, 1):
        content = line.removesuffix("\r")
        if not content:
            continue
        try:
            token, value = _parse(content)
            if token in found or value in seen:
                raise ValueError(f"the {'id' if token in found else 'token'} of an earlier line")
        except (ValueError, SyntaxError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise TokenizerError(
                f"expected an id, a token as Python literal and its size in bytes in line {number} of "
                f"{file}, found {content[:_SHOWN]!r} ({reason}); fetch the file again, or pass token ids "
                "instead of text"
            ) from error
        found[token] = value
        seen.add(value)
    if not found:
        raise TokenizerError(f"expected a token in each line of {file}, found none; fetch it again")
    return found


def _parse(line: str) -> tuple[int, bytes]:
    """Id and bytes of one line. Raises ValueError or SyntaxError."""
    number, _, rest = line.partition(" ")
    literal, _, size = rest.rpartition(" ")
    if not (_NUMBER.fullmatch(number) and _NUMBER.fullmatch(size)):
        raise ValueError("an id and a size are whole numbers")
    if int(number) == END_OF_TEXT:
        raise ValueError(f"id {END_OF_TEXT} ends a text")
    if not _LITERAL.fullmatch(literal):
        raise ValueError("a token is a literal in quotes")
    value = _value(literal)
    encoded = value if isinstance(value, bytes) else value.encode()
    if len(encoded) != int(size) or not encoded:
        raise ValueError(f"the token has {len(encoded)} bytes")
    return int(number), encoded


def _value(literal: str) -> str | bytes:
    if literal[0] != "b" and "\\" not in literal:
        # All but 840 of the 65,529 in the public file, which ast would take 0.65 s for instead of 0.2.
        return literal[1:-1]
    value: str | bytes = ast.literal_eval(literal)
    return value


def _sizes(tokens: Iterable[bytes]) -> dict[bytes, tuple[int, ...]]:
    """First two bytes -> sizes of the tokens that begin so, the longest first; 1 for what is none of them.

    A table of sizes instead of a trie: 3,652 entries for the public file, and dictionaries do the rest.
    """
    found: dict[bytes, set[int]] = {}
    for token in tokens:
        found.setdefault(token[:2], {1}).add(len(token))
    return {prefix: tuple(sorted(sizes, reverse=True)) for prefix, sizes in found.items()}


def _added(settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Ids and names of the tokens that tokenizer_config.json adds; files write names as texts or objects."""
    listed = settings.get("added_tokens_decoder")
    for token, value in listed.items() if isinstance(listed, Mapping) else ():
        text = value.get("content") if isinstance(value, Mapping) else value
        if str(token).isdecimal() and isinstance(text, str) and text:
            yield int(token), text


def _digest(tokens: Mapping[int, bytes], names: Mapping[int, str]) -> str:
    rows = [*sorted(tokens.items()), *((token, name.encode()) for token, name in sorted(names.items()))]
    return content_digest(*(part for token, data in rows for part in (b"%d %d " % (token, len(data)), data)))
