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
    """Strength of one feature of an exchange: `fixed + factor * strength of the run`."""

    layer: int
    """Layer of the feature."""
    index: int
    """Index of the feature within its layer."""
    factor: float = 0.0
    """Multiplier of the run's strength."""
    fixed: float = 0.0
    """Constant part of the strength, in units of the decoder vector."""
    from_layer: int | None = None
    """First layer that is written to; None: all layers the feature writes to."""
    like: str | None = None
    """Another feature ("L0:128"): the strength is scaled until both write the same norm, taken over all
    layers written to together. This makes a random feature a control of equal size."""

    def params(self) -> dict[str, Any]:
        """The fields as plain values, for the key."""
        return dict(vars(self))

    def at(self, strength: float, dictionary: Dictionary) -> Injection:
        """The injection at one strength of the run.

        Arguments:
            strength: Strength of the run.
            dictionary: The dictionary, whose decoder norms scale a dose with `like`.

        Raises:
            InterventionError: A feature that writes nothing must be scaled.
        """
        feature, amount = FeatureId(self.layer, self.index), self.fixed + self.factor * strength
        if self.like is not None:
            norm = written_norm(dictionary, feature, self.from_layer)
            if norm == 0:
                raise InterventionError(
                    f"expected {feature} to write as much as {self.like}, found that it writes nothing; "
                    "draw others: another seed"
                )
            # Both norms over the layers that are written in this exchange.
            amount *= written_norm(dictionary, self.like, self.from_layer) / norm
        return Injection(feature, amount, self.from_layer)


def random_like(
    dose: Dose, count: int, n_features: int, *, seed: int, without: Sequence[Dose] = ()
) -> list[Dose]:
    """The same dose of random features of the layer, scaled to write vectors of the same norm.

    Arguments:
        dose: The dose to imitate.
        count: Number of features to draw.
        n_features: Number of features of the layer.
        seed: Seed of the draw.
        without: Doses whose features are not drawn either.

    Returns:
        Fewer than `count` doses if the layer has fewer features.
    """
    excluded = [skipped.index for skipped in (dose, *without) if skipped.layer == dose.layer]
    drawn = chosen_at_random(range(n_features), count, seed=seed, without=excluded)
    return [replace(dose, index=index, like=str(FeatureId(dose.layer, dose.index))) for index in drawn]


def in_place_of(doses: Sequence[Dose], n_features: int, *, seed: int) -> list[Dose]:
    """Doses in which random features of the same layer replace all features.

    Features of `doses` are never drawn. Several doses of a feature get the same replacement.

    Arguments:
        doses: Doses of one exchange.
        n_features: Number of features per layer.
        seed: Seed of the draw.

    Raises:
        InterventionError: A layer has too few features.
    """
    replacements: dict[tuple[int, int], int] = {}
    for layer in dict.fromkeys(dose.layer for dose in doses):
        indices = list(dict.fromkeys(dose.index for dose in doses if dose.layer == layer))
        # As many other features must remain as are replaced.
        if 2 * len(indices) > n_features:
            raise InterventionError(
                f"expected {len(indices)} other features of layer {layer} to draw, found "
                f"{n_features - len(indices)}"
            )
        drawn = chosen_at_random(range(n_features), len(indices), seed=seed, without=indices)
        replacements |= {
            (layer, index): replacement for index, replacement in zip(indices, drawn, strict=True)
        }
    return [
        replace(dose, index=replacements[dose.layer, dose.index], like=str(FeatureId(dose.layer, dose.index)))
        for dose in doses
    ]
