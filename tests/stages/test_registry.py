"""The registry of stages and experiments."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import mizarr.stages
from mizarr.pipeline import Stage, stage
from mizarr.pipeline.declaration import Output
from mizarr.stages import find, registry
from mizarr.stages.forward.runs.experiment import Experiment
from mizarr.store.errors import StageError
from tests.torch_free import without_torch

EXPERIMENTS = [name for name, found in registry().items() if not isinstance(found, Stage)]


def modules() -> Iterator[ModuleType]:
    """Every module of the room."""
    folder = Path(mizarr.stages.__file__).parent
    for path in folder.rglob("[a-z]*.py"):
        yield importlib.import_module(
            ".".join(("mizarr.stages", *path.relative_to(folder).with_suffix("").parts))
        )


def concrete(kind: type[Experiment]) -> Iterator[type[Experiment]]:
    """Experiments of the package that can be made."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("mizarr.") and isinstance(vars(each).get("name"), str):
            yield each
        yield from concrete(each)


@pytest.mark.parametrize("name", registry())
def test_every_entry_has_that_name_a_version_and_outputs(name: str):
    found = find(name)
    declared = found.declaration()
    assert declared.name == name == found.name
    assert isinstance(declared.version, int)
    assert declared.outputs
    assert all(isinstance(output, Output) and output.dims is not None for output in declared.outputs.values())
    assert declared.kind == ("stage" if isinstance(found, Stage) else "experiment")


def test_every_stage_and_experiment_of_the_room_is_found_under_a_name_of_its_own():
    names = [
        form
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, Stage) and value.function.__module__ == module.__name__
        for form in value.forms
    ]
    # A class of two kinds is met under both.
    names += [each.name for each in dict.fromkeys(concrete(Experiment))]
    assert len(names) == len(set(names))
    assert set(names) == set(registry())


def test_an_experiment_without_declared_outputs_cannot_hide():
    """Every class that has a name says its own outputs, or takes those of a class that does."""
    assert [each.name for each in concrete(Experiment) if not getattr(each, "outputs", None)] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_described_as_stages_are(name: str):
    declared = find(name).declaration()
    head, *lines = find(name).describe().splitlines()
    assert head == f"{name} (version {declared.version})"
    assert lines[0] == "  in  model [resource]"
    assert [line for line in lines if line.startswith("  out ")] == [
        f"  out {each}{'?' * output.is_optional} [{', '.join(output.dims)}] {output.unit}  {output.long_name}"
        for each, output in declared.outputs.items()
    ]
    assert all(line.startswith(("  in  ", "  set ", "  out ")) for line in lines)


def test_finding_and_describing_never_imports_torch():
    program = """
from mizarr.stages import registry
print(json.dumps([found.describe() for found in registry().values()]))
"""
    assert without_torch(program) == [found.describe() for found in registry().values()]


def test_two_of_one_name_are_told(monkeypatch):
    one, other = ModuleType("one"), ModuleType("other")
    for module in (one, other):
        exec("def twin(x):\n    return x", vars(module))
        declare = stage(version=1, inputs={"x": ("layer",)}, outputs={"y": ("layer",)})
        vars(module)["twin"] = declare(module.twin)
    monkeypatch.setattr(mizarr.stages, "_declaring_modules", lambda: iter((one, other)))
    with pytest.raises(
        StageError, match="expected stages with different names, found two named 'twin', one of them in other"
    ):
        registry.__wrapped__()


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(StageError, match="did you mean 'logit_lens'"):
        find("logit_lenses")
    with pytest.raises(StageError, match="did you mean 'edge_knockout'"):
        find("edge_knockouts")
