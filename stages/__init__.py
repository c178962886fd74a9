"""Analyses of models: labelled arrays in, labelled arrays out.

    from mizarr.stages import find
    print(find("logit_lens").describe())

A stage is a pure function with a declaration of its inputs and outputs; an experiment is declared the same
way and also needs runs of a model (`forward/`). `registry` collects both from the modules that declare them,
so a new stage is one new file and no entry in a list. `mizarr stages` prints the registry.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from ..pipeline import Stage
    from .forward.runs.experiment import Experiment

__all__ = ["find", "registry"]

_DECLARES = re.compile(r'^(@stage\(|    name(: ClassVar\[str\])? = ")', re.MULTILINE)
"""Source text of a module that declares a stage or an experiment."""


@cache
def registry() -> Mapping[str, Stage | type[Experiment]]:
    """All stages and experiments by name, in order of module and of definition.

    A stage that is declared in several forms has one name for each.

    Raises:
        StageError: if two declarations share a name.
    """
    from ..store.errors import StageError

    declared: dict[str, Stage | type[Experiment]] = {}
    for module in _declaring_modules():
        for name, declaration in _declared_in(module):
            if name in declared:
                raise StageError(
                    f"expected stages with different names, found two named {name!r}, one of them in "
                    f"{module.__name__}; rename one"
                )
            declared[name] = declaration
    return declared


def find(name: str) -> Stage | type[Experiment]:
    """Find a stage or an experiment by its name, e.g. "logit_lens".

    Raises:
        StageError: for an unknown name; suggests the nearest one.
    """
    from ..store.errors import StageError, nearest

    known = registry()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"choose one of {', '.join(known)}"
        raise StageError(f"expected the name of a stage or experiment, found {name!r}; {hint}")
    return known[name]


def _declaring_modules() -> Iterator[ModuleType]:
    """Modules below this folder that declare a stage or an experiment."""
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        # Selected by their text: importing all modules would import torch, which `mizarr stages` does not
        # need.
        if path != folder / "__init__.py" and _DECLARES.search(path.read_text("utf-8")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield importlib.import_module("." + ".".join(parts), __name__)


def _declared_in(module: ModuleType) -> Iterator[tuple[str, Stage | type[Experiment]]]:
    """The stages and experiments that a module defines itself, as (name, declaration) pairs."""
    from ..pipeline import Stage
    from .forward.runs.experiment import Experiment

    for value in vars(module).values():
        # A module also holds the stages that it imports; they are registered with the module that defines
        # them.
        if isinstance(value, Stage) and value.function.__module__ == module.__name__:
            yield from ((form, value.form(form)) for form in value.forms)
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and issubclass(value, Experiment) and isinstance(vars(value).get("name"), str):
            yield value.name, value
