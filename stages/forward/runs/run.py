"""Runs: forward passes as values, computed together at the cost of their differences.

A `Run` is one prompt under one HookSpec, with the logits to return. Stages that need many of them (patching,
knockout, steering, ablation, injection) do not loop over forward passes: they make a list of runs, and `run`
or `stream` passes it to the planner (passes/planner.py), which computes shared layers and positions once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....pipeline.plan import as_bytes
from ....store.arrays import require_kind
from ....store.store import require_store
from ..hooks.spec import HookSpec, refuse_gradients, require_spec
from ..hooks.wants import LAST_LOGITS, Logits, require_want
from ..models.reference import require_model
from ..passes.branches import Wanted
from ..passes.planner import MEMORY, SweepPlan, plan_runs
from ..text.rows import one_row

if TYPE_CHECKING:
    from ....store import Store
    from ..hooks.cache import HookCache
    from ..models.model import Model

__all__ = ["Run", "plan", "run", "stream"]


@dataclass(frozen=True, eq=False)
class Run:
    """One forward pass over one prompt, with its captures, interventions and wanted logits.

    Raises:
        PromptError: unless `prompt` is a single prompt.
    """

    prompt: str | Sequence[int]
    """A text, or token ids in any form that `Model.tokenize` accepts; token ids are stored as a tuple."""
    hooks: HookSpec | None = None
    """Captures and interventions; None for a pass without any."""
    want: Logits | None = LAST_LOGITS
    """Logits to return, by default those of the last position; None computes none."""

    def __post_init__(self) -> None:
        row = one_row(self.prompt)
        # A tuple: the caller's list or tensor may change later.
        object.__setattr__(self, "prompt", row if isinstance(row, str) else tuple(row))
        if self.hooks is not None:
            require_spec(self.hooks)
        require_want(self.want)


def stream(
    model: Model, runs: Sequence[Run], *, memory: int | str | None = None
) -> Iterator[tuple[int, HookCache]]:
    """Compute runs together, sharing layers and positions, and yield each result when it is complete.

    A result equals that of `Model.forward` for the prompt alone, within rounding. Equal runs are computed
    once, but share no tensors.

    Arguments:
        model: a loaded model.
        runs: prompts with their captures and interventions.
        memory: most bytes of activations, as a number or such as "2GiB"; None for 1 GiB.

    Yields:
        (index in `runs`, result), in the order of completion. Logits are [1, position, token], or those of
        labels (`HookCache.logits`); captures have a batch axis of length one.

    Raises:
        PromptError, HookPointNotFound, InterventionError: for an invalid run, before anything is computed.
        PlanError: if one run needs more memory, before anything is computed.
    """
    from ..hooks.cache import HookCache

    _require_runs(model, runs)
    resolved = [resolve(model, item) for item in runs]
    planned = _planned(model, resolved, memory)
    for block in planned.blocks:
        for index, logits, captured in model.sweep(block, resolved, planned.room):
            yield index, HookCache([list(resolved[index].tokens)], logits, captured, model.config.head)


def run(
    model: Model,
    runs: Sequence[Run],
    *,
    store: Store | None = None,
    memory: int | str | None = None,
) -> list[HookCache]:
    """Compute runs together, sharing layers and positions, and return all results in order.

    Arguments:
        model: a loaded model.
        runs: prompts with their captures and interventions.
        store: store to read results from, and to write new results to; None for no store.
        memory: most bytes of activations, as a number or such as "2GiB"; None for 1 GiB.

    Returns:
        One result per run, equal to that of `Model.forward` for the prompt alone, within rounding.

    Raises:
        PromptError, HookPointNotFound, InterventionError: for an invalid run, before anything is computed.
        PlanError: if one run needs more memory, before anything is computed.
        ConfigError: for a store with a model whose weights were made in memory, which has no key.
    """
    _require_runs(model, runs)
    if store is None:
        results = dict(stream(model, runs, memory=memory))
    else:
        from .stored_runs import stored

        require_store(store)
        resolved = [resolve(model, item) for item in runs]
        results = stored(
            model, resolved, store, lambda missing: stream(model, [runs[i] for i in missing], memory=memory)
        )
    return [results[index] for index in range(len(runs))]


def plan(model: Model, runs: Sequence[Run], *, memory: int | str | None = None) -> SweepPlan:
    """Plan which layers and positions of some runs are computed together, without computing anything.

    Arguments:
        model: a loaded model.
        runs: prompts with their captures and interventions.
        memory: most bytes of activations, as a number or such as "2GiB"; None for 1 GiB.

    Raises:
        PromptError, HookPointNotFound, InterventionError: for an invalid run.
        PlanError: if one run needs more memory.
    """
    return _planned(model, [resolve(model, item) for item in runs], memory)


def _require_runs(model: Model, runs: Sequence[Run]) -> None:
    """Raise ConfigError unless these are a loaded model and a list of `Run`."""
    require_model(model)
    expected, remedy = "runs as a list of mizarr.Run", "write [mizarr.Run(prompt)]"
    require_kind(runs, Sequence, expected, remedy)
    for item in runs:
        require_kind(item, Run, expected, remedy)


def _planned(model: Model, resolved: Sequence[Wanted], memory: int | str | None) -> SweepPlan:
    budget = as_bytes(memory)
    return plan_runs(resolved, model.config, model.dtype.itemsize, MEMORY if budget is None else budget)


def resolve(model: Model, run: Run) -> Wanted:
    """Tokenise the prompt of a run, and check its captures and interventions against a model.

    Arguments:
        model: a loaded model.
        run: prompt, captures, interventions and wanted logits.
    """
    (tokens,) = model.tokenize(run.prompt)
    spec = model.bind(run.hooks)
    # The planner runs forward only.
    refuse_gradients(spec, "the planner of runs")
    # batch=1: a payload with a row per prompt has no meaning for a single run.
    want = model.read(run.want, [tokens])
    model.check(spec, want, batch=1, length=len(tokens))
    return Wanted(tuple(tokens), spec, want)
