"""Turns documents into prompts: one prompt each, cut into contexts, or packed into contexts end to end.

Works on token ids; knows no tokenizer and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
ROW = 1 << 14
"""Fewest tokens of packed documents collected before they are cut into prompts, to save copies per
document."""

__all__ = ["Framing", "Ids", "framed_prompts"]


@dataclass(frozen=True)
class Framing:
    """How documents become prompts. All fields enter the key of the stored tokens."""

    before: tuple[int, ...] = ()
    """Special tokens at the start of each prompt."""
    after: tuple[int, ...] = ()
    """Special tokens at the end of each prompt."""
    context: int | None = None
    """Most tokens of a prompt, special tokens included; None for one prompt per document."""
    separator: tuple[int, ...] | None = None
    """Separator tokens after each document, if concatenated documents are cut into prompts that may span
    several documents; None if every prompt comes from a single document."""

    @property
    def room(self) -> int | None:
        """Most tokens of a prompt without its special tokens; None for prompts of any length."""
        return None if self.context is None else self.context - len(self.before) - len(self.after)


def framed_prompts(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    """Cut documents into prompts, and add special tokens to each prompt.

    Empty documents are left out. The last prompt of packed documents may be shorter than the others.

    Arguments:
        documents: token ids of each document.
        framing: length and special tokens of a prompt, and whether it may contain several documents.

    Yields:
        (token ids of a prompt, number of the document that its first token belongs to).
    """
    # An empty separator packs as well; None means one document per prompt.
    cut = _packed if framing.separator is not None else _cut_separately
    for ids, number in cut(documents, framing):
        yield np.concatenate([_as_int32(framing.before), ids, _as_int32(framing.after)]), number


def _cut_separately(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    for number, document in enumerate(documents):
        ids = _as_int32(document)
        room = framing.room or max(len(ids), 1)
        for start in range(0, len(ids), room):
            yield ids[start : start + room], number


def _packed(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    """Concatenate documents, and cut them every `framing.room` tokens.

    Yields:
        (token ids without special tokens, number of the document that the first token belongs to).
    """
    room, separator = framing.room, framing.separator or ()
    assert room is not None
    waiting: list[int] = []
    starts: list[int] = []  # index in `waiting` at which each document begins
    numbers: list[int] = []  # number of each of these documents

    def cut(upto: int) -> Iterator[tuple[Ids, int]]:
        row, document_starts = _as_int32(waiting[:upto]), np.array(starts)
        for start in range(0, upto, room):
            # The document in which the prompt's first token lies; the next documents only follow in it.
            owner = int(np.searchsorted(document_starts, start, side="right")) - 1
            yield row[start : start + room], numbers[owner]
        last = int(np.searchsorted(document_starts, upto, side="right")) - 1
        # The last document may go on after the cut, and then begins at 0.
        starts[:] = [max(start - upto, 0) for start in starts[last:]]
        numbers[:] = numbers[last:]
        del waiting[:upto]

    for number, document in enumerate(documents):
        # Skipped here, as a separator alone would become a document.
        if not len(document):
            continue
        starts.append(len(waiting))
        numbers.append(number)
        waiting.extend(document)
        waiting.extend(separator)
        # Whole prompts only; the rest waits for the next document.
        if len(waiting) >= max(room, ROW):
            yield from cut(len(waiting) - len(waiting) % room)
    if waiting:
        yield from cut(len(waiting))


def _as_int32(values: Sequence[int] | Ids) -> Ids:
    # 4 bytes an id: all ids of a corpus are in memory while a run is planned.
    return np.asarray(values, np.int32)
