"""Tokens that features raise and lower directly: decoder vectors read by the unembedding.

Border: needs features, their dictionary's decoder rows and a readout (stages/logits/readout.py), and no
prompt. Only the direct path counts, from the last layer that a feature writes to into the logits; effects
through later layers are found by interventions and graphs. If the model normalises what is written (the raw
MLP output of Gemma), the gain of that norm is left out.

Method (the logit lens on a direction, as in feature dashboards): (decoder row * gain of the final norm) @
unembedding'. The final norm also divides by a scale that differs between states; it is left out. The mean is
subtracted for a LayerNorm. The mean over the vocabulary is subtracted, since it changes no probability.

Axes: named = features, each once, in order of layer and index; rank, 0 = strongest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....pipeline import Output, stage
from ....pipeline.ambient import plain_torch, steps_in_plain_torch
from ....store.arrays import Ints
from ....store.errors import ShapeError
from ...logits.ranking import ranked as ranked_cells, top_columns
from ...logits.readout import require_linear
from ..dictionary import Dictionary

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "direct_effects",
    "effects_in_blocks",
    "feature_words",
    "words_of_active",
    "words_of_attribution",
    "words_of_ranked",
]

Floats = npt.NDArray[np.float32]

BLOCK_BYTES = 1 << 26
"""Largest size in bytes of the logits [feature, vocab] that are computed at once."""
WORDS = {
    "raised": Output(("named", "rank"), "1", "tokens raised most"),
    "raised_by": Output(("named", "rank"), "logits", "increase per unit of activation"),
}


@plain_torch()
def direct_effects(
    dictionary: Dictionary, features: Ints, readout: xr.Dataset, top_k: int
) -> dict[str, npt.NDArray[Any]]:
    """The tokens whose logits features raise and lower most.

    Arguments:
        dictionary: The dictionary of the features.
        features: Layer and index of each feature [feature, 2].
        readout: Final norm and unembedding, from `stages.readout`.
        top_k: Number of tokens per feature.

    Returns:
        raised, lowered: token ids int32 [feature, rank], strongest first. raised_by, lowered_by: logits per
        unit of activation, float32 [feature, rank].

    Raises:
        ShapeError: The readout has another width than the decoder.
    """
    k = min(top_k, readout.sizes["vocab"])
    results: dict[str, npt.NDArray[Any]] = {
        name: np.empty((len(features), k), np.int32) for name in ("raised", "lowered")
    }
    results |= {name: np.empty((len(features), k), np.float32) for name in ("raised_by", "lowered_by")}
    for rows, effects in effects_in_blocks(dictionary, features, readout):
        # The most lowered tokens are the largest of the negated effects.
        for name, sign in (("raised", 1), ("lowered", -1)):
            columns = top_columns(sign * effects, k)
            results[name][rows] = columns
            results[f"{name}_by"][rows] = np.take_along_axis(effects, columns, axis=1)
    return results


@steps_in_plain_torch
def effects_in_blocks(
    dictionary: Dictionary, features: Ints, readout: xr.Dataset, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Ints, Floats]]:
    """Direct effect of one unit of each feature on every logit, in blocks.

    Arguments:
        dictionary: The dictionary of the features.
        features: Layer and index [feature, 2].
        readout: Final norm and unembedding.
        block_bytes: Bytes of logits per block.

    Yields:
        (rows of `features` that are in this block, their effects in logits [row, vocab]).

    Raises:
        ShapeError: The readout has another width than the decoder.
    """
    if dictionary.d_out != readout.sizes["hidden"]:
        raise ShapeError(
            f"expected a readout of width {dictionary.d_out}, the width that features of {dictionary.name} "
            "write, "
            f"found {readout.sizes['hidden']}; use the readout of the model that the dictionary was trained "
            "on"
        )
    # Float32 [vocab, hidden], computed once for all blocks.
    logit_directions = _logit_directions(readout)
    block_features = max(1, block_bytes // (4 * len(logit_directions)))
    for layer in np.unique(features[:, 0]).tolist():
        rows_of_layer = np.flatnonzero(features[:, 0] == layer)
        for start in range(0, len(rows_of_layer), block_features):
            rows = rows_of_layer[start : start + block_features]
            decoders = _last_decoder_rows(dictionary, layer, features[rows, 1], readout.attrs["norm"])
            yield rows, decoders @ logit_directions.T


@stage(version=1, inputs={"readout": None}, outputs=WORDS, resources=("dictionary",))
def feature_words(
    readout: xr.Dataset, *, dictionary: Dictionary, chosen: Sequence[Sequence[int]], top_k: int = 3
) -> xr.Dataset:
    """Tokens whose logits some features raise most, by the direct path.

    Arguments:
        readout: Final norm and unembedding.
        dictionary: The dictionary of the features.
        chosen: (layer, index) of each feature.
        top_k: Number of tokens per feature.
    """
    return _words(dictionary, np.array(chosen, np.int64).reshape(-1, 2), readout, top_k)


@stage(version=1, inputs={"ranked": None, "readout": None}, outputs=WORDS, resources=("dictionary",))
def words_of_ranked(
    ranked: xr.Dataset, readout: xr.Dataset, *, dictionary: Dictionary, top_k: int = 3
) -> xr.Dataset:
    """Tokens whose logits the features of a ranking raise most, by the direct path.

    Arguments:
        ranked: Dataset with the coordinates source_layer and feature [rank].
        readout: Final norm and unembedding.
        dictionary: The dictionary of the features.
        top_k: Number of tokens per feature.
    """
    pairs = np.stack([ranked[name].values for name in ("source_layer", "feature")], axis=1)
    return _words(dictionary, pairs, readout, top_k)


@stage(version=1, inputs={"active": None, "readout": None}, outputs=WORDS, resources=("dictionary",))
def words_of_active(
    active: xr.Dataset,
    readout: xr.Dataset,
    *,
    dictionary: Dictionary,
    most: int,
    position: int | None = None,
    top_k: int = 3,
) -> xr.Dataset:
    """Tokens whose logits the strongest features of a prompt raise most, by the direct path.

    Arguments:
        active: Result of `feature_activity`.
        readout: Final norm and unembedding.
        dictionary: The dictionary of the features.
        most: Number of strongest features per layer and position.
        position: Position whose features are used; None for all positions.
        top_k: Number of tokens per feature.
    """
    columns = ("active_layer", "active_position", "active_feature")
    layer, positions, feature = (active[name].values.astype(np.int64) for name in columns)
    rows = np.arange(len(layer)) if position is None else np.flatnonzero(positions == position)
    # One integer per layer and position, so that the strongest are found within each pair.
    group = layer * (int(positions.max(initial=0)) + 1) + positions
    order, _ = ranked_cells(group[rows], feature[rows], active["activation"].values[rows], most)
    strongest = rows[order]
    return _words(dictionary, np.stack([layer[strongest], feature[strongest]], axis=1), readout, top_k)


@stage(version=1, inputs={"attribution": None, "readout": None}, outputs=WORDS, resources=("dictionary",))
def words_of_attribution(
    attribution: xr.Dataset, readout: xr.Dataset, *, dictionary: Dictionary, top_k: int = 3
) -> xr.Dataset:
    """Tokens raised most by the features whose effect was checked by runs, and by that of largest estimate.

    Arguments:
        attribution: Result of `feature_attribution`.
        readout: Final norm and unembedding.
        dictionary: The dictionary of the features.
        top_k: Number of tokens per feature.
    """
    is_feature = attribution["feature"].values >= 0  # -1 marks remainders
    size = np.where(is_feature, np.abs(attribution["estimate"].values), -1.0)
    cells = np.append(attribution["chosen_cell"].values, size.argmax())
    pairs = np.stack([attribution[name].values[cells] for name in ("layer", "feature")], axis=1)
    return _words(dictionary, pairs[is_feature[cells]].astype(np.int64), readout, top_k)


def _words(dictionary: Dictionary, pairs: Ints, readout: xr.Dataset, top_k: int) -> xr.Dataset:
    """Tokens that features raise most; `pairs` [n, 2] holds layer and index, and may repeat a feature."""
    import xarray as xr

    # A feature may occur at several positions; its direct effect is the same everywhere.
    unique = np.unique(pairs, axis=0)
    effects = direct_effects(dictionary, unique, readout, top_k)
    return xr.Dataset(
        {name: (("named", "rank"), effects[name]) for name in WORDS},
        {"layer": ("named", unique[:, 0].astype(np.int32)), "feature": ("named", unique[:, 1])},
    )


def _logit_directions(readout: xr.Dataset) -> Floats:
    """Directions [vocab, hidden] whose products with a residual state are logits up to the norm's scale."""
    require_linear(readout)
    unembed: Floats = np.asarray(readout["unembed"].transpose("vocab", "hidden").values, np.float32)
    # The mean over the vocabulary shifts all logits equally and changes no probability.
    directions: Floats = (unembed - unembed.mean(0)) * np.asarray(readout["norm_weight"].values, np.float32)
    return directions


def _last_decoder_rows(dictionary: Dictionary, layer: int, features: Ints, norm: str) -> Floats:
    """Decoder rows [feature, hidden] of a layer's features for the last layer that they write to.

    The mean of each row is subtracted if `norm`, the model's final norm, is "layer", which removes it.
    """
    import torch

    rows = dictionary.layer(layer).decoder_rows(torch.from_numpy(features), max(dictionary.targets(layer)))
    decoder_rows: Floats = rows.cpu().numpy()
    return decoder_rows - decoder_rows.mean(1, keepdims=True) if norm == "layer" else decoder_rows
