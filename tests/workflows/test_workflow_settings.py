"""Workflows by name, and their settings as the command line or JSON gives them."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
import torch

from mizarr.pipeline.nodes import Node
from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.store.errors import ConfigError, ModelNotFound, PromptError
from mizarr.workflows import WORKFLOWS, build, compute, kind_of
from mizarr.workflows.settings import Count, Share, as_given, read_settings, setting


@dataclass(frozen=True)
class Settings:
    widths: tuple[int, ...] = setting((20, 30), "line widths")
    scale: float = setting(1.0, "a number")
    layer: int | None = setting(None, "a layer")
    centre: bool = setting(True, "a switch")
    text: str = setting("", "a file")
    rank: Count | None = setting(None, "at least 1")
    part: Share = setting(0.5, "from 0 to 1")
    kind: Literal["mean", "zero"] = setting("mean", "one of two")
    place: int | tuple[int | str, ...] = setting(0, "one, or several")


def read(**given: object) -> Settings:
    return read_settings(Settings, "demo", given)


def test_defaults_hold_where_nothing_is_given():
    assert read() == Settings()


def test_json_values_are_taken_as_the_fields_say():
    found = read(widths=[1, 2], scale=3, layer=4, centre=False, text="a")
    assert found == Settings((1, 2), 3.0, 4, False, "a")
    assert isinstance(found.scale, float)
    assert read(widths=7).widths == (7,)
    assert read(layer=None).layer is None
    assert read(rank=2, part=1, kind="zero").part == 1.0
    assert read(place=["a", 3]).place == ("a", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("widths", ["a"]),
        ("widths", "20,30"),
        ("scale", "1"),
        ("layer", 1.5),
        ("layer", True),
        ("centre", 1),
        ("text", 3),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object):
    with pytest.raises(ConfigError, match=f"expected {name} to be"):
        read(**{name: value})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rank": 0}, "expected rank to be int of at least 1 | None, found 0 (int)"),
        ({"part": 1.5}, "expected part to be float of at least 0 and at most 1, found 1.5 (float)"),
        ({"kind": "zer"}, "expected kind to be mean or zero, found 'zer' (str); did you mean 'zero'?"),
        ({"layer": 2.0}, "expected layer to be int | None, found 2.0 (float)"),
    ],
)
def test_a_value_out_of_bounds_is_told_what_was_expected_and_the_nearest(given, complaint):
    with pytest.raises(ConfigError) as told:
        read(**given)
    assert str(told.value) == complaint


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'widths'"):
        read(width=3)


def test_an_unknown_workflow_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'logit_lens'"):
        build("logitlens")


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("logit_lens", {"top_k": 0}, "top_k"),
        (
            "logit_lens",
            {"prompts": ["a", "b", "c"], "answers": ["x", "y"]},
            r"one answer for all prompts, or one per prompt \(3\), found 2",
        ),
        ("character_count_helix", {"widths": [1]}, "a list of int of at least 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(name, given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build(name, **given)


# -- which of a model's files, and where it computes


def sources_of(nodes: Any) -> list[Any]:
    """The models that the nodes of a graph run."""
    found: list[Any] = []
    waiting: list[Node] = list(nodes)
    while waiting:
        node = waiting.pop()
        waiting += node.inputs
        found += [node.source] if hasattr(node, "source") else []
    return found


OF_HUB_MODELS = [
    name
    for name in WORKFLOWS
    if {"revision", "device"} <= {field.name for field in fields(kind_of(name).settings_type)}
]
"""Workflows about a model of the hub: those of AlgZoo are files, which have no revisions and need no
device."""


def test_only_questions_about_files_of_their_own_know_no_revision():
    assert set(WORKFLOWS) - set(OF_HUB_MODELS) == {
        "stoicheia_inference",
        "stoicheia_analysis",
        "stoicheia_sweep",
    }


@pytest.mark.parametrize("name", OF_HUB_MODELS)
def test_every_workflow_asks_for_the_revision_it_was_given(name):
    with pytest.raises(
        ModelNotFound, match=r"expected no revision for .* specimen(-guided|-rwkv|-experts)?, found 'v2'"
    ):
        build(name, revision="v2")


OF_FILES = ("inspect_weights", "ov_qk", "composition", "token_positions", "clt_vs_plt")
"""Workflows that run no model."""


@pytest.mark.parametrize("name", OF_HUB_MODELS)
def test_every_model_that_runs_does_so_on_the_device_it_was_given(name):
    sources = sources_of(build(name, device="cuda:7").nodes.values())
    assert {source.device for source in sources} <= {"cuda:7"}
    assert sources or name in OF_FILES


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub id in a cache of two revisions: `main` is the tiny model, `v2` has a layer norm doubled."""
    from safetensors.torch import load_file, save_file

    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for reference, scale in (("main", 1), ("v2", 2)):
        snapshot = repository / "snapshots" / f"commit-{reference}"
        snapshot.mkdir(parents=True)
        (repository / "refs" / reference).write_text(snapshot.name)
        for file in tiny_model.iterdir():
            (snapshot / file.name).write_bytes(file.read_bytes())
        tensors = load_file(snapshot / "model.safetensors")
        tensors["model.layers.0.input_layernorm.weight"] *= scale
        save_file(tensors, snapshot / "model.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return "org/tiny"


def test_a_revision_decides_which_model_it_is_and_a_device_does_not(hub: str, tmp_path: Path):
    about: dict[str, Any] = {"model": hub, "prompts": ["it was the age of"], "store": tmp_path / "store"}
    main, other, here = (
        compute("logit_lens", **about, **more) for more in ({}, {"revision": "v2"}, {"device": "cpu"})
    )
    keys = [done.header()["provenance"]["keys"]["lens"] for done in (main, other, here)]
    assert keys[0] == keys[2] != keys[1]
    difference = main.result("lens")["top_logprob"] - other.result("lens")["top_logprob"]
    assert abs(difference).max() > 1e-3


def test_a_loaded_model_of_a_revision_is_taken_with_that_revision(hub: str):
    from mizarr import Model

    loaded = Model.from_pretrained(hub, revision="v2")
    found = build("ablation", model=loaded, revision="v2", prompt="it was", target=" the")
    assert found.subject.files.revision == "commit-v2"


def test_nodes_get_the_snapshot_that_a_branch_was_when_it_was_named(hub: str):
    found = build("ablation", model=hub, revision="v2", prompt="it was", target=" the")
    assert found.subject.source.revision == "commit-v2"


def test_a_device_beside_a_loaded_model_is_refused(tiny_model: Path):
    from mizarr import Model

    with pytest.raises(
        ConfigError, match="expected device together with the name of a model, found device='cuda:1'"
    ):
        build("logit_lens", model=Model.from_pretrained(tiny_model, device="cpu"), device="cuda:1")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(tiny_model: Path, tmp_path: Path, device: str):
    assert torch.cuda.device_count() < 99
    with pytest.raises(ConfigError, match=f"expected a device .* found {device!r}") as told:
        compute("logit_lens", model=str(tiny_model), device=device, store=tmp_path, prompts=["it was"])
    assert "\n" not in str(told.value)


def test_capture_and_demo_take_revision_and_device(
    hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import json

    from mizarr.workflows.cli import run

    runs = []
    for more in ([], ["--revision", "v2"]):
        words = ["capture", hub, "it was", "--text", "--hooks", "hook_embed", "--json", "--quiet"]
        assert run([*words, "--store", str(tmp_path / "store"), "--device", "cpu", *more]) == 0
        runs.append(json.loads(capsys.readouterr().out)["run"])
    assert runs[0] != runs[1]
    assert run(["demo", "--output", str(tmp_path / "demo"), "--revision", "v3", "--device", "cpu"]) == 2
    assert "expected no revision for the directory specimen" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "compute", "report"])
def test_commands_on_workflows_take_both_as_settings(command: str, capsys: pytest.CaptureFixture[str]):
    from mizarr.workflows.cli import run

    assert run([command, "logit_lens", "--set", "revision=v3", "--set", "device=cpu"]) == 2
    assert "expected no revision for the directory specimen, found 'v3'" in capsys.readouterr().err


EMPTY = ["", [], (), np.array([]), pd.Series([], dtype=object), iter(()), {}]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_empty_setting_is_refused_and_does_not_mean_the_default(name):
    kind = kind_of(name).settings_type
    for field in fields(kind):
        for empty in EMPTY:
            with pytest.raises(ConfigError, match=rf"expected {field.name} .*that is not empty, found"):
                build(name, **{field.name: copy(empty)})
    left_out = {field.name: None for field in fields(kind)}
    assert read_settings(kind, name, left_out) == kind(
        **{field.name: None for field in fields(kind) if "None" in str(field.type)}
    )


@pytest.mark.parametrize("name", WORKFLOWS)
def test_settings_of_a_document_are_read_again(name):
    kind = kind_of(name).settings_type
    plain = json.loads(json.dumps(as_given(kind())))
    assert read_settings(kind, name, plain) == kind()


def test_an_empty_setting_of_a_training_is_refused():
    for field in fields(TrainingSettings):
        with pytest.raises(ConfigError, match=rf"expected {field.name} .*that is not empty"):
            read_settings(TrainingSettings, "train", {field.name: []})


def test_settings_are_read_from_arrays_series_and_generators():
    assert read(widths=np.array([1, 2])).widths == (1, 2)
    assert read(widths=(width for width in (1, 2))).widths == (1, 2)
    assert read(widths=pd.Series([1])).widths == (1,)
    assert read(layer=np.int64(0)).layer == 0
    assert read(scale=np.float32(0.0)).scale == 0.0
    prompts = kind_of("logit_lens").settings_type
    assert read_settings(prompts, "logit_lens", {"prompts": pd.Series(["a", "b"])}).prompts == ("a", "b")


@pytest.mark.parametrize(
    "wrong", [[None], [1.5], [b"a"], pd.Series(["a", np.nan]), ["a", ["b"]], [{"text": "a"}], 5]
)
def test_prompts_of_a_workflow_that_are_no_texts_are_refused(wrong):
    with pytest.raises(ConfigError, match="expected prompts to be"):
        build("logit_lens", prompts=wrong)


@pytest.mark.parametrize("model", [5, ["specimen"], {"model": "specimen"}, b"specimen", 0, False])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(ConfigError, match="expected model to be str"):
        build("logit_lens", model=model)


def test_half_a_surrogate_pair_is_refused():
    for given in ({"prompts": ["a", "\ud800"]}, {"prompts": "\ud800"}):
        with pytest.raises(
            PromptError,
            match=r"prompts: expected valid Unicode text, found half of a surrogate pair .* at character 0",
        ):
            build("logit_lens", **given)


def test_nothing_is_said_of_rewards_in_training_where_the_model_has_none_on_file(tiny_model: Path):
    planned = build("logit_lens", model=str(tiny_model), prompts=["it was"])
    assert planned.trained_with_help == "" and "trained_with_help" not in planned.header()
    assert "rewarded" not in planned.footer
