"""Writes dictionaries in the formats of other programs: SAELens, sparsify, circuit-tracer.

    export(dictionary, "folder", "saelens")

A property that the format cannot express is folded into the weights if that changes no output (one factor for
all inputs, units of features, a bias subtracted from the input); otherwise the export is refused.

A folder is written under a temporary name beside its destination and renamed when it is complete.

Border: features in, files out; formats/ reads the same formats. Weights of one layer are in memory at a time.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import DictionaryError, nearest
from ...store.exchange.tensors import Tensor as Stored, write_safetensors
from .dictionary import Dictionary
from .layers.files import CFG_JSON, CONFIG_YAML
from .layers.layer import layers_text
from .layers.names import MODULES, hook_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .layers.layer import LayerFeatures

__all__ = ["FORMATS", "export"]

SAELENS_VERSION = "6.54.12"
"""Version of SAELens whose configuration is written."""


def export(dictionary: Dictionary, folder: str | Path, name: str, *, dtype: str | None = None) -> Path:
    """Write a dictionary into a new folder, and return the folder.

    Arguments:
        dictionary: The dictionary.
        folder: A folder that does not exist or is empty.
        name: Name of a format in FORMATS.
        dtype: dtype of the weights in the files ("float32", "float16", "bfloat16"); None for that of the
            weights.

    Raises:
        DictionaryError: The format cannot express the dictionary, or the folder is not empty.
    """
    if name not in FORMATS:
        near = nearest(name, FORMATS)
        raise DictionaryError(
            f"expected a format among {', '.join(FORMATS)}, found {name!r}"
            + (f"; nearest is {near!r}" if near else "")
        )
    if dictionary.places:
        raise DictionaryError(
            f"expected features that read one layer, found the crosscoder {dictionary.name}: {name} has "
            "none; copy its folder, whose tensors dictionary_learning reads"
        )
    write = FORMATS[name]
    with _new_folder(Path(folder)) as place:
        write(dictionary, place, _dtype(dtype))
    return Path(folder)


# -- SAELens


def _saelens(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write one folder per layer, or the folder itself if there is one layer."""
    _require_own_layer(dictionary, "SAELens")
    for layer in dictionary.layers:
        features = _folded(dictionary.layer(layer))
        name = _full_name(dictionary, "read", layer)
        place = folder if len(dictionary.layers) == 1 else folder / name
        tensors = {"W_enc": features.W_enc.T, "W_dec": features.W_dec[layer], "b_dec": _bias(features)}
        architecture, activation_tensors, config = _saelens_activation(dictionary, features)
        tensors |= activation_tensors
        about = {"model_name": dictionary.model_name, "hook_name": name, "sae_lens_version": SAELENS_VERSION}
        if dictionary.kind == "plt":
            about["hook_name_out"] = _full_name(dictionary, "write", layer)
            config["d_out"] = dictionary.d_out
        config_json = {
            "architecture": architecture,
            "d_in": dictionary.d_in,
            "d_sae": dictionary.n_features,
            "dtype": str(dtype or features.W_dec[layer].dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": features.centred,
            "normalize_activations": _saelens_scaling(features),
            # SAELens flattens the heads of hook_z itself and needs to know.
            "reshape_activations": "hook_z" if dictionary.layout.read == "z" else "none",
            **config,
            "metadata": {key: value for key, value in about.items() if value is not None},
        }
        _save(place / "sae_weights.safetensors", tensors, dtype)
        (place / CFG_JSON).write_text(json.dumps(config_json, indent=1))


def _saelens_activation(
    dictionary: Dictionary, features: LayerFeatures
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """(architecture, tensors, fields of cfg.json) of an activation; DictionaryError if unsupported."""
    from .layers.activations import AbsTopK, Gated, JumpReLU, ReLU, TopK

    activation, is_sae, size = features.activation, dictionary.kind == "sae", dictionary.n_features
    has_skip = features.W_skip is not None
    tensors = {} if features.W_skip is None else {"W_skip": features.W_skip}
    config: dict[str, Any] = {}
    names: dict[type, tuple[str | None, str | None]] = {
        ReLU: ("standard", "transcoder"),
        JumpReLU: ("jumprelu", "jumprelu_transcoder"),
        TopK: ("topk", None),
        AbsTopK: ("abstopk", None),
        Gated: ("gated", None),
    }
    # SAELens names one architecture per activation function and kind; some combinations have none.
    architecture = names.get(type(activation), (None, None))[0 if is_sae else 1]
    if (
        architecture is None
        or (is_sae and has_skip)
        or (isinstance(activation, TopK) and not activation.rectified)
    ):
        kind = "autoencoders" if is_sae else "transcoders"
        description = f"{type(activation).__name__} {kind}{' with a skip' if has_skip else ''}"
        raise DictionaryError(f"SAELens has no architecture for {description}; export to another format")
    if has_skip:
        architecture = architecture.replace("transcoder", "skip_transcoder")
    if isinstance(activation, Gated):
        tensors |= {"b_gate": activation.b_gate, "b_mag": activation.b_mag, "r_mag": activation.r_mag}
    else:
        tensors["b_enc"] = _or_zeros(features.b_enc, size)
    if isinstance(activation, JumpReLU):
        tensors["threshold"] = _threshold(activation, size, rectified=True)
    if isinstance(activation, TopK | AbsTopK):
        config["k"] = activation.k
    return architecture, tensors, config


def _saelens_scaling(features: LayerFeatures) -> str:
    """Value of `normalize_activations` for the scaling of the features."""
    from .layers.scaling import ConstantNorm, InputOnly, LayerNorm

    scaling = features.scaling.scaling if isinstance(features.scaling, InputOnly) else features.scaling
    return {ConstantNorm: "constant_norm_rescale", LayerNorm: "layer_norm"}.get(type(scaling), "none")


# -- sparsify


def _sparsify(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write one folder per layer, named by the module whose states are read."""
    from .formats.sparsify import WEIGHTS
    from .layers.activations import GroupMax, TopK

    _require_own_layer(dictionary, "sparsify")
    is_transcoder = dictionary.kind == "plt"
    ends = (dictionary.layout.read, dictionary.layout.write)
    modules = [
        module
        for module, hooks in MODULES.items()
        if ends == (hooks if is_transcoder else (hooks[1], hooks[1]))
    ]
    if not modules:
        raise DictionaryError(
            f"sparsify has no module that is read at {ends[0]} and written at {ends[1]}; export to another "
            "format"
        )
    for layer in dictionary.layers:
        features = _folded(dictionary.layer(layer))
        _require_as_is(features, "sparsify")
        activation = features.activation
        if not isinstance(activation, TopK | GroupMax) or (
            isinstance(activation, TopK) and not activation.rectified
        ):
            raise DictionaryError(f"sparsify has TopK and group max only, found {type(activation).__name__}")
        # sparsify's autoencoders subtract b_dec from their input, its transcoders do not.
        if features.centred == is_transcoder:
            features = _centred(features) if features.centred else _recentred(features)
        place = folder / ".".join(part for part in (f"layers.{layer}", modules[0]) if part)
        tensors = {
            "encoder.weight": features.W_enc,
            "encoder.bias": _or_zeros(features.b_enc, dictionary.n_features),
            "W_dec": features.W_dec[layer],
            "b_dec": _bias(features),
            **({} if features.W_skip is None else {"W_skip": features.W_skip}),
        }
        config = {
            "d_in": dictionary.d_in,
            "activation": "topk" if isinstance(activation, TopK) else "groupmax",
            "num_latents": dictionary.n_features,
            # sparsify requires an integer; num_latents takes precedence over it.
            "expansion_factor": max(1, dictionary.n_features // dictionary.d_in),
            "k": activation.k,
            "normalize_decoder": False,
            "multi_topk": False,
            "skip_connection": features.W_skip is not None,
            "transcode": is_transcoder,
        }
        _save(place / WEIGHTS, tensors, dtype)
        (place / CFG_JSON).write_text(json.dumps(config, indent=1))


# -- circuit-tracer


def _circuit_tracer(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write W_enc_{l} and W_dec_{l} of a CLT, or layer_{l} of per-layer transcoders, and config.yaml last."""
    import yaml

    if dictionary.layers != tuple(range(len(dictionary.layers))):
        raise DictionaryError(
            "circuit-tracer reads dictionaries of every layer from 0 on, found "
            f"{layers_text(dictionary.layers)}"
        )
    config: dict[str, Any] = {
        "model_name": dictionary.model_name,
        "model_kind": "cross_layer_transcoder" if dictionary.kind == "clt" else "transcoder_set",
        "feature_input_hook": hook_name(dictionary.layout.read),
        "feature_output_hook": hook_name(dictionary.layout.write),
        "scan": dictionary.layout.scan,
    }
    for layer in dictionary.layers:
        features = _folded(dictionary.layer(layer))
        _require_as_is(features, "circuit-tracer")
        features = _centred(features) if features.centred else features
        if dictionary.kind == "clt":
            _clt_layer(folder, features, dtype)
        else:
            config |= _plt_layer(folder, features, dtype)
    stated = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG_YAML).write_text(yaml.safe_dump(stated, sort_keys=False))


def _clt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> None:
    """Write the encoder and the decoder file of one layer of a CLT."""
    import torch

    from .layers.activations import JumpReLU, ReLU

    layer, activation, size = features.layer, features.activation, features.n_features
    if features.W_skip is not None or not isinstance(activation, ReLU | JumpReLU):
        problem = "a skip" if features.W_skip is not None else type(activation).__name__
        raise DictionaryError(
            "circuit-tracer's files of cross-layer transcoders hold ReLU and JumpReLU without skips, found "
            f"{problem}"
        )
    tensors = {
        f"W_enc_{layer}": features.W_enc,
        f"b_enc_{layer}": _or_zeros(features.b_enc, size),
        f"b_dec_{layer}": _bias(features),
    }
    if isinstance(activation, JumpReLU):
        # circuit-tracer does not rectify: a negative threshold keeps its negative activations there.
        tensors[f"threshold_{layer}"] = _threshold(activation, size, rectified=False)
    _save(folder / f"W_enc_{layer}.safetensors", tensors, dtype)
    decoders = torch.stack([features.W_dec[target] for target in features.targets], dim=1)
    _save(folder / f"W_dec_{layer}.safetensors", {f"W_dec_{layer}": decoders}, dtype)


def _plt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> dict[str, Any]:
    """Write one layer; returns the activation's fields of config.yaml."""
    from .layers.activations import JumpReLU, ReLU, TopK

    layer, activation, size = features.layer, features.activation, features.n_features
    if not isinstance(activation, ReLU | JumpReLU | TopK):
        raise DictionaryError(
            f"circuit-tracer has ReLU, JumpReLU and TopK only, found {type(activation).__name__}"
        )
    tensors = {
        "W_enc": features.W_enc,
        "b_enc": _or_zeros(features.b_enc, size),
        "W_dec": features.W_dec[layer],
        "b_dec": _bias(features),
        **({} if features.W_skip is None else {"W_skip": features.W_skip}),
    }
    if isinstance(activation, JumpReLU):
        tensors["activation_function.threshold"] = _threshold(activation, size, rectified=False)
    _save(folder / f"layer_{layer}.safetensors", tensors, dtype)
    return (
        {"activation": "topk", "k": activation.k, "rectified": activation.rectified}
        if isinstance(activation, TopK)
        else {}
    )


FORMATS: Mapping[str, Callable[[Dictionary, Path, Any], None]] = {
    "saelens": _saelens,
    "sparsify": _sparsify,
    "circuit_tracer": _circuit_tracer,
}
"""Format -> function that writes a dictionary into a folder."""


# -- equivalent weights


def _folded(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features with gain 1 and no units; weights that do not change are shared."""
    if features.gain == 1 and features.unit is None:
        return features
    import torch

    # relu(u (g W x + b)) = relu(u g W x + u b) for u > 0; the decoder is divided by the same factors.
    unit = torch.ones(features.n_features) if features.unit is None else features.unit.float()
    gain, b_enc, b_dec = features.gain, features.b_enc, features.b_dec
    return replace(
        features,
        W_enc=features.W_enc.float() * (unit * gain)[:, None],
        b_enc=None if b_enc is None else b_enc.float() * unit,
        W_dec={target: rows.float() / (unit * gain)[:, None] for target, rows in features.W_dec.items()},
        b_dec=None if b_dec is None else b_dec.float() / gain,
        gain=1.0,
        unit=None,
    )


def _centred(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features that subtract no bias from their input: it is moved into the encoder's bias."""
    # W (x - b) + b_enc = W x + (b_enc - W b)
    shift = 0 if features.b_dec is None else features.W_enc.float() @ features.b_dec.float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() - shift, centred=False
    )


def _recentred(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features that subtract the decoder's bias from their input."""
    shift = features.W_enc.float() @ _bias(features).float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() + shift, centred=True
    )


def _threshold(activation: Any, size: int, *, rectified: bool) -> Tensor:
    """Equivalent thresholds [feature] for a format that rectifies activations, or that does not.

    A JumpReLU with rectification equals one whose thresholds are at least 0.
    """
    threshold: Tensor = activation.threshold.expand(size).contiguous()
    if activation.rectified:
        return threshold.clamp(min=0)
    if rectified and bool((threshold < 0).any()):
        raise DictionaryError("SAELens rectifies activations, these features have negative thresholds")
    return threshold


def _bias(features: LayerFeatures) -> Tensor:
    """Decoder bias [d_out]; zeros without one."""
    return _or_zeros(features.b_dec, next(iter(features.W_dec.values())).shape[1])


def _or_zeros(bias: Tensor | None, size: int) -> Tensor:
    """The bias, or zeros of its size: the formats require one."""
    import torch

    return torch.zeros(size) if bias is None else bias


def _require_as_is(features: LayerFeatures, program: str) -> None:
    """Raise DictionaryError if the features scale their input row by row."""
    from .layers.scaling import AsIs

    if not isinstance(features.scaling, AsIs):
        raise DictionaryError(
            f"{program} does not scale inputs row by row, these features do "
            f"({type(features.scaling).__name__}); export to saelens"
        )


def _require_own_layer(dictionary: Dictionary, program: str) -> None:
    """Raise DictionaryError for a cross-layer transcoder."""
    if dictionary.kind == "clt":
        raise DictionaryError(f"{program} has no cross-layer transcoders; export to circuit_tracer")


def _full_name(dictionary: Dictionary, end: str, layer: int) -> str:
    """TransformerLens name of the hook point that a layer reads or writes (`end`)."""
    point = dictionary.read_hook(layer) if end == "read" else dictionary.write_hook(layer)
    name = hook_name(point.kind)
    return name if point.layer is None else f"blocks.{layer}.{name}"


# -- files


def _dtype(name: str | None) -> torch.dtype | None:
    """The dtype of this name; None for None. DictionaryError for a name that no format writes."""
    if name is None:
        return None
    import torch

    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise DictionaryError(f"expected dtype to be one of {', '.join(dtypes)}, found {name!r}")
    return dtypes[name]


def _save(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Write a safetensors file; every tensor in `dtype`, or in the dtype of the first matrix."""
    from ..forward.checkpoints.checkpoint import as_array

    # The dtype of the matrices: biases and thresholds may be float32 beside bfloat16 matrices.
    kind = dtype or next(tensor.dtype for name, tensor in tensors.items() if tensor.ndim > 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Sorted by name like safetensors' own writer, so that equal weights give equal files. That writer is not
    # used because its files are readable by their owner only, whatever the umask.
    arrays = {name: as_array(tensors[name].detach().to("cpu", kind)) for name in sorted(tensors)}
    stored = [Stored(name, array.dtype, array.shape, [array]) for name, array in arrays.items()]
    write_safetensors(path, stored, {})


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Context that gives a temporary folder, renamed to `folder` at the end, or removed after an error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DictionaryError(f"expected a new folder, found something at {folder}; choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        place.mkdir()
        yield place
        # An empty folder is accepted as destination; `rename` replaces one on POSIX, not on Windows.
        if folder.exists():
            folder.rmdir()
        place.rename(folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
