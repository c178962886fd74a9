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
"""Description of the coordinate `score`, stored as its `long_name`."""


@dataclass(frozen=True)
class _RankedFeatures(PromptFeatures):
    """Common fields of the experiments with features that align with a word's embedding."""

    word: int
    """Id of the token whose embedding is compared with decoder vectors."""
    target: int
    """Layer that is written: decoder vectors for this layer are compared."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell, since features of all layers are ranked together."""
        check_tokens(self.tokens, (self.word,))
        if not 0 <= self.target < config.num_layers:
            raise InterventionError(
                f"expected a target layer from 0 to {config.num_layers - 1}, found {self.target}"
            )
        return [{}]

    def _opened(self, model: Model) -> tuple[Dictionary, Any]:
        """The dictionary, and the word's embedding as directions [1, hidden]."""
        return self.opened(model), model.embedding_vector(self.word)[None]


@dataclass(frozen=True)
class RankedExchanges(_RankedFeatures):
    """Suppresses the features that align best with a word, and may inject another, at some positions.

    `draws` repeats this as a null distribution, with every feature replaced by a random one of its layer that
    writes vectors of the same norm.
    """

    name: ClassVar[str] = "ranked_exchanges"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = FeatureExchanges.outputs

    over_targets: bool = False
    """Whether a feature's score is its best over all layers that it writes to, or that for `target`."""
    suppress: int = 5
    """Number of features that are suppressed, best aligned first."""
    inject: Literal["", "ranked", "same_layer"] = ""
    """Feature that is injected: "" for none, "ranked" for the first of the ranking, "same_layer" for the best
    one for layer `target`. Injection and suppression of the same feature cancel out."""
    strength: float = 10.0
    """Strength of suppression and injection, in units of the decoder vectors."""
    words: tuple[int, ...] = ()
    """Ids of the tokens whose logits are stored."""
    positions: tuple[int, ...] | None = None
    """Positions at which the features are exchanged, each in a run of its own; None: every position."""
    draws: int = 0
    """Number of random replacements of all exchanged features."""
    seed: int = 0
    """Seed of the first draw; draw i uses seed + i."""

    def prepare(self, model: Model) -> Any:
        """(the `FeatureExchanges` to run, its prepared state, the ranked features that are exchanged)."""
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
        """(dictionary, suppressed features followed by the injected one, their doses in the same order)."""
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
        """Next-token measurements of a run at the first position; see `measure_run`."""
        return self.measure_run(prepared, cell, 0, result)

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> dict[str, Any]:
        """Next-token measurements of one run, by name; `FeatureExchanges` defines them.

        Arguments:
            prepared: Result of `prepare`.
            cell: Labels of the cell.
            number: Index of the run in `runs`.
            result: Logits and captured activations of the run.
        """
        return prepared[0].measure_run(prepared[1], self._cell, number, result)  # type: ignore[no-any-return]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Result of `FeatureExchanges`, with score, layer and index of the features as coordinates."""
        exchanges, state, exchanged = prepared
        dataset: xr.Dataset = exchanges.dataset(state, self._cell, measured)
        return dataset.assign_coords(ranking_columns(exchanged, _MEANING))

    @property
    def _cell(self) -> CellLabels:
        return {"strength": self.strength}


@dataclass(frozen=True)
class RankedTrace(_RankedFeatures):
    """Decoder vectors of the features that align best with a word, and their activations along a prompt."""

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
    """Number of features, best aligned first."""

    def prepare(self, model: Model) -> tuple[Dictionary, Any, list[Scored]]:
        """(dictionary, the word's embedding [hidden], the best features)."""
        dictionary, direction = self._opened(model)
        (ranked,) = align(dictionary, direction, self.target, self.top_k)
        return dictionary, direction[0], ranked

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """One run of the prompt, which captures the states that the features read."""
        return [Run(self.tokens, HookSpec().capture(*prepared[0].read_hooks), None)]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Feature activations, histograms of pre-activations, and the skip connection's share of the word."""
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
        skip = float("nan")  # for transcoders without a skip connection
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
