"""Sequences of repeated random tokens, and controls with shuffled repetitions.

The next token can be predicted from the repetition alone.

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
"""Range of ids that random tokens are drawn from, as in TransformerLens' `induction_loss`: lower ids are
often bytes and special tokens, higher ones rare words."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """Token sequences that repeat a random block of distinct common tokens, and the same with shuffled
    repetitions."""

    rows: list[list[int]]
    """Token ids of each row, starting with the special tokens that the tokenizer puts before every prompt."""
    mixed: list[list[int]]
    """The rows with every repetition shuffled."""
    prefix: int
    """Number of special tokens before the first block."""
    start: int
    """Position at which the first repetition begins."""

    @classmethod
    def of(cls, subject: Subject, sequences: int, length: int, *, repeats: int = 2, seed: int) -> Self:
        """Sequences of random tokens for a model.

        Arguments:
            subject: the model, for its tokenizer.
            sequences: number of rows.
            length: tokens per block.
            repeats: number of times that a block occurs in a row.
            seed: of the draw.

        Raises:
            PromptError: a block is longer than the number of ordinary tokens.
        """
        # Any text shows the special tokens, as they do not depend on it.
        encoded = subject.tokenizer.encode("a")
        prefix = [token for token, is_special in zip(encoded.ids, encoded.special, strict=True) if is_special]
        candidates = _ordinary_tokens(subject, length)
        rows = repeated_tokens(
            candidates, prefix, sequences=sequences, length=length, repeats=repeats, seed=seed
        )
        start = len(prefix) + length
        # The same tokens at other places: the rows differ from these in the order of the repetition only.
        mixed = [shuffled(row, start, length, seed + i) for i, row in enumerate(rows)]
        return cls(rows, mixed, len(prefix), start)


def repeated_tokens(
    candidates: npt.NDArray[Any], prefix: list[int], *, sequences: int, length: int, repeats: int, seed: int
) -> list[list[int]]:
    """Token sequences of a prefix and a random block of distinct tokens that occurs `repeats` times.

    Arguments:
        candidates: token ids to draw from.
        prefix: token ids at the start of each row.
        sequences: number of rows.
        length: tokens per block.
        repeats: number of times that a block occurs in a row.
        seed: of the draw.

    Raises:
        PromptError: there are fewer candidates than a block has tokens.

    >>> row = repeated_tokens(np.arange(5, 9), [0], sequences=1, length=3, repeats=2, seed=0)[0]
    >>> row[0], len(row), row[1:4] == row[4:]
    (0, 7, True)
    """
    if len(candidates) < length:
        raise PromptError(
            f"expected length of at most {len(candidates)}, the number of different tokens to draw a block "
            f"from, found {length}; set a smaller length"
        )
    rng = np.random.default_rng(seed)
    blocks = [rng.permutation(candidates)[:length].tolist() for _ in range(sequences)]
    return [[*prefix, *(block * repeats)] for block in blocks]


def _ordinary_tokens(subject: Subject, least: int) -> npt.NDArray[Any]:
    """Ids of common tokens without special ones; all ordinary tokens if fewer than `least` are common."""
    tokenizer = subject.tokenizer
    n_tokens = min(subject.config.vocab_size, tokenizer.vocab_size)
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = [token for token in map(tokenizer.special_id, roles) if token is not None]
    ids = np.setdiff1d(np.arange(n_tokens), special)
    # Tokenizers number tokens by frequency: rare ids, which models hardly saw in training, are left out.
    common = ids[(ids >= COMMON[0]) & (ids < COMMON[1])]
    return common if len(common) >= least else ids


def shuffled(row: list[int], fixed: int, block: int, seed: int) -> list[int]:
    """The token sequence with the tokens of each block in random order.

    Arguments:
        row: token ids.
        fixed: number of tokens at the start that keep their places.
        block: tokens per block.
        seed: of the permutations.
    """
    rng = np.random.default_rng(seed)
    blocks = [rng.permutation(row[start : start + block]).tolist() for start in range(fixed, len(row), block)]
    return row[:fixed] + [token for permuted in blocks for token in permuted]
