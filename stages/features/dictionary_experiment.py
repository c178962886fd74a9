"""Base class of experiments that use a dictionary: its name, its digest, and the check for changed files.

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
    """An experiment whose results depend on a dictionary in files as well as on the model."""

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    dictionary: str
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str
    """Digest that the dictionary must have (`Dictionary.identity`); part of the key of results."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the dictionary's name."""
        # A folder may be moved or named otherwise; `features` identifies the content.
        return {key: value for key, value in vars(self).items() if key != "dictionary"}

    @property
    def resource(self) -> StoredDictionary:
        """The dictionary on the CPU, in a form that opens it by name and checks its digest."""
        return StoredDictionary(self.dictionary, self.features, "cpu")

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Resources that must not change while the experiment runs: the dictionary."""
        return (self.resource,)

    def opened(self, model: Model) -> Dictionary:
        """The opened dictionary; DictionaryError if the model has other layers or widths than it needs."""
        # Equal resources share one opened dictionary per process (pipeline/pinned.py).
        dictionary = self.resource.opened
        dictionary.require_fit(model.config, model.name)
        return dictionary
