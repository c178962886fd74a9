"""Recurrent continuation: text generated while a block of layers runs repeatedly, with feedback.

The feedback, added at the last token of a prompt, is the normalised mean of the words' rows of the
unembedding, times a strength: candle-mi's "anacrousis" (forward/hooks/recurrent.py defines the pass). The
null is the same trial with a random direction.

Border: token ids, layers and strengths in, labelled datasets out; callers know which words rhyme and what
counts as success.

Axes: trial, group by group (one cell each, so that an interrupted protocol resumes at the next), step (each
gives one token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...pipeline.ambient import plain_torch
from ...store.errors import ConfigError
from ..forward.generation.continuations import GenerationSettings
from ..forward.hooks.recurrent import RecurrentPass
from ..forward.hooks.wants import LAST_LOGITS
from ..forward.runs.experiment import CellLabels, Experiment
from .controls import random_directions

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["RecurrentContinuation", "Trial", "words_direction"]

TOP = 100
"""`words_in_top` counts words among this many most likely tokens."""
_SHORTEST = 1e-8
"""Norm up to which a mean of unembedding rows is not normalised: opposite rows cancel but for rounding."""


@dataclass(frozen=True)
class Trial:
    """A prompt, and how a block of layers is repeated with feedback while it is continued.

    Raises:
        ConfigError: There are no words, or the layers, depth or strength are invalid.
    """

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    words: tuple[int, ...]
    """Last token of each word whose probability is measured; their mean unembedding row is the feedback."""
    loop_start: int = 0
    """First layer of the repeated block."""
    loop_end: int = 0
    """Last layer of the repeated block."""
    depth: int = 1
    """Number of passes through the block; 1 is a plain forward pass."""
    strength: float | None = None
    """Factor by which the feedback direction, of norm 1, is multiplied; None for no feedback."""
    sustained: bool = False
    """Whether feedback is also added at generated tokens; see `RecurrentPass`."""
    draw: int | None = None
    """Index of a random direction that replaces the words' direction; None for the words' own."""
    seed: int = 0
    """Seed of the random directions."""

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError(
                "expected at least one word, whose probability is measured and whose direction is fed back, "
                "found none; set words"
            )
        # Made and discarded: RecurrentPass checks layers, depth and strength, which do not need the
        # direction.
        self.fed(np.zeros(1, np.float32))

    def fed(self, direction: npt.NDArray[np.float32]) -> RecurrentPass:
        """Recurrent pass that adds `direction`, float32 [hidden], at the last token of the prompt."""
        feedback = [] if self.strength is None else [(len(self.prompt) - 1, direction, self.strength)]
        return RecurrentPass(self.loop_start, self.loop_end, self.depth, feedback, self.sustained)

    def labels(self) -> dict[str, Any]:
        """Fields that determine the result, as plain values; draw and seed only if a direction is random."""
        labels = asdict(self)
        if self.draw is None:
            del labels["draw"], labels["seed"]
        return labels


@dataclass(frozen=True)
class RecurrentContinuation(Experiment):
    """Continues prompts with repeated layers and feedback, and measures the probability of words after them.

    Raises:
        ConfigError: The settings sample, or name no end-of-sequence ids.
    """

    name: ClassVar[str] = "recurrent_continuation"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("trial", "step"), "1", "generated tokens, -1 past the end"),
        "logprob": Output(("trial", "step"), "nats", "log-probability of each generated token"),
        "generated_text": Output(("trial",), "1", "generated text, without special tokens"),
        "words_logprob": Output(
            ("trial",), "nats", "log-probability that one of the words follows the prompt"
        ),
        "best_word": Output(("trial",), "1", "token of the most likely word after the prompt"),
        "best_word_logprob": Output(("trial",), "nats", "log-probability of that token"),
        "best_word_rank": Output(("trial",), "1", "rank of that token among all tokens, from 0"),
        "words_in_top": Output(("trial",), "1", f"words among the {TOP} most likely tokens"),
    }
    reads_text: ClassVar[bool] = True

    groups: tuple[tuple[Trial, ...], ...]
    """Trials that are stored together as one cell, such as all prompts under one condition."""
    settings: GenerationSettings
    """Settings of the generation, with temperature 0 and explicit end-of-sequence ids."""

    def __post_init__(self) -> None:
        if self.settings.eos is None or self.settings.temperature:
            raise ConfigError(
                "recurrent_continuation: expected explicit end-of-sequence ids and temperature 0, found "
                f"eos={self.settings.eos}, temperature={self.settings.temperature}; give eos=(...), "
                "temperature=0"
            )

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: the settings without the seed. Trials are labels of cells."""
        return {name: value for name, value in vars(self.settings).items() if name != "seed"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per group.

        Raises:
            ConfigError: A trial names layers that the model does not have.
        """
        for trial in chain.from_iterable(self.groups):
            RecurrentPass(trial.loop_start, trial.loop_end).check(config, len(trial.prompt))
        return [{"trials": [trial.labels() for trial in group]} for group in self.groups]

    def prepare(self, model: Model) -> Model:
        """The model itself: each step depends on the token before, so no runs can be planned."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """No planned runs, because each step depends on the token before."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` generates."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Trials of one group: token_id and logprob [trial, step], other variables [trial]."""
        trials = [
            Trial(**{name: _hashable(value) for name, value in labels.items()}) for labels in cell["trials"]
        ]
        return self.joined([self._trial(prepared, trial) for trial in trials])

    def _trial(self, model: Model, trial: Trial) -> xr.Dataset:
        """Continuation of one trial, and the probability and rank of its words after the prompt."""
        import xarray as xr

        from ..forward.generation.generate import TokenStream

        recurrent = trial.fed(_direction(model, trial))
        stream = TokenStream(model, [trial.prompt], None, self.settings, recurrent)
        # A stream generates while it is iterated; the whole text is in its result.
        for _ in stream:
            pass
        (result,) = stream.result()
        # A pass of its own: the result has log-probabilities of generated tokens only, not of the words.
        logits = model.forward([trial.prompt], want=LAST_LOGITS, recurrent=recurrent).logits[0, 0]
        values: dict[str, Any] = {
            "token_id": np.array([result.generated_ids], np.int32),
            "logprob": np.array([result.logprobs]),
            "generated_text": [result.generated_text or ""],
            **{
                name: np.array([value])
                for name, value in _word_measures(
                    logits.double().log_softmax(-1).cpu().numpy(), trial.words
                ).items()
            },
        }
        return xr.Dataset(
            {name: output.variable(values[name]) for name, output in self.outputs.items()},
            {"step": np.arange(len(result.generated_ids))},
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All trials in order, padded to the longest text with NaN, or -1 for token ids."""
        import xarray as xr

        fills = {"token_id": -1, "logprob": np.nan}
        whole: xr.Dataset = xr.concat(parts, "trial", join="outer", coords="minimal", fill_value=fills)
        return whole


@plain_torch()
def words_direction(model: Model, words: Sequence[int]) -> npt.NDArray[np.float32]:
    """Direction of some tokens: the mean of their unembedding rows, scaled to norm 1, float32 [hidden].

    Arguments:
        model: The model.
        words: Token ids.

    Raises:
        ConfigError: The model's LM head is not a linear map of the residual stream.
    """
    model.config.require_linear_head()
    rows = model.network.unembedding[list(words)].double().mean(0)
    norm = float(rows.norm())
    direction: npt.NDArray[np.float32] = (rows / norm if norm > _SHORTEST else rows).float().cpu().numpy()
    return direction


def _direction(model: Model, trial: Trial) -> npt.NDArray[np.float32]:
    """Direction that a trial feeds back, float32 [hidden]: its words' direction, or a random one."""
    direction = words_direction(model, trial.words)
    if trial.draw is None:
        return direction
    # Draw i is the last of i + 1 samples: direction i of a seed is the same however many are drawn.
    random_direction: npt.NDArray[np.float32] = random_directions(direction, trial.draw + 1, seed=trial.seed)[
        -1
    ]
    return random_direction


def _word_measures(logprobs: npt.NDArray[np.float64], words: Sequence[int]) -> dict[str, Any]:
    """Probability and rank of some words as next tokens, as outputs of `RecurrentContinuation` by name.

    Arguments:
        logprobs: Log-probabilities of the whole vocabulary in nats, float64 [vocab].
        words: Token ids of the words; repeated ones count once.
    """
    # Unique, so that a token shared by two words adds its probability once.
    word_ids = np.unique(np.array(words))
    # Ranks by inverting the sorting permutation; stable, so that ties go to the lower id.
    order = np.argsort(-logprobs, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    best = int(word_ids[rank[word_ids].argmin()])
    return {
        # logaddexp adds probabilities without underflow.
        "words_logprob": float(np.logaddexp.reduce(logprobs[word_ids])),
        "best_word": best,
        "best_word_logprob": float(logprobs[best]),
        "best_word_rank": int(rank[best]),
        "words_in_top": int((rank[word_ids] < TOP).sum()),
    }


def _hashable(value: Any) -> Any:
    """The value, with a list turned into a tuple."""
    return tuple(value) if isinstance(value, list) else value
