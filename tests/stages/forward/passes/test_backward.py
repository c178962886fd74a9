"""A pass and the way back: gradients are those of transformers, and what small changes at each point do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mizarr import HookPoint, HookSpec, Model
from mizarr.stages.forward.hooks.interventions import Add, Replace, Scale
from mizarr.stages.forward.hooks.spec import Capture
from mizarr.stages.forward.hooks.wants import ALL_LOGITS, LAST_LOGITS
from mizarr.stages.forward.passes.backward import Gradients
from mizarr.store.errors import ConfigError, HookPointNotFound
from tests.stages.forward.random_hybrids import DRAWS, save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, VOCAB, save_random_model
from tests.stages.forward.random_rwkv import GENERATIONS, save_random_rwkv

pytest.importorskip("transformers")
SAVE: dict[str, Any] = {
    **dict.fromkeys(DRAWS, save_random_hybrid),
    **dict.fromkeys(FAMILIES, save_random_model),
    **dict.fromkeys(GENERATIONS, save_random_rwkv),
}
FEW = ("gemma2", "mixtral", "mamba2", "qwen3_next", "rwkv7")
"""One of each kind of layer; the others are slow."""
EVERY = ("grad:*", "grad:*_input", "grad:*expert_out")
SPLIT = ("q_input", "k_input", "v_input")


def by_family(names: Any) -> list[Any]:
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


def draw(rows: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(2, VOCAB, (rows, length), generator=generator).tolist()


def metric(logits: Tensor) -> Tensor:
    """A logit difference at the last position wanted, and a little of every other."""
    weights = torch.arange(logits.shape[-1], dtype=logits.dtype).sin()
    return logits[:, -1, 3] - logits[:, -1, 7] + 0.1 * (logits.tanh() @ weights).sum(-1)


def cotangent(logits: Tensor) -> Tensor:
    with torch.enable_grad():
        given = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(metric(given).sum(), given)
    return found


def every_spec(model: Model) -> HookSpec:
    """The gradient at every point, those that patterns leave out as well."""
    held = {point.kind for point in model.hook_points}
    asked = [EVERY[0], *EVERY[1:2] * ("q_input" in held), *EVERY[2:] * ("expert_out" in held)]
    return HookSpec().capture(*asked)


def gradients(model: Model, rows: list[list[int]], spec: HookSpec, **given: Any) -> Gradients:
    return model.backward(rows, model.bind(spec), LAST_LOGITS, cotangent, **given)[1]


# References


PLACES = {
    "z": ("self_attn.o_proj", "input"),
    "mlp_post_act": ("mlp.down_proj", "input"),
    "mlp_pre": ("mlp", "input"),
    "mlp_post": ("mlp", "output"),
    "attn_out": ("self_attn", "output"),
    "mlp_out": ("mlp", "output"),
    "resid_pre": ("", "input"),
    "resid_post": ("", "output"),
}
"""Kind -> where transformers has it in a layer."""
NAMES = {
    "gemma2": {
        "attn_out": ("post_attention_layernorm", "output"),
        "mlp_out": ("post_feedforward_layernorm", "output"),
    },
    "starcoder2": {"mlp_post_act": ("mlp.c_proj", "input")},
}


def seen_in_transformers(reference: Any, family: str, ids: Tensor) -> tuple[Tensor, dict[Any, Tensor]]:
    """Logits, and activations in the graph by (kind, layer), taken by hooks on its modules."""
    seen: dict[Any, Tensor] = {}

    def keep(place: Any, side: str) -> Any:
        def hook(module: Any, inputs: Any, keywords: Any, output: Any) -> None:
            given = [*inputs, *keywords.values()] if side == "input" else output
            seen[place] = given if isinstance(given, Tensor) else next(x for x in given if x is not None)

        return hook

    hooks = []
    for layer, block in enumerate(reference.model.layers):
        for kind, (name, side) in (PLACES | NAMES.get(family, {})).items():
            module = block.get_submodule(name)
            hooks.append(module.register_forward_hook(keep((kind, layer), side), with_kwargs=True))
    logits = reference(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers_wherever_it_shows_them(family, tmp_path):
    reference = save_random_model(tmp_path, family, 5, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw(2, 23)
    logits, seen = seen_in_transformers(reference, family, torch.tensor(ids))
    expected = torch.autograd.grad(metric(logits[:, -1:]).sum(), list(seen.values()))
    points = [HookPoint(kind, layer) for kind, layer in seen]
    found = gradients(model, ids, HookSpec().capture(*(f"grad:{point}" for point in points)))
    for point, theirs in zip(points, expected, strict=True):
        ours = found[Capture(point, is_gradient=True)]
        ours = ours.transpose(1, 2).flatten(2) if point.kind == "z" else ours
        scale = theirs.abs().max()
        assert scale > 1e-4
        assert (ours - theirs).abs().max() <= 1e-4 * scale, point


@pytest.mark.parametrize("family", by_family(DRAWS))
def test_gradients_of_streams_are_those_of_transformers(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 2, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw(2, 19)
    streams: list[Tensor] = []
    body = getattr(reference.base_model, "decoder", reference.base_model)
    body = body.model if body is reference else body
    body = getattr(body, "encoder", body)
    layers = next(getattr(body, name) for name in ("layers", "h", "blocks", "layer") if hasattr(body, name))

    def keep(module: Any, inputs: Any, output: Any) -> None:
        streams.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    logits = reference(torch.tensor(ids), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    expected = torch.autograd.grad(metric(logits[:, -1:]).sum(), streams)
    found = gradients(model, ids, HookSpec().capture("grad:blocks.*.hook_resid_post"))
    assert len(found) == len(expected)
    for (capture, ours), theirs in zip(found.items(), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), capture.point


@pytest.mark.parametrize(
    ("family", "attention"),
    [("gpt2", "attn"), ("mixtral", "self_attn"), ("falcon", "self_attention"), ("deepseek_v3", "self_attn")],
)
def test_gradients_of_parts_are_those_of_transformers(family, attention, tmp_path):
    """Families whose parts are added to the stream as their modules give them."""
    reference = save_random_hybrid(tmp_path, family, 4, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw(2, 15)
    body = reference.base_model
    layers = body.h if hasattr(body, "h") else body.layers
    seen: dict[HookPoint, Tensor] = {}

    def keep(point: HookPoint) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            seen[point] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [
        block.get_submodule(name).register_forward_hook(keep(HookPoint(kind, layer)))
        for layer, block in enumerate(layers)
        for kind, name in (("attn_out", attention), ("mlp_out", "mlp"))
    ]
    logits = reference(torch.tensor(ids), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    expected = torch.autograd.grad(metric(logits[:, -1:]).sum(), list(seen.values()))
    found = gradients(model, ids, HookSpec().capture(*(f"grad:{point}" for point in seen)))
    for point, theirs in zip(seen, expected, strict=True):
        ours = found[Capture(point, is_gradient=True)]
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), point


@pytest.fixture
def float64_throughout(monkeypatch):
    """Norms, softmax and routers compute in float32 whatever the model's dtype, and their rounding drowns
    what a small change does: of a gradient of 1e-5 beside a metric of 0.6, all of it. Here they do not."""
    narrowed, softmax = Tensor.float, torch.softmax

    def kept(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else narrowed(x)

    def wide(x: Tensor, *given: Any, dtype: Any = None, **named: Any) -> Tensor:
        return softmax(x, *given, dtype=None if x.dtype == torch.float64 else dtype, **named)

    monkeypatch.setattr(Tensor, "float", kept)
    monkeypatch.setattr(torch, "softmax", wide)


@pytest.mark.parametrize("family", by_family(SAVE))
@pytest.mark.usefixtures("float64_throughout")
def test_gradients_at_every_hook_point_are_what_a_small_change_does(family, tmp_path):
    SAVE[family](tmp_path, family, 3, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path, dtype="float64"), draw(1, 9)
    _, found = model.backward(ids, model.bind(every_spec(model)), LAST_LOGITS, cotangent)
    assert {c.point for c in found} == {p for p in model.hook_points if not is_derived(p)}
    for capture, gradient in found.items():
        assert gradient.isfinite().all(), capture
        along = direction(model, ids, capture.point, gradient)
        expected, typical = float((gradient * along).sum()), float(gradient.norm()) / along.numel() ** 0.5
        # The smaller steps are for what bends, and for routers that choose others a little farther on.
        slopes = [slope(model, ids, capture.point, along, step) for step in (1e-3, 1e-4, 1e-5)]
        misses = [abs(found - expected) for found in slopes]
        assert min(misses) <= 2e-5 * typical + 1e-15, (capture.point, misses, typical)


def is_derived(point: HookPoint) -> bool:
    from mizarr.stages.forward.architectures.points import BY_NAME

    return BY_NAME[point.kind].is_derived


def direction(model: Model, ids: list[list[int]], point: HookPoint, gradient: Tensor) -> Tensor:
    """A random unit vector; at decays, which must stay between 0 and 1, the decays themselves."""
    along = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if "decay" in point.kind:
        along = model.forward(ids, HookSpec().capture(point))[point].double()
    return along / along.norm()


def slope(model: Model, ids: list[list[int]], point: HookPoint, along: Tensor, step: float) -> float:
    """How fast the metric moves when the point is moved, by plain passes under an intervention."""
    moved = [
        float(
            metric(model.forward(ids, HookSpec().intervene(point, Add(along * by)), want=LAST_LOGITS).logits)
        )
        for by in (step, -step)
    ]
    return (moved[0] - moved[1]) / (2 * step)


# What is asked for decides nothing but what is given


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama", 4)
    return Model.from_pretrained(folder)


def assert_equal(found: Gradients, expected: Gradients, bound: float) -> None:
    assert found.keys() == expected.keys() and found
    for capture, ours in found.items():
        scale = float(expected[capture].abs().max())
        assert float((ours - expected[capture]).abs().max()) <= bound * scale, capture


@pytest.mark.parametrize("family", ["llama", "mixtral", "rwkv7", "qwen3_next", "zamba"])
def test_layers_computed_again_give_the_same_bits(family, tmp_path):
    SAVE[family](tmp_path, family, 1, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw(2, 11)
    spec = every_spec(model)
    assert_equal(gradients(model, ids, spec, memory=0), gradients(model, ids, spec), 0.0)


def test_weights_of_all_pairs_of_tokens_count_where_somebody_looks_at_them(llama, monkeypatch):
    """Three numbers of each head and pair in each layer, beside what tokens take without them."""
    from mizarr.stages.forward.passes import backward

    again = []
    monkeypatch.setattr(backward, "recomputed", lambda network: again.append(network) or network)
    config, length = llama.config, 96
    of_tokens = length * config.num_layers * config.bytes_per_token(4)
    of_pairs = 3 * config.num_layers * config.axis_sizes["head"] * length**2 * 4
    for points, bytes_ in (("hook_resid_post", 0), ("attn.hook_pattern", of_pairs)):
        spec = HookSpec().capture(f"grad:blocks.*.{points}")
        for short in (0, 1):
            gradients(llama, draw(1, length), spec, memory=of_tokens + bytes_ - short)
            assert bool(again) == bool(short), points
            again.clear()


def test_a_gradient_does_not_depend_on_the_others_asked_for(llama):
    ids = draw(2, 13)
    together = gradients(llama, ids, every_spec(llama))
    for capture, expected in together.items():
        alone = gradients(llama, ids, HookSpec().capture(capture.name))
        assert_equal(alone, {capture: expected}, 1e-5)


def test_rows_of_a_batch_do_not_meet(llama):
    ids, spec = draw(3, 12), HookSpec().capture("grad:blocks.*")
    together = gradients(llama, ids, spec)
    for row, prompt in enumerate(ids):
        expected = {capture: x[row : row + 1] for capture, x in together.items()}
        assert_equal(gradients(llama, [prompt], spec), expected, 1e-5)


def test_activations_asked_for_beside_gradients_are_those_of_a_plain_pass(llama):
    ids = draw(2, 9)
    spec = HookSpec().capture("grad:blocks.*.hook_resid_post", "blocks.*.hook_resid_post", "hook_embed")
    logits, found = llama.backward(ids, llama.bind(spec), ALL_LOGITS, cotangent)
    plain = llama.forward(torch.tensor(ids), HookSpec().capture("blocks.*.hook_resid_post", "hook_embed"))
    torch.testing.assert_close(logits, plain.logits, rtol=0, atol=1e-5)
    for point in plain:
        torch.testing.assert_close(found[Capture(point)], plain[point], rtol=0, atol=1e-5)
        assert not found[Capture(point)].requires_grad
    assert len(found) == 2 * llama.config.num_layers + 1


def test_interventions_hold_on_the_way_back(llama):
    ids, point = draw(1, 9), HookPoint.resid_post(0)
    value = torch.randn(llama.config.hidden_size, generator=torch.Generator().manual_seed(1))
    spec = HookSpec().intervene(point, Replace(value, positions=(4,)))
    spec = spec.intervene("blocks.1.hook_attn_out", Scale(0.5))
    spec = spec.capture(f"grad:{point}", "grad:blocks.1.hook_attn_out")
    spec = spec.capture(f"grad:{point}", "grad:blocks.1.hook_attn_out", when="before")
    found = gradients(llama, ids, spec)
    after, before = (found[Capture(point, when, True)] for when in ("after", "before"))
    assert before[0, 4].abs().max() == 0, "what is replaced moves nothing"
    assert after[0, 4].abs().max() > 1e-3
    kept = [position for position in range(9) if position != 4]
    assert torch.equal(before[0, kept], after[0, kept])
    scaled, whole = (found[Capture(HookPoint.attn_out(1), when, True)] for when in ("before", "after"))
    torch.testing.assert_close(scaled, 0.5 * whole, rtol=0, atol=0)


def test_weights_that_are_trained_change_nothing_and_get_nothing(llama):
    ids, spec = draw(1, 9), HookSpec().capture("grad:blocks.0.attn.hook_k", "grad:blocks.0.attn.hook_v")
    expected, weight = gradients(llama, ids, spec), llama.network.embedding
    weight.requires_grad_(True)
    try:
        assert_equal(gradients(llama, ids, spec), expected, 1e-6)
        assert weight.grad is None
    finally:
        weight.requires_grad_(False)


# What cannot be


def test_what_has_no_gradient_is_refused_in_one_line(llama, tmp_path):
    with pytest.raises(HookPointNotFound, match=r"did you mean 'blocks\.0\.hook_resid_pre'"):
        HookSpec().capture("grad:blocks.0.hook_resid_prr")
    with pytest.raises(HookPointNotFound, match=r"blocks\.9\.hook_resid_pre"):
        llama.bind(HookSpec().capture("grad:blocks.9.hook_resid_pre"))
    save_random_rwkv(tmp_path, "rwkv7", 0)
    with pytest.raises(HookPointNotFound, match="expected a hook point that later operations read"):
        Model.from_pretrained(tmp_path).bind(HookSpec().capture("grad:blocks.0.rwkv.hook_alpha_raw"))


def test_layers_gone_through_again_have_no_gradients(llama):
    from dataclasses import replace

    spec = replace(llama.bind(HookSpec().capture("grad:blocks.0.hook_resid_pre")), order=(0, 0, 1))
    with pytest.raises(ConfigError, match="layers that run once"):
        llama.backward(draw(1, 4), spec, LAST_LOGITS, cotangent)
