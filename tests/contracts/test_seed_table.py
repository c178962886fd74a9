"""docs/seed.md says where everything of candle-mi is: each row is tried, and nothing of the seed is left out.

The tables of the document are the data. What a table checks, its first column says: flags are settings or
options, fields are in the document of a small run, hook points are captured, names import, numbers are claims
of `mizarr replicate`. A row without a counterpart says why, in words.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import mizarr
from mizarr.workflows import WORKFLOWS, compute, kind_of
from mizarr.workflows.cli.group import cli
from mizarr.workflows.replications import REPLICATIONS

pytestmark = pytest.mark.wide

ROOT = Path(mizarr.__file__).parent
DOCUMENT = ROOT / "docs" / "seed.md"
SHARED = ROOT / ".." / "shared"
REASON = 6
"""Words a reason takes at least."""
PROMPT, TARGET = "The mother tongue of John Calvin is", "French"
FACT = {"prompt": PROMPT, "target": TARGET, "facts": 2, "controls": 1}
PAIRS = {"limit": 2, "others": 2, "donors": 1, "controls": 1}
SMALL: dict[str, dict[str, Any]] = {
    "logit_lens": {"prompts": [PROMPT], "answers": [TARGET]},
    "generate": {"prompts": [PROMPT], "max_tokens": 2},
    "attention_patterns": {"prompt": PROMPT},
    "attention_knockout": {**FACT, "sweep": False},
    "steering_dose_response": {**FACT, "doses": [0.5, 2.0], "sweep": False},
    "activation_patching": {
        "prompt": PROMPT,
        "corrupted": ["The mother tongue of Michael Albert is"],
        "pairs": 1,
        "kinds": ["resid_post"],
        "others": 2,
        "donors": 1,
        "controls": 2,
        "answer": TARGET,
    },
    "counterfact_patching": PAIRS,
    "factual_routing": PAIRS,
    "steering_convergence": {"controls": 1, "strength_steps": 1},
    "character_count_helix": {"characters": 3000, "widths": [40], "layers": [1], "min_tokens": 2},
    "token_positions": {},
    "rwkv_inference": {"facts": 2, "controls": 1, "scales": [2.0]},
    "recurrent_feedback": {"limit": 1, "sweep": False, "controls": 1, "max_tokens": 2},
    "planning_in_poems": {"controls": 1},
    "planning_pairs": {"limit": 1, "controls": 1},
    "attention_routing": {"controls": 1, "steps": 1},
    "clt_probe": {},
    "correction_test": {"controls": 1, "steps": 1},
    "clt_vs_plt": {"controls": 1, "prompt": "The native language of Raimu is", "site": "8"},
    "sae_features": {},
    "stoicheia_inference": {"samples": 1000},
    "stoicheia_analysis": {
        "samples": 1000,
        "analysed": 200,
        "controls": 2,
        "realisations": 1,
        "sigmas": [0.1],
        "budgets": [1000],
        "regions": 2,
    },
    "stoicheia_sweep": {
        "hidden": [2],
        "sequences": [2],
        "seeds": [0],
        "trained": [1024, 2048],
        "samples": 1000,
    },
    "inspect_weights": {},
    "logit_attribution": {"prompts": [PROMPT], "answers": [TARGET]},
    "layer_scan": {"samples": 4},
}
"""Settings of the run whose document is looked into: small, on the shipped models, each workflow once."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: the section it stands in, what its table is about, what the seed has, what is here, the rest."""

    section: str
    command: str
    about: str
    theirs: str
    here: str
    more: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why there is nothing here; empty where there is."""
        return self.here.partition("— ")[2] if self.here.startswith("—") else ""

    @property
    def code(self) -> list[str]:
        """What stands in code."""
        return spans(self.here)

    def __str__(self) -> str:
        return f"{self.section}-{self.theirs}"


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(text: str) -> Iterator[Row]:
    """Every row of every table, in order."""
    section = command = about = ""
    for line in text.splitlines():
        if line.startswith("#"):
            section, command, about = line.lstrip("# ").strip("`"), "", ""
        elif not line.startswith("|"):
            about = ""
            command = next((span for span in spans(line) if span.startswith("mizarr ")), command)
        elif not set(line) <= set("|- "):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if not about:
                about = cells[0]
            elif about == "number":
                yield Row(section, command, about, cells[0], cells[2], (cells[1],))
            else:
                yield Row(section, command, about, cells[0], cells[1], tuple(cells[2:]))


ROWS = list(rows(DOCUMENT.read_text("utf-8")))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a command of the document says as JSON, run once."""
    store = tmp_path_factory.mktemp("seed") / "store"

    @functools.cache
    def ask(command: str) -> Any:
        words = shlex.split(command)
        if words[1] == "compute":
            return json.loads(json.dumps(compute(words[2], store=store, **SMALL[words[2]]).to_json()))
        from click.testing import CliRunner

        done = CliRunner().invoke(cli, words[1:])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return ask


def holds(value: Any, path: list[str]) -> bool:
    """Whether a document has something at a path; of a list, any of its entries may have it."""
    for place, step in enumerate(path):
        if step == "[]":
            return isinstance(value, list) and any(holds(each, path[place + 1 :]) for each in value)
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


def steps(path: str) -> list[str]:
    """results[].layers -> results, [], layers."""
    return [step for step in re.split(r"\.|(\[\])", path) if step]


def command_named(words: list[str]) -> click.Command:
    """A command of the command line; AssertionError for one there is not."""
    found: click.Command = cli
    for word in words:
        if not isinstance(found, click.Group) or word not in found.commands:
            break
        found = found.commands[word]
    assert found is not cli, f"no command {' '.join(words)}"
    return found


def options_of(command: str) -> set[str]:
    return {option for param in command_named(shlex.split(command)[1:]).params for option in param.opts}


def settings_of(command: str) -> set[str]:
    kind = kind_of(shlex.split(command)[2]).settings_type
    return {field.name for field in dataclasses.fields(kind)}


def check_flag(row: Row, span: str) -> None:
    if span.startswith("--set "):
        assert span.removeprefix("--set ").partition("=")[0] in settings_of(row.command)
    elif span.startswith("--"):
        assert span in options_of(row.command)
    else:
        check_command(row, span)


def check_command(row: Row, span: str) -> None:
    words = shlex.split(span)
    assert words[0] == "mizarr"
    command_named(words[1:])
    if words[1:2] == ["compute"]:
        assert words[2] in WORKFLOWS
    if words[1:2] == ["replicate"]:
        assert words[2] in REPLICATIONS


def check_name(row: Row, span: str) -> None:
    parts = span.split(".")
    assert parts[0] == "mizarr", span
    for many in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:many]))
        except ModuleNotFoundError:
            continue
        for name in parts[many:]:
            fields = getattr(found, "__annotations__", {})
            found = fields[name] if name in fields and not hasattr(found, name) else getattr(found, name)
        return


def check_variable(row: Row, name: str, file: str) -> None:
    assert name in (ROOT / file).read_text("utf-8"), f"{file} does not read {name}"


def check_number(row: Row) -> None:
    asked, place = row.code
    name = asked.removeprefix("mizarr replicate ")
    (model,) = spans(row.more[0])
    (claim,) = (c for c in REPLICATIONS[name].claims if (c.model, c.place) == (model, place))
    printed = repr(claim.value) if isinstance(claim.value, str) else f"{claim.value:g}"
    assert row.theirs == printed


def check_hook_point(row: Row) -> None:
    (model,) = spans(row.more[0])
    if model.startswith("specimen-2nd"):
        from mizarr.stages.algzoo.model import load_model

        seen = load_model(model).forward(np.ones((1, 3)), mizarr.HookSpec().capture(*row.code))
        assert all(seen[name].numel() > 0 for name in row.code)
        return
    hooks = mizarr.HookSpec().capture(*row.code)
    cache = held_model(model).forward([[1, 2, 3]], hooks, want=None)
    for name in row.code:
        assert cache[name].numel() > 0
        assert str(mizarr.HookPoint.parse(name)) == name


@functools.cache
def held_model(name: str) -> mizarr.Model:
    return mizarr.Model.from_pretrained(name)


def check(row: Row, document: Callable[[str], Any]) -> None:
    """AssertionError for a row that does not hold."""
    assert row.theirs and row.here, "a row without an answer"
    if row.reason:
        assert len(row.reason.split()) >= REASON, "a reason says why"
        return
    assert not row.here.startswith("—"), "a reason stands behind the dash"
    if row.about == "field":
        found = document(row.command)
        for path in row.code:
            assert holds(found, steps(path)), f"{row.command} has no {path}"
    elif row.about == "flag":
        for span in row.code:
            check_flag(row, span)
    elif row.about == "program":
        for span in row.code:
            if span.startswith("mizarr "):
                check_command(row, span)
    elif row.about in ("name", "roadmap"):
        for span in row.code:
            check_name(row, span)
    elif row.about == "feature":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
        for span in row.code:
            check_name(row, span) if span.startswith("mizarr") else extras[span]
    elif row.about == "variable":
        check_variable(row, *row.code)
    elif row.about == "hook point":
        check_hook_point(row)
    elif row.about == "number":
        check_number(row)
    else:
        pytest.fail(f"nobody knows what a table of {row.about!r} holds")
    assert row.code, "an answer names something"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_row_holds(row: Row, document: Callable[[str], Any]) -> None:
    check(row, document)


BROKEN = [
    Row("logit_lens", "mizarr compute logit_lens --json", "field", "x", "`results[].no_such_field`"),
    Row("logit_lens", "mizarr compute logit_lens --json", "flag", "x", "`--set promt=…`"),
    Row("logit_lens", "mizarr compute logit_lens --json", "flag", "x", "`--outptu`"),
    Row("logit_lens", "mizarr compute logit_lens --json", "flag", "x", "`mizarr modls fetch`"),
    Row("logit_lens", "mizarr compute logit_lens --json", "flag", "x", ""),
    Row("logit_lens", "mizarr compute logit_lens --json", "flag", "x", "— not here"),
    Row("logit_lens", "mizarr compute logit_lens --json", "field", "x", "something like it"),
    Row("Names", "", "name", "x", "`mizarr.HookSpec.captur`"),
    Row("Hook points", "", "hook point", "x", "`blocks.1.hook_resid_pots`", ("`specimen`",)),
    Row("Hook points", "", "hook point", "x", "`rnn.hook_no`", ("`specimen-2nd-argmax-3`",)),
    Row("Numbers", "", "number", "0.5", "`mizarr replicate sae`, `mse`", ("`google/gemma-2-2b`",)),
    Row("Switches", "", "variable", "x", "`NO_SUCH_VARIABLE` in `stages/forward/models/files.py`"),
    Row("Switches", "", "feature", "x", "extra `probbing`"),
    Row("Somewhere", "", "gadget", "x", "`y`"),
]  # fmt: skip


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: f"{row.about}-{row.here}")
def test_a_row_that_does_not_hold_fails(row: Row, document: Callable[[str], Any]) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(row, document)


def test_every_workflow_that_was_a_program_there_is_asked_once_here() -> None:
    """The sections' commands are workflows, and each run that is prepared is some section's."""
    asked = {shlex.split(row.command)[2] for row in ROWS if row.command.startswith("mizarr compute ")}
    assert asked == set(SMALL)


def test_every_claim_is_among_the_numbers() -> None:
    told = [
        tuple(row.code) + tuple(spans(row.more[0]))
        for row in ROWS
        if row.about == "number" and not row.reason
    ]
    claims = [
        (f"mizarr replicate {name}", c.place, c.model)
        for name, each in REPLICATIONS.items()
        for c in each.claims
    ]
    assert sorted(told) == sorted(claims)


# -- nothing of the seed is left out


@pytest.fixture(scope="module")
def seed() -> str:
    """The seed's own documents, one after another."""
    if not SHARED.is_dir():
        pytest.skip("needs the seed's documents in ../shared")
    files = sorted((SHARED / "seeds").glob("*.txt"))
    return "\n".join(file.read_text("utf-8") for file in files)


TEXT = DOCUMENT.read_text("utf-8")


def test_every_hook_string_of_the_seed_is_in_the_table(seed: str) -> None:
    strings = {
        re.sub(r"\d+", "{i}", found)
        for found in re.findall(r"`(hook_[a-z_]+|blocks\.(?:\{i\}|\d+)\.[a-z_.]*hook_[a-z_]+)`", seed)
    }
    assert len(strings) > 15
    assert not {each for each in strings if f"`{each}`" not in TEXT} - {"hook_z", "hook_result"}


def test_every_example_program_of_the_seed_has_a_section(seed: str) -> None:
    programs = set(re.findall(r"example-output-(\w+)", seed)) | set(re.findall(r"├── (\w+)\.rs — .*✅", seed))
    sections = {row.section for row in ROWS} | {span for row in ROWS for span in spans(row.theirs)}
    tests = {name for name in programs if name.startswith(("validate_", "bench_"))}
    modules = {
        "lib",
        "backend",
        "hooks",
        "config",
        "error",
        "download",
        "mod",
        "attention",
        "mlp",
        "norm",
        "rope",
    }
    modules |= {"npz", "intervention", "steering", "activation", "kv", "rwkv", "masks", "pca", "positioning"}
    assert programs - tests - modules <= sections


def test_every_cargo_feature_of_the_seed_is_among_the_switches(seed: str) -> None:
    features = set(re.findall(r"^(?://! )?\| `([a-z-]+)` \| (?:yes|no) \|", seed, re.MULTILINE))
    told = {span for row in ROWS if row.about == "feature" for span in spans(row.theirs)}
    assert features and features <= told


def test_every_environment_variable_of_the_seed_is_told(seed: str) -> None:
    read = set(re.findall(r'env::var\("(\w+)"\)', seed))
    told = {span for row in ROWS if row.about == "variable" for span in spans(row.theirs)}
    assert read and read <= told


def test_every_field_of_the_seed_s_own_source_is_told(seed: str) -> None:
    """The one example whose source is there: its structs that are serialised."""
    structs = re.findall(r"#\[derive\(Serialize\)\]\nstruct \w+ \{(.*?)\n\}", seed, re.DOTALL)
    fields = {name for body in structs for name in re.findall(r"^\s+(\w+): ", body, re.MULTILINE)}
    told = {span for row in ROWS if row.section == "attention_knockout" for span in spans(row.theirs)}
    assert fields and fields <= told


@pytest.mark.parametrize(
    "folder", ["attention_knockout", "logit_lens", "attention_routing", "recurrent_feedback"]
)
def test_every_field_of_a_published_document_is_told(folder: str, seed: str) -> None:
    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {name for each in value.values() for name in names(each)}
        return {name for each in value for name in names(each)} if isinstance(value, list) else set()

    files = (SHARED / "reference" / "published" / folder).glob("*.json")
    published = {name for file in files for name in names(json.loads(file.read_text("utf-8")))}
    told = {span for row in ROWS if row.section == folder for span in spans(row.theirs)}
    assert published and published <= told


IN_SPEC = {
    "4.2 logit_lens": "logit_lens",
    "4.4 attention_knockout": "attention_knockout",
    "4.6 activation_patching": "activation_patching",
    "4.7 counterfact_patching": "counterfact_patching",
    "4.8 factual_routing": "factual_routing",
    "4.9 steering_convergence": "steering_convergence",
    "4.10 character_count_helix": "character_count_helix",
    "D.1 Figure 13": "figure13_planning_poems",
    "D.2 Attention routing": "attention_routing",
    "D.3 Feature probe": "clt_probe",
    "D.4 Correction test": "correction_test",
    "D.5 CLT vs PLT": "clt_vs_plt",
    "5.3 Protocol": "recurrent_feedback",
}
"""Section of the specification -> section of the table."""


@pytest.mark.parametrize("heading", IN_SPEC)
def test_every_field_the_specification_lists_is_told(heading: str, seed: str) -> None:
    spec = "\n".join(file.read_text("utf-8") for file in sorted((SHARED / "spec").glob("*.md")))
    body = re.search(rf"^#+ {re.escape(heading)}.*?\n(.*?)(?=^#+ )", spec, re.MULTILINE | re.DOTALL)
    assert body, "the specification has this section"
    lists = re.findall(r"JSON(?! is)[^:\n]*:\s(.*?)(?=External|\n\n|\Z|\n\||\n[A-Z])", body[1], re.DOTALL)
    listed = {name for each in lists for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", each)}
    section = [row for row in ROWS if row.section == IN_SPEC[heading]]
    told = {word for row in section for word in re.findall(r"\w+", f"{row.theirs} {row.here}")}
    assert listed, "fields with an underscore, which no prose has"
    assert listed <= told
