"""Features of a dictionary that are active in one prompt: the part that `sae_features` and `clt_probe` share.

Border: reads settings and results; loads no model and never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...stages.logits.lens import format_token
from ..material.answers import encoded
from ..material.dictionaries import fitting_dictionary
from ..material.feature_labels import FeatureLabels
from ..settings import PromptSettings, setting
from ..workflow import ModelWorkflow

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["PromptFeaturesWorkflow", "PromptFeaturesSettings"]


@dataclass(frozen=True)
class PromptFeaturesSettings(PromptSettings):
    """Settings of workflows on the features of one prompt: the dictionary and the position."""

    dictionary: str = setting("", "dictionary of features: directory or org/repo; none: one of the specimen")
    position: int | str = setting(
        "last", 'position whose features are listed: an index, "first", "last", or a phrase of the prompt'
    )


class PromptFeaturesWorkflow(ModelWorkflow):
    """Base class of workflows that encode one prompt with a dictionary of features."""

    settings: PromptFeaturesSettings
    shipped: ClassVar[str]
    """Name of the specimen's dictionary that is used if the settings name none, such as "sae"."""

    @property
    def labels(self) -> FeatureLabels:
        """Labels of the displayed features; subclasses build them from `active_labels`."""
        raise NotImplementedError

    def read_prompt(self, prompt: str) -> None:
        """Tokenises the prompt and opens the dictionary of the settings.

        Raises:
            ConfigError: without a dictionary for a model other than the specimen.
            DictionaryError: the dictionary does not fit the model.
        """
        self.prompt = prompt
        self.encoding = encoded(self.subject, prompt)
        settings = self.settings
        self.dictionary = fitting_dictionary(self.subject, settings.dictionary, settings.model, self.shipped)

    def active_labels(self, activity: xr.Dataset) -> FeatureLabels:
        """Labels of the features that are most active in the prompt, including labels that people gave.

        activity: result of `feature_activity` in the prompt.
        """
        words = self.result("words").load() if "words" in self.nodes else None
        labels = FeatureLabels.of(self.subject, self.encoding.ids, words, activity)
        return labels.with_labels_by_people(self.store, self.dictionary)

    @property
    def spoken(self) -> tuple[str, ...]:
        """Labels that people gave to the shown features; see `Workflow.spoken`."""
        return self.labels.spoken

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return self.subject.token_texts(self.encoding.ids)

    @property
    def token_axis(self) -> list[str]:
        """Labels of the token axis of a heatmap, one per position: "3 ␣in"."""
        return [f"{i} {format_token(token)}" for i, token in enumerate(self.tokens)]

    def at_position(self, position: int) -> str:
        """Token at a position of the prompt, for titles and captions: "' in' (3)"."""
        return f"'{format_token(self.tokens[position])}' ({position})"
