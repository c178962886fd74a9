"""Which features of a sparse autoencoder are active in a prompt, and how much variance do they explain?

Runs the prompt once, encodes what the autoencoder's hook point holds, and lists the strongest features of one
position, with the reconstruction's error over all positions (stages/features/effects/activity.py). Works for
transcoders too; of dictionaries with several layers one is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.corpus.positions import position_of
from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.activity import FeatureActivity
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_token
from ...store.errors import ConfigError, PromptError
from ..labelled import labelled
from ..material.answers import encoded, fact, named
from ..material.feature_labels import FeatureLabels, active_words
from ..settings import Count, ModelSettings, Natural, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["SaeFeatures", "SaeFeaturesSettings"]


@dataclass(frozen=True)
class SaeFeaturesSettings(ModelSettings):
    """What `--set` can change."""

    dictionary: str = setting("", "autoencoder: directory or org/repo; none: specimen/sae")
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    layer: int | None = setting(None, "layer told, of dictionaries with several; none: the middle one")
    position: int | str = setting(
        "last", 'position told: an index, "first", "last", or a phrase of the prompt'
    )
    top_k: Count = setting(10, "features listed")
    zero_positions: Natural = setting(0, "first positions without features, left out of the error too")


class SaeFeatures(ModelWorkflow):
    """One prompt through a dictionary."""

    name = "sae_features"
    question = (
        "Which features of a sparse autoencoder are active in a prompt, and how much variance do they "
        "explain?"
    )
    descriptive = "Features of a sparse autoencoder active in a prompt, and how well they reconstruct it."
    settings_type = SaeFeaturesSettings
    settings: SaeFeaturesSettings

    def plan(self) -> Nodes:
        """What the dictionary finds active in the prompt."""
        given = self.settings
        self.prompt, _ = fact(given.model, given.prompt, "")
        self.encoding = encoded(self.subject, self.prompt)
        self.dictionary = dictionary_of(given.dictionary, given.model, "sae")
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        layers = self.dictionary.layers
        self.layer = layers[len(layers) // 2] if given.layer is None else given.layer
        self.hook = str(self.dictionary.read_hook(self.layer))  # refuses a layer it does not have
        self.position = position_of(self.encoding, given.position)
        if given.zero_positions >= len(self.encoding.ids):
            raise PromptError(
                f"expected a prompt of more than {given.zero_positions} tokens, as so many first positions "
                f"are left out, found {len(self.encoding.ids)}; lengthen it, or lower zero_positions"
            )
        names = self.dictionary.name, self.dictionary.identity
        activity = self.on_model(FeatureActivity(tuple(self.encoding.ids), *names, given.zero_positions))
        words = active_words(self.subject, self.dictionary, activity, most=given.top_k)
        return {"activity": activity, **words}

    @cached_property
    def activity(self) -> xr.Dataset:
        """Active features of the selected layer, [active]."""
        found = self.result("activity").load()
        return found.isel(active=found["active_layer"].values == self.layer).sel(layer=self.layer)

    @cached_property
    def labels(self) -> FeatureLabels:
        """What the strongest features are called."""
        words = self.result("words").load() if "words" in self.nodes else None
        found = FeatureLabels.of(self.subject, self.encoding.ids, words, self.activity)
        return found.called(labels_of(self.store, self.dictionary))

    @property
    def spoken(self) -> tuple[str, ...]:
        """See `Workflow`."""
        return self.labels.spoken

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    def top(self, position: int) -> list[dict[str, Any]]:
        """The strongest features of a position, largest first; equal ones by index."""
        here = self.activity.isel(active=self.activity["active_position"].values == position)
        value = here["activation"].values
        order = np.lexsort((here["active_feature"].values, -value))[: self.settings.top_k]
        return [
            {
                **self.labels.json(FeatureId(self.layer, int(here["active_feature"][i]))),
                "activation": float(value[i]),
                "decoder_norm": float(here["decoder_norm"][i]),
            }
            for i in order.tolist()
        ]

    def views(self) -> Iterator[View]:
        """The strongest features of the position; the strongest of all positions, token by token."""
        found, names, first = self.activity, self.tokens, self.settings.zero_positions
        read = found.isel(position=slice(first, None))
        where = f"positions from {first} on" if first else "all positions"
        counts = np.bincount(found["active_position"].values, minlength=len(names))
        told = [
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
            "fraction_of_variance_unexplained": float(read["error"].sum() / read["size"].sum()),
        }
        yield Data(json=about)
        yield Table.of(
            told[self.position]["top"],
            ("feature", lambda one: FeatureId(one["layer"], one["index"]), str),
            ("", "label"),
            ("activation", "activation", ".4f"),
            ("norm of decoder", "decoder_norm", ".4f"),
            title=f"{self.dictionary.name} at {self.hook} of {self.subject.name}: "
            f"'{format_token(names[self.position])}' ({self.position})",
            caption=f"{counts[self.position]} active here, {counts[first:].mean():.1f} on average; over "
            f"{where} MSE {about['mse']:.4g}, {100 * about['fraction_of_variance_unexplained']:.1f} % "
            "of the variance unexplained",
            json={"positions": told},
        )
        grid = Heatmap.of(
            self._grid({one["index"] for here in told[1:] or told for one in here["top"][:3]}),
            "The strongest features, by token",
            "All that are among the three strongest of some token but the first, an attention sink; ordered "
            "by where they peak.",
            low=0.0,
        ).without_first_token()
        title = f"Features active at {self.hook} of {self.subject.name}"
        yield from together("sae_features", title, grid, caption=grid.caption)

    def _grid(self, chosen: set[int]) -> xr.DataArray:
        """Activations of some features, [feature, token], 0 where silent; the earliest peak first."""
        found, features = self.activity, np.array(sorted(chosen), np.int64)
        values = np.zeros((len(features), len(self.tokens)), np.float32)
        here = np.isin(found["active_feature"].values, features)
        rows = np.searchsorted(features, found["active_feature"].values[here])
        values[rows, found["active_position"].values[here]] = found["activation"].values[here]
        order = np.argsort(values.argmax(axis=1), kind="stable")
        return labelled(
            values[order],
            "activation",
            feature=[
                self.labels.short(FeatureId(self.layer, feature)) for feature in features[order].tolist()
            ],
            token=[f"{i} {format_token(token)}" for i, token in enumerate(self.tokens)],
        )


def dictionary_of(name: str, model: str, shipped: str) -> Dictionary:
    """A dictionary by name; without one that which ships for the specimen ("sae" or "clt").

    Raises ConfigError for another model without a dictionary.
    """
    if not name and model != "specimen":
        raise ConfigError(
            f"expected a dictionary for {model}, found none; set dictionary= a directory or org/repo"
        )
    return Dictionary.from_pretrained(name or f"specimen/{shipped}")
