"""Files of lenses in the formats of the published ones, read and written.

A Jacobian lens is one file (`torch.save` of a dict):

    J {layer: [d_model, d_model]}, n_prompts, source_layers, d_model, metadata (left out where empty)

A checkpoint of a fit under way has `jacobian_sum` (a sum over prompts) and `n_done` instead, and is read as
the mean. A tuned lens is a folder of the package tuned-lens, with L = num_hidden_layers translators:

    params.pt    {"i.weight": [d_model, d_model], "i.bias": [d_model]}, i in 0..L-1; no biases with bias=false
    config.json  d_model, num_hidden_layers, bias, base_model_name_or_path, base_model_revision, unembed_hash

Translator i maps x, the input of layer i, to x + weight x + bias. That input is the stream after layer i - 1,
so translator 0, of the embeddings, gets the layer number -1 here.

Only tensors and plain values are read, none longer than the file (torch_files.py). The attributes of a lens
are the metadata of its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.errors import WeightsError
from ...store.exchange.outside import json_object
from ..torch_files import load_pickled
from .jacobian import OUTPUTS
from .tuned import TUNED

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["read_lens", "read_tuned_lens", "require_fit", "write_lens", "write_tuned_lens"]

DTYPES = ("float16", "bfloat16", "float32")
"""Dtypes that `write_lens` can write; published files are float16. `read_lens` reads any float dtype."""
PARAMS, CONFIG = "params.pt", "config.json"
"""Names of the files of a tuned lens."""
CONFIG_NAMES = {
    "model_name": "base_model_name_or_path",
    "model_revision": "base_model_revision",
    "unembed_hash": "unembed_hash",
}
"""Attribute of a tuned lens -> its name in config.json."""


def read_lens(path: str | Path) -> xr.Dataset:
    """Read a lens file, or a checkpoint of a fit.

    Arguments:
        path: the file.

    Returns:
        jacobian float32 [layer, target_hidden, hidden] and n_prompts, with the file's metadata as attributes.

    Raises:
        WeightsError: The file is missing or damaged, is no lens, or has sizes that do not fit together.
    """
    import torch
    import xarray as xr

    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"expected the file of a lens at {path}, found none; name a .pt file")
    content = load_pickled(path, WeightsError)
    is_checkpoint = isinstance(content, Mapping) and "J" not in content
    matrices = content.get("jacobian_sum" if is_checkpoint else "J") if isinstance(content, Mapping) else None
    if not isinstance(matrices, Mapping) or not matrices:
        keys = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise WeightsError(
            f"expected a lens in {path}, a dict with matrices by layer under 'J' or 'jacobian_sum', found "
            f"{keys!r:.200}; give the file of a Jacobian lens"
        )
    if is_checkpoint:
        metadata = {"converted_from": "jacobian_lens_checkpoint"}
        metadata |= {"target_layer": content["target_layer"]} if "target_layer" in content else {}
    else:
        metadata = dict(content.get("metadata") or {})
        metadata.pop("n_prompts", None)  # a variable of the lens
    first = next(iter(matrices.values()))
    width = content.get("d_model", len(first) if is_checkpoint and isinstance(first, torch.Tensor) else None)
    n_prompts = content.get("n_done" if is_checkpoint else "n_prompts", 0)
    for name, value, least in (("d_model", width, 1), ("number of prompts", n_prompts, int(is_checkpoint))):
        if type(value) is not int or value < least:
            raise WeightsError(
                f"expected the {name} of the lens {path} to be an integer of at least {least}, found "
                f"{value!r:.60}; fetch the file again"
            )
    for layer, matrix in matrices.items():
        shape = list(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        if type(layer) is not int or layer < 0 or shape != [width, width] or not matrix.is_floating_point():
            raise WeightsError(
                f"expected a matrix of {width} x {width} (d_model) numbers for each layer of the lens "
                f"{path}, found {shape} for layer {layer!r:.20}; fetch the file again"
            )
    layers = sorted(matrices)
    jacobian = np.stack([matrices[layer].float().numpy() for layer in layers])
    if is_checkpoint:
        jacobian /= n_prompts
    if not np.isfinite(jacobian).all():
        raise WeightsError(
            f"expected finite numbers in the lens {path}, found NaN or infinity; fetch it again"
        )
    values = {"jacobian": jacobian, "n_prompts": np.int64(n_prompts)}
    variables = {name: OUTPUTS[name].variable(value) for name, value in values.items()}
    return xr.Dataset(variables, {"layer": layers}, metadata)


def write_lens(
    lens: xr.Dataset,
    path: str | Path,
    *,
    dtype: str = "float16",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a lens to a file, which replaces an existing one when it is complete.

    The file has no place for the deviation over prompts, so error bars stay in the store.

    Arguments:
        lens: a fitted or read lens.
        path: the file.
        dtype: "float16", "bfloat16" or "float32".
        metadata: plain values to record beside the lens's attributes, such as model_name and corpus.

    Raises:
        WeightsError: The lens is a tuned one, the dtype is another one or too narrow for the numbers, or
            metadata name an attribute that the fit has recorded.
    """
    import torch

    path, metadata = Path(path), dict(metadata or {})
    if "bias" in lens:
        raise WeightsError(
            "expected a Jacobian lens, found a tuned lens, whose bias has no place in this format; write it "
            "with write_tuned_lens"
        )
    if dtype not in DTYPES:
        raise WeightsError(f"expected the dtype of a lens file to be {', '.join(DTYPES)}, found {dtype!r}")
    recorded = sorted({*lens.attrs, "n_prompts"} & set(metadata))
    if recorded:
        raise WeightsError(
            f"expected metadata under names that the fit has not recorded, found {', '.join(recorded)}; "
            "leave them out"
        )
    jacobian = torch.as_tensor(lens["jacobian"].values).to(getattr(torch, dtype))
    if not bool(jacobian.isfinite().all()):
        raise WeightsError(
            f"expected numbers within the range of {dtype}, found larger ones in the lens; write it with "
            "dtype='float32'"
        )
    layers, n_prompts = lens["layer"].values.tolist(), int(lens["n_prompts"])
    content: dict[str, Any] = {
        # Clones, as torch.save would store the whole array with each of its views.
        "J": {layer: matrix.clone() for layer, matrix in zip(layers, jacobian, strict=True)},
        "n_prompts": n_prompts,
        "source_layers": layers,
        "d_model": lens.sizes["hidden"],
    }
    if lens.attrs or metadata:
        content["metadata"] = {**lens.attrs, **metadata, "n_prompts": n_prompts}
    temporary = path.with_name(f".{path.name}.part")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tuned_lens(folder: str | Path) -> xr.Dataset:
    """Read a tuned lens that the package tuned-lens saved.

    Arguments:
        folder: folder with config.json and params.pt.

    Returns:
        jacobian float32 [layer, target_hidden, hidden], bias float32 [layer, target_hidden], as
        `tuned_lens_fit` returns them, for layers -1 (embeddings) to the last but one; attributes
        target_layer, and model_name, model_revision and unembed_hash where the file has them.

    Raises:
        WeightsError: A file is missing or damaged, is no tuned lens, or has sizes that do not fit together.
    """
    import xarray as xr

    folder = Path(folder)
    for name in (CONFIG, PARAMS):
        if not (folder / name).is_file():
            raise WeightsError(
                f"expected a folder of a tuned lens with {CONFIG} and {PARAMS}, found no {name} in {folder}; "
                "name the folder that tuned-lens saved"
            )
    config, params = json_object(folder / CONFIG, WeightsError), load_pickled(folder / PARAMS, WeightsError)
    width: Any = config.get("d_model")
    n_layers: Any = config.get("num_hidden_layers")
    for name, value in (("d_model", width), ("num_hidden_layers", n_layers)):
        if type(value) is not int or value < 1:
            raise WeightsError(
                f"expected {name} in {folder / CONFIG} to be an integer of at least 1, found {value!r:.60}; "
                "fetch the folder again"
            )
    parts: dict[str, tuple[int, ...]] = {"weight": (width, width), "bias": (width,)}
    if not config.get("bias", True):
        del parts["bias"]
    tensors = params if isinstance(params, Mapping) else {}
    keys = [(f"{i}.{part}", parts[part]) for i in range(min(n_layers, len(tensors))) for part in parts]
    unlike = [key for key, shape in keys if not _is_finite_tensor(tensors.get(key), shape)]
    if unlike or len(keys) != len(tensors) or len(keys) != n_layers * len(parts):
        found = f"another value for {unlike[0]}" if unlike else f"{len(tensors)} tensors"
        raise WeightsError(
            f"expected {n_layers} translators of width {width} in {folder / PARAMS}, finite tensors "
            f"{' and '.join(f'i.{part} {list(shape)}' for part, shape in parts.items())}, found {found}; "
            "fetch the folder again"
        )
    weight = np.stack([tensors[f"{layer}.weight"].float().numpy() for layer in range(n_layers)])
    bias = np.zeros((n_layers, width), np.float32)
    if "bias" in parts:
        bias = np.stack([tensors[f"{layer}.bias"].float().numpy() for layer in range(n_layers)])
    values = {"jacobian": weight + np.eye(width, dtype=np.float32), "bias": bias}
    attrs: dict[str, Any] = {"target_layer": n_layers - 1}
    attrs |= {name: config[key] for name, key in CONFIG_NAMES.items() if config.get(key) is not None}
    variables = {name: TUNED[name].variable(value) for name, value in values.items()}
    return xr.Dataset(variables, {"layer": range(-1, n_layers - 1)}, attrs)


def _is_finite_tensor(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a tensor of floating-point numbers of a shape, without NaN and infinity."""
    import torch

    is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_tensor and tuple(value.shape) == shape and bool(value.isfinite().all())


def write_tuned_lens(lens: xr.Dataset, folder: str | Path, *, model_name: str = "") -> None:
    """Write a tuned lens as the package tuned-lens saves it, float32.

    Layers that the lens lacks, such as -1 (embeddings) after a fit, get zeros: the logit lens.

    Arguments:
        lens: a trained or read tuned lens.
        folder: the folder, made if missing; its config.json and params.pt are replaced.
        model_name: name of the model; empty for the one in the attributes of the lens.

    Raises:
        WeightsError: The lens has no bias or target layer, as a tuned lens has.
    """
    import torch

    if "bias" not in lens or "target_layer" not in lens.attrs:
        raise WeightsError(
            "expected a tuned lens, with a bias and the attribute target_layer, found "
            f"{', '.join(map(str, lens.data_vars))}; write a Jacobian lens with write_lens"
        )
    width, n_layers, folder = lens.sizes["hidden"], int(lens.attrs["target_layer"]) + 1, Path(folder)
    params: dict[str, torch.Tensor] = {}
    for i in range(n_layers):
        weight, bias = torch.zeros(width, width), torch.zeros(width)
        if i - 1 in lens["layer"].values:
            layer = lens.sel(layer=i - 1)
            weight = torch.as_tensor(layer["jacobian"].values - np.eye(width, dtype=np.float32))
            bias = torch.as_tensor(layer["bias"].values)
        params |= {f"{i}.weight": weight, f"{i}.bias": bias}
    config: dict[str, Any] = {key: lens.attrs.get(name) for name, key in CONFIG_NAMES.items()}
    config["base_model_name_or_path"] = model_name or lens.attrs.get("model_name", "")
    config |= {"d_model": width, "num_hidden_layers": n_layers, "bias": True}
    config["lens_type"] = "linear_tuned_lens"
    folder.mkdir(parents=True, exist_ok=True)
    temporaries = {name: folder / f".{name}.part" for name in (PARAMS, CONFIG)}
    try:
        torch.save(params, temporaries[PARAMS])
        temporaries[CONFIG].write_text(json.dumps(config), "utf-8")
        for name, temporary in temporaries.items():
            temporary.replace(folder / name)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def require_fit(
    lens: xr.Dataset, config: Architecture, *, name: str | None = None, revision: str | None = None
) -> None:
    """Check that a lens belongs to a model: its width, layers, target layer, and name and revision.

    Arguments:
        lens: the lens.
        config: architecture of the model.
        name: name of the model as its publisher spells it; None where it is not known, such as for a folder.
        revision: commit of the model; None where it is not known.

    Raises:
        WeightsError: They differ; what the lens does not record is not compared.
    """
    last, width = config.num_layers - 1, config.axis_sizes["hidden"]
    outside = [layer for layer in lens["layer"].values.tolist() if layer >= last]
    facts = [
        ("width", lens.sizes["hidden"], width),
        ("target layer", lens.attrs.get("target_layer"), last),
        ("model", lens.attrs.get("model_name"), name),
        ("revision of the model", lens.attrs.get("model_revision"), revision),
    ]
    for what, of_lens, of_model in facts:
        if of_lens is not None and of_model is not None and of_lens != of_model:
            raise WeightsError(
                f"expected a lens of a model with the {what} {of_model!r}, found one with {of_lens!r}; fit a "
                "lens on this model, or load the model that the lens was fitted on"
            )
    if outside:
        raise WeightsError(
            f"expected a lens of layers 0..{last - 1}, below the model's last layer, found layer "
            f"{outside[0]}; fit a lens on this model, or load the model that the lens was fitted on"
        )
