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
    """Write a dictionary in the file format of another program, and return the path of the new folder.

    Arguments:
        dictionary: The dictionary to write.
        folder: Destination: a folder that does not exist or is empty.
        name: Name of the file format, a key of FORMATS.
        dtype: dtype of the weights in the files ("float32", "float16", "bfloat16"); None keeps the dtype that
            the weights have.

    Raises:
        DictionaryError: The format cannot express the dictionary, or the folder is not empty.
    """
    if name not in FORMATS:
        near = nearest(name, FORMATS)
        raise DictionaryError(
            f"expected an export format among {', '.join(FORMATS)}, found {name!r}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    if dictionary.places:
        raise DictionaryError(
            f"the format {name} cannot hold crosscoders, such as {dictionary.name}; to use it in "
            "dictionary_learning, copy its folder: the tensors in it have the names that dictionary_learning "
            "reads"
        )
    write_format = FORMATS[name]
    with _new_folder(Path(folder)) as temporary_folder:
        write_format(dictionary, temporary_folder, _dtype(dtype))
    return Path(folder)


# -- SAELens


def _saelens(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write SAELens files into one subfolder per layer; those of a single layer directly into `folder`."""
    _refuse_cross_layer(dictionary, "SAELens")
    for layer in dictionary.layers:
        features = _without_gain_and_unit(dictionary.layer(layer))
        read_name = _transformer_lens_name(dictionary, "read", layer)
        layer_folder = folder if len(dictionary.layers) == 1 else folder / read_name
        tensors = {
            "W_enc": features.W_enc.T,
            "W_dec": features.W_dec[layer],
            "b_dec": _decoder_bias(features),
        }
        architecture, activation_tensors, config = _saelens_activation(dictionary, features)
        tensors |= activation_tensors
        metadata = {
            "model_name": dictionary.model_name,
            "hook_name": read_name,
            "sae_lens_version": SAELENS_VERSION,
        }
        if dictionary.kind == "plt":
            metadata["hook_name_out"] = _transformer_lens_name(dictionary, "write", layer)
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
            "metadata": {key: value for key, value in metadata.items() if value is not None},
        }
        _save(layer_folder / "sae_weights.safetensors", tensors, dtype)
        (layer_folder / CFG_JSON).write_text(json.dumps(config_json, indent=1))


def _saelens_activation(
    dictionary: Dictionary, features: LayerFeatures
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """SAELens' description of an activation function: (architecture name, its tensors, its cfg.json entries).

    DictionaryError if SAELens has no such architecture.
    """
    from .layers.activations import AbsTopK, Gated, JumpReLU, ReLU, TopK

    activation, is_sae, n_features = features.activation, dictionary.kind == "sae", dictionary.n_features
    has_skip = features.W_skip is not None
    tensors = {} if features.W_skip is None else {"W_skip": features.W_skip}
    config: dict[str, Any] = {}
    # SAELens names one architecture per activation function and kind; None: it has none.
    autoencoder_and_transcoder_names: dict[type, tuple[str | None, str | None]] = {
        ReLU: ("standard", "transcoder"),
        JumpReLU: ("jumprelu", "jumprelu_transcoder"),
        TopK: ("topk", None),
        AbsTopK: ("abstopk", None),
        Gated: ("gated", None),
    }
    names = autoencoder_and_transcoder_names.get(type(activation), (None, None))
    architecture = names[0 if is_sae else 1]
    # TopK in SAELens always applies a ReLU as well.
    is_unrectified_topk = isinstance(activation, TopK) and not activation.rectified
    if architecture is None or (is_sae and has_skip) or is_unrectified_topk:
        kind = "autoencoders" if is_sae else "transcoders"
        description = f"{type(activation).__name__} {kind}{' with a skip connection' if has_skip else ''}"
        raise DictionaryError(
            f"SAELens has no architecture for {description}, such as {dictionary.name}; export to another "
            "format"
        )
    if has_skip:
        architecture = architecture.replace("transcoder", "skip_transcoder")
    if isinstance(activation, Gated):
        tensors |= {"b_gate": activation.b_gate, "b_mag": activation.b_mag, "r_mag": activation.r_mag}
    else:
        tensors["b_enc"] = _or_zeros(features.b_enc, n_features)
    if isinstance(activation, JumpReLU):
        tensors["threshold"] = _threshold(activation, n_features, rectified=True)
    if isinstance(activation, TopK | AbsTopK):
        config["k"] = activation.k
    return architecture, tensors, config


def _saelens_scaling(features: LayerFeatures) -> str:
    """SAELens' setting `normalize_activations` for the way in which the features scale their input."""
    from .layers.scaling import ConstantNorm, InputOnly, LayerNorm

    scaling = features.scaling.scaling if isinstance(features.scaling, InputOnly) else features.scaling
    return {ConstantNorm: "constant_norm_rescale", LayerNorm: "layer_norm"}.get(type(scaling), "none")


# -- sparsify


def _sparsify(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write sparsify files into one subfolder per layer, named by the module whose states are read."""
    from .formats.sparsify import WEIGHTS
    from .layers.activations import GroupMax, TopK

    _refuse_cross_layer(dictionary, "sparsify")
    is_transcoder = dictionary.kind == "plt"
    read_and_write = (dictionary.layout.read, dictionary.layout.write)
    # A transcoder reads a module's input and writes its output; an autoencoder reads and writes the output.
    modules = [
        module
        for module, (module_input, module_output) in MODULES.items()
        if read_and_write == (module_input if is_transcoder else module_output, module_output)
    ]
    if not modules:
        raise DictionaryError(
            f"sparsify has no module whose states the dictionary {dictionary.name} could read at "
            f"{read_and_write[0]} and write at {read_and_write[1]}; export to another format"
        )
    for layer in dictionary.layers:
        features = _without_gain_and_unit(dictionary.layer(layer))
        _refuse_input_scaling(features, "sparsify")
        activation = features.activation
        if not isinstance(activation, TopK | GroupMax) or (
            isinstance(activation, TopK) and not activation.rectified
        ):
            raise DictionaryError(
                "sparsify has only TopK with ReLU and group-max activations, found "
                f"{type(activation).__name__} in {dictionary.name}; export to another format"
            )
        # sparsify's autoencoders subtract b_dec from their input, its transcoders do not.
        if features.centred == is_transcoder:
            features = _centring_folded(features) if features.centred else _with_centring(features)
        layer_folder = folder / ".".join(part for part in (f"layers.{layer}", modules[0]) if part)
        tensors = {
            "encoder.weight": features.W_enc,
            "encoder.bias": _or_zeros(features.b_enc, dictionary.n_features),
            "W_dec": features.W_dec[layer],
            "b_dec": _decoder_bias(features),
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
        _save(layer_folder / WEIGHTS, tensors, dtype)
        (layer_folder / CFG_JSON).write_text(json.dumps(config, indent=1))


# -- circuit-tracer


def _circuit_tracer(dictionary: Dictionary, folder: Path, dtype: torch.dtype | None) -> None:
    """Write circuit-tracer files: W_enc_{l} and W_dec_{l} for a CLT, else layer_{l}; then config.yaml."""
    import yaml

    if dictionary.layers != tuple(range(len(dictionary.layers))):
        raise DictionaryError(
            f"circuit-tracer needs features of every layer from 0 on, found {layers_text(dictionary.layers)} "
            f"in the dictionary {dictionary.name}; export to saelens"
        )
    config: dict[str, Any] = {
        "model_name": dictionary.model_name,
        "model_kind": "cross_layer_transcoder" if dictionary.kind == "clt" else "transcoder_set",
        "feature_input_hook": hook_name(dictionary.layout.read),
        "feature_output_hook": hook_name(dictionary.layout.write),
        "scan": dictionary.layout.scan,
    }
    for layer in dictionary.layers:
        features = _without_gain_and_unit(dictionary.layer(layer))
        _refuse_input_scaling(features, "circuit-tracer")
        features = _centring_folded(features) if features.centred else features
        if dictionary.kind == "clt":
            _write_clt_layer(folder, features, dtype)
        else:
            config |= _write_plt_layer(folder, features, dtype)
    stated = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG_YAML).write_text(yaml.safe_dump(stated, sort_keys=False))


def _write_clt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> None:
    """Write the encoder file and the decoder file of one CLT layer, as circuit-tracer reads them."""
    import torch

    from .layers.activations import JumpReLU, ReLU

    layer, activation, n_features = features.layer, features.activation, features.n_features
    if features.W_skip is not None or not isinstance(activation, ReLU | JumpReLU):
        problem = "a skip connection" if features.W_skip is not None else type(activation).__name__
        raise DictionaryError(
            "circuit-tracer's files of cross-layer transcoders hold ReLU or JumpReLU features without skip "
            f"connections, found {problem} in layer {layer}; no other export format has cross-layer "
            "transcoders"
        )
    tensors = {
        f"W_enc_{layer}": features.W_enc,
        f"b_enc_{layer}": _or_zeros(features.b_enc, n_features),
        f"b_dec_{layer}": _decoder_bias(features),
    }
    if isinstance(activation, JumpReLU):
        # circuit-tracer applies no ReLU: features with negative thresholds keep negative activations.
        tensors[f"threshold_{layer}"] = _threshold(activation, n_features, rectified=False)
    _save(folder / f"W_enc_{layer}.safetensors", tensors, dtype)
    decoders = torch.stack([features.W_dec[target] for target in features.targets], dim=1)
    _save(folder / f"W_dec_{layer}.safetensors", {f"W_dec_{layer}": decoders}, dtype)


def _write_plt_layer(folder: Path, features: LayerFeatures, dtype: torch.dtype | None) -> dict[str, Any]:
    """Write one transcoder's file for circuit-tracer; returns config.yaml's entries about its activation."""
    from .layers.activations import JumpReLU, ReLU, TopK

    layer, activation, n_features = features.layer, features.activation, features.n_features
    if not isinstance(activation, ReLU | JumpReLU | TopK):
        raise DictionaryError(
            "circuit-tracer has only ReLU, JumpReLU and TopK activations, found "
            f"{type(activation).__name__} in layer {layer}; export to another format"
        )
    tensors = {
        "W_enc": features.W_enc,
        "b_enc": _or_zeros(features.b_enc, n_features),
        "W_dec": features.W_dec[layer],
        "b_dec": _decoder_bias(features),
        **({} if features.W_skip is None else {"W_skip": features.W_skip}),
    }
    if isinstance(activation, JumpReLU):
        tensors["activation_function.threshold"] = _threshold(activation, n_features, rectified=False)
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
"""Functions that write a dictionary into a folder in a dtype (None: the weights' own), by format name."""


# -- equivalent weights


def _without_gain_and_unit(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features with gain 1 and unit None, because both are multiplied into the weights."""
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


def _centring_folded(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features that subtract no bias from their input: the encoder bias contains it instead."""
    # W (x - b) + b_enc = W x + (b_enc - W b)
    shift = 0 if features.b_dec is None else features.W_enc.float() @ features.b_dec.float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() - shift, centred=False
    )


def _with_centring(features: LayerFeatures) -> LayerFeatures:
    """Equivalent features that subtract the decoder bias from their input; the encoder bias corrects it."""
    shift = features.W_enc.float() @ _decoder_bias(features).float()
    return replace(
        features, b_enc=_or_zeros(features.b_enc, features.n_features).float() + shift, centred=True
    )


def _threshold(activation: Any, n_features: int, *, rectified: bool) -> Tensor:
    """JumpReLU thresholds [feature] that give the same activations in the program that will read them.

    Arguments:
        activation: A JumpReLU.
        n_features: Number of features; a threshold that all features share is repeated.
        rectified: Whether that program applies a ReLU after the threshold.

    Raises:
        DictionaryError: The program applies a ReLU, but the features have negative activations.
    """
    threshold: Tensor = activation.threshold.expand(n_features).contiguous()
    if activation.rectified:
        # A JumpReLU followed by a ReLU equals a JumpReLU whose thresholds are at least 0.
        return threshold.clamp(min=0)
    if rectified and bool((threshold < 0).any()):
        raise DictionaryError(
            "SAELens sets negative activations to 0, but these JumpReLU features have negative thresholds "
            "and so negative activations; export to circuit_tracer"
        )
    return threshold


def _decoder_bias(features: LayerFeatures) -> Tensor:
    """Decoder bias [d_out]; zeros if the features have none."""
    return _or_zeros(features.b_dec, next(iter(features.W_dec.values())).shape[1])


def _or_zeros(bias: Tensor | None, size: int) -> Tensor:
    """The bias, or `size` zeros if it is None, because the file formats require a bias."""
    import torch

    return torch.zeros(size) if bias is None else bias


def _refuse_input_scaling(features: LayerFeatures, program: str) -> None:
    """Raise DictionaryError if the features normalise each input vector, which `program` cannot do."""
    from .layers.scaling import AsIs

    if not isinstance(features.scaling, AsIs):
        raise DictionaryError(
            f"{program} cannot normalise each input vector, as these features do "
            f"({type(features.scaling).__name__}); export to saelens"
        )


def _refuse_cross_layer(dictionary: Dictionary, program: str) -> None:
    """Raise DictionaryError for a cross-layer transcoder, which `program` does not have."""
    if dictionary.kind == "clt":
        raise DictionaryError(
            f"{program} has no cross-layer transcoders, such as {dictionary.name}; export to circuit_tracer"
        )


def _transformer_lens_name(dictionary: Dictionary, end: str, layer: int) -> str:
    """TransformerLens name of the hook point that the features of a layer read (`end` "read") or write to."""
    point = dictionary.read_hook(layer) if end == "read" else dictionary.write_hook(layer)
    name = hook_name(point.kind)
    return name if point.layer is None else f"blocks.{layer}.{name}"


# -- files


def _dtype(name: str | None) -> torch.dtype | None:
    """Torch dtype from its name; None for None. DictionaryError if it is not a 16- or 32-bit float."""
    if name is None:
        return None
    import torch

    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise DictionaryError(f"expected dtype to be one of {', '.join(dtypes)}, found {name!r}")
    return dtypes[name]


def _save(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Write a safetensors file with every tensor in `dtype`; None selects the dtype of the first matrix."""
    from ..forward.checkpoints.checkpoint import as_array

    # The dtype of the matrices: biases and thresholds may be float32 beside bfloat16 matrices.
    file_dtype = dtype or next(tensor.dtype for name, tensor in tensors.items() if tensor.ndim > 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Sorted by name like safetensors' own writer, so that equal weights give equal files. That writer is not
    # used because its files are readable by their owner only, whatever the umask.
    arrays = {name: as_array(tensors[name].detach().to("cpu", file_dtype)) for name in sorted(tensors)}
    stored = [Stored(name, array.dtype, array.shape, [array]) for name, array in arrays.items()]
    write_safetensors(path, stored, {})


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Context that gives a temporary folder, renamed to `folder` at the end, or removed after an error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DictionaryError(
            f"expected a new or empty folder for the exported dictionary, found files at {folder}; choose "
            "another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary_folder.mkdir()
        yield temporary_folder
        # An empty folder is accepted as destination; `rename` replaces one on POSIX, not on Windows.
        if folder.exists():
            folder.rmdir()
        temporary_folder.rename(folder)
    except BaseException:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        raise
