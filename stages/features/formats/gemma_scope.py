"""Gemma Scope as published by DeepMind: params.npz per layer, width and sparsity (Lieberum et al. 2024).

    layer_{l}/width_16k/average_l0_{n}/params.npz    W_enc [hidden, feature], W_dec [feature, hidden],
    embedding/width_4k/average_l0_{n}/params.npz     b_enc, b_dec, threshold (JumpReLU; ReLU without one)

The repository determines what is read: -res the residual stream, -mlp the MLP's output, -att the heads'
outputs side by side, -transcoders the MLP's normalised input before the gain. Autoencoders of embeddings were
trained on embeddings divided by sqrt(hidden).

Border: paths and arrays; listed.py reads a list of such files in a config.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ....store.errors import DictionaryError
from ....store.exchange.tensors import npz_array, npz_layouts
from ..layers.files import DictionaryFiles
from .fields import apply_fields
from .layered import check_shapes
from .single import LayerByLayer, OneLayer, StatedHooks, files_named, layer_hooks

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

_PLACE = re.compile(r"layer_(\d{1,9})|(embedding)")
_REPOSITORY = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att|transcoders)")
HOOKS = {
    "res": ("resid_post", "resid_post"),
    "mlp": ("mlp_out", "mlp_out"),
    "att": ("z", "z"),
    "transcoders": ("ln2_normalized", "mlp_out"),
}
"""Kinds of hook points (read, written), by the last part of the repository's name."""


def part(
    files: DictionaryFiles,
    name: str,
    read: str | None,
    write: str | None,
    layer: int | None = None,
) -> OneLayer:
    """The dictionary in one params.npz; see `LayerByLayer.part`. `layer` None: the path states the layer."""
    file_path = files.path(name)
    path = file_path.as_posix()
    # The innermost folder counts: a parent of the download may be named like a layer too.
    matches = [(m[1], m[2]) for m in _PLACE.finditer(path)]
    is_embedding = bool(matches and matches[-1][1])
    if layer is None:
        if not matches:
            raise DictionaryError(
                f"expected a folder layer_<number> or embedding in the path {file_path}, found none, so the "
                "layer is unknown; keep the folders as they are in the repository"
            )
        layer = 0 if is_embedding else int(matches[-1][0])
    hooks = layer_hooks(files, StatedHooks(layer, *_stated_hooks(path, is_embedding)), read, write)
    shapes = _shapes(file_path)
    d_in, size = check_shapes(shapes, file_path, {"W_enc": (None, None)})["W_enc"]
    d_out = check_shapes(shapes, file_path, {"W_dec": (size, None)})["W_dec"][1]
    check_shapes(shapes, file_path, {"b_enc": (size,), "b_dec": (d_out,)}, {"threshold": (size,)})
    repository = _REPOSITORY.search(path)

    def open_layer() -> LayerFeatures:
        import torch

        from ..layers.activations import JumpReLU, ReLU
        from ..layers.layer import LayerFeatures

        # Embeddings of Gemma are multiplied by sqrt(hidden) in the model; the autoencoders saw them unscaled.
        gain = d_in**-0.5 if is_embedding else 1.0
        tensors = {key: torch.from_numpy(npz_array(file_path, key, DictionaryError)) for key in shapes}
        return LayerFeatures(
            layer=layer,
            W_enc=tensors["W_enc"].T,
            W_dec={layer: tensors["W_dec"]},
            activation=JumpReLU(tensors["threshold"]) if "threshold" in tensors else ReLU(),
            b_enc=tensors["b_enc"],
            # SAELens scales W_enc and W_dec of embeddings, but not b_dec; the gain would.
            b_dec=tensors["b_dec"] * gain,
            gain=gain,
        )

    return OneLayer(
        where=name.rpartition("/")[0] or name,
        hooks=hooks,
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=(name,),
        open=open_layer,
        model_name=repository
        and f"google/gemma-2-{repository[1]}" + ("-it" if repository[2] == "it" else ""),
        settings={"embedding": is_embedding},
    )


FORMAT = LayerByLayer("gemma_scope", lambda files: files_named(files, "params.npz"), part)
recognises, read = FORMAT.recognises, FORMAT.read


def _stated_hooks(path: str, is_embedding: bool) -> tuple[str | None, str | None]:
    """Hook kinds read and written, by the repository's name in a path; (None, None) for other names."""
    if is_embedding:
        return "embed", "embed"
    repository = _REPOSITORY.search(path)
    return HOOKS[repository[3]] if repository else (None, None)


def _shapes(file_path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays in an npz file by name; DictionaryError if one is neither float32 nor float64."""
    layouts = npz_layouts(file_path, DictionaryError)
    for name, layout in layouts.items():
        # Scalars may be of any dtype: they are no weights.
        if layout.dtype.name not in ("float32", "float64") and layout.shape:
            raise DictionaryError(
                f"expected the array {name!r} in {file_path} to be float32 or float64, found "
                f"{layout.dtype.name}; fetch the file again"
            )
    shapes = {name: layout.shape for name, layout in layouts.items()}
    apply_fields("gemma_scope tensors", shapes, file_path)
    return shapes
