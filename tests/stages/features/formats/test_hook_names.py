"""Hook points of a dictionary come from its files or from the caller, and modules of transformers are the
hook points that hold the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mizarr
from mizarr.stages.features.corpus.encode import encode_corpus
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.layers.names import module_hook, parse_hook, require_module_output
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.workflows.cli import cli

from ....random_dictionaries import (
    draw,
    save_random_sae,
    write_clt,
    write_config,
    write_saelens,
    write_sparsify,
)
from ...forward.random_hybrids import DRAWS, save_random_hybrid
from ...forward.random_models import save_random_model

IDS = [3, 7, 12, 30, 4, 9, 2, 40]
UNKNOWN = "model.layers.3.post_attention_layernorm"
"""Of a module that stands in different places in different families."""


# -- names of modules


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("transformer.h.2", "resid_post", 2),
        ("model.layers.3", "resid_post", 3),
        ("model.language_model.layers.3", "resid_post", 3),
        ("gpt_neox.layers.3.mlp", "mlp_post", 3),
        ("model.layers.3.mlp", "mlp_post", 3),
        ("model.layers.3.mlp.input", "mlp_pre", 3),
        ("model.layers.3.self_attn", "attn_out", 3),
        ("model.layers.3.self_attn.o_proj.input", "z", 3),
        ("layers.12.post_feedforward_layernorm", "mlp_out", 12),
        ("blocks.3.hook_resid_pre", "resid_pre", 3),
        ("blocks.3.mlp.hook_in", "mlp_pre", 3),
        ("hook_resid_pre", "resid_pre", None),
        ("hook_embed", "embed", None),
    ],
)
def test_names_of_hook_points(name: str, kind: str, layer: int | None):
    assert parse_hook(name)[:2] == (kind, layer)


@pytest.mark.parametrize(
    "name",
    [UNKNOWN, "vision_tower.layers.3.mlp", "model.encoder.layers.3", "transformer.h.3.self_attention", "x"],
)
def test_names_that_mean_different_things_are_refused_with_what_helps(name: str):
    with pytest.raises(mizarr.MizarrError, match=r"which is not known.*read= and write=.*'NAME\?read="):
        parse_hook(name)


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("llama", {}),
        ("gemma2", {"self_attn": "before the norm"}),
        ("olmo2", {"self_attn": "before the norm"}),
        ("granite", {"self_attn": "residual multiplier", "mlp": "residual multiplier"}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("bloom", {"mlp": "stream added to it"}),
        ("falcon", {}),
        ("minimax", {"self_attn": "before the", "mlp": "before the"}),
    ],
)
def test_a_module_is_the_hook_point_that_holds_what_it_gives(family: str, refused: dict, tmp_path: Path):
    """In every layer, for inputs and outputs; where it is refused, it does hold something else."""
    save: Any = save_random_hybrid if family in DRAWS else save_random_model
    reference = save(tmp_path, family, 1, **({"residual_multiplier": 0.3} if family == "granite" else {}))
    model = mizarr.Model.from_pretrained(tmp_path)
    given: dict[tuple[str, str], torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            given[name, "input"] = args[0] if args else kwargs.get("hidden_states")
            given[name, "output"] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    for name, module in reference.named_modules():
        if module_hook(name, "output"):
            module.register_forward_hook(keep(name), with_kwargs=True)
    with torch.no_grad():
        reference(torch.tensor([IDS]))
    found = {}
    for (name, end), expected in given.items():
        hook = module_hook(name, end)
        if hook is None or expected is None:
            continue
        point = HookPoint(hook.kind, hook.layer)
        if point not in model.config.hook_points:
            continue
        ours = model.forward([IDS], mizarr.HookSpec().capture(point))[point]
        ours = ours.transpose(1, 2).flatten(2) if ours.ndim == 4 else ours
        is_same = bool((ours - expected).abs().max() <= 1e-4 * expected.abs().max())
        try:
            require_module_output(hook, model.config, family)
        except mizarr.MizarrError as error:
            found[name.rpartition(".")[2].replace("o_proj", "self_attn")] = str(error)
            assert not is_same, name
        else:
            assert is_same, name
    assert len(given) >= 4
    assert found.keys() == refused.keys()
    assert all(reason in found[module] for module, reason in refused.items())


def test_a_model_whose_module_gives_something_else_is_refused(tmp_path: Path):
    save_random_model(tmp_path / "gemma2", "gemma2", 1)
    model = mizarr.Model.from_pretrained(tmp_path / "gemma2")
    width = model.config.hidden_size
    write_saelens(tmp_path / "sae", draw(d_in=width), metadata={"hook_name": "model.layers.1.self_attn"})
    dictionary = Dictionary.from_pretrained(tmp_path / "sae")
    with pytest.raises(
        mizarr.MizarrError, match=r"attn_out in gemma2, found one of 'model.layers.1.self_attn', where"
    ):
        dictionary.require_fit(model.config, "gemma2")
    hooks = mizarr.HookSpec().capture("blocks.1.hook_attn_out", reduce=dictionary)
    store = mizarr.open_store(tmp_path / "store")
    with pytest.raises(mizarr.MizarrError, match="where the module gives its output before the norm"):
        mizarr.capture(model, [IDS], hooks=hooks, store=store)
    said = Dictionary.from_pretrained(tmp_path / "sae", read="hook_attn_out")
    said.require_fit(model.config, "gemma2")


# -- the caller says it


def unknown_sae(folder: Path, hook: str = UNKNOWN) -> Path:
    """An autoencoder for the specimen whose hook point is not known."""
    save_random_sae(folder, layer=3, hidden=192)
    path = folder / "cfg.json"
    config = json.loads(path.read_text())
    config["metadata"]["hook_name"] = hook
    path.write_text(json.dumps(config))
    return folder


def test_what_the_caller_says_opens_what_the_files_cannot(tmp_path: Path):
    folder = unknown_sae(tmp_path / "sae")
    with pytest.raises(mizarr.MizarrError, match="is not known"):
        Dictionary.from_pretrained(folder)
    said = Dictionary.from_pretrained(folder, read="hook_resid_mid")
    behind = Dictionary.from_pretrained(f"{folder}?read=hook_resid_mid")
    assert [str(said.read_hook(3)), str(said.write_hook(3))] == ["blocks.3.hook_resid_mid"] * 2
    assert said.name == behind.name == f"{folder}?read=hook_resid_mid"
    assert said.identity == behind.identity
    both = Dictionary.from_pretrained(folder, read="hook_resid_mid", write="hook_mlp_out")
    assert (both.kind, both.name) == ("plt", f"{folder}?read=hook_resid_mid&write=hook_mlp_out")
    assert both.identity != said.identity


def test_an_autoencoder_that_is_read_elsewhere_writes_there(tmp_path: Path):
    write_sparsify(tmp_path / "layers.2", draw())
    said = Dictionary.from_pretrained(tmp_path / "layers.2", read="hook_resid_mid")
    assert (said.kind, str(said.write_hook(2))) == ("sae", "blocks.2.hook_resid_mid")


def test_the_layer_comes_from_the_caller_where_files_do_not_say_it(tmp_path: Path):
    for hook in (None, "encoder"):
        folder = unknown_sae(tmp_path / str(hook), hook)  # type: ignore[arg-type]
        with pytest.raises(mizarr.MizarrError, match="expected the layer that the features in"):
            Dictionary.from_pretrained(folder, read="hook_resid_post")
        said = Dictionary.from_pretrained(folder, read="blocks.4.hook_resid_post")
        assert said.layers == (4,)
        assert Dictionary.from_pretrained(said.name).layers == (4,)


def test_another_layer_than_that_of_the_files_is_refused(tmp_path: Path):
    sae = unknown_sae(tmp_path / "sae", "blocks.3.hook_resid_post")
    with pytest.raises(mizarr.MizarrError, match=r"hook point of layer 3 as read=, .* read='hook_resid_pre'"):
        Dictionary.from_pretrained(sae, read="blocks.4.hook_resid_pre")
    layers = [draw(layer) for layer in range(2)]
    write_clt(
        tmp_path / "clt", [{**w, "W_dec": w["W_dec"][:, None].repeat(2 - n, 1)} for n, w in enumerate(layers)]
    )
    write_config(tmp_path / "clt", "cross_layer_transcoder")
    with pytest.raises(mizarr.MizarrError, match="of layers 0 to 1 as write="):
        Dictionary.from_pretrained(tmp_path / "clt", write="blocks.0.hook_mlp_out")


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("?reads=hook_resid_mid", "expected read=HOOK or write=HOOK after"),
        ("?read=", "expected read=HOOK or write=HOOK after"),
        ("?read=hook_resid_psot", "found 'hook_resid_psot', which is not known .did you mean"),
    ],
)
def test_a_name_that_says_something_else_is_refused(query: str, told: str, tmp_path: Path):
    folder = unknown_sae(tmp_path / "sae")
    with pytest.raises(mizarr.MizarrError, match=told):
        Dictionary.from_pretrained(f"{folder}{query}")
    with pytest.raises(mizarr.MizarrError, match="expected one hook point as read= for"):
        Dictionary.from_pretrained(f"{folder}?read=hook_resid_mid", read="hook_resid_pre")


def test_every_door_takes_it(tmp_path: Path):
    """Stages that open the dictionary again, workflows by its name, reductions and commands."""
    folder = unknown_sae(tmp_path / "sae")
    dictionary = Dictionary.from_pretrained(folder, read="hook_resid_mid")
    model = mizarr.Model.from_pretrained("specimen")
    store = mizarr.open_store(tmp_path / "store", durability="process")
    point = dictionary.read_hook(3)
    x = model.forward(["The cat sat"], mizarr.HookSpec().capture(point))[point][0]
    expected = sorted(dictionary.encode({3: x}, zero_positions=1).indices[:, 2].tolist())
    encoded = encode_corpus(dictionary, model, ["The cat sat"], store=store, zero_positions=1)
    assert sorted(encoded["feature"].values.tolist()) == expected
    work = mizarr.compute(
        "sae_features", dictionary=dictionary.name, layer=3, prompt="The cat sat", store=store
    )
    assert work.hook == str(point)
    runner = CliRunner()
    for arguments in (
        ["features", "inspect", str(folder), "--read", "hook_resid_mid", "--json"],
        ["features", "inspect", dictionary.name, "--json"],
    ):
        shown = runner.invoke(cli, arguments)
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.output)["read"] == [str(point)]
    ways = ["--hooks", str(point), "--reduce", f"features:{dictionary.name}"]
    asked = ["capture", "specimen", "The cat", "--text", *ways]
    done = runner.invoke(cli, [*asked, "--store", str(tmp_path / "store"), "--quiet"])
    assert done.exit_code == 0, done.output
