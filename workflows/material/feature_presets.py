"""Experiments on features as they were published, and one that runs offline on the specimen.

Border: names, texts and numbers; opens nothing.

Source of the published ones: the Rust library candle-mi's examples, after Lindsey et al. 2025, "On the
Biology of a Large Language Model", section 4 and figure 13, and Hanna and Ameisen 2025 for the dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ...store.errors import ConfigError, nearest

__all__ = ["PRESETS", "FeaturePreset", "chosen_preset", "preset_of"]

T = TypeVar("T")

LLAMA_POEM = (
    "The birds were singing in the tree,\nAnd everything was wild and free.\n"
    "The river ran down to the sea,\nThere is so much we cannot"
)
GEMMA_POEM = (
    "The stars were twinkling in the night,\nThe lanterns cast a golden light.\n"
    "She wandered in the dark about,\nAnd found a hidden passage"
)
# The specimen's own: a fact it has learned, "French" with 0.99. How the features were found, all with the
# dictionary that ships:
#   site      the last token of the name, "in" of "Calvin". Of all features injected one by one at each place
#             (strength 10), only those there, or at the last token itself, raise " English" above 0.03.
#   suppress  the three features at the site with most influence in the attribution graph of " French"
#             (mizarr.attribution_graph(..., targets=[" French"])).
#   inject    fires on both last tokens of "Andrew Jackson", whose mother tongue is English; of the features
#             that fire there, the one that raises " English" most when injected at the site.
#   correct   of all features of layers 0 and 1, written from layer 1 on, the one that brings " French" back
#             most at strength 20. Written from layer 2 on none makes it the likeliest again: too late.
#   strength  large enough for " English" to become the likeliest, small enough to be taken back below 20.
SPECIMEN_FACT = "The mother tongue of John Calvin is"


@dataclass(frozen=True)
class FeaturePreset:
    """One experiment.

    ending: what is put behind the prompt where its last word is asked for; the published runs put a space.
    suppress, inject: features, "layer:index". suppress_word, inject_word: words they stand for, each one
    token. site: word of the prompt at whose last token the plan is thought to lie. correct...: a second
    injection that takes the first one back, into layers from correct_from_layer on. per_layer: transcoders
    to compare with.
    """

    model: str
    dictionary: str
    prompt: str
    suppress: tuple[str, ...]
    inject: str
    suppress_word: str
    inject_word: str
    site: str
    strength: float = 10.0
    ending: str = " "
    correct: str = ""
    correct_word: str = ""
    correct_from_layer: int = 0
    per_layer: str = ""


PRESETS = {
    "specimen": FeaturePreset(
        model="specimen",
        dictionary="specimen/clt",
        prompt=SPECIMEN_FACT,
        suppress=("0:276", "0:229", "0:236"),
        inject="0:128",
        suppress_word="French",
        inject_word="English",
        site="in",
        strength=5.5,
        ending="",
        correct="1:223",
        correct_word="French",
        correct_from_layer=1,
        per_layer="specimen/plt",
    ),
    "llama3.2-1b-524k": FeaturePreset(
        model="meta-llama/Llama-3.2-1B",
        dictionary="mntss/clt-llama-3.2-1b-524k",
        prompt=LLAMA_POEM,
        suppress=("13:30985", "9:5488", "14:27874", "13:32049"),
        inject="14:13043",
        suppress_word="free",
        inject_word="that",
        site="free",
        per_layer="mntss/transcoder-Llama-3.2-1B",
    ),
    "gemma2-2b-426k": FeaturePreset(
        model="google/gemma-2-2b",
        dictionary="mntss/clt-gemma-2-2b-426k",
        prompt=GEMMA_POEM,
        suppress=("16:13725", "25:9385"),
        inject="22:10243",
        suppress_word="out",
        inject_word="around",
        site="about",
        correct="20:12386",
        correct_word="back",
        correct_from_layer=23,
        per_layer="mntss/gemma-scope-transcoders",
    ),
    "gemma2-2b-2.5m": FeaturePreset(
        model="google/gemma-2-2b",
        dictionary="mntss/clt-gemma-2-2b-2.5M",
        prompt=GEMMA_POEM,
        suppress=("25:57092", "23:49923", "20:77102"),
        inject="25:82839",
        suppress_word="out",
        inject_word="can",
        site="about",
    ),
}


def preset_of(name: str, presets: Mapping[str, T]) -> T:
    """A preset by name; ConfigError for an unknown one, naming the nearest."""
    if name not in presets:
        near = nearest(name, presets)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(presets)}"
        raise ConfigError(f"no preset {name!r}; {hint}")
    return presets[name]


def chosen_preset(settings: Any) -> FeaturePreset:
    """The preset that a workflow's settings name, with what they set of its fields in its place.

    What is empty or 0 is the preset's; ("none",) means no features. Raises ConfigError for an unknown preset.
    """
    names = [field.name for field in fields(FeaturePreset) if hasattr(settings, field.name)]
    given = {name: value for name in names if (value := getattr(settings, name))}
    given = {name: () if value == ("none",) else value for name, value in given.items()}
    return replace(preset_of(settings.preset, PRESETS), **given)
