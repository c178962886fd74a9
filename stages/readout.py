"""The readout of a model as data: final norm, unembedding and vocabulary, stored once beside its activations.

Border: the two tensors and the few numbers that turn a residual stream into logits; nothing that runs a
model. Read straight from the checkpoint's files, without torch, so that whoever has the store needs neither.

A readout is a dataset:
  unembed float32 [vocab, hidden]         row = direction of a token
  norm_weight float32 [hidden]            as it multiplies (Gemma's 1 + w is added up here)
  norm_bias [hidden], unembed_bias [vocab]  float32, only where the model has them
  token str [vocab]                       text of each token, empty where the tokenizer has none
  attrs: norm "rms" | "layer", eps, soft_cap (0 = none), logit_scale
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..store.errors import ShapeError, WeightsError, nearest
from ..store.tensors import mapped_tensor, read_header

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline import SourceNode
    from ..store.keys import ModelIdentity
    from .forward.config import TransformerConfig
    from .forward.files import ModelFiles

__all__ = ["readout", "readout_from_files", "readout_node", "require_weights"]

Array = npt.NDArray[Any]

VERSION = 1
"""Moves when the dataset described above changes."""


def readout(
    unembed: Array,
    norm_weight: Array,
    *,
    norm: str,
    eps: float,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    norm_bias: Array | None = None,
    unembed_bias: Array | None = None,
    vocabulary: Sequence[str] = (),
) -> xr.Dataset:
    """The dataset described above, from its parts.

    unembed: [vocab, hidden].  norm: "rms", "gemma_rms" (weight is 1 + w) or "layer".  vocabulary: text by
    token id; models often have more rows than their tokenizer has tokens.
    Raises ShapeError when the parts do not fit together.
    """
    import xarray as xr

    if norm not in ("rms", "gemma_rms", "layer"):
        raise ShapeError(f"expected norm 'rms', 'gemma_rms' or 'layer', found {norm!r}")
    if unembed.ndim != 2 or norm_weight.shape != unembed.shape[1:]:
        raise ShapeError(
            f"expected unembed [vocab, hidden], norm_weight [hidden], found "
            f"{unembed.shape} and {norm_weight.shape}"
        )
    weight = np.asarray(norm_weight, np.float32)
    rows = len(unembed)
    data: dict[str, Any] = {
        "unembed": (("vocab", "hidden"), np.asarray(unembed, np.float32)),
        "norm_weight": ("hidden", weight + 1 if norm == "gemma_rms" else weight),
        "token": ("vocab", np.array([*vocabulary[:rows], *[""] * (rows - len(vocabulary))], dtype=object)),
    }
    if norm_bias is not None:
        data["norm_bias"] = ("hidden", np.asarray(norm_bias, np.float32))
    if unembed_bias is not None:
        data["unembed_bias"] = ("vocab", np.asarray(unembed_bias, np.float32))
    attrs = {
        "norm": "layer" if norm == "layer" else "rms",
        "eps": float(eps),
        "soft_cap": float(soft_cap or 0.0),
        "logit_scale": float(logit_scale),
    }
    return xr.Dataset(data, attrs=attrs)


def readout_from_files(
    weight_files: Sequence[Path],
    config: TransformerConfig,
    *,
    vocabulary: Sequence[str] = (),
    dtype: str = "float32",
) -> xr.Dataset:
    """The readout of a checkpoint, from its safetensors files alone.

    dtype: what the model computes in; the weights are rounded to it, as the model's own are.
    Raises WeightsError when a tensor is missing or a file is not a whole safetensors file.
    """
    from .forward.weights import EMBED, FINAL_NORM, LM_HEAD

    def take(name: str) -> Array:
        return rounded(read_tensor(weight_files, name), dtype)

    return readout(
        take(f"{EMBED if config.tie_word_embeddings else LM_HEAD}.weight"),
        take(f"{FINAL_NORM}.weight"),
        norm=config.norm_type,
        eps=config.norm_eps,
        soft_cap=config.final_logit_softcapping,
        norm_bias=take(f"{FINAL_NORM}.bias") if config.norm_type == "layer" else None,
        vocabulary=vocabulary,
    )


def readout_node(files: ModelFiles, *, dtype: str = "float32") -> SourceNode:
    """The readout of a model in a workflow's graph; stored once per model, tokenizer and dtype."""
    from ..pipeline import Estimate, SourceNode

    config, tokenizer = files.transformer_config(), files.tokenizer()
    identity = files.identity(dtype=dtype)

    def make() -> xr.Dataset:
        words = () if tokenizer is None else tokenizer.vocabulary
        found = readout_from_files(files.weight_files, config, vocabulary=words, dtype=dtype)
        require_weights(files, identity)
        return found

    params = {
        "weights": identity.weights,
        "config": identity.config,
        "tokenizer": None if tokenizer is None else tokenizer.digest,
        "dtype": dtype,
    }
    size = 4 * config.vocab_size * config.hidden_size
    return SourceNode("readout", VERSION, params, make, Estimate(size, size, 2 * size))


def require_weights(files: ModelFiles, identity: ModelIdentity) -> None:
    """Raise WeightsError unless a model's weights, which were just read, are those a key speaks of."""
    if files.identity(identity.dtype).weights != identity.weights:
        raise WeightsError(
            f"expected the weights of {files.name} as they were when this was planned, found others in "
            f"{files.directory}; plan again"
        )


def read_tensor(files: Sequence[Path], name: str) -> Array:
    """One tensor of some safetensors files, mapped; bfloat16 as ml_dtypes.bfloat16, which safetensors' own
    numpy reader does not know."""
    from .forward.weights import FLOATS

    names: list[str] = []
    for path in files:
        header, start = read_header(path)
        names += header
        if name not in header:
            continue
        if header[name]["dtype"] not in FLOATS:
            raise WeightsError(
                f"expected {name!r} as one of {', '.join(FLOATS)}, found {header[name]['dtype']}; dequantise "
                "the checkpoint"
            )
        return mapped_tensor(path, header[name], start, name)
    raise WeightsError(
        f"expected a tensor {name!r}, found {len(names)} others, nearest {nearest(name, names)!r}; "
        "are all files of the checkpoint there?"
    )


def rounded(values: Array, dtype: str) -> Array:
    """Values as a model that computes in `dtype` holds them, widened to float32."""
    import ml_dtypes

    if dtype in ("float32", values.dtype.name):
        return values.astype(np.float32)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)
