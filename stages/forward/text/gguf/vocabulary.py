"""Words: the tokenizer.json and tokenizer_config.json that a GGUF file's vocabulary was made from.

Vocabulary and merges are kept apart from the rest of tokenizer.json: Gemma 3 has 262,144 tokens and 514,847
merges, which take a second to build, and a tokenizer that encodes nothing new needs neither.

There are three kinds of vocabulary: byte-level BPE with its merges ("gpt2"), SentencePiece BPE, where the
score of the joined piece decides which pair is joined first ("llama"), and WordPiece ("bert"). What
llama.cpp's converter did is undone. What it left out is a constant that llama.cpp assumes, or an error.

* SentencePiece: a space is put before a text and after every special token, unless the file says otherwise.
  Characters without a piece become bytes. Of two pairs whose pieces have one score the leftmost is joined; of
  two pairs that make the same piece, the one with lower ids, as in transformers' conversion.
* WordPiece: a vocabulary without capital letters lower-cases its text and strips accents; llama.cpp does
  so for every vocabulary.

Works on values; knows neither gguf nor the `tokenizers` library (library.py).
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
"""Version of how merges follow from metadata; raised when ids change with nothing else in the digest."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of the format."""
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
"""Role -> the format's word for it, one with the format's own spelling."""
_SPACE = "\u2581"
"""SentencePiece's character for a space."""
_NONE = ("no_vocab", "none")
_LONGEST = 256  # characters of a piece; Gemma 3 has 31, SentencePiece's own default is 16
_INSTEAD = "put the tokenizer.json of the checkpoint it was made of beside the file"


@dataclass(frozen=True, eq=False)
class Words:
    """A tokenizer in memory: the content of a tokenizer.json and a tokenizer_config.json."""

    description: Mapping[str, Any]
    """Content of tokenizer.json; `model` without `vocab` and `merges`."""
    settings: Mapping[str, Any]
    """Content of tokenizer_config.json."""
    ids: Mapping[str, int]
    """Vocabulary of tokenizer.json: token -> id."""
    merges: Callable[[], list[tuple[str, str]]] | None
    """Builds the merges of tokenizer.json, first to last; None for a tokenizer without merges."""
    digest: str
    """`sha256:…` of everything that decides token ids; independent of the file and of settings."""


@dataclass(frozen=True)
class _Rules:
    """How one kind of vocabulary (byte-level BPE, SentencePiece or WordPiece) is tokenized."""

    described: Mapping[str, Any]
    """Model, normaliser, pre-tokenizer and decoder for tokenizer.json; model without vocab and merges."""
    adds: tuple[str, ...] = ()
    """Special tokens ("bos", "sep", "eos") added to a text, unless metadata of the file say otherwise."""
    merges: Callable[[], list[tuple[str, str]]] | None = None
    """Builds the merges, first to last; None for a tokenizer without merges."""
    decides: tuple[bytes, ...] = ()
    """Bytes from which merges are built, for the digest."""


def words_of(header: Header) -> Words | None:
    """Convert the vocabulary of a GGUF file to a tokenizer.json in memory; None if the file has none.

    Raises:
        TokenizerError: for an unsupported or contradictory vocabulary.
    """
    kind = header.metadata("tokenizer.ggml.model")
    if kind is None or kind in _NONE:
        return None
    if kind not in _KINDS:
        raise TokenizerError(
            f"{header.path}: expected tokenizer.ggml.model to be {', '.join(_KINDS)}, found {kind!r}; "
            f"{_INSTEAD}"
        )
    with _as_tokenizer_error(header):
        return _words_of_kind(header, kind)


@contextmanager
def _as_tokenizer_error(header: Header) -> Iterator[None]:
    """In this block, errors from metadata of unexpected types become a TokenizerError."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(
            f"{header.path}: expected tokenizer metadata (tokenizer.ggml.…) that llama.cpp writes, found "
            f"metadata that cannot be read ({type(error).__name__}: {error!s:.80}); {_INSTEAD}"
        ) from error


def _words_of_kind(header: Header, kind: str) -> Words:
    """Build the content of tokenizer.json, and its digest, for a supported kind of vocabulary."""
    vocabulary = _Vocabulary(header, _word_piece_spelling if kind == "bert" else None)
    rules = _KINDS[kind](vocabulary)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added,
        "normalizer": None,
        "pre_tokenizer": None,
        **rules.described,
        "post_processor": _post_processor(vocabulary, rules.adds),
    }
    parts = (_json(["gguf", VERSION, description]), _json(vocabulary.tokens), vocabulary.types.tobytes())
    # Merges themselves are not hashed: they would have to be built, and follow from these parts.
    digest = content_digest(*parts, *rules.decides)
    return Words(description, _settings(vocabulary), vocabulary.ids, rules.merges, digest)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a GGUF file by id, with their types."""

    header: Header
    """Metadata of the file."""
    unmarked: Callable[[str, int], str] | None = None
    """(token in the file, its type) -> token in the original checkpoint; None if they are the same."""

    def metadata(self, name: str) -> Any:
        return self.header.metadata(f"tokenizer.ggml.{name}")

    def numbers(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """Read a metadata array with one number per token.

        Raises:
            TokenizerError: if the array is missing or has another length.
        """
        values = self.metadata(name)
        if not isinstance(values, np.ndarray) or len(values) != len(self.stored):
            count = f"{len(values)}" if isinstance(values, np.ndarray) else "none"
            raise TokenizerError(
                f"{self.header.path}: expected tokenizer.ggml.{name} with a number for each of "
                f"{len(self.stored)} tokens, found {count}; fetch the file again"
            )
        return values.astype(dtype)

    @cached_property
    def tokens(self) -> list[str]:
        """Tokens by id, spelled as in the original checkpoint."""
        if self.unmarked is None:
            return self.stored
        return [self.unmarked(token, kind) for token, kind in zip(self.stored, self.kinds, strict=True)]

    @cached_property
    def stored(self) -> list[str]:
        tokens = self.metadata("tokens")
        if not isinstance(tokens, list) or not tokens or len(set(tokens)) != len(tokens):
            raise TokenizerError(
                f"{self.header.path}: expected a list of different tokens as tokenizer.ggml.tokens, found "
                f"{'one of them twice' if tokens else 'none'}; fetch the file again"
            )
        return tokens

    @cached_property
    def types(self) -> npt.NDArray[np.int32]:
        """Type of each token, as numbered in the GGUF format (`NORMAL`, `UNKNOWN`, …)."""
        return self.numbers("token_type", "<i4")

    @cached_property
    def kinds(self) -> list[int]:
        """`types` as Python integers, which are faster to compare one by one."""
        kinds: list[int] = self.types.tolist()
        return kinds

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, without placeholders such as [PAD3], which only fill rows of the embedding."""
        return {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            # The converter's own name for rows without a token.
            if not (kind == UNUSED and token == f"[PAD{i}]")
        }

    @property
    def added(self) -> list[dict[str, Any]]:
        """Entries of `added_tokens` in tokenizer.json: tokens matched before a text is cut into words."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": self.tokens[i], **plain, "special": kind != USER_DEFINED}
            for i, kind in enumerate(self.kinds)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]

    def named(self, role: str) -> int | None:
        """Id of a special token by its role, e.g. "bos"; None if the file names none.

        Raises:
            TokenizerError: for an id beyond the vocabulary.
        """
        token = self.metadata(f"{_KEYS.get(role, role)}_token_id")
        if token is not None and not 0 <= int(token) < len(self.tokens):
            raise TokenizerError(
                f"{self.header.path}: expected the id of {role} in 0..{len(self.tokens) - 1}, found {token}; "
                "fetch the file again"
            )
        return None if token is None else int(token)


def _byte_level(vocabulary: _Vocabulary) -> _Rules:
    splitting = _splitting(vocabulary)
    merges = vocabulary.metadata("merges")
    if not isinstance(merges, list):
        raise TokenizerError(
            f"{vocabulary.header.path}: expected a list tokenizer.ggml.merges, found none; fetch the file "
            "again"
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
        lambda: [_merged_pieces(vocabulary, merge) for merge in merges],
        (_json(merges),),
    )


def _merged_pieces(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise TokenizerError(
            f"{vocabulary.header.path}: expected two pieces in each entry of tokenizer.ggml.merges, found "
            f"{merge!r}; fetch the file again"
        )
    return left, right


def _splitting(vocabulary: _Vocabulary) -> Splitting:
    name = vocabulary.metadata("pre")
    if name not in SPLITTINGS:
        near = nearest(str(name), SPLITTINGS)
        raise TokenizerError(
            f"{vocabulary.header.path}: expected tokenizer.ggml.pre to be one of {', '.join(SPLITTINGS)}, "
            f"found {name!r}{f' (nearest is {near!r})' if near else ''}, whose way to cut a text into words "
            f"mizarr does not know; {_INSTEAD}"
        )
    return SPLITTINGS[name]


def _sentence_piece(vocabulary: _Vocabulary) -> _Rules:
    has_prefix = vocabulary.metadata("add_space_prefix") is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepended: list[Mapping[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    decoders: list[Mapping[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN), None)
    scores = vocabulary.numbers("scores", "<f4")
    return _Rules(
        {
            "normalizer": {"type": "Sequence", "normalizers": [*prepended, space]},
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                **_BPE,
                "unk_token": None if unknown is None else vocabulary.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": BYTE in vocabulary.kinds,
            },
        },
        # llama.cpp's default for SentencePiece, where the file does not set add_bos_token.
        ("bos",),
        lambda: _merges_by_score(vocabulary, scores),
        (scores.tobytes(),),
    )


def _merges_by_score(vocabulary: _Vocabulary, scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """BPE merges of a SentencePiece vocabulary: pairs of pieces, by descending score of the joined piece.

    Raises:
        TokenizerError: for pieces so long that trying all their splits would take forever.
    """
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    pieces = {token: i for i, token in enumerate(tokens) if kinds[i] in (NORMAL, USER_DEFINED)}
    # All splits of every piece are tried, so the cost is quadratic in the length of a piece.
    if (longest := max(map(len, pieces), default=0)) > _LONGEST:
        raise TokenizerError(
            f"{vocabulary.header.path}: expected tokens of at most {_LONGEST} characters, found one of "
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
    # The last key sorts first: by score, then by ids of the two pieces, as transformers' conversion does.
    order = np.lexsort((np.array(rights), np.array(lefts), -scores[joined])).tolist()
    return [(tokens[lefts[n]], tokens[rights[n]]) for n in order]


def _word_piece(vocabulary: _Vocabulary) -> _Rules:
    unknown = vocabulary.named("unk")
    # The format does not say whether a vocabulary is uncased; capitals in it show that it is not.
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
                # The limit of BERT's own tokenizer, which no metadata repeat.
                "max_input_chars_per_word": 100,
            },
        },
        ("bos", "sep"),
    )


def _word_piece_spelling(token: str, kind: int) -> str:
    """Spell a token as WordPiece does: "##" marks a continuation, where GGUF marks the start of a word."""
    # The converter leaves tokens in brackets, such as [unused7], unmarked.
    if token.startswith(_SPACE):
        return token[1:]
    is_plain = kind == NORMAL and not (token.startswith("[") and token.endswith("]"))
    return f"##{token}" if is_plain else token


def _post_processor(vocabulary: _Vocabulary, adds: Sequence[str]) -> dict[str, Any] | None:
    """Post-processor of tokenizer.json, which adds special tokens around a text; None if it adds none.

    Raises:
        TokenizerError: for a special token without an id.
    """
    settings = {role: vocabulary.metadata(f"add_{role}_token") for role in ("bos", "sep", "eos")}
    added = {role: role in adds if setting is None else bool(setting) for role, setting in settings.items()}
    # BERT's files may ask for both closing tokens; its tokenizer adds the separator only.
    added["eos"] = added["eos"] and not added["sep"]
    tokens = {}
    for role in (role for role, is_added in added.items() if is_added):
        token = vocabulary.named(role)
        if token is None:
            raise TokenizerError(
                f"{vocabulary.header.path}: expected tokenizer.ggml.{_KEYS.get(role, role)}_token_id, "
                f"because this token is added to every text, found none; {_INSTEAD}"
            )
        tokens[role] = (token, vocabulary.tokens[token])
    if not tokens:
        return None

    def template(sequence: str, *, with_bos: bool) -> list[dict[str, Any]]:
        first = [tokens["bos"]] if with_bos and "bos" in tokens else []
        last = [tokens[role] for role in ("sep", "eos") if role in tokens]
        return [
            *({"SpecialToken": {"id": text, "type_id": 0}} for _, text in first),
            {"Sequence": {"id": sequence, "type_id": 0}},
            *({"SpecialToken": {"id": text, "type_id": 0}} for _, text in last),
        ]

    return {
        "type": "TemplateProcessing",
        "single": template("A", with_bos=True),
        "pair": [*template("A", with_bos=True), *template("B", with_bos=False)],
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
    template = vocabulary.header.metadata("tokenizer.chat_template")
    others = vocabulary.header.metadata("tokenizer.chat_templates") or []
    if template is not None:
        settings["chat_template"] = template
    if others:
        named = {name: vocabulary.header.metadata(f"tokenizer.chat_template.{name}") for name in others}
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
