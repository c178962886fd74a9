"""Features switched on and off by hand: what they write, added where they write it.

    hooks = injected(clt, [Injection("L14:13043", 10.0), Injection("L9:5488", -10.0)], positions=[7])
    mizarr.run(model, [mizarr.Run(prompt, hooks)])

An injection adds strength times the feature's decoder vector at every layer it writes to (of per-layer
dictionaries its own), whatever the feature's activation is: strengths are absolute, decoder vectors are not
normalised, negative strengths suppress. Vectors that meet at one layer are added up first, in float32, and
are added at the dictionary's write hook; where that is what goes into the residual stream ("hook_mlp_out"),
adding to the layer's resid_post is the same thing.

A feature is clamped by adding what is missing to the activation asked for, from the one it had in a run
without interventions; what features of later layers then do is the model's.

Border: a dictionary and numbers in, a HookSpec out; the run planner computes what such specs change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....pipeline.ambient import plain_torch
from ....store.arrays import as_indices
from ....store.errors import DictionaryError, InterventionError
from ...forward.hooks.interventions import Add, AddAtPositions
from ...forward.hooks.spec import HookSpec
from ..dictionary import Dictionary
from ..layers.active import Active
from ..layers.layout import FeatureId, layers_text

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Injection", "added", "added_at", "clamped", "injected", "written_norm"]


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
            raise DictionaryError(f"{feature} writes to {layers_text(targets)}, not from layer {first} on")
        for target in targets:
            if target >= first:
                vector = injection.strength * dictionary.decoder_vector(feature, target)
                sums[target] = sums[target] + vector if target in sums else vector
    return dict(sorted(sums.items()))


@plain_torch()
def written_norm(dictionary: Dictionary, feature: FeatureId | str, from_layer: int | None = None) -> float:
    """Norm of what a unit of a feature writes, to all its layers together, or to those from one on.

    Raises DictionaryError as `added`.
    """
    vectors = added(dictionary, [Injection(feature, 1.0, from_layer)]).values()
    return math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors))


def injected(
    dictionary: Dictionary,
    injections: Sequence[Injection],
    positions: Sequence[int],
    *,
    heads: int | None = None,
) -> HookSpec:
    """A spec that adds injections at some positions (negative ones from the end).

    heads: of the model; needed where features write to heads side by side ("attn.hook_z").
    Raises InterventionError when there is nothing to add or nowhere to add it, DictionaryError for a feature
    there is not.
    """
    _require_some(injections, positions)
    rows = {
        layer: dict.fromkeys(as_indices(positions, "positions", InterventionError), vector)
        for layer, vector in added(dictionary, injections).items()
    }
    return added_at(dictionary, rows, heads)


def clamped(
    dictionary: Dictionary,
    values: Mapping[FeatureId | str, float],
    positions: Sequence[int],
    active: Active,
    *,
    heads: int | None = None,
) -> HookSpec:
    """A spec that brings features to given activations at some positions; 0 switches them off.

    values: feature -> activation. positions: counted from 0. active: what is active in a run of the same
    prompt without interventions, as `Dictionary.encode` gives it. heads: see `injected`.
    Raises InterventionError when there is nothing to clamp or a position counts from the end, DictionaryError
    for a feature there is not.
    """
    _require_some(values, positions)
    wrong = [position for position in positions if position < 0]
    if wrong:
        raise InterventionError(
            f"expected positions counted from 0, as those of activations are, found {wrong[0]}"
        )
    rows: dict[int, dict[int, Tensor]] = {}
    for name, value in values.items():
        feature = FeatureId.parse(name) if isinstance(name, str) else name
        for position in positions:
            missing = value - _activation(active, feature, position)
            for layer, vector in added(dictionary, [Injection(feature, missing)]).items():
                here = rows.setdefault(layer, {})
                here[position] = here[position] + vector if position in here else vector
    return added_at(dictionary, dict(sorted(rows.items())), heads)


def _require_some(features: Sized, positions: Sequence[int]) -> None:
    if not len(features) or not len(positions):
        what = "position" if len(features) else "feature"
        raise InterventionError(f"expected at least one {what} to inject at, found none")


def _activation(active: Active, feature: FeatureId, position: int) -> float:
    """A feature's activation at a position; 0 where it is not active."""
    here = (active.layer == feature.layer) & (active.position == position) & (active.feature == feature.index)
    return float(active.value[here].sum())


def added_at(
    dictionary: Dictionary, rows: Mapping[int, Mapping[int, Tensor]], heads: int | None = None
) -> HookSpec:
    """A spec that adds vectors [d_out], by layer and position, where the dictionary writes. heads: see
    `injected`."""
    spec = HookSpec()
    for layer, vectors in rows.items():
        point = dictionary.write_hook(layer)
        if point.dims[-1] != "d_head":
            spec = spec.intervene(point, AddAtPositions(list(vectors.items())))
            continue
        if heads is None or dictionary.d_out % heads:
            raise InterventionError(
                f"features write {dictionary.d_out} numbers to the heads at '{point}'; pass heads= their "
                f"number in the model, found {heads!r}"
            )
        for position, vector in vectors.items():
            spec = spec.intervene(point, Add(vector.reshape(heads, 1, -1), positions=(position,)))
    return spec
