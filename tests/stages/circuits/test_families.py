"""Families whose parts add to one stream, each with what it has of its own; all others are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mizarr import Model
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.circuits.batches import batches, network_of
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.pairs import Pair, checked_layout
from mizarr.stages.circuits.runs import CircuitRuns
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.forward.edges.cotangents import cotangents
from mizarr.stages.forward.edges.effects import changed_edges
from mizarr.stages.forward.edges.layout import Layout
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.store.errors import ConfigError
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model
from tests.stages.forward.random_rwkv import save_random_rwkv

pytest.importorskip("transformers")
ADDING = (
    *("qwen3", "gemma", "phi3", "starcoder2"),
    *("gpt2", "gpt_neox", "cohere2", "bloom", "gpt_oss", "mixtral", "falcon", "opt"),
)
"""Norms of queries, of 1 + w, projections as one, layer norms; learned positions, parallel layers with one
norm and with two, slopes, sinks and windows, experts, one key head."""
SUMS = {
    "gemma2": "norms 'around' the output of heads or MLP",
    "olmo2": "norms 'after' the output of heads or MLP",
    "olmoe": "a norm over the queries of all heads together",
    "deepseek_v2": "no hook point 'q'",
    "mamba2": "a mixer of kind 'recurrence'",
    "jamba": "a mixer of kind",
    "qwen3_next": "a mixer of kind",
}


def save(folder, family, seed):
    make = save_random_model if family in FAMILIES else save_random_hybrid
    make(folder, family, seed, tokenizer=False)
    return Model.from_pretrained(folder)


def draw(model, count=2, length=11):
    rng = np.random.default_rng(0)
    rows = rng.integers(2, model.config.vocab_size - 1, (2, count, length)).tolist()
    return tuple(Pair(tuple(clean), tuple(other), KL()) for clean, other in zip(*rows, strict=True))


@pytest.mark.parametrize("family", ADDING)
def test_edges_by_themselves_are_circuits_without_them_and_everything_is_the_model(family, tmp_path):
    """Two ways to the same numbers: a change of the clean run, and a pass in which every destination reads a
    stream of its own."""
    model = save(tmp_path, family, 1)
    pairs = draw(model)
    layout = checked_layout(pairs, "corrupted", model.config)
    whole = Circuit.whole(layout)
    effects = EdgeEffects(pairs=pairs)
    found = effects.dataset(model, effects.cells(model.config)[0], ())["effect"].values[0]
    names = random.Random(family).sample(whole.edges, min(30, len(whole)))
    masks = [(whole - Circuit.of(layout, [name])).chosen for name in names]
    runs = CircuitRuns(model, layout, pairs, "corrupted")
    values = runs.values(np.stack([whole.chosen, (~whole).chosen, *masks]))
    assert np.abs(values[0]).max() < 1e-6
    logits = model.forward([list(pair.clean) for pair in pairs]).logits[:, -1].double().numpy()
    other = model.forward([list(pair.corrupted) for pair in pairs]).logits[:, -1].double().numpy()
    wanted = [pairs[0].metric.value(*each) for each in zip(other, logits, strict=True)]
    np.testing.assert_allclose(values[1], wanted, rtol=1e-4, atol=1e-6)
    single = [found[tuple(np.argwhere(layout.chosen([name]))[0])] for name in names]
    np.testing.assert_allclose(single, values[2:, 0], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_neox", "bloom", "starcoder2"])
def test_gradients_are_those_of_small_changes_of_single_edges(family, tmp_path):
    """Against central differences of the exact passes, in float64. The reference's norms and softmax round to
    float32 all the same, which leaves 1e-3 of the largest. Experts are left out: a router that chooses others
    within the step has no difference to take."""
    save(tmp_path, family, 1)
    model = Model.from_pretrained(tmp_path, dtype="float64")
    pairs = draw(model, 1, 7)
    layout, network = checked_layout(pairs, "corrupted", model.config), network_of(model)
    (batch,) = batches(model, layout, pairs, "corrupted")
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(model.config.vocab_size, generator=generator, dtype=torch.float64)
    change = torch.randn(batch.change.shape[1:], generator=generator, dtype=torch.float64)
    estimated, exact = np.zeros(layout.edges.shape), np.zeros(layout.edges.shape)
    with torch.no_grad():
        for columns, gradient in cotangents(network, layout, batch.clean.streams, along.expand_as):
            count = layout.read[columns][0]
            estimated[:count, columns] = torch.einsum("spd,cpd->sc", change[:count], gradient[0]).numpy()
        step = 3e-3
        for sign in (1, -1):
            for sources, destinations, logits in changed_edges(
                network, layout, batch.clean, sign * step * change, Logits(), memory=1 << 26
            ):
                exact[sources.numpy(), destinations.numpy()] += sign * (logits @ along).numpy() / (2 * step)
    assert np.abs(estimated - exact).max() <= 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("family", SUMS)
def test_what_is_no_sum_is_refused_in_one_line(family, tmp_path):
    make = save_random_model if family in FAMILIES else save_random_hybrid
    make(tmp_path, family, 1, tokenizer=False)
    config = Model.from_pretrained(tmp_path).config
    with pytest.raises(
        ConfigError, match=rf"found {SUMS[family]}.* in layer \d of \w+; patch whole activations instead"
    ) as caught:
        Layout.of(config)
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_is_refused(tmp_path):
    save_random_rwkv(tmp_path, "rwkv7", 0)
    model = Model.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="found a mixer of kind 'recurrence' in layer 0"):
        EdgeScores(pairs=draw(model)).cells(model.config)
