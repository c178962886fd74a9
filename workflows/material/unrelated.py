"""Prompts that have nothing to do with another: where the states of controls come from.

Shipped facts of as many tokens and other answers, drawn at random; where there are too few of them, windows
of the shipped prose, after the same special tokens.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...store.errors import ConfigError
from ..subject import shipped_facts, shipped_prose

if TYPE_CHECKING:
    from ..subject import Subject

__all__ = ["Unrelated"]


class Unrelated:
    """Unrelated prompts for one model; tokenises what ships once."""

    def __init__(self, subject: Subject) -> None:
        facts = shipped_facts()
        told = subject.tokenizer.ids_of([each["prompt"] for each in facts], add_special=True)
        self._facts = [(tuple(ids), each["target"]) for ids, each in zip(told, facts, strict=True)]
        (prose,) = subject.tokenizer.ids_of([shipped_prose()])
        self._prose = tuple(prose)
        self._special = subject.special_tokens

    def to(
        self, prompt: Sequence[int], count: int, *, seed: int, targets: Collection[str] = ()
    ) -> list[tuple[int, ...]]:
        """So many prompts as long as this one, none of them twice. targets: answers they must not have.

        Raises ConfigError where a tokenizer reads what ships alike, so that there are not so many.
        """
        random, size = np.random.default_rng(seed), len(prompt)
        facts = [
            ids
            for ids, target in self._facts
            if len(ids) == size and ids != tuple(prompt) and target not in targets
        ]
        found = dict.fromkeys(facts[i] for i in random.permutation(len(facts))[:count])
        special = tuple(prompt[: self._special])
        starts = random.permutation(max(1, len(self._prose) - size))
        windows = ((*special, *self._prose[start : start + size - len(special)]) for start in starts)
        for window in windows:
            if len(found) == count:
                break
            found[window] = None
        if len(found) < count:
            raise ConfigError(
                f"expected {count} other prompts of {size} tokens to take states from, found {len(found)}: "
                "the tokenizer reads most of what ships with mizarr alike; ask for fewer"
            )
        return list(found)
