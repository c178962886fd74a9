"""Files of documents, read as a stream: text, JSON lines, Parquet, Arrow, tar archives.

A reader for each format yields one document at a time, so memory is that of one document or one block of
rows, whatever the size of the file. A document is a text or token ids, with label columns.

corpus.py chooses the files and turns documents into prompts. Nothing is unpacked to disk or unpickled.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from .....store.errors import PromptError
from ....extras import require
from ..rows import as_text

__all__ = [
    "FORMATS",
    "Document",
    "Reading",
    "documents_in",
    "ending",
    "read_documents",
    "read_lines",
]

TEXT, IDS = "text", "ids"
SOURCE, TARGET = "source", "target"
GZIP = ".gz"
LARGEST = 256 << 20
"""Most bytes of a member of an archive, and most characters of a line. A document must fit in memory, but a
few compressed bytes can unpack to any number."""
JSON_LINES = (".jsonl", ".ndjson")
_NO_TEXT = (".json", ".csv", ".tsv")
"""Endings of structured files that are refused, because reading their lines as prose would be a mistake."""


@dataclass(frozen=True)
class Document:
    """One document of a corpus, read from a file."""

    content: str | list[int]
    """Text or token ids; for an encoder-decoder, the source."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Column name -> value, for the columns that are read as labels."""
    target: str | list[int] | None = None
    """Target text or token ids for an encoder-decoder; None for a document that is one text."""


@dataclass(frozen=True)
class Reading:
    """How documents are read from a file. All fields enter the key of the stored tokens."""

    column: str | None = None
    """Column of texts or of lists of token ids; None for `text`, or `ids` where there is no `text`."""
    labels: tuple[str, ...] = ()
    """Columns that are read as labels of each document."""
    whole: bool = False
    """Whether a text file is one document, instead of one per line."""
    pairs: bool = False
    """Whether a JSON line may be a `source` and a `target` for an encoder-decoder."""


def read_documents(path: Path, reading: Reading) -> Iterator[Document]:
    """Read the documents of a file, in order.

    Arguments:
        path: the file; its ending determines the format.
        reading: columns to read, and whether a text file is one document.

    Raises:
        PromptError: for a line or row that is no document; names file and line.
        MissingExtra: if a package that reads this format is not installed.
    """
    with path.open("rb") as raw:
        yield from documents_in(raw, ending(path), reading, str(path))


def documents_in(raw: IO[bytes], kind: str, reading: Reading, file_name: str) -> Iterator[Document]:
    """Read the documents of an open file, in order.

    Arguments:
        raw: the open file.
        kind: format of the file, as `ending` returns it, e.g. ".jsonl.gz".
        reading: columns to read, and whether a text file is one document.
        file_name: name of the file in errors.

    Raises:
        PromptError: for a line or row that is no document; names file and line.
        MissingExtra: if a package that reads this format is not installed.
    """
    uncompressed = kind.removesuffix(GZIP)
    if uncompressed in _NO_TEXT:
        raise PromptError(
            f"expected text, or documents in {', '.join(FORMATS)}, found {uncompressed} at {file_name!r}; "
            "convert it to .jsonl, or rename it to .txt if each of its lines is a document"
        )
    read = FORMATS.get(uncompressed, _text_documents)
    try:
        if not kind.endswith(GZIP):
            yield from read(raw, reading, file_name)
            return
        # Over the open file: the caller measures how much of it was read (estimate.py).
        with gzip.GzipFile(fileobj=raw) as plain:
            yield from read(cast("IO[bytes]", plain), reading, file_name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PromptError(
            f"expected a gzip file at {file_name!r}, found a damaged one ({error}); download it again"
        ) from error
    except RecursionError as error:
        raise PromptError(
            f"expected JSON of moderate depth in {file_name!r}, found a document nested too deeply to read; "
            "remove it"
        ) from error


def ending(path: Path) -> str:
    """Ending that determines the format of a file, in lower case, e.g. ".jsonl" or ".jsonl.gz"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".tgz"]:
        return f".tar{GZIP}"
    return "".join(suffixes[-2:] if suffixes[-1:] == [GZIP] else suffixes[-1:])


def read_lines(lines: Iterable[str]) -> Iterator[Document]:
    """Make a document of each line of text; blank lines are skipped."""
    return (Document(line.rstrip("\r\n")) for line in lines if line.strip())


def _text_documents(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    if columns := [*reading.labels, *([reading.column] if reading.column else [])]:
        raise PromptError(
            f"expected a file with a column {columns[0]!r}, found the text file {file_name!r}, which has no "
            "columns; leave the column out, or name a file in .jsonl or .parquet"
        )
    with _decoded(raw, file_name) as lines:
        if not reading.whole:
            yield from read_lines(_bounded_lines(lines, file_name))
        # One character more than allowed shows that the file is longer, without reading all of it.
        elif (text := _require_bounded(lines.read(LARGEST + 1), file_name)).strip():
            yield Document(text)


def _json_line_documents(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    from .....store.sealed import read_json  # whoever only lists formats needs no numpy

    with _decoded(raw, file_name) as lines:
        for number, line in enumerate(_bounded_lines(lines, file_name), start=1):
            if not line.strip():
                continue
            try:
                row = read_json(line)
            except ValueError as error:  # also for a number of more digits than Python reads
                excerpt, reason = line.strip()[:40], getattr(error, "msg", error)
                raise PromptError(
                    f"{file_name}:{number}: expected JSON, found {excerpt!r} ({reason}); correct this line"
                ) from error
            yield _document_of_json(row, reading, f"{file_name}:{number}", line)


def _document_of_json(row: Any, reading: Reading, where: str, line: str) -> Document:
    """Make a document of a parsed JSON value.

    Arguments:
        row: the value: a string, a list of token ids, or an object with columns.
        reading: columns to read.
        where: file and line, for errors.
        line: the line as it was read, for errors.
    """
    content = row
    if isinstance(row, dict):
        # Many data sets call the origin of a text "source", so a row with a text is no pair.
        if reading.pairs and not row.keys() & {TEXT, IDS} and row.keys() & {SOURCE, TARGET}:
            return _source_and_target(row, where, line)
        content = row.get(reading.column) if reading.column else row.get(TEXT, row.get(IDS))
    if not isinstance(content, str) and not _is_ids(content):
        named = f"{{{reading.column!r}: …}}" if reading.column else "{'text': string} or {'ids': [integers]}"
        raise PromptError(
            f"{where}: expected a string, {named}, found {line.strip()[:40]!r}; correct this line, or name "
            "the column of texts"
        )
    columns = row if isinstance(row, dict) else {}
    if missing := [name for name in reading.labels if name not in columns]:
        raise PromptError(
            f"{where}: expected the label column {missing[0]!r}, found "
            f"{'only ' + ', '.join(columns) if columns else 'no columns'}; name a label column that every "
            "document has"
        )
    labels = {name: columns[name] for name in reading.labels}
    _require_utf8([content, *labels.values()], where)
    return Document(content, labels)


def _require_utf8(values: Iterable[Any], where: str) -> None:
    """Raise PromptError for a string that cannot be written as UTF-8; values of other types are ignored."""
    for value in values:
        if isinstance(value, str):
            as_text(value, where)


def _source_and_target(row: Mapping[str, Any], where: str, line: str) -> Document:
    sides = [row.get(SOURCE), row.get(TARGET)]
    if not all(isinstance(side, str) or _is_ids(side) for side in sides):
        raise PromptError(
            f"{where}: expected both source and target, each a string or [integers], found "
            f"{line.strip()[:40]!r}; correct this line"
        )
    _require_utf8(sides, where)
    source, target = cast("list[str | list[int]]", sides)
    return Document(source, target=target)


def _parquet_documents(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of a Parquet file; one batch of rows is in memory at a time."""
    _, parquet = _import_pyarrow()
    with _unreadable_as_prompt_error(file_name, "a Parquet file"):
        file = parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        column = _document_column(names, reading, file_name)
        # Named once where it is also a label: `get_field_index` finds no column that occurs twice.
        batches = file.iter_batches(columns=list(dict.fromkeys([column, *reading.labels])))
        yield from _documents_of_batches(batches, column, reading, file_name)


def _arrow_documents(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of Arrow's stream format, which `datasets` writes, or its file format.

    One record batch is in memory at a time.
    """
    arrow, _ = _import_pyarrow()
    from pyarrow import ipc

    with _unreadable_as_prompt_error(file_name, "an Arrow file"):
        try:
            stream = ipc.open_stream(raw)
        except arrow.ArrowInvalid:
            file = ipc.open_file(raw)
            names, batches = file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            names, batches = stream.schema.names, iter(stream)
        column = _document_column(names, reading, file_name)
        yield from _documents_of_batches(batches, column, reading, file_name)


def _documents_of_batches(
    batches: Iterable[Any], column: str, reading: Reading, file_name: str
) -> Iterator[Document]:
    row = 0
    for batch in batches:
        columns = {
            name: batch.column(batch.schema.get_field_index(name)).to_pylist()
            for name in (column, *reading.labels)
        }
        for row_in_batch, content in enumerate(columns[column]):
            if not isinstance(content, str) and not _is_ids(content):
                raise PromptError(
                    f"{file_name}, row {row}: expected a string or a list of token ids in column {column!r}, "
                    f"found {content!r}; remove this row, or name another column"
                )
            yield Document(content, {name: columns[name][row_in_batch] for name in reading.labels})
            row += 1


def _tar_documents(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of a WebDataset archive, in which members that differ only in their ending are one sample.

    The text of a sample is its .txt member (or the one named after the column), or a column of its .json
    member, which also has the labels.
    """
    endings = {"json", "txt", reading.column}  # other members, such as images, are not read into memory
    try:
        # "r|": a stream that never seeks, so that gzipped archives are unpacked once.
        with tarfile.open(fileobj=raw, mode="r|") as archive:
            sample_name, sample = "", dict[str, bytes]()
            for member in archive:
                folder, _, base_name = member.name.rpartition("/")
                stem, _, ending = base_name.partition(".")
                if not member.isfile() or not stem:  # a hidden file is no sample in WebDataset either
                    continue
                name = f"{folder}/{stem}"
                if sample and name != sample_name:
                    yield from _documents_of_sample(sample, reading, f"{file_name}:{sample_name.strip('/')}")
                    sample = {}
                if member.size > LARGEST:
                    raise PromptError(
                        f"{file_name}: expected members of at most {LARGEST} bytes, found {member.size} "
                        f"bytes in {member.name}; split it into several documents"
                    )
                if ending in sample:
                    raise PromptError(
                        f"{file_name}: expected each member once, found {member.name} again; remove one"
                    )
                sample_name, file = name, archive.extractfile(member) if ending in endings else None
                sample[ending] = file.read() if file is not None else b""
            if sample:
                yield from _documents_of_sample(sample, reading, f"{file_name}:{sample_name.strip('/')}")
    except tarfile.TarError as error:
        raise PromptError(
            f"expected a tar archive at {file_name!r}, found one that cannot be read ({error}); download it "
            "again"
        ) from error


def _documents_of_sample(sample: Mapping[str, bytes], reading: Reading, where: str) -> Iterator[Document]:
    from .....store.sealed import read_json  # whoever only lists formats needs no numpy

    row: Any = {}
    try:
        if "json" in sample:
            row = read_json(sample["json"])
        plain = next((sample[name] for name in (reading.column or "txt", "txt") if name in sample), None)
        text = None if plain is None else plain.decode()
    except ValueError as error:
        raise PromptError(
            f"{where}: expected UTF-8 text in .txt and JSON in .json, found a member that cannot be read "
            f"({error}); correct this sample"
        ) from error
    if text is None and not isinstance(row, dict):
        raise PromptError(
            f"{where}: expected a member .txt or .json, found only {', '.join(sample)}; name the ending of "
            "the texts as column"
        )
    if text is not None:
        row = {**(row if isinstance(row, dict) else {}), (reading.column or TEXT): text}
    yield _document_of_json(row, reading, where, f"members {', '.join(sample)}")


FORMATS: dict[str, Callable[[IO[bytes], Reading, str], Iterator[Document]]] = {
    ".txt": _text_documents,
    ".md": _text_documents,
    **dict.fromkeys(JSON_LINES, _json_line_documents),
    ".parquet": _parquet_documents,
    ".arrow": _arrow_documents,
    ".tar": _tar_documents,
}
"""Ending -> reader. Each may be followed by ".gz"; a named file with any other ending is read as text."""


def _bounded_lines(lines: IO[str], file_name: str) -> Iterator[str]:
    """Lines of an open text file; PromptError for a line of more than `LARGEST` characters."""
    return (_require_bounded(line, file_name) for line in iter(lambda: lines.readline(LARGEST + 1), ""))


def _require_bounded(text: str, file_name: str) -> str:
    if len(text) > LARGEST:
        raise PromptError(
            f"expected documents of at most {LARGEST} characters in {file_name!r}, found a longer one; split "
            "it into several lines"
        )
    return text


@contextmanager
def _decoded(raw: IO[bytes], file_name: str) -> Iterator[IO[str]]:
    lines = io.TextIOWrapper(raw, encoding="utf-8-sig")  # some programs begin files with a mark
    try:
        yield lines
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PromptError(
            f"expected UTF-8 text in {file_name!r}, found byte {byte:#x}; convert the file to UTF-8"
        ) from error
    finally:
        lines.detach()  # whoever opened the file closes it


@contextmanager
def _unreadable_as_prompt_error(file_name: str, what: str) -> Iterator[None]:
    arrow, _ = _import_pyarrow()
    try:
        yield
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise PromptError(
            f"expected {what} at {file_name!r}, found one that cannot be read ({error}); download it again"
        ) from error


def _import_pyarrow() -> tuple[Any, Any]:
    require("corpora", "A Parquet or Arrow file")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


def _document_column(names: Sequence[str], reading: Reading, file_name: str) -> str:
    """Name of the column with texts or token ids.

    Raises:
        PromptError: if this column or a label column is missing, or occurs twice.
    """
    candidates = (reading.column,) if reading.column else (TEXT, IDS)
    column = next((name for name in candidates if name in names), None)
    missing = [name for name in reading.labels if name not in names]
    if column is None or missing:
        expected = " or ".join(map(repr, missing or candidates))
        raise PromptError(
            f"expected a column {expected} in {file_name!r}, found {', '.join(names)}; name one of these"
        )
    if repeated := [name for name in (column, *reading.labels) if list(names).count(name) > 1]:
        raise PromptError(
            f"expected one column {repeated[0]!r} in {file_name!r}, found "
            f"{list(names).count(repeated[0])} of this name; rename one"
        )
    return column


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
