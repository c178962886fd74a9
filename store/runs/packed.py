"""`PackedTokens`: the token ids of many prompts, end to end on one token axis. Input of every run.

The layout is CF's "contiguous ragged array": one array of ids, and the number of tokens of each prompt. There
is no padding and no array per prompt. The prompt and position of a token follow from the row starts; they are
computed only for requested slices, because for a billion tokens these two columns would take 8 GB.

Texts and character offsets are labels; they are not part of the digest.

Axes: token (packed, all prompts), prompt (rows of the ragged array).
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PromptError
from ..files.mapped import mmap_of

MATRICES = ("pair", "square")
"""Packed axes of attention matrices: "pair" is the lower triangle, "square" the whole matrix."""
_BLOCK_TOKENS = 1 << 22  # tokens per step when a long id array is streamed: 16 MiB
# Mapped id files of at least this many bytes are dropped from memory after each block.
_PAGE_OUT_BYTES = 1 << 30
_PAGEOUT = 21  # Linux's MADV_PAGEOUT, which Python's mmap module does not define
_MAX_ID = np.iinfo(np.int32).max

Ids = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Token ids of many prompts, one after another on one axis, without padding.

    Two instances are equal if their ids and row sizes are; labels do not count.

    Raises:
        PromptError: A prompt is empty, there is no prompt, or columns have inconsistent lengths.
    """

    ids: Ids
    """Token ids of all prompts, int32 [token], every id >= 0."""
    row_size: Sizes
    """Tokens per prompt, int64 [prompt], each >= 1; their sum is len(ids)."""
    texts: Sequence[str] | None = None
    """The prompts as text [prompt]; None if unknown."""
    char_start: Ids | None = None
    """First character of each token in its prompt's text, int32 [token]; None if unknown."""
    char_end: Ids | None = None
    """End (exclusive) of each token's characters in its prompt's text, int32 [token]; None if unknown."""

    def __post_init__(self) -> None:
        sizes = _column("row_size", self.row_size, np.int64)
        ids = _column("ids", self.ids, np.int32)
        if len(sizes) == 0:
            raise PromptError("expected at least one prompt, found none; pass a non-empty list of prompts")
        # An empty prompt would have no last token, which states and "last" selections need.
        if len(empty := np.flatnonzero(sizes <= 0)):
            raise PromptError(
                f"prompt {int(empty[0])} has {int(sizes[empty[0]])} tokens, expected at least one; leave it "
                "out, or start every prompt with the beginning-of-sequence token"
            )
        if int(sizes.sum()) != len(ids):
            raise PromptError(
                "expected row_size, the tokens of each prompt, to sum to the number of token ids "
                f"({len(ids)}), found {int(sizes.sum())}"
            )
        # The dataclass is frozen; the validated, read-only columns replace what was passed.
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "row_size", sizes)
        if self.texts is not None and len(self.texts) != len(sizes):
            raise PromptError(
                f"expected texts to have one text per prompt ({len(sizes)}), found {len(self.texts)} texts"
            )
        if (self.char_start is None) != (self.char_end is None):
            raise PromptError(
                "PackedTokens: only one of char_start and char_end was given; give both or neither"
            )
        for name in ("char_start", "char_end"):
            if (column := getattr(self, name)) is not None:
                column = _column(name, column, np.int32)
                if len(column) != len(ids):
                    raise PromptError(
                        f"expected {name} to have one value per token ({len(ids)}), found {len(column)} "
                        "values"
                    )
                object.__setattr__(self, name, column)

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int] | npt.NDArray[Any]],
        texts: Sequence[str] | None = None,
        offsets: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> PackedTokens:
        """Create a PackedTokens from one list of token ids per prompt.

        Arguments:
            prompts: Token ids of each prompt.
            texts: The prompts as text; None if unknown.
            offsets: Per prompt and token, the character span (start, end) in the text; None if unknown.

        >>> tokens = PackedTokens.from_lists([[5, 6, 7], [8]])
        >>> tokens.ids.tolist(), tokens.row_size.tolist(), tokens.row_start.tolist()
        ([5, 6, 7, 8], [3, 1], [0, 3])
        """
        columns = [_prompt_ids(i, ids) for i, ids in enumerate(prompts)]
        sizes = np.array([len(column) for column in columns], np.int64)
        ids = np.concatenate(columns) if columns else np.empty(0, np.int32)
        start = end = None
        if offsets is not None:
            if [len(spans) for spans in offsets] != sizes.tolist():
                raise PromptError(
                    "expected offsets to have one (start, end) per token of every prompt, found another "
                    "number of spans in some prompt"
                )
            flat = np.array([span for spans in offsets for span in spans], np.int32).reshape(-1, 2)
            start, end = np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])
        return cls(ids, sizes, None if texts is None else list(texts), start, end)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all prompts together."""
        return len(self.ids)

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.row_size)

    def __len__(self) -> int:
        return self.n_prompts

    def __iter__(self) -> Iterator[Ids]:
        return (self.prompt(i) for i in range(self.n_prompts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedTokens):
            return NotImplemented
        return np.array_equal(self.row_size, other.row_size) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"PackedTokens({self.n_prompts} prompts, {self.n_tokens} tokens)"

    @cached_property
    def row_start(self) -> Sizes:
        """Index of each prompt's first token on the token axis, int64 [prompt]."""
        return exclusive_sum(self.row_size)

    @property
    def digest(self) -> str:
        """`sha256:…` of the ids (int32) followed by the tokens per prompt (int64), both little-endian.

        Raises:
            PromptError: An id is negative.
        """
        return _checked_digest(*self._digest_and_largest)

    @property
    def largest(self) -> int:
        """Largest token id, read as unsigned: a negative id counts as larger than any vocabulary."""
        return self._digest_and_largest[1]

    @cached_property
    def _digest_and_largest(self) -> tuple[str, int]:
        """Digest and largest id, computed together because a pass over a large corpus is slow."""
        return _digest_and_largest(self.ids, self.row_size)

    def holds(self, token: int) -> bool:
        """Whether the token id `token` occurs in any prompt."""
        return any(bool((block == token).any()) for block in _blocks(self.ids))

    def row(self, i: int) -> slice:
        """Slice of the token axis with the tokens of prompt `i`; a negative `i` counts from the end."""
        if not -self.n_prompts <= i < self.n_prompts:
            raise PromptError(f"there is no prompt {i}; prompts are numbered 0 to {self.n_prompts - 1}")
        start = int(self.row_start[i])
        return slice(start, start + int(self.row_size[i]))

    def prompt(self, i: int) -> Ids:
        """Token ids of prompt `i`, int32 [position], as a view."""
        return self.ids[self.row(i)]

    def prompt_digest(self, i: int) -> str:
        """Digest of prompt `i` alone, equal to that of a PackedTokens with this single prompt."""
        return _checked_digest(*_digest_and_largest(self.prompt(i), np.array([self.row_size[i]], np.int64)))

    def prompt_of(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Ids:
        """Number of the prompt that each token belongs to, int32.

        Arguments:
            tokens: Indices on the token axis, or a slice of it.
        """
        indices = self._indices(tokens)
        # side="right": the token at a prompt's start belongs to it, not to the previous prompt.
        return (np.searchsorted(self.row_start, indices, side="right") - 1).astype(np.int32)

    def position_of(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Ids:
        """Position of each token in its prompt, int32.

        Arguments:
            tokens: Indices on the token axis, or a slice of it.
        """
        indices = self._indices(tokens)
        return (indices - self.row_start[self.prompt_of(indices)]).astype(np.int32)

    def select(self, prompts: Sequence[int] | npt.NDArray[np.integer[Any]]) -> PackedTokens:
        """Some of the prompts, by number, with texts and character offsets, in the order given."""
        indices = self.tokens_of(prompts)
        return PackedTokens(
            self.ids[indices],
            self.row_size[np.asarray(prompts, np.int64)],
            None if self.texts is None else [self.texts[int(i)] for i in prompts],
            None if self.char_start is None else self.char_start[indices],
            None if self.char_end is None else self.char_end[indices],
        )

    def tokens_of(self, prompts: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Sizes:
        """Indices on the token axis of all tokens of these prompts, prompt by prompt, int64."""
        rows = [self.row(int(i)) for i in prompts]
        return np.concatenate([np.empty(0, np.int64), *(np.arange(row.start, row.stop) for row in rows)])

    def starts_on(self, axis: str, tokens: Sizes) -> Sizes:
        """First row that belongs to each of some tokens on another axis: how many rows earlier tokens have.

        Arguments:
            axis: "token" (a row per token), "pair" or "square" (attention matrices, lower triangle or whole:
                a
                row per query and key), or "prompt_id" (a row per prompt, which belongs to its last token).
            tokens: Indices on the token axis; its end is allowed.

        Returns:
            int64, as long as `tokens`.
        """
        if axis == "token":
            return tokens
        if axis == "prompt_id":
            return np.searchsorted(self.row_start + self.row_size, tokens, side="right").astype(np.int64)
        sizes = self.row_size
        prompt = np.searchsorted(self.row_start, tokens, side="right") - 1
        # Rows of whole prompts before, plus rows of earlier tokens in the same prompt.
        rows_of_earlier_prompts = np.concatenate([[0], np.cumsum(rows_before(axis, sizes, sizes))])
        position = tokens - self.row_start[prompt]
        starts: Sizes = rows_of_earlier_prompts[prompt] + rows_before(axis, position, sizes[prompt])
        return starts

    def shared_start(self, other: PackedTokens) -> int:
        """Number of tokens in the prompts with which both begin: those before the first prompt that
        differs."""
        n_prompts = min(self.n_prompts, other.n_prompts)
        has_equal_size = self.row_size[:n_prompts] == other.row_size[:n_prompts]
        if not has_equal_size.all():
            n_prompts = int(np.argmin(has_equal_size))  # the first False
        end = int(self.row_size[:n_prompts].sum())
        for start in range(0, end, _BLOCK_TOKENS):
            block = slice(start, min(start + _BLOCK_TOKENS, end))
            is_same = self.ids[block] == other.ids[block]
            if not is_same.all():
                prompt = int(self.prompt_of(start + int(np.argmin(is_same))))
                return int(self.row_start[prompt])
        return end

    def rows_per_token(self, axis: str) -> float:
        """Mean number of rows per token on an axis of `starts_on`."""
        return float(self.starts_on(axis, np.array([self.n_tokens]))[0]) / self.n_tokens

    def _indices(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Sizes:
        """Convert a slice, range or indices of the token axis to an int64 array."""
        if isinstance(tokens, slice):
            tokens = range(*tokens.indices(self.n_tokens))
        if isinstance(tokens, range):
            return np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64)
        return np.asarray(tokens, np.int64)


def exclusive_sum(sizes: Sizes) -> Sizes:
    """Sum of all earlier sizes, int64: where each of several consecutive ranges of these sizes starts."""
    starts: Sizes = np.cumsum(sizes, dtype=np.int64) - sizes
    return starts


def rows_before(axis: str, position: Sizes, size: Sizes) -> Sizes:
    """Number of stored (query, key) pairs of a prompt's attention matrix with a query before a position.

    Arguments:
        axis: "pair" (lower triangle) or "square" (whole matrix).
        position: Position in the prompt.
        size: Tokens of the prompt.
    """
    return position * size if axis == "square" else position * (position + 1) // 2


def _column(name: str, values: npt.ArrayLike, dtype: type[np.int32] | type[np.int64]) -> npt.NDArray[Any]:
    """Convert integers to a read-only one-dimensional array of `dtype`; a memory map is not copied."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PromptError(
            f"expected {name} as a one-dimensional array of integers, found {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.dtype != dtype:
        if array.size and (array.max() > np.iinfo(dtype).max or array.min() < np.iinfo(dtype).min):
            raise PromptError(
                f"expected values of {name} that fit {np.dtype(dtype)}, found {array.min()} to {array.max()}"
            )
        array = array.astype(dtype)
    view = array.view()
    view.flags.writeable = False
    return view


def _prompt_ids(i: int, ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    """Convert the token ids of prompt `i` to int32 [position]."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PromptError(
            f"prompt {i}: expected a list of integer token ids, found {array.dtype} of shape {array.shape}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= _MAX_ID:
        range_text = f"{array.min()} to {array.max()}"
        raise PromptError(f"prompt {i}: expected token ids from 0 to {_MAX_ID}, found {range_text}")
    return array.astype(np.int32)


def _checked_digest(digest: str, largest: int) -> str:
    """The digest; PromptError if the largest id, read as unsigned, shows that some id is negative."""
    if largest > _MAX_ID:
        negative_id = largest - (1 << 32)
        raise PromptError(f"expected token ids >= 0, found {negative_id}; check the tokenizer's output")
    return digest


def _digest_and_largest(ids: Ids, sizes: Sizes) -> tuple[str, int]:
    """Digest of prompts, and their largest token id read as unsigned."""
    state, largest = hashlib.sha256(), 0
    for block in _blocks(ids):
        # Unsigned view: one maximum finds negative ids as well as ids beyond the vocabulary.
        plain = np.ascontiguousarray(block, "<i4")
        largest = max(largest, int(plain.view("<u4").max()))
        state.update(plain.data)
    state.update(np.ascontiguousarray(sizes, "<i8").data)
    return f"sha256:{state.hexdigest()}", largest


def _blocks(ids: Ids) -> Iterator[Ids]:
    """Yield the token ids in blocks of 4 million.

    After each block of a large memory-mapped file its pages are given back to the kernel (MADV_PAGEOUT):
    streaming would otherwise evict what other processes read. On a virtual machine that gets memory on first
    touch, the page faults took three quarters of the time of planning a run of a billion tokens.
    """
    # Pages of a view with gaps are left alone: its bytes are no single range of the map.
    is_large = ids.nbytes >= _PAGE_OUT_BYTES and ids.flags.c_contiguous
    mapped = mmap_of(ids) if is_large else None
    for start in range(0, len(ids), _BLOCK_TOKENS):
        block = ids[start : start + _BLOCK_TOKENS]
        yield block
        if mapped is not None:
            _page_out(mapped, block)


def _page_out(mapped: mmap.mmap, block: Ids) -> None:
    """Advise the kernel that a block of the map will not be read again soon."""
    base = np.frombuffer(mapped, np.uint8, 1).ctypes.data
    start = (block.ctypes.data - base) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, AttributeError):  # not supported by this system: the pages stay, which is harmless
        mapped.madvise(_PAGEOUT, start, block.nbytes)
