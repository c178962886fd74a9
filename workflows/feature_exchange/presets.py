"""Material of the exchange workflows as data: published experiments on features, and the specimen's own.

Sources: the examples of the Rust library candle-mi, after Lindsey et al. 2025, "On the Biology of a Large
Language Model", section 4 and figure 13; Hanna and Ameisen 2025 for the dictionaries. The poems in "-ore" and
"-oo" are those of candle-mi's study of Llama 3.2. The list of the 136 pairs of its predecessor was not
published; a file of pairs can be given instead (`read_pairs`). Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ...store.errors import ConfigError
from ..material.samples.kin import COUPLET
from ..settings import preset_of

__all__ = [
    "PAIR_PRESETS",
    "PRESETS",
    "ExchangePair",
    "FeaturePreset",
    "PairPreset",
    "chosen_preset",
    "read_pairs",
]

AS_PUBLISHED = "As published; the number of features tried before is not given."

LLAMA_POEM = (
    "The birds were singing in the tree,\nAnd everything was wild and free.\n"
    "The river ran down to the sea,\nThere is so much we cannot"
)
GEMMA_POEM = (
    "The stars were twinkling in the night,\nThe lanterns cast a golden light.\n"
    "She wandered in the dark about,\nAnd found a hidden passage"
)
# The specimen's preset, on the first of the couplets that ship (samples/couplets.py), in frames that its
# training text never combined. All but the site was chosen by looking at this prompt (`looked_at`):
#   site      the end of the first line, which the second must rhyme with.
#   suppress  the three features at the site with most influence in the attribution graph of " light", the
#             likeliest rhyme (mizarr.attribution_graph(..., targets=[" light"])).
#   inject    of the 211 features that fire at the end of the first line where that is "sun", the one that
#             raises " run", the likeliest rhyme of "sun", most when injected at the site (strength 10).
#   strength  the smallest, in steps of a half, at which " run" becomes the likeliest end.
#   correct   of all 960 features of layers 0 and 1, written from layer 1 on, the one that brings a rhyme of
#             "night" back most at strength 20: " quite".
SPECIMEN_COUPLET = "The large horse said night\nand Estella with the coach said"


@dataclass(frozen=True)
class FeaturePreset:
    """One exchange of features in one prompt. Features are named "layer:index"; words are one token each."""

    model: str
    dictionary: str
    prompt: str
    """The text without its last word."""
    suppress: tuple[str, ...]
    inject: str
    suppress_word: str
    """The word that the suppressed features stand for."""
    inject_word: str
    """The word that the injected feature stands for."""
    site: int | str
    """Position of the exchange, or the token there; negative positions count from the end, "" is none."""
    strength: float = 10.0
    """Multiple of the decoder vectors that is added and taken away."""
    ending: str = " "
    """Text behind the prompt where its last word is predicted; the published runs put a space there."""
    correct: str = ""
    """A second injected feature that takes the first one back; "" for none."""
    correct_word: str = ""
    correct_from_layer: int = 0
    """First layer that the second injection writes to."""
    per_layer: str = ""
    """Per-layer transcoders to compare with."""
    kind: str = "poem"
    """Kind of text that the prompt is."""
    looked_at: int = 1
    """Number of features tried on this prompt before the injected one was chosen."""
    correct_looked_at: int = 1
    """Number of features tried on this prompt before the correcting one was chosen."""
    found: str = AS_PUBLISHED
    """How the features were chosen, in a sentence."""


@dataclass(frozen=True)
class ExchangePair:
    """One exchange of a file of pairs. Words are followed by the first token with which the prompt goes
    on."""

    prompt: str
    suppress: tuple[str, ...]
    suppress_word: str
    inject: str
    inject_word: str
    site: int | str = -1
    """Position where the word is held to be decided, or the token there; of several equal ones the first."""


@dataclass(frozen=True)
class PairPreset:
    """Many exchanges for one model and its dictionary."""

    model: str
    dictionary: str
    pairs: tuple[ExchangePair, ...]
    strength: float = 10.0
    ending: str = ""
    against: str = ""
    """Preset of another model or dictionary with the same pairs."""
    found: str = AS_PUBLISHED

    def of(self, pair: ExchangePair) -> FeaturePreset:
        """One pair as the preset of a single exchange."""
        shared = {
            name: getattr(self, name) for name in ("model", "dictionary", "strength", "ending", "found")
        }
        return FeaturePreset(**vars(pair), **shared)


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


ENDS_ON = {
    "hold": (
        "The large horse said told\nand Estella with the coach said",
        "The strange voice said old\nand Joe with the glass said",
    ),
    "where": (
        "Pip wrote to the fire: there\nthen Lorry and the horse heard",
        "Defarge wrote to the face: hair\nthen Oliver and the friend heard",
    ),
    "kind": (
        "A heart and a poor hand sang find\nfor Wemmick had a whole friend and",
        "A brother and a open house sang mind\nfor Lorry had a open hand and",
    ),
    "before": (
        "We heard the certain face of Defarge say nor\nand every wine by the hand was",
        "We heard the other window of Carton say more\nand every prisoner by the wine was",
    ),
    "my": (
        "When Oliver saw the prison, it was eye\nbut the present heart called",
        "When Joe saw the street, it was high\nbut the strong paper called",
    ),
    "she": (
        "In the last hand they read see\nand Defarge with the wine said",
        "In the whole coach they read three\nand Lorry with the wine said",
    ),
}
"""Couplets on which no feature below was chosen: the first twelve of `COUPLETS`, in frames that the
specimen's training text never combined; each word with the two ends after which the untouched model finds it
likeliest."""
ON_OTHERS = (
    "The feature of layer 0 that, injected at the end of the first line, raises a word most on average over "
    "twelve other couplets, those left out that rhyme with it; then the next feature and the next family of "
    "rhymes, six in all; the larger of two strengths tried there. Nothing was chosen on the couplets shown."
)
THE_SAME_WORDS = (
    "For each word of the preset it is compared with, one after the other, the feature of layer 0 that "
    "raises it most by the same rule, and no feature twice."
)


def crossed(features: Mapping[str, str]) -> tuple[ExchangePair, ...]:
    """Every couplet with every other word, neighbours from different couplets, so that the first few show
    all.

    features: feature of each word; it is suppressed where the couplet expects a rhyme of that word.
    """
    words = list(features)
    return tuple(
        ExchangePair(prompt, (features[word],), word, features[other], other, _first_end(prompt))
        for step in range(1, len(words))
        for turn in range(2)
        for i, word in enumerate(words)
        for prompt, other in [(ENDS_ON[word][turn], words[(i + step) % len(words)])]
    )


def _first_end(couplet: str) -> str:
    """Last word of the first line."""
    return couplet.partition("\n")[0].split()[-1]


def _poem(lines: Sequence[str], suppress: Sequence[str], word: str) -> ExchangePair:
    return ExchangePair("\n".join(lines), tuple(suppress), word, "14:13043", "that")


PAIR_PRESETS = {
    "specimen": PairPreset(
        "specimen",
        "specimen/clt",
        crossed(
            {
                "hold": "0:346",
                "where": "0:223",
                "kind": "0:427",
                "before": "0:288",
                "my": "0:386",
                "she": "0:173",
            }
        ),
        strength=12.0,
        against="specimen-plt",
        found=ON_OTHERS,
    ),
    "specimen-plt": PairPreset(
        "specimen",
        "specimen/plt",
        crossed(
            {
                "hold": "0:62",
                "where": "0:81",
                "kind": "0:15",
                "before": "0:63",
                "my": "0:7",
                "she": "0:77",
            }
        ),
        strength=12.0,
        against="specimen",
        found=THE_SAME_WORDS,
    ),
    "llama3.2-1b-524k": PairPreset(
        "meta-llama/Llama-3.2-1B",
        "mntss/clt-llama-3.2-1b-524k",
        (
            _poem([LLAMA_POEM], ["13:30985", "9:5488", "14:27874", "13:32049"], "free"),
            _poem(
                [
                    "The waves came crashing on the shore,",
                    "The wind was howling more and more.",
                    "She asked what all the fuss was for,",
                    "And opened up the",
                ],
                ["1:5297", "3:22663", "10:18203"],
                "door",
            ),
            _poem(
                [
                    "The morning sky was painted blue,",
                    "The garden sparkled bright with dew.",
                    "The world had started fresh and new,",
                    "And there was nothing left to",
                ],
                ["14:18284", "15:8165", "11:20779"],
                "do",
            ),
        ),
        ending=" ",
    ),
    "gemma2-2b-426k": PairPreset(
        "google/gemma-2-2b",
        "mntss/clt-gemma-2-2b-426k",
        tuple(
            ExchangePair(GEMMA_POEM, ("16:13725", "25:9385"), "out", feature, word)
            for feature, word in (("22:10243", "around"), ("20:12386", "back"))
        ),
        ending=" ",
    ),
}


def chosen_preset(settings: Any, *, keep_site: bool = True) -> FeaturePreset:
    """The preset that the settings name, with the fields that they set replaced.

    Empty values and 0 leave the preset's; ("none",) means no features. A prompt given by the user is of no
    kind, and features named for it, or put to it, count as chosen elsewhere unless `looked_at` says
    otherwise. keep_site: whether the preset's site is also used for a prompt of the user. Raises ConfigError
    for an unknown preset.
    """
    names = [field.name for field in fields(FeaturePreset) if hasattr(settings, field.name)]
    given = {name: value for name in names if (value := getattr(settings, name))}
    given = {name: () if value == ("none",) else value for name, value in given.items()}
    implied: dict[str, Any] = {}
    if "prompt" in given:
        implied = {"kind": "prompt", "looked_at": 1, "correct_looked_at": 1, "found": ""}
        implied |= {} if keep_site else {"site": ""}
    if "inject" in given:
        implied |= {"looked_at": 1, "found": ""}
    if "correct" in given:
        implied |= {"correct_looked_at": 1, "found": ""}
    return replace(preset_of(settings.preset, PRESETS), **implied | given)


def read_pairs(path: Path) -> tuple[ExchangePair, ...]:
    """The pairs of a JSON file, a list of objects with the fields of `ExchangePair`.

    Raises ConfigError for a file that is missing or not of this form.
    """
    try:
        pairs = msgspec.json.decode(path.expanduser().read_bytes(), type=tuple[ExchangePair, ...])
    except (OSError, ValueError) as error:
        form = (
            '[{"prompt", "suppress": ["layer:index"], "suppress_word", "inject", "inject_word", "site"}, …]'
        )
        raise ConfigError(f"expected a JSON file {form} at {str(path)!r}, found: {error}") from error
    if not pairs:
        raise ConfigError(f"expected pairs in {str(path)!r}, found an empty list")
    return pairs
