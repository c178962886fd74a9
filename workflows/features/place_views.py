"""Views of a crosscoder: decoder norms of its features by place, a layer or a model.

A place is one hook point of one model. Border: decoder norms by place and the mask of features that are
active in a corpus in; views out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...stages.features.crosscoder import EXCLUSIVE
from ..labelled import labelled
from ..views import Data, Lines, Table, View, together

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["place_views"]

BINS = 20
"""Number of bins of the histogram of relative decoder norms."""


def place_views(norms: xr.Dataset, alive: npt.NDArray[np.bool_], name: str) -> Iterator[View]:
    """Views of a crosscoder: a table with a row per place and, for one of two models, a histogram of relative
    norms.

    Arguments:
        norms: result of the stage `place_norms`: norm [place, feature], and relative_norm [feature] for two
            models.
        alive: mask of the features that are active somewhere in the corpus, bool [feature]; the others are
            left out.
        name: name of the crosscoder, for titles.
    """
    shown = norms.sel(feature=norms["feature"].values[alive])
    norm = shown["norm"].values
    # Index of the place of each feature's largest norm.
    largest = norm.argmax(axis=0)
    rows = [
        {
            "place": place,
            # The mean of no features is NaN in numpy, which JSON does not have.
            "mean_norm": float(place_norm.mean()) if len(place_norm) else 0.0,
            "strongest": int((largest == i).sum()) if norm.size else 0,
        }
        for i, (place, place_norm) in enumerate(zip(norms["place"].values.tolist(), norm, strict=True))
    ]
    yield Table.of(
        rows,
        ("place", "place"),
        ("mean norm", "mean_norm", ".3f"),
        ("features with their largest norm here", "strongest", "d"),
        title=f"Decoder norms of {name} by place",
        caption="One row per place: a hook point of a model that the crosscoder reads and writes. Mean norm: "
        "of the decoder vectors, after scaling the states of all places to a common size. Features that are "
        "active nowhere in the corpus are left out.",
        json={"places": rows},
    )
    if "relative_norm" not in norms:
        return
    relative = shown["relative_norm"].values
    counts = exclusive(relative)
    yield Data(json={"models": counts})
    histogram = Lines.of(
        _histogram(relative),
        "Relative norm: the second model's share of a feature's decoder norms",
        "x: relative norm, the second model's share of a feature's decoder norms (0: only the first model "
        f"has the feature; 1: only the second). y: number of features. Of {len(relative):,} active features, "
        f"{counts['first_alone']:,} are written to the first model alone (relative norm up to "
        f"{EXCLUSIVE:g}), {counts['second_alone']:,} to the second alone (from {1 - EXCLUSIVE:g}), "
        f"{counts['shared']:,} to both. No control is run here; a crosscoder of a model against itself is "
        "one.",
    )
    yield from together("relative_norms", f"Features of {name}", histogram, caption=histogram.caption)


def exclusive(relative: npt.NDArray[Any]) -> dict[str, int]:
    """Numbers of features by the models that have them: "first_alone", "second_alone" and "shared".

    relative: the second model's share of each feature's decoder norms, 0 to 1, [feature]; up to `EXCLUSIVE` a
    feature counts as the first model's alone, from 1 - `EXCLUSIVE` on as the second's.
    """
    n_first, n_second = int((relative <= EXCLUSIVE).sum()), int((relative >= 1 - EXCLUSIVE).sum())
    return {"first_alone": n_first, "second_alone": n_second, "shared": len(relative) - n_first - n_second}


def _histogram(relative: npt.NDArray[Any]) -> xr.DataArray:
    """Number of features by relative norm, in BINS bins from 0 to 1, [which, relative_norm]."""
    counts, edges = np.histogram(relative, BINS, (0, 1))
    centres = (edges[:-1] + edges[1:]) / 2
    return labelled(counts[None].astype(np.float64), "features", which=["features"], relative_norm=centres)
