"""Base class of experiments that use a dictionary: its name, its identity, and the check that it did not
change.

Border: the name and the identity; each experiment decides how it uses the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..forward.runs.experiment import Experiment
from .dictionary import StoredDictionary

if TYPE_CHECKING:
    from ...pipeline.pinned import Pinned
    from ..forward.models.model import Model
    from .dictionary import Dictionary

__all__ = ["DictionaryExperiment"]


class DictionaryExperiment(Experiment):
    """An experiment that reads a dictionary in files."""

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    dictionary: str
    """Dictionary name for `Dictionary.from_pretrained`, excluded from the key."""
    features: str
    """Identity that the dictionary must have (`Dictionary.identity`); part of the key."""

    def params(self) -> dict[str, Any]:
        """All fields except the dictionary's name."""
        # A folder may be moved or named otherwise; `features` identifies the content.
        return {key: value for key, value in vars(self).items() if key != "dictionary"}

    @property
    def resource(self) -> StoredDictionary:
        """The dictionary as a pinned resource that computes on the CPU."""
        return StoredDictionary(self.dictionary, self.features, "cpu")

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionary, which must not change while the experiment runs."""
        return (self.resource,)

    def opened(self, model: Model) -> Dictionary:
        """The opened dictionary; DictionaryError if it does not fit the model."""
        # Equal resources share one opened dictionary per process (pipeline/pinned.py).
        dictionary = self.resource.opened
        dictionary.require_fit(model.config, model.name)
        return dictionary
