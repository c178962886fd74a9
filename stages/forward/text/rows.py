"""The one reader of prompts: every function that takes prompts turns them into texts or token ids here.

So a value is accepted by all of them or refused by all of them. Takes plain values, arrays and tensors of any
library, and the output of tokenizers; knows no tokenizer and no model, and never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from io import IOBase
from math import isnan
from typing import Any, TypeGuard

from ....store.errors import PromptError

TAKEN = (
    "a text, several texts, token ids ([position] or [prompt, position]), or a tokenizer's output with "
    "input_ids"
)
"""What `as_rows` accepts, for messages."""
ONE_TAKEN = "a text, token ids, or a tokenizer's output with the input_ids of one prompt"
"""What `one_row` accepts, for messages."""
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
_NOTES = frozenset(
    {
        "special_tokens_mask",
        "offset_mapping",
        "length",
        "overflow_to_sample_mapping",
        "overflowing_tokens",
        "num_truncated_tokens",
        "assistant_masks",
    }
)
"""Fields of a tokenizer's output that describe its ids and do not change what a model computes."""
_MISSING = ("NAType", "NaTType")
"""Type names of pandas' missing values, beside NaN."""
_SHOWN = 60
"""Character limit of a value quoted in an error message."""
_NAMES = 8
"""Limit of column names listed in an error message."""

Row = str | list[int]
"""One prompt: its text or its token ids."""


def as_rows(prompts: Any) -> list[str] | list[list[int]]:
    """One text per prompt, or one list of token ids per prompt.

    Arguments:
        prompts: see `TAKEN`; ids in lists, tuples, arrays, tensors, Series or generators. Positions at which
            the attention_mask of a tokenizer's output is 0 are left out: they are padding at either end.

    Raises:
        PromptError: for anything else, for texts and ids side by side, and for no prompt at all.
    """
    value = _plain(prompts)
    if isinstance(value, str):
        return [as_text(value, "the prompt")]
    fields = _fields(value)
    if fields is not None:
        return _unpadded(fields, "prompts")
    entries = _entries(value, "prompts", TAKEN)
    if not entries:
        raise PromptError(f"expected at least one prompt, found none; pass {TAKEN}")
    # The first entry decides whether this is one prompt of token ids or several prompts.
    if _is_id(entries[0]):
        return [_ids(entries, "the prompt")]
    rows = [_row(entry, f"prompt {number}") for number, entry in enumerate(entries)]
    texts = [row for row in rows if isinstance(row, str)]
    ids = [row for row in rows if not isinstance(row, str)]
    if texts and ids:
        raise PromptError(
            "expected prompts that are all texts or all token ids, found both; pass them in two calls"
        )
    return texts or ids


def one_row(prompt: Any, name: str = "prompt") -> Row:
    """One prompt as a text or a list of token ids.

    Arguments:
        prompt: as for `as_rows`; may have an axis of length 1 for the prompt.
        name: name of the argument, for messages.

    Raises:
        PromptError: as `as_rows`, and for several prompts.
    """
    rows = as_rows(prompt)
    if len(rows) != 1:
        raise PromptError(f"expected one {name} ({ONE_TAKEN}), found {len(rows)} prompts; pass one of them")
    return rows[0]


def one_row_of_ids(prompt: Any, name: str = "prompt") -> list[int]:
    """As `one_row`, for a caller without tokenizer.

    Arguments:
        prompt: one prompt as token ids.
        name: name of the argument, for messages.

    Raises:
        PromptError: for a text, and as `one_row`.
    """
    row = one_row(prompt, name)
    if isinstance(row, str):
        raise PromptError(f"expected token ids as {name}, found {_shown(row)}; pass model.tokenize(text)[0]")
    return row


def as_ids(ids: Any) -> list[int]:
    """Token ids from any collection, which may be empty. Raises PromptError for other than integers."""
    return _ids(_entries(_plain(ids), "token ids", "whole numbers"), "the ids")


def is_nothing(value: Any) -> bool:
    """Whether a value is an empty list, array or other collection, except a text."""
    return isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0


def as_text(text: Any, where: str) -> str:
    """A text as a plain str.

    Arguments:
        text: the value.
        where: name of the text, for messages.

    Raises:
        PromptError: for another type, and for half of a surrogate pair, which JSON and file names may contain
            but no tokenizer reads and no store can hold.
    """
    if not isinstance(text, str):
        raise PromptError(f"{where}: expected a text, found {_shown(text)}{_remedy(text)}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{where}: expected text, found half of a surrogate pair ({text[error.start]!r}) at "
                f"character {error.start}; remove it, or read its file as UTF-8"
            ) from error
    # A subclass such as numpy.str_ may override methods; tokenizers and JSON expect plain str.
    return text if type(text) is str else str.__str__(text)


def _row(entry: Any, where: str) -> Row:
    """One entry among several prompts."""
    value = _plain(entry)
    if isinstance(value, str):
        return as_text(value, where)
    fields = _fields(value)
    if fields is None:
        return _ids(_entries(value, where, "a text or token ids"), where)
    rows = _unpadded(fields, where)
    if len(rows) != 1:
        raise PromptError(
            f"expected one prompt in {where}, found input_ids of {len(rows)}; pass each as an entry of its "
            "own"
        )
    return rows[0]


def _plain(value: Any) -> Any:
    """Arrays and tensors as nested lists; any other value unchanged."""
    # A memoryview has `tolist` but is bytes, which are refused later.
    if isinstance(value, str | list | tuple | memoryview) or not callable(getattr(value, "tolist", None)):
        return value
    try:
        return value.tolist()
    except Exception as error:  # libraries raise various types for a tensor without values, or a sparse one
        reason = str(error).partition("\n")[0]
        raise PromptError(
            f"expected token ids that can be read, found {type(value).__name__}: {reason}"
        ) from error


def _fields(value: Any) -> Mapping[str, Any] | None:
    """Fields of a tokenizer's output; None for a value without fields.

    Raises:
        PromptError: for other mappings and tables.
    """
    if isinstance(value, list | tuple):
        return None
    if hasattr(value, "ids") and hasattr(value, "offsets"):  # an Encoding of tokenizers, or ours
        fields = {IDS: value.ids, MASK: getattr(value, MASK, None), TYPES: getattr(value, "type_ids", None)}
        return {name: field for name, field in fields.items() if field is not None}
    # datasets name columns `column_names`, pandas and polars `columns`.
    columns = getattr(value, "column_names", getattr(value, "columns", None))
    if not isinstance(value, Mapping) and not hasattr(value, "keys") and columns is None:
        return None
    names = list(value.keys() if columns is None else columns)
    if IDS not in names:
        remedy = "choose the one key or column that holds texts or ids"
        if "role" in names:
            remedy = "model.chat(messages) turns a conversation into token ids"
        shown = ", ".join(map(str, names[:_NAMES]))
        raise PromptError(
            f"expected {TAKEN}, found {type(value).__name__} with {shown or 'no keys'}; {remedy}"
        )
    return {name: value[name] for name in names}


def _unpadded(fields: Mapping[str, Any], where: str) -> list[list[int]]:
    """Prompts of a tokenizer's output without padding."""
    unknown = [name for name in fields if name not in {IDS, MASK, TYPES, *_NOTES}]
    if unknown:
        raise PromptError(
            f"expected {IDS} and {MASK} in a tokenizer's output, found {unknown[0]!r}, which is not "
            "supported; leave it out"
        )
    rows = _id_rows(fields[IDS], IDS)
    masks, types = (
        _flags(fields[name], name, rows) if fields.get(name) is not None else None for name in (MASK, TYPES)
    )
    unpadded = []
    for number, ids in enumerate(rows):
        place = where if len(rows) == 1 and where != "prompts" else f"prompt {number}"
        start, stop = (0, len(ids)) if masks is None else _bounds(masks[number], place)
        # A second segment needs the embedding of type 1, but every position is read as type 0.
        if types is not None and any(types[number][start:stop]):
            raise PromptError(
                f"expected {TYPES} of 0 in {place}, found others: second segments are not supported; encode "
                "the texts as one"
            )
        unpadded.append(ids[start:stop])
    return unpadded


def _id_rows(value: Any, name: str) -> list[list[int]]:
    """Ids [position] or [prompt, position] as one list per prompt."""
    value = _plain(value)
    if isinstance(value, str):
        raise PromptError(f"expected token ids as {name}, found the text {_shown(value)}")
    entries = _entries(value, name, "token ids")
    if not entries:
        raise PromptError(f"expected at least one prompt, found none in {name}")
    if _is_id(entries[0]):
        return [_ids(entries, name)]
    return [
        _ids(_entries(_plain(entry), f"{name} of prompt {number}", "token ids"), f"prompt {number}")
        for number, entry in enumerate(entries)
    ]


def _flags(value: Any, name: str, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Check a mask's shape and values (0 and 1; bool and float accepted); returns integer rows."""
    entries = _entries(_plain(value), name, "0 and 1 per token")
    nested = [_plain(entry) for entry in entries]
    if not nested or not isinstance(nested[0], Sequence):
        nested = [nested]
    flags = [[_scalar(flag) for flag in _entries(row, name, "0 and 1 per token")] for row in nested]
    if [len(row) for row in flags] != [len(row) for row in rows]:
        raise PromptError(
            f"expected {name} of the shape of {IDS}, found another; pass both from one encoding"
        )
    for row in flags:
        for flag in row:
            if not isinstance(flag, int | float) or flag not in (0, 1):
                raise PromptError(f"expected {name} of 0 and 1, found {_shown(flag)}")
    return [[int(flag) for flag in row] for row in flags]


def _bounds(mask: Sequence[int], where: str) -> tuple[int, int]:
    """(start, stop) of unmasked positions; PromptError for masked positions between tokens."""
    if 1 not in mask:
        raise PromptError(f"expected at least one token in {where}, found all of it masked; leave it out")
    start, stop = mask.index(1), len(mask) - mask[::-1].index(1)
    # A hole between tokens changes what later tokens see: that is an intervention, not padding.
    if 0 in mask[start:stop]:
        raise PromptError(
            f"expected padding at the ends of {where}, found position {mask.index(0, start)} masked between "
            "others; leave its token out, or knock out attention to it by an intervention"
        )
    return start, stop


def _entries(value: Any, where: str, accepted: str) -> list[Any] | tuple[Any, ...]:
    """Entries of a sequence, a generator or another ordered iterable."""
    if isinstance(value, list | tuple):
        return value
    # Iterable, but not prompts: bytes iterate as integers, files as lines, and sets have no order.
    refused = (bytes, bytearray, memoryview, set, frozenset, os.PathLike, IOBase)
    if not isinstance(value, refused) and isinstance(value, Iterable):
        return list(value)
    raise PromptError(f"expected {where} as {accepted}, found {_shown(value)}{_remedy(value)}")


def _ids(entries: Sequence[Any], where: str) -> list[int]:
    """Token ids of one prompt."""
    # Plain lists of ints are by far the most common: one pass over the types, without a Python loop.
    if set(map(type, entries)) <= {int}:
        return list(entries)
    ids = []
    for position, entry in enumerate(entries):
        token = _scalar(entry)
        if not _is_int(token):
            raise PromptError(
                f"expected token ids, whole numbers, in {where}, found {_shown(token)} at position {position}"
                + _remedy(token)
            )
        ids.append(int(token))
    return ids


def _is_id(value: Any) -> bool:
    return type(value) is int or _is_int(_scalar(value))


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _scalar(value: Any) -> Any:
    """A scalar of numpy or torch, or a tensor without axes, as a Python number."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        with suppress(Exception):  # a tensor without values; refused later for its type
            return value.item()
    return value


def _remedy(value: Any) -> str:
    """Advice appended to an error message about a value's type; empty for unknown types."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "; decode bytes to a text first"
    if isinstance(value, os.PathLike | IOBase):
        return "; read the file: mizarr.Corpus, or Path(…).read_text()"
    if isinstance(value, set | frozenset):
        return "; a set has no order, so pass a list"
    if value is None or type(value).__name__ in _MISSING or (isinstance(value, float) and isnan(value)):
        return "; leave missing values out"
    if isinstance(value, float):
        return "; convert ids to integers"
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return f"{text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''} ({type(value).__name__})"
