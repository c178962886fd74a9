"""Metadata of a GGUF file as the tokenizer.json and tokenizer_config.json it was made of.

Vocabulary and merges stay apart from the rest of tokenizer.json: Gemma 3's are 262,144 tokens and 514,847
merges, which take a second to make, and a tokenizer that encodes nothing new needs neither.

Three kinds of vocabulary: byte-level BPE with its merges ("gpt2"), SentencePiece's BPE, where the score of
what two pieces make decides which are joined first ("llama"), and WordPiece ("bert"). What llama.cpp's
converter did is undone; what it left out is what llama.cpp takes for granted, or an error.

* SentencePiece: a space is put before a text, and behind every special token, unless the file says otherwise.
  Characters that no piece has are bytes. Of two pairs that make pieces of one score the leftmost is joined;
  of two ways to make the same piece, the one of lower ids, as in transformers' conversion.
* WordPiece: a vocabulary without a capital letter is of a model that reads none, and lower-cases and strips
  accents; llama.cpp does so whatever the vocabulary.

Border: values in, values out; knows neither gguf nor the `tokenizers` library (library.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .....store.digest import content_digest
from .....store.errors import TokenizerError, nearest
from ...checkpoints.gguf.header import Header
from .splitting import SPLITTINGS, Splitting

__all__ = ["Words", "words_of"]

VERSION = 1
"""Declared, of how merges follow from metadata: moves when ids do that nothing else in a digest shows."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, as the format counts them."""
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
"""The format's words for them, one in its own spelling."""
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_NONE = ("no_vocab", "none")
_LONGEST = 256  # characters of a piece; Gemma 3 has 31, SentencePiece's own default is 16
_INSTEAD = "put the tokenizer.json of the checkpoint it was made of beside the file"


@dataclass(frozen=True, eq=False)
class Words:
    """A tokenizer as values: what a tokenizer.json and a tokenizer_config.json would hold."""

    description: Mapping[str, Any]
    """Keys of tokenizer.json; `model` without `vocab` and `merges`."""
    settings: Mapping[str, Any]
    """Keys of tokenizer_config.json."""
    ids: Mapping[str, int]
    """`vocab` of the model: token -> id."""
    merges: Callable[[], list[tuple[str, str]]] | None
    """`merges` of the model, first to last; None for a model that has none."""
    digest: str
    """`sha256:…` of all that decides ids, which is not the file: settings are no part of it."""


@dataclass(frozen=True)
class _Rules:
    """What kinds of vocabulary differ in."""

    described: Mapping[str, Any]
    """Keys of tokenizer.json; `model` without `vocab` and `merges`."""
    adds: tuple[str, ...] = ()
    """Of bos, sep and eos, those that are put around a text where the file says nothing."""
    merges: Callable[[], list[tuple[str, str]]] | None = None
    """As `Words.merges`."""
    decides: tuple[bytes, ...] = ()
    """What merges are made of, for the digest."""


def words_of(header: Header) -> Words | None:
    """The tokenizer of a file; None for one without a vocabulary.

    Raises TokenizerError for a vocabulary that is not read, naming what it is, and for one that contradicts
    itself.
    """
    kind = header.told("tokenizer.ggml.model")
    if kind is None or kind in _NONE:
        return None
    if kind not in _KINDS:
        raise TokenizerError(
            f"{header.path}: expected tokenizer.ggml.model to be {', '.join(_KINDS)}, found {kind!r}; "
            f"{_INSTEAD}"
        )
    with _in_one_line(header):
        return _words(header, kind)


@contextmanager
def _in_one_line(header: Header) -> Iterator[None]:
    """TokenizerError for metadata of other types than the format says."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(
            f"{header.path}: expected the vocabulary of a model, found other metadata "
            f"({type(error).__name__}: {error!s:.80}); {_INSTEAD}"
        ) from error


def _words(header: Header, kind: str) -> Words:
    """As `words_of`, of a kind of vocabulary that is read."""
    vocabulary = _Vocabulary(header, _marked if kind == "bert" else None)
    rules = _KINDS[kind](vocabulary)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added,
        "normalizer": None,
        "pre_tokenizer": None,
        **rules.described,
        "post_processor": _around(vocabulary, rules.adds),
    }
    parts = (_json(["gguf", VERSION, description]), _json(vocabulary.tokens), vocabulary.types.tobytes())
    digest = content_digest(*parts, *rules.decides)
    return Words(description, _settings(vocabulary), vocabulary.ids, rules.merges, digest)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a file, by id. unmarked: what the converter's spelling of a token, of a type, stands for."""

    header: Header
    unmarked: Callable[[str, int], str] | None = None

    def told(self, name: str) -> Any:
        return self.header.told(f"tokenizer.ggml.{name}")

    def numbers(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """One number per token. Raises TokenizerError where there is none, or of another number."""
        found = self.told(name)
        if not isinstance(found, np.ndarray) or len(found) != len(self.stored):
            what = f"{len(found)}" if isinstance(found, np.ndarray) else "none"
            raise TokenizerError(
                f"{self.header.path}: expected tokenizer.ggml.{name} for each of {len(self.stored)} tokens, "
                f"found {what}; fetch the file again"
            )
        return found.astype(dtype)

    @cached_property
    def tokens(self) -> list[str]:
        """As the checkpoint's tokenizer spells them."""
        if self.unmarked is None:
            return self.stored
        return [self.unmarked(token, kind) for token, kind in zip(self.stored, self.kinds, strict=True)]

    @cached_property
    def stored(self) -> list[str]:
        found = self.told("tokens")
        if not isinstance(found, list) or not found or len(set(found)) != len(found):
            raise TokenizerError(
                f"{self.header.path}: expected tokenizer.ggml.tokens, all of them different, found "
                f"{'some twice' if found else 'none'}; fetch the file again"
            )
        return found

    @cached_property
    def types(self) -> npt.NDArray[np.int32]:
        """Type of each token, as the format counts them."""
        return self.numbers("token_type", "<i4")

    @cached_property
    def kinds(self) -> list[int]:
        """`types` as Python's own integers."""
        kinds: list[int] = self.types.tolist()
        return kinds

    @cached_property
    def ids(self) -> dict[str, int]:
        """Tokens, without those that only fill the rows of an embedding."""
        return {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if not (kind == UNUSED and token == f"[PAD{i}]")
        }

    @property
    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is cut into words."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": self.tokens[i], **plain, "special": kind != USER_DEFINED}
            for i, kind in enumerate(self.kinds)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]

    def named(self, role: str) -> int | None:
        """Id of a special token. Raises TokenizerError for one beyond the vocabulary."""
        found = self.told(f"{_KEYS.get(role, role)}_token_id")
        if found is not None and not 0 <= int(found) < len(self.tokens):
            raise TokenizerError(
                f"{self.header.path}: expected the id of {role} in 0..{len(self.tokens) - 1}, found {found}; "
                "fetch the file again"
            )
        return None if found is None else int(found)


def _byte_level(vocabulary: _Vocabulary) -> _Rules:
    splitting = _splitting(vocabulary)
    merges = vocabulary.told("merges")
    if not isinstance(merges, list):
        raise TokenizerError(
            f"{vocabulary.header.path}: expected tokenizer.ggml.merges beside its tokens, found none; fetch "
            "the file again"
        )
    return _Rules(
        {
            "normalizer": splitting.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitting.cuts)},
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {**_BPE, "ignore_merges": splitting.takes_words},
        },
        ("bos",) * splitting.adds_bos + ("sep",) * splitting.adds_sep,
        lambda: [_pair(vocabulary, merge) for merge in merges],
        (_json(merges),),
    )


def _pair(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise TokenizerError(
            f"{vocabulary.header.path}: expected two pieces in each of tokenizer.ggml.merges, found "
            f"{merge!r}; fetch the file again"
        )
    return left, right


def _splitting(vocabulary: _Vocabulary) -> Splitting:
    name = vocabulary.told("pre")
    if name not in SPLITTINGS:
        near = nearest(str(name), SPLITTINGS)
        raise TokenizerError(
            f"{vocabulary.header.path}: expected tokenizer.ggml.pre to be one of {', '.join(SPLITTINGS)}, "
            f"found {name!r}{f' (nearest is {near!r})' if near else ''}, of which nothing says how it cuts "
            f"words; {_INSTEAD}"
        )
    return SPLITTINGS[name]


def _sentence_piece(vocabulary: _Vocabulary) -> _Rules:
    has_prefix = vocabulary.told("add_space_prefix") is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before: list[Mapping[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    behind: list[Mapping[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        behind.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN), None)
    scores = vocabulary.numbers("scores", "<f4")
    return _Rules(
        {
            "normalizer": {"type": "Sequence", "normalizers": [*before, space]},
            "decoder": {"type": "Sequence", "decoders": behind},
            "model": {
                **_BPE,
                "unk_token": None if unknown is None else vocabulary.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": BYTE in vocabulary.kinds,
            },
        },
        ("bos",),
        lambda: _joined_first(vocabulary, scores),
        (scores.tobytes(),),
    )


def _joined_first(vocabulary: _Vocabulary, scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """Pairs of pieces that are a piece together, that of the highest score first. Raises TokenizerError for
    pieces so long that to look at all their pairs would take forever."""
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    pieces = {token: i for i, token in enumerate(tokens) if kinds[i] in (NORMAL, USER_DEFINED)}
    if (longest := max(map(len, pieces), default=0)) > _LONGEST:
        raise TokenizerError(
            f"{vocabulary.header.path}: expected pieces of at most {_LONGEST} characters, found one of "
            f"{longest}; {_INSTEAD}"
        )
    id_of = pieces.get
    joined: list[int] = []
    lefts: list[int] = []
    rights: list[int] = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left = id_of(piece[:at])
            if left is not None and (right := id_of(piece[at:])) is not None:
                joined.append(i)
                lefts.append(left)
                rights.append(right)
    order = np.lexsort((np.array(rights), np.array(lefts), -scores[joined])).tolist()
    return [(tokens[lefts[n]], tokens[rights[n]]) for n in order]


def _word_piece(vocabulary: _Vocabulary) -> _Rules:
    unknown = vocabulary.named("unk")
    lowers = not any(
        token.lower() != token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind == NORMAL and not token.startswith("[")
    )
    return _Rules(
        {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": lowers,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]" if unknown is None else vocabulary.tokens[unknown],
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        },
        ("bos", "sep"),
    )


def _marked(token: str, kind: int) -> str:
    """A piece with a mark if it goes on, where the format has one if it begins; what stands in brackets
    ([unused7]) the converter once left as it is."""
    if token.startswith(_SPACE):
        return token[1:]
    is_plain = kind == NORMAL and not (token.startswith("[") and token.endswith("]"))
    return f"##{token}" if is_plain else token


def _around(vocabulary: _Vocabulary, adds: Sequence[str]) -> dict[str, Any] | None:
    """What puts special tokens around a text. Raises TokenizerError for one the file does not name."""
    wanted = {role: vocabulary.told(f"add_{role}_token") for role in ("bos", "sep", "eos")}
    chosen = {role: role in adds if said is None else bool(said) for role, said in wanted.items()}
    # One closing token: BERT's separator, where both are asked for.
    chosen["eos"] = chosen["eos"] and not chosen["sep"]
    tokens = {}
    for role in (role for role, is_chosen in chosen.items() if is_chosen):
        token = vocabulary.named(role)
        if token is None:
            raise TokenizerError(
                f"{vocabulary.header.path}: expected tokenizer.ggml.{_KEYS.get(role, role)}_token_id, as one "
                f"is added to every text, found none; {_INSTEAD}"
            )
        tokens[role] = (token, vocabulary.tokens[token])
    if not tokens:
        return None

    def one(sequence: str, *, opens: bool) -> list[dict[str, Any]]:
        first = [tokens["bos"]] if opens and "bos" in tokens else []
        last = [tokens[role] for role in ("sep", "eos") if role in tokens]
        return [
            *({"SpecialToken": {"id": text, "type_id": 0}} for _, text in first),
            {"Sequence": {"id": sequence, "type_id": 0}},
            *({"SpecialToken": {"id": text, "type_id": 0}} for _, text in last),
        ]

    return {
        "type": "TemplateProcessing",
        "single": one("A", opens=True),
        "pair": [*one("A", opens=True), *one("B", opens=False)],
        "special_tokens": {
            text: {"id": text, "ids": [token], "tokens": [text]} for token, text in tokens.values()
        },
    }


def _settings(vocabulary: _Vocabulary) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for role in _NAMED:
        token = vocabulary.named(role)
        if token is not None:
            settings[f"{role}_token"] = vocabulary.tokens[token]
    template = vocabulary.header.told("tokenizer.chat_template")
    others = vocabulary.header.told("tokenizer.chat_templates") or []
    if template is not None:
        settings["chat_template"] = template
    if others:
        named = {name: vocabulary.header.told(f"tokenizer.chat_template.{name}") for name in others}
        named = ({} if template is None else {"default": template}) | named
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return settings


_BPE: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
_KINDS = {"gpt2": _byte_level, "llama": _sentence_piece, "bert": _word_piece}
"""tokenizer.ggml.model -> how it is read."""
