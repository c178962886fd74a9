"""Pairs of words whose features are exchanged, many of them: shipped presets, and a file of one's own.

A file is a JSON list of objects with `prompt`, `suppress` (features, "layer:index"), `suppress_word`,
`inject`, `inject_word` and, where it is not the last token, `site`.

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

    Words are followed by the first token with which they go on from the prompt. site: position that is held
    to be where the word is decided, negative from the end.
    """

    prompt: str
    suppress: tuple[str, ...]
    suppress_word: str
    inject: str
    inject_word: str
    site: int = -1


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
    "French": ("The native language of Louis Joxe is", "The native language of Pierre Trabaud is"),
    "English": ("The native language of Michael Albert is", "The native language of Theodore Roosevelt is"),
    "Italian": (
        "The native language of Alberto Giacometti is",
        "The mother tongue of Alberto Giacometti is",
    ),
    "Russian": (
        "The native language of Aleksandr Ptushko is",
        "The native language of Viacheslav Belavkin is",
    ),
    "Dutch": ("The native language of Gerrit Komrij is", "The native language of Constantijn Huygens is"),
    "Persian": (
        "The native language of Mohammad-Reza Sharifinia is",
        "The mother tongue of Mohammad-Reza Sharifinia is",
    ),
}
"""Facts the specimen says, and on which no feature below was chosen. Of a language of several tokens the
first is followed: " R" for Russian."""
NAME_ENDS = -2
"""The last token of the name, before "is"."""
ON_OTHERS = (
    "For each word the feature of layer 0 that, injected at the end of the name, raises it most on average "
    "over twelve other facts of the kind, those left out that end on it; the larger of two strengths tried "
    "there. Nothing was chosen on the facts shown."
)


def crossed(features: Mapping[str, str]) -> tuple[ExchangePair, ...]:
    """Every fact with every other word. Neighbours are of different facts, so that the first few show all.

    features: of each word; the one that is injected for it is suppressed where the word is expected.
    """
    words = list(features)
    return tuple(
        ExchangePair(prompt, (features[word],), word, features[other], other, NAME_ENDS)
        for step in range(1, len(words))
        for turn in range(2)
        for i, word in enumerate(words)
        for prompt, other in [(ENDS_ON[word][turn], words[(i + step) % len(words)])]
    )


def _poem(lines: Sequence[str], suppress: Sequence[str], word: str) -> ExchangePair:
    return ExchangePair("\n".join(lines), tuple(suppress), word, "14:13043", "that")


PAIR_PRESETS = {
    "specimen": PairPreset(
        "specimen",
        "specimen/clt",
        crossed(
            {
                "French": "0:346",
                "English": "0:177",
                "Italian": "0:103",
                "Russian": "0:376",
                "Dutch": "0:369",
                "Persian": "0:479",
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
                "French": "0:18",
                "English": "0:42",
                "Italian": "0:91",
                "Russian": "0:34",
                "Dutch": "0:28",
                "Persian": "0:94",
            }
        ),
        strength=12.0,
        against="specimen",
        found=ON_OTHERS,
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
