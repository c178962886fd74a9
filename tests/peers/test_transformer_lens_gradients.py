"""Attribution patching is that of TransformerLens' tutorial, and hook points hold what its bridge's hold.

To run these, see test_transformer_lens_patching.py. The tutorial (Nanda, Attribution Patching) keeps what
stands at every hook point of the clean run and of the corrupted one, and the gradient of the metric in the
corrupted one; an estimate is the sum of (clean - corrupted) * gradient over what is patched together.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.grids.patching_metrics import LogitDifference

from ..stages.forward.random_hybrids import save_random_hybrid
from ..stages.forward.random_models import FAMILIES, save_random_model

pytestmark = pytest.mark.filterwarnings("ignore")

CLEAN, CORRUPTED = (0, 7, 42, 99, 5, 13, 60), (0, 7, 250, 31, 5, 13, 60)
CORRECT, WRONG = 17, 200
SHARED = (
    *("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out"),
    *("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "attn.hook_pattern"),
)
HEADED = ("q", "k", "v", "z")
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BRIDGED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"),
    *("gpt2", "gpt_neox", "gptj", "opt", "phi", "bloom", "falcon"),
)
AS_THE_BRIDGE = {"gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}}
"""What the bridge takes for granted: where a configuration sets these otherwise, its patterns and logits are
not those of transformers."""
NORMED = {"qwen3": ("q", "k")}
"""Where the bridge's point stands before a norm and ours behind it, as attention takes it."""


def bridge_of(folder):
    pytest.importorskip("transformer_lens", exc_type=ImportError)
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    found = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
    return found.eval()


def tutorial(bridge, kind):
    """(clean - corrupted) * gradient at a hook point of every layer, [layer, position, …]."""
    import torch

    places = [f"blocks.{layer}.{kind}" for layer in range(bridge.cfg.n_layers)]
    kept = []

    def keep(way, x, hook):
        kept.append((way, x.detach().clone()))

    with torch.no_grad():
        _, clean = bridge.run_with_cache(torch.tensor([CLEAN]))
    hooks = [[(place, partial(keep, way)) for place in places] for way in ("forward", "back")]
    with torch.enable_grad(), bridge.hooks(fwd_hooks=hooks[0], bwd_hooks=hooks[1]):
        last = bridge(torch.tensor([CORRUPTED]))[0, -1]
        (last[CORRECT] - last[WRONG]).backward()
    state = [x for way, x in kept if way == "forward"]
    slope = [x for way, x in kept if way == "back"][::-1]
    products = [
        ((clean[place] - x) * gradient)[0] for place, x, gradient in zip(places, state, slope, strict=True)
    ]
    return torch.stack(products).numpy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformer_lens", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama", 3, **SIZES, **PLAIN)
    return folder, bridge_of(folder)


@pytest.mark.parametrize(
    ("kind", "over", "summed"),
    [
        ("resid_pre", "position", (2,)),
        ("attn_out", "position", (2,)),
        ("mlp_out", "position", (2,)),
        ("z", "head", (1, 3)),
        ("q", "head", (1, 3)),
        ("k", "head", (1, 3)),
        ("v", "head", (1, 3)),
        ("z", "head_position", (3,)),
    ],
)
def test_estimates_are_those_of_the_tutorial(kind, over, summed, llama, tmp_path):
    folder, bridge = llama
    node = AttributionPatching(
        clean=CLEAN,
        corrupted=CORRUPTED,
        kinds=(kind,),
        over=over,
        metrics=(LogitDifference(CORRECT, WRONG),),
    ).on(str(folder))
    store = mizarr.open_store(tmp_path)
    run(node, store)
    found = node.open(store).load()
    base = found["unpatched"].sel(run="corrupted").squeeze(drop=True)
    ours = (found["logit_difference"] - base).squeeze(drop=True)
    ours = ours.rename({"kv_head": "head"}) if "kv_head" in ours.dims else ours
    wanted = tutorial(bridge, f"attn.hook_{kind}" if kind in HEADED else f"hook_{kind}").sum(summed)
    dims = ("layer", *({"position": ("position",), "head": ("head",)}.get(over, ("position", "head"))))
    difference = np.abs(ours.transpose(*dims).values - wanted).max()
    print(f"{kind} by {over}: {difference / np.abs(wanted).max():.1e} of scale")
    assert np.abs(wanted).max() > 1e-2
    assert difference <= 1e-5 * max(np.abs(wanted).max(), 1.0)


@pytest.mark.parametrize("family", BRIDGED)
def test_hook_points_hold_what_the_bridge_has_there(family, tmp_path):
    """Every point both have, of one prompt; `pytest -rP` shows the worst, and what the bridge lacks."""
    pytest.importorskip("transformer_lens", exc_type=ImportError)
    import torch

    make = save_random_model if family in FAMILIES else save_random_hybrid
    make(tmp_path, family, 1, **AS_THE_BRIDGE.get(family, {}))
    bridge = bridge_of(tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    points = [
        point
        for point in model.config.hook_points
        if str(point).startswith("blocks.") and str(point).partition(".")[2].partition(".")[2] in SHARED
    ]
    spec = mizarr.HookSpec()
    for point in points:
        spec = spec.capture(point)
    cache = model.forward(list(CLEAN), spec)
    with torch.no_grad():
        logits, theirs = bridge.run_with_cache(torch.tensor([CLEAN]))
    found, missing = {"logits": compared(cache.logits, logits)}, []
    for point in points:
        own = cache[point].transpose(1, 2) if point.kind in HEADED else cache[point]
        if point.kind in NORMED.get(family, ()):
            continue
        if str(point) in theirs:
            found[str(point)] = compared(own, theirs[str(point)].reshape(own.shape))
        else:
            missing.append(str(point))
    worst = max(found, key=found.get)
    print(f"{family}: worst {found[worst]:.1e} of scale at {worst} of {len(found)}; not there: {missing}")
    assert len(found) > 1
    assert found[worst] <= 1e-4


def compared(own, other):
    """The largest difference over the largest entry."""
    return float((own - other).abs().max() / other.abs().max())
