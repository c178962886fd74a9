"""What stages and experiments say of themselves, in one vocabulary: arrays with dims, unit and meaning.

Border: labels and plain values; runs nothing, and never imports torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..store.errors import StageError, nearest

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["REQUIRED", "Declaration", "Dims", "Output", "require_declared"]

REQUIRED = inspect.Parameter.empty
"""Stands for the default of a parameter that has none."""
Dims = tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """One array that is given: its dims, unit ("nats", "logits", "1" for none) and what it is.

    Where parameters decide, a dim is written "head|kv_head" for one of several, and "kind?" for one that may
    be absent. is_optional: whether some parameters give no such array.

    >>> Output(("kind?", "layer", "head|kv_head")).fits(("layer", "kv_head"))
    True
    """

    dims: Dims
    unit: str = "1"
    long_name: str = ""
    is_optional: bool = False

    def fits(self, dims: Sequence[Any]) -> bool:
        """Whether an array may have these dims, in this order."""
        pattern = ""
        for dim in self.dims:
            either = "|".join(re.escape(each) for each in dim.removesuffix("?").split("|"))
            pattern += f"(?:(?:{either}) ){'?' if dim.endswith('?') else ''}"
        return re.fullmatch(pattern, "".join(f"{dim} " for dim in dims)) is not None

    @property
    def attrs(self) -> dict[str, str]:
        """Unit and meaning, as an array has them."""
        return {"units": self.unit, "long_name": self.long_name}

    def variable(self, values: Any) -> tuple[Dims, Any, dict[str, str]]:
        """Values with these dims, unit and meaning, as xarray takes a variable."""
        return self.dims, values, self.attrs

    @property
    def shape(self) -> str:
        """Dims and unit in one word or two: "[layer, head] nats"."""
        return f"[{', '.join(self.dims)}] {self.unit}"


@dataclass(frozen=True)
class Declaration:
    """All that a stage or an experiment declares.

    home: where its code is, as Python names it. inputs: dims of each array, None for a whole dataset.
    resources: what it reads beside arrays, such as a model. params: name -> default, `REQUIRED` for none.
    cells: axes along which it is cut.
    """

    kind: Literal["stage", "experiment"]
    name: str
    version: int | str
    home: str
    inputs: Mapping[str, Dims | None]
    resources: tuple[str, ...]
    params: Mapping[str, Any]
    outputs: Mapping[str, Output]
    cells: tuple[str, ...] = ()

    @property
    def told_inputs(self) -> dict[str, str]:
        """Name of each array and resource that is read -> its dims, or what else it is."""
        arrays = {name: "dataset" if dims is None else ", ".join(dims) for name, dims in self.inputs.items()}
        return arrays | dict.fromkeys(self.resources, "resource")

    def describe(self) -> str:
        """The declaration in a few lines."""
        cut = f", cut by {' and '.join(self.cells)}" if self.cells else ""
        lines = [f"{self.name} (version {self.version}{cut})"]
        lines += [f"  in  {name} [{told}]" for name, told in self.told_inputs.items()]
        for name, default in self.params.items():
            lines.append(f"  set {name}{'' if default is REQUIRED else f' = {default!r}'}")
        for name, output in self.outputs.items():
            label = f"{name}?" if output.is_optional else name
            lines.append(f"  out {label} {output.shape}  {output.long_name}".rstrip())
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values for machines; defaults as Python writes them, None for a parameter without."""
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


def require_declared(what: str, declared: Mapping[str, Output], given: xr.Dataset) -> None:
    """StageError for a variable of a dataset that is missing or not declared, or whose dims or unit are
    others. No unit counts as "1"."""
    for name, output in declared.items():
        if name not in given.data_vars and not output.is_optional:
            held = ", ".join(map(str, given.data_vars)) or "none"
            raise StageError(f"{what}, output {name!r}: expected {output.shape}, found none among {held}")
    for key, array in given.data_vars.items():
        label = str(key)
        if label not in declared:
            near = nearest(label, declared)
            hint = f"; did you mean {near!r}?" if near else ""
            raise StageError(
                f"{what}, output {label!r}: expected one of {', '.join(declared)}, found {label!r}{hint}"
            )
        output, unit = declared[label], str(array.attrs.get("units", "1"))
        if not output.fits(array.dims) or unit != output.unit:
            found = Output(tuple(map(str, array.dims)), unit)
            raise StageError(
                f"{what}, output {label!r}: expected {output.shape}, found {found.shape}; make declaration "
                "and dataset equal"
            )
