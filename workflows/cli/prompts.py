"""Prompts as people keep them: text, JSONL and Parquet files, stdin, or words on the command line.

A text file holds one prompt per line; blank lines are skipped. A JSONL file (.jsonl, .ndjson) holds one JSON
value per line: a string, or an object with `text` or with `ids` (token ids). A Parquet file holds a column
`text` or `ids`. Knows files; knows no tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...store.errors import MissingExtra, PromptError

JSON_LINES = (".jsonl", ".ndjson")


def read_prompts(sources: Sequence[str], *, literal: bool = False) -> list[str] | list[list[int]]:
    """All prompts of all sources in order; `-` is stdin, `literal` takes the sources themselves as prompts.

    Raises PromptError naming file and line for anything that is not a prompt, and for no prompt at all.
    """
    found: list[Any] = (
        list(sources) if literal else [prompt for source in sources for prompt in _read(source)]
    )
    if not found:
        raise PromptError(f"expected at least one prompt, found none in {', '.join(sources)}")
    if len({isinstance(prompt, str) for prompt in found}) > 1:
        raise PromptError(
            "expected prompts that are all text or all token ids, found both; capture them in two calls"
        )
    return found


def _read(source: str) -> Iterator[str | list[int]]:
    if source == "-":
        yield from _text(sys.stdin)
        return
    path = Path(source)
    if not path.is_file():
        state = "a directory" if path.is_dir() else "nothing"
        raise PromptError(
            f"expected a file of prompts at {source!r}, found {state}; to give the prompt itself add --text"
        )
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open(encoding="utf-8") as lines:
        try:
            yield from _json_lines(source, lines) if path.suffix in JSON_LINES else _text(lines)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise PromptError(
                f"expected UTF-8 text in {source!r}, found byte {byte:#x}; convert it"
            ) from error


def _text(lines: Iterable[str]) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in lines if line.strip())


def _json_lines(source: str, lines: Iterable[str]) -> Iterator[str | list[int]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            found = line.strip()[:40]
            raise PromptError(f"{source}:{number}: expected JSON, found {found!r} ({error.msg})") from error
        prompt: Any = row.get("text", row.get("ids")) if isinstance(row, dict) else row
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise PromptError(
                f"{source}:{number}: expected a string, {{'text': string}} or {{'ids': [integers]}}, "
                f"found {line.strip()[:40]!r}"
            )
        yield prompt


def _parquet(path: Path) -> Iterator[str | list[int]]:
    """The column `text`, else `ids`, of a Parquet file; a row group in memory at a time."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtra(
            "Parquet files need pyarrow; install it with: pip install 'mizarr[corpora]'"
        ) from error
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise PromptError(f"expected a Parquet file at {str(path)!r}, found {error}") from error
    names = file.schema_arrow.names
    column = next((name for name in ("text", "ids") if name in names), None)
    if column is None:
        raise PromptError(f"expected a column 'text' or 'ids' in {str(path)!r}, found {', '.join(names)}")
    row = 0
    for batch in file.iter_batches(columns=[column]):
        for prompt in batch.column(0).to_pylist():
            if not isinstance(prompt, str) and not _is_ids(prompt):
                raise PromptError(f"{path}, row {row}: expected a string or a list of ids, found {prompt!r}")
            yield prompt
            row += 1


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
