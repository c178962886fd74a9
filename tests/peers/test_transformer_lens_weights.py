"""Composition scores, circuits as factored matrices and folded weights are those of TransformerLens.

To run these, see test_transformer_lens_patching.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from mizarr import Model
from mizarr.stages.weights.circuits import ov_circuit, qk_circuit
from mizarr.stages.weights.composition import MODES, composition_scores
from mizarr.stages.weights.folded import FoldedMatrices

from ..stages.forward.random_hybrids import save_random_hybrid
from ..stages.forward.random_models import FAMILIES, save_random_model
from ..stages.weights.test_matrices import IDS, literal_pass, matrices
from .test_transformer_lens_gradients import AS_THE_BRIDGE, bridge_of

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
"""Of the largest: theirs are float32, ours float64 where squares are summed."""
CHOSEN = ("gpt2", "llama", "qwen2", "gpt_neox", "opt", "gemma")
PASSED = ("gpt2", "llama", "opt")
"""Whose passes are written out in numpy."""


def near(found, expected):
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max() + 1e-6


@pytest.fixture(params=CHOSEN)
def both(request, tmp_path):
    """A random model's matrices, and the bridge to the same."""
    make = save_random_model if request.param in FAMILIES else save_random_hybrid
    make(tmp_path, request.param, 2, **AS_THE_BRIDGE.get(request.param, {}))
    return request.param, matrices(tmp_path), bridge_of(tmp_path)


def test_composition_scores_are_theirs(both):
    _, weights, bridge = both
    found = composition_scores(weights=weights, controls=0)["score"]
    for mode in MODES:
        theirs = bridge.all_composition_scores(mode).scores.detach().numpy()
        near(found.sel(mode=mode).fillna(0.0), theirs)
        assert theirs.max() > 0


def test_circuits_have_their_singular_values_eigenvalues_and_norms(both):
    _, weights, bridge = both
    for layer in range(weights.config.num_layers):
        for head in range(weights.config.heads_of(layer).num_attention_heads):
            pairs = (
                (ov_circuit(weights, layer, head), bridge.OV[layer, head]),
                (qk_circuit(weights, layer, head), bridge.QK[layer, head]),
            )
            for ours, theirs in pairs:
                near(ours.left @ ours.right, theirs.AB.detach())
                near(ours.singular_values, theirs.S.detach())
                near(ours.frobenius_norm, theirs.norm().detach())
                found, expected = ours.eigenvalues, theirs.eigenvalues.detach().numpy()
                near(np.sort(np.abs(found)), np.sort(np.abs(expected)))
                near(found.sum().real, expected.sum().real)


def test_folded_weights_and_what_they_give_are_theirs(both, tmp_path):
    """Norms, value biases and means folded in, as it is done when a HookedTransformer is loaded."""
    import torch

    family, weights, bridge = both
    folded, config = FoldedMatrices(weights), weights.config
    bridge.enable_compatibility_mode(disable_warnings=True)
    logits = bridge(torch.tensor([IDS])).detach()[0]
    named = {name: getattr(bridge, f"W_{name.upper()}").detach().numpy() for name in "qkvo"}
    for layer in range(config.num_layers):
        heads = config.heads_of(layer)
        for head in range(heads.num_attention_heads):
            shared = {
                "q": head,
                "o": head,
                "k": head // heads.queries_per_key,
                "v": head // heads.queries_per_key,
            }
            for part in "qkv":
                near(folded.projection(part, layer, head).matrix, _of(named[part], layer, shared[part], head))
            near(folded.output(layer, head), named["o"][layer, head])
    near(folded.unembedding().matrix, bridge.W_U.detach())
    near(folded.unembedding().bias, bridge.b_U.detach())
    # The bridge multiplies Gemma's embeddings as it runs; here they are what enters the stream.
    scale = config.hidden_size**0.5 if family == "gemma" else 1.0
    near(folded.embedding(), scale * bridge.W_E.detach())
    model = Model.from_pretrained(tmp_path)
    ours = model.forward([IDS]).logits[0].numpy()
    near(logits - logits.mean(-1, keepdim=True), ours - ours.mean(-1, keepdims=True))
    if family in PASSED:
        near(literal_pass(model, folded), logits - logits.mean(-1, keepdim=True))


def _of(stacked, layer, shared, head):
    """[hidden, d_head] of a head; keys and values are stacked once, or once for each head that reads them."""
    return stacked[layer, head if stacked.shape[1] > head and stacked.shape[1] > shared else shared]
