"""Gemma Scope 2 as published by DeepMind: safetensors with lower-case names, per layer.

    .../layer_{l}_width_16k_l0_medium[_affine]/params.safetensors    (and config.json)
    .../width_262k_l0_medium[_affine]/params_layer_{l}.safetensors   cross-layer

w_enc [hidden, feature], w_dec [feature, hidden] or, cross-layer, [feature, target, hidden] with all layers of
the model as targets, of which only l and later ones are used; b_enc, b_dec, threshold; optionally
affine_skip_connection [in, out].

Border: paths and tensors; listed.py reads a list of such files in a config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....store.errors import DictionaryError
from ..layers.files import DictionaryFiles
from ..layers.layout import DictionaryLayout, Opened
from .fields import apply_fields
from .layered import require_shapes, scan_of
from .single import OneLayer, StatedHooks, join, layer_hooks

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = ["is_cross_layer", "part", "read", "read_clt", "recognises"]

_FILE = re.compile(r"(?:^|/)params(?:_layer_(\d{1,9}))?\.safetensors$")
_LAYER = re.compile(r"layer_(\d{1,9})")
CONFIG = "config.json"
# Prefix of a folder's name -> hook kinds read and written.
FOLDERS = {
    "transcoder": ("mlp_pre", "mlp_out"),
    "clt": ("mlp_pre", "mlp_out"),
    "resid_post": ("resid_post", "resid_post"),
    "attn_out": ("z", "z"),
    "mlp_out": ("mlp_out", "mlp_out"),
}


def recognises(files: DictionaryFiles) -> bool:
    """Whether there is a parameter file with the tensor names of Gemma Scope 2."""
    name = next((name for name in files.listing if _FILE.search(name)), None)
    return name is not None and "w_enc" in files.shapes(name)


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Layout of the dictionaries of all layers: one per layer, or one cross-layer transcoder.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read; None: the one that config.json or the folder's name states.
        write: Hook point that features write to; None: as for `read`.

    Raises:
        DictionaryError: A layer of a cross-layer transcoder is missing, or shapes do not fit together.
    """
    names = [name for name in files.listing if _FILE.search(name)]
    if is_cross_layer(files, names[0]):
        by_layer = {_layer(files, name): name for name in names}
        ordered = [by_layer[layer] for layer in sorted(by_layer)]
        if sorted(by_layer) != list(range(len(names))):
            raise DictionaryError(
                "expected one file for every layer from 0 on for the cross-layer transcoder in "
                f"{files.directory}, found {len(names)} files of layers "
                f"{', '.join(map(str, sorted(by_layer)))}; fetch it again, or open one of its subfolders"
            )
        return read_clt(files, ordered, read, write)
    parts = [part(files, name, read, write) for name in names]
    return join(files, "gemma_scope_2", parts, zero_positions=zero_positions(parts[0].model_name))


def is_cross_layer(files: DictionaryFiles, name: str) -> bool:
    """Whether the features in a file write to several layers: its decoder has an axis of target layers."""
    return len(files.shapes(name).get("w_dec", ())) == 3


def zero_positions(model: str | None) -> int:
    """Number of positions at the start of a prompt that training left out, by the model's name.

    4 for instruction-tuned Gemma 3, whose prompts begin with four fixed tokens, else 1.
    """
    return 4 if model and re.search(r"gemma-3-.*-it", model) else 1


def part(
    files: DictionaryFiles,
    name: str,
    read: str | None,
    write: str | None,
    layer: int | None = None,
) -> OneLayer:
    """The dictionary in one file; see `LayerByLayer.part`. `layer` None: the path states the layer."""
    layer_number = _layer(files, name) if layer is None else layer
    hooks = layer_hooks(files, StatedHooks(layer_number, *_stated_hooks(files, name)), read, write)
    (d_in, size), shapes = _sizes(files, name)
    d_out = require_shapes(files, name, {"w_dec": (size, None)})["w_dec"][1]
    _require_biases(files, name, size, d_in, d_out)

    return OneLayer(
        where=name.rpartition("/")[0] or name,
        hooks=hooks,
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=(name,),
        open=lambda: _features(files, name, layer_number),
        model_name=_config(files, name).get("model_name"),
        has_skip="affine_skip_connection" in shapes,
    )


def read_clt(
    files: DictionaryFiles,
    names: Sequence[str],
    read: str | None,
    write: str | None,
) -> Opened:
    """Layout of the cross-layer transcoder whose layers are in separate files.

    Arguments:
        files: Files of the dictionary.
        names: Names of the files, one per layer from 0 on.
        read: Hook point that features read; None: the one that config.json or the folder's name states.
        write: Hook point that features write to; None: as for `read`.
    """
    hooks = layer_hooks(files, StatedHooks(0, *_stated_hooks(files, names[0])), read, write)
    (width, size), _ = _sizes(files, names[0])
    layers = tuple(range(len(names)))
    has_skip = False
    for name in names:
        require_shapes(files, name, {"w_enc": (width, size), "w_dec": (size, len(names), width)})
        has_skip |= "affine_skip_connection" in _require_biases(files, name, size, width, width)
    model = _config(files, names[0]).get("model_name")
    layout = DictionaryLayout(
        format="gemma_scope_2",
        kind="clt",
        read=hooks.read,
        write=hooks.write,
        layers=layers,
        targets={layer: layers[layer:] for layer in layers},
        n_features=size,
        d_in=width,
        d_out=width,
        files=tuple(names),
        model_name=model,
        scan=scan_of(files),
        has_skip=has_skip,
        zero_positions=zero_positions(model),
    )

    return Opened(files, layout, lambda layer: _features(files, names[layer], layer))


def _features(files: DictionaryFiles, name: str, layer: int) -> LayerFeatures:
    """The features in one file, which read `layer`, with memory-mapped weights."""
    from ..layers.activations import JumpReLU
    from ..layers.layer import LayerFeatures

    tensors = files.tensors(name)
    decoder, skip = tensors["w_dec"], tensors.get("affine_skip_connection")
    # A cross-layer file has columns for all layers; those of earlier layers are not used.
    targets = [layer] if decoder.ndim == 2 else range(layer, decoder.shape[1])
    return LayerFeatures(
        layer=layer,
        W_enc=tensors["w_enc"].T,
        W_dec={target: decoder if decoder.ndim == 2 else decoder[:, target] for target in targets},
        activation=JumpReLU(tensors["threshold"]),
        b_enc=tensors["b_enc"],
        b_dec=tensors["b_dec"],
        W_skip=None if skip is None else skip.T,  # files have [in, out]
    )


def _sizes(files: DictionaryFiles, name: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
    """((width of the states read, number of features), shapes of all tensors by name) of a file."""
    shapes = require_shapes(files, name, {"w_enc": (None, None)})
    return (shapes["w_enc"][0], shapes["w_enc"][1]), shapes


def _require_biases(
    files: DictionaryFiles, name: str, size: int, d_in: int, d_out: int
) -> dict[str, tuple[int, ...]]:
    """Check the shapes of biases, threshold and skip connection; returns the shapes of all tensors."""
    expected = {"b_enc": (size,), "b_dec": (d_out,), "threshold": (size,)}
    shapes = require_shapes(files, name, expected, {"affine_skip_connection": (d_in, d_out)})
    apply_fields("gemma_scope_2 tensors", shapes, files.path(name))
    return shapes


def _layer(files: DictionaryFiles, name: str) -> int:
    """Layer that the path of a parameter file states ("layer_12"); DictionaryError if it states none."""
    numbers = _LAYER.findall(files.path(name).as_posix())
    if not numbers:
        raise DictionaryError(
            f"expected layer_<number> in the path {files.path(name)}, found none, so the layer is unknown; "
            "keep the folders as they are in the repository"
        )
    return int(numbers[-1])


def _config(files: DictionaryFiles, name: str) -> dict[str, str]:
    """Contents of the config.json beside a parameter file; empty if there is none."""
    folder = name.rpartition("/")[0]
    config = f"{folder}/{CONFIG}" if folder else CONFIG
    if config not in files.listing:
        return {}
    fields = files.json(config)
    apply_fields("gemma_scope_2", fields, files.path(config))
    return fields


def _stated_hooks(files: DictionaryFiles, name: str) -> tuple[str | None, str | None]:
    """Hook points read and written: module names from config.json, else kinds from the folder's name.

    (None, None) if neither states them.
    """
    config = _config(files, name)
    reads, writes = (config.get(f"hf_hook_point_{end}") for end in ("in", "out"))
    # Names in a configuration win over those of folders, which a user may have renamed.
    if reads is not None:
        return reads, writes
    # The innermost three only: folders above them are the user's.
    folders = files.path(name).as_posix().split("/")[-4:-1]
    for word, kinds in FOLDERS.items():
        if any(folder == word or folder.startswith(f"{word}_") for folder in folders):
            return kinds
    return None, None
