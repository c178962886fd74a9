"""Doses: how strongly each feature of an exchange is added or taken away, and random features as controls.

Units: strengths are multiples of a feature's decoder vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....store.errors import InterventionError
from ...causal.controls import chosen_at_random
from ..dictionary import Dictionary
from ..layers.layout import FeatureId
from .injection import Injection, written_norm

__all__ = ["Dose", "in_place_of", "random_like"]


@dataclass(frozen=True)
class Dose:
    """How strongly an intervention adds one feature: `fixed + factor * strength of the run`."""

    layer: int
    """Layer of the feature."""
    index: int
    """Index of the feature within its layer."""
    factor: float = 0.0
    """Factor by which the strength of the run is multiplied."""
    fixed: float = 0.0
    """Constant part of the strength, in units of the decoder vector."""
    from_layer: int | None = None
    """First layer to which the decoder vector is added; None: all layers that the feature writes to."""
    like: str | None = None
    """Name of another feature ("L0:128"), or None. The strength is scaled so that this feature writes vectors
    of the same norm (over all layers together) as that one: a control of equal size."""

    def params(self) -> dict[str, Any]:
        """The fields as plain values, for the key."""
        return dict(vars(self))

    def at(self, strength: float, dictionary: Dictionary) -> Injection:
        """The feature with its amount, for a run of some strength.

        Arguments:
            strength: Strength of the run.
            dictionary: The dictionary, whose decoder norms scale the amount if `like` is set.

        Raises:
            InterventionError: A feature that writes nothing must be scaled.
        """
        feature, amount = FeatureId(self.layer, self.index), self.fixed + self.factor * strength
        if self.like is not None:
            norm = written_norm(dictionary, feature, self.from_layer)
            if norm == 0:
                raise InterventionError(
                    f"expected the random feature {feature} to write vectors of the norm of {self.like}, "
                    "found that its decoder vectors are zero; choose another seed to draw other features"
                )
            # Both norms over the layers that are written in this exchange.
            amount *= written_norm(dictionary, self.like, self.from_layer) / norm
        return Injection(feature, amount, self.from_layer)


def random_like(
    dose: Dose, count: int, n_features: int, *, seed: int, without: Sequence[Dose] = ()
) -> list[Dose]:
    """Doses of random features as controls: same layer as `dose`, scaled to write vectors of equal norm.

    Arguments:
        dose: The dose for which controls are drawn; its feature is not drawn.
        count: Number of features to draw.
        n_features: Number of features of the layer.
        seed: Seed of the draw.
        without: Further doses whose features are not drawn.

    Returns:
        One dose per drawn feature; fewer than `count` if the layer has not enough features.
    """
    excluded = [other.index for other in (dose, *without) if other.layer == dose.layer]
    drawn = chosen_at_random(range(n_features), count, seed=seed, without=excluded)
    return [replace(dose, index=index, like=str(FeatureId(dose.layer, dose.index))) for index in drawn]


def in_place_of(doses: Sequence[Dose], n_features: int, *, seed: int) -> list[Dose]:
    """Control for an intervention: doses with every feature replaced by a random feature of its layer.

    The random features write vectors of the same norms. Features of `doses` are never drawn. Several doses of
    a feature get the same replacement.

    Arguments:
        doses: Doses of the intervention.
        n_features: Number of features per layer.
        seed: Seed of the draw.

    Raises:
        InterventionError: A layer has too few other features.
    """
    replacements: dict[tuple[int, int], int] = {}
    for layer in dict.fromkeys(dose.layer for dose in doses):
        indices = list(dict.fromkeys(dose.index for dose in doses if dose.layer == layer))
        # As many other features must remain as are replaced.
        if 2 * len(indices) > n_features:
            raise InterventionError(
                f"expected at least {len(indices)} other features in layer {layer} to draw random ones from, "
                f"found {n_features - len(indices)}; use a dictionary with more features"
            )
        drawn = chosen_at_random(range(n_features), len(indices), seed=seed, without=indices)
        replacements |= {
            (layer, index): replacement for index, replacement in zip(indices, drawn, strict=True)
        }
    return [
        replace(dose, index=replacements[dose.layer, dose.index], like=str(FeatureId(dose.layer, dose.index)))
        for dose in doses
    ]
