"""What a stage declares: version, dims of its inputs, dims and units of its outputs, where it may be cut.

Border: labels, dims and plain parameters; how a function becomes a stage, and a stage a node, is told in
stage.py.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.digest import canonical_json
from ..store.errors import ShapeError, StageError
from ..store.identity import require_same_model
from .code import code_version

if TYPE_CHECKING:
    import xarray as xr

AXES: Mapping[str, tuple[str, ...]] = {"layer": ("layer",), "segment": ("token", "pair")}
"""Axes a stage may be cut along, and the dims each of them cuts: a segment is a range of tokens."""

REQUIRED = inspect.Parameter.empty
Dims = tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """One array a stage gives: its dims, unit ("nats", "logits", "1" for none) and what it is."""

    dims: Dims
    unit: str = "1"
    long_name: str = ""


@dataclass(frozen=True, eq=False)
class Declaration:
    """What a stage says of itself, and its function; call it as the function it is.

    version: moves when numbers move; None for a stage declared without one, whose code is its version (see
    `key_version`). inputs: dims of each array, None for an input taken as a whole dataset; of the form
    `name`, where there are several. params: name -> default, `inspect.Parameter.empty` for none. memory: the
    most a cell needs, as a multiple of the bytes it reads. source: digest of the function's text, recorded
    with results; when it changes and the version does not, `mizarr explain` says so. forms: name -> inputs.
    resources: names of those the function takes.
    """

    name: str
    version: int | str | None
    function: Callable[..., Any]
    inputs: Mapping[str, Dims | None]
    outputs: Mapping[str, Output]
    cells: tuple[str, ...] = ()
    combine: Callable[[Sequence[xr.Dataset]], xr.Dataset] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    memory: float = 2.0
    source: str = ""
    forms: Mapping[str, Mapping[str, Dims | None]] = field(default_factory=dict)
    resources: tuple[str, ...] = ()

    @property
    def key_version(self) -> int | str:
        """What stands for the version in keys: the declared one, else "code:…", as the code is now.

        Raises StageError for code that reads what has no identity.
        """
        return code_version(f"stage {self.name!r}", self) if self.version is None else self.version

    def code_parts(self) -> list[Any]:
        """What of the stage is part of the code that calls it: the declared version, else everything."""
        if self.version is not None:
            return [self.name, self.version]
        outputs = [(name, each.dims, each.unit, each.long_name) for name, each in self.outputs.items()]
        return [self.name, self.function, self.combine, list(self.inputs.items()), outputs, self.cells]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function: nothing is checked, stored or looked up."""
        return self.function(*args, **kwargs)

    def compute(self, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> xr.Dataset:
        """Run the function on labelled inputs and check what it gives against the declaration.

        Inputs are told apart by name, so any order of dims will do; the function gets the declared one.
        Raises ShapeError for dims that are missing or too many, StageError for activations of different
        models and for undeclared outputs.
        """
        require_same_model(**inputs)
        ready = {}
        for name, dims in self.inputs.items():
            if dims is not None and set(inputs[name].dims) != set(dims):
                raise _wrong_dims(f"input {name!r} of stage {self.name!r}", inputs[name], dims)
            ready[name] = inputs[name] if dims is None else inputs[name].transpose(*dims)
        return self.labelled(self.function(**ready, **params))

    def labelled(self, given: Any) -> xr.Dataset:
        """A stage's answer as a dataset with the declared units and names."""
        import xarray as xr

        if isinstance(given, xr.DataArray):
            given = given.to_dataset(name=next(iter(self.outputs)))
        if not isinstance(given, xr.Dataset):
            raise StageError(
                f"stage {self.name!r}: expected a DataArray or Dataset, found {type(given).__name__}"
            )
        dataset = given.copy(deep=False)
        gave, declared = {str(name) for name in dataset.data_vars}, set(self.outputs)
        if gave != declared:
            raise StageError(
                f"stage {self.name!r} declares the outputs {', '.join(self.outputs)}, its function returned "
                f"{', '.join(sorted(gave))}; make them equal"
            )
        for name, output in self.outputs.items():
            if dataset[name].dims != output.dims:
                raise _wrong_dims(f"output {name!r} of stage {self.name!r}", dataset[name], output.dims)
            named = {"units": output.unit, "long_name": output.long_name or name.replace("_", " ")}
            dataset[name].attrs = {**named, **dataset[name].attrs}
        return dataset

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The results of all cells as one: by `combine`, else stacked along the layers."""
        if self.combine is not None:
            return self.combine(parts)
        import xarray as xr

        if len(parts) == 1 or "layer" not in parts[0].dims:
            return parts[0]
        return xr.concat(
            parts,
            "layer",
            data_vars="minimal",
            coords="minimal",
            compat="equals",
            join="exact",
            combine_attrs="override",
        )

    def describe(self) -> str:
        """The declaration in a few lines, for `mizarr explain`."""
        cut = f", cut by {' and '.join(self.cells)}" if self.cells else ""
        lines = [f"{self.name} (version {self.key_version}{cut})"]
        for name, dims in self.inputs.items():
            lines.append(f"  in  {name} [{'dataset' if dims is None else ', '.join(dims)}]")
        for name, default in self.params.items():
            lines.append(f"  set {name}{'' if default is REQUIRED else f' = {default!r}'}")
        for name, output in self.outputs.items():
            told = f"{output.unit}  {output.long_name}".rstrip()
            lines.append(f"  out {name} [{', '.join(output.dims)}] {told}")
        return "\n".join(lines)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as the JSON values that keys and provenance record."""
    return {name: _plain(value) for name, value in params.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return plain_params(value)
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=canonical_json)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else getattr(value, "name", value)  # numpy scalars, dtypes


def _wrong_dims(what: str, array: Any, dims: Dims) -> ShapeError:
    found = ", ".join(f"{dim} {size}" for dim, size in array.sizes.items())
    return ShapeError(f"{what}: expected dims [{', '.join(dims)}], found [{found}]; rename, select or expand")
