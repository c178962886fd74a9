"""The readout of a model as a dataset: final norm, unembedding and vocabulary, stored with its activations.

These few tensors turn a residual stream into logits. They are read from checkpoint files, without torch, so
that analyses of a store need neither torch nor the model.

Variables and attributes:
  unembed float32 [vocab, hidden]         row = direction of a token, times the model's logit scale (Cohere)
  norm_weight float32 [hidden]            effective factor (Gemma's 1 + w is added here)
  norm_bias [hidden], unembed_bias [vocab]  float32, if the model has them
  token str [vocab]                       text of each token, "" where the tokenizer has none
  attrs: norm "rms" | "layer" | "none", eps, soft_cap (0 = none)

Encoders with a transform before the head (`HeadTransform`), whose logits are not linear in the state:
  unembed [vocab, embedding], transform_weight [embedding, hidden], transform_bias [embedding]
  transform_norm_weight, transform_norm_bias [embedding]
  attrs: transform_activation, transform_norm, transform_eps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import Array
from ...store.errors import ShapeError
from ..forward.checkpoints.checkpoint import Checkpoint, Files, checkpoint_of

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline import SourceNode
    from ..forward.architectures.architecture import Architecture, HeadTransform, Stored
    from ..forward.models.files import ModelFiles

__all__ = [
    "effective_gain",
    "read_weight",
    "readout",
    "readout_from_files",
    "readout_node",
    "require_linear",
]

VERSION = 1
"""Version of this dataset in its key."""


def readout(
    unembed: Array,
    norm_weight: Array,
    *,
    norm: str,
    eps: float,
    soft_cap: float | None = None,
    norm_bias: Array | None = None,
    unembed_bias: Array | None = None,
    vocabulary: Sequence[str] = (),
) -> xr.Dataset:
    """Build a readout dataset from tensors, for a model without head transform.

    Arguments:
        unembed: [vocab, hidden].
        norm_weight: [hidden].
        norm: "rms", "gemma_rms" (the factor is 1 + weight) or "layer".
        eps: Epsilon of the norm.
        soft_cap: Final soft cap; None for none.
        norm_bias: [hidden].
        unembed_bias: [vocab].
        vocabulary: Text by token id; may be shorter than vocab, as models often have unused rows.

    Raises:
        ShapeError: The parts do not match.
    """
    import xarray as xr

    if norm not in ("rms", "gemma_rms", "layer"):
        raise ShapeError(
            f"expected 'rms', 'gemma_rms' or 'layer' as the final norm of a readout, found {norm!r}"
        )
    if unembed.ndim != 2 or norm_weight.shape != unembed.shape[1:]:
        raise ShapeError(
            "expected unembed of shape [vocab, hidden] and norm_weight of shape [hidden], found shapes "
            f"{unembed.shape} and {norm_weight.shape}"
        )
    weight = np.asarray(norm_weight, np.float32)
    data: dict[str, Any] = {
        "unembed": (("vocab", "hidden"), np.asarray(unembed, np.float32)),
        "norm_weight": ("hidden", effective_gain(weight, norm)),
        "token": ("vocab", _token_texts(vocabulary, len(unembed))),
    }
    if norm_bias is not None:
        data["norm_bias"] = ("hidden", np.asarray(norm_bias, np.float32))
    if unembed_bias is not None:
        data["unembed_bias"] = ("vocab", np.asarray(unembed_bias, np.float32))
    attrs = {
        "norm": "layer" if norm == "layer" else "rms",
        "eps": float(eps),
        "soft_cap": float(soft_cap or 0.0),
    }
    return xr.Dataset(data, attrs=attrs)


def readout_from_files(
    weight_files: Files,
    config: Architecture,
    *,
    vocabulary: Sequence[str] = (),
    dtype: str = "float32",
) -> xr.Dataset:
    """Read the final norm and unembedding of a model from its checkpoint files.

    Arguments:
        weight_files: Checkpoint files.
        config: The architecture.
        vocabulary: Text by token id.
        dtype: Dtype in which the model computes; weights are rounded to it, as in the model.

    Raises:
        ConfigError: The model has no language head.
        WeightsError: A tensor is missing or a file is incomplete.
    """
    config.require_vocabulary()
    from ..forward.architectures.architecture import require_tied

    def take(weight: str) -> Array | None:
        stored = config.tensors.outside.get(weight)
        return None if stored is None else read_weight(checkpoint, stored.name, stored, dtype)

    checkpoint = checkpoint_of(weight_files).standing_in(config)
    # Checkpoints may contain both tensors of a tied pair, and then they must agree.
    for copy, original in config.tensors.copied(checkpoint.entries):
        copied, source = (checkpoint.array(name) for name in (copy, original))
        require_tied(copy, original, np.array_equal(copied, source))
    unembed, norm_weight = take("head"), take("final_norm")
    assert unembed is not None  # every model has one
    # An encoder with a transform may have no final norm: its stream ends with the norm of its last layer.
    if config.transform is not None:
        return _transformed(config, config.transform, take, vocabulary)
    assert norm_weight is not None  # without a transform every model has one
    return readout(
        unembed,
        norm_weight,
        norm=config.norm_type,
        eps=config.final_norm_eps,
        soft_cap=config.final_logit_softcapping,
        norm_bias=take("final_norm.bias"),
        unembed_bias=take("head.bias"),
        vocabulary=vocabulary,
    )


def effective_gain(weight: Array, norm_type: str) -> Array:
    """Factor by which a norm multiplies, from its stored weight.

    Arguments:
        weight: float32 [hidden].
        norm_type: `Architecture.norm_type`.
    """
    # Gemma stores w and multiplies by 1 + w.
    return weight + np.float32(1) if norm_type == "gemma_rms" else weight


def _token_texts(vocabulary: Sequence[str], rows: int) -> Array:
    """Text of each row of the unembedding, object [vocab]; "" past the end of the vocabulary."""
    # Many models pad the unembedding beyond the tokenizer, to matrix sizes that GPUs multiply fast.
    return np.array([*vocabulary[:rows], *[""] * (rows - len(vocabulary))], dtype=object)


def _transformed(
    config: Architecture,
    transform: HeadTransform,
    take: Callable[[str], Array | None],
    vocabulary: Sequence[str],
) -> xr.Dataset:
    """Build the readout dataset of a model with a transform (dense layer, activation, norm) between the final
    norm and the unembedding, such as BERT.

    Arguments:
        config: The architecture.
        transform: Activation and epsilon of the transform.
        take: Function that reads a weight by its name in mizarr; it returns None for a weight that the
            checkpoint does not have.
        vocabulary: Text by token id.
    """
    import xarray as xr

    dims = {
        "norm_weight": ("final_norm", ("hidden",)),
        "norm_bias": ("final_norm.bias", ("hidden",)),
        "transform_weight": ("transform", ("embedding", "hidden")),
        "transform_bias": ("transform.bias", ("embedding",)),
        "transform_norm_weight": ("transform_norm", ("embedding",)),
        "transform_norm_bias": ("transform_norm.bias", ("embedding",)),
        "unembed": ("head", ("vocab", "embedding")),
        "unembed_bias": ("head.bias", ("vocab",)),
    }
    assert transform.eps is not None  # only transforms before labels have no norm
    data: dict[str, Any] = {}
    for name, (weight, axes) in dims.items():
        if (values := take(weight)) is not None:
            data[name] = (axes, np.asarray(values, np.float32))
    norm = "layer" if config.norm_type == "layer" else "rms"
    data["token"] = ("vocab", _token_texts(vocabulary, config.vocab_size))
    attrs = {
        "norm": norm if "norm_weight" in data else "none",
        "eps": float(config.final_norm_eps),
        "soft_cap": float(config.final_logit_softcapping or 0.0),
        "transform_activation": transform.activation,
        "transform_norm": norm,
        "transform_eps": float(transform.eps),
    }
    return xr.Dataset(data, attrs=attrs)


def require_linear(readout: xr.Dataset) -> None:
    """Raise ShapeError for a readout with a transform, whose logits cannot be split into contributions."""
    if "transform_weight" in readout:
        raise ShapeError(
            "the logits of this model cannot be split into contributions, because its LM head is not "
            f"linear: it begins with a dense layer, an activation ({readout.attrs['transform_activation']}) "
            "and a norm; use the logit lens instead"
        )


def readout_node(files: ModelFiles, *, dtype: str = "float32") -> SourceNode:
    """Node of a computation graph that provides a model's readout, stored once per model, tokenizer and
    dtype.

    Arguments:
        files: The model's files; without a tokenizer, token ids serve as texts.
        dtype: Dtype in which the model computes; weights are rounded to it.
    """
    from ...pipeline import Estimate, SourceNode

    config, tokenizer = files.architecture(), files.tokenizer()
    # Looked up while the plan is made: a checkpoint without a head is an error before anything is computed.
    config.require_vocabulary()
    identity = files.identity(dtype=dtype)

    def make() -> xr.Dataset:
        words = [str(i) for i in range(config.vocab_size)] if tokenizer is None else tokenizer.vocabulary
        return readout_from_files(files.checkpoint, config, vocabulary=words, dtype=dtype)

    params = {
        "weights": identity.weights,
        "config": identity.config,
        "tokenizer": "ids" if tokenizer is None else tokenizer.digest,
        "dtype": dtype,
    }
    n_tokens, width = config.tensors.outside["head"].shape
    # The unembedding as float32. An estimate is bytes read, bytes written, peak memory.
    n_bytes = 4 * n_tokens * width
    estimate = Estimate(n_bytes, n_bytes, 2 * n_bytes)
    return SourceNode("readout", VERSION, params, make, estimate, (files.pinned,))


def read_weight(
    checkpoint: Checkpoint,
    name: str,
    stored: Stored,
    dtype: str,
    *,
    rows: slice | Array | None = None,
    columns: slice | None = None,
) -> Array:
    """Read a weight of a checkpoint as the model uses it: rounded, [out, in], with the factors of its family.

    Arguments:
        checkpoint: The checkpoint.
        name: Name of the tensor in the checkpoint.
        stored: How the tensor is stored: transposed, in groups, less a constant, or to be scaled by row.
        dtype: Dtype in which the model computes.
        rows: Rows to read; None for all. An unquantised file is read only in these rows.
        columns: Columns to read; None for all.

    Returns:
        float32 [row, column], or [row] for a vector.
    """
    row_index, column_index = (slice(None) if index is None else index for index in (rows, columns))
    if stored.constant is not None:
        return np.full(stored.shape, stored.constant, np.float32)[row_index]
    tensor = checkpoint.array(name)
    # Grouped tensors hold the diagonal blocks only; the model multiplies with the whole matrix.
    if stored.groups is not None:
        tensor = stored.on_diagonal(
            tensor, np.zeros((len(tensor), tensor.shape[1] * stored.groups), tensor.dtype)
        )
    # Conv1D of GPT-2 stores [in, out].
    tensor = (tensor.T if stored.is_transposed else tensor)[row_index]
    values = rounded(tensor if tensor.ndim == 1 else tensor[:, column_index], dtype)
    # Rounded again after the addition, as the model adds in its own dtype.
    if stored.plus:
        values = rounded(values + np.float32(stored.plus), dtype)
    values = np.ascontiguousarray(values)
    if not stored.factors:
        return values
    counts, factors = zip(*stored.factors, strict=True)
    column = np.repeat(np.array(factors, np.float32), counts)[row_index].reshape(-1, *[1] * (values.ndim - 1))
    return rounded(values * column, dtype)


def rounded(values: Array, dtype: str) -> Array:
    """Values rounded to a dtype and converted back to float32.

    Arguments:
        values: Array of any float dtype.
        dtype: Name of the dtype.
    """
    # numpy has no bfloat16 of its own.
    import ml_dtypes

    # Nothing to round: float32 is the result's dtype, and values of `dtype` are exact in it.
    if dtype in ("float32", values.dtype.name):
        return values.astype(np.float32)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)
