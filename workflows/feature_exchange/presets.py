"""Presets of the exchange workflows: published experiments with features, and experiments on the specimen.

Sources: the examples of the Rust library candle-mi, after Lindsey et al. 2025, "On the Biology of a Large
Language Model", section 4 and figure 13; the dictionaries are those of Hanna and Ameisen 2025. The poems in
"-ore" and "-oo" are from candle-mi's study of Llama 3.2. The list of the 136 pairs of its predecessor was not
published; a file of pairs can be used instead (`read_pairs`). Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
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

AS_PUBLISHED = (
    "Features are those of the published experiment, which does not say how many were tried before; p-values "
    "are not corrected for that choice."
)

LLAMA_POEM = (
    "The birds were singing in the tree,\nAnd everything was wild and free.\n"
    "The river ran down to the sea,\nThere is so much we cannot"
)
GEMMA_POEM = (
    "The stars were twinkling in the night,\nThe lanterns cast a golden light.\n"
    "She wandered in the dark about,\nAnd found a hidden passage"
)
# The specimen's preset, on the first of the couplets that ship (samples/couplets.py), in frames that its
# training text never combined. All but the site was chosen on this prompt (hence `looked_at`):
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
    """Hub id or directory of the model."""
    dictionary: str
    """Transcoders: directory or org/repo."""
    prompt: str
    """The text without its last word."""
    suppress: tuple[str, ...]
    """Features that are suppressed."""
    inject: str
    """Feature that is injected."""
    suppress_word: str
    """Expected word, which the suppressed features promote; its probability is measured."""
    inject_word: str
    """Word that the injected feature promotes; its probability is measured."""
    site: int | str
    """Position of the exchange, or the token there; negative positions count from the end, "" is none."""
    strength: float = 10.0
    """Multiple of the decoder vectors that is added and subtracted."""
    ending: str = " "
    """Text appended to the prompt before its last word is predicted; the published runs append a space."""
    correct: str = ""
    """Feature of the correction, injected into later layers; "" for none."""
    correct_word: str = ""
    """Word whose probability the correcting feature raises."""
    correct_from_layer: int = 0
    """First layer that the correction is written to."""
    per_layer: str = ""
    """Per-layer transcoders to compare with: directory or org/repo; "" for none."""
    kind: str = "poem"
    """Genre of the prompt, such as "poem" or "couplet"; selects held-out texts (material/samples/kin.py)."""
    looked_at: int = 1
    """Number of candidate features run on this prompt to choose the injected one; it corrects the p-value."""
    correct_looked_at: int = 1
    """Number of candidate features run on this prompt to choose the correcting one; it corrects the
    p-value."""
    selection: str = AS_PUBLISHED
    """Sentence on the selection of features, for captions of claims."""


@dataclass(frozen=True)
class ExchangePair:
    """One exchange of features that a file of pairs describes; the probability of each word is that of its
    first token after the prompt."""

    prompt: str
    """The text without its last word."""
    suppress: tuple[str, ...]
    """Features that are suppressed, "layer:index"."""
    suppress_word: str
    """Expected word, which the suppressed features promote; its probability is measured."""
    inject: str
    """Feature that is injected, "layer:index"."""
    inject_word: str
    """Word that the injected feature promotes; its probability is measured."""
    site: int | str = -1
    """Position at which the word is assumed to be decided, or the token there; of equal tokens the first."""


@dataclass(frozen=True)
class PairPreset:
    """Exchanges of features of several pairs of words, for one model and dictionary."""

    model: str
    """Hub id or directory of the model."""
    dictionary: str
    """Transcoders: directory or org/repo."""
    pairs: tuple[ExchangePair, ...]
    """Exchanges in running order; `limit` counts from the first."""
    strength: float = 10.0
    """Multiple of the decoder vectors that is added and subtracted."""
    ending: str = ""
    """Text appended to each prompt before its last word is predicted."""
    against: str = ""
    """Name of a preset that compares the same pairs on a different model or dictionary; "" for none."""
    selection: str = AS_PUBLISHED
    """Sentence on the selection of features, for captions of claims."""

    def of(self, pair: ExchangePair) -> FeaturePreset:
        """Preset of a single exchange: one pair with the model, dictionary, strength and ending of this
        preset."""
        shared = {
            name: getattr(self, name) for name in ("model", "dictionary", "strength", "ending", "selection")
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
        selection="Features and strength were chosen on this couplet. The suppressed features have the "
        "largest influence in its attribution graph. The injected one raises ' run' most among the 211 "
        "features that are active at the end of the first line if that is 'sun'. The strength is the "
        "smallest that makes ' run' the likeliest next token. The correcting feature restores a rhyme of "
        "'night' most among the 960 features of layers 0 and 1.",
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
"""Word -> two couplets after which the unchanged specimen predicts it. They are the first twelve of
`COUPLETS`, in frames that the specimen's training text never combined; no feature below was chosen on
them."""
ON_OTHERS = (
    "Six words, each with a feature of layer 0, were chosen one after another on twelve other couplets: each "
    "time the word and the feature that raises its probability most, in the mean over couplets that do not "
    "rhyme with it, when it is injected at the end of the first line; one word per rhyme family. The "
    "strength is the larger of two that were tried there. Nothing was chosen on the couplets shown."
)
"""How the features of the preset "specimen" were chosen."""
THE_SAME_WORDS = (
    "The words are those of the preset that this one is compared with. For each of them, in order, the "
    "feature of layer 0 was chosen that raises it most by the same rule; no feature is used twice."
)
"""How the features of the preset "specimen-plt" were chosen."""


def crossed(features: Mapping[str, str]) -> tuple[ExchangePair, ...]:
    """Pairs of every couplet with every other word, in an order in which neighbours have different couplets
    and the first few cover all words.

    Arguments:
        features: feature of each word, which is suppressed in couplets that expect the word, and injected in
            others.
    """
    words = list(features)
    pairs = []
    for step, couplet in product(range(1, len(words)), range(2)):
        for i, word in enumerate(words):
            # The word that is `step` places further in the list, which starts again at its end.
            injected = words[(i + step) % len(words)]
            prompt = ENDS_ON[word][couplet]
            pairs.append(
                ExchangePair(
                    prompt, (features[word],), word, features[injected], injected, _first_end(prompt)
                )
            )
    return tuple(pairs)


def _first_end(couplet: str) -> str:
    """Last word of the first line of a couplet."""
    return couplet.partition("\n")[0].split()[-1]


def _poem(lines: Sequence[str], suppress: Sequence[str], word: str) -> ExchangePair:
    """Pair of a poem on Llama 3.2: the features of its expected last word are suppressed, the feature of
    "that" is injected."""
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
        selection=ON_OTHERS,
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
        selection=THE_SAME_WORDS,
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
    """The preset that the settings name, with its fields replaced by those that the settings set.

    Empty values and 0 leave the preset's value; ("none",) means no features. A prompt in the settings has the
    kind "prompt". Features in the settings, and those of the preset used with such a prompt, count as chosen
    elsewhere unless settings.looked_at says otherwise.

    Arguments:
        settings: settings of an exchange workflow.
        keep_site: whether the preset's site is also used for a prompt in the settings.

    Raises:
        ConfigError: the preset is unknown.
    """
    names = [field.name for field in fields(FeaturePreset) if hasattr(settings, field.name)]
    overrides = {name: value for name in names if (value := getattr(settings, name))}
    overrides = {name: () if value == ("none",) else value for name, value in overrides.items()}
    implied: dict[str, Any] = {}
    if "prompt" in overrides:
        implied = {"kind": "prompt", "looked_at": 1, "correct_looked_at": 1, "selection": ""}
        # The site of the preset is a token of its own prompt.
        implied |= {} if keep_site else {"site": ""}
    if "inject" in overrides:
        implied |= {"looked_at": 1, "selection": ""}
    if "correct" in overrides:
        implied |= {"correct_looked_at": 1, "selection": ""}
    return replace(preset_of(settings.preset, PRESETS), **implied | overrides)


def read_pairs(path: Path) -> tuple[ExchangePair, ...]:
    """Pairs of words and features from a JSON file, a list of objects with the fields of `ExchangePair`.

    Raises ConfigError for a file that is missing, has another form, or has no pairs.
    """
    try:
        pairs = msgspec.json.decode(path.expanduser().read_bytes(), type=tuple[ExchangePair, ...])
    except (OSError, ValueError) as error:
        form = (
            '[{"prompt", "suppress": ["layer:index"], "suppress_word", "inject", "inject_word", "site"}, …]'
        )
        raise ConfigError(
            f"expected a JSON file of the form {form} at {str(path)!r}, found {error}; correct the file"
        ) from error
    if not pairs:
        raise ConfigError(f"expected pairs in {str(path)!r}, found an empty list; add some")
    return pairs
