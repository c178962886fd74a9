"""Crosscoders as `mizarr train` writes them: config.json and model.safetensors.

encoder.weight [place, width, feature], encoder.bias [feature], decoder.weight [place, feature, width],
decoder.bias [place, width], as `CrossCoder` of dictionary_learning has them, and threshold [feature] of a
JumpReLU. config.json lists the places, in the order of the tensors.

Border: headers and the configuration; the tensors are opened by crosscoder.py.
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
from .fields import apply_fields
from .layered import require_shapes
from .single import to_float

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = ["read", "recognises"]


def recognises(files: DictionaryFiles) -> bool:
    """Whether the configuration says so."""
    return {CONFIG, WEIGHTS} <= set(files.listing) and files.json(CONFIG).get("kind") == KIND


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """The crosscoder, with the header checked and no weight read.

    read, write: the places' own hook kind, if any. Raises DictionaryError for another.
    """
    said = files.json(CONFIG)
    apply_fields("crosscoder", said, files.path(CONFIG))
    places = _places(files, said.get("places"))
    points = [HookPoint.parse(place.hook) for place in places]
    kinds = {point.kind for point in points} | {hook_kind(name) for name in (read, write) if name}
    models = models_of(places)
    layers = {number: [] for number in models}  # type: dict[int, list[int]]
    for number, point in zip(models, points, strict=True):
        layers[number].append(point.layer or 0)
    if len(kinds) != 1 or any(each != layers[0] for each in layers.values()):
        raise DictionaryError(
            f"expected places of one kind of hook point, at the same layers of every model, in "
            f"{files.path(CONFIG)}, found {', '.join(map(str, places))}"
        )
    size, width = _sizes(files, len(places), said)
    own = max(layers[0])
    layout = DictionaryLayout(
        format="crosscoder",
        kind="crosscoder",
        read=points[0].kind,
        write=points[0].kind,
        layers=(own,),
        targets={own: tuple(sorted(layers[0]))},
        n_features=size,
        d_in=width,
        d_out=width,
        files=(WEIGHTS,),
        model_name=places[0].model,
        # Names of models are labels, as a folder may be moved; which place is whose is not.
        settings={
            "places": [[number, *astuple(place)[1:]] for number, place in zip(models, places, strict=True)],
            "activation": said.get("activation"),
            "k": said.get("k", 0),
        },
        zero_positions=0,
        places=places,
    )

    def open_layer(_: int) -> LayerFeatures:
        return Crosscoder.load(files.directory).features()

    return Opened(files, layout, open_layer)


def _places(files: DictionaryFiles, said: Any) -> tuple[CrosscoderPlace, ...]:
    where = files.path(CONFIG)
    if not isinstance(said, list) or not said:
        raise DictionaryError(f"expected a list of places in {where}, found {said!r}")
    found = []
    for each in said:
        if not isinstance(each, dict) or {"model", "hook", "scale"} - each.keys():
            raise DictionaryError(f"expected model, hook and scale of every place in {where}, found {each!r}")
        try:
            hook = str(HookPoint.parse(str(each["hook"])))
        except HookPointNotFound as error:
            raise DictionaryError(f"expected a hook point in {where}, found {error}") from error
        found.append(CrosscoderPlace(str(each["model"]), hook, to_float(each["scale"], "scale", where)))
    return tuple(found)


def _sizes(files: DictionaryFiles, places: int, said: dict[str, Any]) -> tuple[int, int]:
    """(features, width of a place), once all shapes agree."""
    found = require_shapes(files, WEIGHTS, {"decoder.weight": (places, None, None)})
    _, size, width = found["decoder.weight"]
    expected: dict[str, tuple[int, ...]] = {
        "encoder.weight": (places, width, size),
        "encoder.bias": (size,),
        "decoder.bias": (places, width),
    }
    if said.get("activation") == "JumpReLU":
        expected["threshold"] = (size,)
    require_shapes(files, WEIGHTS, expected)
    return size, width
