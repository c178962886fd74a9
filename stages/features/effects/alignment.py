"""Ranks features by the alignment of their decoder vectors with a direction such as a token's embedding.

Scores are dot products, or cosines, of the direction with a feature's decoder vector for one layer. No prompt
or activation enters: they show what a feature would write, not that it is active (candle-mi calls the same
ranking an attribution graph; see stages/graph for those). Scores are signed: features that write the opposite
come last.

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
from ..layers.layer import layers_text
from ..layers.layout import FeatureId

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["DecoderSearch", "Scored", "align", "align_over_targets", "ranking_columns"]

Floats = npt.NDArray[np.float32]

ROWS = 4096
"""Number of decoder rows that are in memory at once."""
SMALLEST_NORM = 1e-10
"""Smallest norm by which a direction is divided; a shorter direction is left as it is."""


@dataclass(frozen=True)
class Scored:
    """A feature, and how well its decoder vector aligns with a direction."""

    feature: FeatureId
    """Layer and index of the feature."""
    score: float
    """Cosine or dot product of decoder vector and direction."""


@plain_torch()
def align(
    dictionary: Dictionary, directions: Any, target: int, top_k: int, *, cosine: bool = True
) -> list[list[Scored]]:
    """The features whose decoder vectors for one layer align best with each direction.

    Arguments:
        dictionary: The dictionary of the features.
        directions: Tensor or array of real numbers [direction, d_out].
        target: Layer that is written; the features of all layers that write to it are ranked together.
        top_k: Number of features per direction.
        cosine: Whether scores are cosines; else dot products.

    Returns:
        By direction, a list of features, best first; those whose score is infinite or NaN are left out.

    Raises:
        DictionaryError: No feature writes to the layer.
        ShapeError: Directions have another width, or there are none.
    """
    matrix = _checked(dictionary, directions, cosine)
    sources = [layer for layer in dictionary.layers if target in dictionary.targets(layer)]
    if not sources:
        raise DictionaryError(
            f"expected target to be a layer that features of {dictionary.name} write to "
            f"({layers_text(dictionary.write_layers)}), found target={target}"
        )
    scores_by_layer = [_scores(dictionary, layer, target, matrix, cosine) for layer in sources]
    return [_ranked(sources, [scores[i] for scores in scores_by_layer], top_k) for i in range(len(matrix))]


@plain_torch()
def align_over_targets(
    dictionary: Dictionary, directions: Any, top_k: int, *, cosine: bool = True
) -> list[list[Scored]]:
    """The features whose decoder vectors for any layer align best with each direction.

    For each target layer the best `top_k` are found; a feature counts with its best score over these layers.

    Arguments:
        dictionary: The dictionary of the features.
        directions: Tensor or array of real numbers [direction, d_out].
        top_k: Number of features per direction.
        cosine: Whether scores are cosines; else dot products.

    Raises:
        ShapeError: Directions have another width, or there are none.
    """
    best: list[dict[FeatureId, float]] = [{} for _ in range(len(directions))]
    for target in dictionary.write_layers:
        for best_scores, ranking in zip(
            best, align(dictionary, directions, target, top_k, cosine=cosine), strict=True
        ):
            for scored in ranking:
                # A feature of a CLT writes to several layers and counts once, with its best score.
                best_scores[scored.feature] = max(scored.score, best_scores.get(scored.feature, -np.inf))
    ordered = [sorted(best_scores.items(), key=lambda pair: (-pair[1], pair[0])) for best_scores in best]
    return [[Scored(*pair) for pair in ranking[:top_k]] for ranking in ordered]


def _checked(dictionary: Dictionary, directions: Any, cosine: bool) -> Floats:
    """Directions as float32 [direction, d_out], with norm 1 if scores are cosines; ShapeError for others."""
    matrix = np.asarray(array(directions) if hasattr(directions, "detach") else directions, np.float32)
    if matrix.ndim != 2 or not len(matrix) or matrix.shape[1] != dictionary.d_out:
        raise ShapeError(
            f"expected directions of shape [direction, {dictionary.d_out}] for features of "
            f"{dictionary.name}, at least one, found shape {list(matrix.shape)}"
        )
    if not cosine:
        return matrix
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    # A zero direction stays zero and scores 0 with every feature.
    return (matrix / np.where(norms > SMALLEST_NORM, norms, 1)).astype(np.float32)


def _scores(dictionary: Dictionary, layer: int, target: int, directions: Floats, cosine: bool) -> Floats:
    """Scores [direction, feature] of all features of one layer, by their decoder vectors for `target`."""
    features = dictionary.layer(layer)
    scores = np.empty((len(directions), features.n_features), np.float32)
    for start in range(0, features.n_features, ROWS):
        block = slice(start, min(start + ROWS, features.n_features))
        # In float64, so that a direction's float32 scores do not depend on how many are asked for with it.
        rows = array(features.decoder_rows(block, target)).astype(np.float64)
        products = directions.astype(np.float64) @ rows.T
        if cosine:
            with np.errstate(divide="ignore", invalid="ignore"):  # zero rows become NaN, which is left out
                products /= np.linalg.norm(rows, axis=1)
        scores[:, block] = products
    return scores


def _ranked(layers: Sequence[int], scores: Sequence[Floats], top_k: int) -> list[Scored]:
    """The `top_k` features of highest score, best first.

    Arguments:
        layers: Layers that are ranked together.
        scores: Scores [feature] of each of these layers.
        top_k: Number of features.
    """
    layer = np.repeat(np.array(layers), [len(row) for row in scores])
    index = np.concatenate([np.arange(len(row)) for row in scores])
    score = np.concatenate(list(scores))
    finite = np.flatnonzero(np.isfinite(score))
    # A stable sort keeps equal scores in order of layer and index, which is how they lie.
    order = finite[np.argsort(-score[finite], kind="stable")][: max(top_k, 0)]
    return [Scored(FeatureId(int(layer[i]), int(index[i])), float(score[i])) for i in order]


def ranking_columns(ranking: Sequence[Scored], meaning: str) -> dict[str, Any]:
    """Coordinates score, source_layer and feature [rank] of a ranking, as `xr.Dataset` takes them.

    Arguments:
        ranking: Features with their scores, best first.
        meaning: Description of the score, stored as its `long_name`.
    """
    about = {"units": "1", "long_name": meaning}
    return {
        "score": ("rank", np.array([scored.score for scored in ranking]), about),
        "source_layer": ("rank", np.array([scored.feature.layer for scored in ranking], np.int32)),
        "feature": ("rank", np.array([scored.feature.index for scored in ranking], np.int64)),
    }


@dataclass(frozen=True)
class DecoderSearch(DictionaryExperiment):
    """The features of a dictionary whose decoder vectors align best with a token's embedding.

    If embedding and unembedding of a model differ, the embedding is used.
    """

    name: ClassVar[str] = "decoder_search"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "score": Output(("rank",), "1", "cosine or dot product of decoder vector and embedding")
    }

    token: int
    """Id of the token whose embedding is the direction."""
    dictionary: str
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str
    """Digest of the dictionary (`Dictionary.identity`)."""
    target: int | None = None
    """Layer that is written: its decoder vectors count. None: the best score over all layers."""
    top_k: int = 20
    """Number of features, best first."""
    cosine: bool = True
    """Whether scores are cosines; else dot products."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """A single cell; PromptError for a token id outside the vocabulary."""
        if not 0 <= self.token < config.vocab_size:
            raise PromptError(f"expected a token id from 0 to {config.vocab_size - 1}, found {self.token}")
        return [{}]

    def prepare(self, model: Model) -> tuple[Dictionary, Any]:
        """(dictionary, embedding of the token as direction [1, hidden])."""
        dictionary = self.opened(model)
        return dictionary, model.embedding_vector(self.token)[None]

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """Runs of the model: none, because only weights are read."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> Any:
        """Never called, because there are no runs."""
        raise AssertionError("a decoder search runs nothing")

    def dataset(
        self, prepared: tuple[Dictionary, Any], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """score [rank], with layer and index of each feature as coordinates."""
        import xarray as xr

        dictionary, direction = prepared
        if self.target is None:
            (ranking,) = align_over_targets(dictionary, direction, self.top_k, cosine=self.cosine)
        else:
            (ranking,) = align(dictionary, direction, self.target, self.top_k, cosine=self.cosine)
        meaning = f"{'cosine' if self.cosine else 'dot product'} of decoder vector and embedding"
        columns = ranking_columns(ranking, meaning)
        score = columns.pop("score")
        return xr.Dataset({"score": score}, {"rank": np.arange(1, len(ranking) + 1), **columns})
