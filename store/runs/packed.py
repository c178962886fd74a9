"""Prompts laid end to end on one token axis: what a run is computed over.

Border: token ids only. How text became ids, and what a model makes of them, is decided elsewhere; texts and
character offsets travel along as labels and never enter the digest.

A corpus is one array of ids and the number of tokens of each prompt (CF "contiguous ragged array"): no
padding, no array per prompt. Which prompt a token belongs to, and its position in it, follow from the row
starts; for a billion tokens these two columns would be 8 GB, so they are only ever computed for the slice
that is asked for.

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

MATRICES = ("pair", "square")
"""Packed axes of attention matrices: their lower triangles, or all of them."""
_BLOCK = 1 << 22  # tokens per step when a long id array is streamed: 16 MiB
_LET_GO = (
    1 << 30
)  # bytes of mapped ids from which they are not kept in memory behind the one who streams them
_PAGEOUT = 21  # MADV_PAGEOUT of Linux, which Python's mmap does not name
_MAX_ID = np.iinfo(np.int32).max

Ids = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Token ids of many prompts, end to end.

    ids: int32 [token], every id >= 0.
    row_size: int64 [prompt], tokens per prompt, each >= 1, summing to len(ids).
    texts: the prompts as text, one each, or None.
    char_start, char_end: int32 [token], half-open character span of each token in its text, or None.
    Two PackedTokens are equal when their ids and row sizes are; labels do not count.
    Raises PromptError for an empty prompt, for no prompt at all, and for columns that do not fit together.
    """

    ids: Ids
    row_size: Sizes
    texts: Sequence[str] | None = None
    char_start: Ids | None = None
    char_end: Ids | None = None

    def __post_init__(self) -> None:
        sizes = _column("row_size", self.row_size, np.int64)
        ids = _column("ids", self.ids, np.int32)
        if len(sizes) == 0:
            raise PromptError("expected at least one prompt, found none; pass a non-empty list of prompts")
        if len(empty := np.flatnonzero(sizes <= 0)):
            raise PromptError(
                f"prompt {int(empty[0])} is empty ({int(sizes[empty[0]])}), expected at least one token; "
                "drop it, or start every prompt with the beginning-of-sequence token"
            )
        if int(sizes.sum()) != len(ids):
            raise PromptError(
                f"expected row sizes that sum to {len(ids)} token ids, found {int(sizes.sum())}"
            )
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "row_size", sizes)
        if self.texts is not None and len(self.texts) != len(sizes):
            raise PromptError(f"expected one text per prompt ({len(sizes)}), found {len(self.texts)}")
        if (self.char_start is None) != (self.char_end is None):
            raise PromptError("char_start and char_end come together: pass both or neither")
        for name in ("char_start", "char_end"):
            if (column := getattr(self, name)) is not None:
                column = _column(name, column, np.int32)
                if len(column) != len(ids):
                    raise PromptError(f"expected one {name} per token ({len(ids)}), found {len(column)}")
                object.__setattr__(self, name, column)

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int] | npt.NDArray[Any]],
        texts: Sequence[str] | None = None,
        offsets: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> PackedTokens:
        """Pack one list of ids per prompt.

        texts: one per prompt.  offsets: per prompt, per token the character span (start, end) in its text.

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
                raise PromptError("expected one character span per token of every prompt; the counts differ")
            flat = np.array([span for spans in offsets for span in spans], np.int32).reshape(-1, 2)
            start, end = np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])
        return cls(ids, sizes, None if texts is None else list(texts), start, end)

    @property
    def n_tokens(self) -> int:
        """Length of the token axis."""
        return len(self.ids)

    @property
    def n_prompts(self) -> int:
        """Length of the prompt axis."""
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
        """First token of each prompt on the packed axis, int64 [prompt]."""
        starts = np.zeros(self.n_prompts, np.int64)
        np.cumsum(self.row_size[:-1], out=starts[1:])
        return starts

    @property
    def digest(self) -> str:
        """`sha256:…` of the ids (int32 LE) followed by the row sizes (int64 LE): what a run is keyed by.

        Raises PromptError for an id below 0.
        """
        return _digest_of(*self._looked_over)

    @property
    def largest(self) -> int:
        """The largest id, those below 0 being taken without their sign: larger than any vocabulary."""
        return self._looked_over[1]

    @cached_property
    def _looked_over(self) -> tuple[str, int]:
        """Digest and largest id, of one pass over a corpus."""
        return _looked_over(self.ids, self.row_size)

    def holds(self, token: int) -> bool:
        """Whether any prompt has this token."""
        return any(bool((block == token).any()) for block in _blocks(self.ids))

    def row(self, i: int) -> slice:
        """Where prompt `i` lies on the token axis; negative `i` counts from the end."""
        if not -self.n_prompts <= i < self.n_prompts:
            raise PromptError(f"expected a prompt index below {self.n_prompts}, found {i}")
        start = int(self.row_start[i])
        return slice(start, start + int(self.row_size[i]))

    def prompt(self, i: int) -> Ids:
        """Ids of prompt `i`, int32 [token], a view."""
        return self.ids[self.row(i)]

    def prompt_digest(self, i: int) -> str:
        """Digest of prompt `i` alone: that of a PackedTokens which holds only it."""
        return _digest_of(*_looked_over(self.prompt(i), np.array([self.row_size[i]], np.int64)))

    def prompt_of(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Ids:
        """Prompt index of each given token, int32; `tokens` are packed indices or a slice."""
        at = self._indices(tokens)
        return (np.searchsorted(self.row_start, at, side="right") - 1).astype(np.int32)

    def position_of(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Ids:
        """Position of each given token in its prompt, int32; `tokens` are packed indices or a slice."""
        at = self._indices(tokens)
        return (at - self.row_start[self.prompt_of(at)]).astype(np.int32)

    def select(self, prompts: Sequence[int] | npt.NDArray[np.integer[Any]]) -> PackedTokens:
        """The given prompts, in the given order, packed anew with their labels."""
        at = self.tokens_of(prompts)
        return PackedTokens(
            self.ids[at],
            self.row_size[np.asarray(prompts, np.int64)],
            None if self.texts is None else [self.texts[int(i)] for i in prompts],
            None if self.char_start is None else self.char_start[at],
            None if self.char_end is None else self.char_end[at],
        )

    def tokens_of(self, prompts: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Sizes:
        """Packed indices of all tokens of the given prompts, prompt by prompt, int64."""
        rows = [self.row(int(i)) for i in prompts]
        return np.concatenate([np.empty(0, np.int64), *(np.arange(row.start, row.stop) for row in rows)])

    def starts_on(self, axis: str, tokens: Sizes) -> Sizes:
        """Where tokens start on a packed axis: what of it belongs to the tokens before each, int64 [token].

        axis: "token"; "pair", where a token owns one for each token its prompt has up to it; "square", where
        it owns one for each token of its prompt; "prompt_id", where the last token of a prompt owns it.
        tokens: packed indices, the end of the axis included.
        """
        if axis == "token":
            return tokens
        if axis == "prompt_id":
            return np.searchsorted(self.row_start + self.row_size, tokens, side="right").astype(np.int64)
        sizes = self.row_size
        prompt = np.searchsorted(self.row_start, tokens, side="right") - 1
        whole = np.concatenate([[0], np.cumsum(rows_before(axis, sizes, sizes))])
        starts: Sizes = whole[prompt] + rows_before(axis, tokens - self.row_start[prompt], sizes[prompt])
        return starts

    def shared_start(self, other: PackedTokens) -> int:
        """Tokens of the prompts, from the first on, that both have."""
        count = min(self.n_prompts, other.n_prompts)
        alike = self.row_size[:count] == other.row_size[:count]
        count = int(np.argmin(alike)) if not alike.all() else count
        end = int(self.row_start[count - 1] + self.row_size[count - 1]) if count else 0
        for start in range(0, end, _BLOCK):
            same = self.ids[start : min(start + _BLOCK, end)] == other.ids[start : min(start + _BLOCK, end)]
            if not same.all():
                prompt = int(self.prompt_of(start + int(np.argmin(same))))
                return int(self.row_start[prompt])
        return end

    def rows_per_token(self, axis: str) -> float:
        """How many rows of a packed axis a token owns in the mean."""
        return float(self.starts_on(axis, np.array([self.n_tokens]))[0]) / self.n_tokens

    def _indices(self, tokens: slice | range | npt.NDArray[np.integer[Any]] | int) -> Sizes:
        if isinstance(tokens, slice):
            tokens = range(*tokens.indices(self.n_tokens))
        if isinstance(tokens, range):
            return np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64)
        return np.asarray(tokens, np.int64)


def rows_before(axis: str, position: Sizes, size: Sizes) -> Sizes:
    """Rows of a prompt's attention matrix that belong to its tokens before a position: on "pair" its lower
    triangle, on "square" all of it. size: tokens of the prompt."""
    return position * size if axis == "square" else position * (position + 1) // 2


def _column(name: str, values: npt.ArrayLike, dtype: type[np.int32] | type[np.int64]) -> npt.NDArray[Any]:
    """`values` as a read-only 1-d view of `dtype`; a memory map stays one."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PromptError(f"expected {name} as a row of integers, found {array.dtype} of shape {array.shape}")
    if array.dtype != dtype:
        if array.size and (array.max() > np.iinfo(dtype).max or array.min() < np.iinfo(dtype).min):
            raise PromptError(f"{name} holds values that do not fit {np.dtype(dtype)}")
        array = array.astype(dtype)
    view = array.view()
    view.flags.writeable = False
    return view


def _prompt_ids(i: int, ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PromptError(f"prompt {i}: expected a row of ids, found {array.dtype} of shape {array.shape}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= _MAX_ID:
        found = f"{array.min()} to {array.max()}"
        raise PromptError(f"prompt {i}: expected token ids from 0 to {_MAX_ID}, found {found}")
    return array.astype(np.int32)


def _digest_of(digest: str, largest: int) -> str:
    if largest > _MAX_ID:
        below = largest - (1 << 32)
        raise PromptError(f"expected token ids >= 0, found {below}; check the tokenizer's output")
    return digest


def _looked_over(ids: Ids, sizes: Sizes) -> tuple[str, int]:
    """Digest, and the largest id without its sign."""
    state, largest = hashlib.sha256(), 0
    for block in _blocks(ids):
        plain = np.ascontiguousarray(block, "<i4")
        largest = max(largest, int(plain.view("<u4").max()))
        state.update(plain.data)
    state.update(np.ascontiguousarray(sizes, "<i8").data)
    return f"sha256:{state.hexdigest()}", largest


def _blocks(ids: Ids) -> Iterator[Ids]:
    """Ids from the first to the last, a block at a time.

    Of a large file that is mapped, blocks behind are handed back to the system at once: streamed, it would
    push out of memory what others read (and where a virtual machine gets its memory as it touches it, that
    took three quarters of the plan of a billion tokens). What other processes have mapped stays.
    """
    mapped = _map_under(ids) if ids.nbytes >= _LET_GO else None
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        yield block
        if mapped is not None:
            _let_go(mapped, block)


def _map_under(ids: Ids) -> mmap.mmap | None:
    """The map of a file that an array is a view of."""
    under: Any = ids
    while isinstance(under, np.ndarray):
        under = under.base
    return under if isinstance(under, mmap.mmap) and ids.flags.c_contiguous else None


def _let_go(mapped: mmap.mmap, block: Ids) -> None:
    """Tell the system that a block of a map will not be read again soon."""
    first = np.frombuffer(mapped, np.uint8, 1).ctypes.data
    start = (block.ctypes.data - first) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, AttributeError):  # older systems, other systems: memory stays as it is
        mapped.madvise(_PAGEOUT, start, block.nbytes)
