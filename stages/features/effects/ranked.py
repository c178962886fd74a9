"""Features chosen by what they write, looked at and injected: how two kinds of transcoders see the same word.

The features that write most along a word's embedding are ranked first (alignment.py); then they are followed
through a prompt, or suppressed and injected at each of its positions (exchanges.py). Ranking and runs are one
experiment, as the runs depend on the ranking.

Border: declares runs. The dictionary is named, and opened only to compute.

Axes: rank; position; bin of a histogram, edge between two; window_layer = layers whose pre-activations are
counted.
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
from ..dictionary_experiment import DictionaryExperiment
from .activity import as_rows
from .alignment import Scored, align, align_over_targets
from .doses import Dose, in_place_of
from .exchanges import FeatureExchanges

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["RankedExchanges", "RankedTrace"]

BINS = 32
_ALL: CellLabels = {}


@dataclass(frozen=True)
class _Ranked(DictionaryExperiment):
    """What both share.

    tokens: the prompt. dictionary: its name, no part of the key; features: its identity. word: token id whose
    embedding is the direction. target: layer written to.
    """

    tokens: tuple[int, ...]
    dictionary: str
    features: str
    word: int
    target: int

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: features are ranked among all."""
        check_tokens(self.tokens, (self.word,))
        if not 0 <= self.target < config.num_layers:
            raise InterventionError(
                f"expected a target layer in 0..{config.num_layers - 1}, found {self.target}"
            )
        return [_ALL]

    def _opened(self, model: Model) -> tuple[Dictionary, Any]:
        """The dictionary, and the word's embedding as directions [1, hidden]."""
        return self.opened(model), model.embedding_vector(self.word)[None]


@dataclass(frozen=True)
class RankedExchanges(_Ranked):
    """The best features suppressed, with or without one injected, at some positions of the prompt.

    With `draws`, every feature of the exchange is also replaced by random ones of its layer that write the
    same norm: a null distribution.
    """

    name: ClassVar[str] = "ranked_exchanges"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = FeatureExchanges.outputs

    over_targets: bool = False
    """Whether features are ranked by the best of all layers they write to, else by `target` alone."""
    suppress: int = 5
    """Number of the best features that are suppressed."""
    inject: Literal["", "ranked", "same_layer"] = ""
    """Feature that is injected: none, the best of the same ranking, or the best by what is written to
    `target`. A feature that is suppressed as well cancels."""
    strength: float = 10.0
    words: tuple[int, ...] = ()
    """Token ids followed."""
    positions: tuple[int, ...] | None = None
    """Positions of the exchange; None: every position."""
    draws: int = 0
    """Number of random replacements of the whole exchange."""
    seed: int = 0
    """Seed of the first draw; the others use the following integers."""

    def prepare(self, model: Model) -> Any:
        """The exchanges that the ranking asks for, what they need, and the ranked features."""
        dictionary, chosen, doses = self._ranking(model)
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
        return exchanges, exchanges.prepare(model), chosen

    def _ranking(self, model: Model) -> tuple[Dictionary, list[Scored], list[Dose]]:
        """The dictionary, and the features that are suppressed, then injected, with their doses."""
        dictionary, direction = self._opened(model)
        (same,) = align(dictionary, direction, self.target, max(self.suppress, 1))
        ranked = same
        if self.over_targets:
            (ranked,) = align_over_targets(dictionary, direction, max(self.suppress, 1))
        if len(ranked) < max(self.suppress, 1):
            raise DictionaryError(
                f"expected {self.suppress} features to suppress, {dictionary.name} has {len(ranked)}"
            )
        chosen = ranked[: self.suppress]
        doses = [Dose(one.feature.layer, one.feature.index, fixed=-self.strength) for one in chosen]
        if self.inject:
            best = (ranked if self.inject == "ranked" else same)[0]
            chosen = [*chosen, best]
            doses.append(Dose(best.feature.layer, best.feature.index, fixed=self.strength))
        return dictionary, chosen, doses

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """One run per position and exchange; see `FeatureExchanges`."""
        return prepared[0].runs(prepared[1], self._cell)  # type: ignore[no-any-return]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Measurements of a run at the first position; see `measure_run`."""
        return self.measure_run(prepared, cell, 0, result)

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> dict[str, Any]:
        """Measurements of run `number`; see `FeatureExchanges`."""
        return prepared[0].measure_run(prepared[1], self._cell, number, result)  # type: ignore[no-any-return]

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The result of `FeatureExchanges`, with the ranked features."""
        exchanges, needed, chosen = prepared
        found: xr.Dataset = exchanges.dataset(needed, self._cell, measured)
        return found.assign_coords(_features(chosen))

    @property
    def _cell(self) -> CellLabels:
        return {"strength": self.strength}


@dataclass(frozen=True)
class RankedTrace(_Ranked):
    """The best features of a word: what they write, and how active they are along the prompt.

    top_k: features followed.
    """

    name: ClassVar[str] = "ranked_trace"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "vector": Output(("rank", "hidden"), "1", "what a unit writes to the target"),
        "trace": Output(("rank", "position"), "1", "activation"),
        "edge": Output(("window_layer", "edge_index"), "1", "edge between two bins"),
        "count": Output(("window_layer", "bin"), "1", "pre-activations in the bin"),
        "skip_projection": Output((), "1", "linear skip along the word's embedding"),
    }

    top_k: int = 20

    def prepare(self, model: Model) -> tuple[Dictionary, Any, list[Scored]]:
        """The dictionary, the direction and the ranking."""
        dictionary, direction = self._opened(model)
        (ranked,) = align(dictionary, direction, self.target, self.top_k)
        return dictionary, direction[0], ranked

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """The prompt, with what features read."""
        return [Run(self.tokens, HookSpec().capture(*prepared[0].read_hooks), None)]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Traces, histograms of the layers around the target, and the skip's share along the direction."""
        dictionary, direction, ranked = prepared
        states = {layer: as_rows(result[dictionary.read_hook(layer)][0]) for layer in dictionary.layers}
        trace = np.zeros((len(ranked), len(self.tokens)), np.float32)
        for layer in {one.feature.layer for one in ranked}:
            mine = [i for i, one in enumerate(ranked) if one.feature.layer == layer]
            dense = dictionary.layer(layer).encode(states[layer])
            trace[mine] = array(dense[:, [ranked[i].feature.index for i in mine]]).T
        window = [layer for layer in range(self.target - 1, self.target + 2) if layer in states]
        counted = [np.histogram(array(dictionary.layer(n).preactivations(states[n])), BINS) for n in window]
        part = dictionary.layer(self.target)
        skip = float("nan")
        if part.W_skip is not None:
            unit = direction.to(part.W_skip.device).float()
            skip = float(part.skip(states[self.target][-1:])[0].float() @ unit / unit.norm())
        return {"trace": trace, "window": window, "counted": counted, "skip": skip}

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """score [rank], vector [rank, hidden], trace [rank, position], and histograms by layer."""
        import xarray as xr

        dictionary, _, ranked = prepared
        (found,) = measured
        vectors = [array(dictionary.decoder_vector(one.feature, self.target)) for one in ranked]
        edges, counts = (np.stack([one[i] for one in found["counted"]]) for i in (1, 0))
        values = (np.stack(vectors), found["trace"], edges, counts, found["skip"])
        arrays = zip(self.outputs.items(), values, strict=True)
        return xr.Dataset(
            {name: output.variable(value) for (name, output), value in arrays},
            coords={
                **_features(ranked),
                "position": np.arange(len(self.tokens)),
                "window_layer": found["window"],
            },
        )


def _features(ranked: Sequence[Scored]) -> dict[str, Any]:
    return {
        "score": ("rank", np.array([one.score for one in ranked]), _about("cosine with the embedding")),
        "source_layer": ("rank", np.array([one.feature.layer for one in ranked], np.int32)),
        "feature": ("rank", np.array([one.feature.index for one in ranked], np.int64)),
    }


def _about(meaning: str) -> dict[str, str]:
    return {"units": "1", "long_name": meaning}
