"""What is shown of a crosscoder: how its features share the places they are written to.

Border: norms by place, and which features are active in a corpus, in; views out.
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
"""Of the histogram of relative norms."""


def place_views(norms: xr.Dataset, alive: npt.NDArray[np.bool_], name: str) -> Iterator[View]:
    """A row per place; of two models how many features are one's alone, and the relative norms.

    norms: as `place_norms` gives them. alive: features that are active somewhere, which alone are counted.
    name: of the crosscoder.
    """
    shown = norms.sel(feature=norms["feature"].values[alive])
    norm = shown["norm"].values
    largest = norm.argmax(axis=0)
    rows = [
        {
            "place": place,
            "mean_norm": float(each.mean()) if len(each) else 0.0,
            "strongest": int((largest == number).sum()) if norm.size else 0,
        }
        for number, (place, each) in enumerate(zip(norms["place"].values.tolist(), norm, strict=True))
    ]
    yield Table.of(
        rows,
        ("place", "place"),
        ("mean norm", "mean_norm", ".3f"),
        ("written to most", "strongest", "d"),
        title=f"Where features of {name} are written to",
        caption="Norms in units of the spread of the states there; of features that are active somewhere.",
        json={"places": rows},
    )
    if "relative_norm" not in norms:
        return
    relative = shown["relative_norm"].values
    counts = exclusive(relative)
    yield Data(json={"models": counts})
    histogram = Lines.of(
        _histogram(relative),
        "Share of the second model in what features write",
        f"Of {len(relative):,} features that are active, {counts['first_alone']:,} are written to the first "
        f"model alone (up to {EXCLUSIVE:g}), {counts['second_alone']:,} to the second, {counts['shared']:,} "
        "to both. A model against itself is the control.",
    )
    yield from together("relative_norms", f"Features of {name}", histogram, caption=histogram.caption)


def exclusive(relative: npt.NDArray[Any]) -> dict[str, int]:
    """How many features are written to the first model alone, to the second, to both, by relative norm."""
    first, second = int((relative <= EXCLUSIVE).sum()), int((relative >= 1 - EXCLUSIVE).sum())
    return {"first_alone": first, "second_alone": second, "shared": len(relative) - first - second}


def _histogram(relative: npt.NDArray[Any]) -> xr.DataArray:
    """Features by relative norm: [which, relative_norm]."""
    counts, edges = np.histogram(relative, BINS, (0, 1))
    centres = (edges[:-1] + edges[1:]) / 2
    return labelled(counts[None].astype(np.float64), "features", which=["features"], relative_norm=centres)
