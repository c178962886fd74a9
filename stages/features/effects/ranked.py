"""Experiments with the features whose decoders align best with a word's embedding.

Features are ranked first (alignment.py); then they are traced along a prompt, or suppressed and injected at
each of its positions (exchanges.py). Ranking and runs are one experiment, because the runs depend on the
ranking.

Border: declares runs. The dictionary is given by name, and opened only to compute.

Axes: rank; position; bin of a histogram, edge between two bins; window_layer = layers whose pre-activations
are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ....pipeline import Output
from ....store.errors import DictionaryError, InterventionError
from ...causal.effects import array, check_tokens
from ...forward.hooks.spec import HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from .activity import PromptFeatures, read_states, traces
from .alignment import Scored, align, align_over_targets, ranking_columns
from .doses import Dose, in_place_of
from .exchanges import FeatureExchanges

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["RankedExchanges", "RankedTrace"]

BINS = 32
"""Number of bins of each histogram."""
_MEANING = "cosine with the embedding"
"""Meaning of the coordinate `score`."""


@dataclass(frozen=True)
class _RankedFeatures(PromptFeatures):
    """Common fields of both experiments."""

    word: int
    """Token id whose embedding is the direction."""
    target: int
    """Layer whose decoder vectors are compared with the direction."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell, since features of all layers are ranked together."""
        check_tokens(self.tokens, (self.word,))
        if not 0 <= self.target < config.num_layers:
            raise InterventionError(
                f"expected a target layer in 0..{config.num_layers - 1}, found {self.target}"
            )
        return [{}]

    def _opened(self, model: Model) -> tuple[Dictionary, Any]:
        """The dictionary, and the word's embedding as directions [1, hidden]."""
        return self.opened(model), model.embedding_vector(self.word)[None]


@dataclass(frozen=True)
class RankedExchanges(_RankedFeatures):
    """The best features suppressed, with or without an injected feature, at some positions of the prompt.

    With `draws`, every feature of the exchange is also replaced by random features of its layer that write
    the same norm: a null distribution.
    """

    name: ClassVar[str] = "ranked_exchanges"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = FeatureExchanges.outputs

    over_targets: bool = False
    """Whether features are ranked by the best of all layers they write to, else by `target` alone."""
    suppress: int = 5
    """Number of the best features that are suppressed."""
    inject: Literal["", "ranked", "same_layer"] = ""
    """Injected feature: "" for none, "ranked" for the best feature of the ranking, "same_layer" for the best
    feature at layer `target`. A feature that is also suppressed cancels out."""
    strength: float = 10.0
    """Strength of suppression and injection, in units of the decoder vectors."""
    words: tuple[int, ...] = ()
    """Token ids followed."""
    positions: tuple[int, ...] | None = None
    """Positions of the exchange; None: every position."""
    draws: int = 0
    """Number of random replacements of the whole exchange."""
    seed: int = 0
    """Seed of the first draw; the others use the following integers."""

    def prepare(self, model: Model) -> Any:
        """The exchanges, their prepared state, and the ranked features that they use."""
        dictionary, exchanged, doses = self._ranking(model)
        drawn = [
            tuple(in_place_of(doses, dictionary.n_features, seed=self.seed + i)) for i in range(self.draws)
        ]
        positions = range(len(self.tokens)) if self.positions is None else self.positions
        exchanges = FeatureExchanges(
            tuple((self.tokens, position) for position in positions),
            self.dictionary,
            self.features,
            (tuple(doses), *drawn),
            (self.strength,),
            self.words,
        )
        return exchanges, exchanges.prepare(model), exchanged

    def _ranking(self, model: Model) -> tuple[Dictionary, list[Scored], list[Dose]]:
        """The dictionary, suppressed features followed by the injected feature, and their doses."""
        dictionary, direction = self._opened(model)
        # At least one: it may be injected although nothing is suppressed.
        (ranked_at_target,) = align(dictionary, direction, self.target, max(self.suppress, 1))
        ranked = ranked_at_target
        if self.over_targets:
            (ranked,) = align_over_targets(dictionary, direction, max(self.suppress, 1))
        if len(ranked) < max(self.suppress, 1):
            raise DictionaryError(
                f"expected {self.suppress} features to suppress, {dictionary.name} has {len(ranked)}"
            )
        exchanged = ranked[: self.suppress]
        doses = [
            Dose(scored.feature.layer, scored.feature.index, fixed=-self.strength) for scored in exchanged
        ]
        if self.inject:
            injected = (ranked if self.inject == "ranked" else ranked_at_target)[0]
            exchanged = [*exchanged, injected]
            doses.append(Dose(injected.feature.layer, injected.feature.index, fixed=self.strength))
        return dictionary, exchanged, doses

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """One run per position and exchange; see `FeatureExchanges`."""
        return prepared[0].runs(prepared[1], self._cell)  # type: ignore[no-any-return]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Measurements of a run at the first position; see `measure_run`."""
        return self.measure_run(prepared, cell, 0, result)

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> dict[str, Any]:
        """Measurements of a run; see `FeatureExchanges`.

        Arguments:
            prepared: Result of `prepare`.
            cell: The cell.
            number: Number of the run in `runs`.
            result: Its logits and captures.
        """
        return prepared[0].measure_run(prepared[1], self._cell, number, result)  # type: ignore[no-any-return]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The result of `FeatureExchanges`, with the ranked features."""
        exchanges, state, exchanged = prepared
        dataset: xr.Dataset = exchanges.dataset(state, self._cell, measured)
        return dataset.assign_coords(ranking_columns(exchanged, _MEANING))

    @property
    def _cell(self) -> CellLabels:
        return {"strength": self.strength}


@dataclass(frozen=True)
class RankedTrace(_RankedFeatures):
    """The best features of a word: their decoder vectors, and their activations along the prompt."""

    name: ClassVar[str] = "ranked_trace"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "vector": Output(("rank", "hidden"), "1", "decoder vector for the target layer"),
        "trace": Output(("rank", "position"), "1", "activation"),
        "edge": Output(("window_layer", "edge_index"), "1", "edge between two bins"),
        "count": Output(("window_layer", "bin"), "1", "pre-activations in the bin"),
        "skip_projection": Output((), "1", "linear skip projected on the word's embedding"),
    }

    top_k: int = 20
    """Number of features."""

    def prepare(self, model: Model) -> tuple[Dictionary, Any, list[Scored]]:
        """The dictionary, the direction and the ranked features."""
        dictionary, direction = self._opened(model)
        (ranked,) = align(dictionary, direction, self.target, self.top_k)
        return dictionary, direction[0], ranked

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """A run of the prompt that captures the states read by features."""
        return [Run(self.tokens, HookSpec().capture(*prepared[0].read_hooks), None)]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Activations, histograms of pre-activations, and the skip's projection on the direction."""
        dictionary, direction, ranked = prepared
        states = read_states(dictionary, result, dictionary.layers)
        features = [(scored.feature.layer, scored.feature.index) for scored in ranked]
        trace = traces(dictionary, features, states, len(self.tokens))
        # The target and its neighbours, as far as the dictionary reads them.
        window = [layer for layer in range(self.target - 1, self.target + 2) if layer in states]
        histograms = [
            np.histogram(array(dictionary.layer(n).preactivations(states[n])), BINS) for n in window
        ]
        part = dictionary.layer(self.target)
        skip = float("nan")  # of transcoders without a linear skip
        if part.W_skip is not None:
            unit = direction.to(part.W_skip.device).float()
            skip = float(part.skip(states[self.target][-1:])[0].float() @ unit / unit.norm())
        return {"trace": trace, "window": window, "counted": histograms, "skip": skip}

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """score [rank], vector [rank, hidden], trace [rank, position], and histograms by layer."""
        import xarray as xr

        dictionary, _, ranked = prepared
        (result,) = measured
        vectors = [array(dictionary.decoder_vector(scored.feature, self.target)) for scored in ranked]
        edges, counts = (np.stack([scored[i] for scored in result["counted"]]) for i in (1, 0))
        values = (np.stack(vectors), result["trace"], edges, counts, result["skip"])
        arrays = zip(self.outputs.items(), values, strict=True)
        return xr.Dataset(
            {name: output.variable(value) for (name, output), value in arrays},
            coords={
                **ranking_columns(ranked, _MEANING),
                "position": np.arange(len(self.tokens)),
                "window_layer": result["window"],
            },
        )
