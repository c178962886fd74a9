"""What are the norms and spectra of the weight matrices?

Shape, dtype and Frobenius norm of every tensor, layer by layer.

Reads the checkpoint's files a block of rows at a time (inspect_model.py), never a whole tensor, without torch
and without running the model; `mizarr models inspect` tells the same of checkpoints that cannot run.

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
from ..views import Data, Lines, Table, View, bold, paper, together
from ..workflow import Workflow
from .inspect_model import BLOCK, TensorFacts, tensor_facts

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.files import ModelFiles
    from ...stages.forward.models.model import Model

__all__ = ["InspectWeights", "InspectWeightsSettings", "weight_facts", "weight_facts_node"]

VERSION = 2
"""Moves when the dataset of `weight_facts` changes."""
OUTSIDE = -1
"""Layer of tensors that belong to none."""
NO_AXIS = -1
SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "mlp",
    "num_attention_heads": "head",
    "num_kv_heads": "kv_head",
    "head_dim": "d_head",
    "state_keys": "key",
    "state_values": "value",
}
"""What is told of a model, and the axis whose size it is."""


@dataclass(frozen=True)
class InspectWeightsSettings(FileSettings):
    """What `--set` can change."""

    rms: bool = setting(
        False, "draw norms over the root of the number of entries, comparable across matrices"
    )


def weight_facts(files: ModelFiles) -> xr.Dataset:
    """What is known of every tensor of a checkpoint, in order of layers, those of none first.

    name, dtype (str), layer (int, -1 outside of layers), matrix (str: name within the layer, ".weight" left
    out), shape int [tensor, axis] (-1 beyond a tensor's own axes), norm, mean, std float64 [tensor]: NaN, and
    finite False, for a tensor with entries that are not numbers.
    """
    import xarray as xr

    tensors = files.architecture().tensors

    def placed_at(name: str) -> tuple[int, str]:
        layer, matrix = tensors.placed(name)
        return OUTSIDE if layer is None else layer, matrix.removesuffix(".weight")

    facts = sorted(tensor_facts(files.checkpoint), key=lambda fact: (placed_at(fact.name), fact.name))
    axes = max((len(fact.shape) for fact in facts), default=0)
    shapes = np.array([[*fact.shape, *[NO_AXIS] * (axes - len(fact.shape))] for fact in facts], np.int64)
    placed = [placed_at(fact.name) for fact in facts]
    columns = {name: [getattr(fact, name) for fact in facts] for name in ("name", "dtype")}
    columns["matrix"] = [matrix for _, matrix in placed]
    data: dict[str, Any] = {name: ("tensor", np.array(values, object)) for name, values in columns.items()}
    data["layer"] = ("tensor", np.array([layer for layer, _ in placed], np.int64))
    data["shape"] = (("tensor", "axis"), shapes)
    for name, unit in (("norm", "Frobenius norm"), ("mean", "mean of the entries"), ("std", "their spread")):
        values = [getattr(fact, name) for fact in facts]
        column = np.array([np.nan if value is None else value for value in values])
        data[name] = ("tensor", column, {"units": "1", "long_name": unit})
    data["finite"] = ("tensor", np.array([bool(fact.finite) for fact in facts]))
    return xr.Dataset(data)


def weight_facts_node(files: ModelFiles) -> SourceNode:
    """The same in a workflow's graph; stored once per checkpoint."""
    identity = files.identity()
    size = sum(path.stat().st_size for path in files.weight_files)
    params = {"weights": identity.weights, "config": identity.config}
    estimate = Estimate(size, 1 << 16, 24 * BLOCK)
    return SourceNode(
        "weight_facts", VERSION, params, partial(weight_facts, files), estimate, (files.pinned,)
    )


class InspectWeights(Workflow):
    """Sizes of a checkpoint's matrices. Raises ConfigError for a model whose tensors have no names here."""

    name = "inspect_weights"
    question = "What are the norms and spectra of the weight matrices?"
    descriptive = "Norms and spectra of the weight matrices in the checkpoint."
    settings_type = InspectWeightsSettings

    def __init__(self, settings: InspectWeightsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(settings.reference(model))
        if not any(self.subject.config.tensors.layers):
            raise ConfigError(
                f"expected a model whose layers' tensors have names here, found {self.subject.name}, which "
                "transformers computes; `mizarr models inspect` lists what the checkpoint holds"
            )
        self.nodes = {"weights": weight_facts_node(self.subject.files)}

    @cached_property
    def facts(self) -> list[tuple[int, str, TensorFacts]]:
        """(layer, matrix, facts) of every tensor, in order of layers; layer -1 outside of them."""
        found = self.result("weights").load()
        columns = (found[name].values.tolist() for name in ("layer", "matrix", "name", "dtype", "finite"))
        numbers = (map(number, found[name].values) for name in ("norm", "mean", "std"))
        shapes = [tuple(size for size in row if size != NO_AXIS) for row in found["shape"].values.tolist()]
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
        """Names of what layers consist of, in the checkpoint's own words; vectors last."""
        ranks = {matrix: len(fact.shape) for layer, matrix, fact in self.facts if layer != OUTSIDE}
        return sorted(ranks, key=lambda matrix: (ranks[matrix] < 2, matrix))

    @property
    def short(self) -> list[str]:
        """The same in a word each, for columns: "q" for "self_attn.q_proj", "ln1" for the norm before
        attention."""
        fields = {
            stored.name.removesuffix(".weight"): field
            for weights in self.subject.config.tensors.layers
            for field, stored in weights.items()
        }
        return [fields.get(matrix, matrix) for matrix in self.matrices]

    def norms(self, *, rms: bool = False) -> npt.NDArray[np.float64]:
        """Frobenius norms [layer, matrix], over the root of the number of entries if `rms`; NaN where a layer
        has no such tensor, or one that is not finite."""
        found = np.full((len(self.layers), len(self.matrices)), np.nan)
        for layer, matrix, fact in self.facts:
            if layer != OUTSIDE and fact.norm is not None:
                scale = math.sqrt(fact.parameters) if rms else 1.0
                found[self.layers.index(layer), self.matrices.index(matrix)] = fact.norm / scale
        return found

    @property
    def embedding(self) -> TensorFacts:
        """Of the token embedding. Raises ConfigError for a checkpoint without one."""
        name = self.subject.config.tensors.outside["embed"].name
        found = next((fact for _, _, fact in self.facts if fact.name == name), None)
        if found is None:
            raise ConfigError(
                f"expected {name} in {self.subject.name}, found none; `mizarr models inspect` lists its "
                "tensors"
            )
        return found

    def views(self) -> Iterator[View]:
        """What layers consist of, their norms, and the tensors outside of layers."""
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
        told = ", ".join(f"{size.removeprefix('num_')} {n}" for size, n in sizes.items())
        yield Table.of(
            [self._spread(matrix, norms[:, place]) for place, matrix in enumerate(self.matrices)],
            ("matrix", "matrix"),
            ("shape", "shape"),
            ("dtype", "dtype"),
            ("smallest norm", "low", ".3g"),
            ("layer", "low_layer", "d"),
            ("largest", "high", ".3g"),
            ("layer", "high_layer", "d"),
            title=f"{name}: {total:,} parameters, {config.num_layers} layers of",
            caption=told.replace("_", " "),
        )
        broken = [fact.name for *_, fact in facts if fact.finite is False]
        more = " …" if len(broken) > 3 else ""
        yield Table.of(
            [{"layer": layer, **dict(enumerate(row))} for layer, row in zip(layers, norms, strict=True)],
            ("layer", "layer", lambda layer: bold(str(layer))),
            *((short, partial(_cell, place), str) for place, short in enumerate(self.short)),
            title="Frobenius norm by layer",
            caption=f"not finite: {', '.join(broken[:3])}{more}" if broken else "",
        )
        unit = "root mean square" if self.settings.rms else "Frobenius norm"
        norms = self.norms(rms=self.settings.rms)
        drawn = labelled(norms.T, unit, matrix=self.short, layer=layers)
        ranks = {matrix: len(fact.shape) for _, matrix, fact in facts}
        is_matrix = np.array([ranks[matrix] > 1 for matrix in self.matrices], bool)
        kinds = {"Matrices": drawn[is_matrix], "Vectors: norms and biases": drawn[~is_matrix]}
        caption = f"{unit} of the weights as they are stored"
        curves = [Lines.of(part, title, caption, low=0.0) for title, part in kinds.items() if part.size]
        panels = list(map(self._in_families, curves))
        if panels:
            told = caption if len(panels) == 1 else ""
            yield from together("inspect_weights", f"The weights of {name}", *panels, caption=told)
        yield Table.of(
            by_layer[OUTSIDE],
            ("tensor", "name"),
            ("shape", lambda fact: _shape(fact["shape"])),
            ("dtype", "dtype"),
            *((each, partial(_cell, each), str) for each in ("norm", "mean", "std")),
            title="Outside of layers",
            caption="the embedding is the head as well" if config.tie_word_embeddings else "",
        )

    def _in_families(self, curves: Lines) -> Lines:
        """Where there are more than colours, those of one part of a layer ("mlp") in shades of one."""
        if len(curves.lines) <= len(paper.SHADES):
            return curves
        parts = {s: matrix.partition(".")[0] for s, matrix in zip(self.short, self.matrices, strict=True)}
        return replace(curves, lines=tuple(replace(one, family=parts[one.name]) for one in curves.lines))

    def _spread(self, matrix: str, norms: npt.NDArray[Any]) -> dict[str, Any]:
        """A kind of matrix: its shapes and dtypes, and in which layers its norm is smallest and largest."""
        mine = [fact for _, one, fact in self.facts if one == matrix]
        found: dict[str, Any] = {
            "matrix": matrix,
            "shape": " or ".join(dict.fromkeys(_shape(fact.shape) for fact in mine)),
            "dtype": " or ".join(dict.fromkeys(fact.dtype for fact in mine)),
            **dict.fromkeys(("low", "low_layer", "high", "high_layer")),
        }
        if np.isfinite(norms).any():
            for key, place in (("low", np.nanargmin(norms)), ("high", np.nanargmax(norms))):
                found |= {key: norms[place], f"{key}_layer": self.layers[place]}
        return found


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "number"


def _cell(name: Any, row: dict[Any, Any]) -> str:
    value = row[name]
    return "–" if value is None or np.isnan(value) else f"{value:.3g}"


def _fact_json(fact: TensorFacts) -> dict[str, Any]:
    names = ("name", "shape", "dtype", "norm", "mean", "std")
    return {name: getattr(fact, name) for name in names}
