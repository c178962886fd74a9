"""Selections: which tokens of each prompt an array has rows for, where it has not one for every token.

    "last"            the last token of each prompt
    "::16", "1:"      every sixteenth, all but the first: a slice of each prompt
    [0, 5, -1]        positions, negative ones from the end; what a prompt is too short for it has not
    a bool array      one per packed token, all prompts end to end

A selection is identity: its name is in the name of what is stored, its canonical form in the description of
the array. Tokens keep their order, and none is kept twice. Border: numbers of tokens in, places out; which
activation the rows are of is not asked.

Axes: token (packed, all prompts), prompt.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import as_index, as_indices
from ..digest import content_digest
from ..errors import PromptError
from .packed import PackedTokens

Places = npt.NDArray[np.int64]
AXIS = "token_"
"""What the names of selected axes begin with; the name of the selection follows."""
_SLICE = re.compile(r"\s*(-?\d{0,18})\s*:\s*(-?\d{0,18})\s*(?::\s*(-?\d{0,18})\s*)?")
_MOST_NAMED = 4
"""Positions up to which a list is spelled out in its name; a longer one goes by its digest."""


class Selection(ABC):
    """Which tokens of each prompt are kept."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As variables and axes are named by it: a word of letters, digits and underscores."""

    @abstractmethod
    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify it."""

    @abstractmethod
    def counts(self, tokens: PackedTokens) -> Places:
        """Tokens kept of each prompt, int64 [prompt]."""

    @abstractmethod
    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """Positions kept in one prompt, ascending, int64."""

    @property
    def axis(self) -> str:
        """Name of the packed axis that has a row for each token kept."""
        return f"{AXIS}{self.name}"

    @abstractmethod
    def kept(self, tokens: PackedTokens) -> Places:
        """Packed indices of the tokens kept, ascending, int64."""

    def starts_on(self, tokens: PackedTokens, at: Places) -> Places:
        """Tokens kept before each packed index, int64; the end of the token axis may be asked for."""
        before = _before(self, tokens)
        prompt = np.searchsorted(tokens.row_start, at, side="right") - 1
        inside = [
            np.searchsorted(self.places(tokens, int(row)), index - tokens.row_start[row])
            for row, index in zip(prompt, at, strict=True)
        ]
        starts: Places = before[prompt] + np.array(inside, np.int64)
        return starts

    def check(self, tokens: PackedTokens) -> None:
        """Raise PromptError where nothing is kept of these prompts."""
        if not self.counts(tokens).any():
            raise PromptError(
                f"expected a selection that keeps a token of some prompt, found {self} over prompts of at "
                f"most {int(tokens.row_size.max())} tokens; choose other positions"
            )


class _ByLength(Selection):
    """What is kept of a prompt follows from its length."""

    @abstractmethod
    def of_length(self, size: int) -> Places:
        """Positions kept in a prompt of so many tokens."""

    def counts(self, tokens: PackedTokens) -> Places:
        """See `Selection`."""
        sizes, which = np.unique(tokens.row_size, return_inverse=True)
        counts: Places = np.array([len(self.of_length(int(size))) for size in sizes], np.int64)[which]
        return counts

    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """See `Selection`."""
        return self.of_length(int(tokens.row_size[prompt]))

    def kept(self, tokens: PackedTokens) -> Places:
        """See `Selection`."""
        sizes, which, counts = np.unique(tokens.row_size, return_inverse=True, return_counts=True)
        by_size = np.split(tokens.row_start[np.argsort(which, kind="stable")], np.cumsum(counts)[:-1])
        found = [
            (starts[:, None] + self.of_length(int(size))).ravel()
            for size, starts in zip(sizes, by_size, strict=True)
        ]
        return np.sort(np.concatenate(found))


@dataclass(frozen=True)
class Listed(_ByLength):
    """Positions, ascending as written, negative ones from the end."""

    positions: tuple[int, ...]

    def __str__(self) -> str:
        return "'last'" if self.positions == (-1,) else f"positions {list(self.positions)}"

    @property
    def name(self) -> str:
        """See `Selection`."""
        if self.positions == (-1,):
            return "last"
        if len(self.positions) > _MOST_NAMED:
            return f"at_{_short(','.join(map(str, self.positions)).encode())}"
        return "_".join(["at", *(_word(each) for each in self.positions)])

    def canonical(self) -> dict[str, Any]:
        """See `Selection`."""
        return {"positions": list(self.positions)}

    def of_length(self, size: int) -> Places:
        """See `_ByLength`."""
        return _of_list(self.positions, size)


@dataclass(frozen=True)
class Sliced(_ByLength):
    """A slice of each prompt, forward."""

    start: int | None
    stop: int | None
    step: int | None

    def __str__(self) -> str:
        return f"positions {self._text!r}"

    @property
    def _text(self) -> str:
        return ":".join("" if each is None else str(each) for each in (self.start, self.stop, self.step))

    @property
    def name(self) -> str:
        """See `Selection`."""
        if self.start is None and self.stop is None:
            return f"every_{self.step}"
        parts = [
            f"{word}_{_word(each)}"
            for word, each in (("from", self.start), ("to", self.stop), ("every", self.step))
            if each is not None
        ]
        return "_".join(parts)

    def canonical(self) -> dict[str, Any]:
        """See `Selection`."""
        return {"slice": [self.start, self.stop, self.step]}

    def of_length(self, size: int) -> Places:
        """See `_ByLength`."""
        return np.arange(size, dtype=np.int64)[slice(self.start, self.stop, self.step)]


@dataclass(frozen=True)
class Masked(Selection):
    """A mask over the packed tokens, one bit each, as numpy packs them."""

    bits: bytes
    length: int

    def __str__(self) -> str:
        return f"a mask of {self.length} tokens"

    @property
    def name(self) -> str:
        """See `Selection`."""
        return f"mask_{_short(self.digest.encode())}"

    @property
    def digest(self) -> str:
        """`sha256:…` of length and bits."""
        return _mask_digest(self.bits, self.length)

    def canonical(self) -> dict[str, Any]:
        """See `Selection`."""
        return {"mask": self.digest, "length": self.length}

    def counts(self, tokens: PackedTokens) -> Places:
        """See `Selection`."""
        starts = tokens.row_start
        return np.add.reduceat(self._mask, starts, dtype=np.int64)

    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """See `Selection`."""
        return np.flatnonzero(self._mask[tokens.row(prompt)]).astype(np.int64)

    def kept(self, tokens: PackedTokens) -> Places:
        """See `Selection`."""
        return np.flatnonzero(self._mask).astype(np.int64)

    def check(self, tokens: PackedTokens) -> None:
        """Raise PromptError for a mask of other prompts, or one that keeps nothing."""
        if self.length != tokens.n_tokens:
            raise PromptError(
                f"expected a mask of one bool per token ({tokens.n_tokens} of {tokens.n_prompts} prompts, "
                f"end to end), found {self.length}; make it from the prompts as they are tokenised"
            )
        super().check(tokens)

    @property
    def _mask(self) -> npt.NDArray[np.bool_]:
        return _unpacked(self.bits, self.length)


View = tuple[str, Selection]
"""A variable that has all tokens, and which of them are shown."""


def as_selection(positions: Any) -> Selection:
    """A selection as people write it: see the head of this module.

    Raises PromptError for what is none.
    """
    if isinstance(positions, Selection):
        return positions
    if isinstance(positions, str):
        return _from_text(positions)
    if isinstance(positions, slice):
        return _sliced(positions.start, positions.stop, positions.step)
    array = np.asarray(positions)
    if array.dtype == bool and array.ndim == 1 and len(array):
        return masked(array)
    if array.dtype.kind in "iu" and array.ndim <= 1 and array.size:
        return Listed(tuple(sorted(set(as_indices(positions, "positions", PromptError)))))
    raise PromptError(
        "expected positions as 'last', a slice such as '::16', numbers, or one bool per token, found "
        f"{array.dtype} of shape {list(array.shape)}"
    )


def masked(mask: npt.NDArray[np.bool_]) -> Masked:
    """The selection of a mask, bool [token]."""
    return Masked(np.packbits(mask).tobytes(), len(mask))


def from_canonical(fields: Mapping[str, Any], kept: Sequence[int] | Places | None = None) -> Selection:
    """A selection again from its canonical form; kept: the tokens a mask keeps, as they were stored.

    Raises ValueError where they are not the tokens of that mask.
    """
    if "positions" in fields:
        return Listed(tuple(fields["positions"]))
    if "slice" in fields:
        return Sliced(*fields["slice"])
    mask = np.zeros(fields["length"], bool)
    mask[np.asarray([] if kept is None else kept, np.int64)] = True
    found = masked(mask)
    if found.digest != fields["mask"]:
        raise ValueError(f"expected the mask {fields['mask']}, found {found.digest}")
    return found


def _from_text(text: str) -> Selection:
    if text.strip() == "last":
        return Listed((-1,))
    if (found := _SLICE.fullmatch(text)) is not None:
        return _sliced(*(int(each) if each and each != "-" else None for each in found.groups()))
    parts = text.split(",")
    if all(re.fullmatch(r"\s*-?\d{1,18}\s*", part) for part in parts):
        return as_selection([int(part) for part in parts])
    raise PromptError(
        f"expected positions as 'last', a slice such as '::16', or numbers such as '0,5,-1', found {text!r}"
    )


def _sliced(start: int | None, stop: int | None, step: int | None) -> Selection:
    ends = (start, stop, step)
    start, stop, step = (None if end is None else as_index(end, "positions", PromptError) for end in ends)
    if step is not None and step < 1:
        raise PromptError(f"expected a slice that goes forward, found a step of {step}")
    # What keeps the same of every prompt is one selection, however it is written.
    start, step = start or None, None if step == 1 else step
    if (start, stop, step) == (None, None, None):
        raise PromptError("expected positions that leave some out, found all of them; leave positions away")
    return Listed((-1,)) if (start, stop, step) == (-1, None, None) else Sliced(start, stop, step)


@lru_cache(maxsize=4096)
def _of_list(positions: tuple[int, ...], size: int) -> Places:
    places = {each + size if each < 0 else each for each in positions if -size <= each < size}
    found = np.array(sorted(places), np.int64)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=8)
def _before(selection: Selection, tokens: PackedTokens) -> Places:
    """Tokens kept before each prompt, and in all: int64 [prompt + 1]."""
    return np.concatenate([[0], np.cumsum(selection.counts(tokens))])


@lru_cache(maxsize=2)
def _unpacked(bits: bytes, length: int) -> npt.NDArray[np.bool_]:
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=length).astype(bool)
    mask.flags.writeable = False
    return mask


@lru_cache(maxsize=8)
def _mask_digest(bits: bytes, length: int) -> str:
    return content_digest(length.to_bytes(8, "little"), bits)


def _word(position: int) -> str:
    return f"m{-position}" if position < 0 else str(position)


def _short(data: bytes) -> str:
    return content_digest(data).partition(":")[2][:16]
