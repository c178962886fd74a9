"""Which tokens features raise and lower by what they write themselves: decoders, read by the unembedding.

Border: features by layer and index, their dictionary's decoder rows and a readout (stages/logits/readout.py);
no prompt enters. Only the direct path counts, from the last layer a feature writes to into the logits; what
later layers make of it is told by interventions and graphs. Where a norm follows what is written (the raw MLP
output of Gemma), its gain is left out.

Idea (nostalgebraist's lens on a direction, as feature dashboards have it): (row * gain of the final norm) @
unembedding'. The norm also divides by a scale that each state has of its own, and is left out; a norm that
subtracts the mean does so here. The mean over the vocabulary is subtracted, as it moves no probability.

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
from ...logits.ranking import top_columns
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
"""Of logits [feature, vocab] that exist at a time."""
WORDS = {
    "raised": Output(("named", "rank"), "1", "tokens raised most"),
    "raised_by": Output(("named", "rank"), "logits", "by so much per unit of activation"),
}


@plain_torch()
def direct_effects(
    dictionary: Dictionary, features: Ints, readout: xr.Dataset, top_k: int
) -> dict[str, npt.NDArray[Any]]:
    """The tokens whose logits features raise and lower most.

    features: [feature, (layer, index)]. readout: as `stages.readout` describes it. Returns raised, lowered
    int32, raised_by, lowered_by float32 [feature, rank]: strongest first.
    Raises ShapeError for a readout of another width.
    """
    k = min(top_k, readout.sizes["vocab"])
    found: dict[str, npt.NDArray[Any]] = {
        name: np.empty((len(features), k), np.int32) for name in ("raised", "lowered")
    }
    found |= {name: np.empty((len(features), k), np.float32) for name in ("raised_by", "lowered_by")}
    for some, effects in effects_in_blocks(dictionary, features, readout):
        for name, sign in (("raised", 1), ("lowered", -1)):
            columns = top_columns(sign * effects, k)
            found[name][some] = columns
            found[f"{name}_by"][some] = np.take_along_axis(effects, columns, axis=1)
    return found


@steps_in_plain_torch
def effects_in_blocks(
    dictionary: Dictionary, features: Ints, readout: xr.Dataset, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Ints, Floats]]:
    """(places among the features, what a unit of each does to every logit [place, vocab]), block by block.

    features: [feature, (layer, index)]. block_bytes: of logits at a time. Raises ShapeError for a readout of
    another width.
    """
    if dictionary.d_out != readout.sizes["hidden"]:
        raise ShapeError(
            f"expected a readout of width {dictionary.d_out}, as {dictionary.name} writes, found "
            f"{readout.sizes['hidden']}"
        )
    read_out = _directions(readout)
    step = max(1, block_bytes // (4 * len(read_out)))
    for layer in np.unique(features[:, 0]).tolist():
        mine = np.flatnonzero(features[:, 0] == layer)
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            yield some, _rows(dictionary, layer, features[some, 1], readout.attrs["norm"]) @ read_out.T


@stage(version=1, inputs={"readout": None}, outputs=WORDS, resources=("dictionary",))
def feature_words(
    readout: xr.Dataset, *, dictionary: Dictionary, chosen: Sequence[Sequence[int]], top_k: int = 3
) -> xr.Dataset:
    """The tokens that features named in advance raise most. chosen: (layer, index) of each."""
    return _words(dictionary, np.array(chosen, np.int64).reshape(-1, 2), readout, top_k)


@stage(version=1, inputs={"ranked": None, "readout": None}, outputs=WORDS, resources=("dictionary",))
def words_of_ranked(
    ranked: xr.Dataset, readout: xr.Dataset, *, dictionary: Dictionary, top_k: int = 3
) -> xr.Dataset:
    """The same of the features of a ranking. ranked: with source_layer and feature along one axis."""
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
    """The same of the strongest features of a prompt. active: as `feature_activity` gives it; of every layer
    and position, or of one position, the `most` strongest."""
    columns = ("active_layer", "active_position", "active_feature")
    layer, place, feature = (active[name].values.astype(np.int64) for name in columns)
    rows = np.arange(len(layer)) if position is None else np.flatnonzero(place == position)
    order = rows[np.lexsort((feature[rows], -active["activation"].values[rows], place[rows], layer[rows]))]
    group = np.stack([layer[order], place[order]], axis=1)
    starts = np.flatnonzero(np.any(np.diff(group, axis=0, prepend=-1), axis=1))
    within = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    kept = order[within < most]
    return _words(dictionary, np.stack([layer[kept], feature[kept]], axis=1), readout, top_k)


@stage(version=1, inputs={"attribution": None, "readout": None}, outputs=WORDS, resources=("dictionary",))
def words_of_attribution(
    attribution: xr.Dataset, readout: xr.Dataset, *, dictionary: Dictionary, top_k: int = 3
) -> xr.Dataset:
    """The same of the features that were run exactly, and of the one with the largest estimate. attribution:
    as `feature_attribution` gives it."""
    is_feature = attribution["feature"].values >= 0
    size = np.where(is_feature, np.abs(attribution["estimate"].values), -1.0)
    cells = np.append(attribution["chosen_cell"].values, size.argmax())
    pairs = np.stack([attribution[name].values[cells] for name in ("layer", "feature")], axis=1)
    return _words(dictionary, pairs[is_feature[cells]].astype(np.int64), readout, top_k)


def _words(dictionary: Dictionary, pairs: Ints, readout: xr.Dataset, top_k: int) -> xr.Dataset:
    """What is raised by features (layer, index), each once."""
    import xarray as xr

    unique = np.unique(pairs, axis=0)
    found = direct_effects(dictionary, unique, readout, top_k)
    return xr.Dataset(
        {name: (("named", "rank"), found[name]) for name in WORDS},
        {"layer": ("named", unique[:, 0].astype(np.int32)), "feature": ("named", unique[:, 1])},
    )


def _directions(readout: xr.Dataset) -> Floats:
    """What reads each token's logit off a state before the final norm's division: [vocab, hidden]."""
    require_linear(readout)
    unembed: Floats = np.asarray(readout["unembed"].transpose("vocab", "hidden").values, np.float32)
    found: Floats = (unembed - unembed.mean(0)) * np.asarray(readout["norm_weight"].values, np.float32)
    return found


def _rows(dictionary: Dictionary, layer: int, features: Ints, norm: str) -> Floats:
    """What a unit of each feature writes to the last layer it writes to: [feature, hidden]."""
    import torch

    rows = dictionary.layer(layer).decoder_rows(torch.from_numpy(features), max(dictionary.targets(layer)))
    found: Floats = rows.cpu().numpy()
    return found - found.mean(1, keepdims=True) if norm == "layer" else found
