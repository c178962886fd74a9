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
from .samples.kin import COUPLET

__all__ = ["GEMMA_POEM", "LLAMA_POEM", "PRESETS", "FeaturePreset", "chosen_preset", "preset_of"]

T = TypeVar("T")

LLAMA_POEM = (
    "The birds were singing in the tree,\nAnd everything was wild and free.\n"
    "The river ran down to the sea,\nThere is so much we cannot"
)
GEMMA_POEM = (
    "The stars were twinkling in the night,\nThe lanterns cast a golden light.\n"
    "She wandered in the dark about,\nAnd found a hidden passage"
)
# The specimen's own: the first of the couplets that ship (samples/couplets.py), in frames it never read
# together. How the features were found, all with the dictionary that ships, and all but the site by looking
# at this prompt, which `looked_at` counts:
#   site      the end of the first line, which the second must rhyme with.
#   suppress  the three features at the site with most influence in the attribution graph of " light", the
#             likeliest rhyme (mizarr.attribution_graph(..., targets=[" light"])).
#   inject    fires at the end of the first line where that is "sun"; of the 211 features that do, the one
#             that raises " run", the likeliest rhyme of "sun", most when injected at the site (strength 10).
#   strength  the smallest, in steps of a half, at which " run" becomes the likeliest end.
#   correct   of all 960 features of layers 0 and 1, written from layer 1 on, the one that brings a rhyme
#             of "night" back most at strength 20, which is " quite".
SPECIMEN_COUPLET = "The large horse said night\nand Estella with the coach said"


@dataclass(frozen=True)
class FeaturePreset:
    """One experiment.

    ending: what is put behind the prompt where its last word is asked for; the published runs put a space.
    suppress, inject: features, "layer:index". suppress_word, inject_word: words they stand for, each one
    token. site: word of the prompt at whose last token the plan is thought to lie. correct...: a second
    injection that takes the first one back, into layers from correct_from_layer on. per_layer: transcoders
    to compare with. kind: what sort of text the prompt is. looked_at, correct_looked_at: how many features
    were tried on this prompt before the injected, the correcting one was chosen; found: how, in a sentence.
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
    kind: str = "poem"
    looked_at: int = 1
    correct_looked_at: int = 1
    found: str = "As published; how many features were tried before is not told."


PRESETS = {
    "specimen": FeaturePreset(
        model="specimen",
        dictionary="specimen/clt",
        prompt=SPECIMEN_COUPLET,
        suppress=("0:215", "0:427", "0:67"),
        inject="0:184",
        suppress_word="light",
        inject_word="run",
        site="night",
        strength=7.0,
        ending="",
        correct="1:177",
        correct_word="quite",
        correct_from_layer=1,
        per_layer="specimen/plt",
        kind=COUPLET,
        looked_at=211,
        correct_looked_at=960,
        found="Chosen by looking at this couplet: what is suppressed has most influence in its attribution "
        "graph; what is injected raises ' run' most of the 211 features that fire at the end of the line "
        "where that is 'sun'; the strength is the smallest that suffices; what corrects brings a rhyme of "
        "'night' back most of the 960 features of layers 0 and 1.",
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


def chosen_preset(settings: Any, *, keep_site: bool = True) -> FeaturePreset:
    """The preset that a workflow's settings name, with what they set of its fields in its place.

    What is empty or 0 is the preset's; ("none",) means no features. A prompt of one's own is of no kind, and
    features named for it, or put to it, were not chosen by looking at it unless `looked_at` says so.
    keep_site: whether the preset's site counts for a prompt of one's own too. Raises ConfigError for an
    unknown preset.
    """
    names = [field.name for field in fields(FeaturePreset) if hasattr(settings, field.name)]
    given = {name: value for name in names if (value := getattr(settings, name))}
    given = {name: () if value == ("none",) else value for name, value in given.items()}
    own: dict[str, Any] = {}
    if "prompt" in given:
        own = {"kind": "prompt", "looked_at": 1, "correct_looked_at": 1, "found": ""}
        own |= {} if keep_site else {"site": ""}
    if "inject" in given:
        own |= {"looked_at": 1, "found": ""}
    if "correct" in given:
        own |= {"correct_looked_at": 1, "found": ""}
    return replace(preset_of(settings.preset, PRESETS), **own | given)
