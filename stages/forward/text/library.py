"""Tokenizers of the `tokenizers` library: whatever a tokenizer.json describes, or values in place of one.

Border: the one file that knows the library. Pieces are its own, such as "Ġis"; a token that ends inside a
character has that character's offsets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.digest import content_digest
from ....store.errors import TokenizerError
from .declared import AddedToken
from .remembered import remembered
from .rows import as_ids, as_text
from .tokens import Encoding, Tokenizer, read_tokenizer

if TYPE_CHECKING:
    import tokenizers

    from .gguf.vocabulary import Words


class LibraryTokenizer(Tokenizer):
    """A tokenizer.json with the tokens that files beside it add (declared.py). Its digest is of these bytes
    and of what was added."""

    def __init__(
        self, file: Path, settings: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> None:
        """As `Tokenizer`."""
        import tokenizers

        data = read_tokenizer(file)
        try:
            backend = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise TokenizerError(
                f"expected a tokenizer.json at {file}, found a file that cannot be read as one ({error}); "
                "fetch it again, or pass token ids instead of text"
            ) from error
        own, padding = _added_tokens(backend), backend.padding
        pad = None if padding is None else padding["pad_token"]
        super().__init__(file, settings, name=name, own=own, pad=pad)
        self._backend = self._declaring(backend, own)
        self.digest = self._digest(data, own)

    def _declaring(
        self, backend: tokenizers.Tokenizer, own: Mapping[int, AddedToken]
    ) -> tokenizers.Tokenizer:
        """A tokenizer of the library with what files beside its own declare. own: id -> token it adds."""
        import tokenizers

        # A training script's truncation and padding stay in the file; both would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        tokens = self._declared.to_add(own.values())
        backend.add_tokens([tokenizers.AddedToken(**vars(token)) for token in tokens])
        backend.encode_special_tokens = self._declared.splits_special
        return backend

    def _digest(self, data: bytes, own: Mapping[int, AddedToken]) -> str:
        """Of the file and, where other files change what it does with a text, of these changes."""
        changed = sorted(_added_tokens(self._backend).items() - own.items())
        if not changed and not self._declared.splits_special:
            return content_digest(data)
        told = [self._declared.splits_special, *([number, vars(token)] for number, token in changed)]
        return content_digest(data, json.dumps(told).encode())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def _end(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _id_of(self, text: str) -> int | None:
        return self._backend.token_to_id(text)

    def _piece(self, token: int) -> str | None:
        return self._backend.id_to_token(token) if token >= 0 else None

    def _encode(self, text: str, add_special: bool) -> Encoding:
        return _encoding(text, self._backend.encode(text, add_special_tokens=add_special))

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        """See `Tokenizer`: the library encodes them on all cores."""
        found = self._backend.encode_batch(list(texts), add_special_tokens=add_special)
        return [_encoding(text, one) for text, one in zip(texts, found, strict=True)]

    def ids_of(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """As `Tokenizer.ids_of`; on all cores, without offsets."""
        checked = [as_text(text, self.name) for text in texts]
        found = self._backend.encode_batch_fast(checked, add_special_tokens=add_special)
        return [one.ids for one in found]

    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Text of token ids. Raises TokenizerError for an id the tokenizer has no token for."""
        tokens = as_ids(ids)
        self.pieces(tokens)
        return str(self._backend.decode(tokens, skip_special_tokens=not keep_special))

    def decode_token(self, token: int) -> str:
        """Text of one token as it reads inside a sentence, " Paris" where decoders alone strip the space.

        "" for an id without a token: embeddings often have more rows than there are tokens.
        """
        if self._piece(int(token)) is None:
            return ""
        anchor, alone = self._anchor
        whole = self._backend.decode([*anchor, int(token)], skip_special_tokens=False)
        if whole.startswith(alone):
            return str(whole[len(alone) :])
        return str(self._backend.decode([int(token)], skip_special_tokens=False))

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Tokens to decode another behind, since decoders strip the space of the first; and their text."""
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return ids, self._backend.decode(ids, skip_special_tokens=False)


class VocabularyTokenizer(LibraryTokenizer):
    """A tokenizer of values in place of a tokenizer.json, made when it is first needed: for a vocabulary of
    262,144 tokens that takes 1.5 s."""

    def __init__(self, words: Words, file: Path, *, name: str) -> None:
        """words: of a GGUF file. file, name: as of `Tokenizer`. Raises TokenizerError."""
        self._words, self._file = words, file
        self._own = {
            token["id"]: AddedToken(**{key: token[key] for key in token if key != "id"})
            for token in words.description["added_tokens"]
        }
        # Not that of LibraryTokenizer, which reads a file.
        Tokenizer.__init__(self, file, words.settings, name=name, own=self._own)
        known = set(self._own.values())
        added = [vars(token) for token in self._declared.to_add(known) if token not in known]
        self.digest = (
            words.digest if not added else content_digest(words.digest.encode(), json.dumps(added).encode())
        )

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:  # type: ignore[override]
        """The library's tokenizer. Raises TokenizerError for values that contradict each other."""
        import tokenizers

        words = self._words
        model = dict(words.description["model"])
        empty = {**model, "vocab": {}}
        if words.merges is not None:
            model["merges"] = words.merges()
            empty["merges"] = []
        kind = getattr(tokenizers.models, model.pop("type"))
        given = {key: value for key, value in model.items() if value is not None}
        described = json.dumps({**words.description, "model": empty, "added_tokens": []})
        try:
            backend = tokenizers.Tokenizer.from_str(described)
            # Given as values: as JSON of 14 MB they take twice as long, and ten times the memory meanwhile.
            backend.model = kind(vocab=words.ids, **given)
        except Exception as error:  # as of a tokenizer.json
            raise TokenizerError(
                f"expected a vocabulary in {self._file}, found one that cannot be read ({error}); fetch it "
                "again, or pass token ids instead of text"
            ) from error
        return self._declaring(backend, self._own)

    def _encode(self, text: str, add_special: bool) -> Encoding:
        return self._encode_batch([text], add_special)[0]

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        """See `Tokenizer`; a few short texts as they were encoded once (remembered.py)."""
        encode = partial(super()._encode_batch, texts, add_special)
        return remembered(texts, add_special, self._witness, encode)

    @cached_property
    def _witness(self) -> str:
        """What encodes, and by which version of the library."""
        return f"{self.digest} tokenizers {version('tokenizers')}"


def _added_tokens(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    """Id -> token of those that are found in a text before it is cut up."""
    names = [field.name for field in fields(AddedToken)]
    return {
        number: AddedToken(**{name: getattr(token, name) for name in names})
        for number, token in backend.get_added_tokens_decoder().items()
    }


def _encoding(text: str, found: tokenizers.Encoding) -> Encoding:
    # Each of these attributes is a new list at every access.
    return Encoding(
        found.ids, found.tokens, found.offsets, [bool(mark) for mark in found.special_tokens_mask], text
    )
