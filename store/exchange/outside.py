"""Files that somebody else wrote: their bytes, and the JSON in them, within bounds.

Border: paths and bytes in, plain values out; every reader of a config, an index, a header or settings asks
here. What a value means is its reader's business. Records that mizarr wrote itself are read in `sealed.py`.

Anything may be in such a file. Values nested a hundred thousand deep overflow the stack of whoever walks them
later, `NaN` and integers that no float holds end up in a number, one name with two values is read differently
by every reader, and a file in the hub's cache may differ from the digest that is its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import MizarrError
from ..files import is_below

__all__ = [
    "LFS_POINTER",
    "MOST_BYTES",
    "MOST_DEPTH",
    "bounded_depth",
    "json_file",
    "json_object",
    "json_value",
    "named_digest",
    "path_below",
    "read_outside",
    "require_content",
]

MOST_DEPTH = 100
"""Levels of nesting at most; configs have five, serde_json stops at 128."""
MOST_BYTES = 32 << 20
"""Of a JSON file that describes something; the largest index of shards known has 10 MB."""
_LARGEST = 2**53
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file starts with whose content git-lfs has not fetched."""
_BLOB = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_SHOWN = 40  # characters of a value in a message


def json_object(
    path: Path, error: type[MizarrError], advice: str = "fetch it again", *, large_integers: bool = False
) -> dict[str, Any]:
    """The object in a JSON file.

    path: of a file that is there.
    error: class of what is raised.
    advice: what to do about a file that is damaged.
    large_integers: take integers beyond 2**53 too; tokenizers write 10**30 for "no limit".
    Raises `error` for a file that cannot be read, holds something else, or differs from the digest in its
    name.
    """
    data = read_outside(path, error, advice, most=MOST_BYTES)
    value = _value_in(path, data, error, advice, large_integers=large_integers)
    if not isinstance(value, dict):
        raise error(f"expected a JSON object in {path}, found {type(value).__name__}; {advice}")
    return value


def json_file(path: Path, error: type[MizarrError], advice: str = "correct it, or name another file") -> Any:
    """The value in a JSON file of any length that a user names.

    path: of the file.
    error: class of what is raised.
    advice: what to do about a file that is damaged.
    Raises `error` for a file that cannot be read or holds something else.
    """
    return _value_in(path, read_outside(path, error, advice), error, advice)


def _value_in(
    path: Path, data: bytes, error: type[MizarrError], advice: str, *, large_integers: bool = False
) -> Any:
    try:
        return json_value(data, large_integers=large_integers)
    except ValueError as reason:
        raise error(f"expected JSON in {path}, found {reason}; {advice}") from reason


def read_outside(
    path: Path, error: type[MizarrError], advice: str = "fetch it again", *, most: int | None = None
) -> bytes:
    """The bytes of a file.

    path: of the file.
    error: class of what is raised.
    advice: what to do about a file that is damaged.
    most: bytes it may have, None for any number.
    Raises `error` for a file that cannot be read, is longer, a pointer of git-lfs, or differs from the digest
    in its name.
    """
    require_content(path, error, advice)
    try:
        with path.open("rb") as file:
            data = file.read() if most is None else file.read(most + 1)
    except OSError as reason:
        raise error(f"expected a file at {path}, found {_reason(reason)}; {advice}") from reason
    if most is not None and len(data) > most:
        raise error(f"expected at most {most >> 20} MiB in {path}, found more; {advice}")
    name = named_digest(path)
    if name is not None and hashlib.sha256(data).hexdigest() != name:
        raise error(
            f"expected the bytes of {path.resolve()} to have the sha256 in its name, found others: it is "
            "damaged; remove it, and fetch it again"
        )
    return data


def path_below(folder: Path, name: object, error: type[MizarrError], holder: Path | str) -> Path:
    """Where something lies that a file names: the one way from a name in somebody's file to a path.

    folder: that the name is relative to, and has to stay below.
    name: as the file holds it.
    error: class of what is raised.
    holder: what holds the name, for the message.
    Raises `error` for a name that is no text, is absolute, has a step "..", or control characters.
    """
    if not isinstance(name, str) or not is_below(name):
        raise error(
            f"expected {holder} to name something below {folder}, found {name!r:.200}; correct that name"
        )
    return folder / name


def named_digest(path: Path) -> str | None:
    """The sha256 (hex) in the name of the blob behind a link, as the caches of Hugging Face (`<sha256>`) and
    Ollama (`sha256-<sha256>`) name files; None where it is named otherwise.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    match = _BLOB.fullmatch(blob.name) if blob.parent.name == "blobs" else None
    return None if match is None else match[1]


def require_content(path: Path, error: type[MizarrError], advice: str = "fetch it again") -> bool:
    """Whether there is a file at a path; one that is there has content.

    path: where a file may lie.
    error: class of what is raised.
    advice: what to do about a file that is damaged.
    Raises `error` in one line for a link to nothing, a folder or a pipe in a file's place, an empty file, one
    that may not be read, and a pointer that git-lfs left.
    """
    try:
        if not os.path.lexists(path):
            return False
        if path.is_symlink() and not path.exists():
            raise error(
                f"expected a file behind the link {path}, found that it leads to {path.readlink()}, which is "
                "not there; put the file there, or fetch it again"
            )
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "something else"
            raise error(f"expected a file at {path}, found {kind}; give the file itself")
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
    except MizarrError:
        raise
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        raise error(f"expected a file at {path}, found {_reason(reason)}; {advice}") from reason
    if not head:
        raise error(f"expected the content of {path}, found an empty file; {advice}")
    if head == LFS_POINTER:
        raise error(
            f"expected the content of {path}, found a pointer that git-lfs left in its place; run git lfs "
            "pull in that folder"
        )
    return True


def json_value(data: bytes | bytearray | memoryview, *, large_integers: bool = False) -> Any:
    """The value in the bytes of a JSON file: UTF-8, with or without a byte order mark.

    large_integers: take integers beyond 2**53.
    Raises ValueError, saying what was found, for what is no JSON, is nested deeper than `MOST_DEPTH`, holds
    NaN, a number that is too large, or one name with two values. Infinity is taken: configs of Mamba 2 have
    it.
    """
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are no UTF-8 (at byte {error.start})") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=int if large_integers else _integer,
        )
    except RecursionError:
        raise ValueError(f"values nested deeper than {MOST_DEPTH} levels") from None
    return bounded_depth(value, len(text))


def bounded_depth(value: Any, most: int) -> Any:
    """A plain value as it is; ValueError if it is nested deeper than `MOST_DEPTH`.

    value: lists, mappings and what is in them.
    most: values it may have in all, as the length of its text says; YAML refers to one list many times, and
    whoever walks those walks 2**depth of them.
    """
    level, count = [value], 0
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        count += len(level)
        if count > most:
            raise ValueError("values that refer to each other more often than the file is long")
        if not level:
            return value
    raise ValueError(f"values nested deeper than {MOST_DEPTH} levels")


def _reason(error: OSError | ValueError) -> str:
    """What the system says, without the path, which a message names already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        last: dict[str, Any] = {}
        for name, value in pairs:
            if name in last and not _is_same(last[name], value):
                raise ValueError(f"two values of {name[:_SHOWN]!r}")
            last[name] = value
    return values


def _is_same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except RecursionError:
        return False


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN, which is no number")
    return float(text)


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:_SHOWN]}, which is too large for a number")
    return number


def _integer(text: str) -> int:
    number = int(text) if len(text) <= len(str(_LARGEST)) + 1 else _LARGEST + 1
    if abs(number) > _LARGEST:
        raise ValueError(f"the integer {text[:_SHOWN]}, which is beyond 2**53")
    return number
