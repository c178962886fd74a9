"""Labels of features: names given by people, stored under the identity of the dictionary.

    set_labels(store, dictionary, {"L3:17": "capitals of countries"}, author="ada")
    labels_of(store, dictionary)[FeatureId(3, 17)].text

Border: features and texts; store/upkeep/annotations.py stores them. Part of no key.
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
    """Store labels of features; an empty text removes a label.

    Earlier labels stay readable through `store.annotations`.

    Arguments:
        store: The store to write to.
        dictionary: The dictionary of the features.
        labels: Text by feature or by its name ("L3:17").
        author: Name stored with the labels.

    Raises:
        DictionaryError: The dictionary has no such feature, or one is named twice.
        ShapeError: A text is not one printable line.
    """
    texts = {str(dictionary.feature(feature)): text.strip() for feature, text in labels.items()}
    # "L3:17" and FeatureId(3, 17) are two keys for one feature.
    if len(texts) < len(labels):
        raise DictionaryError(
            f"expected each feature once, found {len(labels)} names of {len(texts)} features"
        )
    store.annotate(dictionary.identity, texts, author)


def labels_of(store: Store | None, dictionary: Dictionary) -> dict[FeatureId, Annotation]:
    """Latest label of each labelled feature of a dictionary.

    Arguments:
        store: The store; None gives no labels.
        dictionary: The dictionary of the features.
    """
    return {} if store is None else labels_under(store, dictionary.identity)


def labels_under(store: Store, identity: str) -> dict[FeatureId, Annotation]:
    """Latest labels under the identity of a dictionary, whose files are not needed.

    Arguments:
        store: The store.
        identity: `Dictionary.identity`.
    """
    # An empty text removes a label: annotations are only ever added.
    annotations = {FeatureId.parse(annotation.item): annotation for annotation in store.annotations(identity)}
    return {feature: annotation for feature, annotation in sorted(annotations.items()) if annotation.text}
