"""Pages made of the sources: what each room offers, by its docstrings, and the settings of workflows.

Docstrings are read from the sources, without importing them, and are prose in Markdown; here they get the
signatures and the headings of a page. What is public: the names of `__all__`, else those without a leading
underscore that a module defines.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("store", "pipeline", "stages", "workflows")
INSIDE = (
    "stages/forward/networks",
    "stages/forward/passes",
    "stages/forward/checkpoints",
    "stages/forward/architectures/attending",
    "stages/forward/architectures/bridge",
    "workflows/cli",
)
"""How models are computed and how the command line parses: users call neither."""
COPIED = {
    "reference/cards/specimen.md": "stages/forward/specimen/README.md",
    "reference/cards/specimen-rwkv.md": "stages/forward/specimen_rwkv/README.md",
    "reference/cards/specimen-guided.md": "stages/forward/specimen_guided/README.md",
    "reference/cards/specimen-experts.md": "stages/forward/specimen_experts/README.md",
    "reference/cards/dictionaries.md": "stages/features/specimen/README.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page -> the file it is, which lies beside what it is about."""
PATTERN = re.compile(r"(?<![\w.*{])(\w[\w.{}]*\*[\w.*{}]*)(?![\w*}])")
"""`blocks.*.hook_z` and the like, which Markdown would take for emphasis."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write(docs: Path) -> None:
    """Write the generated pages into `docs`; those that are as they were stay untouched."""
    made = {f"reference/api/{name}.md": text for name, text in api_pages().items()}
    made["reference/settings.md"] = settings_page()
    made |= {path: (ROOT / source).read_text("utf-8") for path, source in COPIED.items()}
    names = [Path(path).stem for path in made if "/api/" in path]
    listed = "\n".join(f"{name.removeprefix('mizarr.')} <{name}>" for name in names)
    made["reference/api/index.md"] = f"{API}\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    for folder in ("api", "cards"):
        (docs / "reference" / folder).mkdir(parents=True, exist_ok=True)
    for old in (docs / "reference" / "api").glob("*.md"):
        if f"reference/api/{old.name}" not in made:
            old.unlink()
    for path, text in made.items():
        target = docs / path
        if not target.exists() or target.read_text("utf-8") != text:
            target.write_text(text, "utf-8")


SETTINGS = """# Settings of workflows

`mizarr compute NAME --set setting=value`, or `mizarr.compute(NAME, setting=value)`. On the command line
values are JSON where they are JSON, else text.
"""
API = """# Every public name

One page per room, from the docstrings. `mizarr` itself offers the names of the first page; everything else is
imported from its module.
"""


# Pages


def api_pages() -> dict[str, str]:
    """Dotted name of a room -> its page."""
    made = {"mizarr": public_names()}
    for folder in folders():
        modules = [text for path in sorted(folder.glob("*.py")) if (text := module_text(path))]
        if modules:
            name = ".".join(("mizarr", *folder.relative_to(ROOT).parts))
            about = docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
            made[name] = "\n\n".join((f"# {name}", about, *modules)) + "\n"
    return made


def folders() -> Iterator[Path]:
    """Folders of the package in which something is for users."""
    for room in ROOMS:
        for init in sorted((ROOT / room).rglob("__init__.py")):
            if not init.parent.relative_to(ROOT).as_posix().startswith(INSIDE):
                yield init.parent


def classes() -> dict[str, str]:
    """Name of each class in the reference -> where it is defined; without names that two have."""
    found: dict[str, list[str]] = {}
    for folder in folders():
        for path in folder.glob("*.py"):
            for node in public(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and docstring(node):
                    found.setdefault(node.name, []).append(f"{dotted(path)}.{node.name}")
    return {name: homes[0] for name, homes in found.items() if len(homes) == 1}


def dotted(path: Path) -> str:
    """stages/logits/lens.py -> mizarr.stages.logits.lens"""
    return ".".join(("mizarr", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def public_names() -> str:
    """The names of `mizarr`, each with its first sentence and its place."""
    import mizarr

    lines = ["# mizarr", "", "| name | what it is | defined in |", "|---|---|---|"]
    for name in mizarr._HOME:
        value = getattr(mizarr, name)
        first = markdown(inspect.getdoc(value) or "").replace("\n", " ").partition(". ")[0].rstrip(".")
        home = value.__module__
        lines.append(f"| {{py:obj}}`mizarr.{name} <{home}.{name}>` | {first} | `{home}` |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Every workflow with what `--set` can change."""
    from mizarr.workflows import WORKFLOWS, kind_of

    parts = [SETTINGS]
    for name in WORKFLOWS:
        kind = kind_of(name)
        parts.append(f"## {name}\n\n{kind.question}\n\n| setting | default | what it is |\n|---|---|---|")
        for field in dataclasses.fields(kind.settings_type):
            default, told = json.dumps(field.default), str(field.metadata.get("help", ""))
            cells = (f"`{field.name}`", f"`{default}`", outside_code(told))
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


# Modules


def module_text(path: Path) -> str:
    """Everything public of a module; empty where there is nothing."""
    tree = ast.parse(path.read_text("utf-8"))
    name = dotted(path)
    members = [text for node in public(tree) if (text := member_text(node, name))]
    if not members:
        return ""
    about = [] if path.name == "__init__.py" else [f"## {name.rpartition('.')[2]}", docstring(tree)]
    return "\n\n".join((*about, f"```{{py:currentmodule}} {name}\n```", *members))


def public(tree: ast.Module) -> list[ast.AST]:
    """Functions and classes that are public, in the order of `__all__`, else of the source."""
    defined: dict[str, ast.AST] = {}
    listed: list[str] | None = None
    for node in tree.body:
        if isinstance(node, Definition):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                defined[target.id] = node
                if target.id == "__all__" and isinstance(node.value, ast.List):
                    listed = [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
    names = listed if listed is not None else [name for name in defined if not name.startswith("_")]
    return [defined[name] for name in names if name in defined and isinstance(defined[name], Definition)]


def member_text(node: ast.AST, module: str) -> str:
    """A function or class as a directive; empty for what has no docstring."""
    assert isinstance(node, Definition)
    if not docstring(node):
        return ""
    if isinstance(node, ast.ClassDef):
        return class_text(node, module)
    return directive("function", f"{node.name}{signature(node)}", by_parameter(node), module)


def class_text(node: ast.ClassDef, module: str) -> str:
    """A class with its fields and methods that have docstrings."""
    inner = []
    fields = []
    for place, item in enumerate(node.body):
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and docstring(item):
            kinds = {ast.unparse(d) for d in item.decorator_list}
            if kinds & {"property", "cached_property", "functools.cached_property"}:
                inner.append(directive("property", item.name, docstring(item), "", colons=3))
            else:
                given = signature(item, skip_first="staticmethod" not in kinds)
                how = next((f":{k}:\n" for k in ("classmethod", "staticmethod") if k in kinds), "")
                inner.append(directive("method", item.name + given, by_parameter(item), "", how, colons=3))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            told = node.body[place + 1] if place + 1 < len(node.body) else None
            if item.target.id.startswith("_") or "ClassVar" in ast.unparse(item.annotation):
                continue
            fields.append(item)
            if isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant):
                text = markdown(str(told.value.value))
                inner.append(directive("attribute", item.target.id, text, "", colons=3))
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    is_data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    given = signature(init, skip_first=True) if init else field_signature(fields) if is_data else ""
    given = given.partition(" -> ")[0] if init else given
    return directive("class", node.name + given, "\n\n".join((docstring(node), *inner)), module, colons=4)


def field_signature(fields: list[ast.AnnAssign]) -> str:
    """Of a dataclass: its fields as parameters."""
    return "({})".format(
        ", ".join(ast.unparse(f.target) + (f"={default(f.value)}" if f.value else "") for f in fields)
    )


def default(value: ast.expr) -> str:
    """Of a setting its value; of what is made by a call an ellipsis."""
    if isinstance(value, ast.Call):
        is_setting = ast.unparse(value.func) == "setting"
        return default(value.args[0]) if is_setting and value.args else "..."
    return ast.unparse(value)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip_first: bool = False) -> str:
    """(parameters) -> result, as the source has it."""
    arguments = copy.deepcopy(node.args)
    if skip_first:
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}".replace("\n", " ")


def directive(kind: str, name: str, text: str, module: str, options: str = "", *, colons: int = 3) -> str:
    """A definition of the Python domain."""
    fence = ":" * colons
    where = f":module: {module}\n" if module else ""
    return f"{fence}{{py:{kind}}} {name}\n{where}{options}\n{text}\n{fence}"


# Docstrings


def docstring(node: ast.AST) -> str:
    """As Markdown shows it rightly."""
    return markdown(ast.get_docstring(node) or "") if isinstance(node, Definition | ast.Module) else ""


def by_parameter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's docstring with a paragraph for each parameter, for what it returns and what it raises."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = "|".join(re.escape(argument.arg) for argument in every)
    text = ast.get_docstring(node) or ""
    if names:
        lists = rf"(?:^|(?<=\.)\s+|  +|\n)((?:{names})(?:, (?:{names}))*):\s(?=\S)"
        text = re.sub(lists, r"\n\n`\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[.\])])\s+(Returns|Raises) (?=\S)", r"\n\n\1 ", text)
    return markdown(text)


def markdown(text: str) -> str:
    """Examples get fences, patterns of names become code; the rest is Markdown as it is."""
    lines: list[str] = []
    for part in paragraphs(text):
        if part[0].lstrip().startswith(">>>"):
            lines += [
                "```pycon",
                *(line.strip() if not line.startswith("    ") else line for line in part),
                "```",
            ]
        elif all(line.startswith("    ") for line in part):
            lines += ["```text", *(line[4:] for line in part), "```"]
        else:
            lines.append(outside_code("\n".join(part)))
        lines.append("")
    return "\n".join(lines).strip()


def paragraphs(text: str) -> Iterator[list[str]]:
    """What stands between empty lines; an example begins one of its own. Indented ones stay together."""
    part: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_example = line.lstrip().startswith(">>>") and not (part and part[0].lstrip().startswith(">>>"))
        if part and (not line.strip() or is_example):
            yield part
            part = []
        if line.strip():
            part.append(line)


def outside_code(text: str) -> str:
    """Prose with its patterns in code, and nothing in it taken for a tag or for emphasis by underscores."""
    parts = text.split("`")
    parts[::2] = [PATTERN.sub(r"`\1`", part) for part in parts[::2]]
    parts = "`".join(parts).split("`")
    parts[::2] = [part.replace("<", "\\<").replace("_", "\\_") for part in parts[::2]]
    return "`".join(parts)
