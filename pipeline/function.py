"""The function of a stage, with what is declared of it: labelled arrays in, labelled arrays out, checked.

Border: labels, dims and plain parameters; the vocabulary is declaration.py's, how a function becomes a stage,
and a stage a node, is told in stage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.errors import ShapeError, StageError
from ..store.identity import require_same_model
from .code import code_version
from .declaration import Declaration, Dims, Output

if TYPE_CHECKING:
    import xarray as xr

AXES: Mapping[str, tuple[str, ...]] = {"layer": ("layer",), "segment": ("token", "pair"), "block": ("block",)}
"""Axes a stage may be cut along, and the dims each of them cuts: a segment is a range of tokens, a block a
number of samples that are drawn, not stored."""


@dataclass(frozen=True, eq=False)
class StageFunction:
    """What a stage says of itself, and its function; call it as the function it is.

    version: moves when numbers move; None for a stage declared without one, whose code is its version (see
    `key_version`). inputs: dims of each array, None for an input taken as a whole dataset; of the form
    `name`, where there are several. params: name -> default, `inspect.Parameter.empty` for none. memory: the
    most a cell needs, as a multiple of the bytes it reads. source: digest of the function's text, recorded
    with results; when it changes and the version does not, `mizarr explain` says so. forms: name -> inputs.
    resources: names of those the function takes. several_models: whether its inputs may be of different ones.
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
    several_models: bool = False

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

        Inputs are told apart by name, so any order of dims will do; the function gets the declared one, and
        of a dim with several names ("head|ssm_head") the first.
        Raises ShapeError for dims that are missing or too many, StageError for activations of different
        models and for undeclared outputs.
        """
        if not self.several_models:
            require_same_model(**inputs)
        ready = {}
        for name, dims in self.inputs.items():
            ready[name] = inputs[name]
            if dims is not None:
                ready[name] = _as_declared(inputs[name], dims, f"input {name!r} of stage {self.name!r}")
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


def _as_declared(array: Any, dims: Dims, what: str) -> Any:
    """An array with its dims named, and in the order, as declared."""
    names = [dim.split("|") for dim in dims]
    called = {name: either[0] for either in names for name in either if name in array.dims}
    first = [either[0] for either in names]
    if sorted(called.values()) != sorted(first) or set(called) != set(array.dims):
        raise _wrong_dims(what, array, dims)
    return array.rename({name: own for name, own in called.items() if name != own}).transpose(*first)


def _wrong_dims(what: str, array: Any, dims: Dims) -> ShapeError:
    found = ", ".join(f"{dim} {size}" for dim, size in array.sizes.items())
    return ShapeError(f"{what}: expected dims [{', '.join(dims)}], found [{found}]; rename, select or expand")
