"""Unrelated prompts, whose states serve as controls of patching.

They are random shipped facts with as many tokens and other answers; if there are too few, windows of the
shipped prose after the same special tokens.

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
    """Source of unrelated prompts for one model, whose states serve as controls; tokenizes the shipped texts
    once."""

    def __init__(self, subject: Subject) -> None:
        facts = shipped_facts()
        prompts = subject.tokenizer.ids_of([fact["prompt"] for fact in facts], add_special=True)
        self._facts = [(tuple(ids), fact["target"]) for ids, fact in zip(prompts, facts, strict=True)]
        (prose,) = subject.tokenizer.ids_of([shipped_prose()])
        self._prose = tuple(prose)
        self._special = subject.special_tokens

    def to(
        self, prompt: Sequence[int], count: int, *, seed: int, targets: Collection[str] = ()
    ) -> list[tuple[int, ...]]:
        """Distinct random prompts with as many tokens as a given one, as token ids.

        Arguments:
            prompt: token ids of the prompt.
            count: number of prompts to draw.
            seed: of the draw.
            targets: answers that the drawn facts must not have.

        Raises:
            ConfigError: there are not so many distinct prompts, for example because the tokenizer maps most
                words to one token.
        """
        random, size = np.random.default_rng(seed), len(prompt)
        # A state of a fact with the same answer would restore that answer, and be no control.
        facts = [
            ids
            for ids, target in self._facts
            if len(ids) == size and ids != tuple(prompt) and target not in targets
        ]
        # A dict removes duplicates and keeps the order of the draw. Windows of prose fill the number up.
        prompts = dict.fromkeys(facts[i] for i in random.permutation(len(facts))[:count])
        special = tuple(prompt[: self._special])
        starts = random.permutation(max(1, len(self._prose) - size))
        windows = ((*special, *self._prose[start : start + size - len(special)]) for start in starts)
        for window in windows:
            if len(prompts) == count:
                break
            prompts[window] = None
        if len(prompts) < count:
            raise ConfigError(
                f"expected {count} unrelated prompts of {size} tokens as controls, found {len(prompts)}, as "
                "the tokenizer gives most shipped texts the same tokens; ask for fewer controls: controls=… "
                "or donors=…"
            )
        return list(prompts)
