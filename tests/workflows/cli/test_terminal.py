"""What others wrote into files steers no terminal: control characters in it are shown, not obeyed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file, save_file

from mizarr.pipeline.progress import Progress
from mizarr.store import open_store
from mizarr.store.display.console import EscapingConsole
from mizarr.store.display.terminal import echo, escaped
from mizarr.store.errors import MizarrError
from mizarr.store.keys import ResultKey
from mizarr.workflows.cli import run as mizarr_command

FORWARD = Path(sys.modules["mizarr"].__file__).parent / "stages"
STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\r\x08"
"""Sets the title, clears the screen, colours (as C1), deletes, turns the direction, goes back."""
SENT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FILE_NAME = "\x1b[2J\x9b31m\u202e"
HOOK = ("--hooks", "blocks.0.hook_resid_post", "--store", "store")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, dictionaries, prompts, a file of arrays and stores that try to steer."""
    root = tmp_path_factory.mktemp("hostile")
    model = root / f"model{FILE_NAME}"
    shutil.copytree(FORWARD / "forward" / "specimen", model)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {f"model.{STEERING}": np.zeros(2, np.float32)}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {STEERING: STEERING, "_name_or_path": STEERING}))
    unknown = root / "unknown"
    shutil.copytree(model, unknown)
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": STEERING}))
    broken = root / f"broken{FILE_NAME}"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({STEERING: 1, "hidden_act": STEERING}))
    save_file({STEERING: np.zeros(2, np.float32)}, broken / "model.safetensors")
    sae = root / f"sae{FILE_NAME}"
    shutil.copytree(FORWARD / "features" / "specimen" / "sae", sae)
    for path in sae.rglob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_name": STEERING, STEERING: 1}))
    save_file({STEERING: np.zeros((2, 3), np.float32)}, root / "arrays.safetensors")
    np.savez(root / "arrays.npz", **{FILE_NAME: np.zeros((2, 3), np.float32)})
    (root / "prompts.txt").write_text(f"a prompt {FILE_NAME}\n")
    (root / "prompts.jsonl").write_text(json.dumps({STEERING: "a"}) + "\n")
    store = open_store(root / "store", durability="process")
    attributes = {STEERING: STEERING}
    result = xr.Dataset({"x": ("i", np.arange(3.0), attributes)}, attrs=attributes)
    store.put_result(ResultKey(f"stage{STEERING}", 1, {STEERING: STEERING}, {}), result)
    damaged = open_store(root / "damaged", durability="process")
    damaged.put_result(ResultKey(f"stage{STEERING}", 1, {}, {}), result)
    for path in (root / "damaged").rglob("c/0"):
        path.write_bytes(b"x" * path.stat().st_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in (model.name, "specimen"):
            code = mizarr_command(["capture", name, "prompts.txt", "--text", f"b{STEERING}", *HOOK, "-q"])
            assert code == 0
    refused = root / "refused"
    refused.mkdir()
    (refused / "store.json").write_text(json.dumps({"format": STEERING}))
    return root


def all_commands(root: Path) -> Iterator[tuple[str, ...]]:
    """Every command that reads files of others, at each of these files."""
    model, broken, sae = (next(root.glob(f"{name}*")).name for name in ("model", "broken", "sae"))
    store = open_store(root / "store", mode="r")
    for folder in (model, "unknown", broken, f"none{FILE_NAME}"):
        yield "models", "inspect", folder
        yield "models", "inspect", folder, "--shapes-only", "--json"
        yield "capture", folder, "--text", f"a{STEERING}", "--hooks", f"x{STEERING}", "--store", "store"
        yield "explain", "logit_lens", "--model", folder, "--set", f"prompts={json.dumps([STEERING])}"
    yield "compute", "logit_lens", "--model", model, "--set", f"prompts={json.dumps(['a' + STEERING])}", "-q"
    yield "compute", "generate", "--model", model, "--set", f"prompts={json.dumps(['a' + STEERING])}"
    prompts = f"prompts={json.dumps([STEERING])}"
    yield "report", "logit_lens", "--model", model, "--set", prompts, "--output", f"page{FILE_NAME}.html"
    yield "models", "ls"
    yield "features", "inspect", sae
    yield "features", "inspect", sae, "--json"
    yield "features", "inspect", broken
    for path in ("arrays.safetensors", "arrays.npz", f"none{FILE_NAME}.npz"):
        yield "import", path, "--model", STEERING, "--store", "imported"
        yield "import", path, "--model", STEERING, "--map", f"{FILE_NAME}=x", "--store", "imported"
    yield "capture", "specimen", "prompts.jsonl", *HOOK
    yield "capture", "specimen", "prompts.txt", *HOOK
    for name in ("store", "damaged", "refused"):
        for command in ("ls", "verify", "doctor"):
            yield command, "--store", name
            yield command, "--store", name, "--json"
        yield "ls", "--keys", "--store", name
        yield "gc", "--dry-run", "--grace", "0s", "--store", name
        yield "copy", name, f"copied from {name}{FILE_NAME}"
        yield "site", f"site{FILE_NAME}", "--store", name, "-q"
    yield "verify", "--quarantine", "--store", "damaged"
    yield "merge", "store", "damaged", "refused", f"merged{FILE_NAME}"
    yield "merge", "store", "damaged", f"merged{FILE_NAME}"
    for record in store.records():
        yield "show", record.key, "--store", "store"
        yield "show", record.key, "--json", "--store", "store"
        yield "pin", f"pin{FILE_NAME}", record.key, "--store", "store"
        yield "export", record.key, "--to", f"exported{FILE_NAME}.npz", "--store", "store"
    yield "show", f"none{STEERING}", "--store", "store"
    yield (f"none{STEERING}",)
    yield "compute", f"none{STEERING}"


@pytest.mark.filterwarnings("always")
def test_nothing_that_any_command_prints_steers_a_terminal(hostile, monkeypatch, capsys):
    monkeypatch.chdir(hostile)
    capsys.readouterr()
    steered, shown = {}, set()
    for command in all_commands(hostile):
        mizarr_command(list(command))
        printed = capsys.readouterr()
        text = printed.out + printed.err
        if sent := SENT.findall(text):
            steered[command[:2]] = sent
        if "\\x1b" in text or "\\u001b" in text:
            shown.add(command[0])
    assert not steered
    assert shown >= {"models", "capture", "ls", "show", "verify", "copy", "explain", "import", "features"}


def test_json_with_every_character_stays_json(capsys):
    from mizarr.workflows.cli.options import print_json

    value = {chr(code): chr(code) for code in [*range(0x100), 0x061C, *range(0x2028, 0x2070), 0xD800]}
    print_json(value)
    text = capsys.readouterr().out
    assert json.loads(text) == value and not SENT.search(text)


def test_a_cell_of_a_table_is_one_line(capsys):
    from mizarr.workflows.cli.options import print_table

    print_table(["A"], [{"A": "x\nmizarr: forged\ty"}])
    assert capsys.readouterr().out == "A\nx\\nmizarr: forged\\ty\n"


def test_text_without_control_characters_is_printed_as_it_stands(capsys):
    text = "naïve ☃ 日本語 🧑‍🚀\n\tשלום"
    assert escaped(text) == text
    echo(text)
    assert capsys.readouterr().out == text + "\n"


def test_rich_colours_tables_and_escapes_what_they_hold():
    file = StringIO()
    console = EscapingConsole(file=file, force_terminal=True, color_system="standard", width=200)
    table = Table("[bold]HEAD[/bold]", width=150)
    table.add_row(f"[red]a{STEERING}[/red]")
    table.add_row(Text(f"b{STEERING}"))
    console.print(table)
    console.print(STEERING, style="bold", markup=False)
    sent = set(re.findall("\x1b.{0,4}", file.getvalue()))
    assert sent and all(re.match("\x1b\\[[0-9;]*m", sequence) for sequence in sent)
    without_styles = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert not SENT.search(without_styles)
    assert without_styles.count("\\x1b]0;owned") == 3


def test_bars_escape_their_labels_and_what_is_printed_between(monkeypatch):
    screen = StringIO()
    screen.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress() as bars:
        bar = bars.task(f"[red]reading[/] {STEERING}", total=2)
        bar.advance()
        bars.say(f"said {STEERING}")
        echo(f"printed {STEERING}", err=True)
    text = screen.getvalue()
    assert "\x1b[2J" not in text and "\x1b]0" not in text
    assert all(f"{word} \\x1b]0;owned" in text for word in ("[red]reading[/]", "said", "printed"))


@pytest.mark.parametrize(
    "how", ["raise ValueError(TEXT)", "warnings.warn(TEXT)", "logging.getLogger('x').warning(TEXT)"]
)
def test_what_python_itself_reports_is_escaped(how):
    """`main` is the whole process: tracebacks of defects, warnings and logs of libraries pass, too."""
    code = (
        f"import sys, warnings, logging\nTEXT = {STEERING!r}\n"
        "from mizarr.workflows.cli import group\n"
        "def run(args):\n"
        f"    {how}\n"
        "    return 0\n"
        "group.run = run\ngroup.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "\\x1b]0;owned" in done.stderr
    assert not SENT.search(done.stderr)


def test_a_thread_that_fails_is_reported_with_escapes():
    code = (
        "import threading\nfrom mizarr.store.display.terminal import escape_reports_of_python\n"
        "escape_reports_of_python()\n"
        f"def fail():\n    raise ValueError({STEERING!r})\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "\\x1b]0;owned" in done.stderr and not SENT.search(done.stderr)


def test_errors_are_one_escaped_line(capsys, monkeypatch):
    from mizarr.workflows.cli import group

    def fail(*_: object, **__: object) -> None:
        raise MizarrError(f"a {STEERING}\nb")

    monkeypatch.setattr(group.cli, "main", fail)
    assert mizarr_command(["ls"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "\\x1b]0;owned" in told and not SENT.search(told)
