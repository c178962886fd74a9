"""Decoder norms of a crosscoder's features at each of its places, and features exclusive to one model.

Norms are in units of the spread of the states at the place, so that layers and models are comparable. For two
models the relative norm is the second's share: 0 means written to the first only, 1 to the second only
(Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing").

Border: a crosscoder's decoders; no corpus. The decoders of a feature that never fires carry no information
about the models, so read these figures together with firing counts.

Axes: place; feature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....pipeline import Output, stage
from ..crosscoder import Crosscoder
from ..dictionary import Dictionary
from ..layers.layout import models_of
from .feature_blocks import features_of, join_features

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["place_norms"]


@stage(
    version=1,
    inputs={"blocks": ("block", "slot")},
    outputs={
        "norm": Output(("place", "feature"), "1", "norm of the decoder vector, in units of the states"),
        "relative_norm": Output(
            ("feature",), "1", "second model's share of the decoder norms of both", is_optional=True
        ),
        "decoder_cosine": Output(
            ("feature",), "1", "cosine of the decoder vectors of both models", is_optional=True
        ),
    },
    cells="block",
    combine=join_features,
    resources=("dictionary",),
)
def place_norms(blocks: xr.DataArray, *, dictionary: Dictionary) -> xr.Dataset:
    """Decoder norms of a crosscoder's features at each hook point of each model.

    Arguments:
        blocks: Indices of the features, from `feature_blocks`.
        dictionary: The opened crosscoder.

    Returns:
        norm [place, feature]; for two models also relative_norm and decoder_cosine [feature], over all places
        of each model. The coordinates place_model and place_layer give each place's model number and layer.
    """
    import xarray as xr

    # The plain features of a dictionary have the decoders of the first model only.
    crosscoder, layer = Crosscoder.load(dictionary.files.directory), dictionary.layers[0]
    features = features_of(blocks, dictionary.n_features)
    models = models_of(crosscoder.places)
    points = [point for model_points in dictionary.reads() for point in model_points]
    figures = xr.Dataset(
        {"norm": (("place", "feature"), crosscoder.norms()[:, features].numpy())},
        coords={
            "feature": features,
            "layer": layer,
            "place": [str(place) for place in crosscoder.places],
            "place_model": ("place", list(models)),
            "place_layer": ("place", [point.layer or 0 for point in points]),
        },
    )
    # Two models; places of a single model are compared by their norms alone.
    if max(models) == 1:
        figures["relative_norm"] = ("feature", crosscoder.relative_norm()[features].numpy())
        figures["decoder_cosine"] = ("feature", crosscoder.decoder_cosine()[features].numpy())
    return figures
