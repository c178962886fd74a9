"""Blocks of code on the pages of docs/: read, run in order, and their output compared.

Blocks of a page share a namespace, as the cells of a notebook do, and run in a folder of their own. ```python
runs; a last line that is an expression is shown. ```bash holds commands of `mizarr`, a line each. ```text
right below either is what it prints. `<!-- not run: reason -->` above a block says why it cannot be;
`<!-- needs: FILE -->` anywhere names a file with a pretrained model, which the page expects in that folder.

Output is compared line by line, blanks aside. Whole numbers must be the same; numbers with a point may differ
by two of their last digit, as processors round differently; an ellipsis (…) stands for anything.

The border: nothing here knows pytest; notebooks are made of the same blocks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^(`{3,}|:{3,})([^`]*)$")
NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>.+) -->$")
NEEDS = re.compile(r"^<!-- needs: (?P<file>\S+) -->$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
RUN = ("python", "bash")


@dataclass(frozen=True)
class Block:
    """Code of a page, what it should print (None: not said), and why it is not run ("": it is)."""

    page: str
    line: int
    language: str
    code: str
    expected: str | None
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Python and command blocks of a page, in order. AssertionError for a fence that is not closed."""
    found: list[Block] = []
    reason, after = "", False
    for kind, number, text in parts(path.read_text("utf-8")):
        if kind in RUN:
            found.append(Block(path.name, number, kind, text, None, reason))
            reason, after = "", True
        elif kind == "text" and after:
            last = found.pop()
            found.append(Block(last.page, last.line, last.language, last.code, text, last.not_run))
            after = False
        elif kind == "prose":
            lines = [line for line in text.splitlines() if line.strip()]
            match = NOT_RUN.match(lines[-1]) if lines else None
            reason = match["reason"] if match else ""
            after = after and not lines
    return found


def needed_models(path: Path) -> list[str]:
    """Names of the files with pretrained models that a page expects in the current folder."""
    return NEEDS.findall(path.read_text("utf-8"))


def parts(text: str) -> Iterator[tuple[str, int, str]]:
    """(language of a fence or "prose", line, what is in it), in order."""
    kind, fence, began, held = "prose", "", 1, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        opens = kind == "prose" and match is not None
        if opens or (kind != "prose" and line.strip() == fence):
            yield kind, began, "\n".join(held)
            held, began = [], number + 1
            kind, fence = (match[2].strip() or "plain", match[1]) if opens and match else ("prose", "")
        else:
            held.append(line)
    assert kind == "prose", f"a block of {kind} is not closed"
    yield kind, began, "\n".join(held)


def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Run a block in a namespace; what it prints on stdout."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if block.language == "python":
            run_python(block.code, str(block), namespace)
        else:
            run_commands(block.code)
    return said.getvalue()


def run_python(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Execute code; the value of a last expression is printed, as a notebook shows it."""
    lines = code.splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)  # tracebacks and inspect find the source
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        assert isinstance(last, ast.Expr)
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            print(repr(value))


def run_commands(code: str) -> None:
    """Run commands of `mizarr` in this process. AssertionError for one that fails, or is another program."""
    from mizarr.workflows.cli import run

    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "mizarr", f"{words[0]} is not run; say why above the block"
            assert run(words[1:]) == 0, line


def difference(expected: str, found: str) -> str:
    """The first line that differs, in words; empty where all is as expected."""
    wanted, got = ([line for line in text.splitlines() if line.strip()] for text in (expected, found))
    for number, line in enumerate(wanted):
        if line.strip() == "…":
            return ""
        if number >= len(got):
            return f"expected {line!r}, found nothing more"
        if not matches(line, got[number]):
            return f"expected {line!r}, found {got[number]!r}"
    return f"found {got[len(wanted)]!r} beyond what is expected" if len(got) > len(wanted) else ""


def matches(expected: str, found: str) -> bool:
    """Whether a line is as expected: words the same, numbers within two of their last digit."""
    numbers, template = [], ""
    for piece in re.split(f"(…|{NUMBER.pattern})", expected):
        if piece == "…":
            template += ".*?"
        elif NUMBER.fullmatch(piece):
            numbers.append(piece)
            template += rf"\s*({NUMBER.pattern})\s*"
        else:
            template += spaced(piece)
    match = re.fullmatch(rf"\s*{template}\s*", found)
    return match is not None and all(map(is_close, numbers, match.groups()))


def spaced(text: str) -> str:
    """Literal text, in which any blanks stand for any."""
    return r"\s*".join(re.escape(word) for word in re.split(r"\s+", text))


def is_close(expected: str, found: str) -> bool:
    """Two numbers as printed: whole ones equal, others within two of the last digit that is expected."""
    one, other = (float(text.replace(",", "").replace("−", "-")) for text in (expected, found))
    mantissa, _, exponent = expected.partition("e")
    if "." not in mantissa:
        return one == other
    step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(one - other) <= 2.001 * step
