"""A corpus: files of documents, and how they become prompts of a model.

Each file is tokenised by itself, as a stream, into a result of its own: keyed by the content of the file, the
tokenizer and how it is read, never by its name. So adding a file costs that file, and packed prompts do not
reach from one into the next. The token ids of all, end to end, are what a run is keyed by.

Border: files and a tokenizer in, token ids and labels out; knows no model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from glob import has_magic, iglob
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from .....pipeline.execute import run
from .....pipeline.nodes import Estimate
from .....pipeline.pinned import PinnedFiles
from .....pipeline.sources import SourceNode
from .....store.arrays import as_count, as_list, as_number, require_kind, shown
from .....store.digest import LARGEST
from .....store.errors import PromptError, TokenizerError
from .....store.runs.packed import PackedTokens
from ..prompts import pack_encodings
from .contexts import Framing, Ids, framed_prompts
from .formats import FORMATS, Document, Reading, ending, read_documents

if TYPE_CHECKING:
    import xarray as xr

    from .....store import Store
    from ..tokens import Tokenizer

__all__ = ["Corpus", "encoded"]

VERSION = 2
BATCH = 1 << 20
"""Characters of documents that are tokenised together."""
DOCUMENT = "document"
_TAKEN = {
    *(DOCUMENT, "document_id", "prompt_id", "prompt", "row_size", "row_start", "pair_start", "text"),
    *("token", "token_id", "token_string", "position", "layer", "hidden", "char_start", "char_end"),
}
_NAMEABLE = re.compile(r"(?!\.|__|zarr\.json$)[^/\\\0]+")
"""Names that are valid for arrays of a Zarr group: no path separators, no hidden or reserved file names."""
_LARGEST_ID = int(np.iinfo(np.int32).max)
_MOST_EXACT = 1 << 53
"""Largest integer up to which float64 represents every integer."""
LARGE = 1 << 28
"""Fewest bytes of token ids that are mapped from a temporary file instead of held in memory."""
AT_ONCE = 1 << 22
"""Tokens read at a time: a chunk of a large result."""
LARGEST_TEXTS = 4 << 20
"""Most bytes of files whose texts are stored with their token ids."""


@dataclass(frozen=True)
class Corpus:
    """Documents in files of any size, which become prompts of a model.

    Formats: text (a document per line or per file), JSON lines, Parquet, Arrow (as `datasets` saves it), tar
    archives (WebDataset); each also gzipped, except Parquet and Arrow.

    >>> Corpus("books/*.txt", context=128, pack=True).share
    1.0
    """

    sources: str | Sequence[str]
    """Files, globs, or folders; of a folder, all files of a known format at any depth, in order of name."""
    column: str | None = None
    """Column of texts or of lists of token ids; None for `text`, or `ids` where there is no `text`."""
    labels: Sequence[str] = ()
    """Columns whose values are kept as labels of each document."""
    whole_files: bool = False
    """Whether a text file is one document, instead of one per line."""
    context: int | None = None
    """Most tokens of a prompt, special tokens included; longer documents are cut. None makes one prompt of
    each document, whatever its length."""
    pack: bool = False
    """Whether documents are concatenated, with the model's end-of-text token after each, so that every
    prompt is full."""
    share: float = 1.0
    """Share of the documents to read, in (0, 1]. A document is drawn by a hash of its content, its number in
    the file and `seed`, so that documents appended later do not change the draw of the others."""
    seed: int = 0
    """Seed of the draw for `share`."""

    def __post_init__(self) -> None:
        sources = as_list(self.sources)
        if not sources or not all(isinstance(source, str | Path) and str(source) for source in sources):
            raise PromptError(
                f"Corpus: expected files, folders or globs as sources, found {shown(self.sources)}; pass "
                "'books/*.txt'"
            )
        object.__setattr__(self, "sources", tuple(str(Path(source).expanduser()) for source in sources))
        require_kind(self.labels, Iterable, "labels as names of columns", "write ['label']", PromptError)
        # As tuples, because sources and labels of an immutable value must not change later.
        object.__setattr__(self, "labels", tuple(as_list(self.labels)))
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            raise PromptError(
                f"Corpus: expected column= as the name of a column, found {self.column!r}; leave it out for "
                "the column text or ids"
            )
        as_count(self.seed, "seed", least=0, most=LARGEST, error=PromptError)
        if self.pack and self.context is None:
            raise PromptError(
                "Corpus: pack=True (--pack) needs context=, the tokens of a prompt, found none; add "
                "e.g. context=128"
            )
        if (
            self.context is not None
            and as_count(self.context, "context", least=-LARGEST, error=PromptError) < 1
        ):
            raise PromptError(
                f"Corpus: expected a context of at least 1 token, found {self.context}; leave it out for "
                "whole documents"
            )
        if not 0 < as_number(self.share, "share", PromptError) <= 1:
            raise PromptError(
                f"Corpus: expected share= in (0, 1], the share of documents to read, found {self.share}"
            )
        for name in self.labels:
            # Labels become coordinates of the dataset and arrays of its Zarr group.
            if name in _TAKEN or not _NAMEABLE.fullmatch(name):
                reason = "a name that mizarr uses" if name in _TAKEN else "which cannot name a stored array"
                raise PromptError(
                    f"Corpus: expected labels= with names that can be stored, found {name!r}, {reason}; "
                    "rename this column in the files"
                )

    @property
    def files(self) -> list[Path]:
        """The files of all sources that exist now, in the order of the sources.

        Raises:
            PromptError: for a source without files of documents.
        """
        files: list[Path] = []
        for source in self.sources:
            path = Path(source)
            if path.is_dir():
                source_files = [file for file in sorted(path.rglob("*")) if _is_document_file(file, path)]
            elif has_magic(source) and not path.exists():
                matches = iglob(source, recursive=True)  # noqa: PTH207 - a pattern may begin at any root
                source_files = [path for path in map(Path, sorted(matches)) if path.is_file()]
            else:
                source_files = [path] if path.is_file() else []
            if not source_files:
                formats = ", ".join(FORMATS)
                raise PromptError(
                    f"expected files of documents at {source!r}, found none; name files, globs or folders "
                    f"with files of {formats}"
                )
            files += source_files
        return files

    def nodes(self, tokenizer: Tokenizer | None) -> list[SourceNode]:
        """Pipeline nodes that tokenise the files, one per file.

        Arguments:
            tokenizer: encodes texts; None if documents are token ids.
        """
        framing = self.framing(tokenizer)
        return [self._node(path, tokenizer, framing) for path in self.files]

    def tokens(self, tokenizer: Tokenizer | None, store: Store, *, quiet: bool = True) -> PackedTokens:
        """Token ids of all prompts; tokens of each file are computed once and stored.

        Arguments:
            tokenizer: encodes texts; None if documents are token ids.
            store: store of the tokens.
            quiet: whether to show no progress.

        Raises:
            PromptError: for a corpus without a token.
            TokenizerError: for texts without a tokenizer.
        """
        return self.read(tokenizer, store, quiet=quiet)[0]

    def about(self, tokenizer: Tokenizer | None, store: Store, *, quiet: bool = True) -> xr.Dataset:
        """Document number and labels of each prompt, [prompt_id].

        `document` is the number, counted over all files, of the document that the first token of the prompt
        belongs to; the labels are those of this document.

        Arguments:
            tokenizer: encodes texts; None if documents are token ids.
            store: store of the tokens.
            quiet: whether to show no progress.

        Raises:
            PromptError: for a corpus without a token.
            TokenizerError: for texts without a tokenizer.
        """
        return self.read(tokenizer, store, quiet=quiet)[1]

    def read(
        self, tokenizer: Tokenizer | None, store: Store, *, quiet: bool = True
    ) -> tuple[PackedTokens, xr.Dataset]:
        """Tokenise the files, or read their stored tokens.

        Arguments:
            tokenizer: encodes texts; None if documents are token ids.
            store: store of the tokens.
            quiet: whether to show no progress.

        Returns:
            (token ids of all prompts, document number and labels of each prompt [prompt_id]).

        Raises:
            PromptError: for a corpus without a token.
            TokenizerError: for texts without a tokenizer.
        """
        nodes = self.nodes(tokenizer)
        run(nodes, store, quiet=quiet)
        parts = [node.open(store) for node in nodes]
        sizes = [part["row_size"].values for part in parts]
        if not sum(map(len, sizes)):
            raise PromptError(
                f"expected at least one token in the corpus {', '.join(self.sources)}, found none; name "
                "files that are not empty"
            )
        ids, about = end_to_end([part["token_id"] for part in parts]), self._labelled(parts)
        return PackedTokens(ids, np.concatenate(sizes)), about

    def with_texts(
        self, tokens: PackedTokens, about: xr.Dataset, tokenizer: Tokenizer | None
    ) -> PackedTokens:
        """Add the texts of prompts, and the characters of each token, to the tokens that `read` returned.

        Reads and tokenises all files again, so that only a run that is not stored yet should call it.

        Arguments:
            tokens: token ids of all prompts, from `read`.
            about: document number of each prompt, from `read`.
            tokenizer: encodes texts; None if documents are token ids.

        Returns:
            `tokens` with texts; `tokens` unchanged if prompts are not whole documents of text, and for more
            than 4 MiB of files.
        """
        files = self.files
        is_cut = self.context is not None or self.share < 1
        is_large = sum(path.stat().st_size for path in files) > LARGEST_TEXTS or tokens.ids.nbytes >= LARGE
        if tokenizer is None or is_cut or is_large:
            return tokens
        reading = Reading(self.column, tuple(self.labels), self.whole_files)
        contents = [document.content for path in files for document in read_documents(path, reading)]
        texts = [contents[number] for number in about[DOCUMENT].values.tolist()]
        if not all(isinstance(text, str) for text in texts):
            return tokens
        packed = pack_encodings([tokenizer.encode(text) for text in texts])
        # Where encoding again gives other ids, the texts would not be those of the stored tokens.
        return packed if packed == tokens else tokens

    def _labelled(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Document numbers and labels of the prompts of all files, [prompt_id]."""
        import xarray as xr

        columns: dict[str, list[Any]] = {DOCUMENT: [], **{name: [] for name in self.labels}}
        n_earlier_documents = 0
        for part in parts:
            document = part[DOCUMENT].values
            columns[DOCUMENT].append(document + n_earlier_documents)
            for name in self.labels:
                # Labels are stored per document; a document of several prompts gives its label to each.
                columns[name].append(part[name].values[document])
            n_earlier_documents += int(part.attrs["documents"])
        return xr.Dataset(
            coords={name: ("prompt_id", _joined_labels(values)) for name, values in columns.items()}
        )

    def _node(self, path: Path, tokenizer: Tokenizer | None, framing: Framing) -> SourceNode:
        advice = "it was written over meanwhile; run the command again with the file as it is now"
        pinned = PinnedFiles("the corpus", advice)
        digest, size = pinned.digest(path), path.stat().st_size
        reading = Reading(self.column, tuple(self.labels), self.whole_files)
        params = {
            "file": digest,
            "format": ending(path),
            "tokenizer": tokenizer and tokenizer.digest,
            "reading": asdict(reading),
            "framing": asdict(framing),
            "share": self.share,
            "seed": self.seed,
        }

        make = partial(_tokenised, path, reading, tokenizer, framing, self.share, self.seed)
        return SourceNode(
            "corpus_tokens",
            VERSION,
            params,
            make,
            Estimate(bytes_read=size, bytes_written=size, peak_bytes=4 * size),
            (pinned,),
        )

    def framing(self, tokenizer: Tokenizer | None) -> Framing:
        """Special tokens, context length and separator with which documents become prompts.

        Raises:
            PromptError: if the context is not longer than the special tokens.
        """
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        separator: tuple[int, ...] | None = () if self.pack else None
        if tokenizer is not None:
            # Found by encoding a text: post-processors differ in which special tokens they add.
            example = tokenizer.encode("a")
            text_positions = [position for position, special in enumerate(example.special) if not special]
            before = tuple(example.ids[: text_positions[0]])
            after = tuple(example.ids[text_positions[-1] + 1 :])
            if self.pack and tokenizer.eos_id is not None:
                separator = (tokenizer.eos_id,)
        framing = Framing(before, after, self.context, separator)
        if framing.room is not None and framing.room < 1:
            raise PromptError(
                f"Corpus: expected a context longer than the {len(before) + len(after)} special tokens that "
                f"every prompt gets, found context={self.context}; set a larger one"
            )
        return framing


def end_to_end(parts: Sequence[xr.DataArray]) -> Ids:
    """Concatenate the stored token ids of several files, as int32 [token], reading a block at a time.

    Ids of a large corpus are mapped from a temporary file, so that the system may evict them from memory:
    concatenating arrays of a billion tokens took 8 GB.
    """
    ids = _empty_ids(sum(part.size for part in parts))
    at = 0
    for part in parts:
        for start in range(0, part.size, AT_ONCE):
            block = part[start : start + AT_ONCE].values
            ids[at : at + len(block)] = block
            at += len(block)
    return ids


def _empty_ids(count: int) -> Ids:
    """An uninitialised array of ids; mapped from a temporary file if it is large and the disk has room."""
    if count * 4 >= LARGE:
        with suppress(OSError, AttributeError), TemporaryFile() as file:
            # Reserve the bytes: writing to a map of a full disk kills the process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, count * 4)
            return np.memmap(file, np.int32, "r+", shape=(count,))
    return np.empty(count, np.int32)


def _is_document_file(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    # A folder may hold other files, too; a file that is named itself is read whatever its ending.
    has_format = ending(path).removesuffix(".gz") in FORMATS
    return has_format and not hidden and path.is_file()


def _tokenised(
    path: Path,
    reading: Reading,
    tokenizer: Tokenizer | None,
    framing: Framing,
    share: float,
    seed: int,
) -> xr.Dataset:
    """Tokenise one file.

    Arguments:
        path: the file.
        reading: columns to read, and whether a text file is one document.
        tokenizer: encodes texts; None if documents are token ids.
        framing: how documents become prompts.
        share: share of the documents to read, in (0, 1].
        seed: seed of the draw for `share`.

    Returns:
        token_id [token], row_size (tokens) and document [prompt_id], labels [document_id]; the number of
        documents as attribute.
    """
    import xarray as xr

    labels: dict[str, list[Any]] = {name: [] for name in reading.labels}
    count = 0

    def documents() -> Iterator[Document]:
        nonlocal count
        for document in _drawn(read_documents(path, reading), share, seed):
            for name, value in document.labels.items():
                labels[name].append(value)
            count += 1
            yield document

    ids, sizes, owners = [], [], []
    for prompt, owner in framed_prompts(encoded(documents(), tokenizer, path), framing):
        ids.append(prompt)
        sizes.append(len(prompt))
        owners.append(owner)
    data = {
        "token_id": ("token", np.concatenate(ids) if ids else np.empty(0, np.int32)),
        "row_size": ("prompt_id", np.array(sizes, np.int64)),
        DOCUMENT: ("prompt_id", np.array(owners, np.int64)),
        **{name: ("document_id", _label_array(values)) for name, values in labels.items()},
    }
    return xr.Dataset(data, attrs={"documents": count})


def _drawn(documents: Iterator[Document], share: float, seed: int) -> Iterator[Document]:
    """Draw a share of the documents at random, repeatably.

    A document is drawn by a hash of its number and content, so documents appended later, or another share, do
    not change the others: a larger share contains the smaller one.
    """
    if share == 1:
        yield from documents
        return
    # The hash is a uniform number below 2^64.
    limit = share * 2.0**64
    for number, document in enumerate(documents):
        data = json.dumps([seed, number, document.content]).encode()
        if int.from_bytes(blake2b(data, digest_size=8).digest(), "little") < limit:
            yield document


def encoded(
    documents: Iterator[Document], tokenizer: Tokenizer | None, path: Path
) -> Iterator[Sequence[int] | Ids]:
    """Token ids of each document, in order; texts are tokenised in batches of about `BATCH` characters.

    Arguments:
        documents: documents of one file.
        tokenizer: encodes texts; None for a model without tokenizer.
        path: the file, for errors.

    Raises:
        TokenizerError: for a text without a tokenizer.
        PromptError: for ids out of range.
    """
    texts: list[str] = []
    n_characters = 0
    for document in documents:
        if isinstance(document.content, str):
            if tokenizer is None:
                raise TokenizerError(
                    f"expected token ids in {path}, because the model has no tokenizer, found text; add "
                    "tokenizer.json to the model's folder, or store token ids in a column ids"
                )
            texts.append(document.content)
            n_characters += len(document.content)
            if n_characters >= BATCH:
                yield from tokenizer.ids_of(texts)
                texts, n_characters = [], 0
        else:
            if texts and tokenizer is not None:
                yield from tokenizer.ids_of(texts)
                texts, n_characters = [], 0
            yield _as_ids(document.content, path)
    if texts and tokenizer is not None:
        yield from tokenizer.ids_of(texts)


def _as_ids(content: list[int], path: Path) -> Ids:
    """Token ids of a document as int32; PromptError for an id that is negative or does not fit."""
    low, high = min(content, default=0), max(content, default=0)
    if low < 0 or high > _LARGEST_ID:
        raise PromptError(
            f"expected token ids from 0 to {_LARGEST_ID} in {path}, found {low if low < 0 else high}; "
            "correct this document"
        )
    return np.array(content, np.int32)


def _label_array(values: list[Any]) -> np.ndarray[Any, Any]:
    """Labels of documents as an array of int64, float64 or strings; other values become JSON strings."""
    # `type`, because True is an int for isinstance.
    types = {type(value) for value in values}
    largest = max((abs(value) for value in values if type(value) is int), default=0)
    # Larger integers do not fit int64.
    if types <= {int} and largest < 1 << 63:
        return np.array(values, np.int64)
    if types <= {int, float} and largest <= _MOST_EXACT:
        return np.array(values, np.float64)
    return np.array([_as_text(value) for value in values], np.dtypes.StringDType())


def _joined_labels(columns: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Concatenate label columns of several files, in the dtype that `_label_array` gives to all values.

    Empty columns do not affect the dtype.
    """
    non_empty = [column for column in columns if column.size]
    kinds = {column.dtype.kind for column in non_empty}
    integer_columns = [column for column in non_empty if column.dtype.kind == "i"]
    fit_float64 = all(
        abs(int(end)) <= _MOST_EXACT for column in integer_columns for end in (column.min(), column.max())
    )
    if len(kinds) == 1 or (kinds == {"i", "f"} and fit_float64):
        return np.concatenate(
            [
                column if column.dtype.kind in "if" else column.astype(np.dtypes.StringDType())
                for column in non_empty
            ]
        )
    texts = [_as_text(value) for column in non_empty for value in column.tolist()]
    return np.array(texts, np.dtypes.StringDType())


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
