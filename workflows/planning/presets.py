"""Pairs of words whose features are exchanged, many of them: shipped presets, and a file of one's own.

A file is a JSON list of objects with `prompt`, `suppress` (features, "layer:index"), `suppress_word`,
`inject`, `inject_word` and, where it is not the last token, `site`: a position or the token there.

Border: names, texts and numbers; opens nothing but the file it is told to read.

Source of the published ones: as material/feature_presets.py; the poems in "-ore" and "-oo" are those of
candle-mi's study of Llama 3.2. The list of the 136 pairs of its predecessor was not published: a file takes
any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...store.errors import ConfigError
from ..material.feature_presets import GEMMA_POEM, LLAMA_POEM

__all__ = ["PAIR_PRESETS", "ExchangePair", "PairPreset", "read_pairs"]


@dataclass(frozen=True)
class ExchangePair:
    """One exchange: the features of a word are suppressed, one of another word is injected.

    Words are followed by the first token with which they go on from the prompt. site: where the word is held
    to be decided, a position, negative from the end, or the token there, of several alike the first.
    """

    prompt: str
    suppress: tuple[str, ...]
    suppress_word: str
    inject: str
    inject_word: str
    site: int | str = -1


@dataclass(frozen=True)
class PairPreset:
    """Pairs for one model and its dictionary.

    ending: what is put behind every prompt; the published runs put a space. against: preset of another model
    or dictionary with the same pairs. found: how the features were chosen, in a sentence.
    """

    model: str
    dictionary: str
    pairs: tuple[ExchangePair, ...]
    strength: float = 10.0
    ending: str = ""
    against: str = ""
    found: str = "As published; how many features were tried before is not told."


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
"""Couplets in frames the specimen never read together, on which no feature below was chosen: the first twelve
of `COUPLETS`, each word with the two ends after which the untouched model finds it likeliest."""
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
    """Every couplet with every other word. Neighbours are of different couplets: the first few show all.

    features: of each word; the one that is injected for it is suppressed where a rhyme of it is expected.
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
    """The word the first line ends on."""
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


def read_pairs(path: Path) -> tuple[ExchangePair, ...]:
    """The pairs of a file. Raises ConfigError for a file that is missing or not of this form."""
    try:
        found = msgspec.json.decode(path.expanduser().read_bytes(), type=tuple[ExchangePair, ...])
    except (OSError, ValueError) as error:
        form = (
            '[{"prompt", "suppress": ["layer:index"], "suppress_word", "inject", "inject_word", "site"}, …]'
        )
        raise ConfigError(f"expected a JSON file {form} at {str(path)!r}, found: {error}") from error
    if not found:
        raise ConfigError(f"expected pairs in {str(path)!r}, found an empty list")
    return found
