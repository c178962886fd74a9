"""Selections: arrays with rows for only some tokens of each prompt.

    "last"            the last token of each prompt
    "::16", "1:"      every sixteenth; all but the first: a slice of each prompt
    [0, 5, -1]        positions, negative ones from the end; positions beyond a short prompt are skipped
    a bool array      a mask with one value per packed token, all prompts end to end

A selection identifies an array, not a run: its name is part of the variable's name (`resid_post__last`), and
its canonical form is in the array's attributes. So one run can hold the last tokens and every sixteenth, and
a later capture adds a selection to it. Tokens keep their order and occur at most once.

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
"""Prefix of the name of a selection's axis."""
_SLICE = re.compile(r"\s*(-?\d{0,18})\s*:\s*(-?\d{0,18})\s*(?::\s*(-?\d{0,18})\s*)?")
_MOST_NAMED = 4
"""Longest list of positions that is spelled out in a name; longer lists are named by a digest."""


class Selection(ABC):
    """Rule that selects tokens of each prompt, such as the last token, so that only their rows are stored."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the selection within variable and axis names: letters, digits and underscores."""

    @abstractmethod
    def canonical(self) -> dict[str, Any]:
        """JSON values that identify the selection; equal selections have equal values."""

    @abstractmethod
    def counts(self, tokens: PackedTokens) -> Places:
        """Number of selected tokens per prompt, int64 [prompt]."""

    @abstractmethod
    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """Selected positions in one prompt, ascending, int64.

        Arguments:
            tokens: Prompts of the run.
            prompt: Number of the prompt.
        """

    @property
    def axis(self) -> str:
        """Name of the stored axis with a row per selected token, such as "token_last"."""
        return f"{AXIS}{self.name}"

    @abstractmethod
    def indices(self, tokens: PackedTokens) -> Places:
        """Selected tokens as indices on the token axis, ascending, int64."""

    def starts_on(self, tokens: PackedTokens, at: Places) -> Places:
        """Number of selected tokens before each of some indices on the token axis, int64.

        Arguments:
            tokens: Prompts of the run.
            at: Indices on the token axis; its end is allowed.
        """
        # Whole prompts before, then a search within the prompt: the mask of a large run is never expanded
        # here.
        n_before_prompt = _n_before_prompts(self, tokens)
        prompt = np.searchsorted(tokens.row_start, at, side="right") - 1
        position = at - tokens.row_start[prompt]
        n_in_prompt = [
            np.searchsorted(self.places(tokens, int(number)), limit)
            for number, limit in zip(prompt, position, strict=True)
        ]
        starts: Places = n_before_prompt[prompt] + np.array(n_in_prompt, np.int64)
        return starts

    def check(self, tokens: PackedTokens) -> None:
        """Raise PromptError if nothing is selected in any of these prompts."""
        if not self.counts(tokens).any():
            raise PromptError(
                f"{self} (--positions) selects no token: the longest prompt has {int(tokens.row_size.max())} "
                "tokens; choose positions that some prompt has"
            )


class _ByLength(Selection):
    """Selection whose positions follow from the length of a prompt alone, such as lists and slices."""

    @abstractmethod
    def of_length(self, size: int) -> Places:
        """Selected positions in a prompt of `size` tokens, ascending, int64."""

    def counts(self, tokens: PackedTokens) -> Places:
        """Number of selected tokens per prompt, int64 [prompt]."""
        sizes, length_index = np.unique(tokens.row_size, return_inverse=True)
        counts: Places = np.array([len(self.of_length(int(size))) for size in sizes], np.int64)[length_index]
        return counts

    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """Selected positions in the prompt of this number, ascending, int64."""
        return self.of_length(int(tokens.row_size[prompt]))

    def indices(self, tokens: PackedTokens) -> Places:
        """Selected tokens as indices on the token axis, int64."""
        # Grouped by prompt length, so that numpy handles all prompts of one length at once.
        sizes, length_index, counts = np.unique(tokens.row_size, return_inverse=True, return_counts=True)
        starts_by_length = tokens.row_start[np.argsort(length_index, kind="stable")]
        start_groups = np.split(starts_by_length, np.cumsum(counts)[:-1])
        index_groups = [
            (starts[:, None] + self.of_length(int(size))).ravel()
            for size, starts in zip(sizes, start_groups, strict=True)
        ]
        return np.sort(np.concatenate(index_groups))


@dataclass(frozen=True)
class Listed(_ByLength):
    """Selection of listed positions of each prompt, such as the first and the last."""

    positions: tuple[int, ...]
    """Positions in ascending order; negative ones count from the end of the prompt."""

    def __str__(self) -> str:
        return "'last'" if self.positions == (-1,) else f"positions {list(self.positions)}"

    @property
    def name(self) -> str:
        """Name within variables: "last", "at_0_m1" for positions 0 and -1, or a digest of a long list."""
        if self.positions == (-1,):
            return "last"
        if len(self.positions) > _MOST_NAMED:
            return f"at_{_short_digest(','.join(map(str, self.positions)).encode())}"
        return "_".join(["at", *(_word(position) for position in self.positions)])

    def canonical(self) -> dict[str, Any]:
        """{"positions": [...]}, as stored in the attributes of an array."""
        return {"positions": list(self.positions)}

    def of_length(self, size: int) -> Places:
        """Selected positions in a prompt of `size` tokens, int64."""
        return _positions_within(self.positions, size)


@dataclass(frozen=True)
class Sliced(_ByLength):
    """Selection of a slice of positions of each prompt, with a positive step."""

    start: int | None
    """First position; a negative one counts from the end, None is the first token."""
    stop: int | None
    """End (exclusive); a negative one counts from the end, None is the end of the prompt."""
    step: int | None
    """Distance between positions, at least 2; None for 1."""

    def __str__(self) -> str:
        return f"positions {self._text!r}"

    @property
    def _text(self) -> str:
        return ":".join("" if bound is None else str(bound) for bound in (self.start, self.stop, self.step))

    @property
    def name(self) -> str:
        """Name within variables: the bounds as words, such as "from_1_every_16"."""
        if self.start is None and self.stop is None:
            return f"every_{self.step}"
        parts = [
            f"{word}_{_word(bound)}"
            for word, bound in (("from", self.start), ("to", self.stop), ("every", self.step))
            if bound is not None
        ]
        return "_".join(parts)

    def canonical(self) -> dict[str, Any]:
        """{"slice": [start, stop, step]}, as stored in the attributes of an array."""
        return {"slice": [self.start, self.stop, self.step]}

    def of_length(self, size: int) -> Places:
        """Selected positions in a prompt of `size` tokens, int64."""
        return np.arange(size, dtype=np.int64)[slice(self.start, self.stop, self.step)]


@dataclass(frozen=True)
class Masked(Selection):
    """Selection of tokens by a mask with one bool per token of a run, all prompts end to end."""

    bits: bytes
    """The mask as `numpy.packbits` returns it, in bytes because they can be hashed."""
    length: int
    """Number of tokens that the mask covers."""

    def __str__(self) -> str:
        return f"a mask of {self.length} tokens"

    @property
    def name(self) -> str:
        """Name within variables: `mask_` followed by 16 hex digits of the mask's digest."""
        return f"mask_{_short_digest(self.digest.encode())}"

    @property
    def digest(self) -> str:
        """`sha256:…` of the length and the bits."""
        return _mask_digest(self.bits, self.length)

    def canonical(self) -> dict[str, Any]:
        """{"mask": digest, "length": tokens}; the tokens themselves are stored with the axis."""
        return {"mask": self.digest, "length": self.length}

    def counts(self, tokens: PackedTokens) -> Places:
        """Number of selected tokens per prompt, int64 [prompt]."""
        starts = tokens.row_start
        return np.add.reduceat(self._mask, starts, dtype=np.int64)

    def places(self, tokens: PackedTokens, prompt: int) -> Places:
        """Selected positions in the prompt of this number, ascending, int64."""
        return np.flatnonzero(self._mask[tokens.row(prompt)]).astype(np.int64)

    def indices(self, tokens: PackedTokens) -> Places:
        """Selected tokens as indices on the token axis, int64."""
        return np.flatnonzero(self._mask).astype(np.int64)

    def check(self, tokens: PackedTokens) -> None:
        """Raise PromptError for a mask of other prompts, or one that selects nothing."""
        if self.length != tokens.n_tokens:
            raise PromptError(
                f"expected positions as a mask of one bool per token ({tokens.n_tokens} tokens of "
                f"{tokens.n_prompts} prompts, end to end), found {self.length} bools; make the mask from the "
                "token ids of these prompts"
            )
        super().check(tokens)

    @property
    def _mask(self) -> npt.NDArray[np.bool_]:
        return _unpacked(self.bits, self.length)


View = tuple[str, Selection]
"""Name of a stored variable with all tokens, and the selection of its tokens to show."""


def as_selection(positions: Any) -> Selection:
    """Parse which tokens of each prompt to select.

    Arguments:
        positions: "last"; a slice, also as a text such as "::16"; positions as numbers or as a text "0,5,-1",
            negative ones from the end; or one bool per token, all prompts end to end.

    Raises:
        PromptError: Anything else.
    """
    if isinstance(positions, Selection):
        return positions
    if isinstance(positions, str):
        return _selection_from_text(positions)
    if isinstance(positions, slice):
        return _selection_of_slice(positions.start, positions.stop, positions.step)
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
    """Selection of the tokens for which a mask, bool [token], is True."""
    return Masked(np.packbits(mask).tobytes(), len(mask))


def from_canonical(
    fields: Mapping[str, Any], stored_indices: Sequence[int] | Places | None = None
) -> Selection:
    """Parse a selection from the attributes of a stored array.

    Arguments:
        fields: What `Selection.canonical` returned.
        stored_indices: For a mask, the stored indices of the selected tokens on the token axis.

    Raises:
        ValueError: The tokens are not those of the mask.
    """
    if "positions" in fields:
        return Listed(tuple(fields["positions"]))
    if "slice" in fields:
        return Sliced(*fields["slice"])
    mask = np.zeros(fields["length"], bool)
    mask[np.asarray([] if stored_indices is None else stored_indices, np.int64)] = True
    parsed = masked(mask)
    if parsed.digest != fields["mask"]:
        raise ValueError(f"expected tokens of a mask with digest {fields['mask']}, found {parsed.digest}")
    return parsed


def _selection_from_text(text: str) -> Selection:
    """Parse "last", a slice such as "::16", or positions such as "0,5,-1"."""
    if text.strip() == "last":
        return Listed((-1,))
    if (match := _SLICE.fullmatch(text)) is not None:
        return _selection_of_slice(
            *(int(bound) if bound and bound != "-" else None for bound in match.groups())
        )
    parts = text.split(",")
    if all(re.fullmatch(r"\s*-?\d{1,18}\s*", part) for part in parts):
        return as_selection([int(part) for part in parts])
    raise PromptError(
        f"expected positions as 'last', a slice such as '::16', or numbers such as '0,5,-1', found {text!r}"
    )


def _selection_of_slice(start: int | None, stop: int | None, step: int | None) -> Selection:
    """Validate the bounds of a slice and bring them into one canonical form."""
    bounds = (start, stop, step)
    start, stop, step = (
        None if bound is None else as_index(bound, "positions", PromptError) for bound in bounds
    )
    if step is not None and step < 1:
        raise PromptError(f"expected positions as a slice with a step of at least 1, found step {step}")
    # Equal selections get one canonical form, however they are written, so that they share one array.
    start, step = start or None, None if step == 1 else step
    if (start, stop, step) == (None, None, None):
        raise PromptError("the given positions select all tokens, which is the default; leave positions out")
    return Listed((-1,)) if (start, stop, step) == (-1, None, None) else Sliced(start, stop, step)


@lru_cache(maxsize=4096)
def _positions_within(positions: tuple[int, ...], size: int) -> Places:
    """The positions that a prompt of `size` tokens has, counted from its start, ascending."""
    selected = {
        # A set: 0 and -n may name the same token of a short prompt, which is stored once.
        position + size if position < 0 else position
        for position in positions
        if -size <= position < size
    }
    ascending = np.array(sorted(selected), np.int64)
    ascending.flags.writeable = False
    return ascending


@lru_cache(maxsize=8)
def _n_before_prompts(selection: Selection, tokens: PackedTokens) -> Places:
    """Number of selected tokens before each prompt, and in total, int64 [prompt + 1]."""
    return np.concatenate([[0], np.cumsum(selection.counts(tokens))])


@lru_cache(maxsize=2)
def _unpacked(bits: bytes, length: int) -> npt.NDArray[np.bool_]:
    """The mask, bool [length], that `numpy.packbits` packed into bytes; read-only, as callers share it."""
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=length).astype(bool)
    mask.flags.writeable = False
    return mask


@lru_cache(maxsize=8)
def _mask_digest(bits: bytes, length: int) -> str:
    return content_digest(length.to_bytes(8, "little"), bits)


def _word(position: int) -> str:
    """Position as text in a name: "m1" for -1."""
    return f"m{-position}" if position < 0 else str(position)


def _short_digest(data: bytes) -> str:
    """First 16 hex digits of a digest."""
    return content_digest(data).partition(":")[2][:16]
