"""Dictionaries written as other programs read them: SAELens, sparsify, circuit-tracer.

    export(dictionary, "folder", "saelens")

What a format has no word for is folded into the weights where that changes nothing (one factor for all
inputs, units of features, a bias subtracted from the input), and refused where it would change something.

A folder appears when it is complete: it is written beside its place and renamed.

Border: features in, files out; what the formats mean is their readers'. Weights of one layer are in memory
at a time.
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
from .layers.layout import told
from .layers.names import MODULES, hook_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .layers.layer import LayerFeatures

__all__ = ["FORMATS", "export"]

SAELENS_VERSION = "6.54.12"
"""Of SAELens, whose configuration this writes."""


def export(dictionary: Dictionary, folder: str | Path, name: str, *, dtype: str | None = None) -> Path:
    """Write a dictionary into a new folder; returns it.

    name: of a format, one of FORMATS. dtype: of the files ("float32", "bfloat16", …), by default that of the
    weights.
    Raises DictionaryError where the format cannot say what the dictionary does, or the folder holds
    something.
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
    """A folder per layer, or the folder itself for one layer."""
    _require_own_layer(dictionary, "SAELens")
    for layer in dictionary.layers:
        features = _folded(dictionary.layer(layer))
        name = _full_name(dictionary, "read", layer)
        place = folder if len(dictionary.layers) == 1 else folder / name
        tensors = {"W_enc": features.W_enc.T, "W_dec": features.W_dec[layer], "b_dec": _bias(features)}
        architecture, more, config = _saelens_activation(dictionary, features)
        tensors |= more
        about = {"model_name": dictionary.model_name, "hook_name": name, "sae_lens_version": SAELENS_VERSION}
        if dictionary.kind == "plt":
            about["hook_name_out"] = _full_name(dictionary, "write", layer)
            config["d_out"] = dictionary.d_out
        said = {
            "architecture": architecture,
            "d_in": dictionary.d_in,
            "d_sae": dictionary.n_features,
            "dtype": str(dtype or features.W_dec[layer].dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": features.centred,
            "normalize_activations": _saelens_scaling(features),
            "reshape_activations": "hook_z" if dictionary.layout.read == "z" else "none",
            **config,
            "metadata": {key: value for key, value in about.items() if value is not None},
        }
        _save(place / "sae_weights.safetensors", tensors, dtype)
        (place / CFG_JSON).write_text(json.dumps(said, indent=1))


def _saelens_activation(
    dictionary: Dictionary, features: LayerFeatures
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """(architecture, tensors beside the matrices, fields of cfg.json)."""
    from .layers.activations import AbsTopK, Gated, JumpReLU, ReLU, TopK

    how, is_sae, size = features.activation, dictionary.kind == "sae", dictionary.n_features
    has_skip = features.W_skip is not None
    tensors = {"W_skip": features.W_skip} if features.W_skip is not None else {}
    config: dict[str, Any] = {}
    names: dict[type, tuple[str | None, str | None]] = {
        ReLU: ("standard", "transcoder"),
        JumpReLU: ("jumprelu", "jumprelu_transcoder"),
        TopK: ("topk", None),
        AbsTopK: ("abstopk", None),
        Gated: ("gated", None),
    }
    architecture = names.get(type(how), (None, None))[0 if is_sae else 1]
    if architecture is None or (is_sae and has_skip) or (isinstance(how, TopK) and not how.rectified):
        kind = "autoencoders" if is_sae else "transcoders"
        what = f"{type(how).__name__} {kind}{' with a skip' if has_skip else ''}"
        raise DictionaryError(f"SAELens has no architecture for {what}; export to another format")
    if has_skip:
        architecture = architecture.replace("transcoder", "skip_transcoder")
    if isinstance(how, Gated):
        tensors |= {"b_gate": how.b_gate, "b_mag": how.b_mag, "r_mag": how.r_mag}
    else:
        tensors["b_enc"] = _or_zeros(features.b_enc, size)
    if isinstance(how, JumpReLU):
        tensors["threshold"] = _threshold(how, size, rectified=True)
    if isinstance(how, TopK | AbsTopK):
        config["k"] = how.k
    return architecture, tensors, config


def _saelens_scaling(features: LayerFeatures) -> str:
    from .layers.scaling import ConstantNorm, InputOnly, LayerNorm

    scaling = features.scaling.scaling if isinstance(features.scaling, InputOnly) else features.scaling
    return {ConstantNorm: "constant_norm_rescale", LayerNorm: "layer_norm"}.get(type(scaling), "none")


# -- sparsify


def _sparsify(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """A folder per layer, named by the module that is read."""
    from .formats.sparsify import WEIGHTS
    from .layers.activations import GroupMax, TopK

    _require_own_layer(dictionary, "sparsify")
    is_transcoder = dictionary.kind == "plt"
    ends = (dictionary.layout.read, dictionary.layout.write)
    modules = [
        module for module, held in MODULES.items() if ends == (held if is_transcoder else (held[1], held[1]))
    ]
    if not modules:
        raise DictionaryError(
            f"sparsify has no module that is read at {ends[0]} and written at {ends[1]}; export to another "
            "format"
        )
    for layer in dictionary.layers:
        features = _folded(dictionary.layer(layer))
        _require_as_is(features, "sparsify")
        how = features.activation
        if not isinstance(how, TopK | GroupMax) or (isinstance(how, TopK) and not how.rectified):
            raise DictionaryError(f"sparsify has TopK and group max only, found {type(how).__name__}")
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
        said = {
            "d_in": dictionary.d_in,
            "activation": "topk" if isinstance(how, TopK) else "groupmax",
            "num_latents": dictionary.n_features,
            "expansion_factor": max(1, dictionary.n_features // dictionary.d_in),
            "k": how.k,
            "normalize_decoder": False,
            "multi_topk": False,
            "skip_connection": features.W_skip is not None,
            "transcode": is_transcoder,
        }
        _save(place / WEIGHTS, tensors, dtype)
        (place / CFG_JSON).write_text(json.dumps(said, indent=1))


# -- circuit-tracer


def _circuit_tracer(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """W_enc_{l} and W_dec_{l} of a CLT, or layer_{l} of per-layer ones; config.yaml last."""
    import yaml

    if dictionary.layers != tuple(range(len(dictionary.layers))):
        raise DictionaryError(
            f"circuit-tracer reads dictionaries of every layer from 0 on, found {told(dictionary.layers)}"
        )
    said: dict[str, Any] = {
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
            said |= _plt_layer(folder, features, dtype)
    kept = {key: value for key, value in said.items() if value is not None}
    (folder / CONFIG_YAML).write_text(yaml.safe_dump(kept, sort_keys=False))


def _clt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> None:
    import torch

    from .layers.activations import JumpReLU, ReLU

    layer, how, size = features.layer, features.activation, features.n_features
    if features.W_skip is not None or not isinstance(how, ReLU | JumpReLU):
        found = "a skip" if features.W_skip is not None else type(how).__name__
        raise DictionaryError(
            "circuit-tracer's files of cross-layer transcoders hold ReLU and JumpReLU without skips, found "
            f"{found}"
        )
    tensors = {
        f"W_enc_{layer}": features.W_enc,
        f"b_enc_{layer}": _or_zeros(features.b_enc, size),
        f"b_dec_{layer}": _bias(features),
    }
    if isinstance(how, JumpReLU):
        tensors[f"threshold_{layer}"] = _threshold(how, size, rectified=False)
    _save(folder / f"W_enc_{layer}.safetensors", tensors, dtype)
    decoders = torch.stack([features.W_dec[target] for target in features.targets], dim=1)
    _save(folder / f"W_dec_{layer}.safetensors", {f"W_dec_{layer}": decoders}, dtype)


def _plt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> dict[str, Any]:
    """Write one layer; returns what config.yaml says of its activations."""
    from .layers.activations import JumpReLU, ReLU, TopK

    layer, how, size = features.layer, features.activation, features.n_features
    if not isinstance(how, ReLU | JumpReLU | TopK):
        raise DictionaryError(f"circuit-tracer has ReLU, JumpReLU and TopK only, found {type(how).__name__}")
    tensors = {
        "W_enc": features.W_enc,
        "b_enc": _or_zeros(features.b_enc, size),
        "W_dec": features.W_dec[layer],
        "b_dec": _bias(features),
        **({} if features.W_skip is None else {"W_skip": features.W_skip}),
    }
    if isinstance(how, JumpReLU):
        tensors["activation_function.threshold"] = _threshold(how, size, rectified=False)
    _save(folder / f"layer_{layer}.safetensors", tensors, dtype)
    return {"activation": "topk", "k": how.k, "rectified": how.rectified} if isinstance(how, TopK) else {}


FORMATS: Mapping[str, Callable[[Dictionary, Path, Any], None]] = {
    "saelens": _saelens,
    "sparsify": _sparsify,
    "circuit_tracer": _circuit_tracer,
}


# -- the same features in fewer words


def _folded(features: LayerFeatures) -> LayerFeatures:
    """The same features without gain and units; only weights that change are made anew."""
    if features.gain == 1 and features.unit is None:
        return features
    import torch

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
    """The same features, with what they subtract from their input in their own biases."""
    shift = 0 if features.b_dec is None else features.W_enc.float() @ features.b_dec.float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() - shift, centred=False
    )


def _recentred(features: LayerFeatures) -> LayerFeatures:
    """The same features, subtracting the decoder's bias from their input."""
    shift = features.W_enc.float() @ _bias(features).float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() + shift, centred=True
    )


def _threshold(how: Any, size: int, *, rectified: bool) -> Tensor:
    """Thresholds [feature] that mean the same where activations are, or are not, rectified.

    A rectified JumpReLU is one whose thresholds are at least 0.
    """
    found: Tensor = how.threshold.expand(size).contiguous()
    if how.rectified:
        return found.clamp(min=0)
    if rectified and bool((found < 0).any()):
        raise DictionaryError("SAELens rectifies activations, these features have negative thresholds")
    return found


def _bias(features: LayerFeatures) -> Tensor:
    return _or_zeros(features.b_dec, next(iter(features.W_dec.values())).shape[1])


def _or_zeros(bias: Tensor | None, size: int) -> Tensor:
    import torch

    return torch.zeros(size) if bias is None else bias


def _require_as_is(features: LayerFeatures, program: str) -> None:
    from .layers.scaling import AsIs

    if not isinstance(features.scaling, AsIs):
        raise DictionaryError(
            f"{program} does not scale inputs row by row, these features do "
            f"({type(features.scaling).__name__}); export to saelens"
        )


def _require_own_layer(dictionary: Dictionary, program: str) -> None:
    if dictionary.kind == "clt":
        raise DictionaryError(f"{program} has no cross-layer transcoders; export to circuit_tracer")


def _full_name(dictionary: Dictionary, end: str, layer: int) -> str:
    point = dictionary.read_hook(layer) if end == "read" else dictionary.write_hook(layer)
    name = hook_name(point.kind)
    return name if point.layer is None else f"blocks.{layer}.{name}"


# -- files


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in known:
        raise DictionaryError(f"expected dtype to be one of {', '.join(known)}, found {name!r}")
    return known[name]


def _save(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """A safetensors file; every tensor in the dtype asked for, or of the decoder."""
    from ..forward.capture.harvest import as_numpy

    kind = dtype or next(tensor.dtype for name, tensor in tensors.items() if tensor.ndim > 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # By name, as safetensors' own writer has them: equal weights are equal files. That writer leaves files
    # that only their owner may read, whatever the umask.
    arrays = {name: as_numpy(tensors[name].detach().to("cpu", kind)) for name in sorted(tensors)}
    stored = [Stored(name, array.dtype, array.shape, [array]) for name, array in arrays.items()]
    write_safetensors(path, stored, {})


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that becomes `folder` at the end, or goes away."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DictionaryError(f"expected a new folder, found something at {folder}; choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        place.mkdir()
        yield place
        if folder.exists():
            folder.rmdir()
        place.rename(folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
