"""Files of documents, read as a stream: text, JSON lines, Parquet, Arrow, tar archives.

A reader for each format gives a document at a time, so memory is that of one document or one block of rows,
whatever the size of the file. A document is a text or token ids, with the columns that are kept as labels.

Border: one file in, documents out; which files, and what is made of documents, is told in corpus.py. Nothing
is ever unpacked to disk or unpickled.
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
"""Bytes of one member of an archive, characters of one line: a document is held in memory, and a few bytes
may unpack to any number."""
JSON_LINES = (".jsonl", ".ndjson")
_NO_TEXT = (".json", ".csv", ".tsv")
"""Endings of what would be read as text, and taken for prose."""


@dataclass(frozen=True)
class Document:
    """One document: its text or its token ids, and its labels by name. target: of a pair, whose source the
    content is; None where it is no pair."""

    content: str | list[int]
    labels: Mapping[str, Any] = field(default_factory=dict)
    target: str | list[int] | None = None


@dataclass(frozen=True)
class Reading:
    """What is read of a file. column: of texts, or of lists of ids; by default `text`, else `ids`. labels:
    columns that are kept beside each document. whole: a text file is one document, and not one a line. pairs:
    JSON lines may hold a `source` and its `target`.
    """

    column: str | None = None
    labels: tuple[str, ...] = ()
    whole: bool = False
    pairs: bool = False


def read_documents(path: Path, reading: Reading) -> Iterator[Document]:
    """Documents of a file in its order.

    Raises PromptError naming file and line for anything that is no document, MissingExtra.
    """
    with path.open("rb") as raw:
        yield from documents_in(raw, ending(path), reading, str(path))


def documents_in(raw: IO[bytes], kind: str, reading: Reading, told: str) -> Iterator[Document]:
    """The same of an open file. kind: its `ending`. told: its name in errors."""
    plainly = kind.removesuffix(GZIP)
    if plainly in _NO_TEXT:
        raise PromptError(
            f"expected text, or documents in {', '.join(FORMATS)}, found {plainly} at {told!r}; make it "
            ".jsonl, or rename it to .txt if its lines are documents as they stand"
        )
    read = FORMATS.get(plainly, _text)
    try:
        if not kind.endswith(GZIP):
            yield from read(raw, reading, told)
            return
        with gzip.GzipFile(fileobj=raw) as plain:
            yield from read(cast("IO[bytes]", plain), reading, told)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PromptError(f"expected gzip in {told!r}, found {error}; fetch it again") from error
    except RecursionError as error:
        raise PromptError(f"expected documents in {told!r}, found one that nests without end") from error


def ending(path: Path) -> str:
    """What of a name says how a file is read: ".jsonl", or ".jsonl.gz"; of capitals as of small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".tgz"]:
        return f".tar{GZIP}"
    return "".join(suffixes[-2:] if suffixes[-1:] == [GZIP] else suffixes[-1:])


def read_lines(lines: Iterable[str]) -> Iterator[Document]:
    """A document per line of text; blank ones are skipped."""
    return (Document(line.rstrip("\r\n")) for line in lines if line.strip())


def _text(raw: IO[bytes], reading: Reading, told: str) -> Iterator[Document]:
    if asked := [*reading.labels, *([reading.column] if reading.column else [])]:
        raise PromptError(f"expected a file with columns for {asked[0]!r}, found text at {told!r}")
    with _decoded(raw, told) as lines:
        if not reading.whole:
            yield from read_lines(_lines(lines, told))
        elif (text := _bounded(lines.read(LARGEST + 1), told)).strip():
            yield Document(text)


def _json_lines(raw: IO[bytes], reading: Reading, told: str) -> Iterator[Document]:
    from .....store.sealed import read_json  # whoever only lists formats needs no numpy

    with _decoded(raw, told) as lines:
        for number, line in enumerate(_lines(lines, told), start=1):
            if not line.strip():
                continue
            try:
                row = read_json(line)
            except ValueError as error:  # also for a number of more digits than Python reads
                found, why = line.strip()[:40], getattr(error, "msg", error)
                raise PromptError(f"{told}:{number}: expected JSON, found {found!r} ({why})") from error
            yield _of_json(row, reading, f"{told}:{number}", line)


def _of_json(row: Any, reading: Reading, where: str, line: str) -> Document:
    content = row
    if isinstance(row, dict):
        # Where a text came from is often told as its source.
        if reading.pairs and not row.keys() & {TEXT, IDS} and row.keys() & {SOURCE, TARGET}:
            return _pair(row, where, line)
        content = row.get(reading.column) if reading.column else row.get(TEXT, row.get(IDS))
    if not isinstance(content, str) and not _is_ids(content):
        named = f"{{{reading.column!r}: …}}" if reading.column else "{'text': string} or {'ids': [integers]}"
        raise PromptError(f"{where}: expected a string, {named}, found {line.strip()[:40]!r}")
    held = row if isinstance(row, dict) else {}
    if missing := [name for name in reading.labels if name not in held]:
        raise PromptError(
            f"{where}: expected {missing[0]!r} to keep as a label, found {', '.join(held) or 'no keys'}"
        )
    labels = {name: held[name] for name in reading.labels}
    _require_utf8([content, *labels.values()], where)
    return Document(content, labels)


def _require_utf8(values: Iterable[Any], where: str) -> None:
    """As `as_text`, of the texts among values."""
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


def _parquet(raw: IO[bytes], reading: Reading, told: str) -> Iterator[Document]:
    """A row group in memory at a time."""
    _, parquet = _arrow()
    with _readable(told, "a Parquet file"):
        file = parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        column = _column(names, reading, told)
        batches = file.iter_batches(columns=list(dict.fromkeys([column, *reading.labels])))
        yield from _of_batches(batches, column, reading, told)


def _arrow_file(raw: IO[bytes], reading: Reading, told: str) -> Iterator[Document]:
    """Arrow's stream format, as `datasets` saves it, or its file format; a record batch at a time."""
    arrow, _ = _arrow()
    from pyarrow import ipc

    with _readable(told, "an Arrow file"):
        try:
            stream = ipc.open_stream(raw)
        except arrow.ArrowInvalid:
            file = ipc.open_file(raw)
            names, batches = file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            names, batches = stream.schema.names, iter(stream)
        column = _column(names, reading, told)
        yield from _of_batches(batches, column, reading, told)


def _of_batches(batches: Iterable[Any], column: str, reading: Reading, told: str) -> Iterator[Document]:
    row = 0
    for batch in batches:
        labels = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in reading.labels]
        for place, content in enumerate(batch.column(batch.schema.get_field_index(column)).to_pylist()):
            if not isinstance(content, str) and not _is_ids(content):
                raise PromptError(f"{told}, row {row}: expected a string or a list of ids, found {content!r}")
            kept = {name: values[place] for name, values in zip(reading.labels, labels, strict=True)}
            yield Document(content, kept)
            row += 1


def _tar(raw: IO[bytes], reading: Reading, told: str) -> Iterator[Document]:
    """WebDataset: members that differ in their ending alone are one sample. Its text is the member that ends
    in .txt (or the column's name), or a column of the one that ends in .json; of that are labels.
    """
    wanted = {"json", "txt", reading.column}  # pictures are not kept in memory
    try:
        with tarfile.open(fileobj=raw, mode="r|") as archive:
            key, sample = "", dict[str, bytes]()
            for member in archive:
                stem, _, ending = member.name.rpartition("/")[2].partition(".")
                if not member.isfile() or not stem:  # what is hidden is no sample, as WebDataset has it
                    continue
                name = f"{member.name.rpartition('/')[0]}/{stem}"
                if sample and name != key:
                    yield from _of_sample(sample, reading, f"{told}:{key.strip('/')}")
                    sample = {}
                if member.size > LARGEST:
                    raise PromptError(
                        f"{told}: expected members of at most {LARGEST} bytes, found {member.size} in "
                        f"{member.name}; split it"
                    )
                if ending in sample:
                    raise PromptError(f"{told}: expected each member once, found {member.name} again")
                key, held = name, archive.extractfile(member) if ending in wanted else None
                sample[ending] = held.read() if held is not None else b""
            if sample:
                yield from _of_sample(sample, reading, f"{told}:{key.strip('/')}")
    except tarfile.TarError as error:
        raise PromptError(
            f"expected a tar archive at {told!r}, found one that cannot be read ({error})"
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
"""Ending -> what reads it, of each also with ".gz" behind; any other file that is named is text."""


def _lines(lines: IO[str], told: str) -> Iterator[str]:
    """Lines of a file, none of which fills the memory."""
    return (_bounded(line, told) for line in iter(lambda: lines.readline(LARGEST + 1), ""))


def _bounded(text: str, told: str) -> str:
    if len(text) > LARGEST:
        raise PromptError(
            f"expected documents of at most {LARGEST} characters in {told!r}, found a longer one"
        )
    return text


@contextmanager
def _decoded(raw: IO[bytes], told: str) -> Iterator[IO[str]]:
    lines = io.TextIOWrapper(raw, encoding="utf-8-sig")  # some programs begin files with a mark
    try:
        yield lines
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PromptError(f"expected UTF-8 text in {told!r}, found byte {byte:#x}; convert it") from error
    finally:
        lines.detach()  # whoever opened the file closes it


@contextmanager
def _readable(told: str, what: str) -> Iterator[None]:
    arrow, _ = _arrow()
    try:
        yield
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise PromptError(f"expected {what} at {told!r}, found {error}") from error


def _arrow() -> tuple[Any, Any]:
    require("corpora", "A Parquet or Arrow file")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


def _column(names: Sequence[str], reading: Reading, told: str) -> str:
    wanted = (reading.column,) if reading.column else (TEXT, IDS)
    column = next((name for name in wanted if name in names), None)
    missing = [name for name in reading.labels if name not in names]
    if column is None or missing:
        asked = " or ".join(map(repr, missing or wanted))
        raise PromptError(f"expected a column {asked} in {told!r}, found {', '.join(names)}")
    if twice := [name for name in (column, *reading.labels) if list(names).count(name) > 1]:
        raise PromptError(
            f"expected one column {twice[0]!r} in {told!r}, found {list(names).count(twice[0])}"
        )
    return column


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
