"""What are the shapes and norms of the weight matrices, layer by layer?

Shape, dtype and Frobenius norm of every tensor, layer by layer.

Reads the checkpoint's files a block of rows at a time (inspect_model.py), never a whole tensor, without torch
and without running the model. `mizarr models inspect` lists the same of checkpoints of unsupported models.

Norms of one kind of matrix are comparable across layers. Across kinds they grow with the number of entries:
the root mean square, norm / sqrt(entries), does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Estimate, SourceNode
from ...store.errors import ConfigError
from ..labelled import labelled
from ..material.answers import number
from ..settings import FileSettings, setting
from ..subject import Subject
from ..views import Data, Lines, Table, View, bold, dash, paper, together
from ..workflow import Workflow
from .inspect_model import BLOCK, TensorFacts, tensor_facts

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.files import ModelFiles
    from ...stages.forward.models.model import Model

__all__ = ["InspectWeights", "InspectWeightsSettings", "weight_facts", "weight_facts_node"]

VERSION = 2
"""Version of the dataset of `weight_facts`, part of its cache key; raise it when the dataset changes."""
OUTSIDE = -1
"""Layer index of tensors that belong to no layer, such as the embedding."""
NO_AXIS = -1
"""Padding of `shape` for tensors of fewer axes."""
SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "mlp",
    "num_attention_heads": "head",
    "num_kv_heads": "kv_head",
    "head_dim": "d_head",
    "state_keys": "key",
    "state_values": "value",
}
"""Sizes of a model that are listed: JSON field -> axis of the architecture."""


@dataclass(frozen=True)
class InspectWeightsSettings(FileSettings):
    """Settings of the workflow `inspect_weights`: which norm of the weights is drawn."""

    rms: bool = setting(
        False, "draw the root mean square, norm / sqrt(entries), which is comparable across kinds of matrices"
    )


def weight_facts(files: ModelFiles) -> xr.Dataset:
    """Shape, dtype and statistics of every tensor of a checkpoint, ordered by layer, tensors of no layer
    first.

    Returns:
        Dataset with the axes tensor and axis. [tensor]: name and dtype (str); layer (int, -1 for tensors of
        no layer); matrix (str, name within the layer without ".weight"); norm, mean and std (float64, NaN for
        a tensor with NaN or infinite entries); finite (bool). shape, int [tensor, axis]: -1 for axes that a
        tensor does not have.
    """
    import xarray as xr

    tensors = files.architecture().tensors

    def layer_and_matrix(name: str) -> tuple[int, str]:
        layer, matrix = tensors.placed(name)
        return OUTSIDE if layer is None else layer, matrix.removesuffix(".weight")

    facts = sorted(tensor_facts(files.checkpoint), key=lambda fact: (layer_and_matrix(fact.name), fact.name))
    most_axes = max((len(fact.shape) for fact in facts), default=0)
    padded_shapes = [[*fact.shape, *[NO_AXIS] * (most_axes - len(fact.shape))] for fact in facts]
    places = [layer_and_matrix(fact.name) for fact in facts]
    texts = {name: [getattr(fact, name) for fact in facts] for name in ("name", "dtype")}
    texts["matrix"] = [matrix for _, matrix in places]
    data: dict[str, Any] = {name: ("tensor", np.array(values, object)) for name, values in texts.items()}
    data["layer"] = ("tensor", np.array([layer for layer, _ in places], np.int64))
    data["shape"] = (("tensor", "axis"), np.array(padded_shapes, np.int64))
    for name, long_name in (
        ("norm", "Frobenius norm"),
        ("mean", "mean of the entries"),
        ("std", "standard deviation of the entries"),
    ):
        values = [getattr(fact, name) for fact in facts]
        numbers = np.array([np.nan if value is None else value for value in values])
        data[name] = ("tensor", numbers, {"units": "1", "long_name": long_name})
    data["finite"] = ("tensor", np.array([bool(fact.finite) for fact in facts]))
    return xr.Dataset(data)


def weight_facts_node(files: ModelFiles) -> SourceNode:
    """Node of `weight_facts`, stored once per checkpoint."""
    identity = files.identity()
    size = sum(path.stat().st_size for path in files.weight_files)
    params = {"weights": identity.weights, "config": identity.config}
    # Per entry of a block up to 8 bytes as stored, 8 in float64 and 8 for its square.
    estimate = Estimate(size, 1 << 16, 24 * BLOCK)
    return SourceNode(
        "weight_facts", VERSION, params, partial(weight_facts, files), estimate, (files.pinned,)
    )


class InspectWeights(Workflow):
    """Workflow that shows shapes and norms of the tensors of a checkpoint, by layer.

    Raises:
        ConfigError: for a model that transformers computes, whose tensors are not assigned to layers.
    """

    name = "inspect_weights"
    question = "What are the shapes and norms of the weight matrices, layer by layer?"
    descriptive = "Shapes and Frobenius norms of the tensors in the checkpoint."
    settings_type = InspectWeightsSettings

    def __init__(self, settings: InspectWeightsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(settings.reference(model))
        if not any(self.subject.config.tensors.layers):
            raise ConfigError(
                f"expected a model whose tensors are assigned to layers, found {self.subject.name}, which "
                "transformers computes; `mizarr models inspect` lists the tensors of the checkpoint"
            )
        self.nodes = {"weights": weight_facts_node(self.subject.files)}

    @cached_property
    def facts(self) -> list[tuple[int, str, TensorFacts]]:
        """(layer, matrix, facts) of every tensor, ordered by layer; layer is -1 for tensors of no layer."""
        facts = self.result("weights").load()
        columns = (facts[name].values.tolist() for name in ("layer", "matrix", "name", "dtype", "finite"))
        numbers = (map(number, facts[name].values) for name in ("norm", "mean", "std"))
        shapes = [tuple(size for size in row if size != NO_AXIS) for row in facts["shape"].values.tolist()]
        return [
            (layer, matrix, TensorFacts(name, shape, dtype, norm, mean, std, finite))
            for (layer, matrix, name, dtype, finite, norm, mean, std), shape in zip(
                zip(*columns, *numbers, strict=True), shapes, strict=True
            )
        ]

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that have tensors."""
        return sorted({layer for layer, _, _ in self.facts if layer != OUTSIDE})

    @property
    def matrices(self) -> list[str]:
        """Names of the kinds of tensors within a layer, as in the checkpoint without ".weight"; vectors come
        last."""
        ranks = {matrix: len(fact.shape) for layer, matrix, fact in self.facts if layer != OUTSIDE}
        return sorted(ranks, key=lambda matrix: (ranks[matrix] < 2, matrix))

    @property
    def short(self) -> list[str]:
        """Short names of `matrices`, for column heads: "q" for "self_attn.q_proj", "ln1" for the norm before
        attention."""
        fields = {
            stored.name.removesuffix(".weight"): field
            for weights in self.subject.config.tensors.layers
            for field, stored in weights.items()
        }
        return [fields.get(matrix, matrix) for matrix in self.matrices]

    def norms(self, *, rms: bool = False) -> npt.NDArray[np.float64]:
        """Frobenius norms, float64 [layer, matrix], in the order of `layers` and `matrices`.

        rms: whether to divide by the square root of the number of entries. NaN for a tensor that a layer does
        not have, or that has NaN or infinite entries.
        """
        norms = np.full((len(self.layers), len(self.matrices)), np.nan)
        for layer, matrix, fact in self.facts:
            if layer != OUTSIDE and fact.norm is not None:
                scale = math.sqrt(fact.parameters) if rms else 1.0
                norms[self.layers.index(layer), self.matrices.index(matrix)] = fact.norm / scale
        return norms

    @property
    def embedding(self) -> TensorFacts:
        """Shape, dtype and statistics of the token embedding. Raises ConfigError for a checkpoint without
        one."""
        name = self.subject.config.tensors.outside["embed"].name
        embedding = next((fact for _, _, fact in self.facts if fact.name == name), None)
        if embedding is None:
            raise ConfigError(
                f"expected {name} in {self.subject.name}, found none; `mizarr models inspect` lists its "
                "tensors"
            )
        return embedding

    @property
    def summary(self) -> str:
        """See `Workflow`: number of parameters, and the matrices of the largest and the smallest norm."""
        total = sum(fact.parameters for *_, fact in self.facts)
        norms = self.norms(rms=True)
        # Vectors have norms of another size; a layer may lack a matrix.
        ranks = {matrix: len(fact.shape) for _, matrix, fact in self.facts}
        norms = norms[:, [ranks[matrix] > 1 for matrix in self.matrices]]
        if not np.isfinite(norms).any():
            return f"{self.subject.name} has {total:,} parameters."
        (low, low_name), (high, high_name) = (
            (
                norms.flat[i],
                f"{self.matrices[i % norms.shape[1]]} of layer {self.layers[i // norms.shape[1]]}",
            )
            for i in (int(np.nanargmin(norms)), int(np.nanargmax(norms)))
        )
        return (
            f"{self.subject.name} has {total:,} parameters in {len(self.layers)} layers; the root mean "
            f"square of a layer's matrix is between {low:.3g} ({low_name}) and {high:.3g} ({high_name})."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: tables of the kinds of tensors, of norms by layer and of tensors outside
        the layers; curves of norms."""
        config, facts, layers, name = self.subject.config, self.facts, self.layers, self.subject.name
        by_layer: dict[int, list[dict[str, Any]]] = {OUTSIDE: []}
        for layer, _, fact in facts:
            by_layer.setdefault(layer, []).append(_fact_json(fact))
        sizes = {name: config.axis_sizes[axis] for name, axis in SIZES.items() if axis in config.axis_sizes}
        sizes["vocab_size"] = config.vocab_size
        total = sum(fact.parameters for *_, fact in facts)
        about = {"model_id": name, "model_type": config.model_type, "n_layers": config.num_layers, **sizes}
        yield Data(
            json={
                **about,
                "parameters": total,
                "embedding": lambda: _fact_json(self.embedding),
                "tied_embedding": config.tie_word_embeddings,
                "outside_layers": by_layer[OUTSIDE],
                "layers": [{"layer": layer, "tensors": by_layer[layer]} for layer in layers],
            }
        )
        norms = self.norms()
        sizes_text = ", ".join(f"{size.removeprefix('num_')} {n}" for size, n in sizes.items())
        yield Table.of(
            [self._range(matrix, norms[:, i]) for i, matrix in enumerate(self.matrices)],
            ("matrix", "matrix"),
            ("shape", "shape"),
            ("dtype", "dtype"),
            ("smallest norm", "low", ".3g"),
            ("layer", "low_layer", "d"),
            ("largest", "high", ".3g"),
            ("layer", "high_layer", "d"),
            title=f"Weights of {name}: {total:,} parameters, {config.num_layers} layers",
            caption="One row per kind of tensor in the layers: its shape, its smallest and its largest "
            "Frobenius norm, each with the layer that has it. Sizes of the model: "
            f"{sizes_text.replace('_', ' ')}.",
        )
        broken = [fact.name for *_, fact in facts if fact.finite is False]
        more = " …" if len(broken) > 3 else ""
        yield Table.of(
            [{"layer": layer, **dict(enumerate(row))} for layer, row in zip(layers, norms, strict=True)],
            ("layer", "layer", lambda layer: bold(str(layer))),
            *((short, lambda row, i=i: dash(row[i], ".3g"), str) for i, short in enumerate(self.short)),
            title="Frobenius norm by layer",
            caption="One row per layer, one column per kind of tensor; – where a layer has none."
            + (f" Tensors with NaN or infinite entries: {', '.join(broken[:3])}{more}." if broken else ""),
        )
        unit = "root mean square" if self.settings.rms else "Frobenius norm"
        norms = self.norms(rms=self.settings.rms)
        drawn = labelled(norms.T, unit, matrix=self.short, layer=layers)
        ranks = {matrix: len(fact.shape) for _, matrix, fact in facts}
        # Norms grow with the number of entries: beside matrices, curves of vectors would lie at 0.
        is_matrix = np.array([ranks[matrix] > 1 for matrix in self.matrices], bool)
        kinds = {"Matrices": drawn[is_matrix], "Vectors: norms and biases": drawn[~is_matrix]}
        caption = f"x: layer. y: {unit} of the weights as they are stored. One curve per kind of tensor."
        curves = [Lines.of(part, title, caption, low=0.0) for title, part in kinds.items() if part.size]
        panels = list(map(self._in_families, curves))
        if panels:
            shared_caption = caption if len(panels) == 1 else ""
            yield from together("inspect_weights", f"Weights of {name}", *panels, caption=shared_caption)
        yield Table.of(
            by_layer[OUTSIDE],
            ("tensor", "name"),
            ("shape", lambda fact: _shape(fact["shape"])),
            ("dtype", "dtype"),
            *((key, lambda fact, key=key: dash(fact[key], ".3g"), str) for key in ("norm", "mean", "std")),
            title="Tensors outside the layers",
            caption="One row per tensor. Norm: Frobenius norm. Mean, std: mean and standard deviation of the "
            "entries."
            + (" The embedding is also the unembedding (tied)." if config.tie_word_embeddings else ""),
        )

    def _in_families(self, curves: Lines) -> Lines:
        """Curves grouped by module of a layer ("mlp"), which get shades of one colour, if there are more
        curves than colours."""
        if len(curves.lines) <= len(paper.SHADES):
            return curves
        modules = {
            short: matrix.partition(".")[0] for short, matrix in zip(self.short, self.matrices, strict=True)
        }
        return replace(curves, lines=tuple(replace(line, family=modules[line.name]) for line in curves.lines))

    def _range(self, matrix: str, norms: npt.NDArray[Any]) -> dict[str, Any]:
        """Table row of one kind of tensor: shapes, dtypes, and the layers of its smallest and largest norm.

        norms: Frobenius norm by layer, in the order of `layers`.
        """
        facts = [fact for _, name, fact in self.facts if name == matrix]
        row: dict[str, Any] = {
            "matrix": matrix,
            "shape": " or ".join(dict.fromkeys(_shape(fact.shape) for fact in facts)),
            "dtype": " or ".join(dict.fromkeys(fact.dtype for fact in facts)),
            **dict.fromkeys(("low", "low_layer", "high", "high_layer")),
        }
        # `nanargmin` raises if every norm is NaN.
        if np.isfinite(norms).any():
            for key, i in (("low", np.nanargmin(norms)), ("high", np.nanargmax(norms))):
                row |= {key: norms[i], f"{key}_layer": self.layers[i]}
        return row


def _shape(shape: Sequence[int]) -> str:
    """Shape as text: "768 x 3072", or "number" for a scalar."""
    return " x ".join(map(str, shape)) or "number"


def _fact_json(fact: TensorFacts) -> dict[str, Any]:
    """JSON record of a tensor: name, shape, dtype, norm, mean and std."""
    names = ("name", "shape", "dtype", "norm", "mean", "std")
    return {name: getattr(fact, name) for name in names}
