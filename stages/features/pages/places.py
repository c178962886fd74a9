"""How strongly a crosscoder's features are written to each of its places, and which are one model's alone.

Norms are in units of the spread of the states there, so that layers and models compare. Of two models the
relative norm is the second's share: 0 is written to the first alone, 1 to the second alone (Lindsey et al.
2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing").

Border: a crosscoder's decoders; no corpus. A feature that never fires says nothing of the models, so read
these beside how often each is active.

Axes: place; feature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....pipeline import Output, stage
from ..crosscoder import Crosscoder
from ..dictionary import Dictionary
from ..layers.layout import models_of
from .chosen import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["place_norms"]


@stage(
    version=1,
    inputs={"blocks": ("block", "slot")},
    outputs={
        "norm": Output(("place", "feature"), "1", "norm of what a unit writes, in units of the states"),
        "relative_norm": Output(
            ("feature",), "1", "the second model's share of the norms of both", is_optional=True
        ),
        "decoder_cosine": Output(
            ("feature",), "1", "cosine of what is written to both models", is_optional=True
        ),
    },
    cells="block",
    combine=join_features,
    resources=("dictionary",),
)
def place_norms(blocks: xr.DataArray, *, dictionary: Dictionary) -> xr.Dataset:
    """Norms of decoders at the places of a crosscoder.

    blocks: `feature_blocks`. Returns norm [place, feature]; of two models relative_norm and decoder_cosine
    [feature], over all places of each. place_model and place_layer number and layer of each place's model.
    """
    import xarray as xr

    crosscoder, layer = Crosscoder.load(dictionary.files.directory), dictionary.layers[0]
    chosen = features_of(blocks, dictionary.n_features)
    models = models_of(crosscoder.places)
    points = [point for each in dictionary.reads() for point in each]
    found = xr.Dataset(
        {"norm": (("place", "feature"), crosscoder.norms()[:, chosen].numpy())},
        coords={
            "feature": chosen,
            "layer": layer,
            "place": [str(place) for place in crosscoder.places],
            "place_model": ("place", list(models)),
            "place_layer": ("place", [point.layer or 0 for point in points]),
        },
    )
    if max(models) == 1:
        found["relative_norm"] = ("feature", crosscoder.relative_norm()[chosen].numpy())
        found["decoder_cosine"] = ("feature", crosscoder.decoder_cosine()[chosen].numpy())
    return found
