"""The science: labelled arrays in, labelled arrays out. Its stages and experiments are found where they are
declared, so that one more is one file; each loads when somebody asks. `mizarr stages` prints them.

    from mizarr.stages import find
    print(find("logit_lens").describe())

A stage is a plain function with a declaration; an experiment is declared the same way, and needs runs of a
model. Each is in the module named after its subject; `forward/` holds the models.
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
"""What a module that declares something has in it. Others are not imported: some of them import torch."""


@cache
def registry() -> Mapping[str, Stage | type[Experiment]]:
    """Every form of a stage, and every experiment, by name: by module, and there as they are written.

    Raises StageError where two have one name.
    """
    from ..store.errors import StageError

    found: dict[str, Stage | type[Experiment]] = {}
    for module in _declaring():
        for name, each in _declared_in(module):
            if name in found:
                raise StageError(
                    f"two stages are named {name!r}, one in {module.__name__}; rename one of them"
                )
            found[name] = each
    return found


def find(name: str) -> Stage | type[Experiment]:
    """The stage, the form of one, or the experiment of this name; StageError for an unknown one, with the
    nearest name."""
    from ..store.errors import StageError, nearest

    known = registry()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        raise StageError(f"no stage or experiment {name!r}; {hint}")
    return known[name]


def _declaring() -> Iterator[ModuleType]:
    """Modules of this room that declare something."""
    room = Path(__file__).parent
    for path in sorted(room.rglob("*.py")):
        if path != room / "__init__.py" and _DECLARES.search(path.read_text("utf-8")):
            steps = path.relative_to(room).with_suffix("").parts
            yield importlib.import_module("." + ".".join(steps), __name__)


def _declared_in(module: ModuleType) -> Iterator[tuple[str, Stage | type[Experiment]]]:
    """What a module declares itself, by name; what it imports is declared elsewhere."""
    from ..pipeline import Stage
    from .forward.runs.experiment import Experiment

    for value in vars(module).values():
        if isinstance(value, Stage) and value.function.__module__ == module.__name__:
            yield from ((form, value.form(form)) for form in value.forms)
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and issubclass(value, Experiment) and isinstance(vars(value).get("name"), str):
            yield value.name, value
