"""What are a model's matrices like? Shape, dtype and Frobenius norm of every tensor, layer by layer.

Reads the checkpoint's files a block of rows at a time (inspect_model.py), never a whole tensor, without torch
and without running the model; `mizarr models inspect` tells the same of checkpoints that cannot run.

Norms of one kind of matrix are comparable across layers. Across kinds they grow with the number of entries:
the root mean square, norm / sqrt(entries), does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..pipeline import Estimate, SourceNode
from ..store.errors import ConfigError
from .answers import number, plain
from .inspect_model import BLOCK, TensorFacts, tensor_facts
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.files import ModelFiles
    from ..stages.forward.model import Model

__all__ = ["InspectWeights", "Settings", "weight_facts", "weight_facts_node"]

VERSION = 1
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
}
"""What is told of a model, and the axis whose size it is."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
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

    facts = sorted(tensor_facts(files.weight_files), key=lambda fact: (placed_at(fact.name), fact.name))
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
    make, confirm = partial(weight_facts, files), partial(files.confirm, identity)
    return SourceNode("weight_facts", VERSION, params, make, estimate, confirm)


class InspectWeights(Workflow):
    """A checkpoint's tensors."""

    name = "inspect_weights"
    question = "What are a model's matrices like?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model)
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

    def norms(self, *, rms: bool = False) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Frobenius norms [layer, matrix], over the root of the number of entries if `rms`; NaN where a layer
        has no such tensor, or one that is not finite."""
        found = np.full((len(self.layers), len(self.matrices)), np.nan)
        for layer, matrix, fact in self.facts:
            if layer != OUTSIDE and fact.norm is not None:
                scale = math.sqrt(fact.parameters) if rms else 1.0
                found[self.layers.index(layer), self.matrices.index(matrix)] = fact.norm / scale
        return found

    def tables(self) -> list[Table]:
        """What layers consist of, their norms, and the tensors outside of layers."""
        return [self._matrices_table(), self._norms_table(), self._outside_table()]

    def draw(self, folder: Path) -> list[Path]:
        """Norms by layer, matrices and vectors apart."""
        from .figures_weights import norms_page

        ranks = {matrix: len(fact.shape) for _, matrix, fact in self.facts}

        def page() -> Any:
            return norms_page(
                self.layers,
                self.norms(rms=self.settings.rms),
                self.short,
                [ranks[matrix] > 1 for matrix in self.matrices],
                unit="root mean square" if self.settings.rms else "Frobenius norm",
                model=self.subject.name,
                footer=self.footer,
            )

        return [self.figure(folder / "inspect_weights.png", page)]

    def to_json(self) -> dict[str, Any]:
        """Sizes, every tensor by layer, those outside of layers, and the embedding by name."""
        config = self.subject.config
        by_layer: dict[int, list[dict[str, Any]]] = {}
        for layer, _, fact in self.facts:
            by_layer.setdefault(layer, []).append(_fact_json(fact))
        return {
            **self.header(),
            "model_id": self.subject.name,
            "model_type": config.model_type,
            "n_layers": config.num_layers,
            **{name: config.axis_sizes[axis] for name, axis in SIZES.items()},
            "vocab_size": config.vocab_size,
            "parameters": sum(fact.parameters for _, _, fact in self.facts),
            "embedding": _fact_json(self.embedding),
            "tied_embedding": config.tie_word_embeddings,
            "outside_layers": by_layer.pop(OUTSIDE, []),
            "layers": [{"layer": layer, "tensors": by_layer[layer]} for layer in self.layers],
        }

    @property
    def embedding(self) -> TensorFacts:
        """Of the token embedding. Raises ConfigError for a checkpoint without one."""
        name = self.subject.config.tensors.outside["embed"].name
        found = next((fact for _, _, fact in self.facts if fact.name == name), None)
        if found is None:
            raise ConfigError(
                f"expected {name} in {self.subject.name}, found none; `mizarr models inspect` "
                "lists its tensors"
            )
        return found

    def _matrices_table(self) -> Table:
        from rich.table import Table

        config, total = self.subject.config, sum(fact.parameters for _, _, fact in self.facts)
        title = f"{self.subject.name}: {total:,} parameters, {config.num_layers} layers of"
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("matrix", "shape", "dtype"):
            table.add_column(column, no_wrap=True)
        for column in ("smallest norm", "layer", "largest", "layer"):
            table.add_column(column, justify="right")
        norms = self.norms()
        for place, matrix in enumerate(self.matrices):
            mine = [fact for _, one, fact in self.facts if one == matrix]
            shapes = list(dict.fromkeys(_shape(fact.shape) for fact in mine))
            dtypes = list(dict.fromkeys(fact.dtype for fact in mine))
            cells = [plain(matrix), " or ".join(shapes), " or ".join(dtypes)]
            known = norms[:, place]
            if np.isfinite(known).any():
                low, high = int(np.nanargmin(known)), int(np.nanargmax(known))
                cells += [text for i in (low, high) for text in (f"{known[i]:.3g}", str(self.layers[i]))]
            table.add_row(*cells)
        told = {**{name: config.axis_sizes[axis] for name, axis in SIZES.items()}, "vocab": config.vocab_size}
        sizes = ", ".join(f"{name.removeprefix('num_')} {size}" for name, size in told.items())
        table.caption = sizes.replace("_", " ")
        return table

    def _norms_table(self) -> Table:
        from rich.table import Table

        table = Table(title="Frobenius norm by layer", box=None, pad_edge=False)
        table.add_column("layer", justify="right", style="bold")
        for name in self.short:
            table.add_column(plain(name), justify="right")
        for layer, row in zip(self.layers, self.norms(), strict=True):
            table.add_row(str(layer), *("–" if np.isnan(value) else f"{value:.3g}" for value in row))
        broken = [fact.name for _, _, fact in self.facts if fact.finite is False]
        if broken:
            table.caption = f"not finite: {plain(', '.join(broken[:3]))}{' …' if len(broken) > 3 else ''}"
        return table

    def _outside_table(self) -> Table:
        from rich.table import Table

        table = Table(title="Outside of layers", box=None, pad_edge=False)
        for column in ("tensor", "shape", "dtype"):
            table.add_column(column, no_wrap=True)
        for column in ("norm", "mean", "std"):
            table.add_column(column, justify="right")
        for _, _, fact in (one for one in self.facts if one[0] == OUTSIDE):
            numbers = ["–" if value is None else f"{value:.3g}" for value in (fact.norm, fact.mean, fact.std)]
            table.add_row(plain(fact.name), _shape(fact.shape), fact.dtype, *numbers)
        tied = "the embedding is the head as well" if self.subject.config.tie_word_embeddings else ""
        table.caption = tied
        return table


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "number"


def _fact_json(fact: TensorFacts) -> dict[str, Any]:
    return {
        "name": fact.name,
        "shape": list(fact.shape),
        "dtype": fact.dtype,
        "norm": fact.norm,
        "mean": fact.mean,
        "std": fact.std,
    }


WORKFLOW = InspectWeights
