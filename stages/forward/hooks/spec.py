"""HookSpec: what is wanted from a forward pass, and what is changed in it.

A spec is plain data. Captures say what is wanted; interventions say which run it is; the two are digested
apart, so that asking for one more layer of the same run computes one more layer. Knows no model until
`bind` is given the points a model has; never imports torch.

A captured value is by default the one *after* the interventions at its own point (what the next operation
sees, and what TransformerLens users expect); ``when="before"`` asks for the value before them (what
candle-mi stores). ``grad:`` before a point asks for the gradient of a metric there instead. What a store is
to keep of a captured value may be less than all (keeps.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ....store.arrays import as_list, require_kind, shown
from ....store.digest import canonical_json, digest
from ....store.display import html
from ....store.errors import HookPointNotFound, InterventionError, StageError
from ....store.runs.selections import as_selection
from ..architectures.points import (
    BY_NAME,
    STATE_ROOMS,
    HookPoint,
    as_point,
    expand,
    is_glob,
    own_name,
    require_known,
)
from .edge_interventions import may_look_ahead
from .interventions import Intervention, payload_rows
from .keeps import WHOLE, Keep
from .objective import Differentiable, Objective, objective_of
from .reductions import Features, as_reduction

When = Literal["after", "before"]
STATE_SEQUENCES = tuple(f"{room}_state_seq" for room in STATE_ROOMS)
"""Points of the states behind each position."""
GRADIENT = "grad:"
"""Before a hook point: not the activation there, but the gradient of a metric with respect to it."""


@dataclass(frozen=True)
class Capture:
    """One wanted activation, or gradient with respect to one."""

    point: HookPoint
    when: When = "after"
    is_gradient: bool = False

    @property
    def name(self) -> str:
        """The point as it was asked for."""
        return named(self.point, self.is_gradient)

    @property
    def variable(self) -> str:
        """Name of the array that holds it in a store; all layers share one array."""
        when = "" if self.when == "after" else "__pre"
        return f"{self.point.kind}{when}{'__grad' if self.is_gradient else ''}"

    @property
    def cell(self) -> tuple[str, int | None]:
        """Variable and layer: which stored array it is."""
        return self.variable, self.point.layer


@dataclass(frozen=True)
class KeptCapture:
    """What a store keeps of one capture."""

    capture: Capture
    keep: Keep = WHOLE

    @property
    def variable(self) -> str:
        """Name of the array that holds it; all layers share one array."""
        return f"{self.capture.variable}{self.keep.suffix}"

    @property
    def cell(self) -> tuple[str, int | None]:
        """Variable and layer: which stored array it is."""
        return self.variable, self.capture.point.layer


@dataclass(frozen=True)
class BoundSpec:
    """A spec whose globs are expanded against one model: captures in execution order, interventions in the
    order given. order: layers as they are gone through; None for each of them once. objective: what gradients
    are of. keeps: what is kept of captures, where it is not all of each."""

    captures: tuple[Capture, ...] = ()
    interventions: tuple[tuple[HookPoint, Intervention], ...] = ()
    order: tuple[int, ...] | None = None
    objective: Objective | None = None
    keeps: tuple[KeptCapture, ...] = ()

    @property
    def kept(self) -> tuple[KeptCapture, ...]:
        """What a store keeps, in execution order."""
        return self.keeps or tuple(map(KeptCapture, self.captures))

    def only(self, kept: Iterable[KeptCapture]) -> BoundSpec:
        """The spec with what makes some of its keeps, and no other capture."""
        chosen = tuple(kept)
        captures = tuple(dict.fromkeys(each.capture for each in chosen))
        whole = all(each.keep == WHOLE for each in chosen)
        return replace(self, captures=captures, keeps=() if whole else chosen)

    @property
    def is_empty(self) -> bool:
        """Whether the pass is a plain one."""
        return not self.captures and not self.interventions and self.order is None

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values: captures sorted, interventions in order, payloads by digest."""
        return {
            "captures": [[k.capture.name, k.capture.when, *k.keep.canonical()] for k in self.kept],
            "interventions": self.canonical_interventions(),
        }

    def canonical_interventions(self) -> list[Any]:
        """Plain JSON values of the interventions, in order; an order of layers is the last of them."""
        changes = [[str(point), intervention.canonical()] for point, intervention in self.interventions]
        return changes if self.order is None else [*changes, ["order", list(self.order)]]

    @property
    def may_look_ahead(self) -> bool:
        """Whether attention may read keys that the causal mask hides."""
        return any(may_look_ahead(point, change) for point, change in self.interventions)

    def require_one_payload(self) -> None:
        """Raise InterventionError for a payload with a row per prompt, where prompts go into batches that
        depend on segments and memory."""
        for point, change in self.interventions:
            rows = payload_rows(point, change)
            if rows > 1:
                raise InterventionError(
                    f"{type(change).__name__} at '{point}': expected a payload for all prompts, found one "
                    f"with a row for each of {rows}; give each prompt a spec with its own row: "
                    "mizarr.run(model, [mizarr.Run(prompt, spec), …], store=store)"
                )

    @property
    def gradients(self) -> tuple[Capture, ...]:
        """The captures that are gradients."""
        return tuple(capture for capture in self.captures if capture.is_gradient)

    @property
    def run_digest(self) -> str:
        """Digest of the interventions alone: it, the model and the tokens say which run this is."""
        return digest("interventions", self.canonical_interventions())

    def digest_over(self, prompts: str) -> str:
        """As `run_digest`, of gradients together with what they are of. prompts: digest of the prompts."""
        if not self.gradients:
            return self.run_digest
        told = self.require_objective().canonical(prompts)
        return digest("gradients", self.canonical_interventions(), told)

    def require_objective(self) -> Objective:
        """What gradients are of; HookPointNotFound where nobody said it."""
        if self.objective is None:
            raise HookPointNotFound(
                f"expected to be told what {self.gradients[0].name!r} is the gradient of, found no metric; "
                "add .gradient_of(LogitDifference(correct, wrong)), or --metric to mizarr capture"
            )
        return self.objective

    @property
    def digest(self) -> str:
        """Digest of captures and interventions together."""
        return digest("hookspec", self.canonical())


class Request(NamedTuple):
    """One capture of a spec, before it meets a model."""

    point: HookPoint | str
    """Hook point, or a glob over them."""
    when: When
    """Before or after the interventions at the point."""
    is_gradient: bool
    """Whether the gradient there is wanted instead of the activation."""
    keep: Keep
    """What a store keeps of it."""

    @property
    def name(self) -> str:
        """The point as `HookSpec.capture` takes it."""
        return named(self.point, self.is_gradient)


@dataclass(frozen=True, eq=False, repr=False)
class HookSpec:
    """Captures and interventions for a forward pass: an immutable value.

    Every method gives a new spec and leaves this one as it is, so that calls chain and a spec can be the
    common beginning of many:

    >>> base = HookSpec().capture("blocks.*.hook_resid_post")
    >>> changed = [base.intervene(f"blocks.{layer}.hook_mlp_out", Zero()) for layer in range(3)]
    >>> base.num_interventions, [spec.num_interventions for spec in changed]
    (0, [1, 1, 1])

    Points are HookPoint values or their string forms; globs expand against the model the spec meets.
    Interventions at one point apply in the order they were registered. Two specs are equal that ask for the
    same captures, in any order, and make the same interventions in the same order.
    """

    _requests: tuple[Request, ...] = field(default=(), init=False)
    """Captures in the order they were asked for, none twice."""
    _interventions: tuple[tuple[HookPoint | str, Intervention], ...] = field(default=(), init=False)
    """Interventions with their points or globs, in the order they are applied at one point."""
    _objective: Objective | None = field(default=None, init=False)
    """What gradients are of; None where nobody said it."""

    def capture(
        self,
        *points: HookPoint | str,
        when: When = "after",
        positions: Any = None,
        reduce: str | Features | None = None,
    ) -> HookSpec:
        """A spec that also asks for the activations at these points; asking twice changes nothing.

        points: "grad:blocks.*.hook_resid_post" asks for gradients there. when: "after" the interventions at
        that point (default), or "before" them. positions: which tokens a store keeps, by default all: "last",
        a slice of each prompt such as "::16", numbers (negative from the end), or a bool array with one for
        each token of all prompts, end to end. reduce: what a store keeps in place of the numbers: "norm", of
        each row over its last axis; "mean", over the tokens of each prompt, a row per prompt; both summed in
        float64; "run_mean", over all tokens of all prompts, summed exactly. Of "hook_logits" "topk:10", the
        largest of each token and their ids, and "logsumexp". A Dictionary, at its read_hooks: of each of its
        features the number of tokens it is active at, over the run, the sum and the largest activation.
        Raises HookPointNotFound for a name no architecture has, naming the nearest; PromptError for positions
        that are none.
        """
        if when not in ("after", "before"):
            raise HookPointNotFound(f"expected when='after' or when='before', found {when!r}")
        selection = None if positions is None else as_selection(positions)
        keep = Keep(selection, None if reduce is None else as_reduction(reduce))
        split = map(split_gradient, points)
        added = (Request(_known(point), when, is_gradient, keep) for point, is_gradient in split)
        return self._with(_requests=tuple(dict.fromkeys((*self._requests, *added))))

    def intervene(self, point: HookPoint | str, intervention: Intervention) -> HookSpec:
        """A spec that also changes the activation at a point (or at every point a glob matches).

        point: HookPoint, its string form, or a glob. intervention: its tensors are copied here, so that
        whoever writes to them afterwards changes neither the spec nor the key of a run.
        """
        if not isinstance(intervention, Intervention):
            raise InterventionError(
                f"expected an intervention such as mizarr.Zero(), found {shown(intervention)}"
            )
        added = (_known(point), intervention.with_own_payloads())
        return self._with(_interventions=(*self._interventions, added))

    def gradient_of(
        self,
        metric: Differentiable | Sequence[Differentiable],
        *,
        at: int = -1,
        baseline: Sequence[int] | Sequence[Sequence[int]] = (),
    ) -> HookSpec:
        """A spec whose gradients are of this metric; it replaces an earlier one.

        metric: one for all prompts, or one of each. at: the position whose next-token logits it reads.
        baseline: token ids of the prompt, or of each, whose unchanged run a metric such as KL compares with.
        Raises StageError for a metric without a gradient.
        """
        return self._with(_objective=objective_of(metric, at, baseline))

    def extend(self, other: HookSpec) -> HookSpec:
        """A spec with the captures of another as well, its interventions after the present ones, and its
        metric, if it has one, in place of the present one. Raises StageError for what is no spec."""
        require_spec(other, "other")
        return self._with(
            _requests=tuple(dict.fromkeys((*self._requests, *other._requests))),
            _interventions=(*self._interventions, *other._interventions),
            _objective=other._objective or self._objective,
        )

    def _with(self, **fields: Any) -> HookSpec:
        spec = HookSpec()
        for name, value in (vars(self) | fields).items():
            object.__setattr__(spec, name, value)
        return spec

    def is_captured(self, point: HookPoint | str) -> bool:
        """Whether a point is asked for, by name or by glob."""
        place, is_gradient = split_gradient(point)
        return any(
            _matches(request.point, as_point(place))
            for request in self._requests
            if request.is_gradient == is_gradient
        )

    def has_intervention_at(self, point: HookPoint | str) -> bool:
        """Whether a point is changed."""
        return bool(self.interventions_at(point))

    def interventions_at(self, point: HookPoint | str) -> list[Intervention]:
        """Those at one point, in the order they will be applied."""
        return [
            change.with_own_payloads()
            for place, change in self._interventions
            if _matches(place, as_point(point))
        ]

    @property
    def num_captures(self) -> int:
        """Captures registered; a glob counts once until it meets a model."""
        return len({request[:3] for request in self._requests})

    @property
    def num_interventions(self) -> int:
        """Interventions registered; one at a glob counts once until it meets a model."""
        return len(self._interventions)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for and nothing is changed."""
        return not self._requests and not self._interventions

    def bind(
        self, available: Sequence[HookPoint], model: str = "the model", *, stored: bool = False
    ) -> BoundSpec:
        """The spec with globs expanded over the points a model has.

        stored: for a store, which may keep less than a pass gives. Raises HookPointNotFound for a point,
        layer or glob the model does not have, and for keeps where nothing is stored, InterventionError for a
        change of what nothing reads; nothing is ignored.
        """
        kept = self._kept((*available, HookPoint.logits()) if stored else available, model)
        if not stored:
            _refuse_keeps(kept)
        captures = {each.capture for each in kept}
        interventions = [
            (p, change) for held, change in self._interventions for p in _expanded(held, available, model)
        ]
        for point, change in interventions:
            _refuse_derived(point, change)
            _refuse_whole_states(point, change)
        ordered = sorted(captures, key=_execution)
        found = BoundSpec(tuple(ordered), tuple(interventions), objective=self._objective)
        if stored:
            found.require_one_payload()
        found = found.only(sorted(kept, key=lambda each: (*_execution(each.capture), each.keep.suffix)))
        if self._objective is not None and not found.gradients:
            raise HookPointNotFound(
                "expected hook points whose gradient is wanted beside gradient_of(…), found none; add "
                f".capture('{GRADIENT}blocks.*.hook_resid_post')"
            )
        return found

    def _kept(self, available: Sequence[HookPoint], model: str) -> set[KeptCapture]:
        found: set[KeptCapture] = set()
        for place, when, is_gradient, keep in self._requests:
            if place == HookPoint.logits() and place not in available:
                raise HookPointNotFound(
                    f"expected hook points of a pass, found '{place}': a store keeps reductions of logits "
                    "(mizarr.capture), and a pass gives all of them (cache.logits)"
                )
            for point in (_differentiable if is_gradient else _expanded)(place, available, model):
                keep.require(point, named(place, is_gradient))
                found |= {KeptCapture(Capture(point, when, is_gradient), each) for each in keep.stored}
        return found

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values of the spec as written, globs unexpanded; a key uses those of `bind` instead."""
        captures = [[request.name, request.when, *request.keep.canonical()] for request in self._requests]
        captures.sort(key=canonical_json)
        return {
            "captures": captures,
            "interventions": [[str(place), change.canonical()] for place, change in self._interventions],
            **({} if self._objective is None else {"objective": self._objective.canonical("as given")}),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HookSpec) and self._canonical_text == other._canonical_text

    def __hash__(self) -> int:
        return hash(self._canonical_text)

    @property
    def _canonical_text(self) -> str:
        return canonical_json(self.canonical())

    def _repr_html_(self) -> str:
        """For a notebook: a line per capture and intervention."""
        rows: list[tuple[Any, str]] = [
            (request.name, f"capture, {request.when} interventions{request.keep.arguments}")
            for request in self._requests
        ]
        rows += [(place, repr(change)) for place, change in self._interventions]
        rows += [] if self._objective is None else [("gradients of", self._objective.arguments)]
        return html.shown("HookSpec", html.table(["hook point", "what"], rows))

    def __repr__(self) -> str:
        captures = "".join(
            f".capture({request.name!r}{'' if request.when == 'after' else ', when=' + repr(request.when)}"
            f"{request.keep.arguments})"
            for request in self._requests
        )
        changes = "".join(f".intervene({str(place)!r}, {change!r})" for place, change in self._interventions)
        metric = "" if self._objective is None else f".gradient_of({self._objective.arguments})"
        return f"HookSpec(){captures}{changes}{metric}"


def require_spec(hooks: Any, what: str = "hooks") -> None:
    """Raise StageError unless this is a HookSpec. what: name of the argument."""
    named = repr(hooks) if isinstance(hooks, str) else "'blocks.*.hook_resid_post'"
    require_kind(
        hooks, HookSpec, f"{what} as a HookSpec", f"write mizarr.HookSpec().capture({named:.80})", StageError
    )


def as_spec(hooks: HookSpec | str | Sequence[str]) -> HookSpec:
    """A spec, or the names and globs of what to capture, as a spec."""
    if isinstance(hooks, HookSpec):
        return hooks
    return HookSpec().capture(*as_list(hooks))


def split_gradient(point: HookPoint | str) -> tuple[HookPoint | str, bool]:
    """A point, and whether the gradient there is meant.

    >>> split_gradient("grad:hook_embed"), split_gradient("hook_embed")
    (('hook_embed', True), ('hook_embed', False))
    """
    is_gradient = isinstance(point, str) and point.startswith(GRADIENT)
    return (str(point).removeprefix(GRADIENT), True) if is_gradient else (point, False)


def refuse_gradients(spec: BoundSpec, who: str) -> None:
    """HookPointNotFound for gradients asked of what goes forward alone. who: "generation"."""
    for capture in spec.gradients:
        raise HookPointNotFound(
            f"expected hook points without gradients, as {who} goes no way back, found {capture.name!r}; "
            "take gradients of whole prompts: Model.forward, or mizarr.capture"
        )


def _refuse_keeps(kept: Iterable[KeptCapture]) -> None:
    for each in kept:
        if each.keep != WHOLE:
            raise HookPointNotFound(
                f"expected whole activations, found {each.capture.name!r}{each.keep.arguments}: less than "
                "all is kept by a store alone; use mizarr.capture, or choose among what the pass gives"
            )


def _execution(capture: Capture) -> tuple[Any, ...]:
    return capture.point.order, capture.when, capture.is_gradient


def layers_by_variable(captures: Iterable[Capture | KeptCapture]) -> dict[str, list[int | None]]:
    """Which layers of each stored variable a set of captures asks for; [None] where there is no layer
    axis."""
    found: dict[str, list[int | None]] = defaultdict(list)
    for capture in captures:
        variable, layer = capture.cell
        found[variable].append(layer)
    return dict(found)


def _refuse_derived(point: HookPoint, change: Intervention) -> None:
    if BY_NAME[point.kind].is_derived:
        room = str(point).rpartition("hook_")[0]
        states = f"'{room}hook_state_seq' or '{room}hook_write'"
        instead = states if point.kind.startswith(STATE_ROOMS) else "a point it is made of"
        raise InterventionError(
            f"expected {type(change).__name__} at a point the pass goes on from, found '{point}', which is "
            f"worked out for who reads it; change {instead}"
        )


def _refuse_whole_states(point: HookPoint, change: Intervention) -> None:
    """States are met one position after another: each decides the next."""
    if point.kind in STATE_SEQUENCES and change.needs_all_positions:
        raise InterventionError(
            f"expected an intervention that looks at one position at a time at '{point}', where states are "
            f"met one after another, found {type(change).__name__}; write is_positionwise = True into its "
            "class if it does"
        )


def _known(point: HookPoint | str) -> HookPoint | str:
    name = own_name(point) if isinstance(point, str) else point
    return name if isinstance(name, str) and is_glob(name) else as_point(name)


def _matches(held: HookPoint | str, point: HookPoint) -> bool:
    return held == point if isinstance(held, HookPoint) else bool(_glob_hits(held, point))


def _glob_hits(pattern: str, point: HookPoint) -> list[HookPoint]:
    try:
        return expand(pattern, [point])
    except HookPointNotFound:
        return []


def _differentiable(held: HookPoint | str, available: Sequence[HookPoint], model: str) -> list[HookPoint]:
    """Of the points meant, those that the pass goes on from: a pattern leaves others out."""
    found = _expanded(held, available, model)
    made = [point for point in found if not BY_NAME[point.kind].is_derived]
    if not made:
        raise HookPointNotFound(
            f"expected a gradient at a point the pass goes on from, found {GRADIENT + str(held)!r}, which is "
            "worked out for who reads it: no metric depends on it; choose a point it is made of"
        )
    return made


def named(held: HookPoint | str, is_gradient: bool) -> str:
    """A point as it is asked for, or its gradient is."""
    return f"{GRADIENT}{held}" if is_gradient else str(held)


def _expanded(held: HookPoint | str, available: Sequence[HookPoint], model: str) -> list[HookPoint]:
    if isinstance(held, str):
        return expand(held, available)
    require_known([held], available, model)
    return [held]
