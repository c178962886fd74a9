"""Reads and writes the graph files of circuit-tracer (`Graph.to_pt`), without circuit-tracer.

The file is the `torch.save` of a dict. It refers to two classes of circuit_tracer, UnifiedConfig and
LogitTarget; classes of the same names replace them here. Any other class in a file is refused, and no code of
a file runs (torch's weights-only unpickler).

The file contains the dense adjacency matrix, so writing one needs memory for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....store.errors import MizarrError, StageError
from ...forward.models.files import SPECIMEN, resolve
from ...torch_files import load_pickled

if TYPE_CHECKING:
    import xarray as xr

    from .written import WrittenGraph

__all__ = ["read", "write"]

_CONFIG = "circuit_tracer.utils.tl_nnsight_mapping.UnifiedConfig"
_TARGET = "circuit_tracer.attribution.targets.LogitTarget"
# Without one of these fields a file is no graph; input_string, vocab_size and scan are optional.
_KEYS = (
    "adjacency_matrix",
    "cfg",
    "active_features",
    "logit_targets",
    "logit_probabilities",
    "input_tokens",
    "selected_features",
    "activation_values",
)
# Hugging Face `model_type` -> class name, which circuit-tracer stores.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


@dataclass
class UnifiedConfig:
    """Stands for circuit_tracer's class of this name: sizes and names of a model."""

    n_layers: int
    """Number of layers."""
    d_model: int
    """Width of the residual stream."""
    d_head: int
    """Width of an attention head."""
    n_heads: int
    """Number of query heads."""
    d_mlp: int
    """Hidden width of the MLP."""
    d_vocab: int
    """Number of rows of the unembedding."""
    tokenizer_name: str
    """Name or folder from which transformers can load the tokenizer."""
    model_name: str
    """Name of the model."""
    original_architecture: str
    """Name of the model's class in transformers."""
    n_key_value_heads: int | None = None
    """Number of key-value heads."""
    dtype: Any | None = None
    """Torch dtype of the adjacency matrix."""


class LogitTarget(NamedTuple):
    """Stands for circuit_tracer's class of this name: text and id of an explained token."""

    token_str: str
    """Text of the token."""
    vocab_idx: int
    """Token id; from the vocabulary size on for custom directions."""


_STAND_INS: Mapping[type[Any], str] = {UnifiedConfig: _CONFIG, LogitTarget: _TARGET}


def _pickler() -> type[Any]:
    """A pickler that writes the two classes above under the names of circuit_tracer's classes."""
    base: Any = pickle._Pickler  # the pure Python one: the C pickler ignores an overridden save_global

    class Named(base):  # type: ignore[misc]  # its base is a value to mypy
        def save_global(self, obj: Any, name: str | None = None) -> None:
            if obj in _STAND_INS:
                module, _, attribute = _STAND_INS[obj].rpartition(".")
                self.write(pickle.GLOBAL + f"{module}\n{attribute}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

    Named.dispatch = {**base.dispatch, type: Named.save_global}
    return Named


def _tokenizer_of(model: str) -> str:
    """Name or folder from which transformers can load the tokenizer, as circuit-tracer does for its viewer.

    The folder for the shipped specimen, whose name is no hub id.
    """
    return str(resolve(model).directory) if model == SPECIMEN else model


def write(graph: WrittenGraph, path: Path, *, scan: str | Sequence[str] | None = None) -> Path:
    """Save a graph as a file for circuit-tracer, atomically.

    Arguments:
        graph: The graph.
        path: Path of the new file.
        scan: Names of the transcoders; None for those that the graph states.

    Returns:
        The path.
    """
    import torch

    a = graph.dataset.attrs
    config = UnifiedConfig(
        **{name: a[name] for name in ("n_layers", "d_model", "d_head", "n_heads", "d_mlp", "d_vocab")},
        tokenizer_name=_tokenizer_of(a["model"]),
        model_name=a["model"],
        original_architecture=_ARCHITECTURES.get(a["model_type"], a["model_type"]),
        n_key_value_heads=a["n_key_value_heads"],
        dtype=torch.float32,
    )
    contents = {
        "input_string": graph.prompt,
        "adjacency_matrix": torch.from_numpy(np.ascontiguousarray(graph.adjacency.values)),
        "cfg": config,
        "active_features": torch.from_numpy(graph.active_features.copy()),
        "logit_targets": [
            LogitTarget(text, int(token))
            for text, token in zip(graph.logit_tokens, graph.logit_token_ids, strict=True)
        ],
        "logit_probabilities": torch.from_numpy(graph.logit_probabilities.astype(np.float32)),
        "vocab_size": int(a["vocab_size"]),
        "input_tokens": torch.from_numpy(graph.input_tokens.copy()),
        "selected_features": torch.from_numpy(graph.selected_features.copy()),
        "activation_values": torch.from_numpy(graph.activation_values.copy()),
        "scan": graph.scan if scan is None else scan,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the final rename is atomic.
    partial = path.with_name(f".{path.name}.partial")
    try:
        torch.save(
            contents,
            partial,
            pickle_module=SimpleNamespace(Pickler=_pickler(), dumps=pickle.dumps, __name__="pickle"),
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read(path: Path) -> xr.Dataset:
    """Read a graph that circuit-tracer saved, as a dataset with the layout of stored graphs.

    Raises:
        StageError: The file is missing, contains other classes, or holds no graph.
    """
    import torch

    if not path.is_file():
        raise StageError(f"expected a graph saved by circuit-tracer at {path}, found no file; check the path")
    classes: list[Any] = [(kind, name) for kind, name in _STAND_INS.items()]
    with torch.serialization.safe_globals(classes):
        # Not mapped into memory: the graph must not change with the file.
        contents = load_pickled(path, StageError, mmap=False)
    try:
        return _dataset(contents)
    except MizarrError:
        raise
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise StageError(
            f"expected a graph saved by circuit-tracer at {path}, found contents that cannot be read: {error}"
        ) from error


def _dataset(contents: Any) -> xr.Dataset:
    """Dataset of the graph that a file's dict describes; StageError if the dict is no graph."""
    import xarray as xr

    missing = [key for key in _KEYS if not isinstance(contents, Mapping) or key not in contents]
    if missing:
        raise StageError(
            f"expected a graph saved by circuit-tracer, found a file without the entry {missing[0]!r}; save "
            "the graph with Graph.to_pt"
        )
    config, targets = contents["cfg"], contents["logit_targets"]
    # Files of circuit-tracer versions before named targets have a tensor of token ids.
    if hasattr(targets, "tolist"):
        targets = [LogitTarget("", int(token)) for token in targets.tolist()]
    selected, tokens = contents["selected_features"].numpy(), contents["input_tokens"].reshape(-1).numpy()
    matrix = contents["adjacency_matrix"].float().numpy()
    features, logits = len(selected), len(targets)
    sources = features + (config.n_layers + 1) * len(tokens)
    if matrix.shape != (sources + logits, sources + logits):
        raise StageError(
            f"expected an adjacency matrix of {sources + logits} nodes in the graph file ({features} "
            "features, "
            f"{config.n_layers} layers, {len(tokens)} tokens, {logits} logits), found shape "
            f"{list(matrix.shape)}"
        )
    # Rows of errors and tokens, and columns of logits, are zero by construction.
    rows = np.concatenate([matrix[:features], matrix[sources:]])[:, :sources]
    config_fields = {field.name for field in fields(UnifiedConfig)} - {"dtype", "tokenizer_name"}
    named = {name: getattr(config, name) for name in config_fields}
    model = named.pop("model_name")
    return xr.Dataset(
        {
            "weights": (("target", "source"), rows),
            "active_features": (("active", "axis"), contents["active_features"].numpy()),
            "activation_values": ("active", contents["activation_values"].float().numpy()),
            "selected_features": ("selected", selected),
            "input_tokens": ("input_position", tokens),
            # The file has token ids only, and reading it needs no tokenizer.
            "input_text": ("input_position", np.array([""] * len(tokens), object)),
            "logit_token_ids": ("logit", np.array([target.vocab_idx for target in targets], np.int64)),
            "logit_text": ("logit", np.array([target.token_str for target in targets], object)),
            "logit_probabilities": ("logit", contents["logit_probabilities"].double().numpy()),
        },
        coords={"axis": np.array(["layer", "position", "feature"], object)},
        attrs={
            **named,
            "model": model,
            "model_type": _model_type(named.pop("original_architecture")),
            "input_string": contents.get("input_string", ""),
            "vocab_size": int(contents.get("vocab_size") or config.d_vocab),
            "scan": contents.get("scan"),
        },
    )


def _model_type(architecture: str) -> str:
    """`model_type` of a transformers class; the name of an unknown class is returned unchanged."""
    names = {class_name: model_type for model_type, class_name in _ARCHITECTURES.items()}
    return names.get(architecture, architecture)
