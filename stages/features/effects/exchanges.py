"""Exchanges of features: many sets of doses, each at many places, and what the model says then.

What an exchange is held against needs hundreds of short runs - random features in a feature's place, parts of
the exchange, other prompts - of which one number each is kept. They are one cell: a cell each would cost more
to store than to compute.

Border: declares runs; doses and the sweep over strengths are sweeps.py's.

Axes: place = tokens and a position in them; exchange = doses injected together; word = tokens followed;
layer, head, of the attention from the end to the position. Units: nats, logits; attention weights have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.errors import InterventionError
from ...causal.effects import array, check_tokens, check_words, read_logits
from ...causal.metrics import log_softmax
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from ..of_dictionary import OfDictionary
from .injection import injected
from .sweeps import Dose

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["FeatureExchanges", "Place"]

Place = tuple[tuple[int, ...], int]
"""Tokens of a prompt, and the position at which features are exchanged."""

_MEASURES: Mapping[str, Output] = {
    "logit": Output(("word",), "logits", "logit of a word"),
    "logprob": Output(("word",), "nats", "log-probability of a word"),
    "attention": Output(("layer", "head"), "1", "attention from the end to the place", is_optional=True),
}


def _outputs() -> dict[str, Output]:
    found = {}
    for name, each in _MEASURES.items():
        found[name] = replace(each, dims=("place", "exchange", *each.dims))
        untouched = f"{each.long_name}, untouched"
        found[f"baseline_{name}"] = replace(each, dims=("place", *each.dims), long_name=untouched)
    return found


@dataclass(frozen=True)
class FeatureExchanges(OfDictionary):
    """Every exchange at every place, measured at the end of its prompt.

    places: tokens and position. dictionary: its name, no part of the key; features: its identity. exchanges:
    doses injected together. strength: of the runs. words: token ids followed. edge: whether attention from
    the end to the place is kept. Raises PromptError and InterventionError for what is out of range.
    """

    name: ClassVar[str] = "feature_exchanges"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = _outputs()

    places: tuple[Place, ...]
    dictionary: str
    features: str
    exchanges: tuple[tuple[Dose, ...], ...]
    strength: float
    words: tuple[int, ...]
    edge: bool = False

    def params(self) -> dict[str, Any]:
        """All but where the dictionary lies."""
        doses = [[dose.params() for dose in exchange] for exchange in self.exchanges]
        return {**super().params(), "exchanges": doses}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: storing many would cost more than their runs."""
        if not self.places or not self.exchanges or not all(self.exchanges):
            raise InterventionError(
                f"expected places and exchanges of at least one feature, found {len(self.places)} and "
                f"{list(map(len, self.exchanges))}"
            )
        for tokens, position in self.places:
            check_tokens(tokens, self.words)
            if not 0 <= position < len(tokens):
                raise InterventionError(f"expected a position in 0..{len(tokens) - 1}, found {position}")
        check_words(self.words, config.vocab_size)
        return [{}]

    def prepare(self, model: Model) -> tuple[Dictionary, list[dict[str, Any]]]:
        """The dictionary, and what is measured of every place's prompt untouched."""
        dictionary = self.opened(model)
        read = {
            tokens: model.forward([list(tokens)], self._captures(), want=self._want)
            for tokens in dict.fromkeys(tokens for tokens, _ in self.places)
        }
        return dictionary, [self._read(read[tokens], position) for tokens, position in self.places]

    def runs(self, prepared: tuple[Dictionary, Any], cell: CellLabels) -> list[Run]:
        """One per place and exchange, in this order."""
        sets = [[dose.at(self.strength, prepared[0]) for dose in each] for each in self.exchanges]
        return [
            Run(tokens, injected(prepared[0], each, [position]).extend(self._captures()), self._want)
            for tokens, position in self.places
            for each in sets
        ]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """What the model says at the end of the prompt, and its last row of attention."""
        return self._read(result, None)

    def dataset(
        self, prepared: tuple[Dictionary, list[dict[str, Any]]], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """[place, exchange, ...], and the untouched runs as `baseline_...` [place, ...]."""
        import xarray as xr

        count = len(self.exchanges)
        found: dict[str, Any] = {}
        for name in prepared[1][0]:
            runs = [one[name] for one in measured]
            if name == "attention":
                runs = [row[..., self.places[i // count][1]] for i, row in enumerate(runs)]
            stacked = np.stack(runs)
            shaped = stacked.reshape(len(self.places), count, *stacked.shape[1:])
            found[name] = self.outputs[name].variable(shaped)
            untouched = np.stack([one[name] for one in prepared[1]])
            found[f"baseline_{name}"] = self.outputs[f"baseline_{name}"].variable(untouched)
        positions = [position for _, position in self.places]
        return xr.Dataset(found, coords={"position": ("place", positions), "word": list(self.words)})

    @property
    def _want(self) -> Logits:
        return Logits(positions=(-1,))

    def _captures(self) -> HookSpec:
        return HookSpec().capture("blocks.*.attn.hook_pattern") if self.edge else HookSpec()

    def _read(self, result: HookCache, position: int | None) -> dict[str, Any]:
        """Of one run; attention [layer, head] to a position, or to all of them: [layer, head, position]."""
        logits = read_logits(result)[0]
        words = list(self.words)
        found: dict[str, Any] = {"logit": logits[words], "logprob": log_softmax(logits)[words]}
        if self.edge:
            last = np.stack([array(result[point][0])[:, -1] for point in result])
            found["attention"] = last if position is None else last[..., position]
        return found
