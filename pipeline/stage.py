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
    """A cached analysis, declared by the decorator `stage`: call it like its function, or make it a node of a
    workflow's graph with `on`."""

    def on(self, **arguments: Any) -> StageNode:
        """Make a node of a workflow's graph that applies this stage to inputs; computes nothing yet.

        If the stage accepts several sets of inputs (forms), the form with exactly these inputs is used; if
        several forms have them, choose with `form`.

        Arguments:
            arguments: By name: inputs (nodes, ports or xarray objects), parameters (plain values) and
                resources.

        Raises:
            StageError: An argument is missing, unknown (the message names the most similar one) or cannot be
                in a key; or the stage has no version and its code reads a value that cannot be in a key.
        """
        form_name = self._form_of(arguments)
        if form_name != self.name:
            return self.form(form_name).on(**arguments)
        accepted = [*self.inputs, *self.params, *self.resources]
        for name in arguments:
            if name not in accepted:
                hint = did_you_mean(name, accepted)
                raise StageError(
                    f"stage {self.name!r} takes no argument {name!r}, only {', '.join(accepted)}{hint}"
                )
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
                    f"stage {self.name!r}: expected argument {name} to be a resource, found "
                    f"{resource!r:.60}; give an object with the methods identity(), check() and open() "
                    "(mizarr.PinnedResource)"
                )
        return StageNode(
            self, {name: as_port(arguments[name], name) for name in self.inputs}, params, resources
        )

    def form(self, name: str) -> Stage:
        """This stage with another of the sets of inputs (forms) that it accepts, by the form's name."""
        if name not in self.forms:
            raise StageError(
                f"stage {self.name!r} has no form {name!r}; its forms, one per set of inputs, are "
                f"{', '.join(self.forms)}"
            )
        if name == self.name:
            return self
        return _named_as_function(replace(self, name=name, inputs=self.forms[name]))

    def _form_of(self, arguments: Mapping[str, Any]) -> str:
        """Name of the only form with exactly these inputs; this form's name if there are several or none."""
        # Optional inputs belong to other forms, so arguments are compared with the inputs of all forms.
        all_inputs = {name for inputs in self.forms.values() for name in inputs}
        input_names = all_inputs & set(arguments)
        matching_forms = [name for name, inputs in self.forms.items() if set(inputs) == input_names]
        is_other_form = len(matching_forms) == 1 and set(self.inputs) != input_names
        return matching_forms[0] if is_other_form else self.name

    def __reduce__(self) -> Any:
        # Sent to a worker by name, as the decorator has put the stage where its function was; a stage of a
        # notebook or inside a function has no such name and travels with its code.
        module, name = self.function.__module__, self.function.__qualname__
        if module == "__main__" or "<locals>" in name:
            return _stage_of_fields, (self.__dict__,)
        return _stage_by_name, (module, name, self.name)


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
    """Decorator: declare a function on labelled arrays as a stage, an analysis whose results are cached.

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
        resources: Names of parameters that are resources (files, such as a dictionary of features); the
            function gets each one opened.
        several_models: Whether inputs may be activations of different models.

    Raises:
        StageError: The declaration does not fit the function.
    """
    axes = (cells,) if isinstance(cells, str) else tuple(cells or ())
    if (inputs is None) == (forms is None):
        raise StageError(
            "the decorator stage takes either inputs=… or forms=…, found both or neither; give inputs=… "
            "unless the function accepts several sets of inputs"
        )

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
            _source_digest(function),
            all_forms,
            resources,
            several_models,
        )
        return _named_as_function(declared)

    return declare


def _named_as_function(stage: Stage) -> Stage:
    """Give a stage the name and docstring of its function; returns the stage."""
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
    """Check the declaration of a stage with one set of inputs.

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
            raise StageError(
                f"stage {label!r}: cells=… names axes among {', '.join(AXES)}, by which work is cut, found "
                f"{axis!r}"
            )
        if not any(dim in AXES[axis] for dims in inputs.values() for dim in dims or ()):
            raise StageError(
                f"stage {label!r} is declared with cells={axis!r}, but no input has a dim "
                f"{' or '.join(AXES[axis])}; add it to the dims of an input, or leave cells out"
            )
    for axis in ("segment", "block"):
        if axis in axes and combine is None:
            raise StageError(
                f"stage {label!r} is declared with cells={axis!r} and without combine=…; give combine=…, a "
                "function that joins the results of all cells into one dataset"
            )
    for name in inputs:
        if name not in parameters:
            raise StageError(
                f"stage {label!r} declares an input {name!r} that is no parameter of its function; add the "
                "parameter, or correct the name"
            )
    # *args and **kwargs have no names that could enter a key.
    unnamed = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if unnamed:
        raise StageError(
            f"stage {label!r}: its function takes *args or **kwargs ({unnamed[0]!r}), and parameters enter "
            "the key by name; replace it by named parameters"
        )


def _source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of a function's source text; empty if there is no text, as in a console."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def _stage_by_name(module: str, name: str, form: str) -> Stage:
    """Import the stage with this dotted name in a module, in one of its forms; used to unpickle it."""
    member: Any = importlib.import_module(module)
    for part in name.split("."):
        member = getattr(member, part)
    stage: Stage = member
    return stage.form(form)


def _stage_of_fields(fields: Mapping[str, Any]) -> Stage:
    """Make a stage from its fields; used to unpickle one that cannot be imported by name."""
    stage = object.__new__(Stage)
    for name, value in fields.items():
        object.__setattr__(stage, name, value)
    return stage
