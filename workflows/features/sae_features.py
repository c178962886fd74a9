"""Which features of a sparse autoencoder are active in a prompt, and how much variance do they explain?

Runs the prompt once, encodes the activations at the autoencoder's hook point, and lists the strongest
features of one position, with the reconstruction error over all positions
(stages/features/effects/activity.py). Works for transcoders too; of a dictionary with several layers one is
shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.corpus.positions import position_of
from ...stages.features.effects.activity import FeatureActivity
from ...stages.features.layers.layout import FeatureId
from ...store.errors import PromptError
from ..labelled import labelled
from ..material.answers import fact
from ..material.feature_labels import FeatureLabels, active_words
from ..settings import Count, Natural, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes
from .prompt_features import PromptFeaturesSettings, PromptFeaturesWorkflow

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["SaeFeatures", "SaeFeaturesSettings"]


@dataclass(frozen=True)
class SaeFeaturesSettings(PromptFeaturesSettings):
    """Settings of the workflow `sae_features`: the autoencoder, the prompt and the position."""

    dictionary: str = setting("", "autoencoder: directory or org/repo; none: specimen/sae")
    layer: int | None = setting(None, "layer of a dictionary with several layers; none: the middle one")
    top_k: Count = setting(10, "number of features listed")
    zero_positions: Natural = setting(
        0, "number of first positions without features; they are left out of the error too"
    )


class SaeFeatures(PromptFeaturesWorkflow):
    """Workflow that shows which features of a sparse autoencoder are active in one prompt, and its
    reconstruction error."""

    name = "sae_features"
    question = (
        "Which features of a sparse autoencoder are active in a prompt, and how much variance do they "
        "explain?"
    )
    descriptive = "Features of a sparse autoencoder active in a prompt, and how well they reconstruct it."
    settings_type = SaeFeaturesSettings
    settings: SaeFeaturesSettings
    shipped = "sae"

    def plan(self) -> Nodes:
        """Nodes of the active features of the prompt and of their labels.

        Raises:
            ConfigError: without a dictionary for a model other than the specimen.
            PromptError: where `zero_positions` leaves no token of the prompt.
        """
        settings = self.settings
        self.read_prompt(fact(settings.model, settings.prompt, "")[0])
        layers = self.dictionary.layers
        self.layer = layers[len(layers) // 2] if settings.layer is None else settings.layer
        # `read_hook` raises for a layer that the dictionary does not have.
        self.hook = str(self.dictionary.read_hook(self.layer))
        self.position = position_of(self.encoding, settings.position)
        if settings.zero_positions >= len(self.encoding.ids):
            raise PromptError(
                f"expected a prompt of more than {settings.zero_positions} tokens, as zero_positions leaves "
                f"out that many first positions, found {len(self.encoding.ids)}; use a longer prompt or "
                "lower zero_positions"
            )
        names = self.dictionary.name, self.dictionary.identity
        activity = self.on_model(FeatureActivity(tuple(self.encoding.ids), *names, settings.zero_positions))
        words = active_words(self.subject, self.dictionary, activity, most=settings.top_k)
        return {"activity": activity, **words}

    @cached_property
    def activity(self) -> xr.Dataset:
        """Active features of the selected layer with their positions and activations, [active]."""
        activity = self.result("activity").load()
        return activity.isel(active=activity["active_layer"].values == self.layer).sel(layer=self.layer)

    @cached_property
    def labels(self) -> FeatureLabels:
        """Labels of the prompt's most active features."""
        return self.active_labels(self.activity)

    def top(self, position: int) -> list[dict[str, Any]]:
        """The `top_k` strongest features of a position, largest activation first, then by index: records with
        layer, index, label, activation and decoder_norm."""
        at_position = self.activity.isel(active=self.activity["active_position"].values == position)
        value = at_position["activation"].values
        # `lexsort` sorts by its last key first.
        order = np.lexsort((at_position["active_feature"].values, -value))[: self.settings.top_k]
        return [
            {
                **self.labels.json(FeatureId(self.layer, int(at_position["active_feature"][i]))),
                "activation": float(value[i]),
                "decoder_norm": float(at_position["decoder_norm"][i]),
            }
            for i in order.tolist()
        ]

    def views(self) -> Iterator[View]:
        """Views in reading order: the strongest features of the position, and activations of features by
        token."""
        activity, names, n_skipped = self.activity, self.tokens, self.settings.zero_positions
        read = activity.isel(position=slice(n_skipped, None))
        where = f"positions from {n_skipped} on" if n_skipped else "all positions"
        counts = np.bincount(activity["active_position"].values, minlength=len(names))
        positions = [
            {"position": i, "token": token, "active": counts[i], "top": self.top(i)}
            for i, token in enumerate(names)
        ]
        about: dict[str, Any] = {
            "model_id": self.subject.files.name,
            "dictionary": self.dictionary.name,
            "hook": self.hook,
            "prompt": self.prompt,
            "position": self.position,
            "mse": float(read["error"].mean()),
            # Sums before the ratio: 1 - R2 over all positions together, not a mean of ratios of single
            # positions.
            "fraction_of_variance_unexplained": float(read["error"].sum() / read["size"].sum()),
        }
        yield Data(json=about)
        yield Table.of(
            positions[self.position]["top"],
            ("feature", lambda row: FeatureId(row["layer"], row["index"]), str),
            ("label", "label"),
            ("activation", "activation", ".4f"),
            ("norm of decoder", "decoder_norm", ".4f"),
            title=f"Features of {self.dictionary.name} active at {self.hook} of {self.subject.name}: "
            f"{self.at_position(self.position)}",
            caption="One row per feature, largest activation first. Label: writes, the token whose logit it "
            "raises most; fires on, the token of the prompt with its largest activation. "
            f"{counts[self.position]} features are active at this token, {counts[n_skipped:].mean():.1f} per "
            f"token on average. Reconstruction of the activations over {where}: mean squared error "
            f"{about['mse']:.4g}; {100 * about['fraction_of_variance_unexplained']:.1f} % of their variance "
            "is not explained.",
            json={"positions": positions},
        )
        # The first token, an attention sink, would fill the rows with features of its own.
        shown_positions = positions[1:] or positions
        grid = Heatmap.of(
            self._grid({row["index"] for position in shown_positions for row in position["top"][:3]}),
            "Activations of the strongest features, by token",
            "Each cell: activation of one feature (row) at one token (column). Features shown are among the "
            "three strongest of any token but the first, which is an attention sink. They are ordered by the "
            "token of their largest activation.",
            low=0.0,
        ).without_first_token()
        title = f"Features active at {self.hook} of {self.subject.name}"
        yield from together("sae_features", title, grid, caption=grid.caption)

    def _grid(self, feature_ids: set[int]) -> xr.DataArray:
        """Activations of the features, float32 [feature, token], 0 where inactive; rows ordered by the
        position of their largest activation."""
        activity, features = self.activity, np.array(sorted(feature_ids), np.int64)
        values = np.zeros((len(features), len(self.tokens)), np.float32)
        selected = np.isin(activity["active_feature"].values, features)
        rows = np.searchsorted(features, activity["active_feature"].values[selected])
        values[rows, activity["active_position"].values[selected]] = activity["activation"].values[selected]
        order = np.argsort(values.argmax(axis=1), kind="stable")
        return labelled(
            values[order],
            "activation",
            feature=[
                self.labels.short(FeatureId(self.layer, feature)) for feature in features[order].tolist()
            ],
            token=self.token_axis,
        )
