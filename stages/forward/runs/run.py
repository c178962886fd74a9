"""Runs: forward passes as values, and a list of them through one model at the cost of what they change.

A `Run` is one prompt under one HookSpec, and what is wanted of it. Stages that need many of them (patching,
knockout, steering, ablation, injection) do not loop over a model: they make a list of runs, and `run` or
`stream` hands it to the planner (planner.py), which computes only what differs between them.

Border: prompts, specs and results of single runs; what is shared among them is the planner's business.
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
    """One prompt under one HookSpec.

    Raises PromptError for what is not one prompt.
    """

    prompt: str | Sequence[int]
    """A text or token ids: whatever `Model.tokenize` takes, of one prompt; read when the run is made, ids as
    a tuple."""
    hooks: HookSpec | None = None
    """What to capture and change; None changes nothing."""
    want: Logits | None = LAST_LOGITS
    """Which logits, by default those of the last position; None computes none."""

    def __post_init__(self) -> None:
        row = one_row(self.prompt)
        object.__setattr__(self, "prompt", row if isinstance(row, str) else tuple(row))
        if self.hooks is not None:
            require_spec(self.hooks)
        require_want(self.want)


def stream(
    model: Model, runs: Sequence[Run], *, memory: int | str | None = None
) -> Iterator[tuple[int, HookCache]]:
    """(index, result) of every run, block by block; a result is what `Model.forward` would give for its
    prompt alone, within rounding: logits [1, positions wanted, tokens wanted], captures with a batch axis of
    one. Runs that are equal are computed once; each result has tensors of its own.

    memory: bytes the passes may take, or "2GiB"; default 1 GiB.
    Raises PromptError, HookPointNotFound, InterventionError naming what does not fit, and PlanError if a
    single run needs more memory, all before anything is computed.
    """
    from ..hooks.cache import HookCache

    _require_runs(model, runs)
    wanted = [resolve(model, each) for each in runs]
    planned = _planned(model, wanted, memory)
    for block in planned.blocks:
        for index, logits, captured in model.sweep(block, wanted, planned.room):
            yield index, HookCache([list(wanted[index].tokens)], logits, captured)


def run(
    model: Model,
    runs: Sequence[Run],
    *,
    store: Store | None = None,
    memory: int | str | None = None,
) -> list[HookCache]:
    """The results of runs, in order: what `Model.forward` would give for each prompt alone, within rounding,
    at the cost of what differs between them.

    store: read what is stored of these runs, and store the rest as it is computed. memory: bytes the passes
    may take, or "2GiB"; default 1 GiB. All results are held at once; `stream` gives them one by one.
    Raises PromptError, HookPointNotFound, InterventionError or PlanError before anything is computed, and
    ConfigError for a store and a model without identity.
    """
    _require_runs(model, runs)
    if store is None:
        found = dict(stream(model, runs, memory=memory))
    else:
        from .stored_runs import stored

        require_store(store)
        wanted = [resolve(model, each) for each in runs]
        found = stored(
            model, wanted, store, lambda missing: stream(model, [runs[i] for i in missing], memory=memory)
        )
    return [found[index] for index in range(len(runs))]


def plan(model: Model, runs: Sequence[Run], *, memory: int | str | None = None) -> SweepPlan:
    """How `stream` would compute these runs; computes nothing. Raises what `stream` raises."""
    return _planned(model, [resolve(model, each) for each in runs], memory)


def _require_runs(model: Model, runs: Sequence[Run]) -> None:
    """Raise ConfigError unless these are a loaded model and a list of `Run`."""
    require_model(model)
    expected, remedy = "runs as a list of mizarr.Run", "write [mizarr.Run(prompt)]"
    require_kind(runs, Sequence, expected, remedy)
    for one in runs:
        require_kind(one, Run, expected, remedy)


def _planned(model: Model, wanted: Sequence[Wanted], memory: int | str | None) -> SweepPlan:
    budget = as_bytes(memory)
    return plan_runs(wanted, model.config, model.dtype.itemsize, MEMORY if budget is None else budget)


def resolve(model: Model, run: Run) -> Wanted:
    """A run with its prompt tokenised and its spec bound and checked against a model."""
    (tokens,) = model.tokenize(run.prompt)
    spec = model.bind(run.hooks)
    refuse_gradients(spec, "the planner of runs")
    model.check(spec, run.want, batch=1, length=len(tokens))
    return Wanted(tuple(tokens), spec, run.want)
