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
from .sentences import agreement, docstrings, indirect_objects, pronouns, sentiment
from .years import later_years

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["TASKS", "task_pairs"]

Task = Callable[["Tokenizer", int, int], list[Pair]]
"""Function (tokenizer, number of pairs, seed) that makes the pairs of a task."""
# Functions that make the pairs, by the name of the task as users write it.
TASKS: dict[str, Task] = {
    "ioi": indirect_objects,
    "greater_than": later_years,
    "pronouns": pronouns,
    "docstrings": docstrings,
    "agreement": agreement,
    "sentiment": sentiment,
    "induction": induction,
    "copying": copying,
}


def task_pairs(tokenizer: Tokenizer, task: str, count: int, *, seed: int = 0) -> list[Pair]:
    """Distinct random prompt pairs of a task; equal seeds give equal pairs.

    Arguments:
        tokenizer: The model's tokenizer.
        task: Name of the task, a key of `TASKS`.
        count: Number of pairs.
        seed: Seed of the draw.

    Raises:
        ConfigError: The task is unknown, `count` is below 1, or the tokenizer leaves too few pairs.
    """
    if task not in TASKS:
        near = nearest(task, TASKS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"expected the name of a task among {', '.join(TASKS)}, found {task!r}{hint}")
    if count < 1:
        raise ConfigError(f"expected at least one prompt pair of the task, found count={count}")
    return TASKS[task](tokenizer, count, seed)
