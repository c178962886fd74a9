"""`StageFunction`: the function of a stage with its declaration, which its labelled inputs and outputs are
checked against.

Border: labels, dims and plain parameters. The vocabulary of declarations is in declaration.py; stage.py makes
a stage of a function and a node of a stage.
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
"""Axes along which a stage may be cut, and the dims each axis cuts. A segment is a range of tokens or pairs;
a block is a number of samples that are drawn when they are used and never stored."""


@dataclass(frozen=True, eq=False)
class StageFunction:
    """A stage's function (a cached analysis) and its declaration; calling the instance calls the function."""

    name: str
    """Name of the stage in keys; if it accepts several sets of inputs (forms), the name of one of them."""
    version: int | str | None
    """Declared version, raised when results change; None uses a digest of the code (`key_version`)."""
    function: Callable[..., Any]
    """The plain function: inputs, parameters and opened resources by name in, a DataArray or Dataset out."""
    inputs: Mapping[str, Dims | None]
    """Dims of each input array of this form; None for an input that is a whole dataset."""
    outputs: Mapping[str, Output]
    """Declared outputs by name; the first is the name of a bare DataArray that the function returns."""
    cells: tuple[str, ...] = ()
    """Axes along which the work is cut, from `AXES`; empty if it is not cut."""
    combine: Callable[[Sequence[xr.Dataset]], xr.Dataset] | None = None
    """Function that joins the datasets of all cells into one; None concatenates them along `layer`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Default of each parameter; `REQUIRED` (`inspect.Parameter.empty`) for a parameter without one."""
    memory: float = 2.0
    """Peak memory of one cell, as a multiple of the bytes it reads."""
    source: str = ""
    """SHA-256 of the function's text; `mizarr explain` warns if it changes and `version` does not."""
    forms: Mapping[str, Mapping[str, Dims | None]] = field(default_factory=dict)
    """Name of each form (set of inputs that the function accepts) -> dims of its inputs."""
    resources: tuple[str, ...] = ()
    """Names of the function's parameters that are resources: files opened for it, such as a dictionary."""
    several_models: bool = False
    """Whether inputs may be activations of different models."""

    @property
    def key_version(self) -> int | str:
        """Version in keys: the declared one, or "code:…", a digest of the code as it is now.

        Raises:
            StageError: The code reads a value that has no identity.
        """
        return code_version(f"stage {self.name!r}", self) if self.version is None else self.version

    def code_parts(self) -> list[Any]:
        """Values that represent this stage in the code digest of its callers: name and version, or function
        and declaration of an unversioned stage."""
        if self.version is not None:
            return [self.name, self.version]
        outputs = [
            (name, output.dims, output.unit, output.long_name) for name, output in self.outputs.items()
        ]
        return [self.name, self.function, self.combine, list(self.inputs.items()), outputs, self.cells]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function, without checks and without the store."""
        return self.function(*args, **kwargs)

    def compute(self, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> xr.Dataset:
        """Run the function on labelled inputs and check the result against the declaration.

        Arguments:
            inputs: Arrays or datasets by name. Their dims may be in any order: the function gets the declared
                order, and of a dim with alternatives ("head|ssm_head") the first name.
            params: Parameters and opened resources by name.

        Returns:
            A dataset with the declared names and units.

        Raises:
            ShapeError: Dims are missing or not declared.
            StageError: Inputs are of different models, or an output is not declared.
        """
        if not self.several_models:
            require_same_model(**inputs)
        arguments = {}
        for name, dims in self.inputs.items():
            arguments[name] = inputs[name]
            if dims is not None:
                arguments[name] = _as_declared(inputs[name], dims, f"input {name!r} of stage {self.name!r}")
        return self.labelled(self.function(**arguments, **params))

    def labelled(self, result: Any) -> xr.Dataset:
        """Convert the function's return value to a dataset with the declared names and units.

        Raises:
            StageError: It is no xarray object, or has other outputs than the stage declares.
            ShapeError: An output has other dims than the stage declares.
        """
        import xarray as xr

        if isinstance(result, xr.DataArray):
            result = result.to_dataset(name=next(iter(self.outputs)))
        if not isinstance(result, xr.Dataset):
            raise StageError(
                f"the function of stage {self.name!r} returned {type(result).__name__}, expected an xarray "
                "DataArray or Dataset"
            )
        # The function may have returned one of its inputs, whose attributes must not change.
        dataset = result.copy(deep=False)
        returned = {str(name) for name in dataset.data_vars}
        required = {name for name, output in self.outputs.items() if not output.is_optional}
        if not required <= returned <= set(self.outputs):
            raise StageError(
                f"stage {self.name!r} declares the outputs {', '.join(self.outputs)}, its function returned "
                f"{', '.join(sorted(returned))}; change the declaration or the function"
            )
        for name, output in self.outputs.items():
            if name not in returned:
                continue
            if not output.fits(dataset[name].dims):
                raise _wrong_dims(f"output {name!r} of stage {self.name!r}", dataset[name], output.dims)
            attrs = {"units": output.unit, "long_name": output.long_name or name.replace("_", " ")}
            dataset[name].attrs = {**attrs, **dataset[name].attrs}
        return dataset

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Join the results of all cells into one dataset: by `combine`, or else concatenated along `layer`.

        Raises:
            StageError: There are several cells without a `layer` dimension, and no `combine`.
        """
        if self.combine is not None:
            return self.combine(parts)
        import xarray as xr

        if len(parts) == 1:
            return parts[0]
        if "layer" not in parts[0].dims:
            raise StageError(
                f"stage {self.name!r} is cut by layer, and its output has no dim 'layer' along which to "
                f"join, only [{', '.join(map(str, parts[0].dims))}]; declare combine=…, a function that "
                "joins the results"
            )
        # "minimal", "equals": arrays and labels without a layer dim must be equal in all cells, and are kept
        # once. "override": the attributes are those of the first cell.
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
        """Everything that the stage declares, in the form that stages and experiments share."""
        # `__qualname__` includes the class or function around it, which `__name__` omits.
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
        """The declaration as text: a title line, then one line per input, parameter and output."""
        return self.declaration().describe()


def _as_declared(array: Any, dims: Dims, label: str) -> Any:
    """Rename an array's dims to the first of the declared alternatives, and transpose to the declared
    order."""
    alternatives = [dim.split("|") for dim in dims]
    renames = {name: names[0] for names in alternatives for name in names if name in array.dims}
    declared = [names[0] for names in alternatives]
    if sorted(renames.values()) != sorted(declared) or set(renames) != set(array.dims):
        raise _wrong_dims(label, array, dims)
    return array.rename({old: new for old, new in renames.items() if old != new}).transpose(*declared)


def _wrong_dims(label: str, array: Any, dims: Dims) -> ShapeError:
    """Error for an array with other dims than declared; `label` names it, such as "input 'x' of stage
    'y'"."""
    actual = ", ".join(f"{dim} {size}" for dim, size in array.sizes.items())
    return ShapeError(
        f"{label}: expected dims [{', '.join(dims)}], found [{actual}]; rename dims (.rename), select one "
        "index of a dim (.isel), or add a dim (.expand_dims)"
    )
