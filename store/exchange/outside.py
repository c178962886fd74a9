"""Read files that others wrote, JSON in particular, within safe limits.

Used for configs, shard indices, headers and settings. (Records of mizarr itself: `sealed.py`.) Such files can
contain anything: nesting of a hundred thousand levels overflows the stack of later code, `NaN` and huge
integers end up in numbers, duplicate names are resolved differently by every reader, and a file in the hub's
cache may differ from the digest in its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ..digest import LARGEST
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
"""Maximum nesting of JSON values; real configs have five levels, serde_json stops at 128."""
MOST_BYTES = 32 << 20
"""Maximum size of a descriptive JSON file in bytes; the largest known shard index has 10 MB."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a file whose content git-lfs has not fetched."""
_BLOB = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_SHOWN = 40  # characters of a value in a message
_JSON_NAMES = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def json_object(
    path: Path, error: type[MizarrError], advice: str = "fetch it again", *, large_integers: bool = False
) -> dict[str, Any]:
    """Read a JSON file that another program wrote and that contains an object.

    Arguments:
        path: The file.
        error: Class of the error.
        advice: What to do about a damaged file.
        large_integers: Whether integers beyond 2**53 are allowed; tokenizers write 10**30 for "no limit".

    Returns:
        The object as a dict.

    Raises:
        error: The file cannot be read, contains another value, or differs from the digest in its name.
    """
    data = read_outside(path, error, advice, most=MOST_BYTES)
    value = _value_in(path, data, error, advice, large_integers=large_integers)
    if not isinstance(value, dict):
        raise error(f"expected a JSON object in {path}, found {_JSON_NAMES[type(value)]}; {advice}")
    return value


def json_file(path: Path, error: type[MizarrError], advice: str = "correct it, or name another file") -> Any:
    """Read a JSON file of any length that the user named.

    Arguments:
        path: The file.
        error: Class of the error.
        advice: What to do about a damaged file.

    Raises:
        error: The file cannot be read or is not JSON.
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
    """Read the whole content of a file that another program wrote, after checks for damage.

    Arguments:
        path: The file.
        error: Class of the error.
        advice: What to do about a damaged file.
        most: Maximum size in bytes; None for no limit.

    Raises:
        error: The file cannot be read, is too long, is a git-lfs pointer, or differs from the digest in its
            name.
    """
    require_content(path, error, advice)
    try:
        with path.open("rb") as file:
            # One byte more than allowed shows that the file is too long, even if it grows while it is read.
            data = file.read() if most is None else file.read(most + 1)
    except OSError as reason:
        raise error(f"cannot read the file {path}: {_system_reason(reason)}; {advice}") from reason
    if most is not None and len(data) > most:
        raise error(f"the file {path} is larger than the allowed {most >> 20} MiB; {advice}")
    name = named_digest(path)
    if name is not None and hashlib.sha256(data).hexdigest() != name:
        raise error(
            f"the cached file {path.resolve()} is damaged: its content does not have the sha256 in its name; "
            "remove it, and download it again"
        )
    return data


def path_below(folder: Path, name: object, error: type[MizarrError], holder: Path | str) -> Path:
    """Resolve a file name that was read from another program's file; refuse one that leaves the folder.

    Arguments:
        folder: The folder that the name is relative to, and may not leave.
        name: The name.
        error: Class of the error.
        holder: Where the name was found, for messages.

    Raises:
        error: The name is no text, is absolute, contains ".." or control characters.
    """
    if not isinstance(name, str) or not is_below(name):
        raise error(
            f"expected {holder} to name a file inside the folder {folder}, found {name!r:.200}; correct that "
            "name"
        )
    return folder / name


def named_digest(path: Path) -> str | None:
    """sha256 (64 hex digits) in the name of the cache file that a link leads to; None for other files.

    The caches of Hugging Face (`blobs/<sha256>`) and Ollama (`blobs/sha256-<sha256>`) name files so.
    """
    if not path.is_symlink():
        return None
    # Only links: a plain file that happens to have a hex name makes no promise about its content.
    blob = path.resolve()
    match = _BLOB.fullmatch(blob.name) if blob.parent.name == "blobs" else None
    return None if match is None else match[1]


def require_content(path: Path, error: type[MizarrError], advice: str = "fetch it again") -> bool:
    """Check that a path is a regular, non-empty file with real content, or that nothing is there.

    Arguments:
        path: Path of the file.
        error: Class of the error.
        advice: What to do about a damaged file.

    Returns:
        True for such a file, False if nothing is there.

    Raises:
        error: A dangling link, a folder, pipe or other non-file, an empty or unreadable file, a git-lfs
            pointer.
    """
    try:
        if not os.path.lexists(path):
            return False
        if path.is_symlink() and not path.exists():
            raise error(
                f"the link {path} leads to {path.readlink()}, which does not exist; put the file there, or "
                "download it again"
            )
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe, socket or device"
            raise error(f"expected a file at {path}, found {kind}; give the path of the file itself")
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
    except MizarrError:
        raise
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        raise error(f"cannot read the file {path}: {_system_reason(reason)}; {advice}") from reason
    if not head:
        raise error(f"the file {path} is empty; {advice}")
    if head == LFS_POINTER:
        raise error(
            f"the file {path} holds only a git-lfs pointer instead of its content; run `git lfs pull` in its "
            "folder"
        )
    return True


def json_value(data: bytes | bytearray | memoryview, *, large_integers: bool = False) -> Any:
    """Parse JSON bytes: UTF-8, with or without a byte order mark.

    Arguments:
        data: The bytes.
        large_integers: Whether integers beyond 2**53 are allowed.

    Raises:
        ValueError: Not JSON, nested deeper than `MOST_DEPTH`, NaN, a number that overflows, or a name with
            two different values. Infinity is allowed, because configs of Mamba 2 contain it.
    """
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text that is not UTF-8 (at byte {error.start})") from None
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
    """Return a value parsed from JSON or YAML, unless it is nested so deeply or so large that later code
    fails.

    Arguments:
        value: Lists, mappings and their items.
        most: Maximum number of values, such as the length of the text. YAML can refer to one list many times,
            so that a small file expands to 2**depth values.

    Raises:
        ValueError: Nested deeper than `MOST_DEPTH`, or too many values.
    """
    # Level by level instead of recursively: recursion is what deep nesting would overflow.
    level, count = [value], 0
    for _ in range(MOST_DEPTH + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        count += len(level)
        if count > most:
            raise ValueError(
                "aliases (YAML references) that expand to more values than the file has characters"
            )
        if not level:
            return value
    raise ValueError(f"values nested deeper than {MOST_DEPTH} levels")


def _system_reason(error: OSError | ValueError) -> str:
    """Text of a system error without the path, such as "Permission denied"."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's names and values; ValueError for a name with two different values."""
    values = dict(pairs)
    if len(values) < len(pairs):
        # Duplicates with equal values are tolerated, as some tokenizer files have them.
        last: dict[str, Any] = {}
        for name, value in pairs:
            if name in last and not _is_same(last[name], value):
                raise ValueError(f"an object with two different values for the key {name[:_SHOWN]!r}")
            last[name] = value
    return values


def _is_same(left_value: Any, right_value: Any) -> bool:
    try:
        return type(left_value) is type(right_value) and bool(left_value == right_value)
    except RecursionError:
        return False


def _constant(text: str) -> float:
    # parse_constant also receives Infinity and -Infinity, which are allowed.
    if text == "NaN":
        raise ValueError("NaN, which is not a number")
    return float(text)


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:_SHOWN]}, which is too large for a number")
    return number


def _integer(text: str) -> int:
    # Python needs quadratic time for long integers, so the length is checked first.
    number = int(text) if len(text) <= len(str(LARGEST)) + 1 else LARGEST + 1
    if abs(number) > LARGEST:
        raise ValueError(f"the integer {text[:_SHOWN]}, which is beyond 2**53")
    return number
