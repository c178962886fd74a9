"""HookSpec: what to capture in a forward pass, and which interventions to apply in it.

A spec is plain data. Captures name hook points whose values are returned; interventions change the run. The
two are digested apart, so that asking for one more layer of the same run computes one more layer. A spec
knows no model until `bind` gets the hook points a model has. This module never imports torch.

By default a captured value is the one *after* the interventions at its point: what the next operation reads,
and what TransformerLens users expect. ``when="before"`` captures the value before them, as candle-mi does.
The prefix ``grad:`` captures the gradient of a metric with respect to the activation. A store may keep less
of a capture than all of it (`keeps.py`).
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
from .reductions import Features, Scorer, as_reduction

When = Literal["after", "before"]
STATE_SEQUENCES = tuple(f"{room}_state_seq" for room in STATE_ROOMS)
"""Hook point kinds that hold the recurrent state after every position."""
GRADIENT = "grad:"
"""Prefix of a hook point name: the gradient of a metric with respect to that activation."""


@dataclass(frozen=True)
class Capture:
    """A captured activation, or gradient of the objective with respect to an activation."""

    point: HookPoint
    """Hook point."""
    when: When = "after"
    """Capture time: "after" or "before" the interventions at the hook point."""
    is_gradient: bool = False
    """Whether the gradient is captured instead of the activation."""

    @property
    def name(self) -> str:
        """Name of the hook point, with the prefix ``grad:`` for a gradient."""
        return capture_name(self.point, self.is_gradient)

    @property
    def variable(self) -> str:
        """Name of the stored array, e.g. `resid_post__pre__grad`; all layers share one array."""
        # "after" is the usual case, and adds nothing to the name.
        when = "" if self.when == "after" else "__pre"
        return f"{self.point.kind}{when}{'__grad' if self.is_gradient else ''}"

    @property
    def cell(self) -> tuple[str, int | None]:
        """(variable, layer): identifies the stored array; layer None for a point outside the layers."""
        return self.variable, self.point.layer


@dataclass(frozen=True)
class KeptCapture:
    """A capture plus the token selection and reduction applied before storage."""

    capture: Capture
    """The activation or gradient."""
    keep: Keep = WHOLE
    """Token selection and reduction that the store applies; `WHOLE` stores every number."""

    @property
    def variable(self) -> str:
        """Name of the stored array, e.g. `resid_post__norm`; all layers share one array."""
        return f"{self.capture.variable}{self.keep.suffix}"

    @property
    def cell(self) -> tuple[str, int | None]:
        """(variable, layer): identifies the stored array; layer None for a point outside the layers."""
        return self.variable, self.capture.point.layer


@dataclass(frozen=True)
class BoundSpec:
    """A HookSpec whose globs are replaced by the matching hook points of one model."""

    captures: tuple[Capture, ...] = ()
    """Captures in execution order."""
    interventions: tuple[tuple[HookPoint, Intervention], ...] = ()
    """(hook point, intervention) pairs in the order they were registered."""
    order: tuple[int, ...] | None = None
    """Layers in execution order, where a recurrent pass repeats some; None for each layer once."""
    objective: Objective | None = None
    """Metric that gradients differentiate; None where no metric was set."""
    keeps: tuple[KeptCapture, ...] = ()
    """Captures with the tokens or the reduction to store, in execution order; empty where every capture is
    stored in full."""

    @property
    def kept(self) -> tuple[KeptCapture, ...]:
        """Captures with the tokens or the reduction to store, in execution order, one per stored array."""
        return self.keeps or tuple(map(KeptCapture, self.captures))

    def only(self, kept: Iterable[KeptCapture]) -> BoundSpec:
        """A spec with the same interventions that captures only what the given stored arrays need.

        Arguments:
            kept: captures with the tokens or the reduction to store, one per stored array.
        """
        stored_captures = tuple(kept)
        # Several stored arrays may come from one capture, which the pass computes once.
        captures = tuple(dict.fromkeys(stored.capture for stored in stored_captures))
        is_whole = all(stored.keep == WHOLE for stored in stored_captures)
        return replace(self, captures=captures, keeps=() if is_whole else stored_captures)

    @property
    def is_empty(self) -> bool:
        """Whether the pass captures nothing, changes nothing and runs each layer once."""
        return not self.captures and not self.interventions and self.order is None

    def canonical(self) -> dict[str, Any]:
        """Captures and interventions as plain JSON values for a digest; tensors by the digest of their bytes.

        Captures are in execution order, interventions in order of registration.
        """
        return {
            "captures": [
                [stored.capture.name, stored.capture.when, *stored.keep.canonical()] for stored in self.kept
            ],
            "interventions": self.canonical_interventions(),
        }

    def canonical_interventions(self) -> list[Any]:
        """Interventions as plain JSON values, in order; then the execution order of layers, if it is set."""
        changes = [[str(point), intervention.canonical()] for point, intervention in self.interventions]
        # An order of layers changes numbers as an intervention does, so it belongs to the digest of the run.
        return changes if self.order is None else [*changes, ["order", list(self.order)]]

    @property
    def may_look_ahead(self) -> bool:
        """Whether attention may read keys that the causal mask hides."""
        return any(may_look_ahead(point, change) for point, change in self.interventions)

    def require_one_payload(self) -> None:
        """Refuse intervention tensors with one row per prompt.

        A stored run chooses its batches by free memory, so rows of a tensor could not be matched to prompts.

        Raises:
            InterventionError: for a tensor whose batch axis is longer than 1.
        """
        for point, change in self.interventions:
            rows = payload_rows(point, change)
            if rows > 1:
                raise InterventionError(
                    f"{type(change).__name__} at '{point}': expected a tensor with a batch axis of length 1, "
                    f"the same for all prompts, found {rows} rows; give each prompt a HookSpec with its own "
                    "row: mizarr.run(model, [mizarr.Run(prompt, spec), …], store=store)"
                )

    @property
    def gradients(self) -> tuple[Capture, ...]:
        """The captures that are gradients, in execution order."""
        return tuple(capture for capture in self.captures if capture.is_gradient)

    @property
    def run_digest(self) -> str:
        """Digest of the interventions without the captures.

        Together with the digests of the model and of the token ids it identifies a run.
        """
        return digest("interventions", self.canonical_interventions())

    def digest_over(self, prompts: str) -> str:
        """Digest of the interventions; where gradients are captured, also of the metric they differentiate.

        Arguments:
            prompts: digest of all prompts; enters where each prompt has a metric or a baseline of its own.
        """
        if not self.gradients:
            return self.run_digest
        objective = self.require_objective().canonical(prompts)
        # Gradients of another metric are other numbers of the same run, so the metric enters their key.
        return digest("gradients", self.canonical_interventions(), objective)

    def require_objective(self) -> Objective:
        """The metric whose gradients are captured, with its position and baselines.

        Raises:
            HookPointNotFound: where gradients are captured and no metric was set.
        """
        if self.objective is None:
            raise HookPointNotFound(
                f"{self.gradients[0].name!r} captures a gradient: expected a metric to differentiate, found "
                "none; add .gradient_of(LogitDifference(correct, wrong)), or --metric to mizarr capture"
            )
        return self.objective

    @property
    def digest(self) -> str:
        """Digest of captures and interventions together."""
        return digest("hookspec", self.canonical())


class Request(NamedTuple):
    """One `capture` call for one hook point or glob, before the spec is bound to a model."""

    point: HookPoint | str
    """Hook point, or a glob over hook points."""
    when: When
    """Capture the value before or after the point's interventions."""
    is_gradient: bool
    """Whether the gradient is captured instead of the activation."""
    keep: Keep
    """Token selection and reduction that a store applies to the value."""

    @property
    def name(self) -> str:
        """Hook point or glob as text for `HookSpec.capture`, with the prefix ``grad:`` for a gradient."""
        return capture_name(self.point, self.is_gradient)


@dataclass(frozen=True, eq=False, repr=False)
class HookSpec:
    """Captures and interventions for a forward pass: an immutable value.

    Every method returns a new spec and leaves this one unchanged, so calls can be chained and one spec can be
    the common start of many:

    >>> base = HookSpec().capture("blocks.*.hook_resid_post")
    >>> changed = [base.intervene(f"blocks.{layer}.hook_mlp_out", Zero()) for layer in range(3)]
    >>> base.num_interventions, [spec.num_interventions for spec in changed]
    (0, [1, 1, 1])

    Points are HookPoint values or their string forms; globs are expanded when the spec is bound to a model.
    Interventions at one point apply in the order they were registered. Two specs are equal when they have the
    same captures, in any order, and the same interventions in the same order.
    """

    _requests: tuple[Request, ...] = field(default=(), init=False)
    """Captures in order of registration, without duplicates."""
    _interventions: tuple[tuple[HookPoint | str, Intervention], ...] = field(default=(), init=False)
    """(hook point or glob, intervention) pairs; those at one point apply in this order."""
    _objective: Objective | None = field(default=None, init=False)
    """Metric that gradients differentiate; None where no metric was set."""

    def capture(
        self,
        *points: HookPoint | str,
        when: When = "after",
        positions: Any = None,
        reduce: str | Features | Scorer | None = None,
    ) -> HookSpec:
        """A spec that also captures the activations at these points; a repeated capture changes nothing.

        Arguments:
            points: hook points, names or globs; "grad:blocks.*.hook_resid_post" captures gradients there.
            when: "after" the interventions at the point (default), or "before" them.
            positions: tokens that a store keeps, all by default: "last", a slice of each prompt such as
                "::16", indices (negative from the end), or a bool array with one entry per token of all
                prompts, end to end.
            reduce: what a store keeps instead of the numbers. "norm": L2 norm of each row over its last axis.
                "mean": mean over the tokens of each prompt, or over those that `positions` selects;
                "weighted_mean": the same with weights 1, 2, 3, … from the first token of the prompt; "max":
                the largest value of each coordinate. Sums are float64. "run_mean": mean over all tokens of
                all prompts, summed exactly. At "hook_logits": "topk:10", the largest logits of
                each token and their ids, or "logsumexp". A Dictionary, at its read_hooks: for each feature
                the number of tokens at which it is active, the sum and the maximum of its activations over
                the run. A TrainedProbe, at its point: its log-odds of each token or prompt.

        Raises:
            HookPointNotFound: for a name that no architecture has; names the nearest one.
            PromptError: for positions of another form.
        """
        if when not in ("after", "before"):
            raise HookPointNotFound(f"expected when='after' or when='before', found {when!r}")
        selection = None if positions is None else as_selection(positions)
        keep = Keep(selection, None if reduce is None else as_reduction(reduce))
        added = (
            Request(_as_point_or_glob(point), when, is_gradient, keep)
            for point, is_gradient in map(split_gradient, points)
        )
        # A dict keeps the first of equal requests and their order.
        return self._with(_requests=tuple(dict.fromkeys((*self._requests, *added))))

    def intervene(self, point: HookPoint | str, intervention: Intervention) -> HookSpec:
        """A spec with one more intervention, at a hook point or at every hook point that a glob matches.

        Arguments:
            point: HookPoint, its string form, or a glob.
            intervention: its tensors are copied, so that a later write to them changes neither the spec nor
                the key of a run.

        Raises:
            InterventionError: for a value that is no intervention.
        """
        if not isinstance(intervention, Intervention):
            raise InterventionError(
                f"expected an intervention such as mizarr.Zero(), found {shown(intervention)}"
            )
        # Copied now: the digest is computed later, and must be that of the tensors passed here.
        added = (_as_point_or_glob(point), intervention.with_copied_payloads())
        return self._with(_interventions=(*self._interventions, added))

    def gradient_of(
        self,
        metric: Differentiable | Sequence[Differentiable],
        *,
        at: int = -1,
        baseline: Sequence[int] | Sequence[Sequence[int]] = (),
    ) -> HookSpec:
        """A spec whose ``grad:`` captures differentiate this metric; replaces an earlier metric.

        Arguments:
            metric: one metric for all prompts, or one per prompt.
            at: position whose next-token logits the metric reads; negative from the end.
            baseline: token ids of one prompt, or of one per prompt. Its run without interventions is what a
                metric such as KL compares with.

        Raises:
            StageError: for a metric without a gradient.
        """
        return self._with(_objective=objective_of(metric, at, baseline))

    def extend(self, other: HookSpec) -> HookSpec:
        """Append the captures and interventions of another HookSpec.

        The metric of `other`, if it has one, replaces the present metric.

        Raises:
            StageError: for a value that is no HookSpec.
        """
        require_spec(other, "other")
        return self._with(
            _requests=tuple(dict.fromkeys((*self._requests, *other._requests))),
            _interventions=(*self._interventions, *other._interventions),
            _objective=other._objective or self._objective,
        )

    def _with(self, **fields: Any) -> HookSpec:
        spec = HookSpec()
        for name, value in (vars(self) | fields).items():
            # Frozen dataclass whose fields are no constructor arguments: users build specs by chaining only.
            object.__setattr__(spec, name, value)
        return spec

    def is_captured(self, point: HookPoint | str) -> bool:
        """Whether a hook point is captured, by name or by a glob."""
        name, is_gradient = split_gradient(point)
        return any(
            _matches(request.point, as_point(name))
            for request in self._requests
            if request.is_gradient == is_gradient
        )

    def has_intervention_at(self, point: HookPoint | str) -> bool:
        """Whether a hook point has an intervention, by name or by a glob."""
        return bool(self.interventions_at(point))

    def interventions_at(self, point: HookPoint | str) -> list[Intervention]:
        """Interventions at one hook point, as copies, in the order they apply."""
        return [
            change.with_copied_payloads()
            for registered, change in self._interventions
            if _matches(registered, as_point(point))
        ]

    @property
    def num_captures(self) -> int:
        """Number of registered captures; a glob counts once."""
        return len({request[:3] for request in self._requests})

    @property
    def num_interventions(self) -> int:
        """Number of registered interventions; one at a glob counts once."""
        return len(self._interventions)

    @property
    def is_empty(self) -> bool:
        """Whether the spec has no captures and no interventions."""
        return not self._requests and not self._interventions

    def bind(
        self, available: Sequence[HookPoint], model: str = "the model", *, stored: bool = False
    ) -> BoundSpec:
        """The spec with globs expanded over the hook points of a model.

        Arguments:
            available: hook points of the model, in execution order.
            model: name of the model, for error messages.
            stored: whether captures go to a store, which can keep selected tokens or reductions.

        Raises:
            HookPointNotFound: for a point, layer or glob that the model does not have, and for selected
                tokens or reductions where nothing is stored.
            InterventionError: for an intervention at a point whose value no later operation reads.
        """
        # Logits are a hook point of stored captures only: a pass returns them without a hook.
        kept = self._expanded_captures((*available, HookPoint.logits()) if stored else available, model)
        if not stored:
            _refuse_partial_captures(kept)
        captures = {kept_capture.capture for kept_capture in kept}
        interventions = [
            (point, change)
            for name, change in self._interventions
            for point in _matching_points(name, available, model)
        ]
        for point, change in interventions:
            _refuse_point_never_read(point, change)
            _require_positionwise_at_states(point, change)
        # Sorted by execution, so that two specs with the same captures have the same digest.
        ordered = sorted(captures, key=_execution_order)
        bound = BoundSpec(tuple(ordered), tuple(interventions), objective=self._objective)
        if stored:
            bound.require_one_payload()
        bound = bound.only(
            sorted(kept, key=lambda stored: (*_execution_order(stored.capture), stored.keep.suffix))
        )
        if self._objective is not None and not bound.gradients:
            raise HookPointNotFound(
                "gradient_of(…) was called: expected a captured gradient, found none; add "
                f".capture('{GRADIENT}blocks.*.hook_resid_post')"
            )
        return bound

    def _expanded_captures(self, available: Sequence[HookPoint], model: str) -> set[KeptCapture]:
        """The captures at each matching hook point, one per array that a store would hold."""
        kept: set[KeptCapture] = set()
        for name, when, is_gradient, keep in self._requests:
            if name == HookPoint.logits() and name not in available:
                raise HookPointNotFound(
                    f"Model.forward: expected a hook point before the logits, found '{name}'; read the "
                    "logits as cache.logits, or store a reduction of them with mizarr.capture"
                )
            find_points = _differentiable_points if is_gradient else _matching_points
            for point in find_points(name, available, model):
                keep.require(point, capture_name(name, is_gradient))
                kept |= {KeptCapture(Capture(point, when, is_gradient), stored) for stored in keep.stored}
        return kept

    def canonical(self) -> dict[str, Any]:
        """The spec as plain JSON values with globs as written, for equality and hash.

        Keys of stored results use `BoundSpec.canonical`, whose globs are expanded.
        """
        captures = [[request.name, request.when, *request.keep.canonical()] for request in self._requests]
        # Two specs with the same captures are equal whatever the order of the calls.
        captures.sort(key=canonical_json)
        return {
            "captures": captures,
            "interventions": [[str(point), change.canonical()] for point, change in self._interventions],
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
        """HTML table for a notebook: a row per capture and intervention."""
        rows: list[tuple[Any, str]] = [
            (request.name, f"capture, {request.when} interventions{request.keep.arguments}")
            for request in self._requests
        ]
        rows += [(point, repr(change)) for point, change in self._interventions]
        rows += [] if self._objective is None else [("gradients of", self._objective.arguments)]
        return html.shown("HookSpec", html.table(["hook point", "what"], rows))

    def __repr__(self) -> str:
        captures = "".join(
            f".capture({request.name!r}{'' if request.when == 'after' else ', when=' + repr(request.when)}"
            f"{request.keep.arguments})"
            for request in self._requests
        )
        changes = "".join(f".intervene({str(point)!r}, {change!r})" for point, change in self._interventions)
        metric = "" if self._objective is None else f".gradient_of({self._objective.arguments})"
        return f"HookSpec(){captures}{changes}{metric}"


def require_spec(hooks: Any, what: str = "hooks") -> None:
    """Raise StageError unless an argument is a HookSpec.

    Arguments:
        hooks: the value passed.
        what: name of the argument, for the message.

    Raises:
        StageError: for any other type.
    """
    example = repr(hooks) if isinstance(hooks, str) else "'blocks.*.hook_resid_post'"
    require_kind(
        hooks,
        HookSpec,
        f"{what} as a HookSpec",
        f"write mizarr.HookSpec().capture({example:.80})",
        StageError,
    )


def as_spec(hooks: HookSpec | str | Sequence[str]) -> HookSpec:
    """The HookSpec itself, or a HookSpec that captures the given hook point names and globs."""
    if isinstance(hooks, HookSpec):
        return hooks
    return HookSpec().capture(*as_list(hooks))


def split_gradient(point: HookPoint | str) -> tuple[HookPoint | str, bool]:
    """(hook point without the prefix ``grad:``, whether the prefix was there).

    >>> split_gradient("grad:hook_embed"), split_gradient("hook_embed")
    (('hook_embed', True), ('hook_embed', False))
    """
    is_gradient = isinstance(point, str) and point.startswith(GRADIENT)
    return (str(point).removeprefix(GRADIENT), True) if is_gradient else (point, False)


def refuse_gradients(spec: BoundSpec, who: str) -> None:
    """Refuse gradients in a pass that only runs forward.

    Arguments:
        spec: bound spec of the pass.
        who: name of the pass for the message, e.g. "generation".

    Raises:
        HookPointNotFound: for the first captured gradient.
    """
    for capture in spec.gradients:
        raise HookPointNotFound(
            f"expected hook points without gradients, as {who} has no backward pass, found {capture.name!r}; "
            "take gradients of whole prompts: Model.forward, or mizarr.capture"
        )


def _refuse_partial_captures(kept: Iterable[KeptCapture]) -> None:
    for kept_capture in kept:
        keep = kept_capture.keep
        if keep != WHOLE:
            raise HookPointNotFound(
                "expected captures without positions= and reduce=, found "
                f"{kept_capture.capture.name!r}{keep.arguments}; store them with mizarr.capture, or capture "
                "the whole activation and select from what the pass returns"
            )


def _execution_order(capture: Capture) -> tuple[Any, ...]:
    return capture.point.order, capture.when, capture.is_gradient


def layers_by_variable(cells: Iterable[tuple[str, int | None]]) -> dict[str, list[int]]:
    """Stored variable -> its layers, from (variable, layer) pairs in their order.

    Arguments:
        cells: (variable, layer) pairs; layer None for a hook point outside the layers, which adds no layer.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for variable, layer in cells:
        layers[variable] += [] if layer is None else [layer]
    return dict(layers)


def _refuse_point_never_read(point: HookPoint, change: Intervention) -> None:
    # A derived value, e.g. router probabilities, is computed only for captures.
    if BY_NAME[point.kind].is_derived:
        prefix = str(point).rpartition("hook_")[0]
        states = f"'{prefix}hook_state_seq' or '{prefix}hook_write'"
        instead = states if point.kind.startswith(STATE_ROOMS) else "a point from which it is computed"
        raise InterventionError(
            f"expected {type(change).__name__} at a point that later operations read, found '{point}', which "
            f"is computed only to be captured; intervene at {instead} instead"
        )


def _require_positionwise_at_states(point: HookPoint, change: Intervention) -> None:
    # States are computed one position after another, because each one determines the next.
    if point.kind in STATE_SEQUENCES and change.needs_all_positions:
        raise InterventionError(
            f"{type(change).__name__} at '{point}': expected an intervention whose result at a position "
            "depends on that position alone, because states are computed one position after another; if "
            f"it is so, set is_positionwise = True in class {type(change).__name__}"
        )


def _as_point_or_glob(point: HookPoint | str) -> HookPoint | str:
    # Accepts nnterp's names, such as layers_output[5]; a spec stores ours.
    name = own_name(point) if isinstance(point, str) else point
    return name if isinstance(name, str) and is_glob(name) else as_point(name)


def _matches(registered: HookPoint | str, point: HookPoint) -> bool:
    if isinstance(registered, HookPoint):
        return registered == point
    try:
        return bool(expand(registered, [point]))
    except HookPointNotFound:
        return False


def _differentiable_points(
    registered: HookPoint | str, available: Sequence[HookPoint], model: str
) -> list[HookPoint]:
    """Matching hook points whose value later operations read, so that a gradient exists there.

    A glob skips the other points; a name of one of them raises HookPointNotFound.
    """
    points = _matching_points(registered, available, model)
    read_later = [point for point in points if not BY_NAME[point.kind].is_derived]
    if not read_later:
        raise HookPointNotFound(
            f"{GRADIENT + str(registered)!r}: expected a hook point that later operations read, found one "
            "that is computed only to be captured, so that no metric has a gradient there; capture the "
            "gradient at a hook point from which it is computed"
        )
    return read_later


def capture_name(point: HookPoint | str, is_gradient: bool) -> str:
    """Name of a hook point or glob, with the prefix ``grad:`` for a gradient.

    Arguments:
        point: HookPoint, name or glob.
        is_gradient: whether to add the prefix.
    """
    return f"{GRADIENT}{point}" if is_gradient else str(point)


def _matching_points(
    registered: HookPoint | str, available: Sequence[HookPoint], model: str
) -> list[HookPoint]:
    if isinstance(registered, str):
        return expand(registered, available)
    require_known([registered], available, model)
    return [registered]
