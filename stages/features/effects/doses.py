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
    """One feature of an exchange, added at strength `fixed + factor * strength of the run`."""

    layer: int
    index: int
    factor: float = 0.0
    fixed: float = 0.0
    from_layer: int | None = None
    """First layer that is written to; None: all layers the feature writes to."""
    like: str | None = None
    """Another feature ("L0:128"): the strength is scaled until both write the same norm, taken over all
    layers written to together. This makes a random feature a control of equal size."""

    def params(self) -> dict[str, Any]:
        """The fields as plain values, for the key."""
        return dict(vars(self))

    def at(self, strength: float, dictionary: Dictionary) -> Injection:
        """The injection at one strength. Raises InterventionError for a feature of norm 0 that is to be
        scaled."""
        feature, amount = FeatureId(self.layer, self.index), self.fixed + self.factor * strength
        if self.like is not None:
            own = written_norm(dictionary, feature, self.from_layer)
            if own == 0:
                raise InterventionError(
                    f"expected {feature} to write as much as {self.like}, found that it writes nothing; "
                    "draw others: another seed"
                )
            amount *= written_norm(dictionary, self.like, self.from_layer) / own
        return Injection(feature, amount, self.from_layer)


def random_like(
    dose: Dose, count: int, n_features: int, *, seed: int, without: Sequence[Dose] = ()
) -> list[Dose]:
    """The same dose of other features of the layer, drawn at random and scaled to write the same norm.

    n_features: number of features of the layer. without: doses whose features are not drawn either. Returns
    fewer than `count` where the layer has fewer.
    """
    taken = [other.index for other in (dose, *without) if other.layer == dose.layer]
    drawn = chosen_at_random(range(n_features), count, seed=seed, without=taken)
    return [replace(dose, index=index, like=str(FeatureId(dose.layer, dose.index))) for index in drawn]


def in_place_of(doses: Sequence[Dose], n_features: int, *, seed: int) -> list[Dose]:
    """Doses with every feature replaced by a random one of its layer, none of `doses` itself.

    A feature that is dosed twice is replaced by one feature. Raises InterventionError where a layer has too
    few.
    """
    replacements: dict[tuple[int, int], int] = {}
    for layer in dict.fromkeys(dose.layer for dose in doses):
        own = list(dict.fromkeys(dose.index for dose in doses if dose.layer == layer))
        if 2 * len(own) > n_features:
            raise InterventionError(
                f"expected {len(own)} other features of layer {layer} to draw, found {n_features - len(own)}"
            )
        drawn = chosen_at_random(range(n_features), len(own), seed=seed, without=own)
        replacements |= {(layer, index): other for index, other in zip(own, drawn, strict=True)}
    return [
        replace(dose, index=replacements[dose.layer, dose.index], like=str(FeatureId(dose.layer, dose.index)))
        for dose in doses
    ]
