"""Head detection agrees with TransformerLens' `detect_head` on the same random weights.

Llama and Qwen 2, several prompts and one, every named pattern and one of our own. Both round the measure
"abs" to three digits. To run these, see test_transformer_lens_patching.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mizarr
from mizarr.stages.attention.head_detection import KINDS, detect_head, detection_pattern

from ..stages.forward.random_models import save_random_model

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-4
ROWS = (
    (0, 7, 42, 99, 5, 7, 42, 99, 5, 7, 7, 42),
    (0, 60, 13, 60, 60, 13, 8, 8, 8),
    (0, 11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13, 14),
)
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
PLAIN = {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS = {
    "llama": {"attention_bias": False, "mlp_bias": False, "head_dim": 8},
    "qwen2": {"use_sliding_window": False},
}


class Lens:
    """A TransformerLens model that takes texts of ids, "0 7 42": detect_head starts from text."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        self.torch = torch
        self.bridge = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
        self.bridge.eval()
        cfg = self.bridge.cfg
        self.cfg = SimpleNamespace(
            device="cpu", dtype=torch.float32, n_ctx=64, n_layers=cfg.n_layers, n_heads=cfg.n_heads
        )

    def to_tokens(self, texts):
        texts = [texts] if isinstance(texts, str) else texts
        rows = [[int(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        return self.torch.tensor([row + [0] * (longest - len(row)) for row in rows])

    def run_with_cache(self, tokens, **options):
        with self.torch.no_grad():
            return self.bridge.run_with_cache(tokens, **options)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The patterns of all rows as we store them, and the model as TransformerLens runs it."""
    pytest.importorskip("transformer_lens", exc_type=ImportError)
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(folder, request.param, 3, **(PLAIN | SIZES | MODELS[request.param]))
    store = mizarr.open_store(folder / "store")
    rows = [list(row) for row in ROWS]
    states = mizarr.capture(str(folder), rows, "blocks.*.attn.hook_pattern", store=store, progress=False)
    return states, Lens(folder)


def texts(rows=ROWS) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def compare(found, expected, *, spread: float = 1e-3) -> None:
    theirs = expected.numpy()
    difference = float(np.abs(found.values - theirs).max())
    print(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: max |difference| {difference:.1e}")
    assert float(np.ptp(theirs)) > spread
    assert difference <= TOLERANCE


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_named_heads_of_several_prompts(kind, bos, current, measure, pair):
    from transformer_lens.head_detector import detect_head as theirs

    states, lens = pair
    asked = {"exclude_bos": bos, "exclude_current_token": current, "error_measure": measure}
    compare(detect_head(states, kind, **asked), theirs(lens, texts(), kind, **asked))


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("exclude", [False, True])
def test_a_pattern_of_ones_own(exclude, measure, pair):
    from transformer_lens.head_detector import detect_head as theirs

    states, lens = pair
    wanted = np.tril(np.random.default_rng(0).random((len(ROWS[0]),) * 2)).astype(np.float32)
    asked = {"exclude_bos": exclude, "exclude_current_token": exclude, "error_measure": measure}
    found = detect_head(states.mi.prompts([0]), wanted, **asked)
    compare(found, theirs(lens, texts()[0], lens.torch.from_numpy(wanted), **asked))


@pytest.mark.parametrize("heads", [[(0, 1), (2, 3), (2, 0)], {1: [0, 2]}])
def test_selected_heads(heads, pair):
    from transformer_lens.head_detector import detect_head as theirs

    states, lens = pair
    compare(detect_head(states, "induction_head", heads), theirs(lens, texts(), "induction_head", heads))


@pytest.mark.parametrize("kind", KINDS)
def test_detection_patterns(kind, pair):
    from transformer_lens import head_detector

    _, lens = pair
    make = getattr(head_detector, f"get_{kind}_detection_pattern")
    for text, row in zip(texts(), ROWS, strict=True):
        np.testing.assert_array_equal(detection_pattern(kind, row), make(lens.to_tokens(text)))
