"""The house itself: arrows between rooms, what a module says first, what an import costs."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mizarr
from mizarr.workflows import WORKFLOWS

ROOT = Path(mizarr.__file__).parent
ROOMS = ("store", "pipeline", "stages", "workflows")
MODULES = [ROOT / "__init__.py", *sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCS = [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in (".md", ".py", ".css", ".svg")]
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "Makefile", ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted(path: Path) -> str:
    """stages/forward/__init__.py -> mizarr.stages.forward"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mizarr", *(part for part in parts if part != "__init__")))


NAMES = {dotted(path) for path in MODULES}


@pytest.fixture(autouse=True, scope="module")
def no_trees_stay() -> Iterator[None]:
    """Trees of a thousand files are millions of objects, which every later look for garbage would walk."""
    yield
    parsed.cache_clear()


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute name of everything a module imports anywhere, and whether only type checkers see it."""
    return list(_imports(path, parsed(path)))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            stem = ".".join(part for part in (base, node.module or "") if part)
            yield from ((f"{stem}.{alias.name}", id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func).endswith(("import_module", "__import__")):
            yield from ((str(a.value), False) for a in node.args[:1] if isinstance(a, ast.Constant))


def _called(function: ast.expr) -> str:
    """The last word of what is called, "import_module" of `importlib.import_module`; "" of no name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def imported_by_top_level_name(path: Path, names: Sequence[str]) -> list[str]:
    """Import statements whose absolute module starts with one of `names`."""
    found = []
    for node in ast.walk(parsed(path)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        found += [name for name in modules if name.split(".")[0] in names]
    return found


def offenders(wrong: Callable[[Path], list[str]], paths: Sequence[Path] = MODULES) -> dict[str, list[str]]:
    """What is wrong with each of some modules, where something is."""
    return {dotted(path): found for path in paths if (found := wrong(path))}


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "mizarr" and len(parts) > 1 and parts[1] in ROOMS else None


def python(code: str, cwd: str | Path = "/") -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, away from the checkout."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run


# Arrows


def test_a_room_imports_only_to_its_left():
    def to_the_right(path: Path) -> list[str]:
        here = ROOMS.index(path.relative_to(ROOT).parts[0])
        return [name for name, _ in imports(path) if (room := room_of(name)) and ROOMS.index(room) > here]

    assert not offenders(to_the_right, MODULES[1:]), "arrows are store <- pipeline <- stages <- workflows"


@pytest.mark.parametrize("room", ["store", "pipeline"])
def test_store_and_pipeline_never_import_torch(room):
    held = {
        dotted(path): name
        for path in (ROOT / room).rglob("*.py")
        for name, typing_only in imports(path)
        if name.split(".")[0] in ("torch", "transformers", "safetensors") and not typing_only
    }
    assert not held


def test_imports_inside_the_package_are_relative():
    assert not offenders(lambda path: imported_by_top_level_name(path, ["mizarr"]))


def test_tests_import_the_package_by_its_name():
    bare = offenders(lambda path: imported_by_top_level_name(path, ROOMS), TESTS)
    assert not bare, "write `from mizarr.store import …`: under its bare name the module is loaded twice"


def of_the_package(path: Path) -> set[str]:
    """Modules of the package that a module imports anywhere, whoever sees it."""
    found = set()
    for name, _ in imports(path):
        module = name if name in NAMES else name.rpartition(".")[0]
        if module in NAMES:
            found.add(module)
    return found - {dotted(path)}


@cache
def all_arrows() -> dict[str, set[str]]:
    """Of every module what it imports of the package."""
    return {dotted(path): of_the_package(path) for path in MODULES}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """What imports itself by way of others: strongly connected parts of more than one (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(arrows):
        if node not in number:
            visit(node)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_files_import_in_circles():
    """Imports anywhere count: at the top, inside functions, and those for type checkers alone."""
    assert circles(all_arrows()) == [], (
        "the lower one takes a value or a protocol, or both share a third file"
    )


KNOWS_PATHS = {"mizarr.store.files.opening", "mizarr.store.catalog", "mizarr.store.files"}
"""Who makes the local folder, who tells people its path, who lists it."""


def test_nobody_but_the_local_folder_knows_where_on_a_disk_a_store_lies():
    def knows(path: Path) -> list[str]:
        return [name for name, _ in imports(path) if name.endswith((".LocalFolder", ".files.local"))]

    assert offenders(knows).keys() <= KNOWS_PATHS, "ask the Folder (store/files/folder.py)"

    def leaks(path: Path) -> list[str]:
        return [
            f"{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute)
            and node.attr in ("path", "root")
            and leads_to_a_store(ast.unparse(node.value), node.attr)
        ]

    outside = [path for path in MODULES if not dotted(path).startswith("mizarr.store.files.")]
    found = offenders(leaks, outside)
    assert not found, "a store may lie in no folder: say `address`, or ask for an operation of Folder"


def leads_to_a_store(value: str, attribute: str) -> bool:
    folders = ("store.files", "self.folder", "self._folder", "source.files")
    return value.endswith(folders) or (attribute == "path" and value == "store")


PRINTING = re.compile(
    r"(click\.|typer\.)(s?echo|secho|print)|print|(sys\.)?(stdout|stderr)(\.buffer)?\.write(lines)?|Console"
)


def test_whatever_is_printed_passes_where_control_characters_are_escaped():
    """Text of files steers no terminal: one prints by `terminal.echo`, or rich with an `EscapingConsole`."""

    def prints(path: Path) -> list[str]:
        return [
            f"{node.lineno}: {ast.unparse(node)[:80]}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Call) and PRINTING.fullmatch(ast.unparse(node.func))
        ]

    found = offenders(prints, MODULES)
    assert found.keys() <= {"mizarr.store.display.terminal"}


LARGEST = {"workflows": 16}
"""Most modules of any folder of a room, where they are fewer than elsewhere."""
INSIDE = sorted({path.parent for path in MODULES if path.parent != ROOT})


@pytest.mark.parametrize("room", INSIDE, ids=relative)
def test_arrows_inside_a_room_run_one_way(room):
    """Between what lies in a folder, its files and folders: none reaches another that reaches it."""
    inside = dotted(room / "__init__.py") + "."
    arrows: dict[str, set[str]] = {}
    for module, targets in all_arrows().items():
        if module.startswith(inside):
            here = module.removeprefix(inside).split(".")[0]
            there = {t.removeprefix(inside).split(".")[0] for t in targets if t.startswith(inside)}
            arrows.setdefault(here, set()).update(there - {here})
    assert circles(arrows) == []


@pytest.mark.parametrize("room", INSIDE, ids=relative)
def test_a_room_is_no_drawer(room):
    files = [path for path in room.glob("*.py") if path.name != "__init__.py"]
    most = LARGEST.get(room.relative_to(ROOT).parts[0], 17)
    assert len(files) <= most, "a folder that needs more is two ideas"


def test_every_question_lies_in_a_room_of_its_subject():
    """At the top of workflows/ is what questions share."""
    flat = [name for name, home in WORKFLOWS.items() if home.count(".") < 2]
    assert not flat, "workflows/DESIGN.md says which rooms there are"


FORWARD = "mizarr.stages.forward."
SPOKEN_TO = {
    "architectures": ("architecture", "known", "points"),
    "checkpoints": ("checkpoint",),
    "networks": ("history", "kernels.products", "kernels.tuning"),
    "passes": ("backward", "kept"),
}
"""Of those rooms of forward that know how a model is made, what others may ask: a new file is closed."""


def test_nobody_outside_the_forward_room_knows_how_a_model_is_made():
    def inside(path: Path) -> list[str]:
        allowed = [f"{room}.{name}" for room, names in SPOKEN_TO.items() for name in names]
        found = [name.removeprefix(FORWARD) for name in of_the_package(path) if name.startswith(FORWARD)]
        return [name for name in found if name.split(".")[0] in SPOKEN_TO and name not in allowed]

    outside = [path for path in MODULES if "forward" not in path.relative_to(ROOT).parts]
    known = offenders(inside, outside)
    assert not known, "ask an Architecture (Model.config), or Model.network"


def test_nobody_asks_of_what_kind_an_architecture_or_network_is():
    """Shapes are told apart where networks are made of them; everywhere else one asks a property."""
    rooms = [ROOT / "stages/forward" / room for room in ("architectures", "networks")]
    kinds = {
        node.name
        for path in MODULES
        if any(room in path.parents for room in rooms) and path.name != "points.py"
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }

    def asks(path: Path) -> list[str]:
        return [
            f"{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Call)
            and _called(node.func) in ("isinstance", "issubclass")
            and kinds & {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
        ]

    assert not offenders(asks, [path for path in MODULES if not any(room in path.parents for room in rooms)])


def test_one_word_is_one_class():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(dotted(path))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, "give one of them another name"


def test_no_room_can_be_imported_under_its_bare_name():
    names = [dotted(path) for path in MODULES]
    code = (
        "import importlib, sys\n"
        f"[importlib.import_module(name) for name in {names!r}]\n"
        f"print([room for room in {ROOMS!r} if room in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


# What a module says


def test_every_module_says_first_what_it_is_for():
    said = {dotted(path): ast.get_docstring(parsed(path)) or "" for path in MODULES}
    unclear = [name for name, text in said.items() if not text.split("\n\n")[0].endswith((".", ":", "?"))]
    assert not unclear, "begin a module with a docstring, and that with a sentence"


FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(work|root|home|Users|mnt|opt)/"),
    "a number only an issue tracker understands": re.compile(
        r"(?i)\b(issue|ticket|pull request)s?\s*#?\d+|(?<![\w&\"'])#\d{1,4}\b"
    ),
    "a note to oneself": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
}


def test_sources_name_no_machine_no_issue_and_no_loose_end():
    found = [
        f"{relative(path)}:{number} holds {what}: {line.strip()}"
        for path in [*MODULES, *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]
    assert not found


def test_examples_in_docstrings_are_true():
    """Examples are written for users: public names are there as after `from mizarr import *`."""
    # Not `testmod`: it also runs what has no example, ten thousand docstrings, and each time asks the system
    # for every source file that was ever shown whether it changed.
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for path in MODULES:
        module = importlib.import_module(dotted(path))
        public = {name: getattr(mizarr, name) for name in mizarr._HOME if not hasattr(module, name)}
        for example in finder.find(module, extraglobs=public):
            assert not runner.run(example).failed, example.name
    assert runner.tries > 30


# Public names


def test_public_names_are_the_same_for_people_and_for_type_checkers():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: f".{node.module}" for node in found for alias in node.names}
    assert typed == mizarr._HOME


@pytest.mark.parametrize("name", sorted(mizarr._HOME))
def test_every_public_name_is_there(name):
    value = getattr(mizarr, name)
    assert value.__doc__, f"mizarr.{name} has no docstring"


def test_public_names_are_few_and_listed():
    assert len(mizarr.__all__) <= 36
    assert set(mizarr.__all__) <= set(dir(mizarr))


def test_an_unknown_name_is_an_attribute_error_with_the_nearest():
    with pytest.raises(AttributeError, match="HookSpec"):
        _ = mizarr.HookSpecs


# What an import costs

HEAVY = ("torch", "transformers", "xarray", "zarr", "dask", "distributed", "pandas", "numpy", "matplotlib")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages are loaded after `code`, whose own output goes nowhere."""
    watch = (
        "import contextlib, io, json, sys\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    return set(json.loads(python(watch).stdout))


def test_importing_mizarr_imports_nothing_heavy():
    assert loaded_by("import mizarr") == set()


def test_help_imports_nothing_heavy():
    assert (
        loaded_by("from mizarr.workflows.cli import run\nrun(['--help'])\nrun(['capture', '--help'])")
        == set()
    )


@pytest.mark.parametrize("name", ["HookPoint", "HookSpec", "Add", "open_store", "MizarrError"])
def test_names_that_plan_or_read_never_import_torch(name):
    assert "torch" not in loaded_by(f"import mizarr\nmizarr.{name}")


def children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(
    ("code", "seconds"),
    [("import mizarr", 0.3), ("from mizarr.workflows.cli import run; run(['--help'])", 0.5)],
    ids=["import", "help"],
)
def test_start_up_stays_within_its_budget(code, seconds):
    """CPU time of a whole interpreter, the best of five: a busy machine does not make it red."""
    costs = []
    for _ in range(5):
        before = children_seconds()
        python(code)
        costs.append(children_seconds() - before)
    assert min(costs) <= seconds


# Files around the package


def test_requirements_are_ranges_and_constraints_pin_each_of_them():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin for pin in pinned}
    for requirement in map(Requirement, wanted):
        if requirement.name == "mizarr":
            continue
        assert not any(part.operator == "==" for part in requirement.specifier), f"{requirement} is a pin"
        pin = pins[canonicalize_name(requirement.name)]
        version = next(iter(pin.specifier)).version
        assert requirement.specifier.contains(version), f"{pin} is outside of {requirement}"


def test_everything_imported_is_required():
    """By the package or by an extra: not only present because something else needs it."""
    extras = {
        name: lines for name, lines in PROJECT["project"]["optional-dependencies"].items() if name != "test"
    }
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]
    asked = [Requirement(line) for line in lines]
    # dask[distributed] asks for distributed
    required = {canonicalize_name(name) for one in asked for name in (one.name, *one.extras)}
    homes = packages_distributions()
    imported = {
        name.split(".")[0] for path in MODULES for name, typing_only in imports(path) if not typing_only
    }
    third_party = imported - set(sys.stdlib_module_names) - {"mizarr", "__future__"}
    unclaimed = [n for n in third_party if not {canonicalize_name(d) for d in homes.get(n, ())} & required]
    assert not [name for name in unclaimed if not name.startswith(".")]


def test_newest_entry_of_the_changelog_is_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == mizarr.__version__


def test_the_citation_is_of_this_version():
    assert f"\nversion: {mizarr.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_ci_runs_the_test_command_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make test" in ci and "make wide" in ci
    assert re.search(r"^\s*make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_every_package_of_the_tree_is_listed_for_the_wheel():
    tree = {dotted(path) for path in MODULES if path.name == "__init__.py"}
    assert tree == set(PROJECT["tool"]["setuptools"]["packages"]), "list the folder in [tool.setuptools]"
    folders = {path.parent for path in MODULES}
    without = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]
    assert not without, "give these folders an __init__.py"
