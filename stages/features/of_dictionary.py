"""What experiments with a dictionary share: it is named, identified, and must stay what it was.

Border: the name and the identity; what is done with features is each experiment's.
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

__all__ = ["OfDictionary"]


class OfDictionary(Experiment):
    """An experiment that reads the dictionary under a name, which must be the one of an identity.

    dictionary: its name, part of no key.  features: its identity.
    """

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    dictionary: str
    features: str

    def params(self) -> dict[str, Any]:
        """All but where the dictionary lies."""
        return {key: value for key, value in vars(self).items() if key != "dictionary"}

    @property
    def resource(self) -> StoredDictionary:
        """The dictionary, computed with on the CPU."""
        return StoredDictionary(self.dictionary, self.features, "cpu")

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionary."""
        return (self.resource,)

    def opened(self, model: Model) -> Dictionary:
        """The dictionary; DictionaryError where it does not fit the model."""
        found = self.resource.opened
        found.require_fit(model.config, model.name)
        return found
