"""Drafts: text pairs with answers, and their conversion to token pairs.

A draft is usable if clean and corrupted prompt have equally many tokens and each answer is one token after
the clean prompt: activations are compared position by position, and a logit belongs to one token.

Border: texts and a tokenizer; no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ....store.errors import ConfigError
from ...causal.grids.patching_metrics import LogitDifference
from ..pairs import Pair

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["Draft", "drawn", "next_token", "pair_of", "single", "usable"]

TRIED = 20
"""Number of drafts that are tried per requested pair before a task fails."""


@dataclass(frozen=True)
class Draft:
    """The texts of a prompt pair, with a correct and a wrong answer."""

    clean: str
    """Text of the clean prompt."""
    corrupted: str
    """Text of the corrupted prompt."""
    right: str
    """Correct continuation of the clean prompt, with its leading space."""
    wrong: str
    """Wrong continuation, which the corrupted prompt suggests."""


def next_token(tokenizer: Tokenizer, prompt: str, word: str) -> int | None:
    """Id of the token that a word is after a prompt; None if it is several, or changes tokens before it.

    Arguments:
        tokenizer: The model's tokenizer.
        prompt: Text before the word.
        word: The word, with its leading space.
    """
    prompt_ids, ids = (tokenizer.encode(text).ids for text in (prompt, prompt + word))
    # BPE may merge a word with the end of the prompt, which changes earlier tokens.
    return ids[-1] if len(ids) == len(prompt_ids) + 1 and ids[:-1] == prompt_ids else None


def pair_of(tokenizer: Tokenizer, draft: Draft) -> Pair | None:
    """Token pair of a draft, whose metric is the logit difference of the answers; None if it is not usable.

    Arguments:
        tokenizer: The model's tokenizer.
        draft: Texts and answers.
    """
    clean, corrupted = (tuple(tokenizer.encode(text).ids) for text in (draft.clean, draft.corrupted))
    right, wrong = (next_token(tokenizer, draft.clean, word) for word in (draft.right, draft.wrong))
    if len(clean) != len(corrupted) or clean == corrupted or right is None or wrong is None:
        return None
    return None if right == wrong else Pair(clean, corrupted, LogitDifference(right, wrong))


def drawn(task: str, tokenizer: Tokenizer, drafts: Iterable[Draft], count: int) -> list[Pair]:
    """The first distinct, usable pairs of a stream of drafts.

    Arguments:
        task: Name of the task, for the message.
        tokenizer: The model's tokenizer.
        drafts: Stream of drafts, possibly endless.
        count: Number of pairs.

    Raises:
        ConfigError: `TRIED` drafts per pair give too few pairs with this tokenizer.
    """
    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], Pair] = {}
    tried = 0
    for draft in islice(drafts, TRIED * count):
        tried += 1
        pair = pair_of(tokenizer, draft)
        if pair is not None:
            # Distinct prompts only: repeated ones would count twice in every mean.
            pairs.setdefault((pair.clean, pair.corrupted), pair)
        if len(pairs) == count:
            return list(pairs.values())
    raise ConfigError(
        f"{task}: expected {count} prompt pairs of equal length with answers of one token, found "
        f"{len(pairs)} among {tried} that were tried with this tokenizer; request fewer pairs, or choose "
        "another task"
    )


def usable(
    task: str, description: str, tokenizer: Tokenizer, words: Sequence[str], minimum: int, lead: str = " "
) -> list[str]:
    """Those of some words that are a single token after `lead`.

    Arguments:
        task: Name of the task, for the message.
        description: What the words are, for the message.
        tokenizer: The model's tokenizer.
        words: The words, without `lead`.
        minimum: Smallest number of words that the task needs.
        lead: Text before each word.

    Raises:
        ConfigError: Fewer than `minimum` words are a single token.
    """
    single_words = [word for word in words if single(tokenizer, lead + word)]
    if len(single_words) < minimum:
        raise ConfigError(
            f"{task}: expected at least {minimum} {description} of one token, found {len(single_words)} of "
            f"{len(words)} with this tokenizer{': ' + ', '.join(single_words) if single_words else ''}; "
            "choose another task"
        )
    return single_words


def single(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token other than the unknown token.

    Arguments:
        tokenizer: The model's tokenizer.
        text: The text, with a leading space for a word within a sentence.
    """
    # Raw: without the special tokens that `encode` adds to a text.
    ids = tokenizer.encode_raw(text).ids
    return len(ids) == 1 and ids[0] != tokenizer.special_id("unk_token")
