"""Reads prompts: every function that takes prompts turns them into texts or token ids here.

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
"""Forms of prompts that `as_rows` accepts, for messages."""
ONE_TAKEN = "a text, token ids, or a tokenizer's output with the input_ids of one prompt"
"""Forms of a prompt that `one_row` accepts, for messages."""
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
    """Read prompts as one text per prompt, or as one list of token ids per prompt.

    Arguments:
        prompts: a text, several texts, token ids ([position] or [prompt, position]; lists, tuples, arrays,
            tensors, Series or generators), or the output of a tokenizer: input_ids with attention_mask,
            whose padding at either end is removed.

    Raises:
        PromptError: for prompts of another form, for a mixture of texts and token ids, and for no prompt.
    """
    value = _as_nested_list(prompts)
    if isinstance(value, str):
        return [as_text(value, "the prompt")]
    fields = _tokenizer_fields(value)
    if fields is not None:
        return _without_padding(fields, "prompts")
    entries = _entries(value, "prompts", TAKEN)
    if not entries:
        raise PromptError(f"expected at least one prompt, found none; pass {TAKEN}")
    # The first entry decides whether this is one prompt of token ids or several prompts.
    if _is_id(entries[0]):
        return [_token_ids(entries, "the prompt")]
    rows = [_text_or_ids(entry, f"prompt {number}") for number, entry in enumerate(entries)]
    texts = [row for row in rows if isinstance(row, str)]
    ids = [row for row in rows if not isinstance(row, str)]
    if texts and ids:
        raise PromptError(
            "expected prompts that are all texts or all token ids, found both; pass texts and token ids in "
            "separate calls"
        )
    return texts or ids


def one_row(prompt: Any, name: str = "prompt") -> Row:
    """Read one prompt, as a text or a list of token ids.

    Arguments:
        prompt: a text, token ids, or the output of a tokenizer; may have an axis of length 1 for the prompt.
        name: name of the argument, for messages.

    Raises:
        PromptError: for a prompt of another form, and for several prompts.
    """
    rows = as_rows(prompt)
    if len(rows) != 1:
        raise PromptError(f"expected one {name} ({ONE_TAKEN}), found {len(rows)} prompts; pass one of them")
    return rows[0]


def one_row_of_ids(prompt: Any, name: str = "prompt") -> list[int]:
    """Read one prompt as a list of token ids, where no tokenizer is known to encode a text.

    Arguments:
        prompt: one prompt as token ids; may have an axis of length 1 for the prompt.
        name: name of the argument, for messages.

    Raises:
        PromptError: for a text, for several prompts, and for a prompt of another form.
    """
    row = one_row(prompt, name)
    if isinstance(row, str):
        raise PromptError(f"expected token ids as {name}, found {_shown(row)}; pass model.tokenize(text)[0]")
    return row


def as_ids(ids: Any) -> list[int]:
    """Read token ids from a list, array, tensor or other ordered collection, which may be empty.

    Raises:
        PromptError: for entries that are no integers.
    """
    return _token_ids(_entries(_as_nested_list(ids), "token ids", "whole numbers"), "the ids")


def is_nothing(value: Any) -> bool:
    """Whether a value is an empty list, array or other collection, except a text."""
    return isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0


def as_text(text: Any, where: str) -> str:
    """Check that a value is a valid text, and return it as a plain str.

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
                f"{where}: expected valid Unicode text, found half of a surrogate pair "
                f"({text[error.start]!r}) at character {error.start}; remove this character, or read the "
                "file as UTF-8"
            ) from error
    # A subclass such as numpy.str_ may override methods; tokenizers and JSON expect plain str.
    return text if type(text) is str else str.__str__(text)


def _text_or_ids(entry: Any, where: str) -> Row:
    """Read one entry of a list of prompts, as a text or a list of token ids."""
    value = _as_nested_list(entry)
    if isinstance(value, str):
        return as_text(value, where)
    fields = _tokenizer_fields(value)
    if fields is None:
        return _token_ids(_entries(value, where, "a text or token ids"), where)
    rows = _without_padding(fields, where)
    if len(rows) != 1:
        raise PromptError(
            f"expected one prompt in {where}, found input_ids of {len(rows)} prompts; pass each as an entry "
            "of its own"
        )
    return rows[0]


def _as_nested_list(value: Any) -> Any:
    """Convert arrays and tensors to nested lists; any other value is returned unchanged."""
    # A memoryview has `tolist` but is bytes, which are refused later.
    if isinstance(value, str | list | tuple | memoryview) or not callable(getattr(value, "tolist", None)):
        return value
    try:
        return value.tolist()
    except Exception as error:  # libraries raise various types for a tensor without values, or a sparse one
        reason = str(error).partition("\n")[0]
        raise PromptError(
            f"expected token ids in an array that can be converted to a list, found {type(value).__name__} "
            f"that cannot ({reason}); pass a dense array or a list"
        ) from error


def _tokenizer_fields(value: Any) -> Mapping[str, Any] | None:
    """Field name -> value of a tokenizer's output, e.g. input_ids; None for a value without named fields.

    Raises:
        PromptError: for mappings and tables without input_ids.
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
            f"expected {TAKEN}, found {type(value).__name__} with the keys {shown or '(none)'}; {remedy}"
        )
    return {name: value[name] for name in names}


def _without_padding(fields: Mapping[str, Any], where: str) -> list[list[int]]:
    """Token ids of each prompt in a tokenizer's output, without the padding at its ends."""
    unknown = [name for name in fields if name not in {IDS, MASK, TYPES, *_NOTES}]
    if unknown:
        raise PromptError(
            f"expected only {IDS} and {MASK} of a tokenizer, found the field {unknown[0]!r}, which is not "
            "supported; leave it out"
        )
    rows = _id_rows(fields[IDS], IDS)
    masks, types = (
        _zero_one_rows(fields[name], name, rows) if fields.get(name) is not None else None
        for name in (MASK, TYPES)
    )
    unpadded = []
    for number, ids in enumerate(rows):
        place = where if len(rows) == 1 and where != "prompts" else f"prompt {number}"
        start, stop = (0, len(ids)) if masks is None else _unmasked_range(masks[number], place)
        # A second segment needs the embedding of type 1, but every position is read as type 0.
        if types is not None and any(types[number][start:stop]):
            raise PromptError(
                f"expected {TYPES} of 0 in {place}, found a second segment (1), which is not supported; "
                "encode both texts as one text"
            )
        unpadded.append(ids[start:stop])
    return unpadded


def _id_rows(value: Any, name: str) -> list[list[int]]:
    """Read token ids [position] or [prompt, position] as one list per prompt."""
    value = _as_nested_list(value)
    if isinstance(value, str):
        raise PromptError(
            f"expected token ids as {name}, found the text {_shown(value)}; pass the text itself as prompt"
        )
    entries = _entries(value, name, "token ids")
    if not entries:
        raise PromptError(f"expected at least one prompt in {name}, found none; add its token ids")
    if _is_id(entries[0]):
        return [_token_ids(entries, name)]
    return [
        _token_ids(
            _entries(_as_nested_list(entry), f"{name} of prompt {number}", "token ids"), f"prompt {number}"
        )
        for number, entry in enumerate(entries)
    ]


def _zero_one_rows(value: Any, name: str, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Read a mask as integers 0 and 1, [prompt][position], after checking its shape against the token ids."""
    entries = _entries(_as_nested_list(value), name, "0 and 1 per token")
    nested = [_as_nested_list(entry) for entry in entries]
    if not nested or not isinstance(nested[0], Sequence):
        nested = [nested]
    flags = [[_scalar(flag) for flag in _entries(row, name, "0 and 1 per token")] for row in nested]
    if [len(row) for row in flags] != [len(row) for row in rows]:
        raise PromptError(
            f"expected {name} in the shape of {IDS}, found another shape; pass both from one call of the "
            "tokenizer"
        )
    for row in flags:
        for flag in row:
            if not isinstance(flag, int | float) or flag not in (0, 1):
                raise PromptError(
                    f"expected {name} of 0 and 1, found {_shown(flag)}; pass it as the tokenizer returned it"
                )
    return [[int(flag) for flag in row] for row in flags]


def _unmasked_range(mask: Sequence[int], where: str) -> tuple[int, int]:
    """First unmasked position, and the position after the last one.

    Raises:
        PromptError: if all positions are masked, or one between two tokens.
    """
    if 1 not in mask:
        raise PromptError(
            f"expected at least one token in {where}, found {MASK} of zeros only; leave this prompt out"
        )
    start, stop = mask.index(1), len(mask) - mask[::-1].index(1)
    # A hole between tokens changes what later tokens see: that is an intervention, not padding.
    if 0 in mask[start:stop]:
        raise PromptError(
            f"expected {MASK} of 0 only at the ends of {where}, found position {mask.index(0, start)} masked "
            "between tokens; remove its token, or cut attention to it with mizarr.KnockoutSpec"
        )
    return start, stop


def _entries(value: Any, where: str, accepted: str) -> list[Any] | tuple[Any, ...]:
    """Entries of a list, a generator or another ordered iterable; PromptError for any other value."""
    if isinstance(value, list | tuple):
        return value
    # Iterable, but not prompts: bytes iterate as integers, files as lines, and sets have no order.
    refused = (bytes, bytearray, memoryview, set, frozenset, os.PathLike, IOBase)
    if not isinstance(value, refused) and isinstance(value, Iterable):
        return list(value)
    raise PromptError(f"expected {where} as {accepted}, found {_shown(value)}{_remedy(value)}")


def _token_ids(entries: Sequence[Any], where: str) -> list[int]:
    """Token ids of one prompt as Python ints; PromptError for an entry that is no integer."""
    # Plain lists of ints are by far the most common: one pass over the types, without a Python loop.
    if set(map(type, entries)) <= {int}:
        return list(entries)
    ids = []
    for position, entry in enumerate(entries):
        token = _scalar(entry)
        if not _is_int(token):
            raise PromptError(
                f"expected token ids (whole numbers) in {where}, found {_shown(token)} at position {position}"
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
    """Advice that ends an error message about a value of a wrong type; empty for types without advice."""
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
