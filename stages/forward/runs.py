"""Runs: forward passes as values, and a list of them through one model at the cost of what they change.

A `Run` is one prompt under one HookSpec, and what is wanted of it. Stages that need many of them (patching,
knockout, steering, ablation, injection) do not loop over a model: they make a list of runs, and `run` or
`stream` hands it to the planner (planner.py), which computes only what differs between them.

Border: prompts, specs and results of single runs; what is shared among them is the planner's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .hooks import HookSpec
from .wants import LAST_LOGITS, Logits

if TYPE_CHECKING:
    from .cache import HookCache
    from .model import Model

__all__ = ["Run", "stream"]


@dataclass(frozen=True, eq=False)
class Run:
    """One prompt under one HookSpec.

    prompt: a text or token ids. hooks: what to capture and change; None changes nothing. want: which logits,
    by default those of the last position; None computes none.
    """

    prompt: str | Sequence[int]
    hooks: HookSpec | None = None
    want: Logits | None = LAST_LOGITS


def stream(
    model: Model, runs: Sequence[Run], *, memory: int | str | None = None
) -> Iterator[tuple[int, HookCache]]:
    """(index, result) of every run, as they are finished; a result is what `Model.forward` would give for
    its prompt alone: logits [1, positions wanted, tokens wanted], captures with a batch axis of one.

    memory: bytes the passes may take, or "2GiB"; default 1 GiB.
    """
    for index, each in enumerate(runs):
        prompt: Any = each.prompt if isinstance(each.prompt, str) else list(each.prompt)
        yield index, model.forward(prompt, each.hooks, want=each.want)
