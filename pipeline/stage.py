"""Stages: cached pure analyses, declared by one decorator.

A stage is a plain function on labelled arrays plus a declaration: version, dims of its inputs, dims and units
of its outputs, and the axes along which it may be cut into cells. The decorated name can still be called as
the function, and tests do so; `.on(…)` makes it a node of a workflow's graph. A stage opens no file, holds no
model and reads no clock; randomness is a parameter and therefore in its key.

A function that takes several sets of inputs has *forms*: names with the inputs of each, as an input may be
left out or have other dims. Data that a stage reads beside arrays is a *resource* (pinned.py).

Border: declarations are in declaration.py and function.py; stage_node.py decides what is stored, execute.py
when it runs.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..store.errors import StageError, did_you_mean
from .declaration import REQUIRED, Dims, Output
from .function import AXES, StageFunction
from .pinned import PinnedResource
from .sources import as_port
from .stage_node import StageNode

if TYPE_CHECKING:
    import xarray as xr


class Stage(StageFunction):
    """A declared stage: call it like its function, or make it a node of a graph with `on`."""

    def on(self, **arguments: Any) -> StageNode:
        """This stage as a node of a workflow's graph.

        If the stage has forms, the one with exactly these inputs is used; where several have them, choose
        with `form`.

        Arguments:
            arguments: By name: inputs (nodes, ports or xarray objects), parameters (plain values) and
                resources.

        Raises:
            StageError: An argument is missing, unknown (the message offers the nearest name) or has no
                identity, or the stage has no version and its code has no identity.
        """
        fitting = self._form_of(arguments)
        if fitting != self.name:
            return self.form(fitting).on(**arguments)
        accepted = [*self.inputs, *self.params, *self.resources]
        for name in arguments:
            if name not in accepted:
                hint = did_you_mean(name, accepted)
                raise StageError(f"stage {self.name!r} takes {', '.join(accepted)}, found {name!r}{hint}")
        params = {name: arguments.get(name, default) for name, default in self.params.items()}
        missing = [name for name in (*self.inputs, *self.resources) if name not in arguments]
        missing += [name for name, value in params.items() if value is REQUIRED]
        if missing:
            raise StageError(f"stage {self.name!r} also needs {', '.join(missing)}; give it by name")
        self.key_version  # noqa: B018 - raises early, where the user calls
        resources = {name: arguments[name] for name in self.resources}
        for name, resource in resources.items():
            if not isinstance(resource, PinnedResource):
                raise StageError(
                    f"stage {self.name!r}: expected a resource as {name}, found {resource!r:.60}; give what "
                    "has identity(), check() and open() (see PinnedResource)"
                )
        return StageNode(
            self, {name: as_port(arguments[name], name) for name in self.inputs}, params, resources
        )

    def form(self, name: str) -> Stage:
        """The form of this name; StageError lists the names that exist."""
        if name not in self.forms:
            raise StageError(
                f"expected a form of stage {self.name!r}, one per set of inputs: {', '.join(self.forms)}; "
                f"found {name!r}"
            )
        if name == self.name:
            return self
        return _named_as_function(replace(self, name=name, inputs=self.forms[name]))

    def _form_of(self, arguments: Mapping[str, Any]) -> str:
        """Name of the single form with exactly these inputs; this form's name if the choice is ambiguous."""
        # Optional inputs belong to other forms, so arguments are compared with the inputs of all forms.
        all_inputs = {name for inputs in self.forms.values() for name in inputs}
        input_names = all_inputs & set(arguments)
        fitting = [name for name, inputs in self.forms.items() if set(inputs) == input_names]
        return fitting[0] if len(fitting) == 1 and set(self.inputs) != input_names else self.name

    def __reduce__(self) -> Any:
        # Sent to a worker by name, as the decorator has put the stage where its function was; a stage of a
        # notebook or inside a function has no such name and travels with its code.
        module, name = self.function.__module__, self.function.__qualname__
        if module == "__main__" or "<locals>" in name:
            return _stage_of_fields, (self.__dict__,)
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
    """Declare a function on labelled arrays as a stage.

    The function's parameters that are neither inputs nor resources become the parameters of the stage.

    Arguments:
        version: Raise it when results change. None: the key holds a digest of the function's code and of
            everything that code reads, taken at each use (DESIGN.md, "Functions without a version").
        inputs: Dims of each input in order; None for a whole dataset. "head|ssm_head" accepts either name,
            and the function gets the first.
        forms: In place of `inputs`, several sets of inputs by name; the name stands for the stage in keys. An
            input that a form leaves out is an optional parameter of the function.
        outputs: `Output`, or just the dims, of each output.
        cells: Axes along which the work is cut into separately cached cells: "layer", "segment", "block".
        combine: Makes one dataset of the datasets of all cells; required for segments and blocks. None
            concatenates along `layer`.
        name: Name in keys; None for the function's name.
        memory: Peak memory of a cell, as a multiple of the bytes it reads: 2 for the inputs and as much again
            for intermediate arrays; less for a function that reads block by block.
        resources: Parameters that are resources; the function gets each one opened.
        several_models: Whether inputs may be activations of different models.

    Raises:
        StageError: The declaration does not fit the function.
    """
    axes = (cells,) if isinstance(cells, str) else tuple(cells or ())
    if (inputs is None) == (forms is None):
        raise StageError("expected inputs=… or forms=… of a stage, found both or neither")

    def declare(function: Callable[..., Any]) -> Stage:
        all_forms = dict(forms) if forms else {name or function.__name__: dict(inputs or {})}
        label = next(iter(all_forms))
        parameters = inspect.signature(function).parameters
        for form_inputs in all_forms.values():
            _check(label, form_inputs, parameters, axes, combine)
        not_params = {name for form_inputs in all_forms.values() for name in form_inputs} | set(resources)
        declared = Stage(
            label,
            version,
            function,
            dict(all_forms[label]),
            {key: Output(tuple(o)) if not isinstance(o, Output) else o for key, o in outputs.items()},
            axes,
            combine,
            {key: parameter.default for key, parameter in parameters.items() if key not in not_params},
            memory,
            _source(function),
            all_forms,
            resources,
            several_models,
        )
        return _named_as_function(declared)

    return declare


def _named_as_function(stage: Stage) -> Stage:
    """The stage itself, after it got the name and docstring of its function."""
    # object.__setattr__, because the dataclass is frozen.
    for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
        object.__setattr__(stage, attribute, getattr(stage.function, attribute))
    return stage


def _check(
    label: str,
    inputs: Mapping[str, Dims | None],
    parameters: Mapping[str, inspect.Parameter],
    axes: tuple[str, ...],
    combine: Any,
) -> None:
    """Check the declaration of one form.

    Arguments:
        label: Name of the stage, for messages.
        inputs: Dims of each input of the form.
        parameters: Parameters of the function.
        axes: Axes along which the work is cut.
        combine: Function that joins the results of cells, or None.

    Raises:
        StageError: The declaration does not fit the function.
    """
    for axis in axes:
        if axis not in AXES:
            raise StageError(f"stage {label!r}: expected cells among {', '.join(AXES)}, found {axis!r}")
        if not any(dim in AXES[axis] for dims in inputs.values() for dim in dims or ()):
            raise StageError(f"stage {label!r} is cut by {axis}, but no input has that axis")
    for axis in ("segment", "block"):
        if axis in axes and combine is None:
            raise StageError(
                f"stage {label!r} is cut by {axis}; give combine=… to join the results of its cells"
            )
    for name in inputs:
        if name not in parameters:
            raise StageError(
                f"stage {label!r} declares an input {name!r} that is no parameter of its function"
            )
    # *args and **kwargs have no names that could enter a key.
    loose = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if loose:
        raise StageError(
            f"stage {label!r}: parameters enter the key by name; replace {loose[0]!r} by named parameters"
        )


def _source(function: Callable[..., Any]) -> str:
    """SHA-256 of a function's source text; empty if there is no text, as in a console."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def _find(module: str, name: str, form: str) -> Stage:
    """The stage with this dotted name in a module; used to unpickle it."""
    member: Any = importlib.import_module(module)
    for part in name.split("."):
        member = getattr(member, part)
    stage: Stage = member
    return stage.form(form)


def _stage_of_fields(fields: Mapping[str, Any]) -> Stage:
    """A stage from its fields; used to unpickle it without calling `__init__`."""
    stage = object.__new__(Stage)
    for name, value in fields.items():
        object.__setattr__(stage, name, value)
    return stage
