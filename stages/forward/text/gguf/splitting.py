"""Splitting: how byte-level tokenizers cut a text into words before BPE, by their `tokenizer.ggml.pre` name.

llama.cpp's converter recognises a vocabulary by the ids it gives to one long text. So a name stands for one
publisher's tokenizer and for everything in it that the GGUF file does not repeat: how words are cut, whether
a word that is a token skips the merges, how characters are normalised. A row repeats that tokenizer.json. A
name without a row is refused, because a wrong cut gives other ids without any error.
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
    """How one publisher's tokenizer cuts a text into words before BPE, with its special-token defaults."""

    cuts: tuple[Part, ...]
    """Pre-tokenizers of tokenizer.json in order; each splits the words that the previous one made."""
    takes_words: bool = False
    """Whether a word in the vocabulary becomes one token without applying merges (`ignore_merges`)."""
    adds_bos: bool = False
    """Whether BOS is added before a text, unless the GGUF file says otherwise."""
    adds_sep: bool = False
    """Whether a separator token is added after a text, unless the GGUF file says otherwise."""
    normalizer: Part | None = None
    """Unicode normaliser applied to a text first; None for no normalisation."""


def _cut(pattern: str) -> Part:
    """Pre-tokenizer that makes a word of each match of a regex, and of the text between two matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, cuts: bool) -> Part:
    """Pre-tokenizer that writes bytes as printable characters; with `cuts`, it first splits as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": cuts}


AS_BYTES = _bytes(cuts=False)
"""Pre-tokenizer that only writes bytes as printable characters."""
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
"""tokenizer.ggml.pre -> the tokenizer it stands for."""
