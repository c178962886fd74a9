"""What transformers computes behind the bridge is what transformers computes, at points that were checked."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import Add, HookPoint, HookSpec, Replace, Scale, Zero
from mizarr.pipeline import run as run_node
from mizarr.stages.causal.grids.patching_metrics import Probability
from mizarr.stages.causal.grids.tracing import CausalTracing, embedding_deviation
from mizarr.stages.forward.architectures.bridge.config import BridgeConfig
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.models import bridge_case
from mizarr.stages.forward.models.files import BRIDGED, resolve
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.reference import ModelRef
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.runs.run import Run, plan
from mizarr.store import open_store
from mizarr.store.errors import (
    ConfigError,
    HookPointNotFound,
    MissingExtra,
    MizarrError,
    PromptError,
    WeightsError,
)
from mizarr.workflows import build
from mizarr.workflows.cli import run as mizarr_command
from tests.torch_free import without_torch

from . import bridge_models, random_hybrids, random_models

transformers = pytest.importorskip("transformers")
SAMPLE = [
    ("bert", "masked"),  # norms on the stream
    ("roberta", "masked"),  # positions begin behind a padding id
    ("albert", "masked"),  # one layer, called again and again
    ("deberta-v2", "masked"),
    ("modernbert", "masked"),  # norms before
    ("bart", "masked"),  # an encoder and a decoder
    ("bart", "causal"),  # the decoder alone
    ("ctrl", "causal"),
    ("bloom", "causal"),  # modules that take the stream and give the sum
    ("gptj", "causal"),  # attention and MLP side by side
    ("xlnet", "causal"),  # positions before prompts
    ("mamba", "causal"),  # one part in a layer
    ("granitemoe", "causal"),  # experts
    ("gemma2", "causal"),  # norms around, soft caps
    ("deepseek_v4", "causal"),  # several streams side by side
]
LEAVING = ("mamba",)
"""Whose `hidden_states` begin behind the first layer."""
SUMS = ["gptj", "granitemoe", "gemma2", "bloom", "ctrl", "mamba"]


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache_folder, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(cache_folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, reference) of a small random model of a type, made once."""
    held = {}

    def give(model_type, kind):
        if (model_type, kind) not in held:
            folder = tmp_path_factory.mktemp(f"{model_type}-{kind}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                held[model_type, kind] = folder, bridge_models.save(folder, model_type, kind, seed=3)
        return held[model_type, kind]

    return give


@pytest.fixture(scope="module")
def bridged(saved):
    """(model behind the bridge, reference)."""
    held = {}

    def give(model_type, kind="causal"):
        if (model_type, kind) not in held:
            folder, _ = saved(model_type, kind)
            held[model_type, kind] = Model.from_pretrained(folder, device="cpu", backend="transformers")
        return held[model_type, kind], saved(model_type, kind)[1]

    return give


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """(folder, reference) of a model that reads text."""

    held = {}

    def give(model_type, kind):
        if (model_type, kind) not in held:
            folder = tmp_path_factory.mktemp(f"reading-{model_type}")
            reference = bridge_models.save(folder, model_type, kind, seed=4, vocab_size=random_models.VOCAB)
            random_models.save_tokenizer(folder)
            held[model_type, kind] = folder, reference
        return held[model_type, kind]

    return give


def tokens(rows, length, seed=0):
    return torch.randint(
        6, bridge_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed + length)
    )


@torch.no_grad()
def theirs(reference, ids):
    """Logits, and what enters every layer, as transformers gives them."""
    given = reference(input_ids=ids, output_hidden_states=True)
    states = getattr(given, "hidden_states", None) or given.decoder_hidden_states
    return given.logits, states


@pytest.mark.parametrize(("model_type", "kind"), SAMPLE)
def test_logits_and_states_are_those_of_transformers(model_type, kind, bridged):
    model, reference = bridged(model_type, kind)
    for rows, length in ((1, 1), (2, 5), (3, 61)):
        ids = tokens(rows, length)
        found = model.forward(ids, HookSpec().capture("blocks.*", "hook_embed"))
        logits, states = theirs(reference, ids)
        assert_same(found.logits, logits)
        given = HookPoint.resid_post if model_type in LEAVING else HookPoint.resid_pre
        for layer in range(model.config.num_layers):
            assert_same(found[given(layer)], states[layer].flatten(2))


def assert_same(found, expected):
    """Up to last bits: the same weights at other places in memory are multiplied by other kernels."""
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@contextmanager
def changing(module, change, *, place=None):
    """A hand-written hook on what a module gives."""

    def hook(_, args, made):
        if place is None:
            return change(made)
        return (*made[:place], change(made[place]), *made[place + 1 :])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


ORACLES = [
    ("bert", "masked", "bert.encoder.layer.1", None, HookPoint.resid_post(1)),
    ("bert", "masked", "bert.encoder.layer.0.attention.output.dense", None, HookPoint.attn_out(0)),
    ("bert", "masked", "bert.encoder.layer.1.output.dense", None, HookPoint.mlp_out(1)),
    ("gptj", "causal", "transformer.h.1.attn", 0, HookPoint.attn_out(1)),
    ("gptj", "causal", "transformer.h.0.mlp", None, HookPoint.mlp_out(0)),
    ("gemma2", "causal", "model.layers.1.post_attention_layernorm", None, HookPoint.attn_out(1)),
    ("granitemoe", "causal", "model.layers.0", None, HookPoint.resid_post(0)),
    ("deberta-v2", "masked", "deberta.encoder.layer.1", 0, HookPoint.resid_post(1)),
    ("bloom", "causal", "transformer.h.0", 0, HookPoint.resid_post(0)),
]


@pytest.mark.parametrize(("model_type", "kind", "path", "place", "point"), ORACLES, ids=str)
def test_an_intervention_is_what_a_hook_on_the_module_does(model_type, kind, path, place, point, bridged):
    model, reference = bridged(model_type, kind)
    ids, vector = (
        tokens(2, 9),
        torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1)),
    )
    plain = theirs(reference, ids)[0]

    def zeroed(x):
        changed = x.clone()
        changed[:, 3] = 0
        return changed

    changes = {
        Add(vector): lambda x: x + vector,
        Scale(-1.5): lambda x: x * -1.5,
        Zero(positions=(3,)): zeroed,
    }
    for change, by_hand in changes.items():
        with changing(reference.get_submodule(path), by_hand, place=place):
            expected = theirs(reference, ids)[0]
        found = model.forward(ids, HookSpec().intervene(point, change)).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert float((expected - plain).abs().max()) > 1e-3


def test_a_shared_layer_is_changed_in_the_one_call_that_was_meant(bridged):
    """ALBERT's only layer runs several times; a hook that counts is the oracle."""
    model, reference = bridged("albert", "masked")
    ids, seen = tokens(1, 7), []

    def second(x):
        seen.append(x)
        return x * 0.5 if len(seen) == 2 else x

    with changing(reference.albert.encoder.albert_layer_groups[0], second):
        expected = theirs(reference, ids)[0]
    found = model.forward(ids, HookSpec().intervene("blocks.1.hook_resid_post", Scale(0.5))).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", SUMS)
def test_stream_and_parts_add_up_whatever_stands_in_their_place(model_type, bridged):
    model, _ = bridged(model_type)
    kinds = {point.kind for point in model.hook_points}
    assert kinds >= {"attn_out"} and ("mlp_out" in kinds) == (model_type != "mamba")
    noise = torch.randn(1, 11, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    for change in ((), ("attn_out",), ("mlp_out",)):
        spec = HookSpec().capture("blocks.*")
        for kind in kinds.intersection(change):
            spec = spec.intervene(HookPoint(kind, 1), Replace(noise))
        found = model.forward(tokens(2, 11), spec)
        for layer in range(model.config.num_layers):
            parts = [found[HookPoint(kind, layer)] for kind in ("attn_out", "mlp_out") if kind in kinds]
            total = found[HookPoint.resid_pre(layer)] + sum(parts)
            after = found[HookPoint.resid_post(layer)]
            torch.testing.assert_close(total, after, atol=1e-5 * float(after.abs().max()), rtol=1e-5)


def test_parts_of_bert_add_up_in_what_its_norms_take(bridged):
    model, reference = bridged("bert", "masked")
    found = model.forward(tokens(2, 11), HookSpec().capture("blocks.*"))
    with torch.no_grad():
        for layer, module in enumerate(reference.bert.encoder.layer):
            middle = module.attention.output.LayerNorm(
                found[HookPoint.resid_pre(layer)] + found[HookPoint.attn_out(layer)]
            )
            after = module.output.LayerNorm(middle + found[HookPoint.mlp_out(layer)])
            torch.testing.assert_close(after, found[HookPoint.resid_post(layer)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("model_type", "kind"), SAMPLE)
def test_what_mixes_positions_is_attention_and_what_does_not_is_the_mlp(model_type, kind, bridged):
    """Held what enters a layer but for one position: the MLP, with attention's output held, changes there."""
    model, _ = bridged(model_type, kind)
    points = set(model.hook_points)
    if HookPoint.mlp_out(0) not in points:
        return
    ids, attn, mlp = tokens(1, 8), HookPoint.attn_out(0), HookPoint.mlp_out(0)
    plain = model.forward(ids, HookSpec().capture(attn, mlp))
    push = Add(torch.full((model.config.hidden_size,), 0.7).cumsum(0), positions=(2,))
    pushed = HookSpec().capture(attn, mlp).intervene("blocks.0.hook_resid_pre", push)
    free = model.forward(ids, pushed)
    held = model.forward(ids, pushed.intervene(attn, Replace(plain[attn])))
    others = [place for place in range(8) if place != 2]
    assert float((free[attn] - plain[attn])[:, others].abs().max()) > 1e-4
    assert float((held[mlp] - plain[mlp])[:, others].abs().max()) <= 1e-5 * float(plain[mlp].abs().max())


@pytest.mark.parametrize(
    ("model_type", "kind"), [("bert", "masked"), ("gptj", "causal"), ("xlnet", "causal")]
)
def test_planned_runs_are_plain_passes(model_type, kind, bridged):
    model, _ = bridged(model_type, kind)
    vector = torch.ones(model.config.hidden_size)
    runs = []
    for length in (5, 8):
        ids = tokens(1, length)[0].tolist()
        for place in range(length):
            spec = HookSpec().capture("blocks.1.hook_resid_post")
            spec = spec.intervene("blocks.0.hook_resid_post", Scale(2.0, positions=(place,)))
            runs.append(Run(ids, spec, want=mizarr.logits(position=(0, -1), tokens=(7, 9))))
        runs.append(Run(ids, HookSpec().intervene("hook_embed", Add(vector))))
        runs.append(Run(ids, HookSpec().capture("blocks.0.hook_resid_pre"), want=None))
    planned = plan(model, runs)
    assert planned.positions <= planned.naive, "nothing is shared, and passes end where nothing is wanted"
    for run, result in zip(runs, mizarr.run(model, runs), strict=True):
        expected = model.forward([run.prompt], run.hooks, want=run.want)
        if run.want is not None:
            scale = float(expected.logits.abs().max())
            torch.testing.assert_close(result.logits, expected.logits, atol=1e-5 * scale, rtol=1e-5)
        for point in expected:
            torch.testing.assert_close(result[point], expected[point], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "kind", "beside"),
    [("bart", "masked", True), ("bart", "causal", False), ("bert", "masked", False)],
)
def test_what_layers_read_beside_the_stream_is_told(model_type, kind, beside, bridged):
    """An encoder's states come to a decoder by another way."""
    model, _ = bridged(model_type, kind)
    assert any("something else of the prompt" in line for line in model.config.remarks) == beside
    assert any("model.encoder.layers" in line for line in model.config.remarks) == beside


def test_a_pass_ends_with_the_last_thing_wanted(bridged):
    model, _ = bridged("gptj")
    met = []
    last = model.network.module.get_submodule(model.config.found[-1].path)
    handle = last.register_forward_pre_hook(lambda module, args: met.append(1))
    model.forward([[9, 8, 7]], HookSpec().capture("blocks.0.hook_resid_post"), want=None)
    assert met == []
    model.forward([[9, 8, 7]])
    handle.remove()
    assert met == [1]


def test_threads_run_passes_side_by_side(bridged):
    model, _ = bridged("gptj")
    specs = [HookSpec().intervene("blocks.0.hook_resid_post", Scale(1 + place)) for place in range(8)]
    expected = [model.forward([[9, 8, 7]], spec).logits for spec in specs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda spec: model.forward([[9, 8, 7]], spec).logits, specs * 3))
    for one, other in zip(expected * 3, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_was_captured_is_not_written_over_by_modules(bridged):
    """A module may add to its argument in place; what a hook saw before stays."""
    model, _ = bridged("gptj")

    def in_place(module, args, kwargs):
        args[0].mul_(2)

    place = model.network.module.get_submodule(model.config.found[1].path)
    plain = model.forward([[9, 8, 7]], HookSpec().capture("blocks.0.hook_resid_post"))
    handle = place.register_forward_pre_hook(in_place, with_kwargs=True)
    found = model.forward([[9, 8, 7]], HookSpec().capture("blocks.0.hook_resid_post"))
    handle.remove()
    torch.testing.assert_close(found["blocks.0.hook_resid_post"], plain["blocks.0.hook_resid_post"])


# Readouts


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "gptj", "bloom", "ctrl"])
def test_the_readout_unembeds_the_last_stream_into_the_logits(model_type, bridged):
    model, _ = bridged(model_type)
    last = HookPoint.resid_post(model.config.num_layers - 1)
    found = model.forward(tokens(2, 6), HookSpec().capture(last))
    torch.testing.assert_close(model.project_to_vocab(found[last]), found.logits, atol=1e-4, rtol=1e-4)
    some = model.project_to_vocab(found[last], tokens=[5, 9])
    torch.testing.assert_close(some, found.logits[..., [5, 9]], atol=1e-4, rtol=1e-4)


def test_without_a_readout_one_line_says_so(bridged):
    model, _ = bridged("bert", "masked")
    for ask in (
        lambda: model.project_to_vocab(torch.zeros(model.config.hidden_size)),
        lambda: model.network.unembedding,
        lambda: model.config.tensors,
    ):
        with pytest.raises(ConfigError, match="computed by a final norm and a head") as told:
            ask()
        assert "\n" not in str(told.value)


def test_the_logit_lens_reads_what_the_model_says(reading, tmp_path):
    folder, reference = reading("gptj", "causal")
    done = build("logit_lens", model=str(folder), backend="transformers", prompts=("The capital",))
    assert done.settings.model == str(folder) + BRIDGED
    done.run(open_store(tmp_path / "store"))
    ids = resolve(folder).tokenizer().encode("The capital").ids
    said = theirs(reference, torch.tensor([ids]))[0][0, -1]
    last = done.to_json()["results"][0]["layers"][-1]["predictions"]
    assert [each["token_id"] for each in last] == said.topk(10).indices.tolist()
    assert last[0]["probability"] == pytest.approx(float(said.softmax(-1).max()), rel=1e-4)


# Texts


def test_generation_reads_every_position_anew_and_is_greedy_decoding(bridged):
    model, reference = bridged("gptj")
    ids = [9, 8, 7]
    found = generate(model, [ids], max_tokens=6, eos=())
    expected = list(ids)
    for _ in range(6):
        expected.append(int(theirs(reference, torch.tensor([expected]))[0][0, -1].argmax()))
    assert list(found[0].generated_ids) == expected[3:]
    assert "every position anew" in found.reading
    with pytest.raises(ConfigError, match="expected cache=None or cache=False"):
        generate(model, [ids], cache=True)


@pytest.mark.parametrize(("model_type", "kind"), [("bert", "masked"), ("xlnet", "causal")])
def test_what_looks_ahead_continues_no_text(model_type, kind, bridged):
    model, _ = bridged(model_type, kind)
    assert not model.config.predicts_next
    with pytest.raises(ConfigError, match="whose logits predict the next token"):
        generate(model, [[9, 8, 7]])


# Stores and identities


def test_identity_names_class_and_version_and_holds_the_whole_config(saved, tmp_path):
    folder, _ = saved("gptj", "causal")
    source = ModelSource(ModelRef(folder, backend="transformers"))
    assert source.identity.forward == f"transformers/{transformers.__version__}/GPTJForCausalLM"
    assert source.identity.attention == "eager"
    assert ModelSource(source.name).identity == source.identity, "the name carries it to workers"
    raw = json.loads((folder / "config.json").read_text())
    digests = set()
    for change in ({}, {"initializer_range": 0.5}, {"transformers_version": "5.0.0"}):
        other = tmp_path / str(len(list(tmp_path.iterdir())))
        other.mkdir()
        (other / "model.safetensors").symlink_to(folder / "model.safetensors")
        (other / "config.json").write_text(json.dumps(raw | change))
        digests.add(ModelSource(ModelRef(other, backend="transformers")).identity.digest)
    assert len(digests) == 2, "a stamp is no difference, everything else is"


def test_a_native_family_has_another_identity_behind_the_bridge(tmp_path):
    random_models.save_random_model(tmp_path, "llama")
    ours = Model.from_pretrained(tmp_path, device="cpu")
    other = Model.from_pretrained(tmp_path, device="cpu", backend="transformers")
    assert ours.identity != other.identity and other.name == ours.name + BRIDGED
    ids, spec = tokens(2, 30), HookSpec().capture("blocks.*.hook_resid_post", "blocks.*.hook_*_out")
    one, two = ours.forward(ids, spec), other.forward(ids, spec)
    torch.testing.assert_close(one.logits, two.logits, atol=1e-4, rtol=1e-4)
    assert set(two) == set(one)
    for point in two:
        torch.testing.assert_close(one[point], two[point], atol=1e-4, rtol=1e-4)


def test_weights_changed_in_memory_are_another_model(saved):
    folder, _ = saved("ctrl", "causal")
    model = Model.from_pretrained(folder, device="cpu", backend="transformers")
    before = model.require_identity()
    model.forward(tokens(2, 90))
    model.forward([[9]])
    assert model.identity == before, "passes leave no trace"
    with torch.no_grad():
        next(iter(model.network.module.parameters())).mul_(1.5)
    assert model.identity != before and model.identity.attention == "eager"


CACHED = """
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store import open_store
name, path = sys.argv[1:]
node = CaptureNode(name, [[9, 8, 7], [6, 7, 8, 9, 10]], "blocks.*.hook_resid_post")
store = open_store(path, mode="r")
print(json.dumps([node.status(store).is_cached, float(node.open(store).resid_post.sum())]))
"""


def test_what_is_stored_is_found_in_another_process_without_torch(saved, tmp_path):
    folder, reference = saved("xlnet", "causal")
    node = CaptureNode(
        str(folder), [[9, 8, 7], [6, 7, 8, 9, 10]], "blocks.*.hook_resid_post", backend="transformers"
    )
    store, name = open_store(tmp_path / "store"), node.source.name
    first = mizarr.capture(
        name, [[9, 8, 7], [6, 7, 8, 9, 10]], "blocks.0.hook_resid_post", store=store, progress=False
    )
    kept = np.array(first.resid_post)
    found = mizarr.capture(
        name, [[9, 8, 7], [6, 7, 8, 9, 10]], "blocks.*.hook_resid_post", store=store, progress=False
    )
    np.testing.assert_array_equal(found.resid_post.sel(layer=[0]), kept)
    states = theirs(reference, torch.tensor([[9, 8, 7]]))[1]
    np.testing.assert_allclose(found.resid_post.sel(layer=0)[:3], states[1][0], atol=1e-6)
    is_cached, total = without_torch(CACHED, name, tmp_path / "store")
    assert is_cached and total == pytest.approx(float(found.resid_post.sum()), rel=1e-5)


def test_a_model_is_looked_into_once(saved, tmp_path, monkeypatch):
    folder, _ = saved("bloom", "causal")
    looked = []
    look = bridge_case.BridgeCase._probe
    monkeypatch.setattr(bridge_case.BridgeCase, "_probe", lambda case: looked.append(case) or look(case))
    one, two = (resolve(folder, backend="transformers").architecture() for _ in range(2))
    assert len(looked) <= 1 and one == two
    assert BridgeConfig.from_json(json.loads(json.dumps(one.to_json()))) == one
    monkeypatch.setattr(bridge_case, "witness", lambda: None)
    assert resolve(folder, backend="transformers").architecture() == one, "what it found is still true of it"
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"pip install 'mizarr\[check\]'"):
        resolve(folder, backend="transformers").architecture()


# Refusals


@pytest.mark.parametrize(
    ("model_type", "kind", "told"),
    [
        ("squeezebert", "masked", "expected a list of modules"),
        ("longformer", "masked", "expected a list of modules"),
        ("reformer", "masked", "expected two passes over the same"),
    ],
)
def test_what_cannot_be_relied_on_is_refused_in_a_line(model_type, kind, told, saved):
    folder, _ = saved(model_type, kind)
    for _ in range(2):  # found, then remembered
        with pytest.raises(ConfigError, match=told) as error:
            Model.from_pretrained(folder, device="cpu", backend="transformers")
        assert "\n" not in str(error.value)


def copied(folder, into, *, config=None, tensors=None):
    into.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(raw | (config or {})))
    held = load_file(folder / "model.safetensors")
    save_file(held if tensors is None else tensors(held), into / "model.safetensors", {"format": "pt"})
    return into


def test_a_rule_that_begins_at_long_prompts_and_ends_at_short_ones_is_refused(tmp_path):
    """BigBird reads sparsely what is long, until it has once read something short."""
    sizes = {"max_position_embeddings": 512, "block_size": 8, "num_random_blocks": 1}
    bridge_models.save(tmp_path, "big_bird", "masked", **sizes)
    with pytest.raises(ConfigError, match="after which a prompt of 512 tokens has different logits"):
        Model.from_pretrained(tmp_path, device="cpu", backend="transformers")


def test_rope_that_remembers_how_long_the_last_prompt_was_is_refused(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 256}
    bridge_models.save(tmp_path, "llama", "causal", rope_parameters={**rope, **factors}, **shape)
    with pytest.raises(ConfigError, match=r"inv_freq changed from .* by a pass over 256 tokens"):
        Model.from_pretrained(tmp_path, device="cpu", backend="transformers")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_are_those_of_transformers(dtype, saved):
    folder, _ = saved("gptj", "causal")
    model = Model.from_pretrained(folder, device="cpu", dtype=dtype, backend="transformers")
    kind = transformers.GPTJForCausalLM
    reference = kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    ids = tokens(2, 9)
    found = model.forward(ids, HookSpec().capture("blocks.*"))
    torch.testing.assert_close(found.logits, theirs(reference, ids)[0])
    assert found["blocks.0.hook_attn_out"].dtype == getattr(torch, dtype)


QUESTIONS = {
    "logit_attribution": {"prompts": ("The capital",)},
    "attention_patterns": {"prompts": ("The capital",)},
    "ablation": {},
    "head_detection": {},
    "inspect_weights": {},
    "ov_qk": {},
    "composition": {},
    "attribution_graph": {},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_about_the_inside_are_refused_in_a_line(question, reading, tmp_path):
    folder, _ = reading("gptj", "causal")
    with pytest.raises(MizarrError) as error:
        build(question, model=str(folder), backend="transformers", **QUESTIONS[question]).run(
            open_store(tmp_path / "store")
        )
    assert "\n" not in str(error.value)


def test_a_text_model_that_was_saved_by_itself_is_known_by_its_class(saved):
    folder, reference = saved("emu3", "causal")
    raw = json.loads((folder / "config.json").read_text())
    model = Model.from_pretrained(folder, device="cpu", backend="transformers")
    assert model.config.model_type == raw["model_type"] != "emu3"
    assert_same(model.forward([[9, 8, 7]]).logits, theirs(reference, torch.tensor([[9, 8, 7]]))[0])


def test_weights_that_would_be_drawn_at_random_are_refused(saved, tmp_path):
    folder, _ = saved("bert", "masked")

    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if "transform.dense.weight" not in name}

    def damaged(tensors):
        return {name: torch.full_like(t, torch.nan) if t.ndim == 1 else t for name, t in tensors.items()}

    with pytest.raises(
        WeightsError, match=r"found no '.*transform.dense.weight', which transformers would draw at random"
    ):
        Model.from_pretrained(copied(folder, tmp_path / "a", tensors=without), backend="transformers")
    with pytest.raises(WeightsError, match="finite"):
        Model.from_pretrained(copied(folder, tmp_path / "b", tensors=damaged), backend="transformers")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "t5"}, "lists as a causal or masked language model, found 't5'"),
        ({"model_type": "nonsense"}, "found 'nonsense'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "expected unquantised weights"),
    ],
)
def test_other_checkpoints_are_refused(config, told, saved, tmp_path):
    folder = copied(saved("bert", "masked")[0], tmp_path / "other", config=config)
    with pytest.raises(ConfigError, match=told):
        Model.from_pretrained(folder, backend="transformers")


def test_an_adapter_is_no_whole_model(saved, tmp_path):
    folder = copied(saved("bert", "masked")[0], tmp_path / "other")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        Model.from_pretrained(folder, backend="transformers")


def test_requests_that_make_no_sense_are_refused(bridged, saved):
    model, _ = bridged("roberta", "masked")
    folder, _ = saved("layoutlm", "masked")
    assert model.config.context_length == 254, "256 positions, of which padding takes two"
    with pytest.raises(PromptError, match="254"):
        model.forward(tokens(1, 255))
    with pytest.raises(HookPointNotFound, match="hook_pattern"):
        model.forward([[9, 8]], HookSpec().capture("blocks.0.attn.hook_pattern"))
    with pytest.raises(ConfigError, match="found both"):
        Model.from_pretrained(folder, backend="transformers", trust_layout=True)
    with pytest.raises(ConfigError, match="found 'jax'"):
        Model.from_pretrained(folder, backend="jax")
    with pytest.raises(ConfigError, match="without positions"):
        model.network.embed(tokens(1, 3), None)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_a_fact_is_traced_behind_the_bridge_as_it_is_here(family, tmp_path):
    """Noise as large as the embeddings are, as they enter: beside rows of positions, and multiplied."""
    save = random_hybrids.save_random_hybrid if family == "gpt2" else random_models.save_random_model
    save(tmp_path / "model", family, 1, tokenizer=False)
    asked = CausalTracing(
        tokens=(3, 200, 31, 8, 120),
        subject=(1, 2),
        samples=2,
        kinds=("resid_post",),
        metrics=(Probability(17),),
    )
    found = []
    for name in (str(tmp_path / "model"), str(tmp_path / "model") + BRIDGED):
        kept = open_store(tmp_path / "store")
        node = asked.on(name)
        run_node(node, kept)
        found.append(node.open(kept)["probability"].load())
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-7)
    assert float(found[0].std()) > 1e-6
    models = [Model.from_pretrained(tmp_path / "model", backend=name) for name in ("native", "transformers")]
    assert embedding_deviation(models[1]) == pytest.approx(embedding_deviation(models[0]), rel=1e-5)


# The command line


def test_inspect_tells_the_backend_and_what_it_cannot_do(saved, tmp_path, capsys):
    folder, _ = saved("layoutlm", "masked")
    assert mizarr_command(["models", "inspect", str(folder), "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compatible"] and found["backend"]["name"] == "transformers"
    assert "because mizarr does not know its family" in found["backend"]["reason"]
    assert len(found["issues"]) > 1, "why our own networks do not take it"
    asked = ["models", "inspect", str(folder), "--backend", "transformers", "--quiet"]
    assert mizarr_command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compatible"] and found["config"]["class_name"] == "LayoutLMForMaskedLM"
    assert any("no logit lens" in line for line in found["backend"]["missing"])
    assert mizarr_command(asked) == 0
    assert "backend: transformers, as requested" in capsys.readouterr().out
    random_models.save_random_model(tmp_path, "llama")
    assert mizarr_command(["models", "inspect", str(tmp_path), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"]["name"] == "native"


def test_commands_take_the_backend(reading, tmp_path, capsys):
    folder, _ = reading("layoutlm", "masked")
    (tmp_path / "prompts.jsonl").write_text('{"ids": [9, 8, 7]}\n')
    wanted = [str(folder), str(tmp_path / "prompts.jsonl"), "--hooks", "blocks.*.hook_attn_out"]
    placed = ["--store", str(tmp_path / "store"), "--quiet"]
    assert mizarr_command(["capture", *wanted, *placed, "--backend", "native"]) == 2
    assert not (tmp_path / "store").exists()
    capsys.readouterr()
    assert mizarr_command(["capture", *wanted, *placed, "--backend", "transformers"]) == 0
    asked = capsys.readouterr()
    assert "warning" not in asked.err
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert mizarr_command(["capture", *wanted, *placed]) == 0
    unasked = capsys.readouterr()
    assert unasked.out == asked.out, "the same run, which was there"
    assert unasked.err.count("\n") == 1
    assert unasked.err.startswith("mizarr: warning: ") and "so transformers runs it" in unasked.err
    twice = ["explain", "logit_lens", "--model", str(folder), "--backend", "transformers"]
    assert mizarr_command([*twice, "--set", "backend=native"]) == 2
    assert "the backend is given twice" in capsys.readouterr().err
    assert mizarr_command(twice) == 2, "it has no readout"
    assert "computed by a final norm and a head" in capsys.readouterr().err


# Families that are not known


@pytest.mark.parametrize("model_type", ["big_bird", "xlnet", "dbrx"])
def test_a_family_that_is_not_known_runs_behind_the_bridge_unasked(model_type, saved, tmp_path):
    folder, _ = saved(model_type, "causal")
    asked = Model.from_pretrained(folder, backend="transformers")
    with pytest.warns(UserWarning, match=f"does not support the family '{model_type}', so transformers runs"):
        unasked = Model.from_pretrained(folder)
    assert (unasked.name, unasked.identity) == (asked.name, asked.identity)
    torch.testing.assert_close(unasked.forward([[3, 4]]).logits, asked.forward([[3, 4]]).logits)
    with pytest.warns(UserWarning, match="so transformers runs it"):
        source = ModelSource(folder)
    assert source.identity == ModelSource(ModelRef(folder, backend="transformers")).identity
    hooks = [HookPoint.resid_post(0)]
    with pytest.warns(UserWarning, match="so transformers runs it"):
        node = CaptureNode(str(folder), [[3, 4]], hooks=hooks)
    assert node.run_key == CaptureNode(asked, [[3, 4]], hooks=hooks).run_key


def test_without_transformers_one_line_says_what_to_install(saved, tmp_path, monkeypatch):
    folder, _ = saved("xlnet", "causal")
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(bridge_case, "witness", lambda: None)
    monkeypatch.setattr("mizarr.stages.forward.models.layout_check.witness", lambda: None)
    with pytest.raises(
        MissingExtra, match=r"neither the family 'xlnet' .* transformers.* pip install 'mizarr\[check\]'"
    ) as error:
        Model.from_pretrained(folder)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_what_the_bridge_cannot_run_either_is_refused_in_a_line(saved, tmp_path):
    folder, _ = saved("xlnet", "causal")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"model_type": "novel", "architectures": ["Novel"]})
    )
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(
        ConfigError, match=r"neither the family 'novel' .* details run: mizarr models inspect"
    ) as error:
        Model.from_pretrained(tmp_path)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def test_a_known_family_that_is_refused_is_not_left_to_the_bridge(tmp_path):
    random_models.save_random_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "spiral"}}))
    with pytest.raises(MizarrError, match="spiral"):
        Model.from_pretrained(tmp_path)
