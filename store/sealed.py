"""Sealed records: small JSON files that end in a checksum of themselves.

A flipped bit in a file that says where numbers are is as harmful as one in the numbers. So the last field of
a record is `"check": "sha256:…"` over all bytes before that field.
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
"""Upper limit on the bytes of that last field: name, digest and white space."""


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Content of a small JSON file of these fields, in order, that ends in a checksum of itself ("check").

    Raises:
        TypeError: A value is not a JSON value.
    """
    head = json.dumps(fields, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return head + f',\n "check": "{content_digest(head)}"\n}}\n'.encode()


def read_json(text: str | bytes) -> Any:
    """Parse a JSON file that may be damaged; ValueError if it is not JSON or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def unsealed(name: str, text: bytes, required: Collection[str] = ()) -> dict[str, Any]:
    """Parse a JSON file written by `sealed`, after verifying its checksum.

    Arguments:
        name: Name of the file, for messages.
        text: Content of the file.
        required: Names of fields that the file must have.

    Returns:
        The fields without the checksum.

    Raises:
        CorruptEntry: The checksum does not match, or a required field is missing.
    """
    # Searched from the end: a field of the record may itself contain the word check.
    check = _CHECK.search(text, max(0, len(text) - _LONGEST_CHECK))
    if check is None:
        raise CorruptEntry(f'{name} is damaged: it does not end in its checksum ("check"); {REPAIR}')
    if content_digest(text[: check.start()]) != check[1].decode():
        raise CorruptEntry(f"{name} is damaged: it does not match its checksum {check[1].decode()}; {REPAIR}")
    try:
        fields = read_json(text)
    except ValueError as error:
        raise CorruptEntry(f"{name} is damaged: {error}; {REPAIR}") from error
    if not isinstance(fields, dict) or not fields.keys() >= set(required):
        raise CorruptEntry(f"{name}: expected a record with the fields {', '.join(required)}; {REPAIR}")
    fields.pop("check", None)
    return fields


def files_of(name: str, fields: Mapping[str, Any], listed: str = "files") -> dict[str, tuple[int, str]]:
    """Parse a list of files with sizes and checksums, as records and manifests contain it.

    Arguments:
        name: Name of the record's file, for messages.
        fields: Fields of the record.
        listed: Name of the field with the list.

    Returns:
        Path relative to the record's folder -> (size, "sha256:…").

    Raises:
        CorruptEntry: The list is invalid, or a path leaves the folder.
    """
    try:
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in fields[listed].items()}
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CorruptEntry(
            f"{name}: the field {listed!r}, a list of files with size and checksum, is invalid ({error}); "
            f"{REPAIR}"
        ) from error
    for file in files:
        if not is_below(file):
            raise CorruptEntry(
                f"{name}: it lists the file {file!r:.80}, which lies outside of its folder; {REPAIR}"
            )
    return files
