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
    """One document of a corpus."""

    content: str | list[int]
    """Text or token ids; the source of a pair."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Column name -> value."""
    target: str | list[int] | None = None
    """Target text or token ids of a pair for an encoder-decoder; None for a single text."""


@dataclass(frozen=True)
class Reading:
    """Columns and layout of a file of documents. All fields enter the key of the stored tokens."""

    column: str | None = None
    """Column of texts or of lists of token ids; None for `text`, or else `ids`."""
    labels: tuple[str, ...] = ()
    """Columns that are read as labels of each document."""
    whole: bool = False
    """Whether a text file is one document, instead of one per line."""
    pairs: bool = False
    """Whether JSON lines may have a `source` and a `target`."""


def read_documents(path: Path, reading: Reading) -> Iterator[Document]:
    """Documents of a file, in order.

    Arguments:
        path: the file; its ending determines the format.
        reading: columns and labels.

    Raises:
        PromptError: for a line or row that is no document; names file and line.
        MissingExtra: if a package that reads this format is not installed.
    """
    with path.open("rb") as raw:
        yield from documents_in(raw, ending(path), reading, str(path))


def documents_in(raw: IO[bytes], kind: str, reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of an open file; raises as `read_documents`.

    Arguments:
        raw: the file.
        kind: its format, as `ending` returns it.
        reading: how to read documents.
        file_name: name of the file in errors.
    """
    uncompressed = kind.removesuffix(GZIP)
    if uncompressed in _NO_TEXT:
        raise PromptError(
            f"expected text, or documents in {', '.join(FORMATS)}, found {uncompressed} at {file_name!r}; "
            "make it .jsonl, or rename it to .txt if its lines are documents as they stand"
        )
    read = FORMATS.get(uncompressed, _text)
    try:
        if not kind.endswith(GZIP):
            yield from read(raw, reading, file_name)
            return
        # Over the open file: the caller measures how much of it was read (estimate.py).
        with gzip.GzipFile(fileobj=raw) as plain:
            yield from read(cast("IO[bytes]", plain), reading, file_name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PromptError(f"expected gzip in {file_name!r}, found {error}; fetch it again") from error
    except RecursionError as error:
        raise PromptError(f"expected documents in {file_name!r}, found one that nests without end") from error


def ending(path: Path) -> str:
    """Ending that determines the format of a file, in lower case: ".jsonl", or ".jsonl.gz"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".tgz"]:
        return f".tar{GZIP}"
    return "".join(suffixes[-2:] if suffixes[-1:] == [GZIP] else suffixes[-1:])


def read_lines(lines: Iterable[str]) -> Iterator[Document]:
    """A document per line of text; blank ones are skipped."""
    return (Document(line.rstrip("\r\n")) for line in lines if line.strip())


def _text(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    if asked := [*reading.labels, *([reading.column] if reading.column else [])]:
        raise PromptError(f"expected a file with columns for {asked[0]!r}, found text at {file_name!r}")
    with _decoded(raw, file_name) as lines:
        if not reading.whole:
            yield from read_lines(_lines(lines, file_name))
        # One character more than allowed shows that the file is longer, without reading all of it.
        elif (text := _bounded(lines.read(LARGEST + 1), file_name)).strip():
            yield Document(text)


def _json_lines(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    from .....store.sealed import read_json  # whoever only lists formats needs no numpy

    with _decoded(raw, file_name) as lines:
        for number, line in enumerate(_lines(lines, file_name), start=1):
            if not line.strip():
                continue
            try:
                row = read_json(line)
            except ValueError as error:  # also for a number of more digits than Python reads
                excerpt, reason = line.strip()[:40], getattr(error, "msg", error)
                raise PromptError(
                    f"{file_name}:{number}: expected JSON, found {excerpt!r} ({reason})"
                ) from error
            yield _of_json(row, reading, f"{file_name}:{number}", line)


def _of_json(row: Any, reading: Reading, where: str, line: str) -> Document:
    """The document of a JSON value. where: file and line, for errors."""
    content = row
    if isinstance(row, dict):
        # Many data sets call the origin of a text "source", so a row with a text is no pair.
        if reading.pairs and not row.keys() & {TEXT, IDS} and row.keys() & {SOURCE, TARGET}:
            return _pair(row, where, line)
        content = row.get(reading.column) if reading.column else row.get(TEXT, row.get(IDS))
    if not isinstance(content, str) and not _is_ids(content):
        named = f"{{{reading.column!r}: …}}" if reading.column else "{'text': string} or {'ids': [integers]}"
        raise PromptError(f"{where}: expected a string, {named}, found {line.strip()[:40]!r}")
    columns = row if isinstance(row, dict) else {}
    if missing := [name for name in reading.labels if name not in columns]:
        raise PromptError(
            f"{where}: expected {missing[0]!r} to keep as a label, found {', '.join(columns) or 'no keys'}"
        )
    labels = {name: columns[name] for name in reading.labels}
    _require_utf8([content, *labels.values()], where)
    return Document(content, labels)


def _require_utf8(values: Iterable[Any], where: str) -> None:
    """Raise as `as_text` for a string that is not valid UTF-8; other values are ignored."""
    for value in values:
        if isinstance(value, str):
            as_text(value, where)


def _pair(row: Mapping[str, Any], where: str, line: str) -> Document:
    sides = [row.get(SOURCE), row.get(TARGET)]
    if not all(isinstance(side, str) or _is_ids(side) for side in sides):
        raise PromptError(
            f"{where}: expected a source and a target, each a string or [integers], found "
            f"{line.strip()[:40]!r}; give both"
        )
    _require_utf8(sides, where)
    source, target = cast("list[str | list[int]]", sides)
    return Document(source, target=target)


def _parquet(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of a Parquet file; one batch of rows is in memory at a time."""
    _, parquet = _arrow()
    with _readable(file_name, "a Parquet file"):
        file = parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        column = _column(names, reading, file_name)
        # Named once where it is also a label: `get_field_index` finds no column that occurs twice.
        batches = file.iter_batches(columns=list(dict.fromkeys([column, *reading.labels])))
        yield from _of_batches(batches, column, reading, file_name)


def _arrow_file(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of Arrow's stream format, which `datasets` writes, or its file format.

    One record batch is in memory at a time.
    """
    arrow, _ = _arrow()
    from pyarrow import ipc

    with _readable(file_name, "an Arrow file"):
        try:
            stream = ipc.open_stream(raw)
        except arrow.ArrowInvalid:
            file = ipc.open_file(raw)
            names, batches = file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            names, batches = stream.schema.names, iter(stream)
        column = _column(names, reading, file_name)
        yield from _of_batches(batches, column, reading, file_name)


def _of_batches(batches: Iterable[Any], column: str, reading: Reading, file_name: str) -> Iterator[Document]:
    row = 0
    for batch in batches:
        labels = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in reading.labels]
        for place, content in enumerate(batch.column(batch.schema.get_field_index(column)).to_pylist()):
            if not isinstance(content, str) and not _is_ids(content):
                raise PromptError(
                    f"{file_name}, row {row}: expected a string or a list of ids, found {content!r}"
                )
            row_labels = {name: values[place] for name, values in zip(reading.labels, labels, strict=True)}
            yield Document(content, row_labels)
            row += 1


def _tar(raw: IO[bytes], reading: Reading, file_name: str) -> Iterator[Document]:
    """Documents of a WebDataset archive, in which members that differ only in their ending are one sample.

    The text of a sample is its .txt member (or the one named after the column), or a column of its .json
    member, which also has the labels.
    """
    endings = {"json", "txt", reading.column}  # other members, such as images, are not read into memory
    try:
        # "r|": a stream that never seeks, so that gzipped archives are unpacked once.
        with tarfile.open(fileobj=raw, mode="r|") as archive:
            key, sample = "", dict[str, bytes]()
            for member in archive:
                stem, _, ending = member.name.rpartition("/")[2].partition(".")
                if not member.isfile() or not stem:  # a hidden file is no sample in WebDataset either
                    continue
                name = f"{member.name.rpartition('/')[0]}/{stem}"
                if sample and name != key:
                    yield from _of_sample(sample, reading, f"{file_name}:{key.strip('/')}")
                    sample = {}
                if member.size > LARGEST:
                    raise PromptError(
                        f"{file_name}: expected members of at most {LARGEST} bytes, found {member.size} in "
                        f"{member.name}; split it"
                    )
                if ending in sample:
                    raise PromptError(f"{file_name}: expected each member once, found {member.name} again")
                key, file = name, archive.extractfile(member) if ending in endings else None
                sample[ending] = file.read() if file is not None else b""
            if sample:
                yield from _of_sample(sample, reading, f"{file_name}:{key.strip('/')}")
    except tarfile.TarError as error:
        raise PromptError(
            f"expected a tar archive at {file_name!r}, found one that cannot be read ({error})"
        ) from error


def _of_sample(sample: Mapping[str, bytes], reading: Reading, where: str) -> Iterator[Document]:
    from .....store.sealed import read_json  # whoever only lists formats needs no numpy

    row: Any = {}
    try:
        if "json" in sample:
            row = read_json(sample["json"])
        plain = next((sample[name] for name in (reading.column or "txt", "txt") if name in sample), None)
        text = None if plain is None else plain.decode()
    except ValueError as error:
        raise PromptError(f"{where}: expected UTF-8 text and JSON, found neither ({error})") from error
    if text is None and not isinstance(row, dict):
        raise PromptError(f"{where}: expected a member .txt or .json, found {', '.join(sample)}")
    if text is not None:
        row = {**(row if isinstance(row, dict) else {}), (reading.column or TEXT): text}
    yield _of_json(row, reading, where, f"members {', '.join(sample)}")


FORMATS: dict[str, Callable[[IO[bytes], Reading, str], Iterator[Document]]] = {
    ".txt": _text,
    ".md": _text,
    **dict.fromkeys(JSON_LINES, _json_lines),
    ".parquet": _parquet,
    ".arrow": _arrow_file,
    ".tar": _tar,
}
"""Ending -> reader. Each may be followed by ".gz"; a named file with any other ending is read as text."""


def _lines(lines: IO[str], file_name: str) -> Iterator[str]:
    """Lines of a file. PromptError for a line that is longer than `LARGEST`."""
    return (_bounded(line, file_name) for line in iter(lambda: lines.readline(LARGEST + 1), ""))


def _bounded(text: str, file_name: str) -> str:
    if len(text) > LARGEST:
        raise PromptError(
            f"expected documents of at most {LARGEST} characters in {file_name!r}, found a longer one"
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
            f"expected UTF-8 text in {file_name!r}, found byte {byte:#x}; convert it"
        ) from error
    finally:
        lines.detach()  # whoever opened the file closes it


@contextmanager
def _readable(file_name: str, what: str) -> Iterator[None]:
    arrow, _ = _arrow()
    try:
        yield
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise PromptError(f"expected {what} at {file_name!r}, found {error}") from error


def _arrow() -> tuple[Any, Any]:
    require("corpora", "A Parquet or Arrow file")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


def _column(names: Sequence[str], reading: Reading, file_name: str) -> str:
    """Name of the column of documents. PromptError if it or a label column is missing or duplicated."""
    candidates = (reading.column,) if reading.column else (TEXT, IDS)
    column = next((name for name in candidates if name in names), None)
    missing = [name for name in reading.labels if name not in names]
    if column is None or missing:
        expected = " or ".join(map(repr, missing or candidates))
        raise PromptError(f"expected a column {expected} in {file_name!r}, found {', '.join(names)}")
    if twice := [name for name in (column, *reading.labels) if list(names).count(name) > 1]:
        raise PromptError(
            f"expected one column {twice[0]!r} in {file_name!r}, found {list(names).count(twice[0])}"
        )
    return column


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
