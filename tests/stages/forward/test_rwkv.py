"""RWKV models as models like any other: spellings, points, states, generation, the store, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import Add, HookPoint, HookSpec, Model, Replace, Run, Scale, Zero
from mizarr.stages.forward.architectures.mixers import AttentionSpec, MlpSpec
from mizarr.stages.forward.hooks.edges import KnockoutSpec
from mizarr.stages.forward.hooks.spec import BoundSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.hooks.writes import StateKnockoutSpec, StateSteeringSpec
from mizarr.stages.forward.passes.kept import Cache
from mizarr.stages.forward.passes.plain import forward
from mizarr.store.errors import ConfigError, HookPointNotFound, InterventionError, WeightsError

from .random_models import VOCAB
from .random_rwkv import GENERATIONS, draw_config, save_random_rwkv

WITH_STATES = GENERATIONS[1:]
IDS = np.random.default_rng(0).integers(2, VOCAB, 40).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(generation: str, dtype: str = "float32") -> Model:
        if (generation, dtype) not in made:
            folder = tmp_path_factory.mktemp(generation)
            save_random_rwkv(folder, generation, 1)
            made[generation, dtype] = Model.from_pretrained(folder, dtype=dtype)
        return made[generation, dtype]

    return model


def renamed(folder, name: str, style: str) -> None:
    """The tensors of a checkpoint under native names."""
    words = {
        "hf": {"rwkv.embeddings": "emb", "rwkv.ln_out": "ln_out", "rwkv.blocks": "blocks"}
        | {"attention.": "att.", "feed_forward.": "ffn.", "pre_ln": "ln0"},
        "fla": {
            "model.embeddings": "emb",
            "model.norm": "ln_out",
            "lm_head": "head",
            "model.layers": "blocks",
        }
        | {"attn_norm": "ln1", "ffn_norm": "ln2", "pre_norm": "ln0", "attn.g_norm": "att.ln_x"}
        | {"attn.r_proj": "att.receptance", "attn.k_proj": "att.key", "attn.v_proj": "att.value"}
        | {"attn.o_proj": "att.output", "attn.": "att."},
    }[style]
    words |= {"_lora.lora.0.weight": "1", "_lora.lora.2.weight": "2", "_lora.lora.2.bias": "0"}
    found = {}
    for theirs, tensor in load_file(folder / name).items():
        native = theirs
        for word, other in words.items():
            native = native.replace(word, other)
        found[native] = tensor
        if "_lora.lora" in theirs and theirs.endswith("weight"):
            found[native] = tensor.T.contiguous()
        elif theirs.endswith(("lora.2.bias", "k_k", "k_a", "ffn.x_k")) and tensor.ndim == 1:
            found[native] = tensor[None, None]
    save_file(found, folder / name)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_checkpoint_says_the_same_in_every_spelling(generation, tmp_path):
    save_random_rwkv(tmp_path, generation, 3)
    expected = Model.from_pretrained(tmp_path).forward(IDS).logits
    renamed(tmp_path, "model.safetensors", "fla" if generation == "rwkv7" else "hf")
    assert torch.equal(Model.from_pretrained(tmp_path).forward(IDS).logits, expected)


def test_the_six_mixes_of_version_7_may_be_one_tensor(tmp_path):
    tensors = save_random_rwkv(tmp_path / "six", "rwkv7", 3)
    save_random_rwkv(tmp_path / "one", "rwkv7", 3, spelling="x_x")
    held = load_file(tmp_path / "one" / "model.safetensors")
    assert held["model.layers.1.attn.x_x"].shape == (6, tensors["model.norm.weight"].shape[0])
    one, six = (Model.from_pretrained(tmp_path / name) for name in ("one", "six"))
    assert torch.equal(one.forward(IDS).logits, six.forward(IDS).logits)
    assert one.config.digest == six.config.digest


@pytest.mark.parametrize("generation", WITH_STATES)
def test_the_attention_a_recurrence_amounts_to(models, generation):
    """alpha v is what is read (Ali et al. 2024); the published form is its positive part, scaled."""
    model = models(generation, "float64")
    cache = model.forward(IDS, HookSpec().capture("blocks.*.rwkv.*"))
    for layer in range(model.config.num_layers):
        alpha, v = cache[HookPoint.rwkv_alpha_raw(layer)], cache[HookPoint.rwkv_v(layer)]
        read = cache[HookPoint.rwkv_wkv_out(layer)]
        assert float((alpha @ v - read).abs().max()) <= 1e-10 * max(1.0, float(read.abs().max()))
        assert torch.equal(alpha, alpha.tril())
        shown = cache[HookPoint.rwkv_effective_attn(layer)]
        total = shown.sum(-1)
        assert float(torch.minimum(total.abs(), (total - 1).abs()).max()) <= 1e-6
        assert bool((shown >= 0).all()) and bool((shown[alpha <= 0] == 0).all())
        log_decay = cache[HookPoint.rwkv_log_decay(layer)]
        assert bool((log_decay <= 0).all())
        assert torch.equal(cache[HookPoint.rwkv_decay(layer)], torch.exp(log_decay))


@pytest.mark.parametrize("generation", WITH_STATES)
def test_effective_attention_under_a_knockout_loses_the_column(models, generation):
    model, layer, place = models(generation, "float64"), 1, 4
    cut = StateKnockoutSpec().layer(layer).position(place).hooks(model.config, len(IDS))
    cache = model.forward(IDS, cut.capture(f"blocks.{layer}.rwkv.*"))
    alpha = cache[HookPoint.rwkv_alpha_raw(layer)]
    assert float(alpha[..., place + 1 :, place].abs().max()) == 0
    read, v = cache[HookPoint.rwkv_wkv_out(layer)], cache[HookPoint.rwkv_v(layer)]
    assert float((alpha @ v - read).abs().max()) <= 1e-10 * float(read.abs().max())


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("first", [1, 13, 39])
def test_a_sequence_in_two_pieces_is_the_whole(models, generation, first):
    model = models(generation, "float64")
    whole = model.forward(IDS).logits[0]
    cache = Cache()
    for stop in (first, len(IDS)):
        taps = RunTaps(BoundSpec(), lambda *_: None)
        found = model.read_on([IDS[:stop]], cache, taps)[0]
        assert float((found - whole[stop - 1]).abs().max()) <= 1e-10 * float(whole.abs().max())
    assert cache.length == len(IDS)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_a_text_keeps_does_not_grow_with_it(models, generation):
    model, sizes = models(generation), set()
    for length in (1, 7, 40):
        cache = Cache()
        model.read_on([IDS[:length]], cache, RunTaps(BoundSpec(), lambda *_: None))
        sizes.add(cache.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generated_tokens_are_those_of_reading_everything_anew(models, generation):
    model, prompts = models(generation), [IDS[:5], IDS[3:11]]
    specs = [None, HookSpec().intervene("blocks.1.hook_resid_post", Scale(1.5, positions=(2,)))]
    if generation != "rwkv":
        specs.append(StateKnockoutSpec().position(1).hooks(model.config, 5))
        state = model.forward(IDS, HookSpec().capture("blocks.0.rwkv.hook_state_seq"))
        behind = state["blocks.0.rwkv.hook_state_seq"][:, :, 7:8]
        specs.append(HookSpec().intervene("blocks.0.rwkv.hook_state_seq", Replace(behind, positions=(3,))))
    for spec in specs:
        texts = mizarr.generate(model, prompts, spec, max_tokens=12)
        for prompt, text in zip(prompts, texts, strict=True):
            ids = list(prompt)
            for _ in range(12):
                ids.append(int(model.forward(ids, spec).logits[0, -1].argmax()))
            assert list(text.generated_ids) == ids[len(prompt) :]


@pytest.mark.parametrize("generation", WITH_STATES)
def test_a_state_patched_in_is_all_that_later_tokens_read_of_the_past(models, generation):
    """With the shifts' last rows equal too, a patched state makes a prompt go on as the other does."""
    model = models(generation, "float64")
    shared, rest = IDS[5], IDS[6:12]
    clean, other = [*IDS[:5], shared, *rest], [*IDS[20:25], shared, *rest]
    spec = HookSpec().capture("blocks.*.rwkv.hook_state_seq", "blocks.*.hook_resid_pre", "hook_embed")
    spec = spec.capture("blocks.*.hook_resid_post", "blocks.*.hook_resid_mid", "blocks.*.ln1.hook_normalized")
    held = model.forward(clean, spec)
    patch = HookSpec()
    for layer in range(model.config.num_layers):
        state = held[HookPoint.rwkv_state_seq(layer)][:, :, 5:6]
        patch = patch.intervene(HookPoint.rwkv_state_seq(layer), Replace(state, positions=(5,)))
        stream = held[HookPoint.resid_post(layer)][:, 5]
        middle = held[HookPoint.resid_mid(layer)][:, 5]
        patch = patch.intervene(HookPoint.resid_mid(layer), Replace(middle, positions=(5,)))
        patch = patch.intervene(HookPoint.resid_post(layer), Replace(stream, positions=(5,)))
    found = model.forward(other, patch).logits[0, 6:]
    expected = model.forward(clean).logits[0, 6:]
    assert float((found - expected).abs().max()) <= 1e-9 * float(expected.abs().max())
    assert float((model.forward(other).logits[0, 6:] - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("generation", WITH_STATES)
def test_stored_activations_are_those_of_a_pass(models, generation, tmp_path):
    model, store = models(generation), mizarr.open_store(tmp_path)
    prompts = [IDS[:7], IDS[7:10], IDS[10:]]
    hooks = ["blocks.*.rwkv.*", "blocks.*.hook_resid_post", "blocks.0.hook_pre_norm"]
    hooks = [
        str(point) for point in model.hook_points if point.kind.startswith(("rwkv", "resid_post", "pre_n"))
    ]
    hooks = [name for name in hooks if not name.endswith("hook_state")]
    found = mizarr.capture(model, prompts, hooks, store=store, progress=False)
    for number, prompt in enumerate(prompts):
        cache = model.forward(prompt, HookSpec().capture(*hooks)).to_xarray().isel(batch=0)
        tokens = slice(int(found.row_start[number]), int(found.row_start[number]) + len(prompt))
        for name in ("resid_post", "rwkv_k", "rwkv_state_seq", "rwkv_write", "rwkv_log_decay"):
            here = found[name].isel(token=tokens).transpose("layer", "token", ...)
            expected = cache[name].transpose("layer", "position", ...).values
            expected = expected[..., 0] if name == "rwkv_write" else expected
            scale = max(1.0, float(np.abs(expected).max()))
            assert np.abs(here.values - expected).max() <= 1e-5 * scale, name
    again = mizarr.capture(model, prompts, hooks, store=store, progress=False)
    assert again.identical(found)


def test_the_stream_of_layer_0_is_replaced_by_its_norm(models):
    model = models("rwkv7")
    assert model.config.blocks[0].has_pre_norm
    names = ("pre_norm", "attn_out", "mlp_out", "resid_post")
    cache = model.forward(IDS, HookSpec().capture(*(HookPoint(name, 0) for name in names)))
    start, attention, mlp, end = (cache[HookPoint(name, 0)] for name in names)
    assert torch.allclose(start + attention + mlp, end, atol=1e-5)
    zeroed = model.forward(IDS, HookSpec().intervene("blocks.0.hook_pre_norm", Zero(positions=(3,))))
    assert torch.equal(zeroed.logits[:, :3], model.forward(IDS).logits[:, :3])


@pytest.mark.parametrize("generation", WITH_STATES)
def test_the_loop_runs_under_autograd(models, generation):
    """Gradients at a stream and at the values, against finite differences."""
    model = models(generation, "float64")
    ids, direction = torch.tensor([IDS[:6]]), torch.randn(model.config.hidden_size, dtype=torch.float64)

    def loss(shift: torch.Tensor) -> torch.Tensor:
        spec = HookSpec().intervene("blocks.0.hook_resid_mid", Add(direction, positions=(1,)))
        bound = model.bind(spec)

        class Shifted(RunTaps):
            def __call__(self, kind, layer, x, allowed=None):
                x = super().__call__(kind, layer, x, allowed)
                return x + shift * direction if (kind, layer) == ("resid_post", 0) else x

        logits = forward(model.network, ids, Shifted(bound, lambda *_: None), mizarr.logits())
        return torch.log_softmax(logits[0, -1], -1)[7]

    at = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss(at).backward()
    step = 1e-5
    with torch.no_grad():
        slope = (loss(torch.tensor(step)) - loss(torch.tensor(-step))) / (2 * step)
    assert float(at.grad) == pytest.approx(float(slope), rel=1e-6)


def test_what_is_worked_out_cannot_be_changed(models):
    model = models("rwkv6")
    for name in ("state", "alpha_raw", "effective_attn"):
        with pytest.raises(InterventionError, match=r"blocks\.1\.rwkv\.hook_state_seq"):
            model.forward(IDS, HookSpec().intervene(f"blocks.1.rwkv.hook_{name}", Zero()))


def test_attention_to_texts_read_on_is_refused(models):
    spec = HookSpec().capture("blocks.0.rwkv.hook_effective_attn")
    with pytest.raises(InterventionError, match="only the state of earlier tokens is cached"):
        mizarr.generate(models("rwkv6"), [IDS[:5]], spec, max_tokens=3)


def test_attention_points_and_edges_are_not_there(models):
    model = models("rwkv6")
    with pytest.raises(HookPointNotFound, match=r"has no hook point 'blocks\.0\.attn"):
        model.forward(IDS, HookSpec().capture("blocks.0.attn.hook_pattern"))
    with pytest.raises(HookPointNotFound):
        KnockoutSpec().edge(3, 1).hooks(model.config, 5).bind(model.hook_points, "it")


def test_states_are_not_asked_of_a_transformer():
    model = Model.from_pretrained("specimen")
    for spec in (StateKnockoutSpec(), StateSteeringSpec.scale(2.0)):
        with pytest.raises(InterventionError, match="expected a model with a recurrent state"):
            spec.position(0).hooks(model.config, 5)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (StateKnockoutSpec(), "expected at least one position"),
        (StateKnockoutSpec().position(5), r"expected positions in 0\.\.4"),
        (StateKnockoutSpec().position(-6), r"expected positions in 0\.\.4"),
        (StateSteeringSpec.scale(2.0).position(0).layer(7), r"expected layers in 0\.\."),
        (StateSteeringSpec.scale(2.0).position(0).head(9), r"expected heads in 0\.\."),
        (StateSteeringSpec.scale(float("nan")).position(0), "expected a finite number"),
    ],
)
def test_writes_that_are_not_there_are_refused(models, spec, told):
    with pytest.raises(InterventionError, match=told):
        spec.hooks(models("rwkv7").config, 5)


@pytest.mark.parametrize(
    ("generation", "change", "told"),
    [
        ("rwkv7", {"num_heads": 5}, r"expected num_heads \* head_dim to be hidden_size"),
        ("rwkv7", {"head_dim": 7}, "expected the head size to divide"),
        ("rwkv7", {"attn": {"layers": [1]}}, "expected an RWKV-7 without attention layers"),
        ("rwkv7", {"hidden_act": "relu"}, "hidden_act of an RWKV-7 to be .sqrelu."),
        ("rwkv7", {"value_dim": [8, 16]}, "expected value_dim to be hidden_size"),
        ("rwkv7", {"model_type": "rwkv6", "num_attention_heads": 4}, "expected a checkpoint of RWKV-6"),
        ("rwkv6", {"model_type": "rwkv7"}, "expected a checkpoint of RWKV-7"),
        ("rwkv6", {"head_size": 5}, "expected the head size to divide"),
        ("rwkv6", {"attention_hidden_size": 8}, "expected attention_hidden_size to be hidden_size"),
        ("rwkv5", {"hidden_size": "wide"}, "expected hidden_size to be a positive integer"),
        ("rwkv", {"quantization_config": {"bits": 4}}, "expected quant_method to be one of gptq"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(generation, change, told, tmp_path):
    save_random_rwkv(tmp_path, generation, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=told):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["w_lora.lora.0.weight", "v_lora.lora.2.bias", "x_a"])
def test_a_missing_tensor_is_named(name, tmp_path):
    save_random_rwkv(tmp_path, "rwkv7", 1)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (0, 1):
        tensors.pop(f"model.layers.{layer}.attn.{name}", None)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"expected a tensor 'model\.layers\.\d\.attn\.{name}'"):
        Model.from_pretrained(tmp_path)


def test_values_of_layer_0_left_over_by_old_files_are_not_read(tmp_path):
    save_random_rwkv(tmp_path, "rwkv7", 1)
    expected = Model.from_pretrained(tmp_path).forward(IDS).logits
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("0.weight", "2.weight", "2.bias"):
        tensors[f"model.layers.0.attn.v_lora.lora.{part}"] = (
            tensors[f"model.layers.1.attn.v_lora.lora.{part}"] + 1
        )
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(Model.from_pretrained(tmp_path).forward(IDS).logits, expected)


def test_every_field_of_the_config_is_in_the_key(tmp_path):
    save_random_rwkv(tmp_path, "rwkv6", 1)
    model = Model.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_size_divisor": 5}))
    other = Model.from_pretrained(tmp_path)
    assert other.identity != model.identity
    assert not torch.equal(other.forward(IDS).logits, model.forward(IDS).logits)


def test_the_two_halves_of_a_layer_stand_together(models):
    block = models("rwkv6").config.blocks[0]
    with pytest.raises(
        ConfigError, match="a time mix and a token-shifted channel mixer, found a layer with only"
    ):
        replace(block, channel_mixer=MlpSpec(40, "relu2", is_gated=False))
    with pytest.raises(
        ConfigError, match="a time mix and a token-shifted channel mixer, found a layer with only"
    ):
        replace(block, mixers=(AttentionSpec(4, 4, 6),))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_final_norm_has_the_epsilon_of_the_reference(models, generation):
    """Up to version 6, the reference builds its final norm without the epsilon of the config."""
    config = replace(models(generation).config, norm_eps=1e-3)
    assert config.final_norm_eps == (1e-3 if generation == "rwkv7" else 1e-5)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_up_to_the_second_token_shift_reaches_later_positions(models, generation):
    config = models(generation).config
    last = config.num_layers - 1
    kinds = {point.kind for point in config.hook_points if point.layer == last} - {"resid_post"}
    here = {kind for kind in kinds if config.reach(HookPoint(kind, last)) == "here"}
    assert here == {"mlp_pre_act", "mlp_post_act", "mlp_post", "mlp_out"}
    assert config.reach(HookPoint.resid_post(0)) == config.reach(HookPoint("embed")) == "later"


def test_a_grid_of_states_costs_what_it_changes(models):
    model = models("rwkv7")
    prompt, layers = IDS[:12], models("rwkv7").config.num_layers
    other = model.forward(IDS[20:32], HookSpec().capture("blocks.*.rwkv.hook_state_seq"))
    runs = []
    for layer in range(layers):
        for place in range(len(prompt)):
            point = HookPoint.rwkv_state_seq(layer)
            state = other[point][:, :, place : place + 1]
            runs.append(Run(prompt, HookSpec().intervene(point, Replace(state, positions=(place,)))))
    planned = mizarr.run(model, runs)
    for run, found in zip(runs, planned, strict=True):
        alone = model.forward(run.prompt, run.hooks, want=run.want)
        scale = float(alone.logits.abs().max())
        assert float((found.logits - alone.logits).abs().max()) <= 1e-5 * scale


def test_configs_of_random_models_differ():
    assert len({json.dumps(draw_config("rwkv7", seed)) for seed in range(8)}) > 4
