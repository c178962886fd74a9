"""Features switched on and off by hand: what they write, added where they write it.

    hooks = injected(clt, [Injection("L14:13043", 10.0), Injection("L9:5488", -10.0)], positions=[7])
    mizarr.run(model, [mizarr.Run(prompt, hooks)])

An injection adds strength times the feature's decoder vector at every layer it writes to (of per-layer
dictionaries its own), whatever the feature's activation is: strengths are absolute, decoder vectors are not
normalised, negative strengths suppress. Vectors that meet at one layer are added up first, in float32, and
are added at the dictionary's write hook; where that is what goes into the residual stream ("hook_mlp_out"),
adding to the layer's resid_post is the same thing.

Border: a dictionary and numbers in, a HookSpec out; the run planner computes what such specs change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...store.errors import DictionaryError, InterventionError
from ..forward.hooks import HookSpec
from ..forward.interventions import AddAtPositions
from .dictionary import Dictionary, FeatureId, told

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Injection", "added", "injected"]


@dataclass(frozen=True)
class Injection:
    """A feature, and how many units of it are added.

    feature: a FeatureId, or "L14:13043". from_layer: write to this layer and later ones only; None: to all
    the feature writes to.
    """

    feature: FeatureId | str
    strength: float
    from_layer: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.feature, str):
            object.__setattr__(self, "feature", FeatureId.parse(self.feature))


def added(dictionary: Dictionary, injections: Iterable[Injection]) -> dict[int, Tensor]:
    """What injections add at each layer: layer -> float32 [d_out], layers ascending.

    Raises DictionaryError for a feature there is not, or a from_layer behind all it writes to.
    """
    sums: dict[int, Tensor] = {}
    for injection in injections:
        feature = dictionary.feature(injection.feature)
        targets = dictionary.targets(feature.layer)
        first = targets[0] if injection.from_layer is None else injection.from_layer
        if not targets[0] <= first <= targets[-1]:
            raise DictionaryError(f"{feature} writes to {told(targets)}, not from layer {first} on")
        for target in targets:
            if target >= first:
                vector = injection.strength * dictionary.decoder_vector(feature, target)
                sums[target] = sums[target] + vector if target in sums else vector
    return dict(sorted(sums.items()))


def injected(dictionary: Dictionary, injections: Sequence[Injection], positions: Sequence[int]) -> HookSpec:
    """A spec that adds injections at some positions (negative ones from the end).

    Raises InterventionError when there is nothing to add or nowhere to add it, DictionaryError for a feature
    there is not.
    """
    if not injections or not len(positions):
        what = "position" if injections else "feature"
        raise InterventionError(f"expected at least one {what} to inject at, found none")
    spec = HookSpec()
    for layer, vector in added(dictionary, injections).items():
        pairs = [(int(position), vector) for position in positions]
        spec.intervene(dictionary.write_hook(layer), AddAtPositions(pairs))
    return spec
