"""Numbers that are not finite: noticed in what a pass gives, and traced to the hook point where they begin.

A float16 ends at 65504, and massive activations of real models lie beyond: one infinity in a layer makes NaN
of everything behind it. What a pass gives is looked at when it is given. Only where something is not finite
the pass is made once more, with every hook point looked at, to say where it began.

Masked attention scores are -inf by definition, and stay so.

Border: a loaded model, tensors of its passes, and errors; what is stored is the harvest's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....store.errors import NotFinite
from ..architectures.points import BY_NAME, HookPoint
from ..hooks.spec import BoundSpec, Capture
from ..hooks.taps import EarlyStop, PassTaps, RunTaps
from ..hooks.wants import ALL_LOGITS, Logits
from ..networks.weights import is_finite

__all__ = ["MASKED", "first_not_finite", "is_fit", "not_finite", "require_finite"]

MASKED = frozenset(("attn_scores", "scores", "cross_attn_scores", "cross_scores"))
"""Kinds of hook points that hold -inf where attention may not look."""


class PassMaker(Protocol):
    """What is asked of a `Model` to find where numbers begin to be too large."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""

    @property
    def device(self) -> torch.device:
        """Of the weights."""

    @property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """All there are."""

    def pass_over(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """One pass, whatever its numbers are; see `Model`."""


def is_fit(capture: Capture, value: Tensor) -> bool:
    """Whether a captured activation or gradient holds what it may: finite numbers, of scores -inf as well.

    Args:
        capture: what it is of.
        value: of any shape, on any device.
    """
    if capture.point.kind in MASKED and not capture.is_gradient:
        value = value.masked_fill(value == -torch.inf, 0.0)
    return not value.is_floating_point() or is_finite(value)


def require_finite(
    model: PassMaker, rows: Sequence[Sequence[int]], spec: BoundSpec, captured: Mapping[Capture, Tensor]
) -> None:
    """Raise NotFinite unless every captured tensor holds what it may.

    Args:
        model: that made the pass.
        rows: token ids of its prompts.
        spec: the interventions it was made under.
        captured: what it gave.
    """
    for capture, value in captured.items():
        if not is_fit(capture, value):
            raise not_finite(model, [rows], spec, f"'{capture.name}'")


def not_finite(
    model: PassMaker,
    batches: Iterable[Sequence[Sequence[int]]],
    spec: BoundSpec,
    where: str,
    stored: str | None = None,
) -> NotFinite:
    """The error for numbers of a pass that are not finite: where they begin, and what helps.

    Args:
        model: that made the pass.
        batches: token ids of its prompts, those of a batch of one length.
        spec: the interventions it was made under.
        where: what holds such numbers, for the message: "the logits".
        stored: dtype in which they are stored: float16 is too narrow where the pass itself is finite.
    """
    with torch.no_grad():
        begun = next(
            ((rows, point) for rows in batches if (point := first_not_finite(model, rows, spec))), None
        )
        is_changed = bool(spec.interventions) and (
            begun is not None and first_not_finite(model, begun[0], BoundSpec()) is None
        )
    if begun is None and stored == "float16":
        return NotFinite(
            f"{where} of {model.name} exceeds float16's largest number (65504); store it with "
            "storage_dtype='bfloat16' or storage_dtype='float32' (--storage-dtype)"
        )
    largest = torch.finfo(model.dtype).max
    name = str(model.dtype).removeprefix("torch.")
    place = "" if begun is None else f", which begin at '{begun[1]}'"
    if is_changed:
        remedy = "it is an intervention that makes them: make its payload or factor smaller"
    elif model.dtype == torch.float16:
        remedy = "load the model with dtype='bfloat16' or dtype='float32' (--dtype)"
    elif model.dtype != torch.float64:
        remedy = "load the model with dtype='float64', or look for weights that are too large"
    else:
        remedy = "look for weights that are too large"
    return NotFinite(
        f"expected finite numbers in {where} of {model.name}, found NaN or infinity{place} ({name} ends at "
        f"{largest:.5g}); {remedy}"
    )


def first_not_finite(model: PassMaker, rows: Sequence[Sequence[int]], spec: BoundSpec) -> HookPoint | None:
    """The first hook point of a pass, as it is computed, whose values are not finite; None where all are.

    Args:
        model: to make the pass with.
        rows: token ids of prompts of one length.
        spec: the interventions to make it under.
    """
    found: list[HookPoint] = []

    def look(capture: Capture, value: Tensor) -> None:
        if not is_fit(capture, value):
            found.append(capture.point)
            raise EarlyStop

    points = [point for point in model.hook_points if not BY_NAME[point.kind].is_derived]
    every = replace(spec, captures=tuple(map(Capture, points)), keeps=(), objective=None)
    ids = torch.tensor([list(row) for row in rows], dtype=torch.long, device=model.device)
    logits = None
    with suppress(EarlyStop):
        logits = model.pass_over(ids, RunTaps(every, look), ALL_LOGITS, spec.order)
    if not found and logits is not None and not is_finite(logits):
        return HookPoint.logits()
    return found[0] if found else None
