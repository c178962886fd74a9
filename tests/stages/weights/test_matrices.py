"""Matrices read off checkpoints are those of the pass: what they make of its inputs is what its hooks show.

Norms folded in, of every family whose heads and MLPs are matrices of the stream; what is none is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from mizarr import HookSpec, Model
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.weights.folded import FoldedMatrices
from mizarr.stages.weights.matrices import PlainMatrices, attending
from mizarr.store.errors import ConfigError

from ..forward.random_hybrids import save_random_hybrid
from ..forward.random_models import FAMILIES, save_random_model
from ..forward.random_rwkv import draw_config, draw_tensors
from ..forward.toy_rwkv6 import save

pytest.importorskip("transformers")

HYBRIDS = (
    *("gpt2", "opt", "gpt_neox", "bloom", "falcon", "mpt", "codegen"),
    *("granite", "cohere", "olmo2", "glm"),
)
IDS = [3, 200, 31, 8, 8, 120, 77, 5]


def matrices(folder: Path) -> PlainMatrices:
    files = resolve(str(folder))
    return PlainMatrices(files.checkpoint, files.architecture())


def saved(family: str, seed: int, folder: Path) -> Path:
    make = save_random_model if family in FAMILIES else save_random_hybrid
    make(folder, family, seed, tokenizer=False)
    return folder


def near(found: np.ndarray, expected: np.ndarray) -> None:
    expected = np.asarray(expected)
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_folded_matrices_make_of_what_norms_divide_what_the_pass_makes_of_it(family, seed, tmp_path):
    model = Model.from_pretrained(saved(family, seed, tmp_path))
    cache = model.forward([IDS], HookSpec().capture("*").capture("blocks.*"))
    held = {point: value[0].numpy() for point, value in cache.items()}
    at = {(point.kind, point.layer): value for point, value in held.items()}
    plain = matrices(tmp_path)
    folded = FoldedMatrices(plain, writing=False, unembeddings=False, value_biases=False)
    for layer in range(model.config.num_layers):
        heads = model.config.heads_of(layer)
        read = at.get(("ln1_normalized", layer), at["resid_pre", layer])
        for part in "v" if heads.qk_norm is not None else "qkv":
            for head in range(heads.num_attention_heads):
                found = folded.projection(part, layer, head)
                place = head if part == "q" else head // heads.queries_per_key
                near(read @ found.matrix + found.bias, at[part, layer][place])
        z = at["z", layer]
        added = sum(z[head] @ folded.output(layer, head) for head in range(heads.num_attention_heads))
        scale = at.get(("ln1_post_scale", layer), 1.0)
        made = (added + folded.output_bias(layer)) / scale
        near(made + folded.behind("ln1_post", layer), at["attn_out", layer])
        if model.config.layers[layer].channel_mixer != "experts":
            _check_mlp(model, folded, layer, at)
    final = folded.unembedding(slice(None))
    cap = model.config.final_logit_softcapping
    logits = at["ln_final_normalized", None] @ final.matrix + final.bias
    near(cap * np.tanh(logits / cap) if cap else logits, cache.logits[0].numpy())


def _check_mlp(model: Model, folded: FoldedMatrices, layer: int, at: dict) -> None:
    parallel = model.config.layers[layer].is_parallel
    other = ("ln1_normalized", layer) if parallel else ("resid_mid", layer)
    read = at.get(("ln2_normalized", layer), at.get(other))
    inside = folded.mlp_in(layer)
    first = inside.get("gate", inside["up"])
    near(read @ first.matrix + first.bias, at["mlp_pre_act", layer])
    out = folded.mlp_out(layer)
    scale = at.get(("ln2_post_scale", layer), 1.0)
    made = (at["mlp_post_act", layer] @ out.matrix + out.bias) / scale + folded.behind("ln2_post", layer)
    near(made, at["mlp_out", layer])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "starcoder2"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pass_of_folded_matrices_gives_the_same_logits(family, seed, tmp_path):
    """A whole pass in numpy, of everything folded: logits but for what is added to all of them."""
    model = Model.from_pretrained(saved(family, seed, tmp_path))
    folded = FoldedMatrices(matrices(tmp_path))
    expected = model.forward([IDS]).logits[0].numpy()
    found = literal_pass(model, folded)
    near(found, expected - expected.mean(-1, keepdims=True))
    near(found.mean(-1), np.zeros(len(IDS)))


def literal_pass(model: Model, weights: FoldedMatrices) -> np.ndarray:
    """Norms that only divide, patterns of the pass itself at every layer's own input, MLPs by hand."""
    config = model.config
    patterns = model.forward([IDS], HookSpec().capture("blocks.*.attn.hook_pattern"))
    stream = weights.embedding(np.array(IDS)).astype(np.float64)
    if config.position_rows:
        stream = stream + weights.positions()[: len(IDS)]
    activate = {"silu": silu, "relu": lambda x: np.maximum(x, 0), "gelu_tanh": gelu_tanh, "gelu": gelu}

    def divided(x: np.ndarray) -> np.ndarray:
        # Where a norm takes the mean out, matrices do; the division still is by the spread about it.
        centred = x - x.mean(-1, keepdims=True) if config.norm_type == "layer" else x
        return x / np.sqrt(np.square(centred).mean(-1, keepdims=True) + config.norm_eps)

    for layer in range(config.num_layers):
        heads, read = config.heads_of(layer), divided(stream)
        pattern = patterns[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
        added = np.zeros_like(stream) + weights.output_bias(layer)
        for head in range(heads.num_attention_heads):
            value = weights.projection("v", layer, head)
            assert not value.bias.any()
            added += pattern[head] @ (read @ value.matrix) @ weights.output(layer, head)
        stream = stream + added
        inside, read = weights.mlp_in(layer), divided(stream)
        made = {name: read @ part.matrix + part.bias for name, part in inside.items()}
        act = activate[getattr(config, "activation", None) or config.blocks[layer].channel_mixer.activation]
        post = act(made["gate"]) * made["up"] if "gate" in made else act(made["up"])
        out = weights.mlp_out(layer)
        stream = stream + post @ out.matrix + out.bias
    final = weights.unembedding(slice(None))
    return divided(stream) @ final.matrix + final.bias


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * ndtr(x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_what_is_no_matrix_is_refused_in_a_line(tmp_path):
    config = draw_config("rwkv6", 0)
    rwkv = matrices(save(tmp_path / "rwkv", draw_tensors(config, 0), config))
    with pytest.raises(
        ConfigError, match=r"layer 0 of rwkv6 has no attention heads .*, its mixer is a recurrence"
    ):
        rwkv.projection("q", 0, 0)
    with pytest.raises(
        ConfigError, match="for attention heads with query, key and value matrices, and rwkv6 has none"
    ):
        attending(rwkv.config)
    bloom = matrices(saved("bloom", 0, tmp_path / "bloom"))
    with pytest.raises(ConfigError, match="those of bloom pass through a norm"):
        bloom.embedding(slice(None))
    llama = matrices(saved("llama", 0, tmp_path / "llama"))
    with pytest.raises(ConfigError, match="llama has no learned position embeddings"):
        llama.positions()
    with pytest.raises(ConfigError, match=r"a layer in 0\.\."):
        llama.projection("q", 99, 0)
    with pytest.raises(ConfigError, match=r"a head in 0\.\."):
        llama.projection("q", 0, 99)
    mixtral = matrices(saved("mixtral", 0, tmp_path / "mixtral"))
    with pytest.raises(ConfigError, match=r"layer 0 of mixtral has no MLP .*, its channel mixer is experts"):
        mixtral.mlp_in(0)
    gated = matrices(saved("qwen3_next", 0, tmp_path / "gated"))
    layer = attending(gated.config)[0]
    with pytest.raises(
        ConfigError, match=f"layer {layer} of qwen3_next have no OV circuit, .* multiplied by gates"
    ):
        gated.output(layer, 0)


def test_one_head_reads_no_more_of_a_file_than_its_rows(tmp_path, monkeypatch):
    from mizarr.stages.logits import readout

    read = []
    plain = readout.rounded

    def rounded(values, dtype):
        read.append(values.shape)
        return plain(values, dtype)

    monkeypatch.setattr(readout, "rounded", rounded)
    weights = matrices(saved("llama", 2, tmp_path))
    size, hidden = weights.config.heads_of(0).head_dim, weights.config.hidden_size
    weights.projection("q", 0, 0)
    weights.output(0, 0)
    weights.embedding(slice(5, 9))
    assert [shape for shape in read if len(shape) == 2] == [(size, hidden), (hidden, size), (4, hidden)]
