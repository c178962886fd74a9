"""What workflows that inject features share: the preset, its prompt and words as tokens, its dictionary.

Border: plans; the sweep itself is stages/features/effects/sweeps.py. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.sweeps import Dose, InjectionSweep
from ...stages.logits.lens import format_text
from ...store.errors import ConfigError
from ..subject import Subject
from .answers import encoded, named
from .feature_presets import FeaturePreset

if TYPE_CHECKING:
    from ...stages.forward.models.model import Model
    from ...stages.forward.runs.experiment import Experiment, ExperimentNode
    from ..settings import ModelSettings

__all__ = ["Planned", "is_one_token", "place_of", "word_id"]


class Planned:
    """A preset made ready for one model: tokens, words, features that the dictionary really has.

    ending: text put behind the prompt before it is encoded.
    Raises ConfigError, DictionaryError or PromptError for what does not fit together.
    """

    def __init__(
        self, preset: FeaturePreset, model: Model | None, settings: ModelSettings, *, ending: str = ""
    ) -> None:
        self.preset, self.ending = preset, ending
        self.subject = Subject(settings.reference(model, preset.model))
        self.prompt = preset.prompt + ending
        self.encoding = encoded(self.subject, self.prompt)
        self.dictionary = Dictionary.from_pretrained(preset.dictionary)
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        self.suppress = [self.dictionary.feature(feature) for feature in preset.suppress]
        self.inject = self.dictionary.feature(preset.inject)

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    @property
    def heading(self) -> str:
        """The model, what kind of text it reads and its last line, for titles of tables."""
        lines = self.prompt.strip().splitlines()
        told = f"'{'… ' if lines[1:] else ''}{format_text(lines[-1])}'"
        return f"{self.subject.name}, {self.preset.kind} {told}"

    @property
    def last(self) -> int:
        """Position that is read: the last one, of the ending if there is one."""
        return len(self.encoding.ids) - 1

    @cached_property
    def site(self) -> int:
        """Position of the word at which the plan is thought to lie; ConfigError if the prompt lacks it."""
        return place_of(self.preset.site, self.tokens)

    @property
    def named_site(self) -> int | None:
        """The site, if it was named for this prompt; None for a prompt of one's own without."""
        return self.site if self.preset.site else None

    @property
    def doses(self) -> tuple[Dose, ...]:
        """Features suppressed and the one injected, all by the strength of the run."""
        off = [Dose(feature.layer, feature.index, factor=-1.0) for feature in self.suppress]
        return (*off, Dose(self.inject.layer, self.inject.index, factor=1.0))

    def sweep(
        self,
        doses: tuple[Dose, ...],
        strengths: tuple[float, ...],
        words: tuple[str, ...],
        *,
        positions: tuple[int, ...] | None = None,
        edge: tuple[int, int] | None = None,
    ) -> ExperimentNode:
        """The runs as a node."""
        experiment = InjectionSweep(
            tokens=tuple(self.encoding.ids),
            dictionary=self.dictionary.name,
            features=self.dictionary.identity,
            doses=doses,
            strengths=strengths,
            words=tuple(word_id(self.subject, word) for word in words),
            positions=positions,
            edge=edge,
        )
        experiment.cells(self.subject.config)  # wrong settings are told now, not when it runs
        return self.on_model(experiment)

    def on_model(self, experiment: Experiment) -> ExperimentNode:
        """The node that does an experiment on the model."""
        return self.subject.on_model(experiment)


def place_of(wanted: str, tokens: Sequence[str]) -> int:
    """The position a site names: itself, negative from the end, or the first token that reads so.

    Raises ConfigError for one that is not in the prompt.
    """
    if wanted.lstrip("-").isdecimal():
        place = int(wanted)
        if not -len(tokens) <= place < len(tokens):
            raise ConfigError(f"expected a site in 0..{len(tokens) - 1}, found {wanted}")
        return place % len(tokens)
    found = [i for i, token in enumerate(tokens) if token.strip().lower() == wanted.strip().lower()]
    if not found:
        raise ConfigError(
            f"expected a token {wanted!r} in the prompt as the site, found {' '.join(map(repr, tokens))}"
        )
    return found[0]


def word_id(subject: Subject, word: str) -> int:
    """The one token that is a word with a space before it, or else the bare word.

    Raises ConfigError for a word of several tokens: the probability of a piece is not that of the word.
    """
    pieces = []
    for text in (f" {word.strip()}", word.strip()):
        pieces = subject.tokenizer.encode(text, add_special=False).ids
        if len(pieces) == 1:
            return pieces[0]
    raise ConfigError(
        f"expected a word that is one token of {subject.name}, found {word!r}, which is "
        f"{' + '.join(map(repr, named(subject, pieces)))}; choose another word"
    )


def is_one_token(subject: Subject, word: str) -> bool:
    """Whether a word is one token, with a space before it or bare."""
    texts = (f" {word.strip()}", word.strip())
    return any(len(subject.tokenizer.encode(text, add_special=False).ids) == 1 for text in texts)
