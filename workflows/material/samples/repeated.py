"""Random tokens that are repeated, and the same with every repetition shuffled.

Nothing but the repetition can tell what comes next.

Border: token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ....store.errors import PromptError

if TYPE_CHECKING:
    from ...subject import Subject

__all__ = ["RepeatedBlocks", "repeated_tokens", "shuffled"]

COMMON = (100, 20_000)
"""Ids random tokens are drawn from, as in TransformerLens' `induction_loss`: below, vocabularies keep bytes
and special tokens, above, rare words."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """Rows of a random block of common tokens, all different, that stands in them several times."""

    rows: list[list[int]]
    """Token ids of each row, behind the special tokens that the tokenizer puts before every prompt."""
    mixed: list[list[int]]
    """The same with every repetition shuffled."""
    prefix: int
    """Number of special tokens before the first block."""
    start: int
    """Position of the first token that is repeated."""

    @classmethod
    def of(cls, subject: Subject, sequences: int, length: int, *, repeats: int = 2, seed: int) -> Self:
        """Rows for one model: so many, of blocks of so many tokens. Raises PromptError for a block that is
        longer than the vocabulary."""
        encoded = subject.tokenizer.encode("a")
        prefix = [one for one, is_special in zip(encoded.ids, encoded.special, strict=True) if is_special]
        candidates = _ordinary_tokens(subject, length)
        rows = repeated_tokens(
            candidates, prefix, sequences=sequences, length=length, repeats=repeats, seed=seed
        )
        start = len(prefix) + length
        mixed = [shuffled(row, start, length, seed + i) for i, row in enumerate(rows)]
        return cls(rows, mixed, len(prefix), start)


def repeated_tokens(
    candidates: npt.NDArray[Any], prefix: list[int], *, sequences: int, length: int, repeats: int, seed: int
) -> list[list[int]]:
    """Rows of `prefix` and a random block of different tokens, `repeats` times.

    Raises PromptError when there are fewer candidates than a block has tokens.

    >>> row = repeated_tokens(np.arange(5, 9), [0], sequences=1, length=3, repeats=2, seed=0)[0]
    >>> row[0], len(row), row[1:4] == row[4:]
    (0, 7, True)
    """
    if len(candidates) < length:
        raise PromptError(
            f"expected a block of at most {len(candidates)} different tokens, found length {length}; make "
            "the block shorter"
        )
    rng = np.random.default_rng(seed)
    blocks = [rng.permutation(candidates)[:length].tolist() for _ in range(sequences)]
    return [[*prefix, *(block * repeats)] for block in blocks]


def _ordinary_tokens(subject: Subject, least: int) -> npt.NDArray[Any]:
    """Ids of common tokens without special ones; all ordinary tokens where fewer than `least` are common."""
    tokenizer = subject.tokenizer
    known = min(subject.config.vocab_size, tokenizer.vocab_size)
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = [one for one in map(tokenizer.special_id, roles) if one is not None]
    ids = np.setdiff1d(np.arange(known), special)
    common = ids[(ids >= COMMON[0]) & (ids < COMMON[1])]
    return common if len(common) >= least else ids


def shuffled(row: list[int], fixed: int, block: int, seed: int) -> list[int]:
    """A row with the tokens of every block behind its first `fixed` ones permuted among themselves."""
    rng = np.random.default_rng(seed)
    rest = [rng.permutation(row[start : start + block]).tolist() for start in range(fixed, len(row), block)]
    return row[:fixed] + [token for part in rest for token in part]
