"""Absorption: does a state that was pushed from its way come back to it, and stay?

A push is followed at one position, layer by layer, by its distance from the undisturbed run,

    d[o] = 1 - cos(undisturbed_o, pushed_o),

half the squared angle for small ones. Four things are said of it, in this order:

reached: a change at (layer l, position p) can be seen at the position read, at the first layer that lets it
through (`first_reached`). A causal model looks back only, as far as its windows go, and behind its last layer
not at all. What cannot be reached gives no verdict.

away: the largest d from there on is at least AWAY of the push's own distance, which is that of the pushed
state, at its position, right after the push. What was never away cannot come back.

absorbed at layer o: the first one behind the largest d from which on d stays at most RETURNED of it, to the
end. Being near for a layer is not enough, nor is never having been far.

attractor: pushes of all layers and strengths that were away are absorbed, and less of their distance is left
at the end than of pushes as long in random directions.

These definitions and both thresholds are ours. Related: later layers make up for ablated attention, called
self-repair (McGrath et al. 2023, "The Hydra Effect", arXiv:2307.15771); small changes of a state hardly
change the output, and random directions of the same size are what others are held against (Heimersheim and
Mendel 2024, "Activation plateaus and sensitive directions in GPT2", a research report); regions in which the
output stays the same, found by interpolation between states (Janiak et al. 2024, arXiv:2409.17113). The word
is from dynamics, where an attractor draws in whatever starts near it (Strogatz 1994, "Nonlinear Dynamics and
Chaos", section 9.3); a network of so many layers has no limit, so here it is a figure of speech.

Border: cosines in, words and shares out; which pushes were made, the experiments know.

Axes: layer (where it is pushed), strength, read_layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...store.arrays import Array
from ..forward.architectures.points import HookPoint

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["AWAY", "RETURNED", "Fate", "Word", "fate", "fates", "first_reached", "label", "share_left"]

AWAY = 0.1
"""Share of the push's own distance that the state read must have gone."""
RETURNED = 0.25
"""Share of its largest distance at which a state is back: half the angle."""
_ROUNDING = 1e-7
"""Distance that float32 cannot tell from none."""

Word = Literal["out of reach", "nothing follows", "never away", "absorbed", "not absorbed"]
VERDICTS: tuple[Word, ...] = ("absorbed", "not absorbed")
"""What is said of a push that was away and had a layer to come back in; the others are no verdict."""


@dataclass(frozen=True)
class Fate:
    """What became of one push.

    word: see the module. layer: where it was absorbed, else None. left: share of its largest distance that is
    left at the end, 0 to 1; NaN without a verdict.
    """

    word: Word
    layer: int | None = None
    left: float = float("nan")

    @property
    def is_verdict(self) -> bool:
        """Whether it was away, and could have come back."""
        return self.word in VERDICTS


def first_reached(config: Architecture, layer: int, position: int, read: int) -> int | None:
    """The first layer after which a push of resid_post at (layer, position) may be seen at `read`; None where
    it never is."""
    if position == read:
        return layer
    furthest = position
    for later in range(layer + 1, config.num_layers):
        reach = config.reach(HookPoint.resid_post(later - 1))
        if reach == "all":
            return later
        if reach == "later":
            window = config.layers[later].mixer.window
            furthest = read if window is None else furthest + window - 1
            if position < read <= furthest:
                return later
    return None


def fate(similarity: Array, pushed: float, first: int | None) -> Fate:
    """What became of a push.

    similarity: cosines with the undisturbed run, [read_layer]. pushed: cosine of the pushed state with what
    it was, at its own position. first: the layer after which it may be seen (`first_reached`).

    >>> fate(np.array([1.0, 0.5, 0.8, 0.97, 0.96]), 0.5, 1)
    Fate(word='absorbed', layer=3, left=0.08000000000000007)
    >>> fate(np.array([0.952, 0.959, 0.958, 0.951, 0.936, 0.910]), 0.952, 0).word
    'not absorbed'
    """
    if first is None:
        return Fate("out of reach")
    distance = np.maximum(1.0 - np.asarray(similarity, np.float64), 0.0)[first:]
    largest = float(distance.max())
    if largest < max(AWAY * (1.0 - pushed), _ROUNDING):
        return Fate("never away")
    if len(distance) == 1:
        return Fate("nothing follows")
    far = np.flatnonzero(distance > RETURNED * largest)
    back, left = int(far[-1]) + 1, float(distance[-1]) / largest
    return Fate("absorbed", first + back, left) if back < len(distance) else Fate("not absorbed", None, left)


def fates(
    similarity: xr.DataArray, pushed: xr.DataArray, first: Mapping[int, int | None]
) -> dict[tuple[int, float], Fate]:
    """What became of every push, by (layer, strength).

    similarity: [layer, strength, read_layer]. pushed: [layer, strength]. first: by layer. See `fate`.
    """
    rows = similarity.transpose("layer", "strength", "read_layer").values
    own = pushed.transpose("layer", "strength").values
    return {
        (layer, strength): fate(rows[i, j], float(own[i, j]), first[layer])
        for i, layer in enumerate(similarity["layer"].values.tolist())
        for j, strength in enumerate(similarity["strength"].values.tolist())
    }


def share_left(fates: Collection[Fate]) -> float:
    """Mean share of their largest distance that is left of pushes at the end; NaN if none has a verdict."""
    left = [each.left for each in fates if each.is_verdict]
    return float(np.mean(left)) if left else float("nan")


def label(fates: Collection[Fate], *, is_beyond_chance: bool) -> str:
    """Two words for pushes of several layers and strengths; see the module for "attractor".

    is_beyond_chance: whether less is left of them than of random ones. Where some are absorbed and some are
    not, it depends on the depth or the strength.
    """
    words = {each.word for each in fates if each.is_verdict}
    if not words:
        return "no verdict"
    if words == {"absorbed"}:
        return "attractor" if is_beyond_chance else "absorbed like any push"
    return "not absorbed" if words == {"not absorbed"} else "depth-dependent"
