"""LibraryTokenizer: tokenizers of the `tokenizers` library, from a tokenizer.json or from values.

The only file that knows the library. Pieces are the library's own, such as "Ġis"; a token that ends inside a
character has the offsets of that character.
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
from .remembered import cached_encodings
from .rows import as_ids, as_text
from .tokens import Encoding, Tokenizer, read_tokenizer

if TYPE_CHECKING:
    import tokenizers

    from .gguf.vocabulary import Words


class LibraryTokenizer(Tokenizer):
    """Tokenizer read from a tokenizer.json, with the tokens that other files in its folder declare.

    Its digest covers both.
    """

    def __init__(
        self, file: Path, settings: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> None:
        """Read a tokenizer.json.

        Arguments:
            file: a tokenizer.json.
            settings: content of tokenizer_config.json; None reads it from the folder of the file.
            name: name of the model; None for the name of the folder.

        Raises:
            TokenizerError: for a missing or malformed file.
        """
        import tokenizers

        data = read_tokenizer(file)
        try:
            backend = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise TokenizerError(
                f"expected a tokenizer.json at {file}, found a file that cannot be read as one ({error}); "
                "fetch it again, or pass token ids instead of text"
            ) from error
        file_tokens, padding = _added_tokens(backend), backend.padding
        pad = None if padding is None else padding["pad_token"]
        super().__init__(file, settings, name=name, added=file_tokens, pad=pad)
        self._backend = self._with_declared_tokens(backend, file_tokens)
        self.digest = self._digest(data, file_tokens)

    def _with_declared_tokens(
        self, backend: tokenizers.Tokenizer, file_tokens: Mapping[int, AddedToken]
    ) -> tokenizers.Tokenizer:
        """Add the tokens that other files of the folder declare to the library's tokenizer, in place."""
        import tokenizers

        # Training scripts leave truncation and padding in the file; both would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        # Also tokens the file has: adding one again replaces its flags, as transformers does.
        tokens = self._declared.to_add(file_tokens.values())
        backend.add_tokens([tokenizers.AddedToken(**vars(token)) for token in tokens])
        backend.encode_special_tokens = self._declared.splits_special
        return backend

    def _digest(self, data: bytes, file_tokens: Mapping[int, AddedToken]) -> str:
        """Digest of tokenizer.json, and of the tokens and flags that other files of the folder change."""
        # Without changes the digest is that of the file, as for a tokenizer that stands alone.
        # Sorted by id, so that the digest does not depend on the order of the library's dict.
        changed = sorted(_added_tokens(self._backend).items() - file_tokens.items())
        if not changed and not self._declared.splits_special:
            return content_digest(data)
        changes = [self._declared.splits_special, *([number, vars(token)] for number, token in changed)]
        return content_digest(data, json.dumps(changes).encode())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens; a model's embedding may have more rows."""
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
        """Encode many texts on all cores; `add_special` adds the special tokens of the model."""
        results = self._backend.encode_batch(list(texts), add_special_tokens=add_special)
        return [_encoding(text, result) for text, result in zip(texts, results, strict=True)]

    def ids_of(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """Token ids of many texts, computed on all cores, without character offsets.

        Arguments:
            texts: the texts.
            add_special: whether to add the special tokens of the model.
        """
        checked = [as_text(text, self.name) for text in texts]
        # The fast form computes no offsets, which a corpus does not keep.
        results = self._backend.encode_batch_fast(checked, add_special_tokens=add_special)
        return [result.ids for result in results]

    def decode(self, ids: Sequence[int], *, keep_special: bool = True) -> str:
        """Convert token ids to text.

        Arguments:
            ids: token ids.
            keep_special: whether special tokens are part of the text.

        Raises:
            TokenizerError: for an id without a token.
        """
        tokens = as_ids(ids)
        self.pieces(tokens)  # raises, where the library would skip such an id
        return str(self._backend.decode(tokens, skip_special_tokens=not keep_special))

    def decode_token(self, token: int) -> str:
        """Text of one token as it reads inside a sentence, e.g. " Paris"; "" for an id without a token."""
        if self._piece(int(token)) is None:
            return ""
        # After other tokens, because decoders strip the leading space of the first token.
        preceding_ids, preceding_text = self._preceding
        text = self._backend.decode([*preceding_ids, int(token)], skip_special_tokens=False)
        # Some decoders join pieces or strip spaces across tokens; the token is then decoded alone.
        if text.startswith(preceding_text):
            return str(text[len(preceding_text) :])
        return str(self._backend.decode([int(token)], skip_special_tokens=False))

    @cached_property
    def _preceding(self) -> tuple[list[int], str]:
        """Token ids of a short text, and the text that they decode to."""
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return ids, self._backend.decode(ids, skip_special_tokens=False)


class VocabularyTokenizer(LibraryTokenizer):
    """Tokenizer made from the vocabulary in a GGUF file, built on first use.

    Building takes 1.5 s for a vocabulary of 262,144 tokens.
    """

    def __init__(self, words: Words, file: Path, *, name: str) -> None:
        """Prepare a tokenizer that is built when it is first used.

        Arguments:
            words: vocabulary of a GGUF file.
            file: path of the file, for messages.
            name: name of the model.

        Raises:
            TokenizerError: for a malformed declaration.
        """
        self._words, self._file = words, file
        self._file_tokens = {
            token["id"]: AddedToken(**{key: token[key] for key in token if key != "id"})
            for token in words.description["added_tokens"]
        }
        # Skips LibraryTokenizer.__init__, which reads a tokenizer.json.
        Tokenizer.__init__(self, file, words.settings, name=name, added=self._file_tokens)
        known = set(self._file_tokens.values())
        added = [vars(token) for token in self._declared.to_add(known) if token not in known]
        self.digest = (
            words.digest if not added else content_digest(words.digest.encode(), json.dumps(added).encode())
        )

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:  # type: ignore[override]
        """The library's tokenizer. Raises TokenizerError for a contradictory vocabulary."""
        import tokenizers

        words = self._words
        model = dict(words.description["model"])
        empty = {**model, "vocab": {}}
        if words.merges is not None:
            model["merges"] = words.merges()
            empty["merges"] = []
        # Class of the library, e.g. BPE; the other keys of `model` are its arguments.
        kind = getattr(tokenizers.models, model.pop("type"))
        arguments = {key: value for key, value in model.items() if value is not None}
        described = json.dumps({**words.description, "model": empty, "added_tokens": []})
        try:
            backend = tokenizers.Tokenizer.from_str(described)
            # The vocabulary is passed as values: as JSON, 14 MB take twice as long and ten times the memory.
            backend.model = kind(vocab=words.ids, **arguments)
        except Exception as error:  # the library raises bare Exception, as for a tokenizer.json
            raise TokenizerError(
                f"expected a vocabulary in {self._file}, found one that cannot be read ({error}); fetch the "
                "file again, or pass token ids instead of text"
            ) from error
        return self._with_declared_tokens(backend, self._file_tokens)

    def _encode(self, text: str, add_special: bool) -> Encoding:
        return self._encode_batch([text], add_special)[0]

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[Encoding]:
        """Encode texts; encodings of few short texts come from a cache on disk (remembered.py)."""
        # Deferred: a cached encoding must not build the library's tokenizer.
        encode = partial(super()._encode_batch, texts, add_special)
        return cached_encodings(texts, add_special, self._cache_key, encode)

    @cached_property
    def _cache_key(self) -> str:
        """Digest of the tokenizer and version of the library: both decide an encoding."""
        return f"{self.digest} tokenizers {version('tokenizers')}"


def _added_tokens(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    """Id -> token, for the tokens that are matched before a text is cut into pieces."""
    names = [field.name for field in fields(AddedToken)]
    return {
        number: AddedToken(**{name: getattr(token, name) for name in names})
        for number, token in backend.get_added_tokens_decoder().items()
    }


def _encoding(text: str, result: tokenizers.Encoding) -> Encoding:
    # Each of these attributes builds a new list at every access, so each is read once.
    return Encoding(
        result.ids, result.tokens, result.offsets, [bool(mark) for mark in result.special_tokens_mask], text
    )
