"""Prompts continued while a block of layers is gone through again, fed with what some words stand for.

What is fed, at the last token of a prompt, is the mean of the rows by which the LM head reads the words' last
tokens, at length 1 times a strength: recurrent feedback, candle-mi's "anacrousis" (forward/hooks/recurrent.py
says what the pass is). The null of such a trial is the same trial with a direction that is drawn.

Border: token ids, layers and strengths in, labelled datasets out; which words rhyme, and what counts as a
success, is known to who asks.

Axes: trial, group by group (one cell each: a killed protocol goes on with the next), step (each gives one
token).
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
"""Of the likeliest tokens among which words are counted."""
_SHORTEST = 1e-8
"""A mean of rows that is no longer than this is left as it is."""


@dataclass(frozen=True)
class Trial:
    """One prompt under one recurrence.

    prompt: token ids. words: last tokens of the words that are followed, and whose direction is fed.
    strength: what the direction, of length 1, is multiplied by; None feeds nothing. depth: 1 for a plain
    pass. draw: of random directions in place of the words', drawn from `seed`; None for theirs.
    """

    prompt: tuple[int, ...]
    words: tuple[int, ...]
    loop_start: int = 0
    loop_end: int = 0
    depth: int = 1
    strength: float | None = None
    sustained: bool = False
    draw: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("expected words to follow and to feed, found none")
        self.fed(np.zeros(1, np.float32))

    def fed(self, direction: npt.NDArray[np.float32]) -> RecurrentPass:
        """The recurrence, with a direction at the last token of the prompt."""
        feedback = [] if self.strength is None else [(len(self.prompt) - 1, direction, self.strength)]
        return RecurrentPass(self.loop_start, self.loop_end, self.depth, feedback, self.sustained)

    def labels(self) -> dict[str, Any]:
        """What decides its numbers, as plain values: a seed only where something is drawn."""
        told = asdict(self)
        if self.draw is None:
            del told["draw"], told["seed"]
        return told


@dataclass(frozen=True)
class RecurrentContinuation(Experiment):
    """Prompts continued under recurrences, and how likely the words are behind each prompt.

    groups: of trials that are stored together, such as all prompts under one condition. settings: as for
    `generate`, without draws, and the ids that end a sequence named.
    """

    name: ClassVar[str] = "recurrent_continuation"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("trial", "step"), "1", "generated tokens, -1 past the end"),
        "logprob": Output(("trial", "step"), "nats", "of each token"),
        "generated_text": Output(("trial",), "1", "what was generated, without special tokens"),
        "words_logprob": Output(("trial",), "nats", "that one of the words comes next behind the prompt"),
        "best_word": Output(("trial",), "1", "token of the likeliest of the words there"),
        "best_word_logprob": Output(("trial",), "nats", "of that token"),
        "best_word_rank": Output(("trial",), "1", "its place among all tokens, counted from 0"),
        "words_in_top": Output(("trial",), "1", f"tokens of the words among the {TOP} likeliest"),
    }
    reads_text: ClassVar[bool] = True

    groups: tuple[tuple[Trial, ...], ...]
    settings: GenerationSettings

    def __post_init__(self) -> None:
        if self.settings.eos is None or self.settings.temperature:
            raise ConfigError(
                "recurrent_continuation: expected the likeliest tokens up to ids that are named, found eos="
                f"{self.settings.eos}, temperature={self.settings.temperature}; give eos=(…), temperature=0"
            )

    def params(self) -> dict[str, Any]:
        """How tokens are chosen; the trials are the cells."""
        return {name: value for name, value in vars(self.settings).items() if name != "seed"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per group. Raises ConfigError for layers the model does not have."""
        for trial in chain.from_iterable(self.groups):
            RecurrentPass(trial.loop_start, trial.loop_end).check(config, len(trial.prompt))
        return [{"trials": [trial.labels() for trial in group]} for group in self.groups]

    def prepare(self, model: Model) -> Model:
        """The model itself: what a step runs depends on what the one before gave."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """None that could be planned ahead."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never asked: nothing is planned, see `dataset`."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The trials of one group: token_id, logprob [trial, step], all else [trial]."""
        trials = [
            Trial(**{name: _hashable(value) for name, value in labels.items()}) for labels in cell["trials"]
        ]
        return self.joined([self._tried(prepared, trial) for trial in trials])

    def _tried(self, model: Model, trial: Trial) -> xr.Dataset:
        """What came of one trial."""
        import xarray as xr

        from ..forward.generation.generate import TokenStream

        recurrent = trial.fed(_direction(model, trial))
        stream = TokenStream(model, [trial.prompt], None, self.settings, recurrent)
        for _ in stream:
            pass
        (result,) = stream.result()
        logits = model.forward([trial.prompt], want=LAST_LOGITS, recurrent=recurrent).logits[0, 0]
        found: dict[str, Any] = {
            "token_id": np.array([result.generated_ids], np.int32),
            "logprob": np.array([result.logprobs]),
            "generated_text": [result.generated_text or ""],
            **{
                name: np.array([value])
                for name, value in _among(logits.double().log_softmax(-1).cpu().numpy(), trial.words).items()
            },
        }
        return xr.Dataset(
            {
                name: (output.dims, found[name], {"units": output.unit, "long_name": output.long_name})
                for name, output in self.outputs.items()
            },
            {"step": np.arange(len(result.generated_ids))},
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All trials, in their order; past the ends of shorter texts NaN, or -1 for token ids."""
        import xarray as xr

        fills = {"token_id": -1, "logprob": np.nan}
        found: xr.Dataset = xr.concat(parts, "trial", join="outer", coords="minimal", fill_value=fills)
        return found


@plain_torch()
def words_direction(model: Model, words: Sequence[int]) -> npt.NDArray[np.float32]:
    """Mean of the rows by which the LM head reads some tokens, at length 1: float32 [hidden]. Raises
    ConfigError where it does not read the stream itself."""
    model.config.require_linear_head()
    rows = model.network.unembedding[list(words)].double().mean(0)
    length = float(rows.norm())
    found: npt.NDArray[np.float32] = (rows / length if length > _SHORTEST else rows).float().cpu().numpy()
    return found


def _direction(model: Model, trial: Trial) -> npt.NDArray[np.float32]:
    own = words_direction(model, trial.words)
    if trial.draw is None:
        return own
    found: npt.NDArray[np.float32] = random_directions(own, trial.draw + 1, seed=trial.seed)[-1]
    return found


def _among(logprobs: npt.NDArray[np.float64], words: Sequence[int]) -> dict[str, Any]:
    """Where some tokens stand among all: log-probabilities float64 [vocab] in nats."""
    chosen = np.unique(np.array(words))
    order = np.argsort(-logprobs, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    best = int(chosen[rank[chosen].argmin()])
    return {
        "words_logprob": float(np.logaddexp.reduce(logprobs[chosen])),
        "best_word": best,
        "best_word_logprob": float(logprobs[best]),
        "best_word_rank": int(rank[best]),
        "words_in_top": int((rank[chosen] < TOP).sum()),
    }


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
