"""Crosscoders in the format of `mizarr train`: config.json and model.safetensors.

encoder.weight [place, width, feature], encoder.bias [feature], decoder.weight [place, feature, width],
decoder.bias [place, width], as in `CrossCoder` of dictionary_learning, and threshold [feature] of a JumpReLU.
config.json lists the places, in the order of the tensors.

Border: headers and the configuration; crosscoder.py opens the tensors.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError, HookPointNotFound
from ...forward.architectures.points import HookPoint
from ..crosscoder import CONFIG, KIND, WEIGHTS, Crosscoder
from ..layers.files import DictionaryFiles
from ..layers.layout import CrosscoderPlace, DictionaryLayout, Opened, models_of
from ..layers.names import hook_kind
from .fields import apply_fields, to_float
from .layered import require_shapes

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = ["read", "recognises"]


def recognises(files: DictionaryFiles) -> bool:
    """Whether config.json states the kind "mizarr crosscoder"."""
    return {CONFIG, WEIGHTS} <= set(files.listing) and files.json(CONFIG).get("kind") == KIND


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Layout of the crosscoder; tensor shapes are checked, no weights are read.

    Arguments:
        files: Files of the dictionary.
        read: None, or a hook point of the same kind as those that config.json lists.
        write: None, or a hook point of the same kind as those that config.json lists.

    Raises:
        DictionaryError: `read` or `write` is of another kind than the hook points in config.json, or these
            differ in kind, or are at different layers of the models.
    """
    config = files.json(CONFIG)
    apply_fields("crosscoder", config, files.path(CONFIG))
    places = _places(files, config.get("places"))
    points = [HookPoint.parse(place.hook) for place in places]
    kinds = {point.kind for point in points} | {hook_kind(name) for name in (read, write) if name}
    models = models_of(places)
    layers_by_model = {number: [] for number in models}  # type: dict[int, list[int]]
    for number, point in zip(models, points, strict=True):
        layers_by_model[number].append(point.layer or 0)
    layers = layers_by_model[0]
    if len(kinds) != 1 or any(model_layers != layers for model_layers in layers_by_model.values()):
        raise DictionaryError(
            f"expected hook points of one kind, at the same layers of every model, as places in "
            f"{files.path(CONFIG)}, found {', '.join(map(str, places))}"
            + (f" and read= or write= of the kinds {', '.join(sorted(kinds))}" if read or write else "")
        )
    size, width = _sizes(files, len(places), config)
    # One set of features for all places is filed under the last layer that it reads.
    last_layer = max(layers)
    layout = DictionaryLayout(
        format="crosscoder",
        kind="crosscoder",
        read=points[0].kind,
        write=points[0].kind,
        layers=(last_layer,),
        targets={last_layer: tuple(sorted(layers))},
        n_features=size,
        d_in=width,
        d_out=width,
        files=(WEIGHTS,),
        model_name=places[0].model,
        # Model names are labels (a folder may be moved), so the identity holds model numbers instead.
        settings={
            "places": [[number, *astuple(place)[1:]] for number, place in zip(models, places, strict=True)],
            "activation": config.get("activation"),
            "k": config.get("k", 0),
        },
        zero_positions=0,
        places=places,
    )

    def open_layer(_: int) -> LayerFeatures:
        return Crosscoder.load(files.directory).features

    return Opened(files, layout, open_layer)


def _places(files: DictionaryFiles, entries: Any) -> tuple[CrosscoderPlace, ...]:
    """Models and hook points that config.json lists as `places`; DictionaryError if an entry is invalid."""
    config_path = files.path(CONFIG)
    if not isinstance(entries, list) or not entries:
        raise DictionaryError(
            f"expected a list of models and hook points as 'places' in {config_path}, found {entries!r}"
        )
    places = []
    for entry in entries:
        if not isinstance(entry, dict) or {"model", "hook", "scale"} - entry.keys():
            raise DictionaryError(
                f"expected model, hook and scale in every entry of 'places' in {config_path}, found "
                f"{entry!r}; correct the entry"
            )
        try:
            hook = str(HookPoint.parse(str(entry["hook"])))
        except HookPointNotFound as error:
            raise DictionaryError(
                f"expected a known hook point in every entry of 'places' in {config_path}, found {error}"
            ) from error
        scale = to_float(entry["scale"], "scale", config_path)
        places.append(CrosscoderPlace(str(entry["model"]), hook, scale))
    return tuple(places)


def _sizes(files: DictionaryFiles, n_places: int, config: dict[str, Any]) -> tuple[int, int]:
    """(number of features, width of the states), from tensor shapes; DictionaryError if these disagree."""
    shapes = require_shapes(files, WEIGHTS, {"decoder.weight": (n_places, None, None)})
    _, size, width = shapes["decoder.weight"]
    expected: dict[str, tuple[int, ...]] = {
        "encoder.weight": (n_places, width, size),
        "encoder.bias": (size,),
        "decoder.bias": (n_places, width),
    }
    if config.get("activation") == "JumpReLU":
        expected["threshold"] = (size,)
    require_shapes(files, WEIGHTS, expected)
    return size, width
