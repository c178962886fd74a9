"""Small JSON files that can be checked: the last field digests the bytes before it.

Border: text in, text out; what a file says, and where it lies, is known elsewhere.

A flipped bit in a file that says where numbers lie, or what they are, would be as bad as one in the numbers.
So a record ends in `"check": "sha256:…"` over every byte in front of that field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from .digest import content_digest
from .errors import REPAIR, CorruptEntry
from .files import is_below

_CHECK = re.compile(rb',\s*"check": ?"(sha256:[0-9a-f]{64})"\s*\}\s*\Z')
_LONGEST_CHECK = 200
"""Bytes at the end of a record that hold its check: field name, digest and white space."""


def sealed(fields: Mapping[str, Any]) -> bytes:
    """The JSON file of these fields, in this order, with its check; TypeError for what is not plain."""
    head = json.dumps(fields, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return head + f',\n "check": "{content_digest(head)}"\n}}\n'.encode()


def read_json(text: str | bytes) -> Any:
    """The value in a JSON file somebody may have made; ValueError for whatever is none, or has no end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def unsealed(name: str, text: bytes, required: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a record without its check.

    Arguments:
        name: of the file, as an error names it.
        required: fields that the record has to have.

    Raises:
        CorruptEntry: for a file that is not what was written, or lacks a required field.
    """
    check = _CHECK.search(text, max(0, len(text) - _LONGEST_CHECK))
    if check is None:
        raise CorruptEntry(f"{name}: expected a record that ends in its check, found none; {REPAIR}")
    if content_digest(text[: check.start()]) != check[1].decode():
        raise CorruptEntry(f"{name}: expected {check[1].decode()}, found another digest; {REPAIR}")
    try:
        fields = read_json(text)
    except ValueError as error:
        raise CorruptEntry(f"{name}: expected a record, found {error}; {REPAIR}") from error
    if not isinstance(fields, dict) or not fields.keys() >= set(required):
        raise CorruptEntry(f"{name}: expected a record of {', '.join(required)}, found others; {REPAIR}")
    fields.pop("check", None)
    return fields


def files_of(name: str, fields: Mapping[str, Any], listed: str = "files") -> dict[str, tuple[int, str]]:
    """The files that a record, in the file `name`, lists: path below its folder -> (size, "sha256:…").

    listed: the field that lists them.
    Raises CorruptEntry for what is no such list, or leads out of the folder.
    """
    try:
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in fields[listed].items()}
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CorruptEntry(f"{name}: expected a list of files, found another ({error}); {REPAIR}") from error
    for file in files:
        if not is_below(file):
            raise CorruptEntry(
                f"{name}: expected names of files below its folder, found {file!r:.80}; {REPAIR}"
            )
    return files
