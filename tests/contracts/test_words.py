"""Words of the package: docstrings have nouns, names say what they hold, functions take few parameters.

Limits are per room. They are measured shares, so that one odd sentence passes and a habit does not.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import mizarr

ROOT = Path(mizarr.__file__).parent
ROOMS = ("store", "pipeline", "stages", "workflows")
VAGUE_NAMES = frozenset(
    """asked chosen done each found given gone held here how kept known left made mine one other others
    ours own rest right said same second seen stands taken theirs there thing things told two wanted way
    ways what which why""".split()  # noqa: SIM905
)
"""Words that do not say what a variable, parameter or attribute holds."""
FILLERS = frozenset(
    """a after all an and any are as at be been before behind being both but by came can come comes did do
    does down each either every few find for found from gave give given gives go goes had has have held
    here hold holds how if in into is it its just keep keeps kept kind kinds least less made make makes
    many may might more most much must neither no none nor not of off on one ones only or other others
    out over own part parts place places said same say says should so some stand stands such take taken
    takes tell tells than that the their them then there these they thing things this those to told too
    under up very was way ways were what when where which who whom whose why will with without
    would""".split()  # noqa: SIM905
)
"""Words without a meaning of their own in the field."""
MOST_FILLERS = 0.6
"""Share of fillers among the words of a first paragraph from which it says too little."""
VAGUE_DOCSTRINGS = 0.03
"""Share of a room's docstrings that may consist of fillers: five admired codebases have 0 to 0.021."""
VAGUE_SHARE = 0.015
"""Share of a room's names that may be vague: the same have 0.002 to 0.013."""
MOST_PARAMETERS = 8
WIDER = {
    "pipeline/stage.py stage": "each keyword declares one property of a stage",
    "stages/attention/head_detection.py head_scores": "names and defaults are those of TransformerLens",
    "stages/forward/networks/attention.py attend": "called for every layer and token: a value would cost",
    "stages/forward/networks/attention.py attention": "called for every layer and token: a value would cost",
    "workflows/exchange.py import_activations": "what somebody declares of files that say nothing themselves",
}
"""Functions that take more than `MOST_PARAMETERS`, each with its reason."""
MOST_FIELDS = 30
LARGER = {
    "ComposedArchitecture": "each field is a way in which families differ",
    "TrainingSettings": "each field is an option of `mizarr train`",
}
"""Dataclasses with more than `MOST_FIELDS`, each with its reason."""
LISTED_FROM = 3
"""Number of parameters from which a public function lists what they are."""


@dataclass(frozen=True)
class Words:
    """What one module says: docstrings of modules, classes, functions and fields; names that it binds."""

    docstrings: tuple[str, ...]
    names: tuple[str, ...]
    wide: tuple[str, ...]
    """Functions with more than `MOST_PARAMETERS`, as "path name"."""


@cache
def words_of(path: Path) -> Words:
    """Everything that is measured of one module."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = [node for node in nodes if isinstance(node, ast.ClassDef)] + functions
    docstrings = [ast.get_docstring(node) or "" for node in (tree, *documented)]
    docstrings += [text for node in nodes for text in _field_docstrings(node)]
    parameters = {function: _parameters(function) for function in functions}
    names = [name for some in parameters.values() for name in some]
    names += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    wide = [
        f"{path.relative_to(ROOT)} {function.name}"
        for function, some in parameters.items()
        if len(some) > MOST_PARAMETERS
    ]
    return Words(tuple(filter(None, docstrings)), tuple(names), tuple(wide))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def _field_docstrings(node: ast.AST) -> Iterator[str]:
    """Strings that stand under an assignment."""
    body = getattr(node, "body", [])
    if not isinstance(body, list):
        return
    for before, after in itertools.pairwise(body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.Assign | ast.AnnAssign) and is_text and isinstance(after.value.value, str):
            yield after.value.value


def filler_share(docstring: str) -> float | None:
    """Share of fillers in the first paragraph; None for one that is too short or long to be judged so."""
    paragraph = re.split(r"\n\s*\n", docstring.strip())[0]
    words = [word.lower() for word in re.findall(r"[A-Za-z_]+", paragraph)]
    if not 5 <= len(words) <= 40:
        return None
    return sum(word in FILLERS for word in words) / len(words)


def modules(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py"))


def test_the_measure_tells_a_sentence_of_the_field_from_one_of_fillers():
    assert filler_share("What is told of it to those that have been given it.") == 1.0
    share = filler_share("Absolute positions of the new tokens, int64 [position].")
    assert share is not None and share < 0.4
    assert filler_share("Token ids.") is None


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_have_nouns(room):
    judged = [
        (share, f"{path.relative_to(ROOT)}: {' '.join(text.split())[:100]}")
        for path in modules(room)
        for text in words_of(path).docstrings
        if (share := filler_share(text)) is not None
    ]
    vague = sorted((entry for entry in judged if entry[0] > MOST_FILLERS), reverse=True)
    assert len(judged) > 100
    assert len(vague) <= VAGUE_DOCSTRINGS * len(judged), "\n".join(text for _, text in vague[:20])


@pytest.mark.parametrize("room", ROOMS)
def test_names_say_what_they_hold(room):
    names = [(name, path) for path in modules(room) for name in words_of(path).names]
    vague = [f"{path.relative_to(ROOT)}: {name}" for name, path in names if name.strip("_") in VAGUE_NAMES]
    assert len(names) > 1000
    assert len(vague) <= VAGUE_SHARE * len(names), "\n".join(vague[:20])


def test_functions_take_no_more_parameters_than_can_be_remembered():
    wide = [name for room in ROOMS for path in modules(room) for name in words_of(path).wide]
    assert sorted(wide) == sorted(WIDER)


def dataclasses_of(path: Path) -> Iterator[tuple[ast.ClassDef, list[tuple[ast.AnnAssign, ast.stmt | None]]]]:
    """Dataclasses of a module, with their public fields and the statement after each of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(item) for item in node.decorator_list
        ):
            fields = [
                (statement, after)
                for statement, after in itertools.zip_longest(node.body, node.body[1:])
                if isinstance(statement, ast.AnnAssign)
                and "ClassVar" not in ast.unparse(statement.annotation)
                and not ast.unparse(statement.target).startswith("_")
            ]
            yield node, fields


def has_sentence(field: ast.AnnAssign, after: ast.stmt | None) -> bool:
    """Whether a string stands under a field, or its value is made with one (`option`, `setting`)."""
    is_described = isinstance(field.value, ast.Call) and ast.unparse(field.value.func) in (
        "option",
        "setting",
    )
    is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return is_described or (is_string and isinstance(after.value.value, str))


def public_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Public functions of a module, and public methods of its public classes without bases: an overriding
    method has its arguments from its base."""
    for node in ast.parse(path.read_text()).body:
        is_class = isinstance(node, ast.ClassDef) and not node.bases and not node.name.startswith("_")
        for item in node.body if is_class else [node]:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                decorators = " ".join(map(ast.unparse, item.decorator_list))
                # Users of a command read its options.
                if "overload" not in decorators and "command" not in decorators:
                    yield item


@pytest.mark.parametrize("room", ROOMS)
def test_a_field_has_a_sentence_and_a_dataclass_few_fields(room):
    without, large, count = [], [], 0
    for path in modules(room):
        for node, fields in dataclasses_of(path):
            count += len(fields)
            without += [
                f"{path.relative_to(ROOT)}: {node.name}.{ast.unparse(field.target)}"
                for field, after in fields
                if not has_sentence(field, after)
            ]
            large += [node.name] if len(fields) > MOST_FIELDS and node.name not in LARGER else []
    assert count > 50
    assert not without, "\n".join(without[:20])
    assert not large, large


@pytest.mark.parametrize("room", ROOMS)
def test_public_functions_list_their_arguments(room):
    listed = re.compile(r"[Aa]rguments|[Ss]ee [`A-Z]|[Aa]s `")
    functions = [
        (path, function)
        for path in modules(room)
        for function in public_functions(path)
        if len(_parameters(function)) >= LISTED_FROM
    ]
    silent = [
        f"{path.relative_to(ROOT)}: {function.name}"
        for path, function in functions
        if not listed.search(ast.get_docstring(function) or "")
    ]
    assert len(functions) > 10
    assert not silent, "\n".join(silent[:20])
