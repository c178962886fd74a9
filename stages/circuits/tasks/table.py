"""Tasks by name, and their pairs.

    pairs = task_pairs(tokenizer, "ioi", 16, seed=0)

Border: a tokenizer; loads no model and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....store.errors import ConfigError, nearest
from ..pairs import Pair
from .repeats import copying, induction
from .sentences import agreement, docstrings, indirect_objects, pronouns
from .years import later_years

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["TASKS", "task_pairs"]

Task = Callable[["Tokenizer", int, int], list[Pair]]
"""(tokenizer, number of pairs, seed) -> pairs."""
# Name, as users write it -> function that makes its pairs.
TASKS: dict[str, Task] = {
    "ioi": indirect_objects,
    "greater_than": later_years,
    "pronouns": pronouns,
    "docstrings": docstrings,
    "agreement": agreement,
    "induction": induction,
    "copying": copying,
}


def task_pairs(tokenizer: Tokenizer, task: str, count: int, *, seed: int = 0) -> list[Pair]:
    """Distinct prompt pairs of a task, deterministic for a seed.

    Arguments:
        tokenizer: the model's tokenizer.
        task: name of the task, a key of `TASKS`.
        count: number of pairs.
        seed: seed of the draw.

    Raises:
        ConfigError: for an unknown task, a count below 1, or a tokenizer that leaves too few pairs.
    """
    if task not in TASKS:
        near = nearest(task, TASKS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(TASKS)}"
        raise ConfigError(f"no task {task!r}; {hint}")
    if count < 1:
        raise ConfigError(f"expected at least one pair, found count={count}")
    return TASKS[task](tokenizer, count, seed)
