"""Stages: cached pure analyses, declared by one decorator.

A stage is a plain function on labelled arrays plus a declaration: version, the dims of its inputs, the dims
and units of its outputs, and along which axes it may be cut into cells. The decorated name is still the
function, and is tested as one; `.on(…)` puts it into a workflow's graph. It opens no file, holds no model
and reads no clock; randomness comes as a parameter and is therefore in its key.

A function that takes several kinds of input has *forms*: names with the inputs of each, as an input may be
left out, or have other dims. What a stage reads beside arrays is a *resource* (pinned.py).

Border: what is declared is in declaration.py and function.py; what is stored, and when something runs, is
decided in `stage_node.py` and `execute.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..store.errors import StageError, nearest
from .declaration import REQUIRED, Dims, Output
from .function import AXES, StageFunction
from .pinned import PinnedResource
from .sources import as_port
from .stage_node import StageNode

if TYPE_CHECKING:
    import xarray as xr


class Stage(StageFunction):
    """A declared stage; call it as the function it is, or put it into a graph with `on`."""

    def on(self, **given: Any) -> StageNode:
        """This stage in a workflow's graph: inputs are nodes (or arrays), parameters plain values, resources
        what they are. Of several forms the one that takes the inputs given; `form` names one where more do.

        Raises StageError for an input or parameter that is missing, unknown (with the nearest name), or
        without identity, and for a stage without a version whose code has none.
        """
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
        held = {name: given[name] for name in self.resources}
        for name, resource in held.items():
            if not isinstance(resource, PinnedResource):
                raise StageError(
                    f"stage {self.name!r}: expected a resource as {name}, found {resource!r:.60}; give what "
                    "has identity(), check() and open()"
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
    several_models: bool = False,
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare a function on labelled arrays as a stage; the parameters of the stage are its other parameters.

    inputs: dims of each, in order, None for a whole dataset; "head|ssm_head" for a dim that has one name or
    another, of which the function gets the first.  forms: instead, where there are several sets of
    inputs: name of the form, which is that of the stage in keys, -> its inputs; an input that a form leaves
    out is an optional parameter of the function.  outputs: `Output` (or just the dims) of each. version:
    moves when numbers move. Without one the key holds the code of the function, and everything that code
    reads, at each moment of use (DESIGN.md, "Functions without a version"). cells: axes along which the work
    is cut, each cell cached by itself: "layer", "segment", "block". combine: makes one dataset of the cells'
    (needed for segments and blocks; layers are stacked without it). memory: the most a cell needs, as a
    multiple of the bytes it reads: 2 for the inputs and as much again for work, less for a function that
    reads block by block. resources: parameters that are resources; the function gets each opened.
    several_models: inputs may be of different models, which is refused otherwise.
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
            several_models,
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
    for axis in ("segment", "block"):
        if axis in axes and combine is None:
            raise StageError(
                f"stage {label!r} is cut by {axis}; give combine=… to make one result of the parts"
            )
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
