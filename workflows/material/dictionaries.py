"""Feature dictionaries that a setting names, or that ship with the specimen.

Border: opens dictionaries without their weights; loads no model and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...stages.features.dictionary import Dictionary
from ...store.errors import ConfigError

if TYPE_CHECKING:
    from ..subject import Subject

__all__ = ["dictionary_of", "fitting_dictionary"]


def dictionary_of(name: str, model: str, shipped: str) -> Dictionary:
    """Dictionary that a setting names, or that ships with the specimen, opened without its weights.

    Arguments:
        name: directory or org/repo; "" for the dictionary that ships with the specimen.
        model: model that the dictionary is for.
        shipped: "sae", "clt" or another dictionary of the specimen, used when `name` is empty.

    Raises:
        ConfigError: for an empty name with a model other than "specimen".
    """
    if not name and model != "specimen":
        raise ConfigError(
            f"expected a dictionary of features for {model}, found none; name one: dictionary=DIRECTORY or "
            "dictionary=ORG/REPO"
        )
    return Dictionary.from_pretrained(name or f"specimen/{shipped}")


def fitting_dictionary(subject: Subject, name: str, model: str, shipped: str) -> Dictionary:
    """Dictionary as `dictionary_of` opens it, checked to fit the model.

    Arguments:
        subject: the model that the dictionary must fit.
        name: see `dictionary_of`.
        model: name of the model in the settings.
        shipped: see `dictionary_of`.

    Raises:
        ConfigError: see `dictionary_of`.
        DictionaryError: the dictionary does not fit the model.
    """
    dictionary = dictionary_of(name, model, shipped)
    dictionary.require_fit(subject.config, subject.name)
    return dictionary
