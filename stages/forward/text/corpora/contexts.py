"""Documents as prompts: each by itself, cut into contexts, or packed into them end to end.

Border: token ids in, token ids out; knows no tokenizer and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
ROW = 1 << 14
"""Tokens that are gathered before they are cut: a copy for each document would take longer than its
tokens."""

__all__ = ["Framing", "Ids", "framed_prompts"]


@dataclass(frozen=True)
class Framing:
    """How documents become prompts.

    before, after: special tokens around each prompt. context: tokens of a prompt with these; None for a
    prompt per document. separator: behind each document where several share a prompt; None for a document
    that is cut where it is longer, and never shares one.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    context: int | None = None
    separator: tuple[int, ...] | None = None

    @property
    def room(self) -> int | None:
        """Tokens of documents in a prompt."""
        return None if self.context is None else self.context - len(self.before) - len(self.after)


def framed_prompts(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    """Prompts, each with the number of the document its first own token is of. Documents without a token are
    left out; the last prompt of packed ones may be shorter."""
    cut = _packed if framing.separator is not None else _apart
    for ids, number in cut(documents, framing):
        yield np.concatenate([_ids(framing.before), ids, _ids(framing.after)]), number


def _apart(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    for number, document in enumerate(documents):
        ids = _ids(document)
        room = framing.room or max(len(ids), 1)
        for start in range(0, len(ids), room):
            yield ids[start : start + room], number


def _packed(documents: Iterable[Sequence[int] | Ids], framing: Framing) -> Iterator[tuple[Ids, int]]:
    """Documents in one row, cut every so many tokens."""
    room, separator = framing.room, framing.separator or ()
    assert room is not None
    waiting: list[int] = []
    starts: list[int] = []  # in what is waiting, of the documents it is of
    numbers: list[int] = []

    def cut(upto: int) -> Iterator[tuple[Ids, int]]:
        row, begun = _ids(waiting[:upto]), np.array(starts)
        for start in range(0, upto, room):
            owner = int(np.searchsorted(begun, start, side="right")) - 1
            yield row[start : start + room], numbers[owner]
        last = int(np.searchsorted(begun, upto, side="right")) - 1
        starts[:] = [max(start - upto, 0) for start in starts[last:]]
        numbers[:] = numbers[last:]
        del waiting[:upto]

    for number, document in enumerate(documents):
        if not len(document):
            continue
        starts.append(len(waiting))
        numbers.append(number)
        waiting.extend(document)
        waiting.extend(separator)
        if len(waiting) >= max(room, ROW):
            yield from cut(len(waiting) - len(waiting) % room)
    if waiting:
        yield from cut(len(waiting))


def _ids(values: Sequence[int] | Ids) -> Ids:
    return np.asarray(values, np.int32)
