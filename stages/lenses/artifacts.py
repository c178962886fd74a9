"""Files of Jacobian lenses in the format of the published ones (`torch.save` of a dict), read and written.

    J {layer: [d_model, d_model]}, n_prompts, source_layers, d_model, metadata (left out where empty)

A checkpoint of a fit under way has `jacobian_sum` (a sum over prompts) and `n_done` instead, and is read as
the mean. Only tensors and plain values are read, none longer than the file (torch_files.py). The attributes
of a lens are the metadata of its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.errors import WeightsError
from ..torch_files import load_pickled
from .jacobian import OUTPUTS

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["read_lens", "require_fit", "write_lens"]

DTYPES = ("float16", "bfloat16", "float32")
"""Dtypes that `write_lens` can write; published files are float16. `read_lens` reads any float dtype."""


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
        WeightsError: The dtype is another one or too narrow for the numbers, or metadata name an attribute
            that the fit has recorded.
    """
    import torch

    path, metadata = Path(path), dict(metadata or {})
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
