"""Quantised checkpoints: the weights their formats stand for, whoever reads them, and nothing else taken."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import Model, capture, open_store
from mizarr.stages.forward.checkpoints.checkpoint import Checkpoint
from mizarr.stages.forward.checkpoints.quantised.reading import scheme_of
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.models.residency import bytes_of
from mizarr.stages.logits.component_weights import component_weights
from mizarr.store.errors import ConfigError, WeightsError
from mizarr.workflows.cli import run as mizarr_command
from tests.layer_parts import part_of

from .. import random_models
from ..random_hybrids import save_random_hybrid

IDS = [5, 17, 3, 250, 9, 40]
LINEAR = ("_proj.weight",)
GROUP = 8


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "memo"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    random_models.save_random_model(
        folder, "llama", 4, tie_word_embeddings=False, intermediate_size=40, rope_parameters=rope, **sizes
    )
    return folder


def word(values, bits):
    """Whole numbers as one word of int32, the first lowest."""
    made = sum(int(value) << (bits * place) for place, value in enumerate(values))
    return made - (1 << 32) if made >= 1 << 31 else made


def words(matrix, bits, dim, order=None):
    """A matrix of whole numbers packed along a dimension, word by word."""
    rows = matrix if dim == 1 else matrix.T
    count = 32 // bits
    packed = [
        [
            word([row[start + place] for place in (order or range(count))], bits)
            for start in range(0, len(row), count)
        ]
        for row in rows.tolist()
    ]
    made = torch.tensor(packed, dtype=torch.int32)
    return (made if dim == 1 else made.T).contiguous()


def pack_gptq(weight, rng, *, bits=4, v2=False, shuffled=False):
    out, into = weight.shape
    groups = into // GROUP
    index = torch.arange(into) // GROUP
    if shuffled:
        index = index[torch.randperm(into, generator=rng)]
    values = torch.randint(0, 1 << bits, (into, out), generator=rng)
    # The first format has no way to say 2^bits; every other zero, 0 among them, must come back.
    zeros = torch.randint(0, 1 << bits, (groups, out), generator=rng)
    scales = (torch.rand(groups, out, generator=rng) * 0.1).half()
    plain = torch.empty(out, into)
    for o in range(out):
        for i in range(into):
            g = int(index[i])
            plain[o, i] = scales[g, o].float() * float(values[i, o] - zeros[g, o])
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    parts = {
        "qweight": words(values, bits, 0),
        "qzeros": words(stored, bits, 1),
        "scales": scales,
        "g_idx": index.to(torch.int32),
    }
    return parts, plain


def pack_awq(weight, rng):
    out, into = weight.shape
    values = torch.randint(0, 16, (into, out), generator=rng)
    zeros = torch.randint(0, 16, (into // GROUP, out), generator=rng)
    scales = (torch.rand(into // GROUP, out, generator=rng) * 0.1).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ, packing_utils
    parts = {
        "qweight": words(values, 4, 1, order),
        "qzeros": words(zeros, 4, 1, order),
        "scales": scales,
    }
    spread = [t.float().repeat_interleave(GROUP, 0) for t in (zeros, scales)]
    return parts, ((values.float() - spread[0]) * spread[1]).T.contiguous()


NF4 = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0])


def pack_nf4(weight, rng, *, double=False):
    size = weight.numel()
    codes = torch.randint(0, 16, (size,), generator=rng)
    blocks = -(-size // 64)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {
        "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": NF4.clone(),
    }
    absmax = torch.rand(blocks, generator=rng)
    if double:
        outer = torch.rand(-(-blocks // 4), generator=rng)
        table = torch.linspace(-1, 1, 256)
        inner = torch.randint(0, 256, (blocks,), generator=rng)
        facts |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.3}
        parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
        parts["weight.absmax"] = inner.to(torch.uint8)
        absmax = torch.tensor([table[inner[b]] * outer[b // 4] + 0.3 for b in range(blocks)])
    else:
        parts["weight.absmax"] = absmax
    state = json.dumps(facts).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    plain = torch.tensor([NF4[codes[n]] * absmax[n // 64] for n in range(size)])
    return parts, plain.reshape(weight.shape)


def pack_int8(weight, rng):
    values = torch.randint(-127, 128, weight.shape, generator=rng)
    largest = torch.rand(len(weight), generator=rng)
    parts = {
        "weight": values.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0).to(torch.uint8),
    }
    return parts, values * largest[:, None] / 127


def pack_fp8(weight, rng):
    held = weight.to(torch.float8_e4m3fn)
    scales = torch.rand(-(-weight.shape[0] // 16), -(-weight.shape[1] // 12), generator=rng)
    plain = torch.empty_like(weight)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            plain[o, i] = held[o, i].float() * scales[o // 16, i // 12]
    return {"weight": held, "weight_scale_inv": scales}, plain


def pack_compressed(weight, rng, *, bits=4, zero=False, shuffled=False, channel=False):
    out, into = weight.shape
    low = -(1 << (bits - 1))
    groups = 1 if channel else into // GROUP
    values = torch.randint(low, -low, weight.shape, generator=rng)
    zeros = (
        torch.randint(low, -low, (out, groups), generator=rng) if zero else torch.zeros(out, groups).long()
    )
    scales = torch.rand(out, groups, generator=rng).bfloat16()
    index = torch.zeros(into).long() if channel else torch.arange(into) // GROUP
    if shuffled:
        index = index[torch.randperm(into, generator=rng)]
    parts = {
        "weight_packed": words(values - low, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, into]),
    }
    if zero:
        parts["weight_zero_point"] = words(zeros - low, bits, 0)
    if shuffled:
        parts["weight_g_idx"] = index.to(torch.int32)
    return parts, (values - zeros[:, index]) * scales.float()[:, index]


def pack_float(weight, rng, *, channel):
    held = weight.to(torch.float8_e4m3fn)
    scales = torch.rand((len(weight), 1) if channel else (1,), generator=rng)
    return {"weight": held, "weight_scale": scales}, held.float() * scales


def pack_rows(weight, rng):
    values = torch.randint(-128, 128, weight.shape, generator=rng)
    scales = torch.rand(len(weight), 1, generator=rng)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def ct(form, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
CASES = {
    "gptq": (GPTQ, pack_gptq, {}),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, pack_gptq, {"bits": 8}),
    "gptq, by activation": (GPTQ | {"desc_act": True}, pack_gptq, {"shuffled": True}),
    "gptq, second format": (GPTQ | {"checkpoint_format": "gptq_v2"}, pack_gptq, {"v2": True}),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"},
        pack_awq,
        {},
    ),
    "nf4": (BNB, pack_nf4, {}),
    "nf4, double": (BNB | {"bnb_4bit_use_double_quant": True}, pack_nf4, {"double": True}),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack_int8, {}),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 12], "activation_scheme": "dynamic"},
        pack_fp8,
        {},
    ),
    "packed int4": (ct("pack-quantized", **INT4), pack_compressed, {}),
    "packed int4, zeros": (ct("pack-quantized", **INT4), pack_compressed, {"zero": True}),
    "packed int4, by activation": (ct("pack-quantized", **INT4), pack_compressed, {"shuffled": True}),
    "packed int8, by row": (
        ct("pack-quantized", num_bits=8, type="int", strategy="channel"),
        pack_compressed,
        {"bits": 8, "channel": True},
    ),
    "int8 rows": (ct("int-quantized", num_bits=8, type="int", strategy="channel"), pack_rows, {}),
    "float8 tensor": (
        ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
        pack_float,
        {"channel": False},
    ),
    "float8 rows": (
        ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        pack_float,
        {"channel": True},
    ),
}


def quantise(base, folder, case, seed=0):
    """The base with every projection packed; returns (its folder, that of the plain weights)."""
    config, pack, how = CASES[case]
    rng = torch.Generator().manual_seed(seed)
    held, plain = {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        plain[name] = held[name] = weight
        if name.endswith(LINEAR):
            parts, plain[name] = pack(weight, rng, **how)
            del held[name]
            held |= {f"{name.removesuffix('.weight')}.{role}": part for role, part in parts.items()}
    packed, other = (shutil.copytree(base, folder / name) for name in ("packed", "plain"))
    save_file(held, packed / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, other / "model.safetensors")
    edit(packed, quantization_config=config)
    return packed, other


def edit(folder, **keys):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_model_is_the_model_of_its_plain_weights(base, tmp_path, case):
    packed, plain = quantise(base, tmp_path, case)
    ours, other = (Model.from_pretrained(each, device="cpu") for each in (packed, plain))
    for layer, wanted in zip(ours.network.weights.layers, other.network.weights.layers, strict=True):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            found, expected = part_of(layer, name).weight, part_of(wanted, name).weight
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    expected = other.forward(IDS).logits
    assert float((ours.forward(IDS).logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert ours.config == other.config and ours.identity != other.identity


def test_what_reads_weights_beside_the_network_reads_the_same(base, tmp_path):
    packed, plain = (resolve(folder) for folder in quantise(base, tmp_path, "nf4, double"))
    for part in ("attention", "mlp"):
        found, wanted = (
            component_weights(f.checkpoint, f.architecture(), part).compute() for f in (packed, plain)
        )
        for name in wanted:
            np.testing.assert_allclose(found[name].values, wanted[name].values, rtol=1e-6, atol=1e-7)


def test_the_identity_is_the_quantised_bytes_and_what_of_the_settings_counts(base, tmp_path):
    packed, _ = quantise(base, tmp_path, "gptq")
    first = resolve(packed).identity()
    edit(packed, quantization_config=GPTQ | {"damp_percent": 0.3, "meta": {"quantizer": "x"}})
    assert resolve(packed).identity() == first
    edit(packed, quantization_config=GPTQ | {"checkpoint_format": "gptq_v2"})
    assert resolve(packed).identity() != first
    other, _ = quantise(base, tmp_path / "other", "gptq", seed=1)
    assert resolve(other).identity() != first


def test_experts_of_mxfp4_are_what_transformers_makes_of_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=rng).to(torch.uint8)
    scales = torch.randint(110, 140, (3, 6, 2), generator=rng).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    scheme = scheme_of({"quantization_config": {"quant_method": "mxfp4"}})
    checkpoint = Checkpoint((tmp_path / "model.safetensors",), scheme)
    assert checkpoint.shapes == {name: (3, 64, 6)}
    np.testing.assert_array_equal(checkpoint.array(name), expected.numpy())


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_what_their_library_makes_of_them(tmp_path, kind, double):
    library = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(48, 72, generator=torch.Generator().manual_seed(0))
    packed, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    held = {"a.weight": packed} | {
        f"a.weight.{key}": part for key, part in state.as_dict(packed=True).items()
    }
    save_file(held, tmp_path / "model.safetensors")
    scheme = scheme_of({"quantization_config": BNB | {"bnb_4bit_quant_type": kind}})
    found = Checkpoint((tmp_path / "model.safetensors",), scheme).array("a.weight")
    np.testing.assert_allclose(found, library.dequantize_4bit(packed, state).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_packed_integers_are_what_their_library_makes_of_them(tmp_path, bits, symmetric):
    library = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="compressed-tensors is not installed"
    )
    rng = torch.Generator().manual_seed(0)
    low = -(1 << (bits - 1))
    values = torch.randint(low, -low, (24, 52), generator=rng).to(torch.int8)
    zeros = torch.randint(low, -low, (24, 1), generator=rng).to(torch.int8)
    scales = torch.rand(24, 1, generator=rng)
    held = {
        "a.weight_packed": library.pack_to_int32(values, bits).contiguous(),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor([24, 52]),
    }
    if not symmetric:
        held["a.weight_zero_point"] = library.pack_to_int32(zeros, bits, packed_dim=0).contiguous()
    save_file(held, tmp_path / "model.safetensors")
    config = ct("pack-quantized", num_bits=bits, type="int", strategy="channel", symmetric=symmetric)
    checkpoint = Checkpoint((tmp_path / "model.safetensors",), scheme_of({"quantization_config": config}))
    expected = (values.float() - (0 if symmetric else zeros.float())) * scales
    np.testing.assert_allclose(checkpoint.array("a.weight"), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "hqq"}, "expected quant_method to be one of gptq, awq, .*, found 'hqq'"),
        ({}, "found None"),
        ("int4", "found None"),
        (GPTQ | {"bits": 3}, "expected bits of gptq to be one of 2, 4, 8, found 3"),
        (GPTQ | {"bits": True}, "found True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "found 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "with the same settings for all modules"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "expected version of awq .* found 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "found neither"),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage of bitsandbytes"),
        ({"quant_method": "fp8"}, r"expected the block size of fp8 as \[rows, columns\], found None"),
        (
            ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group"),
            "found 'nvfp4-pack-quantized'",
        ),
        (
            ct("pack-quantized", **INT4) | {"sparsity_config": {"format": "2:4"}},
            "sparsity_config of compressed-tensors to be absent, found {'format': '2:4'}",
        ),
        (ct("pack-quantized", **INT4 | {"num_bits": 3}), "expected num_bits .* found 3"),
        (
            ct("int-quantized", **INT4)
            | {"config_groups": {"a": {"weights": INT4}, "b": {"weights": INT4 | {"num_bits": 8}}}},
            "to have one setting for all weights",
        ),
    ],
)
def test_other_methods_and_settings_are_refused_in_one_line(base, tmp_path, config, said):
    folder = shutil.copytree(base, tmp_path / "model")
    edit(folder, quantization_config=config)
    with pytest.raises(ConfigError, match=said) as caught:
        Model.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_inspection_tells_what_a_quantised_checkpoint_is_and_what_stands_in_the_way(base, tmp_path, capsys):
    packed, _ = quantise(base, tmp_path, "gptq")
    asked = ["models", "inspect", str(packed), "--json", "--quiet"]
    assert mizarr_command(asked) == 0
    assert json.loads(capsys.readouterr().out)["compatible"]
    edit(packed, quantization_config={"quant_method": "hqq"})
    assert mizarr_command(asked) == 1
    (issue,) = json.loads(capsys.readouterr().out)["issues"]
    assert "found 'hqq'" in issue


def test_parts_that_do_not_fit_are_named(base, tmp_path):
    packed, _ = quantise(base, tmp_path, "gptq")
    held = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    save_file(held | {f"{name}.scales": torch.ones(1, 3).half()}, packed / "model.safetensors")
    with pytest.raises(
        WeightsError, match=rf"weight '{name}\.weight' with shapes that fit together for gptq"
    ):
        Model.from_pretrained(packed, device="cpu")
    del held[f"{name}.scales"]
    save_file(held, packed / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"expected a tensor '{name}\.scales' for the quantised"):
        Model.from_pretrained(packed, device="cpu")
    edit(packed, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(WeightsError, match=r"a tensor 'model\.layers\.0\.self_attn\.q_proj\.weight'"):
        Model.from_pretrained(packed, device="cpu")


@pytest.mark.parametrize(
    "case", ["gptq, by activation", "awq", "nf4, double", "int8", "fp8", "packed int4, zeros"]
)
def test_a_quantised_model_is_harvested_layer_by_layer_with_the_same_bits(base, tmp_path, case):
    """With room for its largest layer alone, as plain weights: each is dequantised once."""
    check_layer_by_layer(*quantise(base, tmp_path, case), tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_experts_of_mxfp4_are_harvested_layer_by_layer_with_the_same_bits(tmp_path, dtype):
    """gpt-oss, with every matrix of its experts packed."""
    save_random_hybrid(
        tmp_path / "packed", "gpt_oss", 2, hidden_size=32, intermediate_size=32, num_hidden_layers=3
    )
    plain, packed = shutil.copytree(tmp_path / "packed", tmp_path / "plain"), tmp_path / "packed"
    held = load_file(packed / "model.safetensors")
    rng = torch.Generator().manual_seed(1)
    values = {name: tensor.contiguous() for name, tensor in held.items()}
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = held.pop(name).shape
        shape = (experts, out, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=rng).to(torch.uint8)
        scales = torch.randint(122, 127, shape, generator=rng).to(torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        small = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
        powers = (2.0 ** (scales.float() - 127))[..., None]
        values[name] = (small * powers).flatten(-2).transpose(1, 2).contiguous()
    save_file(held, packed / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    edit(packed, quantization_config={"quant_method": "mxfp4"})
    check_layer_by_layer(packed, plain, tmp_path, dtype)


def check_layer_by_layer(packed, plain, folder, dtype="float32"):
    """A harvest through one layer after another gives the bits of one through batches; near those of the
    plain weights, which in float32 are equal but for rounding."""
    config = Model.from_pretrained(packed, device="cpu").config
    size = 4 if dtype == "float32" else 2
    few = Model.from_pretrained(packed, max_memory=bytes_of(config, size).least, device="cpu", dtype=dtype)
    prompts, hooks = (
        [IDS, IDS[:3], IDS * 4],
        ["hook_embed", "blocks.*.hook_resid_post", "blocks.*.attn.hook_z"],
    )
    found, contents = {}, {}
    for name, model, order in (
        ("batch", packed, "batch"),
        ("layer", few, "layer"),
        ("plain", plain, "batch"),
    ):
        store = open_store(folder / "stores" / name, durability="process")
        held = model if model is few else Model.from_pretrained(model, device="cpu", dtype=dtype)
        found[name] = capture(
            held, prompts, hooks, store=store, order=order, segment_tokens=16, progress=False
        )
        contents[name] = {record.key: record.content for record in store.records()}
    assert few.streamed.window.reads == dict.fromkeys(range(config.num_layers), 1)
    assert contents["layer"] == contents["batch"]
    bar = 1e-5 if dtype == "float32" else 0
    for name in found["batch"].data_vars:
        whole = np.asarray(found["batch"][name].values, np.float32)
        np.testing.assert_array_equal(np.asarray(found["layer"][name].values, np.float32), whole)
        close = np.asarray(found["plain"][name].values, np.float32)
        np.testing.assert_allclose(whole, close, atol=bar * np.abs(close).max())
