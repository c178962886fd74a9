"""Declarations of stages and experiments: their inputs, parameters and outputs, with dims, unit and meaning.

Border: labels and plain values; runs nothing, and never imports torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..store.errors import StageError, did_you_mean

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["REQUIRED", "Declaration", "Dims", "Output", "require_declared"]

REQUIRED = inspect.Parameter.empty
"""Marks a parameter without a default value."""
Dims = tuple[str, ...]
"""Dimension names of an array, in order."""


@dataclass(frozen=True)
class Output:
    """Declaration of one output array of a stage or experiment: dims, unit and description.

    >>> Output(("kind?", "layer", "head|kv_head")).fits(("layer", "kv_head"))
    True
    """

    dims: Dims
    """Dimension names in order. "head|kv_head" means one of the two and "kind?" an optional dim, depending on
    parameters."""
    unit: str = "1"
    """Unit such as "nats" or "logits"; "1" for dimensionless values."""
    long_name: str = ""
    """Description of the values, used as the xarray attribute `long_name`."""
    is_optional: bool = False
    """Whether the array is missing for some parameters."""

    def fits(self, dims: Sequence[Any]) -> bool:
        """Whether dimension names, in this order, match the declared ones."""
        pattern = ""
        for dim in self.dims:
            alternatives = "|".join(re.escape(name) for name in dim.removesuffix("?").split("|"))
            # A regular expression, because an optional dim may precede required ones.
            pattern += f"(?:(?:{alternatives}) ){'?' if dim.endswith('?') else ''}"
        return re.fullmatch(pattern, "".join(f"{dim} " for dim in dims)) is not None

    @property
    def attrs(self) -> dict[str, str]:
        """The xarray attributes `units` and `long_name` of the array."""
        return {"units": self.unit, "long_name": self.long_name}

    def variable(self, values: Any) -> tuple[Dims, Any, dict[str, str]]:
        """The array as `(dims, values, attrs)`, the form in which `xarray.Dataset` takes a variable."""
        return self.dims, values, self.attrs

    @property
    def shape(self) -> str:
        """Dims and unit as text: "[layer, head] nats"."""
        return f"[{', '.join(self.dims)}] {self.unit}"


@dataclass(frozen=True)
class Declaration:
    """Everything that a stage (cached analysis) or an experiment declares: inputs, parameters, outputs."""

    kind: Literal["stage", "experiment"]
    """Whether the function reads stored arrays (stage), or runs a model (experiment)."""
    name: str
    """Name of the stage or experiment in keys."""
    version: int | str
    """Version in keys: a number, or "code:…" for a stage declared without one."""
    home: str
    """Dotted import path of the function or class."""
    inputs: Mapping[str, Dims | None]
    """Dims of each input array; None for a whole dataset."""
    resources: tuple[str, ...]
    """Names of inputs other than arrays: a model, a dictionary of features."""
    params: Mapping[str, Any]
    """Default of each parameter; `REQUIRED` for a parameter without one."""
    outputs: Mapping[str, Output]
    """Declared output arrays by name."""
    cells: tuple[str, ...] = ()
    """Axes along which the work is cut into cells that are computed and stored separately."""

    @property
    def input_labels(self) -> dict[str, str]:
        """Name of each input -> its dims as text, or "dataset" or "resource"."""
        arrays = {name: "dataset" if dims is None else ", ".join(dims) for name, dims in self.inputs.items()}
        return arrays | dict.fromkeys(self.resources, "resource")

    def describe(self) -> str:
        """The declaration as text: a title line, then one line per input, parameter and output."""
        cut = f", cut by {' and '.join(self.cells)}" if self.cells else ""
        lines = [f"{self.name} (version {self.version}{cut})"]
        lines += [f"  in  {name} [{label}]" for name, label in self.input_labels.items()]
        for name, default in self.params.items():
            lines.append(f"  set {name}{'' if default is REQUIRED else f' = {default!r}'}")
        for name, output in self.outputs.items():
            title = f"{name}?" if output.is_optional else name
            lines.append(f"  out {title} {output.shape}  {output.long_name}".rstrip())
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines; defaults as their `repr`, None for a parameter without a default."""
        return {
            "name": self.name,
            "kind": self.kind,
            "version": self.version,
            "home": self.home,
            "inputs": {name: dims and list(dims) for name, dims in self.inputs.items()},
            "resources": list(self.resources),
            "parameters": {
                name: None if default is REQUIRED else repr(default) for name, default in self.params.items()
            },
            "outputs": {
                name: {
                    "dims": list(output.dims),
                    "unit": output.unit,
                    "long_name": output.long_name,
                    "is_optional": output.is_optional,
                }
                for name, output in self.outputs.items()
            },
            "cells": list(self.cells),
        }


def require_declared(owner: str, declared: Mapping[str, Output], dataset: xr.Dataset) -> None:
    """Check that a dataset has the declared outputs, with the declared dims and units.

    Arguments:
        owner: Owner of the declaration, for messages: "experiment 'x'".
        declared: Outputs by name.
        dataset: The dataset; a variable without a unit has unit "1".

    Raises:
        StageError: A variable is missing or not declared, or has other dims or another unit.
    """
    for name, output in declared.items():
        if name not in dataset.data_vars and not output.is_optional:
            present = ", ".join(map(str, dataset.data_vars)) or "none"
            raise StageError(
                f"{owner}: the declared output {name!r} {output.shape} is missing; the dataset has {present}"
            )
    for key, array in dataset.data_vars.items():
        label = str(key)
        if label not in declared:
            raise StageError(
                f"{owner}: the dataset has an array {label!r} that is not declared; declared are "
                f"{', '.join(declared)}{did_you_mean(label, declared)}"
            )
        output, unit = declared[label], str(array.attrs.get("units", "1"))
        if not output.fits(array.dims) or unit != output.unit:
            actual = Output(tuple(map(str, array.dims)), unit)
            raise StageError(
                f"{owner}, output {label!r}: expected {output.shape}, found {actual.shape}; change the "
                "declaration or the dataset"
            )
