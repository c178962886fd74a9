"""Labels: what people call features, kept in a store under the digest of the dictionary.

    set_labels(store, dictionary, {"L3:17": "capitals of countries"}, author="ada")
    labels_of(store, dictionary)[FeatureId(3, 17)].text

Border: features and texts; how they are kept is store/upkeep/annotations.py's. Part of no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...store.errors import DictionaryError
from .layers.layout import FeatureId

if TYPE_CHECKING:
    from ...store import Store
    from ...store.upkeep.annotations import Annotation
    from .dictionary import Dictionary

__all__ = ["labels_of", "labels_under", "set_labels"]


def set_labels(
    store: Store, dictionary: Dictionary, labels: Mapping[FeatureId | str, str], *, author: str = ""
) -> None:
    """Say what features are called; an empty text takes a label back.

    labels: by feature, or its name ("L3:17"). What was said before stays readable: `store.annotations`.
    Raises DictionaryError for a feature it does not have, ShapeError for a text that is not one printable
    line.
    """
    said = {str(dictionary.feature(feature)): text.strip() for feature, text in labels.items()}
    if len(said) < len(labels):
        raise DictionaryError(
            f"expected each feature once, found {len(labels)} names of {len(said)} features"
        )
    store.annotate(dictionary.identity, said, author)


def labels_of(store: Store | None, dictionary: Dictionary) -> dict[FeatureId, Annotation]:
    """What features of a dictionary are called, the last word of each; none without a store."""
    return {} if store is None else labels_under(store, dictionary.identity)


def labels_under(store: Store, identity: str) -> dict[FeatureId, Annotation]:
    """As `labels_of`, of the dictionary with this digest, which need not be at hand."""
    found = {FeatureId.parse(each.item): each for each in store.annotations(identity)}
    return {feature: each for feature, each in sorted(found.items()) if each.text}
