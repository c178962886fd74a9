"""`mizarr train` on a model of two layers, with token ids for prompts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr.stages.features.crosscoder import Crosscoder
from mizarr.stages.features.dictionary import Dictionary
from mizarr.workflows.cli import run
from mizarr.workflows.cli.runs import capture
from mizarr.workflows.cli.train import train

pytestmark = pytest.mark.wide

SETTINGS = (
    "features=24",
    "k=4",
    "steps=30",
    "batch=64",
    "window=256",
    "block=64",
    "validation=0.2",
    "lr=0.003",
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{[(7 * row + 3 * i) % 32 for i in range(20)]}\n" for row in range(16)))
    return str(path)


@pytest.fixture
def command(checkpoint, prompts, tmp_path):
    """Arguments of `mizarr train` on the tiny model."""
    fixed = ["train", checkpoint(), prompts, "--store", str(tmp_path / "store"), "--quiet"]

    def arguments(out, *more, settings=SETTINGS):
        return [*fixed, "--out", str(tmp_path / out), *(f"--set={said}" for said in settings), *more]

    return arguments


def test_an_autoencoder_is_trained_measured_and_exported(command, tmp_path, capsys):
    assert run(command("sae", "--json", "--set=layers=[1]")) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["held_out"]["layers"] == [1]
    assert figures["held_out"]["l0"][0] == pytest.approx(4, abs=1.5)
    assert set(figures["held_out"]["loss"]["places"]) == {"all", "1"}
    made = Dictionary.from_pretrained(tmp_path / "sae" / "dictionary")
    assert (made.kind, str(made.read_hook(1)), made.n_features) == ("sae", "blocks.1.hook_resid_post", 24)


def test_settings_come_from_a_file_and_the_command_line_goes_before_it(command, tmp_path, capsys):
    file = tmp_path / "clt.toml"
    file.write_text('kind = "clt"\nread = "hook_resid_mid"\nwrite = "hook_mlp_out"\nfeatures = 12\n')
    assert run(command("clt", "--config", str(file))) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["LAYER", "FVU", "L0", "DEAD"]
    made = Dictionary.from_pretrained(tmp_path / "clt" / "dictionary")
    assert (made.kind, made.layers, made.n_features) == ("clt", (0, 1), 24)


def test_what_is_done_is_not_done_again(command, tmp_path, capsys):
    assert run(command("sae", "--json")) == 0
    first = capsys.readouterr().out
    changed = (tmp_path / "sae" / "checkpoint.pt").stat().st_mtime_ns
    assert run(command("sae", "--json")) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "sae" / "checkpoint.pt").stat().st_mtime_ns == changed
    assert run(command("sae", "--set=seed=1")) == 2
    assert "a training with seed=0, but seed=1 was requested" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("k=40", "expected k, the number of active features, to be at most features=24, found k=40"),
        ("feature=3", "did you mean 'features'?"),
        ("steps=many", "expected steps to be int"),
        ("layers=[4]", "layer"),
        ("batch=100000", "expected stored activations of at least one batch of 100000 tokens"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_nothing_half_written(command, tmp_path, capsys, said, told):
    assert run(command("out", f"--set={said}", settings=[s for s in SETTINGS if s[:2] != said[:2]])) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_settings_are_listed(capsys):
    assert run(["train", "--settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert '--set kind="sae"' in lines[0]
    assert all(line.startswith("--set ") for line in lines)


CUT = """
import os, signal, sys
from mizarr.stages.features.training.trainer import Training
from mizarr.workflows.cli import main

save = Training.save

def save_and_press(self):
    save(self)
    if self.step == 5:
        os.kill(os.getpid(), signal.SIGINT)

Training.save = save_and_press
main(sys.argv[1:])
"""
ENDED = """
import json, sys
from mizarr.workflows.cli import run
for arguments in json.loads(sys.argv[1]):
    assert run(arguments) == 0
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, on one core: sums over several are not the same twice."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_control_c_leaves_a_checkpoint_and_the_same_command_ends_as_if_it_had_not_been(command, tmp_path):
    """Pressed while the first of several checkpoints is left: the step that follows is finished."""
    cut, whole = (command(out, "--save-every=5") for out in ("cut", "whole"))
    stopped = python(CUT, *cut)
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command resumes" in stopped.stderr
    held = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert 5 < held["step"] < 30
    assert not (tmp_path / "cut" / "dictionary").exists()
    ended = python(ENDED, json.dumps([cut, whole]))
    assert ended.returncode == 0, ended.stderr
    made = [(tmp_path / out / "dictionary").rglob("*.safetensors") for out in ("cut", "whole")]
    first, second = ([path.read_bytes() for path in sorted(files)] for files in made)
    assert first and first == second


def test_a_crosscoder_of_two_models_is_trained_measured_and_saved(command, tmp_path, capsys):
    """Of one model against a copy of it whose last layer is another."""
    arguments = command("cc", "--json", "--set=kind=crosscoder", "--set=layers=[1]")
    other = shutil.copytree(arguments[1], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    changed = {name: t.flip(0).contiguous() if ".1." in name else t for name, t in tensors.items()}
    save_file(changed, other / "model.safetensors")
    assert run([*arguments, "--against", str(other)]) == 0
    told = json.loads(capsys.readouterr().out)["held_out"]
    assert [place.split()[-1] for place in told["places"]] == ["blocks.1.hook_resid_post"] * 2
    assert told["places"][0] != told["places"][1]
    made = Crosscoder.load(tmp_path / "cc" / "dictionary")
    assert [str(place) for place in made.places] == told["places"]
    assert told["relative_norm"] == pytest.approx(made.relative_norm().tolist(), abs=1e-5)
    assert told["first_alone"] + told["second_alone"] <= told["alive"] <= 24
    # What was trained on one model alone is another training.
    assert run(arguments) == 2
    assert "holds a checkpoint of a training on other activations" in capsys.readouterr().err


def test_a_second_model_is_for_crosscoders_only(command, capsys):
    assert run(command("sae", "--against", "specimen")) == 2
    assert (
        "--against names a second model, which only a crosscoder has, found kind=sae"
        in capsys.readouterr().err
    )


# What it is trained on


def corpus_options(command):
    """Names and declarations of the options by which a command is told what it runs a model over."""
    names = ("prompts", "text", "context", "pack", "column", "labels", "whole_files", "share", "seed")
    return {name: next(p for p in command.params if p.name == name).to_info_dict() for name in names}


def test_a_corpus_is_named_as_for_capture():
    assert corpus_options(train) == corpus_options(capture)


@pytest.mark.parametrize(
    "more",
    [
        ("FOLDER", "--context", "8"),
        ("FOLDER", "--context", "8", "--pack"),
        ("FOLDER/*.jsonl", "--column", "tokens"),
        ("FOLDER/b.jsonl", "FOLDER/a.jsonl", "--column", "tokens", "--context", "6"),
        ("FOLDER", "--share", "0.7", "--seed", "0", "--column", "tokens", "--label", "n"),
    ],
)
def test_a_corpus_is_what_capture_makes_of_it(checkpoint, tmp_path, capsys, more):
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("a", "b"):
        rows = [{"ids": ids, "tokens": ids[::-1], "n": n} for n, ids in enumerate(drawn(name))]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, store = checkpoint(), str(tmp_path / "store")
    sources = [text.replace("FOLDER", str(folder)) for text in more]
    settings = [f"--set={said}" for said in (*SETTINGS, "layers=[1]")]
    told = ["--store", store, "--storage-dtype", "float16"]
    assert run(["train", model, *sources, *told, "--quiet", "--out", str(tmp_path / "out"), *settings]) == 0
    capsys.readouterr()
    hooks = ["--hooks", "blocks.1.hook_resid_post"]
    assert run(["capture", model, *sources, *told, *hooks, "--dry-run", "--json"]) == 0
    assert [step["state"] for step in json.loads(capsys.readouterr().out)["steps"]] == ["cached"]


def drawn(name):
    """Token ids of documents of several lengths."""
    shift = ord(name)
    return [[(7 * row + 3 * i + shift) % 32 for i in range(20 + row)] for row in range(12)]


def test_contexts_are_not_lines(checkpoint, tmp_path, capsys):
    """A document that is longer than a context is cut, and not refused."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps([i % 32 for i in range(3000)]) + "\n")
    settings = [f"--set={said}" for said in (*SETTINGS, "layers=[1]")]
    told = ["--store", str(tmp_path / "store"), "--quiet", "--out", str(tmp_path / "out"), *settings]
    model = checkpoint()
    assert run(["train", model, str(path), *told]) == 2
    assert "positions" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert run(["train", model, str(path), "--context", "16", *told]) == 0


@pytest.mark.parametrize("name", ["train", "capture"])
def test_prompts_themselves_are_no_corpus(checkpoint, tmp_path, capsys, name):
    more = ["--out", str(tmp_path / "out")] if name == "train" else ["--hooks", "*"]
    model = checkpoint()
    for option in (["--context", "8"], ["--pack"], ["--column", "x"], ["--label", "x"], ["--seed", "0"]):
        told = [name, model, "a prompt", "--text", *option, "--store", str(tmp_path / "store"), *more]
        assert run(told) == 2
        assert f"{option[0]} is an option for files of documents, but --text" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
