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
"""Drafts tried per requested pair before a task fails."""


@dataclass(frozen=True)
class Draft:
    """Texts of a pair and its two answers."""

    clean: str
    """Text of the clean prompt."""
    corrupted: str
    """Text of the corrupted prompt."""
    right: str
    """Correct continuation of the clean prompt, with its leading space."""
    wrong: str
    """Wrong continuation, which the corrupted prompt suggests."""


def next_token(tokenizer: Tokenizer, prompt: str, word: str) -> int | None:
    """Token id of a word after a prompt; None if it is several tokens, or changes the tokens before it.

    Arguments:
        tokenizer: the model's tokenizer.
        prompt: text before the word.
        word: the word, with its leading space.
    """
    prompt_ids, ids = (tokenizer.encode(text).ids for text in (prompt, prompt + word))
    # BPE may merge a word with the end of the prompt, which changes earlier tokens.
    return ids[-1] if len(ids) == len(prompt_ids) + 1 and ids[:-1] == prompt_ids else None


def pair_of(tokenizer: Tokenizer, draft: Draft) -> Pair | None:
    """The pair of a draft, with the logit difference of its answers; None if the draft is not usable.

    Arguments:
        tokenizer: the model's tokenizer.
        draft: texts and answers.
    """
    clean, corrupted = (tuple(tokenizer.encode(text).ids) for text in (draft.clean, draft.corrupted))
    right, wrong = (next_token(tokenizer, draft.clean, word) for word in (draft.right, draft.wrong))
    if len(clean) != len(corrupted) or clean == corrupted or right is None or wrong is None:
        return None
    return None if right == wrong else Pair(clean, corrupted, LogitDifference(right, wrong))


def drawn(task: str, tokenizer: Tokenizer, drafts: Iterable[Draft], count: int) -> list[Pair]:
    """The first distinct pairs of a stream of drafts.

    Arguments:
        task: name of the task, for the message.
        tokenizer: the model's tokenizer.
        drafts: stream of drafts, possibly endless.
        count: number of pairs.

    Raises:
        ConfigError: if `TRIED` drafts per pair give fewer with this tokenizer.
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
        f"{task}: expected {count} pairs of equal length with answers of one token, found {len(pairs)} among "
        f"{tried} tried with this tokenizer; ask for fewer, or another task"
    )


def usable(
    task: str, description: str, tokenizer: Tokenizer, words: Sequence[str], minimum: int, lead: str = " "
) -> list[str]:
    """Words that are a single token after `lead`.

    Arguments:
        task: name of the task, for the message.
        description: what the words are, for the message.
        tokenizer: the model's tokenizer.
        words: candidates, without `lead`.
        minimum: smallest number that the task needs.
        lead: text before each word.

    Raises:
        ConfigError: for fewer than `minimum` words.
    """
    single_words = [word for word in words if single(tokenizer, lead + word)]
    if len(single_words) < minimum:
        raise ConfigError(
            f"{task}: expected at least {minimum} {description} of one token, found {len(single_words)} of "
            f"{len(words)} with this tokenizer{': ' + ', '.join(single_words) if single_words else ''}; ask "
            "another task"
        )
    return single_words


def single(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token other than the unknown token.

    Arguments:
        tokenizer: the model's tokenizer.
        text: the text, with a leading space for a word within a sentence.
    """
    # Raw: without the special tokens that `encode` adds to a text.
    ids = tokenizer.encode_raw(text).ids
    return len(ids) == 1 and ids[0] != tokenizer.special_id("unk_token")
