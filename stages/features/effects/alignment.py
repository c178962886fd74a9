"""Which features write in a direction: decoder rows scored against vectors such as a token's embedding.

Scores are products, or cosines, of the direction with what a feature writes to one layer; they know no
prompt and no activation, so they say what a feature would do, not that it does (candle-mi calls the same
ranking an attribution graph; see stages/graph for those). Signed: features that write the opposite come last.

Border: a dictionary and directions in, rankings out; decoder rows are read once, block by block.

Order: score descending, then layer, then index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ....pipeline import Output
from ....pipeline.ambient import plain_torch
from ....store.errors import DictionaryError, PromptError, ShapeError
from ...causal.effects import array
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from ..dictionary_experiment import DictionaryExperiment
from ..layers.layout import FeatureId, layers_text

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["DecoderSearch", "Scored", "align", "align_over_targets"]

Floats = npt.NDArray[np.float32]

ROWS = 4096
"""Decoder rows held at a time."""
SMALLEST_NORM = 1e-10
"""Directions and rows below it are not divided by their norm."""


@dataclass(frozen=True)
class Scored:
    """A feature and its score."""

    feature: FeatureId
    score: float


@plain_torch()
def align(
    dictionary: Dictionary, directions: Any, target: int, top_k: int, *, cosine: bool = True
) -> list[list[Scored]]:
    """The features that write most along each direction at one layer.

    directions: [direction, d_out], real numbers (tensor or array). target: layer written to; features of all
    layers that write there are ranked together. cosine: else plain products. Rows whose score is not finite
    are left out.
    Raises DictionaryError for a layer nothing writes to, ShapeError for directions of another width or none.
    """
    given = _checked(dictionary, directions, cosine)
    sources = [layer for layer in dictionary.layers if target in dictionary.targets(layer)]
    if not sources:
        raise DictionaryError(
            f"{dictionary.name} writes to {layers_text(dictionary.write_layers)}, found target {target}"
        )
    found = [_scores(dictionary, layer, target, given, cosine) for layer in sources]
    return [_ranked(sources, [scores[i] for scores in found], top_k) for i in range(len(given))]


@plain_torch()
def align_over_targets(
    dictionary: Dictionary, directions: Any, top_k: int, *, cosine: bool = True
) -> list[list[Scored]]:
    """The same over all layers written to: of every layer the `top_k`, of every feature its best score, of
    these the `top_k`."""
    best: list[dict[FeatureId, float]] = [{} for _ in range(len(directions))]
    for target in dictionary.write_layers:
        for kept, ranking in zip(
            best, align(dictionary, directions, target, top_k, cosine=cosine), strict=True
        ):
            for scored in ranking:
                kept[scored.feature] = max(scored.score, kept.get(scored.feature, -np.inf))
    ordered = [sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])) for kept in best]
    return [[Scored(*pair) for pair in ranking[:top_k]] for ranking in ordered]


def _checked(dictionary: Dictionary, directions: Any, cosine: bool) -> Floats:
    given = np.asarray(array(directions) if hasattr(directions, "detach") else directions, np.float32)
    if given.ndim != 2 or not len(given) or given.shape[1] != dictionary.d_out:
        raise ShapeError(
            f"expected directions [direction, {dictionary.d_out}], at least one, found shape "
            f"{list(given.shape)}"
        )
    if not cosine:
        return given
    norms = np.linalg.norm(given, axis=1, keepdims=True)
    return (given / np.where(norms > SMALLEST_NORM, norms, 1)).astype(np.float32)


def _scores(dictionary: Dictionary, layer: int, target: int, given: Floats, cosine: bool) -> Floats:
    """Scores of all features of one layer, [direction, feature]."""
    part = dictionary.layer(layer)
    found = np.empty((len(given), part.n_features), np.float32)
    for start in range(0, part.n_features, ROWS):
        here = slice(start, min(start + ROWS, part.n_features))
        # In float64, so that a direction's float32 scores do not depend on how many are asked for with it.
        rows = array(part.decoder_rows(here, target)).astype(np.float64)
        products = given.astype(np.float64) @ rows.T
        if cosine:
            with np.errstate(divide="ignore", invalid="ignore"):  # zero rows become NaN, which is left out
                products /= np.linalg.norm(rows, axis=1)
        found[:, here] = products
    return found


def _ranked(layers: Sequence[int], scores: Sequence[Floats], top_k: int) -> list[Scored]:
    """The best of the features of several layers together."""
    layer = np.repeat(np.array(layers), [len(row) for row in scores])
    index = np.concatenate([np.arange(len(row)) for row in scores])
    score = np.concatenate(list(scores))
    real = np.flatnonzero(np.isfinite(score))
    # A stable sort keeps equal scores in order of layer and index, which is how they lie.
    order = real[np.argsort(-score[real], kind="stable")][: max(top_k, 0)]
    return [Scored(FeatureId(int(layer[i]), int(index[i])), float(score[i])) for i in order]


@dataclass(frozen=True)
class DecoderSearch(DictionaryExperiment):
    """Features that write along a token's embedding.

    token: its id. dictionary: its name, no part of the key; features: its identity. target: layer written
    to, None for the best over all of them. Of models whose embedding is not their unembedding, the embedding
    counts.
    """

    name: ClassVar[str] = "decoder_search"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "score": Output(("rank",), "1", "cosine, or product, of what a feature writes with the embedding")
    }

    token: int
    dictionary: str
    features: str
    target: int | None = None
    top_k: int = 20
    cosine: bool = True

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One. Raises PromptError for a token the model does not have."""
        if not 0 <= self.token < config.vocab_size:
            raise PromptError(f"expected a token id in 0..{config.vocab_size - 1}, found {self.token}")
        return [{}]

    def prepare(self, model: Model) -> tuple[Dictionary, Any]:
        """The dictionary and the direction."""
        dictionary = self.opened(model)
        return dictionary, model.embedding_vector(self.token)[None]

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """None: no prompt enters."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> Any:
        """Never called: there are no runs."""
        raise AssertionError("a decoder search runs nothing")

    def dataset(
        self, prepared: tuple[Dictionary, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """score [rank] with the features' layers and indices."""
        import xarray as xr

        dictionary, direction = prepared
        if self.target is None:
            (found,) = align_over_targets(dictionary, direction, self.top_k, cosine=self.cosine)
        else:
            (found,) = align(dictionary, direction, self.target, self.top_k, cosine=self.cosine)
        meaning = "cosine" if self.cosine else "product"
        about = {"units": "1", "long_name": f"{meaning} of what a feature writes with the embedding"}
        return xr.Dataset(
            {"score": ("rank", np.array([one.score for one in found]), about)},
            coords={
                "rank": np.arange(1, len(found) + 1),
                "source_layer": ("rank", np.array([one.feature.layer for one in found], np.int32)),
                "feature": ("rank", np.array([one.feature.index for one in found], np.int64)),
            },
        )
