"""Absorption: whether a perturbed residual state returns to the unperturbed trajectory and stays there.

A vector is added to resid_post of one layer and position (a push). The perturbed run is followed at one read
position, layer by layer, by its cosine distance from the unperturbed run,

    d[o] = 1 - cos(unperturbed_o, perturbed_o),

which is half the squared angle for small angles. `fate` decides, in this order:

out of reach: no layer lets the change at (layer, position) reach the read position (`first_reached`): a
causal model attends backwards only, a sliding window limits how far, and nothing follows the last layer.

never away: the largest d from the first reached layer on is below AWAY times the distance of the push itself,
which is d at the pushed position right after the addition. A state that never left cannot return.

absorbed at layer o: the first layer behind the maximum of d from which on d stays at most RETURNED of that
maximum, up to the last layer. Being near for one layer is not enough.

attractor (`label`): the pushes of all layers and strengths that went away are absorbed, and a smaller share
of their distance remains at the end than for random directions of equal norm.

These definitions and both thresholds are of this project. Related: later layers compensate for ablated
attention, called self-repair (McGrath et al. 2023, "The Hydra Effect", arXiv:2307.15771); small perturbations
of a state hardly change the output, with random directions of equal size as the baseline (Heimersheim and
Mendel 2024, "Activation plateaus and sensitive directions in GPT2"); regions of constant output found by
interpolation between states (Janiak et al. 2024, arXiv:2409.17113). "Attractor" is borrowed from dynamical
systems (Strogatz 1994, "Nonlinear Dynamics and Chaos", section 9.3); a network of finite depth has no limit,
so it is a figure of speech here.

Border: cosines in, verdicts and shares out; experiments decide which pushes are made.

Axes: layer (where the vector is added), strength, read_layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....store.arrays import Array
from ...forward.architectures.points import HookPoint

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture

__all__ = ["AWAY", "RETURNED", "Fate", "Word", "fate", "fates", "first_reached", "label", "share_left"]

AWAY = 0.1
"""A push went away if the largest distance is at least this share of the push's own distance."""
RETURNED = 0.25
"""Share of the largest distance below which a state has returned; 0.25 of it is half the angle."""
_ROUNDING = 1e-7
"""Cosine distance below which float32 states cannot be told apart."""

Word = Literal["out of reach", "nothing follows", "never away", "absorbed", "not absorbed"]
VERDICTS: tuple[Word, ...] = ("absorbed", "not absorbed")
"""Outcomes of pushes that went away and had a later layer to return in; the other words are no verdict."""


@dataclass(frozen=True)
class Fate:
    """Outcome of one push: whether the pushed state returned to the undisturbed trajectory."""

    word: Word
    """The outcome, one of `Word`; the module's docstring defines them."""
    layer: int | None = None
    """Layer at which the push was absorbed; None unless `word` is "absorbed"."""
    left: float = float("nan")
    """Distance at the last layer divided by the largest distance, 0 to 1; NaN without a verdict."""

    @property
    def is_verdict(self) -> bool:
        """Whether the state moved away and could return in a later layer, as `left` needs."""
        return self.word in VERDICTS


def first_reached(config: Architecture, layer: int, position: int, read: int) -> int | None:
    """First layer whose resid_post at the read position can depend on a change at another position.

    Arguments:
        config: Architecture of the model.
        layer: Layer whose resid_post is changed.
        position: Position of the change.
        read: Position at which states are compared.

    Returns:
        The layer; None if the change never reaches the read position, because sliding windows are too short
        or `read` precedes `position` in a causal model.
    """
    if position == read:
        return layer
    furthest = position
    for deeper in range(layer + 1, config.num_layers):
        # What layer `deeper` lets through is read from the hook point before it.
        reach = config.reach(HookPoint.resid_post(deeper - 1))
        if reach == "all":
            return deeper
        if reach == "later":
            window = config.layers[deeper].mixer.window
            # A window of w positions, the query's own included, moves information w - 1 positions per layer.
            furthest = read if window is None else furthest + window - 1
            if position < read <= furthest:
                return deeper
    return None


def fate(similarity: Array, pushed: float, first: int | None) -> Fate:
    """Outcome of one push, from cosines of the perturbed with the unperturbed states.

    Arguments:
        similarity: Cosines at the read position after each layer [read_layer].
        pushed: Cosine at the pushed position, of the state right after the push with the state before.
        first: First layer whose state can differ, from `first_reached`; None if there is none.

    >>> fate(np.array([1.0, 0.5, 0.8, 0.97, 0.96]), 0.5, 1)
    Fate(word='absorbed', layer=3, left=0.08000000000000007)
    >>> fate(np.array([0.952, 0.959, 0.958, 0.951, 0.936, 0.910]), 0.952, 0).word
    'not absorbed'
    """
    if first is None:
        return Fate("out of reach")
    # float64, and clipped at 0: cosines of nearly equal float32 states exceed 1 by rounding.
    distance = np.maximum(1.0 - np.asarray(similarity, np.float64), 0.0)[first:]
    largest = float(distance.max())
    # _ROUNDING: a push of almost no distance would otherwise count float32 noise as movement.
    if largest < max(AWAY * (1.0 - pushed), _ROUNDING):
        return Fate("never away")
    if len(distance) == 1:
        return Fate("nothing follows")
    far = np.flatnonzero(distance > RETURNED * largest)
    # The maximum itself exceeds RETURNED of it, so `far` is never empty.
    back, left = int(far[-1]) + 1, float(distance[-1]) / largest
    return Fate("absorbed", first + back, left) if back < len(distance) else Fate("not absorbed", None, left)


def fates(
    similarity: xr.DataArray, pushed: xr.DataArray, first: Mapping[int, int | None]
) -> dict[tuple[int, float], Fate]:
    """Outcomes of the pushes of several layers and strengths, by (layer, strength).

    Arguments:
        similarity: Cosines at the read position, [layer, strength, read_layer]; see `fate`.
        pushed: Cosines at the pushed position, [layer, strength]; see `fate`.
        first: For every pushed layer, the first layer whose state can differ (`first_reached`).
    """
    rows = similarity.transpose("layer", "strength", "read_layer").values
    pushed_cosines = pushed.transpose("layer", "strength").values
    return {
        (layer, strength): fate(rows[i, j], float(pushed_cosines[i, j]), first[layer])
        for i, layer in enumerate(similarity["layer"].values.tolist())
        for j, strength in enumerate(similarity["strength"].values.tolist())
    }


def share_left(fates: Collection[Fate]) -> float:
    """Mean share of the largest distance that remains at the last layer; NaN without a verdict."""
    shares = [outcome.left for outcome in fates if outcome.is_verdict]
    return float(np.mean(shares)) if shares else float("nan")


def label(fates: Collection[Fate], *, is_beyond_chance: bool) -> str:
    """One word for the outcomes of pushes of several layers and strengths.

    Arguments:
        fates: Outcomes of the pushes.
        is_beyond_chance: Whether significantly less of the distance remains than after random pushes.

    Returns:
        "no verdict", "attractor", "absorbed like any push" (all absorbed, but random pushes are as well),
        "not absorbed", or "depth-dependent" (some absorbed, some not).
    """
    words = {outcome.word for outcome in fates if outcome.is_verdict}
    if not words:
        return "no verdict"
    if words == {"absorbed"}:
        return "attractor" if is_beyond_chance else "absorbed like any push"
    return "not absorbed" if words == {"not absorbed"} else "depth-dependent"
