"""Activation patching agrees with TransformerLens on the same random Llama.

TransformerLens does not install beside what the other tests need; these run where it is:

    python3 -m venv peers; peers/bin/pip install torch==2.13.0 transformer-lens==4.3.0 pytest … and mizarr
    peers/bin/python -m pytest tests/peers
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.grids.patching import (
    ActivationPatching,
    block_every,
    head_all_pos_every,
    head_by_pos_every,
)
from mizarr.stages.causal.grids.patching_metrics import LogitDifference

from ..stages.forward.random_models import save_random_model

pytestmark = pytest.mark.filterwarnings("ignore")

CLEAN, CORRUPTED = (0, 7, 42, 99, 5, 13, 60), (0, 7, 250, 31, 5, 13, 60)
CORRECT, WRONG = 17, 200
TOLERANCE = 1e-4
"""Of logits; both compute in float32, in another order."""


class Peer:
    """The random Llama in TransformerLens, with its patching functions."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("transformer_lens", exc_type=ImportError)
        import torch
        from transformer_lens import patching
        from transformer_lens.model_bridge import TransformerBridge

        self.folder, self.patching, self.torch = folder, patching, torch
        self.model = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
        self.model.eval()
        with torch.no_grad():
            _, self.cache = self.model.run_with_cache(torch.tensor([CLEAN]))

    def grid(self, name: str) -> np.ndarray:
        """What `transformer_lens.patching.get_act_patch_<name>` gives."""
        with self.torch.no_grad():
            function = getattr(self.patching, f"get_act_patch_{name}")
            corrupted = self.torch.tensor([CORRUPTED])
            return function(self.model, corrupted, self.cache, self.metric).detach().cpu().numpy()

    @staticmethod
    def metric(logits):
        return logits[0, -1, CORRECT] - logits[0, -1, WRONG]


@pytest.fixture(scope="module", params=[4, 2], ids=["multi-head", "grouped-query"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """A Llama whose four heads have keys and values of their own, and one where two heads share them."""
    pytest.importorskip("transformer_lens", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("llama")
    axes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": request.param}
    plain = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    save_random_model(folder, "llama", 3, hidden_size=32, head_dim=8, **axes, **plain, **rope)
    return Peer(folder)


def ours(experiment: ActivationPatching, peer: Peer, where: Path):
    node = experiment.on(str(peer.folder))
    store = mizarr.open_store(where)
    run(node, store)
    return node.open(store)["logit_difference"].load()


def compare(found, expected: np.ndarray) -> None:
    """Within tolerance, on a grid that is far from constant; `pytest -rP` shows the differences."""
    difference = float(np.abs(found - expected).max())
    print(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: max |difference| {difference:.1e}")
    assert float(np.ptp(expected)) > 1e-2
    assert difference <= TOLERANCE


GRIDS = [
    ("resid_pre", "resid_pre", "position"),
    ("resid_mid", "resid_mid", "position"),
    ("attn_out", "attn_out", "position"),
    ("mlp_out", "mlp_out", "position"),
    ("attn_head_out_by_pos", "z", "head_position"),
    ("attn_head_out_all_pos", "z", "head"),
    ("attn_head_q_all_pos", "q", "head"),
    ("attn_head_k_by_pos", "k", "head_position"),
    ("attn_head_v_by_pos", "v", "head_position"),
    ("attn_head_pattern_all_pos", "pattern", "head"),
    ("attn_head_pattern_by_pos", "pattern", "head_position"),
    ("attn_head_pattern_dest_src_pos", "pattern", "edge"),
]


@pytest.mark.parametrize(("name", "kind", "over"), GRIDS)
def test_a_grid_agrees(name, kind, over, peer, tmp_path):
    metrics = (LogitDifference(CORRECT, WRONG),)
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": (kind,), "over": over, "metrics": metrics}
    found = ours(ActivationPatching(**given), peer, tmp_path).values
    expected = peer.grid(name)
    if over == "head_position" and expected.shape == found.transpose(0, 2, 1).shape:
        found = found.transpose(0, 2, 1)  # theirs is [layer, position, head]
    compare(found, expected)


@pytest.mark.parametrize(
    ("name", "make", "order"),
    [
        ("block_every", block_every, ("kind", "layer", "position")),
        ("attn_head_all_pos_every", head_all_pos_every, ("kind", "layer", "head")),
        ("attn_head_by_pos_every", head_by_pos_every, ("kind", "layer", "position", "head")),
    ],
)
def test_a_bundle_agrees(name, make, order, peer, tmp_path):
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "metrics": (LogitDifference(CORRECT, WRONG),)}
    found = ours(make(**given), peer, tmp_path).transpose(*order)
    # Heads that grouped-query attention does not have are NaN here, zero there.
    compare(found.fillna(0).values, peer.grid(name))
