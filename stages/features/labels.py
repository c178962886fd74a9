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
    """Store a name for each of some features; an empty text removes the name.

    Earlier names stay readable through `store.annotations`.

    Arguments:
        store: The store to write to.
        dictionary: The dictionary of the features.
        labels: Text of one line by feature, or by the feature's name ("L3:17").
        author: Name of the person who labels, stored with the texts.

    Raises:
        DictionaryError: The dictionary has no such feature, or one is named twice.
        ShapeError: A text is not one printable line.
    """
    texts = {str(dictionary.feature(feature)): text.strip() for feature, text in labels.items()}
    # "L3:17" and FeatureId(3, 17) are two keys for one feature.
    if len(texts) < len(labels):
        raise DictionaryError(
            f"expected one label per feature, found {len(labels)} labels of only {len(texts)} features; give "
            'each feature once, as a FeatureId or as text ("L3:17")'
        )
    store.annotate(dictionary.identity, texts, author)


def labels_of(store: Store | None, dictionary: Dictionary) -> dict[FeatureId, Annotation]:
    """Newest label of each feature that people have labelled, in the order of layers and indices.

    Arguments:
        store: The store that holds labels; None gives none.
        dictionary: The dictionary of the features.
    """
    return {} if store is None else labels_under(store, dictionary.identity)


def labels_under(store: Store, identity: str) -> dict[FeatureId, Annotation]:
    """Newest label of each labelled feature, for a dictionary that is known by its digest only.

    Arguments:
        store: The store that holds labels.
        identity: Digest of the dictionary (`Dictionary.identity`); its files are not needed.
    """
    # An empty text removes a label: annotations are only ever added.
    annotations = {FeatureId.parse(annotation.item): annotation for annotation in store.annotations(identity)}
    return {feature: annotation for feature, annotation in sorted(annotations.items()) if annotation.text}
