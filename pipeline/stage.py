"""Stages: cached pure analyses, declared by one decorator.

A stage is a plain function on labelled arrays plus a declaration: version, the dims of its inputs, the dims and units of its outputs, and
along which axes it may be cut into cells. The decorated name is still the function, and is tested as one; `.on(…)` puts it into a
workflow's graph. It opens no file, holds no model and reads no clock; randomness comes as a parameter and is therefore in its key.

Border: labels, dims and plain parameters; what is stored, and when something runs, is decided in `nodes.py` and `execute.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.digest import canonical_json
from ..store.errors import ShapeError, StageError, nearest

if TYPE_CHECKING:
    import xarray as xr

    from .nodes import Node, Port, StageNode

AXES: Mapping[str, tuple[str, ...]] = {"layer": ("layer",), "segment": ("token", "pair")}
"""Axes a stage may be cut along, and the dims each of them cuts: a segment is a range of tokens (or of their pairs)."""


@dataclass(frozen=True)
class Output:
    """One array a stage gives: its dims, unit ("nats", "logits", "1" for none) and what it is."""

    dims: tuple[str, ...]
    unit: str = "1"
    long_name: str = ""


@dataclass(frozen=True, eq=False)
class Stage:
    """A declared stage; call it as the function it is, or put it into a graph with `on`."""

    name: str
    version: int | str
    """Moves when numbers move. For a stage declared without one, the digest of its source."""
    function: Callable[..., Any]
    inputs: Mapping[str, tuple[str, ...] | None]
    """Dims of each input array; None for an input taken as a whole dataset."""
    outputs: Mapping[str, Output]
    cells: tuple[str, ...] = ()
    combine: Callable[[Sequence[xr.Dataset]], xr.Dataset] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameter -> default; `inspect.Parameter.empty` where there is none."""
    source: str = ""
    """Digest of the function's text: recorded, and a change without a new version is pointed out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function."""
        return self.function(*args, **kwargs)

    def on(self, **given: Any) -> StageNode:
        """This stage in a workflow's graph: inputs are nodes (or arrays), parameters plain values.

        Raises StageError for an input or parameter that is missing, unknown (with the nearest name), or not a plain value.
        """
        from .nodes import StageNode, as_port

        known = [*self.inputs, *self.params]
        for name in given:
            if name not in known:
                near = nearest(name, known)
                raise StageError(f"stage {self.name!r} takes {', '.join(known)}; found {name!r}" + (f", did you mean {near!r}?" if near else ""))
        missing = [name for name in self.inputs if name not in given]
        missing += [name for name, default in self.params.items() if default is inspect.Parameter.empty and name not in given]
        if missing:
            raise StageError(f"stage {self.name!r} also needs {', '.join(missing)}; give it by name")
        inputs: dict[str, Port] = {name: as_port(given[name], name) for name in self.inputs}
        params = {name: given.get(name, default) for name, default in self.params.items()}
        try:
            canonical_json(params)
        except (TypeError, ValueError) as error:
            raise StageError(f"stage {self.name!r}: parameters must be plain values, as they enter the key: {error}") from error
        return StageNode(self, inputs, params)

    def compute(self, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> xr.Dataset:
        """Run the function on labelled inputs and check what it gives against the declaration."""
        for name, dims in self.inputs.items():
            if dims is not None:
                _check_dims(f"input {name!r} of stage {self.name!r}", inputs[name], dims)
        return self.labelled(self.function(**inputs, **params))

    def labelled(self, given: Any) -> xr.Dataset:
        """A stage's answer as a dataset with the declared units and names; StageError if it is not what was declared."""
        import xarray as xr

        if isinstance(given, xr.DataArray):
            given = given.to_dataset(name=next(iter(self.outputs)))
        dataset = given.copy(deep=False)
        for name in dataset.data_vars:
            if name not in self.outputs:
                raise StageError(f"stage {self.name!r} declares {', '.join(self.outputs)}, but gave {name!r}; declare it")
        for name, output in self.outputs.items():
            if name not in dataset:
                raise StageError(f"stage {self.name!r} declares an output {name!r}, but gave {', '.join(map(str, dataset.data_vars))}")
            _check_dims(f"output {name!r} of stage {self.name!r}", dataset[name], output.dims)
            named = {"units": output.unit, "long_name": output.long_name or str(name).replace("_", " ")}
            dataset[name].attrs = {**named, **dataset[name].attrs}
        return dataset

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The results of all cells as one: by `combine`, else stacked along the layers."""
        if self.combine is not None:
            return self.combine(parts)
        import xarray as xr

        return xr.concat(parts, "layer", data_vars="minimal", coords="minimal", compat="equals", join="exact", combine_attrs="override")

    def describe(self) -> str:
        """One line per input and output, for people."""
        lines = [f"{self.name} (version {self.version})"]
        lines += [f"  in  {name} [{'dataset' if dims is None else ', '.join(dims)}]" for name, dims in self.inputs.items()]
        lines += [f"  out {name} [{', '.join(output.dims)}] {output.unit}" for name, output in self.outputs.items()]
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        # Sent to a worker by name: the decorator has put the stage where its function was.
        return _find, (self.function.__module__, self.function.__qualname__)


def stage(
    *,
    version: int | None = None,
    inputs: Mapping[str, tuple[str, ...] | None],
    outputs: Mapping[str, Output],
    cells: str | tuple[str, ...] = (),
    combine: Callable[[Sequence[xr.Dataset]], xr.Dataset] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare a function on labelled arrays as a stage.

    inputs: dims of each, in order; outputs: `Output` of each. cells: axes along which the work is cut, each cell cached by itself
    ("layer", "segment" or both); combine: makes one dataset of the cells' (needed for segments; layers are stacked without it).
    Parameters of the stage are the function's keyword parameters. Without a version the function's source text stands for it.
    """
    axes = (cells,) if isinstance(cells, str) else tuple(cells)

    def declare(function: Callable[..., Any]) -> Stage:
        label = name or function.__name__
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise StageError(f"stage {label!r}: expected cells among {', '.join(AXES)}, found {unknown[0]!r}")
        if "segment" in axes and combine is None:
            raise StageError(f"stage {label!r} is cut by segment, so it needs combine=… to make one result of the parts")
        found = inspect.signature(function).parameters
        absent = [given for given in inputs if given not in found]
        if absent:
            raise StageError(f"stage {label!r} declares an input {absent[0]!r} its function does not take")
        params = {key: parameter.default for key, parameter in found.items() if key not in inputs}
        source = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
        made = Stage(label, f"source:{source[:16]}" if version is None else version, function, dict(inputs), dict(outputs), axes, combine, params, source)
        for attribute in ("__doc__", "__name__", "__module__"):
            object.__setattr__(made, attribute, getattr(function, attribute))
        return made

    return declare


def _check_dims(what: str, array: Any, dims: tuple[str, ...]) -> None:
    if tuple(array.dims) != dims:
        raise ShapeError(f"{what}: expected dims [{', '.join(dims)}], found [{', '.join(map(str, array.dims))}] of shape {list(array.shape)}")


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
