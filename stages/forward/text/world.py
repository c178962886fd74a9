r"""WorldTokenizer: the tokenizer of RWKV World, which matches the longest byte string at each place.

The file, `rwkv_vocab_v20230424.txt` or similar (github.com/BlinkDL/ChatRWKV, tokenizer/), has one token per
line: its id, its bytes as a Python literal, and their number. `'\x80'` is a character (two bytes in UTF-8),
`b'\x80'` a byte. Ids may have gaps; 0 is not in the file and ends a text. There are no merges, no
normalisation and no BOS. tokenizer_config.json may name ids that the file leaves out; these names are then
recognised in a text, as the wrappers of such models do.

A token may end inside a character. It then has the offsets of the whole character and its own `byte_spans`,
and is shown with incomplete bytes escaped, `\xe6\x97`.
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
"""File name pattern of the vocabulary."""
END_OF_TEXT = 0
_END_NAME = "<|endoftext|>"
_LITERAL = re.compile(r"""b?('[^'\\]*(\\.[^'\\]*)*'|"[^"\\]*(\\.[^"\\]*)*")""")
_NUMBER = re.compile(r"[0-9]+")
_SHOWN = 60  # characters of a malformed line

Piece = tuple[int, int, int]
"""(token id, first byte, byte after the last)."""


class WorldTokenizer(Tokenizer):
    """Tokenizer of RWKV World models, read from an rwkv_vocab*.txt.

    Its digest covers ids, bytes and names of tokens, not the order of lines in the file.
    """

    def __init__(
        self, file: Path, settings: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> None:
        """Read a vocabulary file.

        Arguments:
            file: an rwkv_vocab*.txt.
            settings: content of tokenizer_config.json; None reads it from the folder of the file.
            name: name of the model; None for the name of the folder.

        Raises:
            TokenizerError: for a malformed file.
        """
        self._bytes = read_vocabulary(read_tokenizer(file), file)
        super().__init__(file, settings, name=name)
        # Names of ids that the file has count for nothing: their bytes are the token.
        names = {token: text for token, text in _added_names(self._settings) if token not in self._bytes}
        self._names = {END_OF_TEXT: _END_NAME} | names
        self._ids = {data: token for token, data in self._bytes.items()}
        self._sizes = _lengths_by_prefix(self._ids)
        self._named_ids = {text.encode(): token for token, text in names.items()}
        # Regex alternatives match in order: a name that begins another must come later.
        longest_first = sorted(self._named_ids, key=len, reverse=True)
        # `(?!)` never matches: without names the alternation would be empty and match everywhere.
        self._named = re.compile(b"|".join(map(re.escape, longest_first)) or rb"(?!)")
        self.digest = _digest(self._bytes, self._names)

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one: gaps in the vocabulary count, too."""
        return self._end

    @property
    def _end(self) -> int:
        return max(*self._bytes, *self._names) + 1

    def special_id(self, role: str) -> int | None:
        """Id of a special token by its role, e.g. "eos_token", which is 0 unless the settings name another.

        None for a role without a token.
        """
        token = super().special_id(role)
        return END_OF_TEXT if token is None and role == "eos_token" else token

    def encode_bytes(self, data: bytes) -> list[int]:
        """Encode bytes as token ids; names of special tokens in them are encoded as plain bytes.

        Raises:
            TokenizerError: where no token matches.
        """
        return [token for token, _, _ in self._longest(data, 0, len(data))]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Concatenated bytes of token ids, in which special tokens have no bytes.

        Raises:
            TokenizerError: for an id without a token.
        """
        return self._joined_bytes(ids, {})

    def decode(
        self,
        ids: Sequence[int],
        *,
        keep_special: bool = True,
        errors: Literal["strict", "replace"] = "replace",
    ) -> str:
        """Convert token ids to text; their bytes are joined first, because a character may span tokens.

        Arguments:
            ids: token ids.
            keep_special: whether names of special tokens are part of the text.
            errors: "replace" writes U+FFFD for bytes that are not UTF-8; "strict" raises.

        Raises:
            TokenizerError: for an id without a token, and with "strict" for bytes that are not UTF-8.
        """
        data = self._joined_bytes(ids, self._names if keep_special else {})
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"expected token ids whose joined bytes are UTF-8, found {data[error.start]:#04x} at byte "
                f'{error.start} ({error.reason}); decode with errors="replace", or use decode_bytes'
            ) from error

    def decode_token(self, token: int) -> str:
        r"""Text of one token, incomplete UTF-8 escaped as `\xe6`; "" for an id without a token."""
        return self._piece(int(token)) or ""

    def _id_of(self, text: str) -> int | None:
        named = next((token for token, name in self._names.items() if name == text), None)
        return self._ids.get(text.encode("utf-8", "surrogatepass")) if named is None else named

    def _piece(self, token: int) -> str | None:
        data = self._bytes.get(token)
        return self._names.get(token) if data is None else data.decode("utf-8", "backslashreplace")

    def _encode(self, text: str, add_special: bool) -> Encoding:
        pieces = list(self._pieces_of(text.encode()))
        ids = [token for token, _, _ in pieces]
        # Byte spans become character offsets by bisection: a token inside a character gets the whole
        # character.
        positions = byte_positions(text)
        return Encoding(
            ids,
            self.pieces(ids),
            [(bisect_right(positions, start) - 1, bisect_left(positions, end)) for _, start, end in pieces],
            [False] * len(pieces),
            text,
            [(start, end) for _, start, end in pieces],
        )

    def _pieces_of(self, data: bytes) -> Iterator[Piece]:
        """Tokens of a text's bytes: names of special tokens first, then the longest tokens between them."""
        at = 0
        for name in self._named.finditer(data):
            yield from self._longest(data, at, name.start())
            yield self._named_ids[name.group()], name.start(), name.end()
            at = name.end()
        yield from self._longest(data, at, len(data))

    def _longest(self, data: bytes, at: int, end: int) -> Iterator[Piece]:
        """Tokens of data[at:end], the longest match at each place."""
        while at < end:
            # Longest first, so that the first hit is the longest match.
            for size in self._sizes.get(data[at : at + 2], (1,)):
                token = self._ids.get(data[at : at + size])
                if token is not None and at + size <= end:
                    break
            else:
                raise TokenizerError(
                    f"expected a text that the vocabulary of {self.name} covers, found no token at byte {at} "
                    f"({data[at]:#04x}); remove this character"
                )
            yield token, at, at + size
            at += size

    def _joined_bytes(self, ids: Iterable[int], names: Mapping[int, str]) -> bytes:
        tokens = as_ids(ids)
        self.pieces(tokens)  # raises for an id without a token
        return b"".join(self._bytes.get(token) or names.get(token, "").encode() for token in tokens)


def read_vocabulary(data: bytes, file: Path) -> dict[int, bytes]:
    """Parse a vocabulary file of RWKV World.

    Arguments:
        data: content of the file.
        file: its path, for messages.

    Returns:
        Token id -> bytes of the token.

    Raises:
        TokenizerError: for the first malformed line, or one that repeats an id or a token.
    """
    try:
        # Not splitlines, which also splits at U+2028 and similar characters that a token may contain.
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"expected UTF-8 in {file}, found {data[error.start]:#04x} at byte {error.start}; fetch it again"
        ) from error
    vocabulary: dict[int, bytes] = {}
    values: set[bytes] = set()
    for number, line in enumerate(lines, 1):
        # Files with Windows line ends are read, too.
        content = line.removesuffix("\r")
        if not content:
            continue
        try:
            token, value = _id_and_bytes(content)
            if token in vocabulary or value in values:
                raise ValueError(f"the {'id' if token in vocabulary else 'token'} of an earlier line")
        except (ValueError, SyntaxError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise TokenizerError(
                f"expected an id, a token as Python literal and its size in bytes in line {number} of "
                f"{file}, found {content[:_SHOWN]!r} ({reason}); fetch the file again, or pass token "
                "ids instead of text"
            ) from error
        vocabulary[token] = value
        values.add(value)
    if not vocabulary:
        raise TokenizerError(f"expected a token in each line of {file}, found no line; fetch the file again")
    return vocabulary


def _id_and_bytes(line: str) -> tuple[int, bytes]:
    """Token id and bytes in one line; raises ValueError or SyntaxError for a malformed line."""
    number, _, rest = line.partition(" ")
    literal, _, size = rest.rpartition(" ")
    if not (_NUMBER.fullmatch(number) and _NUMBER.fullmatch(size)):
        raise ValueError("an id and a size are whole numbers")
    if int(number) == END_OF_TEXT:
        raise ValueError(f"id {END_OF_TEXT} ends a text")
    if not _LITERAL.fullmatch(literal):
        raise ValueError("a token is a literal in quotes")
    value = _literal_value(literal)
    encoded = value if isinstance(value, bytes) else value.encode()
    if len(encoded) != int(size) or not encoded:
        raise ValueError(f"the token has {len(encoded)} bytes")
    return int(number), encoded


def _literal_value(literal: str) -> str | bytes:
    if literal[0] != "b" and "\\" not in literal:
        # Without escapes the literal is its own value. That covers all but 840 of the 65,529 lines of the
        # public file, which takes 0.2 s instead of 0.65 s with ast.
        return literal[1:-1]
    value: str | bytes = ast.literal_eval(literal)
    return value


def _lengths_by_prefix(tokens: Iterable[bytes]) -> dict[bytes, tuple[int, ...]]:
    """First two bytes -> lengths of the tokens that start with them, longest first, and length 1 last."""
    # A table of lengths instead of a trie: 3,652 entries for the public file.
    sizes: dict[bytes, set[int]] = {}
    for token in tokens:
        sizes.setdefault(token[:2], {1}).add(len(token))
    return {prefix: tuple(sorted(lengths, reverse=True)) for prefix, lengths in sizes.items()}


def _added_names(settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """(id, name) of each token that tokenizer_config.json adds; it gives a text or an object with content."""
    decoder = settings.get("added_tokens_decoder")
    for token, value in decoder.items() if isinstance(decoder, Mapping) else ():
        text = value.get("content") if isinstance(value, Mapping) else value
        if str(token).isdecimal() and isinstance(text, str) and text:
            yield int(token), text


def _digest(tokens: Mapping[int, bytes], names: Mapping[int, str]) -> str:
    rows = [*sorted(tokens.items()), *((token, name.encode()) for token, name in sorted(names.items()))]
    return content_digest(*(part for token, data in rows for part in (b"%d %d " % (token, len(data)), data)))
