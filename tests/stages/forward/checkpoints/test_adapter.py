"""LoRA adapters: merged as PEFT merges them, part of the identity, refused where they cannot be merged."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import Model
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.models.reference import ModelRef
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.logits.component_weights import component_weights
from mizarr.stages.logits.readout import readout_from_files
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, ModelNotFound, WeightsError
from mizarr.workflows import build
from mizarr.workflows.cli import run as mizarr_command
from tests.layer_parts import part_of

from .. import random_models

IDS = [5, 17, 3, 250, 9, 9, 31]
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "memo"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    random_models.save_random_model(folder, "llama", 3, tie_word_embeddings=False)
    return folder


def save_adapter(folder, base, config, *, modules=("q_proj", "down_proj"), whole=(), seed=0):
    """Random factors for modules of every layer, and tensors that replace the base's; returns (name of a base
    tensor -> literal product B A, name -> replacement)."""
    made = torch.Generator().manual_seed(seed)
    held, products, replaced = {}, {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name in whole:
            replaced[name] = torch.randn(weight.shape, generator=made)
            held[f"base_model.model.{name}"] = replaced[name]
        if module.endswith(modules) and weight.ndim == 2:
            rank = next(
                (r for key, r in config.get("rank_pattern", {}).items() if key in module), config["r"]
            )
            into, out = (
                torch.randn(shape, generator=made) * 0.1
                for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
            )
            held[f"base_model.model.{module}.lora_A.weight"] = into
            held[f"base_model.model.{module}.lora_B.weight"] = out
            products[name] = out.double() @ into.double()
    folder.mkdir(exist_ok=True)
    save_file(held, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return products, replaced


def merged(base, folder, products, replaced, scale):
    """A checkpoint of its own, merged entry by entry in float64."""
    shutil.copytree(base, folder)
    held = load_file(base / "model.safetensors") | replaced
    for name, product in products.items():
        held[name] = (held[name].double() + scale(name) * product).float()
    save_file(held, folder / "model.safetensors")
    return folder


def logits(model):
    return model.forward(IDS).logits[0]


CASES = {
    "plain": (PLAIN, {}, lambda name: 6 / 4),
    "rank-stabilised": (PLAIN | {"use_rslora": True}, {}, lambda name: 6 / 2),
    "modules trained whole": (
        PLAIN | {"modules_to_save": ["lm_head", "norm"]},
        {"whole": ("lm_head.weight", "model.norm.weight")},
        lambda name: 6 / 4,
    ),
    "patterns": (
        PLAIN | {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 9}},
        {},
        lambda name: 9 / 4 if "down" in name else 6 / 2 if "layers.1" in name else 6 / 4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapted_model_is_the_merged_checkpoint(base, tmp_path, case):
    config, how, scale = CASES[case]
    products, replaced = save_adapter(tmp_path / "adapter", base, config, **how)
    expected = merged(base, tmp_path / "merged", products, replaced, scale)
    adapted, plain = (
        Model.from_pretrained(base, device="cpu", adapter=a) for a in (tmp_path / "adapter", None)
    )
    other = Model.from_pretrained(expected, device="cpu")
    size = float(logits(other).abs().max())
    assert float((logits(adapted) - logits(other)).abs().max()) <= 1e-5 * size
    assert float((logits(plain) - logits(other)).abs().max()) > 1e-3 * size


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
def test_patterns_in_another_order_are_another_adapter(base, tmp_path, key):
    """The first pattern that fits a module counts, so the order decides numbers."""
    low, high = ("q_proj", 4), ("self_attn.*", 64 if key == "alpha_pattern" else 4)
    save_adapter(tmp_path / "adapter", base, PLAIN)
    config, found = tmp_path / "adapter" / "adapter_config.json", []
    for patterns in ([low, high], [high, low], [low, high]):
        # Both orders load: the rank of the factors is the same under either.
        config.write_text(json.dumps(PLAIN | {key: dict(patterns)}))
        model = Model.from_pretrained(base, device="cpu", adapter=tmp_path / "adapter")
        found.append((model.require_identity().digest, logits(model)))
    assert found[0][0] == found[2][0] != found[1][0]
    assert torch.equal(found[0][1], found[2][1])
    assert torch.equal(found[0][1], found[1][1]) == (key == "rank_pattern")


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("patterns", [["q_proj"], "q_proj", {"q_proj": "4"}, {"q_proj": True}, {"(": 4}])
def test_patterns_of_another_kind_are_refused(base, tmp_path, key, patterns):
    save_adapter(tmp_path / "adapter", base, PLAIN)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(PLAIN | {key: patterns}))
    with pytest.raises(ConfigError, match=rf"expected (r|lora_alpha|{key}|regular expressions in {key})\b"):
        Model.from_pretrained(base, device="cpu", adapter=tmp_path / "adapter")


def test_bfloat16_is_rounded_once_after_merging(base, tmp_path):
    products, _ = save_adapter(tmp_path / "adapter", base, PLAIN)
    model = Model.from_pretrained(base, device="cpu", dtype="bfloat16", adapter=tmp_path / "adapter")
    name = "model.layers.1.mlp.down_proj.weight"
    held = load_file(base / "model.safetensors")[name]
    expected = (held + 1.5 * products[name].float()).bfloat16()
    assert (part_of(model.network.weights.layers[1], "down").weight != expected).float().mean() < 0.01


def test_readout_and_component_weights_are_those_of_the_adapted_model(base, tmp_path):
    config = PLAIN | {"modules_to_save": ["lm_head"]}
    products, replaced = save_adapter(
        tmp_path / "adapter", base, config, modules=("o_proj",), whole=("lm_head.weight",)
    )
    expected = merged(base, tmp_path / "merged", products, replaced, lambda name: 6 / 4)
    ours, other = resolve(base, adapter=tmp_path / "adapter"), resolve(expected)
    for read in (readout_from_files, lambda *a: component_weights(*a, "attention")):
        found, wanted = (read(f.checkpoint, f.architecture()).compute() for f in (ours, other))
        for name in wanted.drop_vars("token", errors="ignore"):
            np.testing.assert_allclose(found[name].values, wanted[name].values, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(
        readout_from_files(ours.checkpoint, ours.architecture())["unembed"].values, replaced["lm_head.weight"]
    )


def test_the_identity_moves_with_what_decides_a_number_and_with_nothing_else(base, tmp_path):
    folder = tmp_path / "adapter"
    save_adapter(folder, base, PLAIN)

    def identity(**edits):
        (folder / "adapter_config.json").write_text(json.dumps(PLAIN | edits))
        return resolve(base, adapter=folder).identity().digest

    first = identity()
    assert first != resolve(base).identity().digest
    assert identity(lora_dropout=0.3, base_model_name_or_path="elsewhere", inference_mode=True) == first
    assert len({first, identity(lora_alpha=7), identity(use_rslora=True)}) == 3
    identity()
    save_adapter(folder, base, PLAIN, seed=1)
    assert resolve(base, adapter=folder).identity().digest != first


def test_the_name_holds_the_adapter_for_workers_settings_and_notes(base, tmp_path):
    folder = tmp_path / "adapter"
    save_adapter(folder, base, PLAIN)
    source = ModelSource(ModelRef(str(base), adapter=folder))
    assert source.name == f"{base} (adapter {folder})"
    again = resolve(source.name)
    assert again.identity() == source.identity and again.adapter == folder
    assert torch.equal(logits(source.load()), logits(Model.from_pretrained(source.name, device="cpu")))
    store = open_store(tmp_path / "store")
    done = build("logit_lens", model=str(base), adapter=folder, prompts=("Paris",), top_k=2).run(store)
    assert done.settings.model == source.name
    notes = [note for record in store.records() for note in store.provenance(record.key)]
    notes = [note for note in notes if "model" in note]
    assert {note["model"] for note in notes} == {source.name}


def test_the_command_line_takes_an_adapter_once(base, tmp_path, capsys):
    save_adapter(tmp_path / "adapter", base, PLAIN)
    wanted = ["explain", "logit_lens", "--model", str(base), "--store", str(tmp_path / "store")]
    assert mizarr_command([*wanted, "--adapter", str(tmp_path / "adapter")]) == 0
    assert mizarr_command([*wanted, "--set", f"adapter={tmp_path / 'adapter'}"]) == 0
    capsys.readouterr()
    twice = [*wanted, "--adapter", str(tmp_path / "adapter"), "--set", "adapter=x"]
    assert mizarr_command(twice) == 2 and "given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"peft_type": "IA3"}, "expected peft_type 'LORA', found 'IA3'"),
        ({"peft_type": "PREFIX_TUNING"}, "found 'PREFIX_TUNING'"),
        ({"use_dora": True}, "expected use_dora to be absent"),
        ({"lora_bias": True}, "expected lora_bias to be absent"),
        ({"target_parameters": ["experts.w"]}, "expected target_parameters to be absent"),
        ({"layer_replication": [[0, 1]]}, "expected layer_replication"),
        ({"some_new_thing": 2}, "expected some_new_thing"),
        ({"init_lora_weights": "pissa_niter_4"}, "does not change the base model, found 'pissa_niter_4'"),
        ({"r": "four"}, "expected r to be a positive number, found 'four'"),
        ({"r": 3}, "expected LoRA factors of 'model.layers.0.mlp.down_proj' of rank 3"),
        ({"fan_in_fan_out": True}, r"to change '.*' by a tensor of shape \[\d+, \d+\], found shape"),
    ],
)
def test_what_is_not_merged_is_refused_in_one_line(base, tmp_path, edit, said):
    save_adapter(tmp_path / "adapter", base, PLAIN)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(PLAIN | edit))
    with pytest.raises((ConfigError, WeightsError), match=said) as caught:
        Model.from_pretrained(base, device="cpu", adapter=tmp_path / "adapter")
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, PLAIN)
    other = tmp_path / "other"
    random_models.save_random_model(other, "phi3", 1)
    with pytest.raises(WeightsError, match="which the checkpoint does not have; load the base model"):
        resolve(other, adapter=tmp_path / "adapter").identity()
    with pytest.raises(ModelNotFound, match=r"found no adapter_config\.json"):
        resolve(base, adapter=other)
    with pytest.raises(ConfigError, match="expected either adapter= or backend='transformers', found both"):
        resolve(base, adapter=tmp_path / "adapter", backend="transformers")


def test_a_tied_embedding_is_left_alone(tmp_path):
    tied = tmp_path / "tied"
    random_models.save_random_model(tied, "llama", 1, tie_word_embeddings=True)
    save_adapter(
        tmp_path / "adapter", tied, PLAIN | {"modules_to_save": ["e"]}, whole=("model.embed_tokens.weight",)
    )
    with pytest.raises(WeightsError, match="which is both embedding and LM head"):
        resolve(tied, adapter=tmp_path / "adapter").architecture()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_peft(tmp_path, family, seed):
    peft = pytest.importorskip("peft", reason="the adapter's own library is not installed")
    reference = random_models.save_random_model(tmp_path / "base", family, seed, tie_word_embeddings=False)
    described = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=bool(seed),
        target_modules=["q_proj", "v_proj", "down_proj"] + (["embed_tokens"] if seed else []),
        rank_pattern={"v_proj": 3},
        alpha_pattern={"layers.0.self_attn.q_proj": 5},
        modules_to_save=["lm_head"],
    )
    adapted = peft.get_peft_model(reference, described)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.normal_(std=0.1)
        adapted.save_pretrained(tmp_path / "adapter")
        expected = adapted.eval()(torch.tensor([IDS])).logits[0]
    found = logits(Model.from_pretrained(tmp_path / "base", device="cpu", adapter=tmp_path / "adapter"))
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
