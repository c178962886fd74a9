"""Stages: cached pure analyses, declared by one decorator.

A stage is a plain function on labelled arrays plus a declaration: version, the dims of its inputs, the dims
and units of its outputs, and along which axes it may be cut into cells. The decorated name is still the
function, and is tested as one; `.on(…)` puts it into a workflow's graph. It opens no file, holds no model
and reads no clock; randomness comes as a parameter and is therefore in its key.

A function that takes several kinds of input has *forms*: names with the inputs of each, as an input may be
left out, or have other dims. What a stage reads beside arrays is a *resource* (resource.py).

Border: labels, dims and plain parameters; what is stored, and when something runs, is decided in
`stage_node.py` and `execute.py`.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..store.digest import canonical_json
from ..store.errors import ShapeError, StageError, nearest
from ..store.identity import require_same_model
from .code import code_version
from .declaration import REQUIRED, Declaration, Dims, Output

if TYPE_CHECKING:
    import xarray as xr

    from .stage_node import StageNode

AXES: Mapping[str, tuple[str, ...]] = {"layer": ("layer",), "segment": ("token", "pair")}
"""Axes a stage may be cut along, and the dims each of them cuts: a segment is a range of tokens."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A declared stage; call it as the function it is, or put it into a graph with `on`.

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

    def on(self, **given: Any) -> StageNode:
        """This stage in a workflow's graph: inputs are nodes (or arrays), parameters plain values, resources
        what they are. Of several forms the one that takes the inputs given; `form` names one where more do.

        Raises StageError for an input or parameter that is missing, unknown (with the nearest name), or
        without identity, and for a stage without a version whose code has none.
        """
        from .resource import Resource
        from .sources import as_port
        from .stage_node import StageNode

        fitting = self._form_of(given)
        if fitting != self.name:
            return self.form(fitting).on(**given)
        known = [*self.inputs, *self.params, *self.resources]
        for name in given:
            if name not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else ""
                raise StageError(f"stage {self.name!r} takes {', '.join(known)}, found {name!r}{hint}")
        params = {name: given.get(name, default) for name, default in self.params.items()}
        missing = [name for name in (*self.inputs, *self.resources) if name not in given]
        missing += [name for name, value in params.items() if value is REQUIRED]
        if missing:
            raise StageError(f"stage {self.name!r} also needs {', '.join(missing)}; give it by name")
        self.key_version  # noqa: B018 - raises here, where the user is
        try:
            canonical_json(params)
        except (TypeError, ValueError) as error:
            raise StageError(f"stage {self.name!r}: parameters enter the key: {error}") from error
        held = {name: given[name] for name in self.resources}
        for name, resource in held.items():
            if not isinstance(resource, Resource):
                raise StageError(
                    f"stage {self.name!r}: expected a resource as {name}, found {resource!r:.60}; give what "
                    "has identity(), confirm() and open()"
                )
        return StageNode(self, {name: as_port(given[name], name) for name in self.inputs}, params, held)

    def form(self, name: str) -> Stage:
        """The form of this name; StageError names those there are."""
        if name not in self.forms:
            raise StageError(f"stage {self.name!r} has the forms {', '.join(self.forms)}, found {name!r}")
        if name == self.name:
            return self
        return _named_as_function(replace(self, name=name, inputs=self.forms[name]))

    def _form_of(self, given: Mapping[str, Any]) -> str:
        """The form that takes just the inputs given: this one if it does, or if none or several others do."""
        every = {name for inputs in self.forms.values() for name in inputs}
        asked = every & set(given)
        fitting = [name for name, inputs in self.forms.items() if set(inputs) == asked]
        return fitting[0] if len(fitting) == 1 and set(self.inputs) != asked else self.name

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
        gave = {str(name) for name in dataset.data_vars}
        needed = {name for name, output in self.outputs.items() if not output.is_optional}
        if not needed <= gave <= set(self.outputs):
            raise StageError(
                f"stage {self.name!r} declares the outputs {', '.join(self.outputs)}, its function returned "
                f"{', '.join(sorted(gave))}; make them equal"
            )
        for name, output in self.outputs.items():
            if name not in gave:
                continue
            if not output.fits(dataset[name].dims):
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

    def declaration(self) -> Declaration:
        """What it says of itself."""
        home = f"{self.function.__module__}.{self.function.__qualname__}"
        return Declaration(
            "stage",
            self.name,
            self.key_version,
            home,
            self.inputs,
            self.resources,
            self.params,
            self.outputs,
            self.cells,
        )

    def describe(self) -> str:
        """The declaration in a few lines."""
        return self.declaration().describe()

    def __reduce__(self) -> Any:
        # Sent to a worker by name, as the decorator has put the stage where its function was; a stage of a
        # notebook or inside a function has no such name and travels with its code.
        module, name = self.function.__module__, self.function.__qualname__
        if module == "__main__" or "<locals>" in name:
            return _made, (self.__dict__,)
        return _find, (module, name, self.name)


def stage(
    *,
    version: int | None = None,
    inputs: Mapping[str, Dims | None] | None = None,
    forms: Mapping[str, Mapping[str, Dims | None]] | None = None,
    outputs: Mapping[str, Output | Dims],
    cells: str | tuple[str, ...] | None = None,
    combine: Callable[[Sequence[xr.Dataset]], xr.Dataset] | None = None,
    name: str | None = None,
    memory: float = 2.0,
    resources: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare a function on labelled arrays as a stage; the parameters of the stage are its other parameters.

    inputs: dims of each, in order, None for a whole dataset.  forms: instead, where there are several sets of
    inputs: name of the form, which is that of the stage in keys, -> its inputs; an input that a form leaves
    out is an optional parameter of the function.  outputs: `Output` (or just the dims) of each. version:
    moves when numbers move. Without one the key holds the code of the function, and everything that code
    reads, at each moment of use (DESIGN.md, "Functions without a version"). cells: axes along which the work
    is cut, each cell cached by itself: "layer", "segment" or both. combine: makes one dataset of the cells'
    (needed for segments; layers are stacked without it). memory: the most a cell needs, as a multiple of the
    bytes it reads: 2 for the inputs and as much again for work, less for a function that reads block by
    block. resources: parameters that are resources; the function gets each opened.
    """
    axes = (cells,) if isinstance(cells, str) else tuple(cells or ())
    if (inputs is None) == (forms is None):
        raise StageError("expected inputs=… or forms=… of a stage, found both or neither")

    def declare(function: Callable[..., Any]) -> Stage:
        taken = dict(forms) if forms else {name or function.__name__: dict(inputs or {})}
        label = next(iter(taken))
        found = inspect.signature(function).parameters
        for each in taken.values():
            _check(label, each, found, axes, combine)
        every = {name for each in taken.values() for name in each} | set(resources)
        made = Stage(
            label,
            version,
            function,
            dict(taken[label]),
            {key: Output(tuple(o)) if not isinstance(o, Output) else o for key, o in outputs.items()},
            axes,
            combine,
            {key: parameter.default for key, parameter in found.items() if key not in every},
            memory,
            _source(function),
            taken,
            resources,
        )
        return _named_as_function(made)

    return declare


def _named_as_function(made: Stage) -> Stage:
    """A stage with the name and docstring of its function."""
    for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
        object.__setattr__(made, attribute, getattr(made.function, attribute))
    return made


def _check(
    label: str,
    inputs: Mapping[str, Dims | None],
    found: Mapping[str, inspect.Parameter],
    axes: tuple[str, ...],
    combine: Any,
) -> None:
    """StageError for a declaration that does not fit its function."""
    for axis in axes:
        if axis not in AXES:
            raise StageError(f"stage {label!r}: expected cells among {', '.join(AXES)}, found {axis!r}")
        if not any(dim in AXES[axis] for dims in inputs.values() for dim in dims or ()):
            raise StageError(f"stage {label!r} is cut by {axis}, but no input has that axis")
    if "segment" in axes and combine is None:
        raise StageError(f"stage {label!r} is cut by segment; give combine=… to make one result of the parts")
    for name in inputs:
        if name not in found:
            raise StageError(f"stage {label!r} declares an input {name!r} its function does not take")
    loose = [name for name, each in found.items() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if loose:
        raise StageError(f"stage {label!r}: parameters enter the key by name; spell out {loose[0]!r}")


def _source(function: Callable[..., Any]) -> str:
    """Digest of a function's text; empty where there is none, as in a console."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


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


def _find(module: str, name: str, form: str) -> Stage:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    stage: Stage = found
    return stage.form(form)


def _made(fields: Mapping[str, Any]) -> Stage:
    made = object.__new__(Stage)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
