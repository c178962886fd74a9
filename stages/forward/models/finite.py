"""Detects NaN and infinity in the outputs of a pass, and finds the hook point where they begin.

The largest float16 is 65504, and real models have larger activations ("massive activations"): one infinity in
a layer turns everything after it into NaN. The outputs of a pass are checked when it returns. Only if one is
not finite, the pass runs once more with every hook point checked, to name the first.

Masked attention scores are -inf by definition, and allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ....store.errors import NotFinite
from ..architectures.points import BY_NAME, HookPoint
from ..hooks.spec import BoundSpec, Capture
from ..hooks.taps import EarlyStop, PassTaps, RunTaps
from ..hooks.wants import ALL_LOGITS, Logits
from ..networks.weights import is_finite

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["MASKED", "first_not_finite", "is_fit", "not_finite", "require_finite"]

MASKED = frozenset(("attn_scores", "scores", "cross_attn_scores", "cross_scores"))
"""Kinds of hook points whose values are -inf where the attention mask forbids attending."""


class PassMaker(Protocol):
    """The part of a `Model` that is needed to find where non-finite numbers begin."""

    name: str
    """Name of the model, for errors."""

    @property
    def config(self) -> Architecture:
        """Architecture of the model."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """All hook points, in execution order."""

    def tapped(
        self,
        ids: Tensor,
        taps: PassTaps,
        want: Logits | None,
        order: Sequence[int] | None = None,
        *,
        check_finite: bool = True,
    ) -> Tensor | None:
        """Run one forward pass; returns the wanted logits [batch, position, token], or None.

        Arguments:
            ids: token ids [batch, position].
            taps: called at every hook point, to capture or change the value there.
            want: logits to return; None for none.
            order: layers in execution order; None for each once.
            check_finite: whether logits with NaN or infinity are an error.
        """


def is_fit(capture: Capture, value: Tensor) -> bool:
    """Whether all numbers of a captured activation or gradient are finite; attention scores may be -inf.

    Arguments:
        capture: hook point of the value.
        value: tensor of any shape, on any device.
    """
    if capture.point.kind in MASKED and not capture.is_gradient:
        value = value.masked_fill(value == -torch.inf, 0.0)
    return not value.is_floating_point() or is_finite(value)


def require_finite(
    model: PassMaker, rows: Sequence[Sequence[int]], spec: BoundSpec, captured: Mapping[Capture, Tensor]
) -> None:
    """Raise NotFinite if a captured tensor has NaN or infinity; masked attention scores may be -inf.

    Arguments:
        model: model that ran the pass.
        rows: token ids of the prompts, [prompt][position].
        spec: interventions of the pass.
        captured: captured tensors of the pass.
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
    """Make the error for an output with NaN or infinity; it names the first hook point that has one.

    Arguments:
        model: model that ran the pass.
        batches: token ids of its prompts, [batch][prompt][position], of equal length within a batch.
        spec: interventions of the pass.
        where: words for the output that is not finite, e.g. "the logits".
        stored: dtype of the stored array; float16 can overflow even if the pass itself is finite. None for an
            output that is not stored.
    """
    # This pass is for the message only; the one it explains may have recorded gradients.
    with torch.no_grad():
        origin = next(
            ((rows, point) for rows in batches if (point := first_not_finite(model, rows, spec))), None
        )
        # The same prompts without interventions tell whether these are the cause.
        is_by_intervention = bool(spec.interventions) and (
            origin is not None and first_not_finite(model, origin[0], BoundSpec()) is None
        )
    if origin is None and stored == "float16":
        return NotFinite(
            f"{where} of {model.name} exceeds the largest float16 number (65504); store it with "
            "storage_dtype='bfloat16' or storage_dtype='float32' (--storage-dtype)"
        )
    largest = torch.finfo(model.dtype).max
    name = str(model.dtype).removeprefix("torch.")
    place = "" if origin is None else f", first at '{origin[1]}'"
    if is_by_intervention:
        remedy = "an intervention causes this: use a smaller tensor or factor in it"
    elif model.dtype == torch.float16:
        remedy = "load the model with dtype='bfloat16' or dtype='float32' (--dtype)"
    elif model.dtype != torch.float64:
        remedy = "load the model with dtype='float64', or look for weights that are too large"
    else:
        remedy = "look for weights that are too large"
    return NotFinite(
        f"expected finite numbers in {where} of {model.name}, found NaN or infinity{place} (the largest "
        f"number of {name} is {largest:.5g}); {remedy}"
    )


def first_not_finite(model: PassMaker, rows: Sequence[Sequence[int]], spec: BoundSpec) -> HookPoint | None:
    """The first hook point, in execution order, with NaN or infinity; None if all values are finite.

    Arguments:
        model: model that runs the pass.
        rows: token ids of prompts of one length.
        spec: interventions of the pass.
    """
    non_finite: list[HookPoint] = []

    def check(capture: Capture, value: Tensor) -> None:
        if not is_fit(capture, value):
            non_finite.append(capture.point)
            raise EarlyStop

    # No later operation reads a derived value, so non-finite numbers cannot spread from there.
    points = [point for point in model.hook_points if not BY_NAME[point.kind].is_derived]
    all_points = replace(spec, captures=tuple(map(Capture, points)), keeps=(), objective=None)
    ids = torch.tensor([list(row) for row in rows], dtype=torch.long, device=model.device)
    logits = None
    with suppress(EarlyStop):
        want = ALL_LOGITS.read(model.config, len(rows[0]))
        logits = model.tapped(ids, RunTaps(all_points, check), want, spec.order, check_finite=False)
    if not non_finite and logits is not None and not is_finite(logits):
        # Only the LM head is left, whose output no hook shows.
        return HookPoint.logits()
    return non_finite[0] if non_finite else None
