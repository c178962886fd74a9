"""Drafts: a pair of texts with the words that answer them, and what a tokenizer makes of them.

A pair counts only if clean and corrupted prompt have as many tokens and each answer is one token behind the
clean one: tokens are compared position by position, and a logit is one token's.

Border: texts and a tokenizer; knows no model.
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
"""Drafts tried for each pair wanted, before a task is given up."""


@dataclass(frozen=True)
class Draft:
    """Texts, and what comes next in the clean one: right, and wrong, which the corrupted one suggests."""

    clean: str
    corrupted: str
    right: str
    wrong: str


def next_token(tokenizer: Tokenizer, prompt: str, word: str) -> int | None:
    """The one token that a word is behind a prompt; None where it is several, or changes those before it."""
    before, both = (tokenizer.encode(text).ids for text in (prompt, prompt + word))
    return both[-1] if len(both) == len(before) + 1 and both[:-1] == before else None


def pair_of(tokenizer: Tokenizer, draft: Draft) -> Pair | None:
    """The pair a draft is, measured by the logit difference of its answers; None where it is none."""
    clean, corrupted = (tuple(tokenizer.encode(text).ids) for text in (draft.clean, draft.corrupted))
    right, wrong = (next_token(tokenizer, draft.clean, word) for word in (draft.right, draft.wrong))
    if len(clean) != len(corrupted) or clean == corrupted or right is None or wrong is None:
        return None
    return None if right == wrong else Pair(clean, corrupted, LogitDifference(right, wrong))


def drawn(task: str, tokenizer: Tokenizer, drafts: Iterable[Draft], count: int) -> list[Pair]:
    """The first pairs that drafts give, each once. Raises ConfigError where a tokenizer leaves too few."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Pair] = {}
    tried = 0
    for draft in islice(drafts, TRIED * count):
        tried += 1
        pair = pair_of(tokenizer, draft)
        if pair is not None:
            found.setdefault((pair.clean, pair.corrupted), pair)
        if len(found) == count:
            return list(found.values())
    raise ConfigError(
        f"{task}: expected {count} pairs of equal length with answers of one token, found {len(found)} among "
        f"{tried} tried with this tokenizer; ask for fewer, or another task"
    )


def usable(
    task: str, what: str, tokenizer: Tokenizer, words: Sequence[str], least: int, lead: str = " "
) -> list[str]:
    """Those words that are one token behind a space. Raises ConfigError where fewer are left than a task
    needs."""
    found = [word for word in words if single(tokenizer, lead + word)]
    if len(found) < least:
        raise ConfigError(
            f"{task}: expected at least {least} {what} of one token, found {len(found)} of {len(words)} "
            f"with this tokenizer{': ' + ', '.join(found) if found else ''}; ask another task"
        )
    return found


def single(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, and a known one."""
    ids = tokenizer.encode_raw(text).ids
    return len(ids) == 1 and ids[0] != tokenizer.special_id("unk_token")
