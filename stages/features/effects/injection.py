"""Interventions that add features at chosen strengths: their decoder vectors are added where the dictionary
writes.

    hooks = injected(clt, [Injection("L14:13043", 10.0), Injection("L9:5488", -10.0)], positions=[7])
    mizarr.run(model, [mizarr.Run(prompt, hooks)])

An injection adds strength times the feature's decoder vector at every layer that it writes to, independently
of the feature's activation: strengths are absolute, decoder vectors are not normalised, negative strengths
suppress. Vectors for the same layer are summed in float32 and added at the dictionary's write hook. If that
hook point feeds the residual stream directly ("hook_mlp_out"), this equals adding to the layer's resid_post.

To clamp a feature, the difference between the target activation and its activation in a run without
interventions is added. Features of later layers then react as the model computes them.

Border: a dictionary and numbers in, a HookSpec out; the planner runs it.
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
from ..layers.layer import layers_text
from ..layers.layout import FeatureId

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Injection", "added", "added_at", "clamped", "injected", "written_norm"]


@dataclass(frozen=True)
class Injection:
    """A feature, and how many times its decoder vector is added."""

    feature: FeatureId | str
    """A FeatureId, or text such as "L14:13043"."""
    strength: float
    """Factor of the decoder vector; negative factors suppress."""
    from_layer: int | None = None
    """First layer to which the decoder vector is added; None: all layers that the feature writes to."""

    def __post_init__(self) -> None:
        if isinstance(self.feature, str):
            # The dataclass is frozen, so the parsed id is set past it.
            object.__setattr__(self, "feature", FeatureId.parse(self.feature))


def added(dictionary: Dictionary, injections: Iterable[Injection]) -> dict[int, Tensor]:
    """Sum of the vectors that injections add at each layer: float32 [d_out] by layer, ascending.

    Arguments:
        dictionary: The dictionary of the features.
        injections: Features with their strengths.

    Raises:
        DictionaryError: There is no such feature, or it writes to no layer from `from_layer` on.
    """
    sums: dict[int, Tensor] = {}
    for injection in injections:
        feature = dictionary.feature(injection.feature)
        targets = dictionary.targets(feature.layer)
        first_layer = targets[0] if injection.from_layer is None else injection.from_layer
        if not targets[0] <= first_layer <= targets[-1]:
            raise DictionaryError(
                f"expected the first layer for {feature} among those that it writes to, "
                f"{layers_text(targets)}, found layer {first_layer}"
            )
        for target in targets:
            if target >= first_layer:
                vector = injection.strength * dictionary.decoder_vector(feature, target)
                sums[target] = sums[target] + vector if target in sums else vector
    return dict(sorted(sums.items()))


@plain_torch()
def written_norm(dictionary: Dictionary, feature: FeatureId | str, from_layer: int | None = None) -> float:
    """Euclidean norm of a feature's decoder vectors for all layers, concatenated.

    Arguments:
        dictionary: The dictionary of the feature.
        feature: A FeatureId, or text such as "L14:13043".
        from_layer: First layer whose decoder vector counts; None: all layers that the feature writes to.

    Raises:
        DictionaryError: There is no such feature, or it writes to no layer from `from_layer` on.
    """
    vectors = added(dictionary, [Injection(feature, 1.0, from_layer)]).values()
    # float64: squares of float32 vectors of thousands of entries lose digits in a float32 sum.
    return math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors))


def injected(
    dictionary: Dictionary,
    injections: Sequence[Injection],
    positions: Sequence[int],
    *,
    heads: int | None = None,
) -> HookSpec:
    """Intervention that adds multiples of features' decoder vectors at some positions.

    Arguments:
        dictionary: The dictionary of the features.
        injections: Features and strengths.
        positions: Token positions; negative ones count from the end.
        heads: Number of attention heads of the model; required if features write to heads ("attn.hook_z").

    Raises:
        InterventionError: `injections` or `positions` is empty.
        DictionaryError: The dictionary has no such feature.
    """
    _require_some(injections, positions)
    indices = as_indices(positions, "positions", InterventionError)
    vectors = {
        layer: dict.fromkeys(indices, vector) for layer, vector in added(dictionary, injections).items()
    }
    return added_at(dictionary, vectors, heads)


def clamped(
    dictionary: Dictionary,
    values: Mapping[FeatureId | str, float],
    positions: Sequence[int],
    active: Active,
    *,
    heads: int | None = None,
) -> HookSpec:
    """Intervention that sets features to given activations at some positions; 0 switches a feature off.

    Arguments:
        dictionary: The dictionary of the features.
        values: Target activation of each feature.
        positions: Token positions, counted from 0.
        active: Active features of a run of the same prompt without interventions, from `Dictionary.encode`.
        heads: Number of attention heads of the model; required if features write to heads ("attn.hook_z").

    Raises:
        InterventionError: `values` or `positions` is empty, or a position is negative.
        DictionaryError: The dictionary has no such feature.
    """
    _require_some(values, positions)
    wrong = [position for position in positions if position < 0]
    if wrong:
        raise InterventionError(
            f"expected positions counted from 0 for clamping, found {wrong[0]}; positions from the end are "
            "not supported here"
        )
    rows: dict[int, dict[int, Tensor]] = {}
    for name, value in values.items():
        feature = FeatureId.parse(name) if isinstance(name, str) else name
        for position in positions:
            # Relative to the activation without interventions: earlier clamps may change it in this run.
            difference = value - _activation(active, feature, position)
            for layer, vector in added(dictionary, [Injection(feature, difference)]).items():
                vectors = rows.setdefault(layer, {})
                vectors[position] = vectors[position] + vector if position in vectors else vector
    return added_at(dictionary, dict(sorted(rows.items())), heads)


def _require_some(features: Sized, positions: Sequence[int]) -> None:
    """Raise InterventionError if there is no feature or no position."""
    if not len(features) or not len(positions):
        missing = "position" if len(features) else "feature"
        raise InterventionError(
            f"expected at least one feature and one position for the intervention, found no {missing}"
        )


def _activation(active: Active, feature: FeatureId, position: int) -> float:
    """Activation of a feature at a position; 0 if it is inactive there."""
    matches = (
        (active.layer == feature.layer) & (active.position == position) & (active.feature == feature.index)
    )
    return float(active.value[matches].sum())


def added_at(
    dictionary: Dictionary, rows: Mapping[int, Mapping[int, Tensor]], heads: int | None = None
) -> HookSpec:
    """Intervention that adds vectors at the hook points that a dictionary writes.

    Arguments:
        dictionary: The dictionary, which states the hook points.
        rows: Vector [d_out] by layer and position.
        heads: Number of attention heads of the model; required if features write to heads ("attn.hook_z").

    Raises:
        InterventionError: The number of heads is missing, or does not divide d_out.
    """
    spec = HookSpec()
    for layer, vectors in rows.items():
        point = dictionary.write_hook(layer)
        if point.dims[-1] != "d_head":
            spec = spec.intervene(point, AddAtPositions(list(vectors.items())))
            continue
        if heads is None or dictionary.d_out % heads:
            raise InterventionError(
                f"the features of {dictionary.name} write vectors of width {dictionary.d_out} to the "
                f"attention heads at '{point}', found heads={heads!r}; give the model's number of heads as "
                "heads="
            )
        for position, vector in vectors.items():
            # Hook z is [head, position, d_head]; a decoder row holds the heads side by side.
            spec = spec.intervene(point, Add(vector.reshape(heads, 1, -1), positions=(position,)))
    return spec
