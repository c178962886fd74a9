"""How byte-level vocabularies cut a text into words before they merge bytes, by the name GGUF files give it.

llama.cpp's converter names a vocabulary by the ids it gives to one long text (`tokenizer.ggml.pre`), so a
name stands for one publisher's tokenizer, and for all of it that the file does not repeat: how words are cut,
whether a word that is a token is taken whole, how characters are normalised. A row is what that
tokenizer.json says. A name without a row is refused: a wrong cut gives other ids and no error.

Border: descriptions in the form of tokenizer.json, as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AS_BYTES", "SPLITTINGS", "Splitting"]

Part = Mapping[str, Any]

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{many}{_LOWER}{few}" for many, few in ("*+", "+*"))
"""Words that end at a capital, and words of capitals."""


@dataclass(frozen=True)
class Splitting:
    """What one name stands for.

    cuts: one after the other, each within what those before left whole. takes_words: a word that is a token
    is that token, whatever merges would give. adds_bos: unless the file says otherwise. adds_sep: likewise, a
    closing token. normalizer: of characters, before all else.
    """

    cuts: tuple[Part, ...]
    takes_words: bool = False
    adds_bos: bool = False
    adds_sep: bool = False
    normalizer: Part | None = None


def _cut(pattern: str) -> Part:
    """Matches, and what lies between them, are words."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, cuts: bool) -> Part:
    """Bytes as printable characters; cuts: after a cut by GPT-2's pattern."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": cuts}


AS_BYTES = _bytes(cuts=False)
"""Bytes as printable characters, and back."""
_GPT2 = Splitting((_bytes(cuts=True),))
_LLAMA3 = (_cut(rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}"), AS_BYTES)
_QWEN2 = (_cut(rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_MARKS}[\r\n]*|{_SPACES}"), AS_BYTES)
_TEKKEN = (_cut(rf"{'|'.join(_BY_CASE)}|\p{{N}}|{_MARKS}[\r\n/]*|{_SPACES}"), AS_BYTES)
_GPT4O = (
    _cut(rf"{'|'.join(f'{word}{_ENDINGS}?' for word in _BY_CASE)}|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}"),
    AS_BYTES,
)
_DIGITS = ({"type": "Digits", "individual_digits": True}, _bytes(cuts=True))
_DEEPSEEK_CODER = (
    _cut(r"[\r\n]"),
    _cut(r"\s?\p{L}+"),
    _cut(r"\s?\p{P}+"),
    _cut("[一-龥ࠀ-一가-퟿]+"),
    {"type": "Digits", "individual_digits": True},
    AS_BYTES,
)
_DEEPSEEK_3 = (
    _cut(r"\p{N}{1,3}"),
    _cut("[一-龥぀-ゟ゠-ヿ]+"),
    _cut(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
    ),
    AS_BYTES,
)

SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "roberta-bpe": Splitting(_GPT2.cuts, adds_bos=True, adds_sep=True),
    "llama-bpe": Splitting(_LLAMA3, takes_words=True, adds_bos=True),
    "llama3": Splitting(_LLAMA3, takes_words=True, adds_bos=True),
    "llama-v3": Splitting(_LLAMA3, takes_words=True, adds_bos=True),
    "smaug-bpe": Splitting(_LLAMA3),
    "tekken": Splitting(_TEKKEN, takes_words=True, adds_bos=True),
    "qwen2": Splitting(_QWEN2, normalizer={"type": "NFC"}),
    "gpt-4o": Splitting(_GPT4O),
    "starcoder": Splitting(_DIGITS),
    "refact": Splitting(_DIGITS),
    "smollm": Splitting(_DIGITS),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK_3),
}
"""tokenizer.ggml.pre -> what it stands for."""
